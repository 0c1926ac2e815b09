"""What ran when, for a few steps: named ranges by track, written as a Chrome trace (chrome://tracing, ui.perfetto.dev).

On the host a range lies between two readings of the clock, on the device between two events of one stream; one origin,
taken while nothing was running, brings both on one scale. A trace is prepared there and begins later, in the steady
state, without anyone waiting. While nothing is traced, `active()` is None and nobody records anything.
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

from offloadkit.errors import OutputError

TRACKS = ("GPU", "step on the GPU", "H2D", "D2H", "norm", "CPU step")


class Mark(Protocol):
    """A point in a stream's work that was recorded with its time."""

    def seconds_since(self, earlier: Self) -> float: ...


@dataclass(frozen=True)
class Range:
    """Something that ran, in seconds since the trace was prepared; `num_bytes` is what it moved."""

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
    """Ranges of what is begun, or queued, from `begin` to `end`; what ends after that is in it too."""

    def __init__(self, device: torch.device, mark: Callable[[], Mark]) -> None:
        """
        Args:
            mark: records a point of the compute stream.
        """
        self._device, self._mark = device, mark
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._origin, self._clock = mark(), time.perf_counter()
        self._host: list[Range] = []
        self._device_ranges: list[tuple[str, str, Any, Any, int]] = []
        self._phase = ""
        self._since: tuple[str, Any] | None = None

    @contextmanager
    def host(self, track: str, name: str, num_bytes: Callable[[], int]) -> Iterator[None]:
        """A range of the calling thread's time."""
        began = time.perf_counter()
        yield
        ended = time.perf_counter()
        self._host.append(Range(track, name, began - self._clock, ended - self._clock, num_bytes()))

    def device(self, track: str, name: str, began: Any, ended: Any, num_bytes: int = 0) -> None:
        """A range between two marks of one stream."""
        self._device_ranges.append((track, name, began, ended, num_bytes))

    def phase(self, name: str) -> None:
        """The compute stream begins "forward" or "backward", or "" ends it."""
        self._cut(self._phase)
        self._phase = name

    def asks_for(self, layer: str) -> None:
        """Forward comes to a layer. (A recomputation in backward belongs to the layer's backward.)"""
        if self._phase == "forward":
            self._cut(None)
            assert self._since is not None
            self._since = f"forward {layer}", self._since[1]

    def has_gradients_of(self, layer: str) -> None:
        """Backward is done with a layer."""
        if self._phase == "backward":
            self._cut(f"backward {layer}")

    def _cut(self, name: str | None) -> None:
        """What the compute stream did since the last cut, by `name` or the one it began with."""
        now = self._mark()
        if self._since is not None and (known := self._since[0] or name):
            self.device("GPU", known, self._since[1], now)
        self._since = "", now

    def read(self) -> list[Range]:
        """All ranges, by time. Waits until the device is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        ranges = list(self._host)
        for track, name, began, ended, num_bytes in self._device_ranges:
            since = [event.seconds_since(self._origin) for event in (began, ended)]
            ranges.append(Range(track, name, since[0], since[1], num_bytes))
        return sorted(ranges, key=lambda each: each.began)


_prepared: Trace | None = None
_active: Trace | None = None


def prepared() -> Trace | None:
    """The trace that is or will be taken; there is one at a time."""
    return _prepared


def active() -> Trace | None:
    """The trace that has begun and not ended."""
    return _active


def host(track: str, name: str, num_bytes: Callable[[], int] = int) -> AbstractContextManager[None]:
    """`Trace.host`, where one is being taken."""
    return nullcontext() if _active is None else _active.host(track, name, num_bytes)


def prepare(device: torch.device, mark: Callable[[], Mark]) -> Trace:
    """A trace that is to begin later. Waits until the device is done, for the origin of both clocks."""
    global _prepared
    _prepared = Trace(device, mark)
    return _prepared


def begin() -> None:
    """Trace what is begun, or queued, from now on."""
    global _active
    _active = _prepared


def end() -> None:
    """Trace nothing any more."""
    global _active
    _active = None


def forget() -> None:
    """Another trace may be prepared."""
    global _prepared
    _prepared = None
    end()


def write(path: Path, ranges: Sequence[Range]) -> None:
    """As Chrome's trace events, microseconds; tracks are threads of one process.

    Raises:
        OutputError: `path` cannot be written.
    """
    tracks = [*TRACKS, *sorted({each.track for each in ranges} - set(TRACKS))]
    names: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": track}}
        for number, track in enumerate(tracks)
    ]
    events = [
        {
            "ph": "X",
            "pid": 0,
            "tid": tracks.index(each.track),
            "name": each.name,
            "ts": 1e6 * each.began,
            "dur": 1e6 * each.seconds,
            **({"args": {"bytes": each.num_bytes}} if each.num_bytes else {}),
        }
        for each in ranges
    ]
    try:
        path.write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}) + "\n")
    except OSError as error:
        raise OutputError(f"cannot write the trace {path}: {error.strerror}; choose another path") from error


def busy_seconds(ranges: Sequence[Range]) -> float:
    """Seconds in which any of them ran; `ranges` by their beginning. What overlaps counts once."""
    total, until = 0.0, float("-inf")
    for each in ranges:
        total += max(0.0, each.ended - max(each.began, until))
        until = max(until, each.ended)
    return total
