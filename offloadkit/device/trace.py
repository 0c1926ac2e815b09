"""Tracing of steps: named time ranges by track, written as a Chrome trace (for ui.perfetto.dev).

Host ranges lie between two clock readings, device ranges between two events of one stream. Both share a time scale
whose origin is recorded while the device is idle, so a prepared trace can begin later without waiting.
"""

from __future__ import annotations

import json
import threading
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
    def seconds_since(self, earlier: Self) -> float: ...


@dataclass(frozen=True)
class Range:
    """A named range. `began` and `ended`: seconds since the trace was prepared. `num_bytes`: bytes moved."""

    track: str
    name: str
    began: float
    ended: float
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Trace:
    """Ranges of all work started on the host or enqueued between `begin` and `end`."""

    def __init__(self, device: torch.device, mark: Callable[[], Mark]) -> None:
        """`mark`: records an event on the compute stream."""
        self._device, self._mark = device, mark
        if device.type == "cuda":
            with watchdog.uninterruptible("the GPU's work"):
                torch.cuda.synchronize(device)
        self._origin, self._clock = mark(), time.perf_counter()
        self._host: list[Range] = []
        self._device_ranges: list[tuple[str, str, Any, Any, int]] = []
        self._phase = ""
        self._since: tuple[str, Any] | None = None
        self._cpu_times: dict[int, tuple[float, float, float, float]] = {}
        """Of threads that launch work: CPU seconds (first, newest), and those of the trace (between, after them)."""

    @contextmanager
    def host(self, track: str, name: str, num_bytes: Callable[[], int]) -> Iterator[None]:
        began = time.perf_counter()
        yield
        ended = time.perf_counter()
        self._host.append(Range(track, name, began - self._clock, ended - self._clock, num_bytes()))

    def device(self, track: str, name: str, began: Any, ended: Any, num_bytes: int = 0) -> None:
        self._device_ranges.append((track, name, began, ended, num_bytes))

    def phase(self, name: str) -> None:
        """Start "forward" or "backward" on the compute stream; "" ends it."""
        self._cut(self._phase)
        self._phase = name

    def reaches_layer(self, layer: str) -> None:
        """Forward reaches a layer. Ignored in backward, which recomputes layers."""
        if self._phase == "forward":
            self._cut(None)
            assert self._since is not None
            self._since = f"forward {layer}", self._since[1]

    def has_gradients_of(self, layer: str) -> None:
        if self._phase == "backward":
            self._cut(f"backward {layer}")

    def python_seconds(self) -> float:
        """CPU seconds of Python's threads that launch forward, backward and updates, without those of the trace."""
        return sum(newest - first - own for first, newest, own, _ in self._cpu_times.values())

    def note_cpu_time(self) -> None:
        """Called where the calling thread launches work."""
        self._note_cpu_time(time.thread_time())

    def _note_cpu_time(self, now: float) -> None:
        """`now`: before the trace's own work, which ends with this call."""
        thread = threading.get_ident()
        first, _, before, between = self._cpu_times.get(thread, (now, now, 0.0, 0.0))
        self._cpu_times[thread] = first, now, before + between, time.thread_time() - now

    def _cut(self, name: str | None) -> None:
        began, now = time.thread_time(), self._mark()
        if self._since is not None and (known := self._since[0] or name):
            self.device("GPU", known, self._since[1], now)
        self._since = "", now
        self._note_cpu_time(began)

    def read(self) -> list[Range]:
        """Wait for the device and return all ranges, ordered by start."""
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
    return _prepared


def active() -> Trace | None:
    return _active


def host(track: str, name: str, num_bytes: Callable[[], int] = int) -> AbstractContextManager[None]:
    """`Trace.host` of the running trace; a no-op without one."""
    return nullcontext() if _active is None else _active.host(track, name, num_bytes)


def prepare(device: torch.device, mark: Callable[[], Mark]) -> Trace:
    """Prepare a trace that begins later. Waits for the device, to record the origin of both clocks."""
    global _prepared
    _prepared = Trace(device, mark)
    return _prepared


def begin() -> None:
    global _active
    _active = _prepared


def end() -> None:
    global _active
    _active = None


def forget() -> None:
    global _prepared
    _prepared = None
    end()


def write(path: Path, ranges: Sequence[Range]) -> None:
    """Write ranges as Chrome trace events, in microseconds. Tracks become threads of one process."""
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
    """Total seconds covered by ranges that are ordered by start. Overlaps count once."""
    total, until = 0.0, float("-inf")
    for each in ranges:
        total += max(0.0, each.ended - max(each.began, until))
        until = max(until, each.ended)
    return total
