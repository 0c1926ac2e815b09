"""DeepSpeed: `OffloadEngine` runs its configs and scripts, and `finetune` can train with it."""
