"""Copies of a model whose engine is open: `pickle`, `torch.save(model)` and `copy.deepcopy` get a plain model.

It has the newest weights and no trace of the engine: no hook, no method and no setting of ours. What loads it needs
neither the engine nor this package. Each module gets a `__getstate__` of its own while the engine is open.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from offloadkit.changes import without_claims
from offloadkit.offload.recompute import SWITCHES

_NAME = "__getstate__"
_OURS = __name__.partition(".")[0]


def plain_copies(model: nn.Module) -> Callable[[], None]:
    """Have copies of `model` and its parts be plain ones; returns what ends that.

    Call it before the engine changes the modules: what an attribute was then is what a copy has.
    """
    modules = [module for module in model.modules() if _NAME not in vars(module)]
    for module in modules:
        before = {name: value for name, value in vars(module).items() if name in SWITCHES or callable(value)}
        vars(module)[_NAME] = MethodType(_state(before), module)

    def end() -> None:
        for module in modules:
            vars(module).pop(_NAME, None)

    return end


def _state(before: dict[str, Any]) -> Callable[[nn.Module], Any]:
    """A module's `__getstate__`. `before`: attributes that the engine may change, as they were."""

    def state_of(module: nn.Module) -> Any:
        kind: Any = type(module)
        state = kind.__getstate__(module)
        if not isinstance(state, dict):
            return state
        state = dict(state)
        hooks = [table for name, table in state.items() if name.endswith("_hooks") and isinstance(table, dict)]
        ours = {key for table in hooks for key, hook in table.items() if _is_ours(hook)}
        for name, value in list(state.items()):
            if name == _NAME or name in SWITCHES or _is_ours(value):
                del state[name]
                if name in before and not _is_ours(before[name]):
                    state[name] = before[name]
            elif "_hooks" in name and isinstance(value, dict):
                state[name] = type(value)((key, hook) for key, hook in value.items() if key not in ours)
            elif name == "config":
                state[name] = without_claims(value)
        return state

    return state_of


def _is_ours(value: Any) -> bool:
    """Whether it is a function or method of this package."""
    while isinstance(value, partial | MethodType):
        value = value.func if isinstance(value, partial) else value.__func__
    return callable(value) and str(getattr(value, "__module__", "")).partition(".")[0] == _OURS
