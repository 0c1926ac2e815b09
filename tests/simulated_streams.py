"""Streams that really run beside the host, without a GPU: each is a thread that does what was queued, late.

The compute stream is the calling thread. Waiting for an event that was not recorded, on the device or on the host,
ends when it is reached, as on CUDA.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from offloadkit.device import streams
from offloadkit.device.streams import CopyStream, Event
from offloadkit.offload import state_ring, states

_current = threading.local()


class Simulation:
    """Replaces the methods of `CopyStream` and `Event`, and lets kernels run on the stream that is current."""

    def __init__(self, patch: pytest.MonkeyPatch, *, seed: int, longest: float) -> None:
        """
        Args:
            longest: seconds that an operation is late, at most; one stream in three is never late, one ten times as
                late.
        """
        self._draw, self._longest = random.Random(seed), longest
        self._queues: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self.num_operations = 0
        self.errors: list[BaseException] = []
        for name in ("copy", "copy_all", "wait", "record", "synchronize", "as_current"):
            patch.setattr(CopyStream, name, self._method(getattr(self, f"_{name}")))
        patch.setattr(Event, "done", lambda event: _flag(event).is_set())
        patch.setattr(Event, "synchronize", lambda event: _reached(event))
        patch.setattr(Event, "delay", lambda event, stream: _reached(event))
        for module in (state_ring, states):
            patch.setattr(module, "optimizer_step", self._kernel(module.optimizer_step))

    @staticmethod
    def delay(stream: CopyStream, longest: float) -> None:
        """From now on every fifth operation of `stream` is late by up to so many seconds."""
        stream.__dict__["longest"] = longest

    def close(self) -> None:
        for jobs in self._queues:
            jobs.put(None)

    @staticmethod
    def _method(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda stream, *args, **options: function(stream, *args, **options)

    def _put(self, stream: CopyStream, job: Callable[[], None]) -> None:
        jobs = stream.__dict__.get("jobs")
        if jobs is None:
            jobs = stream.__dict__.setdefault("jobs", queue.SimpleQueue())
            self._queues.append(jobs)
            stream.__dict__.setdefault("longest", self._longest * self._draw.choice((0, 1, 10)))
            threading.Thread(target=self._work, args=(jobs, stream), daemon=True).start()
        jobs.put(job)

    def _work(self, jobs: queue.SimpleQueue[Callable[[], None] | None], stream: CopyStream) -> None:
        while (job := jobs.get()) is not None:
            self.num_operations += 1
            if self._draw.random() < 0.2:
                time.sleep(self._draw.random() * stream.__dict__["longest"])
            try:
                job()
            except BaseException as error:
                self.errors.append(error)

    def _copy(self, stream: CopyStream, into: torch.Tensor, source: torch.Tensor, *_: Any, **options: Any) -> None:
        self._put(stream, lambda: _move(into, source))

    def _copy_all(
        self, stream: CopyStream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *_: Any, **options: Any
    ) -> Event:
        for into, source in pairs:
            self._copy(stream, into, source)
        return self._record(stream)

    def _wait(self, stream: CopyStream, event: Event) -> None:
        self._put(stream, lambda: _reached(event))

    def _record(self, stream: CopyStream, timing: bool = False) -> Event:
        event = Event(None)
        event.__dict__["reached"] = reached = threading.Event()
        self._put(stream, reached.set)
        return event

    def _synchronize(self, stream: CopyStream) -> None:
        _reached(self._record(stream))

    @contextmanager
    def _as_current(self, stream: CopyStream) -> Iterator[None]:
        _current.stream = stream
        try:
            yield
        finally:
            _current.stream = None

    def _kernel(self, real: Callable[..., None]) -> Callable[..., None]:
        def queued(*args: Any) -> None:
            stream = getattr(_current, "stream", None)
            if stream is None:
                real(*args)
            else:
                self._put(stream, lambda: real(*args))

        return queued


_ALWAYS = threading.Event()
_ALWAYS.set()


def _flag(event: Event) -> threading.Event:
    flag: threading.Event = event.__dict__.get("reached", _ALWAYS)
    return flag


def _reached(event: Event) -> None:
    if not _flag(event).wait(60):
        raise RuntimeError("waited for a minute for an event that is never reached")


def _move(into: torch.Tensor, source: torch.Tensor) -> None:
    streams.ctypes.memmove(into.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
