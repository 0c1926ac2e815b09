"""Notes whatever makes a thread wait for the device: calls of ours and of torch's, and torch's operations."""

from __future__ import annotations

import functools
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from offloadkit.device.streams import CopyStream, CudaEvent, Event

_CALLS: list[tuple[str, Any]] = [
    ("Event", Event),
    ("Event", CudaEvent),
    ("CopyStream", CopyStream),
    ("torch.cuda", torch.cuda),
    ("torch.cuda.Stream", torch.cuda.Stream),
    ("torch.cuda.Event", torch.cuda.Event),
]
"""Whose `synchronize` is noted."""
_WORDS = "called a synchronizing CUDA operation"
"""Of torch's sync debug mode."""


@dataclass(frozen=True)
class Synchronisation:
    """One call that waited.

    Attributes:
        thread: the name of the thread that made it.
        stack: where from, innermost last.
    """

    what: str
    thread: str
    stack: str

    def __repr__(self) -> str:
        return f"{self.what} on {self.thread}, from\n{self.stack}"


@contextmanager
def synchronisations() -> Iterator[list[Synchronisation]]:
    """While it is open, all that waits for the device, on any thread, is added to the list.

    With a GPU torch's operations too (`.item()`, a copy from memory that is not pinned): the sync debug mode, which is
    the whole process's, makes each of them a warning, which is shown on the thread that waited.
    """
    found: list[Synchronisation] = []

    def note(what: str) -> None:
        stack = "".join(traceback.format_list(traceback.extract_stack()[:-2]))
        found.append(Synchronisation(what, threading.current_thread().name, stack))

    def noted(real: Callable[..., Any], what: str) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, **options: Any) -> Any:
            note(what)
            return real(*args, **options)

        return call

    show = warnings.showwarning

    def shown(message: Warning | str, *args: Any, **options: Any) -> None:
        if _WORDS in str(message):
            note("a torch operation")
        else:
            show(message, *args, **options)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        for name, owner in _CALLS:
            patch.setattr(owner, "synchronize", noted(owner.synchronize, f"{name}.synchronize"))
        warnings.filterwarnings("always", message=_WORDS)
        warnings.showwarning = shown
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")


def of_the_callers(found: Sequence[Synchronisation]) -> list[Synchronisation]:
    """Those of the main thread and of autograd's threads, which run backward for it; the engine's own may wait."""
    return [each for each in found if not each.thread.startswith("offloadkit-")]
