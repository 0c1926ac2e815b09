"""Records every wait for the device: calls of offloadkit and torch, and torch's operations."""

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
"""Classes and modules whose `synchronize` is recorded."""
_WORDS = "called a synchronizing CUDA operation"
"""Message of torch's sync debug mode."""


@dataclass(frozen=True)
class Synchronisation:
    """One call that waited.

    Attributes:
        thread: name of the calling thread.
        stack: call stack, innermost call last.
    """

    what: str
    thread: str
    stack: str

    def __repr__(self) -> str:
        return f"{self.what} on {self.thread}, from\n{self.stack}"


@contextmanager
def synchronisations() -> Iterator[list[Synchronisation]]:
    """While it is open, every wait for the device on any thread is appended to the list.

    With a GPU this includes torch's operations (`.item()`, a copy from unpinned memory): torch's sync debug mode, which
    applies to the whole process, turns each into a warning on the thread that waited.
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
    """Waits of the main thread and of autograd's threads, which run its backward; the engine's own threads may wait."""
    return [each for each in found if not each.thread.startswith("offloadkit-")]
