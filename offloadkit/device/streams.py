"""Copy streams and events, the same words with and without a GPU, and what the compute stream waited for.

On a CUDA device these are CUDA streams and events. On the CPU every operation is done when it is asked for, so that an
event is a mark in time and waiting for it does nothing.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from offloadkit.device import trace

_cuda: Any = torch.cuda  # whose signatures are typed in some releases of torch only


class Event:
    """A recorded point in a stream's work."""

    def __init__(self, stream: torch.cuda.Stream | None, timing: bool = False) -> None:
        self._seconds = time.perf_counter()
        self._event: Any = None
        if stream is not None:
            self._event = _cuda.Event(enable_timing=timing)
            self._event.record(stream)

    def done(self) -> bool:
        """Whether the work before this point is finished; does not wait."""
        return self._event is None or bool(self._event.query())

    def synchronize(self) -> None:
        """Block the calling thread until the work before this point is finished."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        """Device seconds between two finished events recorded with `timing`."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        return float(earlier._event.elapsed_time(self._event)) / 1e3

    def delay(self, stream: torch.cuda.Stream | None) -> None:
        """Let `stream` wait for this point before its next work; the calling thread does not wait."""
        if self._event is not None and stream is not None:
            stream.wait_event(self._event)


class BusyTime:
    """Device seconds between pairs of events of one stream, added up once they are past.

    Attributes:
        last: where the newest pair ended.
    """

    def __init__(self) -> None:
        self.last: Event | None = None
        self._pairs: list[tuple[Event, Event]] = []
        self._seconds = 0.0

    def add(self, began: Event, ended: Event) -> None:
        """Take a pair, recorded with `timing`, after those before."""
        self._pairs.append((began, ended))
        self.last = ended
        if len(self._pairs) % 256 == 0:  # a long window keeps few events alive
            self._fold()

    def done(self) -> bool:
        """Whether all of it is past; does not wait."""
        return not self._pairs or self._pairs[-1][1].done()

    def seconds(self) -> float:
        """What is past."""
        self._fold()
        return self._seconds

    def _fold(self) -> None:
        while self._pairs and self._pairs[0][1].done():
            began, ended = self._pairs.pop(0)
            self._seconds += ended.seconds_since(began)


class CopyStream:
    """A stream for copies in one direction, or for the GPU's steps, beside the compute stream.

    Attributes:
        track: what a trace calls it.
    """

    def __init__(self, device: torch.device, track: str, *, urgent: bool = False) -> None:
        """
        Args:
            urgent: its kernels go before those of other streams that were not begun.
        """
        self.track = track
        priority = -1 if urgent else 0
        self.stream: torch.cuda.Stream | None = _cuda.Stream(device, priority) if device.type == "cuda" else None
        self._busy = BusyTime()

    def wait(self, event: Event) -> None:
        """Later copies start after `event`."""
        event.delay(self.stream)

    def synchronize(self) -> None:
        """Block the calling thread until the copies asked for so far are done: their memory may go."""
        if self.stream is not None:
            self.stream.synchronize()

    def record(self, timing: bool = False) -> Event:
        """Mark the end of the copies asked for so far."""
        return Event(self.stream, timing)

    def as_current(self) -> AbstractContextManager[Any]:
        """While it is open, the calling thread's device work goes to this stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def take_busy(self) -> BusyTime:
        """How long the `timed` copies asked for since the last call take."""
        busy, self._busy = self._busy, BusyTime()
        return busy

    def copy(self, into: torch.Tensor, source: torch.Tensor, name: str = "", *, timed: bool = False) -> None:
        """Copy `source` to `into`: contiguous tensors of one dtype and size.

        Args:
            name: in a trace.
        """
        if timed or trace.active() is not None:
            self.copy_all([(into, source)], name, timed=timed)
        else:
            self._put([(into, source)])

    def copy_all(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], name: str = "", *, timed: bool = True
    ) -> Event:
        """`copy` of (into, source) pairs, timed as one; returns their end."""
        began = self.record(timing=True)
        self._put(pairs)
        ended = self.record(timing=True)
        if timed:
            self._busy.add(began, ended)
        tracing = trace.active()
        if tracing is not None:
            tracing.device(self.track, name, began, ended, sum(into.nbytes for into, _ in pairs))
        return ended

    @contextmanager
    def traced(self, name: str) -> Iterator[None]:
        """What goes to this stream while it is open is a range of a trace."""
        tracing = trace.active()
        began = None if tracing is None else self.record(timing=True)
        yield
        if tracing is not None:
            tracing.device(self.track, name, began, self.record(timing=True))

    def _put(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Without a GPU not by a torch operation: those of a second thread start an OpenMP team of their own, beside
        which the main thread's forward and backward take a third longer."""
        if self.stream is None:
            for into, source in pairs:
                ctypes.memmove(into.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
            return
        with torch.cuda.stream(self.stream):
            for into, source in pairs:
                into.copy_(source, non_blocking=True)


def compute_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which the calling thread's model code runs."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def record_compute(device: torch.device, timing: bool = False) -> Event:
    """Mark the end of the compute stream's work so far."""
    return Event(compute_stream(device), timing)


class Waits:
    """Waits of one accumulation window, by name: "forward_wait", "forward_bus_wait", "backward_bus_wait", ..."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase: str | None = None
        self._busy: dict[str, BusyTime] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """While it is open, waits are those of "forward" or "backward"; outside of both none is timed."""
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """While it is open, the CPU's step keeps the calling thread, and the compute stream runs dry."""
        began = self._begin()
        yield
        self._end(began, "wait")

    def delay(self, event: Event, what: str = "bus_wait") -> None:
        """Let the compute stream wait for `event`; the calling thread does not wait."""
        if event.done():
            return
        began = self._begin()
        event.delay(compute_stream(self._device))
        self._end(began, what)

    def take(self) -> dict[str, BusyTime]:
        """What the compute stream waited since the last call."""
        busy, self._busy = self._busy, {}
        return busy

    def _begin(self) -> Event | None:
        return None if self._phase is None else record_compute(self._device, timing=True)

    def _end(self, began: Event | None, what: str) -> None:
        if began is not None:
            name = f"{self._phase}_{what}"
            self._busy.setdefault(name, BusyTime()).add(began, record_compute(self._device, timing=True))
