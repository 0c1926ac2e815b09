"""`Watch` detects at once that another rank has ended, whatever the main thread is doing.

The ranks form a ring. A thread of every rank waits for a message from the next rank, in a separate gloo group. A rank
sends it when it closes its engine; if its process dies, gloo raises an error in the waiting rank. A rank that learns of
a failure tells the previous rank. There are no heartbeats.
"""

from __future__ import annotations

import atexit
import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from offloadkit.facts.threads import Thread

_FOREVER = timedelta(days=365)
GRACE_SECONDS = 5.0
"""Time that a rank has to notice by itself that another rank has ended."""
EXIT_SECONDS = 5.0
"""Longest wait of a process that exits for its watching threads."""
_NEWS_SECONDS = 0.3
"""Time that a failed operation waits to learn which rank was lost."""
_IN_ORDER = -1
"""Message of a rank that closes its engine without failure; any other message is the number of a failed rank."""

_NO_FILE = (OSError, ValueError, RuntimeError, AttributeError)
"""Errors of `faulthandler` if stderr is not a file, as in a notebook."""


class Watch:
    """The watching thread of one rank.

    Attributes:
        lost: a rank that has died or failed; None while none is known.
    """

    def __init__(self, rank: int, size: int, group: Any, give_up: Callable[[], None]) -> None:
        """`group`: a gloo group of all ranks for `Watch` alone.

        `give_up` aborts operations that wait for the lost rank. The thread calls it, after printing all stacks, if this
        rank has not closed its engine `GRACE_SECONDS` after the loss.
        """
        self.lost: int | None = None
        self._rank, self._before, self._after = rank, (rank - 1) % size, (rank + 1) % size
        self._group, self._give_up = group, give_up
        self._left, self._noticed = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._has_told = False
        if not faulthandler.is_enabled():
            with suppress(*_NO_FILE):
                faulthandler.enable()  # NCCL's watchdog aborts the process: the dump then shows all threads
        self._thread = Thread(target=self._wait, name="offloadkit-watch", daemon=True)
        self._thread.start()
        _open.add(self)
        _forget_groups()

    def who_is_lost(self) -> int | None:
        """`lost` after a failed operation, waiting briefly because the news may come later."""
        self._noticed.wait(_NEWS_SECONDS)
        return self.lost

    def fail(self) -> None:
        """Tell the previous rank that this rank, or the known lost rank, has failed."""
        self._tell(self._rank if self.lost is None else self.lost)

    def leave(self) -> None:
        """Announce that this rank closes its engine without failure, unless it has sent a message already."""
        self._end(_IN_ORDER)

    def exit(self) -> None:
        """Tell the previous rank that this process exits with its engine open, and ignore the next rank's end."""
        self._end(self._rank)

    def _end(self, word: int) -> None:
        self._left.set()
        self._tell(word)
        _open.discard(self)
        _closed.append((self._thread, self._group))

    def _tell(self, word: int) -> None:
        with self._lock:
            if self._has_told:
                return
            self._has_told = True
        with suppress(RuntimeError):  # the previous rank has ended
            # dist.send fails if the program has destroyed all groups.
            self._group.send([torch.tensor([word])], self._before, 0).wait()

    def _wait(self) -> None:
        word = torch.tensor([_IN_ORDER])
        try:
            work = dist.irecv(word, self._after, group=self._group)
            assert work is not None
            work.wait(_FOREVER)
            if int(word) == _IN_ORDER:
                return
            lost = int(word)
        except RuntimeError:  # the connection is closed
            lost = self._after
        if self._left.is_set():
            return
        self.lost = lost
        self._noticed.set()
        self.fail()
        if self._left.wait(GRACE_SECONDS):
            return
        print(
            f"rank {self._rank}: rank {lost} has ended, died or failed. This rank waits, or does something else. All "
            "its threads:",
            file=sys.stderr,
            flush=True,
        )
        with suppress(*_NO_FILE):
            faulthandler.dump_traceback(sys.stderr)
        self._give_up()


_open: set[Watch] = set()
_closed: list[tuple[Thread, Any]] = []
"""Threads and groups of closed engines. A thread ends when the next rank has closed its engine too."""


def _forget_groups() -> None:
    """Destroy the groups of finished threads, which also ends gloo's threads. Call it on the main thread."""
    for thread, group in [each for each in _closed if not each[0].is_alive()]:
        _closed.remove((thread, group))
        with suppress(ValueError):  # the program has destroyed all groups
            dist.destroy_process_group(group)


@atexit.register
def _end_threads() -> None:
    """End the watching threads. A thread that returns from gloo while the interpreter shuts down aborts the process."""
    for watch in tuple(_open):
        watch.exit()
    ends = time.monotonic() + EXIT_SECONDS
    for thread, _ in _closed:
        thread.join(max(0.0, ends - time.monotonic()))
