"""The key/value cache of HuggingFace models for generation: useless in training, where it also changes rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from offloadkit.changes import claim, unclaimed


def configs_of(model: nn.Module) -> list[Any]:
    """The distinct configs of `model` and its submodules."""
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in found if config is not None}.values())


def caching_configs(model: nn.Module) -> list[Any]:
    """The configs of `model` and its submodules that have `use_cache`."""
    return [config for config in configs_of(model) if hasattr(config, "use_cache")]


@contextmanager
def without_caches(configs: Sequence[Any]) -> Iterator[None]:
    """While open, the key/value cache is off. Restores the configs."""
    with ExitStack() as undo:
        for config in configs:
            if unclaimed(config, "use_cache"):  # another model with this config may be in its forward
                undo.callback(claim(config, "use_cache", False))
        yield
