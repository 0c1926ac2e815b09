"""Activation checkpointing by one switch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from offloadkit.errors import ConfigError
from offloadkit.offload.layers import repeated_blocks


def checkpoint_activations(model: nn.Module) -> Callable[[], None]:
    """Have backward recompute the activations of each repeated block; returns what switches it off again.

    HuggingFace models use their own, non-reentrant; for other modules each repeated block's forward goes through
    `torch.utils.checkpoint`. Random numbers (dropout) are the same in the recomputation.

    Raises:
        ConfigError: the model has no repeated blocks to recompute.
    """
    if getattr(model, "supports_gradient_checkpointing", False):
        return _checkpoint_as_huggingface_does(model)
    blocks = [block for _, block in repeated_blocks(model)]
    if not blocks:
        raise ConfigError(
            f"activation_checkpointing=True, but {type(model).__name__} has no repeated blocks to recompute: "
            "put its layers in an nn.ModuleList, or leave the switch off"
        )
    for block in blocks:
        block.forward = partial(_recomputed, block.forward)

    def restore() -> None:
        for block in blocks:
            del block.forward

    return restore


def _checkpoint_as_huggingface_does(model: Any) -> Callable[[], None]:
    """Newer transformers say activation_checkpointing, older ones gradient_checkpointing."""
    word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    enable, disable = (getattr(model, f"{word}_checkpointing_{end}") for end in ("enable", "disable"))
    enable(**{f"{word}_checkpointing_kwargs": {"use_reentrant": False}})
    switch_off: Callable[[], None] = disable
    return switch_off


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
