"""Figures that a monitor shows, computed from the plan and the step records."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import torch

from offloadkit.device.measure import vram_rate
from offloadkit.facts import hardware
from offloadkit.facts.fitted import KERNEL_SECONDS, STEP_EFFICIENCY
from offloadkit.facts.telemetry import StepRecord, mean_seconds
from offloadkit.planner import Plan
from offloadkit.planner.layout import CATEGORIES, GRAPHS

Point = tuple[int, float]

NUM_RECENT = 20
MAX_POINTS = 300
_MAX_WARM_UP = 5
_PAUSE = 2.0
"""A step longer than this many medians is assumed to contain an evaluation or a checkpoint."""


@dataclass
class _Bucket:
    lowest: Point
    highest: Point
    number: int
    total: float

    def join(self, other: _Bucket) -> None:
        self.lowest = min(self.lowest, other.lowest, key=lambda point: point[1])
        self.highest = max(self.highest, other.highest, key=lambda point: point[1])
        self.number += other.number
        self.total += other.total


class LossCurve:
    """Losses by step in at most `MAX_POINTS` points: buckets of steps whose width doubles when there are too many."""

    def __init__(self) -> None:
        self._buckets: list[_Bucket] = []
        self._width = 1

    def add(self, step: int, loss: float) -> None:
        """Add the next step's loss, unless it is not finite."""
        if not math.isfinite(loss):
            return
        new = _Bucket((step, loss), (step, loss), 1, loss)
        if self._buckets and self._buckets[-1].number < self._width:
            self._buckets[-1].join(new)
            return
        self._buckets.append(new)
        if len(self._buckets) > MAX_POINTS // 2:
            for left, right in zip(self._buckets[::2], self._buckets[1::2], strict=False):
                left.join(right)
            self._buckets = self._buckets[::2]
            self._width *= 2

    def points(self) -> tuple[Point, ...]:
        return tuple(point for bucket in self._buckets for point in sorted({bucket.lowest, bucket.highest}))

    def trend(self) -> tuple[Point, ...]:
        """Running mean over a twentieth of the curve; () for a short curve."""
        span = len(self._buckets) // 20
        if span < 2:
            return ()
        found = []
        total, number = 0.0, 0
        for index, bucket in enumerate(self._buckets):
            total, number = total + bucket.total, number + bucket.number
            if index >= span:
                gone = self._buckets[index - span]
                total, number = total - gone.total, number - gone.number
            found.append((max(bucket.lowest[0], bucket.highest[0]), total / number))
        return tuple(found)

    def newest(self) -> float | None:
        return self._buckets[-1].total / self._buckets[-1].number if self._buckets else None


class History:
    def __init__(self) -> None:
        self.newest: StepRecord | None = None
        self.num_steps = self.num_skipped = 0
        self.elapsed_seconds = 0.0
        self.loss = LossCurve()
        self.paused_seconds = 0.0
        self._recent: deque[StepRecord] = deque(maxlen=NUM_RECENT)

    def add(self, record: StepRecord) -> None:
        seconds = record.seconds.get("step", 0.0)
        if self.num_steps > _MAX_WARM_UP:
            usual = statistics.median(each.seconds.get("step", 0.0) for each in self._recent)
            self.paused_seconds += seconds - usual if seconds > _PAUSE * usual else 0.0
        self.newest = record
        self.num_steps += 1
        self.num_skipped += record.skipped
        self.elapsed_seconds += seconds
        self.loss.add(record.step, record.loss)
        self._recent.append(record)

    def left(self, num_steps: int, step_seconds: float | None) -> float | None:
        """Seconds of the next `num_steps` steps of `step_seconds`, and of as many pauses per step as before. None for
        fewer than two steps.
        """
        if self.num_steps < 2 or step_seconds is None:
            return None
        return num_steps * (step_seconds + self.paused_seconds / self.num_steps)

    def typical(self) -> list[StepRecord]:
        """The newest records, without warm-up steps and steps that contain a pause."""
        records = list(self._recent)
        if not records:
            return []
        warm_up = min(_MAX_WARM_UP, max(1, self.num_steps // 10)) - (self.num_steps - len(records))
        records = records[min(max(0, warm_up), len(records) - 1) :]
        most = _PAUSE * statistics.median(record.seconds.get("step", 0.0) for record in records)
        return [record for record in records if record.seconds.get("step", 0.0) <= most]


@dataclass(frozen=True)
class Machine:
    """Facts about a machine for the monitor.

    Attributes:
        vram_bytes_per_second: None if unknown.
        budgets: bytes that this process may use by tier ("vram", "ram"), including memory already in use.
    """

    on_gpu: bool
    vram_bytes_per_second: float | None
    budgets: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan | None) -> Self | None:
        if plan is None or plan.basis.hardware is None:
            return None
        return cls(not plan.on_cpu, plan.basis.hardware.vram_bytes_per_second, plan.budgets)

    @classmethod
    def here(cls) -> Self:
        """This machine with its free memory now. Measures its rates if necessary, in a few hundredths of a second.

        If CUDA is in use, the device is the GPU on which torch holds most memory.
        """
        device = hardware.busiest_device()
        budgets = {"ram": hardware.process_ram_bytes() + hardware.ram_available_bytes()}
        if device.type == "cuda":
            own = torch.cuda.memory_allocated(device) + hardware.vram_context_bytes(device)
            budgets["vram"] = own + hardware.vram_bytes(device)[0]
        return cls(device.type == "cuda", vram_rate(device), budgets)


State = Literal["waiting", "running", "stopping", "finished", "closed", "stopped", "failed"]
Parts = tuple[tuple[str, float], ...]

OTHER = "other"
"""Measured memory of no known category."""
_LAST = ("framework", GRAPHS, "activations")
"""Estimated categories; they share the measured memory that exceeds the engine's own allocations."""
_TIERS = {"vram": "VRAM", "ram": "RAM"}


@dataclass(frozen=True)
class Memory:
    """Bytes of one tier.

    Attributes:
        name: "VRAM" or "RAM".
        parts: bytes by category; the sum is `used`, or `planned` before the first measurement.
        used: measured bytes of the process; None before the first measurement.
        budget: bytes the process may use; None if unknown.
        planned_whole: whether `planned` includes activations and the framework's memory; it needs a plan for a
            micro-batch.
    """

    name: str
    parts: tuple[tuple[str, int], ...]
    used: int | None
    planned: int
    budget: int | None
    planned_whole: bool = True


@dataclass(frozen=True)
class RankFigures:
    """Figures of one rank; None if not measured.

    Attributes:
        name: "GPU 1"; "rank 1" without a GPU.
        step_seconds: of its newest step.
        vram, ram: bytes of the process.
    """

    name: str
    step_seconds: float | None
    vram: int | None
    ram: int | None

    @classmethod
    def of(cls, number: int, record: StepRecord) -> Self:
        vram, ram = (record.bytes.get(tier, {}).get("process") for tier in ("vram", "ram"))
        return cls(f"{'rank' if vram is None else 'GPU'} {number}", record.seconds.get("step"), vram, ram)


@dataclass(frozen=True)
class Slowdown:
    """Step time relative to a step with everything in VRAM.

    Attributes:
        step_seconds: measured in this run; planned before the first step (`is_planned`).
        baseline: "measured", or "predicted" from the measured compute time and an optimizer step in VRAM.
        parts: the difference in seconds by cause; negative if offloading saves time.
    """

    step_seconds: float
    baseline_seconds: float
    baseline: Literal["measured", "predicted"]
    parts: Parts = ()
    is_planned: bool = False
    step_range: tuple[float, float] | None = None
    """The planned least and most `step_seconds`, if Python bounds the step."""

    @property
    def factor(self) -> float:
        return self.step_seconds / self.baseline_seconds


@dataclass(frozen=True)
class Figures:
    """All figures of a view, in seconds and bytes; None if unknown.

    Attributes:
        split: seconds of a typical step by phase; the sum is the step.
        beside: busy seconds of each processor's step and each bus direction, in parallel to `split`.
        loss: the end of the running mean, or the newest loss in a short run.
        evaluations: (step, evaluation loss), in order.
        epoch: epochs done, of `num_epochs`; None if unknown, as the gradient norm and the learning rate.
        loss_curve: at most 300 points that keep the extremes. `loss_trend` is the running mean of a longer run.
        eta_seconds: remaining time at `step_seconds` a step, and the pauses (evaluations, checkpoints) at their rate so
            far.
        is_offloaded: whether something is kept outside VRAM; without a GPU nothing is. True if unknown.
        why_no_slowdown: reason why the slowdown is unknown; "" if it is known.
        num_skipped: steps with non-finite gradients.
        received: bytes from other ranks in the newest step, by kind; empty with one rank.
    """

    state: State
    steps_done: int
    total_steps: int | None
    elapsed_seconds: float
    eta_seconds: float | None
    loss: float | None
    loss_curve: tuple[Point, ...]
    loss_trend: tuple[Point, ...]
    step_seconds: float | None
    split: Parts
    beside: Parts
    tokens_per_second: float | None
    memory: tuple[Memory, ...]
    slowdown: Slowdown | None
    why_no_slowdown: str
    num_skipped: int
    ranks: tuple[RankFigures, ...] = ()
    received: Mapping[str, int] = field(default_factory=dict)
    padding_share: float | None = None
    evaluations: tuple[Point, ...] = ()
    learning_rate: float | None = None
    grad_norm: float | None = None
    epoch: float | None = None
    num_epochs: int | None = None
    is_offloaded: bool = True

    @property
    def shown_slowdown(self) -> Slowdown | None:
        """The slowdown where something is offloaded or the time without offloading was measured."""
        slow = self.slowdown
        return slow if self.is_offloaded or (slow is not None and slow.baseline == "measured") else None


def figures(
    history: History,
    plan: Plan | None = None,
    *,
    total_steps: int | None = None,
    machine: Machine | None = None,
    baseline_seconds: float | None = None,
    state: State = "running",
    ranks: Mapping[int, StepRecord] | None = None,
    padding_share: float | None = None,
    evaluations: Sequence[Point] = (),
    epoch: float | None = None,
    num_epochs: int | None = None,
) -> Figures:
    """Compute the figures. `ranks`: the newest record of each rank, with several ranks. `machine`: if the plan was made
    without one. `baseline_seconds`: a measured step with everything in VRAM. Other arguments: see `Figures`.
    """
    typical = history.typical()
    seconds = mean_seconds(typical)
    newest = history.newest
    done = newest.step if newest else 0
    measured = newest.bytes if newest else None
    machine = Machine.of(plan) or machine
    elsewhere = machine is not None and measured and machine.on_gpu is not _on_gpu(measured)
    rated = None if elsewhere else machine  # the engine uses another device than this process appeared to
    slow, why = slowdown(seconds, plan, rated, baseline_seconds)
    tokens = [record.num_tokens or 0 for record in typical]
    trend = history.loss.trend()
    step = seconds.get("step")
    on_gpu = _on_gpu(measured) if measured else machine is None or machine.on_gpu
    return Figures(
        state=state,
        steps_done=done,
        total_steps=total_steps,
        elapsed_seconds=history.elapsed_seconds,
        eta_seconds=None if total_steps is None else history.left(max(0, total_steps - done), step),
        loss=trend[-1][1] if trend else history.loss.newest(),
        loss_curve=history.loss.points(),
        loss_trend=trend,
        step_seconds=step,
        split=split(seconds),
        beside=beside(seconds, on_gpu=on_gpu),
        tokens_per_second=sum(tokens) / (len(typical) * step) if any(tokens) and step else None,
        memory=memory(measured, plan, machine),
        slowdown=slow,
        why_no_slowdown=why,
        num_skipped=history.num_skipped,
        ranks=tuple(RankFigures.of(number, record) for number, record in sorted((ranks or {}).items())),
        received=newest.received if newest else {},
        padding_share=padding_share,
        evaluations=tuple(evaluations),
        learning_rate=newest.learning_rate if newest else None,
        grad_norm=newest.grad_norm if newest else None,
        epoch=epoch,
        num_epochs=num_epochs,
        is_offloaded=on_gpu and is_offloaded(plan),
    )


def is_offloaded(plan: Plan | None) -> bool:
    """Whether the plan keeps or recomputes something outside VRAM; True without a plan."""
    return plan is None or any(
        {where.weights, where.gradients, where.states} != {"vram"} or where.activations != "keep"
        for where in plan.placements
    )


def split(seconds: Mapping[str, float]) -> Parts:
    """Compute, waits and the rest of a step, from its phases (see `StepRecord`).

    A forward that begins before the last gradient is in RAM waits first for the bus, then for the CPU.
    """
    if not seconds.get("step"):
        return ()
    get = defaultdict(float, seconds)
    gap = max(0.0, get["step"] - get["forward"] - get["backward"])
    tail = min(get["forward_wait"], max(0.0, get["gradient_tail"] - gap))
    forward_waits = get["forward_wait"] + get["forward_bus_wait"] + get["forward_gpu_step_wait"]
    parts = {
        "forward": get["forward"] - forward_waits,
        "backward": get["backward"] - get["backward_wait"] - get["backward_bus_wait"],
        "wait for bus": get["forward_bus_wait"] + get["backward_bus_wait"] + tail,
        "wait for CPU step": get["forward_wait"] + get["backward_wait"] - tail,
        "step on the GPU": get["forward_gpu_step_wait"],
        "data and the rest": gap,
    }
    return tuple((name, max(0.0, number)) for name, number in parts.items())


def beside(seconds: Mapping[str, float], *, on_gpu: bool = True) -> Parts:
    """Busy seconds of the processors' steps and the bus directions, in parallel to the device."""
    names = {"CPU step": "cpu_step"}
    if on_gpu:
        names |= {"GPU step": "gpu_step", "RAM -> GPU": "h2d", "GPU -> RAM": "d2h"}
    return tuple((name, seconds[phase]) for name, phase in names.items() if phase in seconds)


def _on_gpu(measured: Mapping[str, Mapping[str, int]]) -> bool:
    return "process" in measured.get("vram", {})


def memory(
    measured: Mapping[str, Mapping[str, int]] | None, plan: Plan | None, machine: Machine | None = None
) -> tuple[Memory, ...]:
    """Memory of VRAM and RAM from a record's bytes; without a GPU only RAM, with VRAM's categories."""
    tiers = measured or (plan.tiers if plan else {})
    known = {
        tier: {name: size for name, size in tiers.get(tier, {}).items() if not name.startswith("process") and size}
        for tier in _TIERS
    }
    used = {tier: tiers.get(tier, {}).get("process") for tier in _TIERS}
    no_gpu = machine is not None and not machine.on_gpu if measured is None else not _on_gpu(measured)
    whole = "framework" in known["ram"]
    if no_gpu:
        known["ram"] = Counter(known["ram"]) + Counter(known.pop("vram"))
    budgets = (machine.budgets if machine else {}) | (plan.budgets if plan else {})
    found = []
    for tier, sizes in known.items():
        have = used[tier]
        parts = sizes if have is None else divided(sizes, have)
        order = [*CATEGORIES, *parts]
        in_order = sorted(parts.items(), key=lambda part: order.index(part[0]))
        if parts:
            found.append(Memory(_TIERS[tier], tuple(in_order), have, sum(sizes.values()), budgets.get(tier), whole))
    return tuple(found)


def divided(known: Mapping[str, int], used: int) -> dict[str, int]:
    """Divide `used` bytes into the engine's allocations, then the estimates; the rest is `OTHER`."""
    parts, left = {}, used
    for name in sorted(known, key=lambda name: _LAST.index(name) if name in _LAST else -1):
        parts[name] = min(known[name], left)
        left -= parts[name]
    if left:
        parts[OTHER] = left
    return {name: size for name, size in parts.items() if size}


def slowdown(
    seconds: Mapping[str, float], plan: Plan | None, machine: Machine | None, baseline_seconds: float | None
) -> tuple[Slowdown | None, str]:
    """The slowdown, or the reason why it is unknown.

    A predicted baseline is the measured compute time without recomputation, the rest of the step, and AdamW at VRAM's
    rate.
    """
    step = seconds.get("step")
    if not step:
        if plan is not None and plan.seconds is not None and plan.large_gpu_seconds:
            step, large = plan.seconds.step, plan.large_gpu_seconds
            return Slowdown(step, large, "predicted", is_planned=True, step_range=plan.step_range), ""
        return None, "no step was timed yet"
    parts = dict(split(seconds))
    gpu_step = gpu_step_seconds(plan, machine)
    if baseline_seconds is None and gpu_step is None:
        return None, _missing(plan, machine)
    recomputed = parts["forward"] * recomputed_share(plan)
    extra = {
        "wait for bus": parts["wait for bus"],
        "wait for CPU step": parts["wait for CPU step"],
        "recomputed activations": recomputed,
        "wait for GPU step": max(0.0, parts["step on the GPU"] - (gpu_step or 0.0)),  # states from RAM
        "AdamW in VRAM": min(0.0, parts["step on the GPU"] - (gpu_step or 0.0)),
    }
    total = step - sum(extra.values()) if baseline_seconds is None else baseline_seconds
    if baseline_seconds is not None:
        extra["other differences"] = step - baseline_seconds - sum(extra.values())
    named = tuple((name, number) for name, number in extra.items() if abs(number) > 1e-3 * step)
    return Slowdown(step, total, "predicted" if baseline_seconds is None else "measured", named), ""


def _missing(plan: Plan | None, machine: Machine | None) -> str:
    if plan is None:
        missing = "without a plan the optimizer step in VRAM cannot be predicted: pass Monitor(engine.plan, ...)"
    elif machine is None and Machine.of(plan) is not None:
        missing = "the plan was made for another device than the engine computes on"
    elif machine is None:
        missing = "the device that the engine computes on is unknown"
    else:
        missing = "VRAM is too full to measure its speed"
    return f"{missing}; pass a measured step without offloading as baseline_seconds"


def gpu_step_seconds(plan: Plan | None, machine: Machine | None) -> float | None:
    """Seconds of AdamW on a GPU that holds all states: its memory traffic over VRAM's rate. None if unknown."""
    if plan is None or machine is None or machine.vram_bytes_per_second is None:
        return None
    traffic = sum(layer.step_bytes(plan.accumulation) for layer in plan.layers)
    num_steps = sum(layer.kind.is_trained for layer in plan.layers)
    return traffic / (machine.vram_bytes_per_second * STEP_EFFICIENCY) + num_steps * KERNEL_SECONDS


def recomputed_share(plan: Plan | None) -> float:
    """Fraction of forward that backward recomputes, estimated by the parameters of repeated blocks. Blocks that keep
    their matmuls do not count.
    """
    if plan is None:
        return 0.0
    blocks = [(layer.numel, where) for layer, where in zip(plan.layers, plan.placements, strict=True) if layer.in_block]
    again = sum(numel for numel, where in blocks if where.activations not in ("keep", "cheap"))
    return again / max(1, sum(numel for numel, _ in blocks))
