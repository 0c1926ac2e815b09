"""A trace of some steps: named ranges of time by track, written as a Chrome trace (for ui.perfetto.dev).

A range on the host is between two readings of the clock. A range on the device is between two events of one stream.
Both get one time scale from an origin that is recorded while nothing runs. A trace is prepared at that origin and
begins later, in the steady state, without a wait. While nothing is traced, `active()` is None and nothing is recorded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from offloadkit.device import watchdog
from offloadkit.errors import OutputError

TRACKS = ("GPU", "step on the GPU", "H2D", "D2H", "norm", "CPU step")


class Mark(Protocol):
    """A point in a stream's work whose time is recorded."""

    def seconds_since(self, earlier: Self) -> float:
        """Seconds between `earlier` and this point."""
        ...


@dataclass(frozen=True)
class Range:
    """Something that ran. `began` and `ended`: seconds since the trace was prepared. `num_bytes`: what it moved."""

    track: str
    name: str
    began: float
    ended: float
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


class Trace:
    """The ranges of all work that starts on the host, or is queued, between `begin` and `end`."""

    def __init__(self, device: torch.device, mark: Callable[[], Mark]) -> None:
        """mark: records a point of the compute stream."""
        self._device, self._mark = device, mark
        if device.type == "cuda":
            with watchdog.uninterruptible("the GPU's work"):
                torch.cuda.synchronize(device)
        self._origin, self._clock = mark(), time.perf_counter()
        self._host: list[Range] = []
        self._device_ranges: list[tuple[str, str, Any, Any, int]] = []
        self._phase = ""
        self._since: tuple[str, Any] | None = None

    @contextmanager
    def host(self, track: str, name: str, num_bytes: Callable[[], int]) -> Iterator[None]:
        """A context that records a range of the calling thread's time."""
        began = time.perf_counter()
        yield
        ended = time.perf_counter()
        self._host.append(Range(track, name, began - self._clock, ended - self._clock, num_bytes()))

    def device(self, track: str, name: str, began: Any, ended: Any, num_bytes: int = 0) -> None:
        """Record a range between two marks of one stream."""
        self._device_ranges.append((track, name, began, ended, num_bytes))

    def phase(self, name: str) -> None:
        """The compute stream begins "forward" or "backward". "": it ends."""
        self._cut(self._phase)
        self._phase = name

    def reaches_layer(self, layer: str) -> None:
        """Forward reaches a layer. In backward, where layers are recomputed, this does nothing."""
        if self._phase == "forward":
            self._cut(None)
            assert self._since is not None
            self._since = f"forward {layer}", self._since[1]

    def has_gradients_of(self, layer: str) -> None:
        """Backward has all gradients of a layer."""
        if self._phase == "backward":
            self._cut(f"backward {layer}")

    def _cut(self, name: str | None) -> None:
        """Record the compute stream's work since the last cut, under the name that was set then, or else `name`."""
        now = self._mark()
        if self._since is not None and (known := self._since[0] or name):
            self.device("GPU", known, self._since[1], now)
        self._since = "", now

    def read(self) -> list[Range]:
        """All ranges, ordered by their beginning. It waits until the device is done."""
        if self._device.type == "cuda":
            with watchdog.uninterruptible("the GPU's work"):
                torch.cuda.synchronize(self._device)
        ranges = list(self._host)
        for track, name, began, ended, num_bytes in self._device_ranges:
            since = [event.seconds_since(self._origin) for event in (began, ended)]
            ranges.append(Range(track, name, since[0], since[1], num_bytes))
        return sorted(ranges, key=lambda each: each.began)


_prepared: Trace | None = None
_active: Trace | None = None


def prepared() -> Trace | None:
    """The trace that was prepared and not forgotten. There is one at a time."""
    return _prepared


def active() -> Trace | None:
    """The trace that has begun and not ended."""
    return _active


def host(track: str, name: str, num_bytes: Callable[[], int] = int) -> AbstractContextManager[None]:
    """`Trace.host` of the active trace. Without one it does nothing."""
    return nullcontext() if _active is None else _active.host(track, name, num_bytes)


def prepare(device: torch.device, mark: Callable[[], Mark]) -> Trace:
    """Prepare a trace that begins later. It waits until the device is done, to record the origin of both clocks."""
    global _prepared
    _prepared = Trace(device, mark)
    return _prepared


def begin() -> None:
    """Trace what is started or queued from now on."""
    global _active
    _active = _prepared


def end() -> None:
    """Stop tracing."""
    global _active
    _active = None


def forget() -> None:
    """Stop tracing, and forget the prepared trace, so that another may be prepared."""
    global _prepared
    _prepared = None
    end()


def write(path: Path, ranges: Sequence[Range]) -> None:
    """Write the ranges as Chrome trace events, in microseconds. Tracks are threads of one process.

    Raises:
        OutputError: `path` cannot be written.
    """
    tracks = [*TRACKS, *sorted({each.track for each in ranges} - set(TRACKS))]
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": track}}
        for number, track in enumerate(tracks)
    ]
    for each in ranges:
        place = {"ph": "X", "pid": 0, "tid": tracks.index(each.track), "name": each.name}
        events.append(place | {"ts": 1e6 * each.began, "dur": 1e6 * each.seconds})
        if each.num_bytes:
            events[-1]["args"] = {"bytes": each.num_bytes}
    try:
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
    except OSError as error:
        raise OutputError(f"cannot write the trace {path}: {error.strerror}; choose another path") from error


def busy_seconds(ranges: Sequence[Range]) -> float:
    """Seconds in which any of the ranges ran, ordered by their beginning. Overlaps count once."""
    total, until = 0.0, float("-inf")
    for each in ranges:
        total += max(0.0, each.ended - max(each.began, until))
        until = max(until, each.ended)
    return total
