"""`Watch`: notices at once that another rank has ended, whatever the main thread is doing.

The ranks stand in a ring. A thread of each waits for a word from the rank after it, in a gloo group of its own. The
word comes when that rank closes its engine. If its process dies, the system closes its connections, and gloo raises an
error here. Whoever learns of a rank that failed tells the rank before it, so all know within moments. There are no
heartbeats: a rank that is slow is never taken for dead.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from offloadkit.threads import Thread

_FOREVER = timedelta(days=365)
GRACE_SECONDS = 5.0
"""So long a rank may take to find out by itself that another one has ended."""
_NEWS_SECONDS = 0.3
"""So long an operation that fails waits for the news of who was lost."""
_IN_ORDER = -1
"""The word of a rank that closes its engine in good order; any other word is the number of a rank that failed."""

_NO_FILE = (OSError, ValueError, RuntimeError, AttributeError)
"""What `faulthandler` raises where stderr is no file, as in a notebook."""


class Watch:
    """The thread of one rank.

    Attributes:
        lost: a rank that has died or failed; None while none is known.
    """

    def __init__(self, rank: int, size: int, group: Any, give_up: Callable[[], None]) -> None:
        """
        Args:
            group: a gloo group of all ranks that nobody else uses.
            give_up: ends operations that wait for the lost rank. It is called on the thread, if this rank has not
                closed its engine some seconds after the loss; all stacks are on stderr by then.
        """
        self.lost: int | None = None
        self._rank, self._before, self._after = rank, (rank - 1) % size, (rank + 1) % size
        self._group, self._give_up = group, give_up
        self._left, self._noticed = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._has_told = False
        if not faulthandler.is_enabled():
            with suppress(*_NO_FILE):
                faulthandler.enable()  # NCCL's own watchdog aborts the process: this shows what each thread was doing
        self._thread = Thread(target=self._wait, name="offloadkit-watch", daemon=True)
        self._thread.start()
        _forget_groups()

    def who_is_lost(self) -> int | None:
        """`lost`, for an operation that has failed: the news may come a moment later."""
        self._noticed.wait(_NEWS_SECONDS)
        return self.lost

    def fail(self) -> None:
        """Tell the others that this rank has failed, or has found another one to."""
        self._tell(self._rank if self.lost is None else self.lost)

    def leave(self) -> None:
        """This rank closes its engine in good order, if nothing else was told."""
        self._left.set()
        self._tell(_IN_ORDER)
        _closed.append((self._thread, self._group))

    def _tell(self, word: int) -> None:
        with self._lock:
            if self._has_told:
                return
            self._has_told = True
        with suppress(RuntimeError):  # nobody is there
            # Not by dist.send, which knows no group any more where the program has destroyed all.
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
        except RuntimeError:  # its connection is closed
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


_closed: list[tuple[Thread, Any]] = []
"""Of closed engines: threads, which end when the next rank has closed its engine too, and their groups."""


def _forget_groups() -> None:
    """Close the connections of those whose threads have ended, and end gloo's own threads. For the main thread."""
    for thread, group in [each for each in _closed if not each[0].is_alive()]:
        _closed.remove((thread, group))
        with suppress(ValueError):  # the program has destroyed all groups
            dist.destroy_process_group(group)
