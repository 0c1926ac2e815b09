"""What is computed otherwise while a model trains, told by whoever knows the model's library.

The engine knows no library. `offloadkit/__init__.py` registers who knows one; that module is imported when a model of
the library is first trained or planned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

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
