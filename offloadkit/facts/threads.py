"""Python's threads with a clear error if the system refuses to start one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from offloadkit.errors import ThreadLimitError

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Thread(threading.Thread):
    """A thread whose `start` raises `ThreadLimitError`."""

    def start(self) -> None:
        with _named(self.name):
            super().start()


class ThreadPool(ThreadPoolExecutor):
    """A pool whose `submit` and `map` raise `ThreadLimitError`."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        with _named("one of a pool"):
            return super().submit(fn, *args, **kwargs)


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        raise ThreadLimitError(
            f"the system refuses to start a thread ({name}; this process has {threading.active_count()}): raise its "
            "limits (ulimit -u and -v, or the container's pids limit), or end other programs, and run again"
        ) from error
