"""Streams that really run concurrently, without a GPU: each stream is a thread that does queued work late.

The compute stream is the calling thread: `tests/happens_before.py` checks the waits that order its work. A wait for an
event, on the device or on the host, ends when the event is reached, as on CUDA.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from offloadkit.device import streams
from offloadkit.device.streams import CopyStream, Event, Pairs, Stream


class LateEvent(Event):
    """Reached when the stream's thread comes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def done(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        if not self.reached.wait(60):
            raise RuntimeError("waited for a minute for an event that is never reached")


class LateStream(Stream):
    """Works on a private thread; every fifth operation is late by up to `longest` seconds."""

    def __init__(self, simulation: Simulation, longest: float) -> None:
        self.longest = longest
        self._simulation, self._draw = simulation, random.Random(len(simulation.streams))
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._simulation.num_operations += 1
            if self._draw.random() < 0.2:
                time.sleep(self._draw.random() * self.longest)
            try:
                job()
            except BaseException as error:
                self._simulation.errors.append(error)

    def close(self) -> None:
        self._jobs.put(None)

    def copy(self, pairs: Pairs) -> None:
        pairs = list(pairs)
        self._jobs.put(lambda: Stream.copy(self, pairs))

    def run(self, work: Callable[[], object]) -> None:
        self._jobs.put(work)

    def record(self, timing: bool = False) -> Event:
        event = LateEvent()
        self._jobs.put(event.reached.set)
        return event

    def wait(self, event: Event) -> None:
        self._jobs.put(event.synchronize)

    def synchronize(self) -> None:
        self.record().synchronize()


class _Compute(Stream):
    """The calling thread."""

    def wait(self, event: Event) -> None:
        event.synchronize()


class Simulation:
    """The CPU's streams while it is open.

    Attributes:
        errors: errors raised on the streams' threads.
    """

    def __init__(self, *, seed: int, longest: float) -> None:
        """Delays are drawn from `seed`.

        Args:
            longest: longest delay in seconds; one stream in three has none, one in three ten times that.
        """
        self._draw, self._longest = random.Random(seed), longest
        self._compute = _Compute()
        self.streams: list[LateStream] = []
        self.num_operations = 0
        self.errors: list[BaseException] = []

    def stream(self, device: torch.device, urgent: bool) -> Stream:
        self.streams.append(LateStream(self, self._longest * self._draw.choice((0, 1, 10))))
        return self.streams[-1]

    def compute(self, device: torch.device) -> Stream:
        return self._compute

    @contextmanager
    def running(self) -> Iterator[Simulation]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(streams.backends, "cpu", self)
            try:
                yield self
            finally:
                for stream in self.streams:
                    stream.close()
        assert self.errors == []

    @staticmethod
    def delay(stream: CopyStream, longest: float) -> None:
        """From now on every fifth operation of `stream` is late by up to `longest` seconds."""
        late = stream.device_stream
        assert isinstance(late, LateStream)
        late.longest = longest
