"""Copy streams, events and wait times of the compute stream, for CUDA and the CPU.

On the CPU every operation finishes before its call returns, so an event is a time stamp and waiting for it does
nothing. Tests add backends.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, cast

import torch

from offloadkit.device import trace, watchdog

_cuda: Any = torch.cuda  # typed only in some releases of torch
_c: Any = torch._C
"""Called where torch.cuda's Python takes most of the time: of events, and of the current stream."""

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(destination, source): contiguous tensors of one dtype and size."""


class Event:
    """A recorded point in a stream's work. This base class, for the CPU, is always done."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Block the calling thread until the work before the event is finished."""

    def seconds_since(self, earlier: Event) -> float:
        """Seconds between two finished events of one stream, both recorded with `timing`."""
        return self._seconds - earlier._seconds


class Stream:
    """A queue of device work. This base class, for the CPU, does the work at once on the calling thread."""

    def copy(self, pairs: Pairs) -> None:
        """Copy without torch: a torch operation on a second thread starts another OpenMP team, which slows the main
        thread's forward and backward by a third.
        """
        for into, source in pairs:
            ctypes.memmove(into.data_ptr(), source.data_ptr(), source.numel() * source.element_size())

    def run(self, work: Callable[[], object]) -> None:
        work()

    def record(self, timing: bool = False) -> Event:
        return Event()

    def wait(self, event: Event) -> None:
        """Start later work after `event`; the calling thread does not wait."""

    def synchronize(self) -> None:
        """Block the calling thread until the work enqueued so far is done."""


class CudaEvent(Event):
    """A dropped object leaves torch's event for the next one: to destroy it would release the interpreter's lock."""

    _spares: ClassVar[dict[tuple[int, bool], list[Any]]] = {}

    def __init__(self, stream: torch.cuda.Stream, timing: bool) -> None:
        base = _c._CudaEventBase
        self._own_spares = self._spares.setdefault((stream.device_index, timing), [])
        try:
            self.event: Any = self._own_spares.pop()
        except IndexError:
            self.event = base.__new__(_cuda.Event, enable_timing=timing)
        base.record(self.event, stream)

    def __del__(self) -> None:
        self._own_spares.append(self.event)

    def done(self) -> bool:
        return bool(_c._CudaEventBase.query(self.event))

    def synchronize(self) -> None:
        with watchdog.uninterruptible("work of the GPU"):
            self.event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, CudaEvent)
        return float(_c._CudaEventBase.elapsed_time(earlier.event, self.event)) / 1e3


_NUM_OF_POOL = 32
"""torch hands out this many streams of a priority in turn."""
_owners: weakref.WeakValueDictionary[tuple[int, int], object] = weakref.WeakValueDictionary()
"""Keys: device and number of a stream. torch's streams themselves do not clear weak references to them (torch 2.11)."""


def own_stream(owner: object, device: torch.device, *, urgent: bool = False) -> torch.cuda.Stream:
    """A CUDA stream that has no other living owner here, as far as torch has enough: work that another thread queues on
    a stream becomes a part of a graph that is captured on it. NCCL's streams and the program's are unknown.
    """
    for _ in range(_NUM_OF_POOL):
        found: torch.cuda.Stream = _cuda.Stream(device, -1 if urgent else 0)
        key = found.device_index, found.stream_id
        if key not in _owners:
            break
    _owners[key] = owner
    return found


class _CudaStream(Stream):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._id: tuple[int, int, int] = stream.stream_id, stream.device_index, stream.device_type

    def copy(self, pairs: Pairs) -> None:
        """Copy by one call, because each call of torch releases the interpreter's lock."""
        if not pairs:
            return
        before = self._select()
        try:
            torch._foreach_copy_([into for into, _ in pairs], [source for _, source in pairs], non_blocking=True)
        finally:
            self._deselect(*before)

    def run(self, work: Callable[[], object]) -> None:
        before = self._select()
        try:
            work()
        finally:
            self._deselect(*before)

    def _select(self) -> tuple[int, tuple[int, int, int]]:
        """Make this stream and its device current, as `torch.cuda.stream` does. Returns what to give to `_deselect`."""
        before = _c._cuda_getDevice(), _c._cuda_getCurrentStream(self._id[1])
        _c._cuda_setStream(*self._id)
        return before

    def _deselect(self, device: int, stream: tuple[int, int, int]) -> None:
        _c._cuda_setStream(*stream)
        if device != self._id[1]:
            _c._cuda_setDevice(device)

    def record(self, timing: bool = False) -> Event:
        return CudaEvent(self._stream, timing)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        _c._CudaEventBase.wait(event.event, self._stream)

    def synchronize(self) -> None:
        with watchdog.uninterruptible("work of the GPU"):
            self._stream.synchronize()


class _OwnStream(_CudaStream):
    def __init__(self, device: torch.device, urgent: bool) -> None:
        super().__init__(own_stream(self, device, urgent=urgent))


class Backend(Protocol):
    def stream(self, device: torch.device, urgent: bool) -> Stream:
        """Create a stream; an `urgent` stream has the higher CUDA priority."""

    def compute(self, device: torch.device) -> Stream:
        """The stream on which the calling thread's model code runs."""


class _Immediate:
    _only = Stream()

    def stream(self, device: torch.device, urgent: bool) -> Stream:
        return self._only

    def compute(self, device: torch.device) -> Stream:
        return self._only


class _Cuda:
    def __init__(self) -> None:
        self._known: dict[Any, _CudaStream] = {}

    def stream(self, device: torch.device, urgent: bool) -> Stream:
        return _OwnStream(device, urgent)

    def compute(self, device: torch.device) -> Stream:
        number = _c._cuda_getDevice() if device.index is None else device.index
        found = _c._cuda_getCurrentStream(number)
        if found not in self._known:
            self._known[found] = _CudaStream(torch.cuda.current_stream(device))
        return self._known[found]


backends: dict[str, Backend] = {"cpu": _Immediate(), "cuda": _Cuda()}


class BusyTime:
    """Device seconds between pairs of events of one stream, summed once the events are done: `seconds` and `spans` ask
    no event whether it is.

    Attributes:
        first, last: the start of the first pair and the end of the newest pair.
    """

    def __init__(self) -> None:
        self.first: Event | None = None
        self.last: Event | None = None
        self.num_bytes = 0
        self._pairs: list[tuple[Event, Event]] = []
        self._spans: list[tuple[float, float]] = []
        """See `spans`."""

    def add(self, began: Event, ended: Event, num_bytes: int = 0) -> None:
        self._pairs.append((began, ended))
        self.first, self.last = self.first or began, ended
        self.num_bytes += num_bytes
        if len(self._pairs) % 256 == 0:  # keeps few events alive in a long window
            self._fold(next((at for at, (_, end) in enumerate(self._pairs) if not end.done()), len(self._pairs)))

    def done(self) -> bool:
        return not self._pairs or self._pairs[-1][1].done()

    def synchronize(self) -> None:
        if self._pairs:
            self._pairs[-1][1].synchronize()

    def seconds(self) -> float:
        return sum(seconds for _, seconds in self._spans) + sum(end.seconds_since(began) for began, end in self._pairs)

    def spans(self) -> list[tuple[float, float]]:
        """Each pair as (seconds from `first` to its start, duration in seconds)."""
        self._fold(len(self._pairs))
        return self._spans

    def _fold(self, num_done: int) -> None:
        for began, ended in self._pairs[:num_done]:
            assert self.first is not None
            self._spans.append((began.seconds_since(self.first), ended.seconds_since(began)))
        del self._pairs[:num_done]


def seconds_of_any(times: Iterable[BusyTime]) -> float:
    """Device seconds in which any of several streams was busy. All work must be finished.

    Streams that copy in one direction share a copy engine, so a copy may wait between its own events while another copy
    runs; a sum would count those seconds twice.
    """
    busy = [time for time in times if time.first is not None]
    if len(busy) == 1:
        return busy[0].seconds()
    used = [(cast(Event, time.first), time.spans()) for time in busy]
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
    """A stream for copies in one direction, or for optimizer steps on the GPU.

    Attributes:
        track: the stream's name in a trace.
    """

    def __init__(self, device: torch.device, track: str, *, urgent: bool = False) -> None:
        """`urgent`: use a stream of higher CUDA priority."""
        self.track = track
        self.device_stream = backends[device.type].stream(device, urgent)
        self._busy = BusyTime()

    def wait(self, event: Event) -> None:
        self.device_stream.wait(event)

    def synchronize(self) -> None:
        """Block the calling thread until all enqueued copies are done and their memory may be freed."""
        self.device_stream.synchronize()

    def record(self, timing: bool = False) -> Event:
        return self.device_stream.record(timing)

    def run(self, work: Callable[[], object]) -> None:
        self.device_stream.run(work)

    def take_busy(self) -> BusyTime:
        busy, self._busy = self._busy, BusyTime()
        return busy

    def copy(self, into: torch.Tensor, source: torch.Tensor, name: str = "", *, timed: bool = False) -> None:
        """Copy `source` to `into`, contiguous tensors of one dtype and size. `name` appears in a trace."""
        if timed or trace.active() is not None:
            self.copy_all([(into, source)], name, timed=timed)
        else:
            self.device_stream.copy([(into, source)])

    def copy_all(self, pairs: Pairs, name: str = "", *, timed: bool = True) -> Event:
        """Copy (destination, source) pairs, timed as one copy; returns the event of their end."""
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
        """Trace the work enqueued on this stream in the body as one range. `num_bytes`: bytes moved."""
        tracing = trace.active()
        began = None if tracing is None else self.record(timing=True)
        yield
        if tracing is not None:
            tracing.device(self.track, name, began, self.record(timing=True), num_bytes)


def hold_back(queued: deque[Event], most: int, pause: float = 1e-3) -> None:
    """Block until fewer than `most` of the events in `queued` are left; those at its front that are done are dropped.

    `pause`: seconds between looks at the first.
    """
    while len(queued) >= most:
        if queued[0].done():
            queued.popleft()
        else:
            time.sleep(pause)


def record_compute(device: torch.device, timing: bool = False) -> Event:
    return backends[device.type].compute(device).record(timing)


class Waits:
    """Wait times of one accumulation window, by name: "forward_wait", "forward_bus_wait", "backward_bus_wait", ...

    Attributes:
        phase: "forward", "backward", or None outside both.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.phase: str | None = None
        self._busy = defaultdict[str, BusyTime](BusyTime)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count waits in the body as waits of `phase`. Outside both phases waits are not timed."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Time a wait of the calling thread for the CPU step, during which the compute stream runs dry."""
        began = None if self.phase is None else record_compute(self._device, timing=True)
        yield
        if began is not None:
            self._add("wait", began, record_compute(self._device, timing=True))

    def delay(self, event: Event, what: str = "bus_wait", began: Event | None = None) -> None:
        """Make the compute stream wait for `event`; the calling thread does not wait.

        began: the end of the compute stream's work so far, recorded with timing; None: it is recorded now.
        """
        if event.done():
            return
        compute = backends[self._device.type].compute(self._device)
        if self.phase is None:
            compute.wait(event)
            return
        began = began or compute.record(timing=True)
        compute.wait(event)
        self._add(what, began, compute.record(timing=True))

    def take(self) -> dict[str, BusyTime]:
        busy, self._busy = self._busy, defaultdict(BusyTime)
        return busy

    def _add(self, what: str, began: Event, ended: Event) -> None:
        self._busy[f"{self.phase}_{what}"].add(began, ended)
