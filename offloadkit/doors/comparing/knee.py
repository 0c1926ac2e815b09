"""The knee: the batch size above which larger batches stop being almost free.

Below the knee a step's time does not depend on the batch (CPU optimizer step, bus, kernel launches). Above the knee
time per sample is constant. The knee is (seconds of the shortest step) / (least seconds per sample).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from offloadkit.doors.engines.forecast import Forecast

_NEAR = 1.5
"""A knee within this factor of the smallest or largest size counts as outside, because too little was measured
there.
"""
_GROWS = 0.5
"""Exponent of GPU seconds by rows above which GPU time counts as proportional to the rows."""

FIXED = ("CPU step", "H2D", "D2H", "disk", "GPU step", "launches")
"""Resources whose seconds hardly depend on the batch size."""


@dataclass(frozen=True)
class Knee:
    """Rows per micro-batch at the knee. `where`: "within" the sizes, or "before" or "beyond" them; `size` is then the
    smallest or largest size."""

    size: float
    where: Literal["within", "before", "beyond"]

    def place(self, sizes: Sequence[int]) -> int:
        ordered = sorted(sizes)
        return min(range(len(ordered)), key=lambda index: abs(math.log(ordered[index] / self.size)))


def crossover(flat_seconds: float, compute_seconds: Mapping[int, float]) -> Knee | None:
    """The knee, where constant and growing seconds are equal; None for fewer than two sizes.

    `flat_seconds`: of a step of any size; `compute_seconds`: by rows per micro-batch.
    """
    sizes = sorted(compute_seconds)
    if len(sizes) < 2:
        return None
    per_sample = {size: compute_seconds[size] / size for size in sizes}
    size = flat_seconds / min(per_sample.values())
    if size <= sizes[0] * _NEAR:
        return Knee(sizes[0], "before")
    if size >= sizes[-1] / _NEAR:
        return Knee(sizes[-1], "beyond")
    return Knee(size, "within")


def measured_knee(step_seconds: Mapping[int, float]) -> Knee | None:
    """The knee of step seconds by rows per micro-batch, or None for fewer than two sizes."""
    return crossover(min(step_seconds.values()), step_seconds) if step_seconds else None


def predicted_knee(forecasts: Mapping[int, Forecast]) -> Knee | None:
    """The knee of the plan: the batch whose compute takes as long as the busiest fixed resource (optimizer, bus, kernel
    launches, reading weights). None for fewer than two sizes or without predicted seconds.
    """
    known = {size: made for size, made in forecasts.items() if made.step_seconds is not None}
    if not known:
        return None
    smallest = known[min(known)]
    flat = max(fixed_seconds(smallest)[1], smallest.busy["GPU"])
    return crossover(flat, {size: made.busy["GPU"] for size, made in known.items()})


def fixed_seconds(made: Forecast) -> tuple[str, float]:
    name = max(FIXED, key=lambda name: made.busy.get(name, 0.0))
    return name, made.busy.get(name, 0.0)


def reads_weights(forecasts: Mapping[int, Forecast]) -> bool:
    """Whether the GPU's time for the smallest size is spent on reading weights: it hardly grows to the next size."""
    first, *others = sorted(forecasts)
    if not others:
        return False
    grown = forecasts[others[0]].busy["GPU"] / forecasts[first].busy["GPU"]
    return bool(grown < (others[0] / first) ** _GROWS)
