"""Steps, timed on the device's own time line."""

from __future__ import annotations

import itertools
import math
import time
from statistics import median
from typing import Any, Protocol

import torch

from offloadkit.device.process_memory import DeviceMemory
from offloadkit.engines.work import Batch, Work

LEAST_STEPS, MOST_STEPS = 6, 300
WARM_SECONDS, TIMED_SECONDS = 1.0, 3.0
"""Of steps whose number is not told. Single steps of some milliseconds differ by half of that; and after the first
steps layers move between processors for a while."""


class Engine(Protocol):
    """What the measuring loop calls."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of one micro-batch."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the micro-batch's share of the gradients."""

    def step(self, is_boundary: bool) -> None:
        """After each backward; updates the weights where `is_boundary`."""

    def settle(self) -> None:
        """Wait for everything that a step left running."""


class Clock:
    """Marks on the device's time line (CUDA events on the current stream), read after everything has run."""

    def __init__(self, on_cuda: bool) -> None:
        self._on_cuda = on_cuda
        self._marks: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        """Here, on the device, ends the phase `name`."""
        if self._on_cuda:
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def phases(self) -> list[tuple[str, float]]:
        """(name, seconds since the mark before), in order; the first mark only starts the clock."""
        pairs = itertools.pairwise(self._marks)
        return [(name, a.elapsed_time(b) / 1000 if self._on_cuda else b - a) for (_, a), (name, b) in pairs]


def timed_steps(
    engine: Engine, batches: list[Batch], work: Work, device: torch.device, vram: DeviceMemory
) -> dict[str, Any]:
    """Train for one first step, `work.warmup` more, one that fills the pipeline, and `work.steps` that are timed: where
    these are None, as many as it takes for two runs to agree.

    A step's time is that from its end to the end of the one before: nothing is synchronised in between, so what an
    engine hides under the next forward stays hidden, and what it does not is counted. `settled_seconds` is the mean
    with everything waited for at the end.
    """
    on_cuda = device.type == "cuda"
    losses: list[torch.Tensor] = []

    def train_step() -> None:
        for index, batch in enumerate(batches, start=1):
            loss = engine.forward(batch)
            engine.backward(loss)
            losses.append(loss.detach())
            del loss
            engine.step(index == len(batches))
        vram.sample()

    began = time.perf_counter()
    train_step()
    engine.settle()
    first_step_seconds = time.perf_counter() - began
    began, num_warm = time.perf_counter(), 0
    while num_warm < work.warmup or (work.steps is None and time.perf_counter() - began < WARM_SECONDS):
        train_step()
        num_warm += 1
    engine.settle()
    num_steps = work.steps or _enough_steps((time.perf_counter() - began) / num_warm)
    clock = Clock(on_cuda)
    began = time.perf_counter()
    for _ in range(1 + num_steps):
        train_step()
        clock.mark("step")
    engine.settle()
    settled_seconds = (time.perf_counter() - began) / (1 + num_steps)
    each = [seconds for _, seconds in clock.phases()]
    return {
        "step_seconds": median(each),
        "all_step_seconds": each,
        "settled_seconds": settled_seconds,
        "first_step_seconds": first_step_seconds,
        "last_loss": float(losses[-1]),
        "vram_bytes": vram.peak_bytes,
        "vram_source": vram.source,
        "max_reserved_bytes": torch.cuda.max_memory_reserved() if on_cuda else 0,
    }


def _enough_steps(seconds: float) -> int:
    """How many to time where one takes so long."""
    return min(MOST_STEPS, max(LEAST_STEPS, math.ceil(TIMED_SECONDS / seconds)))
