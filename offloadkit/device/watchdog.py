"""Timeouts for waits of the host: a hang becomes an error with the stacks of all threads.

Time counts in slices without progress, so suspending the machine or stopping the process does not count. Every layer
step resets the count, so a long update is not a hang.
"""

from __future__ import annotations

import _thread
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offloadkit.errors import HangError
from offloadkit.facts.units import format_seconds

LIMIT_SECONDS = 1800.0
"""Limit without progress: longer than compiling or a slow disk takes. The timeout of the ranks is added."""
SLICE_SECONDS = 5.0


@dataclass
class _State:
    """State of this process.

    Attributes:
        hung_at: `progress` when a wait timed out. Until `progress` changes, later waits time out at once.
        last_checkpoint: the newest checkpoint that any engine saved or loaded.
        ranks_seconds: the longest timeout between ranks.
    """

    progress: int = 0
    hung_at: int = -1
    last_checkpoint: Path | None = None
    ranks_seconds: float = 0.0


state = _State()


def progressed() -> None:
    """Record progress of a thread that another thread may wait for."""
    state.progress += 1


def wait(event: threading.Event, what: str) -> None:
    """Wait until `event` is set; `what` describes it in the error message.

    Raises:
        HangError: no progress for the time limit.
    """
    if not event.is_set():
        until(event.wait, what)


def until(arrives: Callable[[float], bool], what: str) -> None:
    """Call `arrives(seconds)`, which waits at most that long, until it returns True.

    Raises:
        HangError: no progress for the time limit.
    """
    seconds, seen = 0.0, state.progress
    while not arrives(_slice()):
        seconds += _slice()
        if state.progress != seen:
            seconds, seen = 0.0, state.progress
        elif seconds >= _limit() or state.hung_at == seen:
            state.hung_at = seen
            raise HangError(f"{_in_words(what)}\n{stacks()}")


@contextmanager
def uninterruptible(what: str) -> Iterator[None]:
    """Mark the body as a call that cannot be interrupted. After the time limit without progress, the stacks of all
    threads are printed and the process is aborted.
    """
    thread = threading.get_ident()
    _start_watching()
    _calls[thread] = _Call(what, state.progress)
    try:
        yield
    finally:
        _calls.pop(thread, None)


def in_words(last_checkpoint: Path | None) -> str:
    """A sentence about the last checkpoint, for the end of an error message."""
    if last_checkpoint is None:
        return "No checkpoint was saved or loaded yet"
    return f"The last checkpoint is {str(last_checkpoint)!r}"


def stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)!r}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)


@dataclass
class _Call:
    what: str
    progress: int
    seconds: float = 0.0


_calls: dict[int, _Call] = {}
_lock = threading.Lock()
_watching: int | None = None
"""Process id of the watching thread. A forked process must start another thread."""


def _start_watching() -> None:
    global _watching
    if _watching == os.getpid():
        return
    with _lock:
        if _watching != os.getpid():
            _watching = os.getpid()
            _calls.clear()  # calls of the parent process before the fork
            # A raw thread, because it lives as long as the process and must not appear in `threading.enumerate()`.
            _thread.start_new_thread(_watch, ())


def _watch() -> None:
    while True:
        time.sleep(_slice())
        for call in list(_calls.values()):
            if call.progress != state.progress:
                call.progress, call.seconds = state.progress, 0.0
            call.seconds += _slice()
            if call.seconds > _limit():
                _abort(call.what)


def _abort(what: str) -> None:
    print(f"offloadkit: {_in_words(what)}\nThe process is aborted: this wait cannot end.", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    os.abort()


def _in_words(what: str) -> str:
    return (
        f"waited {format_seconds(_limit())} for {what}, and nothing has moved: it hangs, or its thread has ended. "
        f"{in_words(state.last_checkpoint)}: restart the process and resume from a checkpoint. The stacks below show "
        "where each thread is"
    )


def _limit() -> float:
    return LIMIT_SECONDS + state.ranks_seconds


def _slice() -> float:
    return min(SLICE_SECONDS, _limit())
