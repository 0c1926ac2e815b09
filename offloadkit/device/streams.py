"""Copy streams, events, and what the compute stream waited for: the same words with and without a GPU.

A backend makes the streams of a device. On CUDA these are CUDA's. On the CPU every operation is done when it is asked
for, so an event is a mark in time and waiting for it does nothing. Tests bring backends of their own.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from offloadkit.device import trace, watchdog

_cuda: Any = torch.cuda  # whose signatures are typed in some releases of torch only

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(into, source): contiguous tensors of one dtype and size."""


class Event:
    """A recorded point in a stream's work; without a GPU the work is done."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def done(self) -> bool:
        """Whether the work before this point is finished; does not wait."""
        return True

    def synchronize(self) -> None:
        """Block the calling thread until the work before this point is finished."""

    def seconds_since(self, earlier: Event) -> float:
        """Device seconds between two finished events of one stream, recorded with `timing`."""
        return self._seconds - earlier._seconds


class Stream:
    """A queue of device work; without a GPU the work is done by the calling thread, at once."""

    def copy(self, pairs: Pairs) -> None:
        """Not by a torch operation: those of a second thread start an OpenMP team of their own, beside which the main
        thread's forward and backward take a third longer."""
        for into, source in pairs:
            ctypes.memmove(into.data_ptr(), source.data_ptr(), source.numel() * source.element_size())

    def run(self, work: Callable[[], object]) -> None:
        """Call `work`; the device operations that it starts go to this stream."""
        work()

    def record(self, timing: bool = False) -> Event:
        """Mark the end of the work asked for so far."""
        return Event()

    def wait(self, event: Event) -> None:
        """Later work starts after `event`; the calling thread does not wait."""

    def synchronize(self) -> None:
        """Block the calling thread until the work asked for so far is done."""


class CudaEvent(Event):
    """A recorded point of a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream, timing: bool) -> None:
        self.event: Any = _cuda.Event(enable_timing=timing)
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        with watchdog.uninterruptible("work of the GPU"):
            self.event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class _CudaStream(Stream):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def copy(self, pairs: Pairs) -> None:
        with torch.cuda.stream(self._stream):
            for into, source in pairs:
                into.copy_(source, non_blocking=True)

    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self, timing: bool = False) -> Event:
        return CudaEvent(self._stream, timing)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)

    def synchronize(self) -> None:
        with watchdog.uninterruptible("work of the GPU"):
            self._stream.synchronize()


class Backend(Protocol):
    """Makes the streams of one kind of device."""

    def stream(self, device: torch.device, urgent: bool) -> Stream:
        """A new stream; kernels of an `urgent` one go before those of others that were not begun."""

    def compute(self, device: torch.device) -> Stream:
        """The stream on which the calling thread's model code runs."""


class _Immediate:
    _only = Stream()

    def stream(self, device: torch.device, urgent: bool) -> Stream:
        return self._only

    def compute(self, device: torch.device) -> Stream:
        return self._only


class _Cuda:
    def stream(self, device: torch.device, urgent: bool) -> Stream:
        return _CudaStream(_cuda.Stream(device, -1 if urgent else 0))

    def compute(self, device: torch.device) -> Stream:
        return _CudaStream(torch.cuda.current_stream(device))


backends: dict[str, Backend] = {"cpu": _Immediate(), "cuda": _Cuda()}
"""By type of device."""


class BusyTime:
    """Device seconds between pairs of events of one stream, added up once they are past.

    Attributes:
        first, last: where the first pair began, and where the newest one ended.
        num_bytes: what was copied in all.
    """

    def __init__(self) -> None:
        self.first: Event | None = None
        self.last: Event | None = None
        self.num_bytes = 0
        self._pairs: list[tuple[Event, Event]] = []
        self._spans: list[tuple[float, float]] = []
        """Of the pairs that are past: seconds from `first` to the beginning, and how long it was."""

    def add(self, began: Event, ended: Event, num_bytes: int = 0) -> None:
        """Take a pair, recorded with `timing`, after those before."""
        self._pairs.append((began, ended))
        self.first, self.last = self.first or began, ended
        self.num_bytes += num_bytes
        if len(self._pairs) % 256 == 0:  # a long window keeps few events alive
            self._fold()

    def done(self) -> bool:
        """Whether all of it is past; does not wait."""
        return not self._pairs or self._pairs[-1][1].done()

    def synchronize(self) -> None:
        """Block the calling thread until all of it is past."""
        if self._pairs:
            self._pairs[-1][1].synchronize()

    def seconds(self) -> float:
        """What is past."""
        return sum(seconds for _, seconds in self.spans())

    def spans(self) -> list[tuple[float, float]]:
        """Of each pair that is past: seconds from `first` to its beginning, and its seconds."""
        self._fold()
        return self._spans

    def _fold(self) -> None:
        while self._pairs and self._pairs[0][1].done():
            began, ended = self._pairs.pop(0)
            assert self.first is not None
            self._spans.append((began.seconds_since(self.first), ended.seconds_since(began)))


def seconds_of_any(times: Iterable[BusyTime]) -> float:
    """Device seconds in which any of several streams was busy, all of it past.

    Copies of several streams in one direction share a copy engine. While one runs, another one waits between its own
    events: their sum would count those seconds twice.
    """
    used = [(time.first, time.spans()) for time in times if time.first is not None]
    spans: list[tuple[float, float]] = []
    for first, own in used:
        since = first.seconds_since(used[0][0])
        spans += [(since + began, since + began + seconds) for began, seconds in own]
    total, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


class CopyStream:
    """A stream for copies in one direction, or for the GPU's steps, beside the compute stream.

    Attributes:
        track: what a trace calls it.
        device_stream: the backend's stream that does the work.
    """

    def __init__(self, device: torch.device, track: str, *, urgent: bool = False) -> None:
        """urgent: its kernels go before those of other streams that were not begun."""
        self.track = track
        self.device_stream = backends[device.type].stream(device, urgent)
        self._busy = BusyTime()

    def wait(self, event: Event) -> None:
        """Later copies start after `event`."""
        self.device_stream.wait(event)

    def synchronize(self) -> None:
        """Block the calling thread until the copies asked for so far are done: their memory may go."""
        self.device_stream.synchronize()

    def record(self, timing: bool = False) -> Event:
        """Mark the end of the copies asked for so far."""
        return self.device_stream.record(timing)

    def run(self, work: Callable[[], object]) -> None:
        """Call `work`; the device operations that it starts go to this stream."""
        self.device_stream.run(work)

    def take_busy(self) -> BusyTime:
        """How long the `timed` copies asked for since the last call take."""
        busy, self._busy = self._busy, BusyTime()
        return busy

    def copy(self, into: torch.Tensor, source: torch.Tensor, name: str = "", *, timed: bool = False) -> None:
        """Copy `source` to `into`: contiguous tensors of one dtype and size. `name`: in a trace."""
        if timed or trace.active() is not None:
            self.copy_all([(into, source)], name, timed=timed)
        else:
            self.device_stream.copy([(into, source)])

    def copy_all(self, pairs: Pairs, name: str = "", *, timed: bool = True) -> Event:
        """`copy` of (into, source) pairs, timed as one; returns their end."""
        began = self.record(timing=True)
        self.device_stream.copy(pairs)
        ended = self.record(timing=True)
        num_bytes = sum(into.nbytes for into, _ in pairs)
        if timed:
            self._busy.add(began, ended, num_bytes)
        tracing = trace.active()
        if tracing is not None:
            tracing.device(self.track, name, began, ended, num_bytes)
        return ended

    @contextmanager
    def traced(self, name: str, num_bytes: int = 0) -> Iterator[None]:
        """What goes to this stream while it is open is a range of a trace. `num_bytes`: what it moves."""
        tracing = trace.active()
        began = None if tracing is None else self.record(timing=True)
        yield
        if tracing is not None:
            tracing.device(self.track, name, began, self.record(timing=True), num_bytes)


def record_compute(device: torch.device, timing: bool = False) -> Event:
    """Mark the end of the compute stream's work so far."""
    return backends[device.type].compute(device).record(timing)


class Waits:
    """Waits of one accumulation window, by name: "forward_wait", "forward_bus_wait", "backward_bus_wait", ...

    Attributes:
        phase: "forward", "backward", or None outside of both.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.phase: str | None = None
        self._busy: dict[str, BusyTime] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """While it is open, waits are those of "forward" or "backward"; outside of both none is timed."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

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
        backends[self._device.type].compute(self._device).wait(event)
        self._end(began, what)

    def take(self) -> dict[str, BusyTime]:
        """What the compute stream waited since the last call."""
        busy, self._busy = self._busy, {}
        return busy

    def _begin(self) -> Event | None:
        return None if self.phase is None else record_compute(self._device, timing=True)

    def _end(self, began: Event | None, what: str) -> None:
        if began is not None:
            name = f"{self.phase}_{what}"
            self._busy.setdefault(name, BusyTime()).add(began, record_compute(self._device, timing=True))
