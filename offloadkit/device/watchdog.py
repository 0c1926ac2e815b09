"""Waits of the host that end: what hangs becomes an error with the stacks of all threads.

Time is counted in slices during which nothing moved, so a machine that sleeps or a process that is stopped does not
count. Each layer that is stepped begins the count anew: a long update does not count either.
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
from offloadkit.units import format_seconds

LIMIT_SECONDS = 1800.0
"""How long nothing may move: more than compiling or a slow disk take. What ranks wait for each other comes on top."""
SLICE_SECONDS = 5.0


@dataclass
class _State:
    """Of this process.

    Attributes:
        progress: grows whenever a thread of an engine has got on.
        hung_at: `progress` when a wait was given up. Until something moves, later waits are given up at once.
        last_checkpoint: the newest that any engine has saved or loaded.
        ranks_seconds: the longest timeout of ranks that wait for each other.
    """

    progress: int = 0
    hung_at: int = -1
    last_checkpoint: Path | None = None
    ranks_seconds: float = 0.0


state = _State()


def progressed() -> None:
    """A thread on which others may wait has got on."""
    state.progress += 1


def wait(event: threading.Event, what: str) -> None:
    """Wait until `event` is set.

    Args:
        what: is waited for, for the message.

    Raises:
        HangError: nothing has moved for `LIMIT_SECONDS`.
    """
    if not event.is_set():
        until(event.wait, what)


def until(arrives: Callable[[float], bool], what: str) -> None:
    """Call `arrives(seconds)`, which waits for that long at most, until it returns True.

    Raises:
        HangError: nothing has moved for `LIMIT_SECONDS`.
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
    """While it is open, the thread is in a call that nobody can end. After `LIMIT_SECONDS` in which nothing moved, the
    stacks of all threads are printed and the process is aborted."""
    thread = threading.get_ident()
    _start_watching()
    _calls[thread] = _Call(what, state.progress)
    try:
        yield
    finally:
        _calls.pop(thread, None)


def in_words(last_checkpoint: Path | None) -> str:
    """A sentence for the end of an error."""
    if last_checkpoint is None:
        return "No checkpoint was saved or loaded yet"
    return f"The last checkpoint is {str(last_checkpoint)!r}"


def stacks() -> str:
    """What each thread of Python runs now, the newest call last."""
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
"""By thread."""
_lock = threading.Lock()
_watching: int | None = None
"""The process whose thread watches `_calls`: a forked one has none yet."""


def _start_watching() -> None:
    global _watching
    if _watching == os.getpid():
        return
    with _lock:
        if _watching != os.getpid():
            _watching = os.getpid()
            _calls.clear()  # those of the process from which this one was forked
            # None of threading's: it lasts as long as the process, and is no engine's thread for who counts those.
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
        f"waited {format_seconds(_limit())} for {what}, and nothing has moved: it hangs, or its thread has "
        f"ended. {in_words(state.last_checkpoint)}: start the process anew and go on from a checkpoint. The stacks "
        "below say where each thread is"
    )


def _limit() -> float:
    return LIMIT_SECONDS + state.ranks_seconds


def _slice() -> float:
    return min(SLICE_SECONDS, _limit())
