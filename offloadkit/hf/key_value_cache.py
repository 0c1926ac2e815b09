"""Whether a model's stacks keep keys and values while they train.

HuggingFace's Trainer says so to the model's own config; T5's decoder has a copy of it, and went on as its config file
said: a run that was resumed, whose checkpoint says otherwise, rounded otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def without_caches(model: nn.Module) -> Callable[[], None]:
    """Have no part of `model` keep any; returns what undoes it."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    changed: list[Any] = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in changed:
        config.use_cache = False

    def undo() -> None:
        for config in changed:
            config.use_cache = True

    return undo
