"""Time steps on the device's timeline."""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from contextlib import suppress
from statistics import mean, median
from typing import Any

import torch

from offloadkit.device.process_memory import DeviceMemory, peak_reserved_bytes
from offloadkit.doors.engines.engine import Engine
from offloadkit.doors.engines.work import Batch, Work, width
from offloadkit.errors import RepeatWindowError
from offloadkit.hf.widths import rounded_up

LEAST_STEPS, MOST_STEPS = 6, 300
WARM_SECONDS, TIMED_SECONDS = 1.0, 3.0
"""Durations that determine the number of steps if it is not given. Short steps vary by half of their time, and layers
change processors for some steps after the start.
"""

BY_LEANER_PLAN = "memory ran out: by a leaner plan"


class Clock:
    """Marks on the device's timeline (CUDA events on the current stream), read after all work has finished."""

    def __init__(self, on_cuda: bool) -> None:
        self._on_cuda = on_cuda
        self._marks: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        """End the phase `name` at this point of the device's timeline."""
        if self._on_cuda:
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def phases(self) -> list[tuple[str, float]]:
        """(name, seconds since the previous mark) in order; the first mark only starts the clock."""
        pairs = itertools.pairwise(self._marks)
        return [(name, a.elapsed_time(b) / 1000 if self._on_cuda else b - a) for (_, a), (name, b) in pairs]


def timed_steps(
    engine: Engine, steps: list[list[Batch]], work: Work, device: torch.device, vram: DeviceMemory
) -> dict[str, Any]:
    """Train one first step, `work.warmup` steps, one step that fills the pipeline, and `work.steps` timed steps.

    If `work.steps` is None, enough steps run for two measurements to agree. `steps` are used in turn, equally often;
    `step_seconds` is the mean over them of their medians. A step lasts from the end of the previous step to its own
    end, without synchronization in between: work that an engine hides under the next forward stays hidden.
    VRAM peaks include the first step. After OOM recovery timing starts over with the new plan.
    """
    while True:
        with suppress(RepeatWindowError):
            return _timed(engine, steps, work, device, vram)


def _timed(
    engine: Engine, steps: list[list[Batch]], work: Work, device: torch.device, vram: DeviceMemory
) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    losses: list[torch.Tensor] = []
    turns = itertools.cycle(range(len(steps)))

    def train_step(clock: Clock) -> int:
        turn = next(turns)
        batches = steps[turn]
        for index, batch in enumerate(batches, start=1):
            loss = engine.forward(batch)
            clock.mark("forward")
            engine.backward(loss)
            clock.mark("backward")
            losses.append(loss.detach())
            del loss
            engine.step(index == len(batches))
            clock.mark("step")
        vram.sample()
        return turn

    train_step(Clock(on_cuda))
    engine.settle()
    began, num_warm = time.perf_counter(), 0
    while num_warm < work.warmup or (work.steps is None and time.perf_counter() - began < WARM_SECONDS):
        train_step(Clock(on_cuda))
        num_warm += 1
    engine.settle()
    num_steps = work.steps
    if num_steps is None:
        seconds = (time.perf_counter() - began) / num_warm
        num_steps = min(MOST_STEPS, max(LEAST_STEPS, math.ceil(TIMED_SECONDS / seconds)))
    num_steps = rounded_up(num_steps, len(steps))
    clock = Clock(on_cuda)
    timed = [train_step(clock) for _ in range(1 + num_steps)][1:]
    engine.settle()
    phases = _by_step(clock.phases(), 3 * len(steps[0]))
    each = [sum(step.values()) for step in phases]
    by_turn = _medians(timed, each)
    return {
        "step_seconds": mean(by_turn.values()),
        "all_step_seconds": each,
        "seconds_by_width": _medians([width(steps[turn]) for turn in timed], each),
        "phase_seconds": {name: median(step[name] for step in phases) for name in phases[0]},
        "num_warmup": 2 + num_warm,
        "last_loss": float(losses[-1]),
        "vram_bytes": vram.peak_bytes,
        "vram_source": vram.source,
        "max_allocated_bytes": torch.cuda.max_memory_allocated() if on_cuda else 0,
        "max_reserved_bytes": peak_reserved_bytes(device) if on_cuda else 0,
    }


def _medians(keys: list[int], seconds: list[float]) -> dict[int, float]:
    found: dict[int, list[float]] = defaultdict(list)
    for key, each in zip(keys, seconds, strict=True):
        found[key].append(each)
    return {key: median(found[key]) for key in sorted(found)}


def _by_step(phases: list[tuple[str, float]], num_a_step: int) -> list[dict[str, float]]:
    """Seconds by phase of each step, summed over micro-batches, without the first step, which has no start mark."""
    steps = []
    for first in range(num_a_step - 1, len(phases), num_a_step):
        step: dict[str, float] = defaultdict(float)
        for name, seconds in phases[first : first + num_a_step]:
            step[name] += seconds
        steps.append(step)
    return steps
