"""`OffloadEngine.profile`: a trace of some steps, and the resource that bounds each phase.

A trace begins and ends at the end of a window, so a traced step has a forward, which runs concurrently with the
preceding step's update, and a backward. One step is skipped first, because the first forward after a `synchronize` runs
without an update. The bound of a phase is the time of its slowest resource, if that worked alone at its measured rate.
The bound of the step is the sum of both phases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

import torch

from offloadkit.device import trace
from offloadkit.device.streams import record_compute
from offloadkit.device.trace import Range
from offloadkit.distributed.machine import measured_by
from offloadkit.distributed.ranks import Group, Solo
from offloadkit.errors import ConfigError, OutputError, shown
from offloadkit.facts.hardware import Hardware
from offloadkit.facts.telemetry import StepRecord, Telemetry
from offloadkit.facts.units import format_bytes, format_seconds
from offloadkit.offload.graphs import BlockGraphs
from offloadkit.planner.seconds import both_ways

UPDATE, BACKWARD = "update and forward", "backward"


@dataclass(frozen=True)
class Share:
    """The work of one resource in a phase of a step.

    Attributes:
        resource: "compute", "bus down" (to the GPU), "bus up" (to RAM), "cores" (the CPU's step), or "DRAM", which
            serves both the cores and the bus.
        seconds: least possible time: bytes over the measured rate. The two directions of the bus share their rate as in
            the plan. For "compute": the measured time without waits.
    """

    resource: str
    seconds: float
    busy_seconds: float
    num_bytes: int = 0


@dataclass(frozen=True)
class Bound:
    """The shares of the resources, by phase, in a mean step that took `step_seconds`."""

    step_seconds: float
    shares: Mapping[str, tuple[Share, ...]]

    @property
    def seconds(self) -> float:
        return sum(self.limiting(phase).seconds for phase in self.shares)

    def limiting(self, phase: str) -> Share:
        return max(self.shares[phase], key=lambda share: share.seconds)

    def lines(self) -> list[str]:
        reached = self.seconds / self.step_seconds
        times = f"a step takes {format_seconds(self.step_seconds)}, its bound is {format_seconds(self.seconds)}"
        found = [f"{times}: {reached:.0%} of the possible speed is reached"]
        for phase in self.shares:
            first = self.limiting(phase)
            others = sorted((each for each in self.shares[phase] if each is not first), key=lambda each: -each.seconds)
            found.append(f"  {phase}: bound by {_described(first)}")
            found += [f"    beside it {_described(each)}" for each in others if each.seconds > 0]
        return found


def _described(share: Share) -> str:
    moved = f", {format_bytes(share.num_bytes)}" if share.num_bytes else ""
    return f"{share.resource}, {format_seconds(share.seconds)}{moved} (busy for {format_seconds(share.busy_seconds)})"


def bound(ranges: Sequence[Range], records: Sequence[StepRecord], machine: Hardware) -> Bound:
    """The bound of the mean traced step.

    Args:
        ranges: all ranges of `len(records)` steps. The `num_bytes` of CPU steps are memory traffic.
        machine: measured rates.
    """
    number = len(records)
    backwards = [each for each in ranges if each.track == "GPU" and each.name.startswith("backward")]

    def bytes_of(track: str, phase: str) -> tuple[int, float]:
        """Mean bytes and busy seconds of a track. Ranges whose middle lies in a backward belong to that phase."""
        own = [each for each in ranges if each.track == track and _within(each, backwards) is (phase == BACKWARD)]
        return sum(each.num_bytes for each in own) // number, trace.busy_seconds(own) / number

    shares: dict[str, tuple[Share, ...]] = {}
    for phase, name in ((UPDATE, "forward"), (BACKWARD, "backward")):
        (h2d_bytes, h2d_busy), (d2h_bytes, d2h_busy) = bytes_of("H2D", phase), bytes_of("D2H", phase)
        stepped, stepping = bytes_of("CPU step", phase)
        h2d, d2h = both_ways(h2d_bytes, d2h_bytes, machine)
        traffic = stepped + h2d_bytes + d2h_bytes
        computing = mean(record.without_waits(name) for record in records)
        with_waits = mean(record.seconds.get(name, 0.0) for record in records)
        shares[phase] = (
            Share("compute", computing, with_waits),
            Share("bus down", h2d_bytes / h2d, h2d_busy, h2d_bytes),
            Share("bus up", d2h_bytes / d2h, d2h_busy, d2h_bytes),
            Share("cores", stepped / machine.cpu_adamw_bytes_per_second, stepping, stepped),
            Share("DRAM", traffic / machine.cpu_and_bus_bytes_per_second, max(stepping, h2d_busy, d2h_busy), traffic),
        )
    return Bound(mean(record.seconds["step"] for record in records), shares)


def _within(each: Range, backwards: Sequence[Range]) -> bool:
    middle = (each.began + each.ended) / 2
    return any(backward.began <= middle <= backward.ended for backward in backwards)


def breakdown(record: StepRecord) -> str:
    """A step's phases on one line. They overlap, so they do not add up to the step."""
    phases = {phase: seconds for phase, seconds in record.seconds.items() if phase != "step" and seconds > 0}
    parts = " | ".join(f"{phase.replace('_', ' ')} {format_seconds(seconds)}" for phase, seconds in phases.items())
    return f"step {record.step}: {format_seconds(record.seconds['step'])} | {parts}"


class Profile:
    """Skips a step, traces the following ones, writes the trace, and prints phases and bound.

    Attributes:
        bound: None until the trace is written.
        python_seconds: CPU seconds a step of Python's threads that launch work; 0 until then.
    """

    def __init__(
        self,
        steps: int,
        path: Path,
        device: torch.device,
        undo: ExitStack,
        ranks: Solo | Group,
        graphs: BlockGraphs | None,
    ) -> None:
        """`undo` receives a callback that ends the trace when the engine is closed. Each rank writes a trace.

        Raises:
            ConfigError: `steps` is not a positive int, or other steps are being traced.
            OutputError: the folder of `path` does not exist.
        """
        if type(steps) is not int or steps < 1:
            raise ConfigError(f"steps must be a whole number >= 1, got {shown(steps)}")
        if not path.absolute().parent.is_dir():
            raise OutputError(f"{path.parent} is not a folder for the trace: create it, or choose another path")
        if trace.prepared() is not None:
            raise ConfigError("a trace is already running: wait until it is written, or close that engine")
        if ranks.rank:
            path = path.with_stem(f"{path.stem}-rank{ranks.rank}")
        self.path, self.num_steps = path, steps
        self.bound: Bound | None = None
        self.python_seconds = 0.0
        self._done, self._graphs, self._calls_before = 0, graphs, (0, 0)
        self._eager_before: Counter[str] = Counter()
        # Measured now, because there may be no VRAM left at the end.
        self._machine = measured_by(ranks, device)
        self._trace = trace.prepare(device, partial(record_compute, device, timing=True))
        undo.callback(self._end_with_engine)

    def boundary(self) -> None:
        """Called at the end of a window, before its update starts. The trace begins and ends here."""
        if self._done == 0:
            trace.begin()
            self._trace.note_cpu_time()
            self._calls_before = self._calls()
            self._eager_before = self._eager()
        elif self._done == self.num_steps:
            self._trace.note_cpu_time()
            trace.end()

    def step(self, settle: Callable[[], None], read_reports: Callable[[], None], telemetry: Telemetry) -> bool:
        """Called after the start of an update. After the last traced step, writes the trace, prints the results and
        returns True.

        Args:
            settle: waits until the update is done.
            read_reports: adds the records of finished steps to `telemetry`.
        """
        self._done += 1
        if self._done != 1 + self.num_steps:
            return False
        settle()
        ranges = self._trace.read()
        trace.forget()
        read_reports()
        records = list(telemetry.records)[-self.num_steps :]
        trace.write(self.path, ranges)
        self.python_seconds = self._trace.python_seconds() / self.num_steps
        self.bound = bound(ranges, records, self._machine)
        numbers = f"steps {records[0].step} to {records[-1].step}" if len(records) > 1 else f"step {records[0].step}"
        print(f"{numbers} traced in {self.path} (open it in ui.perfetto.dev)", *map(breakdown, records), sep="\n")
        print(*self.bound.lines(), *self._python(), sep="\n", flush=True)
        return True

    def _calls(self) -> tuple[int, int]:
        """Calls of blocks, and those that ran as graphs."""
        return (0, 0) if self._graphs is None else (self._graphs.num_calls, self._graphs.num_graphed)

    def _eager(self) -> Counter[str]:
        return Counter() if self._graphs is None else self._graphs.num_eager.copy()

    def _python(self) -> Iterator[str]:
        """Python's time, how many of the blocks' calls it launched as graphs, and why it did not launch all of them."""
        total, graphed = (now - before for now, before in zip(self._calls(), self._calls_before, strict=True))
        took = f"Python takes {format_seconds(self.python_seconds)} a step"
        yield f"{took}; {graphed / total:.0%} of the blocks' calls ran as graphs" if total else took
        for why, number in (self._eager() - self._eager_before).most_common():
            yield f"  {number / total:.0%} ran eagerly: {why}"

    def _end_with_engine(self) -> None:
        if trace.prepared() is self._trace:
            traced = max(0, self._done - 1)
            done = f"the engine was closed after {traced} of {self.num_steps} traced steps"
            print(f"no trace was written: {done}", flush=True)
            trace.forget()
