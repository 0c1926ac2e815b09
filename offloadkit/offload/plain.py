"""Copies of a model with an open engine: `pickle`, `torch.save(model)` and `copy.deepcopy` get a plain model.

The copy has the newest weights and nothing of the engine, so loading it does not need this package. While the engine is
open, every module has its own `__getstate__`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from offloadkit.facts.changes import without_claims
from offloadkit.offload.recompute import SWITCHES

_NAME = "__getstate__"
_OURS = __name__.partition(".")[0]


def plain_copies(model: nn.Module) -> Callable[[], None]:
    """Make copies of `model` and its submodules plain; returns a function that undoes this.

    Call it before the engine changes the modules, because copies get the attributes' values of that moment.
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
    """A module's `__getstate__`. `before`: original values of attributes that the engine may change."""

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
    while isinstance(value, partial | MethodType):
        value = value.func if isinstance(value, partial) else value.__func__
    return callable(value) and str(getattr(value, "__module__", "")).partition(".")[0] == _OURS
