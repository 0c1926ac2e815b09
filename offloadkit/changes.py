"""What is computed otherwise while a model trains, told by whoever knows the model's library.

The engine knows no library. `offloadkit/__init__.py` registers who knows one; that module is imported when a model of
the library is first trained or planned.

`claim` sets what several models share, such as a config, and gives it back when the last of them is done.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

    from offloadkit.config import OffloadConfig


class Change(Protocol):
    """Changes what a model computes; returns what undoes it."""

    def __call__(
        self, model: nn.Module, config: OffloadConfig, *, kernels: bool, capability: tuple[int, int] | None = None
    ) -> Callable[[], None]: ...


_of_library: dict[str, Callable[[], Change]] = {}
"""By the name of a library: what imports its `Change`."""


def register(library: str, load: Callable[[], Change]) -> None:
    """Have `load()` called for the change of models that hold a module of `library`."""
    _of_library[library] = load


def changed(
    model: nn.Module, config: OffloadConfig, *, kernels: bool, capability: tuple[int, int] | None = None
) -> Callable[[], None]:
    """Change what `model` computes to what is trained; returns what undoes it.

    Args:
        model: any module, on any device.
        kernels: whether it runs on a GPU, or stands for one that does.
        capability: of that GPU, if it is not the one here.
    """
    undo = ExitStack()
    for library, load in _of_library.items():
        if library in sys.modules and any(_is_of(library, type(module)) for module in model.modules()):
            undo.callback(load()(model, config, kernels=kernels, capability=capability))
    return undo.close


def _is_of(library: str, kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == library for base in kind.__mro__)


# ---- attributes of what models share: two models may have one config -------------------------------------------------


@dataclass
class _Claimed:
    """An attribute that engines have set, and keeps a value until the last of them is done."""

    owner: Any
    before: Any
    values: dict[object, Any] = field(default_factory=dict)
    """By claim, the newest last."""
    plain: Any = None


claims: dict[tuple[int, str], _Claimed] = {}
"""The attributes that are claimed now, by the owner's `id` and the attribute's name."""
_lock = threading.RLock()  # Python may collect an engine that was dropped while this thread has the lock


def claim(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of an object that other models may share; returns what takes the claim back.

    The newest claim holds. When the last is taken back, the attribute is as it was before the first. Where somebody
    else has set it meanwhile, it stays so.
    """
    key, mine = (id(owner), name), object()
    with _lock:
        found = claims.get(key)
        if found is None:
            found = _Claimed(owner, getattr(owner, name))
        found.values[mine] = value
        claims[key] = found  # also where an engine that was collected just now has taken it away
        setattr(owner, name, value)

    def undo() -> None:
        with _lock:
            if mine not in found.values:
                return
            shown = next(reversed(found.values.values()))
            del found.values[mine]
            left = next(reversed(found.values.values()), found.before)
            if getattr(owner, name) == shown:
                setattr(owner, name, left)
            if not found.values:
                claims.pop(key, None)

    return undo


def unclaimed(owner: Any, name: str) -> Any:
    """The attribute's value as it is without the claims."""
    found = claims.get((id(owner), name))
    return getattr(owner, name) if found is None else found.before


def without_claims(owner: Any) -> Any:
    """`owner` itself if nothing of it is claimed, else a copy without the claims: the same one each time."""
    found = [(name, each) for (identity, name), each in list(claims.items()) if identity == id(owner)]
    if not found:
        return owner
    first = found[0][1]
    fresh = deepcopy(owner)
    for name, each in found:
        setattr(fresh, name, each.before)
    if first.plain is None:
        first.plain = fresh
    else:
        vars(first.plain).update(vars(fresh))
    return first.plain
