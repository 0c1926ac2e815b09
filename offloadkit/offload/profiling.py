"""`OffloadEngine.profile`: some steps as a trace, and what bounds them.

What is traced lies between two boundaries: of each step its forward and backward, and the update of the step before,
which runs beside that forward. A step goes untraced before them, for the first one starts from a standstill.

A step has two phases, because clipping needs the whole norm before the first layer is stepped (docs/design.md,
section 2): the update, beside which forward runs, and backward. Each is bound by the resource that would need the
longest for its share alone, at its measured rate; the step's bound is the sum of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

import torch

from offloadkit.device import trace
from offloadkit.device.measure import measure
from offloadkit.device.streams import record_compute
from offloadkit.device.trace import Range
from offloadkit.errors import ConfigError, OutputError
from offloadkit.hardware import Hardware
from offloadkit.planner.seconds import both_ways
from offloadkit.telemetry import StepRecord, Telemetry
from offloadkit.units import format_seconds

UPDATE, BACKWARD = "update and forward", "backward"


@dataclass(frozen=True)
class Share:
    """What one resource has to do in a phase of a step.

    Attributes:
        resource: "compute", "bus down" (to the GPU), "bus up", "cores" (the CPU's step), or "DRAM", which serves that
            and the bus.
        seconds: what that takes at least: bytes over the measured rate, which the directions of the bus share as the
            plan says; computing takes what it took.
        busy_seconds: how long the resource was at it.
    """

    resource: str
    seconds: float
    busy_seconds: float
    num_bytes: int = 0


@dataclass(frozen=True)
class Bound:
    """The shares by phase, of a mean step that took `step_seconds`."""

    step_seconds: float
    shares: Mapping[str, tuple[Share, ...]]

    @property
    def seconds(self) -> float:
        """What a step takes at least."""
        return sum(self.limiting(phase).seconds for phase in self.shares)

    def limiting(self, phase: str) -> Share:
        """The share that bounds a phase."""
        return max(self.shares[phase], key=lambda share: share.seconds)

    def lines(self) -> list[str]:
        """In words."""
        reached = self.seconds / self.step_seconds
        times = f"a step takes {format_seconds(self.step_seconds)}, its bound is {format_seconds(self.seconds)}"
        found = [f"{times}: {reached:.0%} of what is possible is reached"]
        for phase in self.shares:
            first = self.limiting(phase)
            others = sorted((each for each in self.shares[phase] if each is not first), key=lambda each: -each.seconds)
            found.append(f"  {phase}: bound by {_said(first)}")
            found += [f"    beside it {_said(each)}" for each in others if each.seconds > 0]
        return found


def _said(share: Share) -> str:
    moved = f", {share.num_bytes / 1e9:.3g} GB" if share.num_bytes else ""
    return f"{share.resource}, {format_seconds(share.seconds)}{moved} (busy for {format_seconds(share.busy_seconds)})"


def bound(ranges: Sequence[Range], records: Sequence[StepRecord], machine: Hardware) -> Bound:
    """What bounds the mean of the traced steps.

    Args:
        ranges: of `len(records)` steps; those of the CPU's step with their memory traffic.
    """
    number = len(records)
    backwards = [each for each in ranges if each.track == "GPU" and each.name.startswith("backward")]

    def bytes_of(track: str, phase: str) -> tuple[int, float]:
        """A step's, and how long they took: of the ranges whose middle lies in a backward, or in none."""
        own = [each for each in ranges if each.track == track and _within(each, backwards) is (phase == BACKWARD)]
        return sum(each.num_bytes for each in own) // number, trace.busy_seconds(own) / number

    shares: dict[str, tuple[Share, ...]] = {}
    for phase, name in ((UPDATE, "forward"), (BACKWARD, "backward")):
        (h2d_bytes, h2d_busy), (d2h_bytes, d2h_busy) = bytes_of("H2D", phase), bytes_of("D2H", phase)
        stepped, stepping = bytes_of("CPU step", phase)
        h2d, d2h = both_ways(h2d_bytes, d2h_bytes, machine)
        traffic = stepped + h2d_bytes + d2h_bytes
        computing, computing_and_waits = (mean(of(each, name) for each in records) for of in (_computing, _phase))
        shares[phase] = (
            Share("compute", computing, computing_and_waits),
            Share("bus down", h2d_bytes / h2d, h2d_busy, h2d_bytes),
            Share("bus up", d2h_bytes / d2h, d2h_busy, d2h_bytes),
            Share("cores", stepped / machine.cpu_adamw_bytes_per_second, stepping, stepped),
            Share("DRAM", traffic / machine.cpu_and_bus_bytes_per_second, max(stepping, h2d_busy, d2h_busy), traffic),
        )
    return Bound(mean(record.seconds["step"] for record in records), shares)


def _phase(record: StepRecord, name: str) -> float:
    return record.seconds.get(name, 0.0)


def _within(each: Range, backwards: Sequence[Range]) -> bool:
    middle = (each.began + each.ended) / 2
    return any(backward.began <= middle <= backward.ended for backward in backwards)


def _computing(record: StepRecord, name: str) -> float:
    """Seconds of forward or backward without the waits in it."""
    waits = (seconds for phase, seconds in record.seconds.items() if phase.startswith(name) and phase.endswith("wait"))
    return max(0.0, _phase(record, name) - sum(waits))


def breakdown(record: StepRecord) -> str:
    """A step's phases on one line; they overlap, and do not add up."""
    phases = {phase: seconds for phase, seconds in record.seconds.items() if phase != "step" and seconds > 0}
    parts = " | ".join(f"{phase.replace('_', ' ')} {format_seconds(seconds)}" for phase, seconds in phases.items())
    return f"step {record.step}: {format_seconds(record.seconds['step'])} | {parts}"


class Profile:
    """Steps that are traced, after one that is not; at their end the trace is written, and what bounds them printed.

    Attributes:
        bound: None until then.
    """

    def __init__(self, steps: int, path: Path, device: torch.device, undo: ExitStack) -> None:
        """
        Args:
            undo: ends the trace with the engine.

        Raises:
            ConfigError: `steps` is no whole number from 1, or other steps are being traced.
            OutputError: there is no folder for `path`.
        """
        if type(steps) is not int or steps < 1:
            raise ConfigError(f"steps must be a whole number >= 1, got {steps!r}")
        if not path.absolute().parent.is_dir():
            raise OutputError(f"{path.parent} is no folder for the trace: make it, or choose another path")
        if trace.prepared() is not None:
            raise ConfigError("steps are being traced already: wait until they are done, or close that engine")
        self.path, self.num_steps = path, steps
        self.bound: Bound | None = None
        self._done = 0
        self._machine = measure(device)  # now: measured at the end, it may find no room left in VRAM
        self._trace = trace.prepare(device, partial(record_compute, device, timing=True))
        undo.callback(self._end_with_engine)

    def boundary(self) -> None:
        """A step's gradients are on their way, and its update is about to start."""
        if self._done == 0:
            trace.begin()
        elif self._done == self.num_steps:
            trace.end()

    def step(self, settle: Callable[[], None], read_reports: Callable[[], None], telemetry: Telemetry) -> bool:
        """An update was started. Whether its step was the last one that is traced: then it is waited for, and what was
        traced is written and printed.

        Args:
            settle: waits until it is done.
            read_reports: has the records of the steps that are done added to `telemetry`.
        """
        self._done += 1
        if self._done != 1 + self.num_steps:
            return False
        settle()
        ranges = self._trace.read()
        self.stop()
        read_reports()
        records = list(telemetry.records)[-self.num_steps :]
        trace.write(self.path, ranges)
        self.bound = bound(ranges, records, self._machine)
        numbers = f"steps {records[0].step} to {records[-1].step}" if len(records) > 1 else f"step {records[0].step}"
        print(f"{numbers} traced in {self.path} (open it in ui.perfetto.dev)", *map(breakdown, records), sep="\n")
        print(*self.bound.lines(), sep="\n", flush=True)
        return True

    def _end_with_engine(self) -> None:
        if trace.prepared() is self._trace:
            traced = max(0, self._done - 1)
            print(
                f"no trace was written: the engine was closed after {traced} of {self.num_steps} traced steps",
                flush=True,
            )
        self.stop()

    def stop(self) -> None:
        """Trace no more, whatever was traced; later calls do nothing."""
        if trace.prepared() is self._trace:
            trace.forget()
