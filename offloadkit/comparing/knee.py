"""Where larger batches stop being almost free: two asymptotes and the size at which they meet.

Below the knee a step takes what does not depend on the batch (the optimizer on the CPU, the bus, starting kernels):
time per sample falls as 1 / batch. Above it a sample takes what computing it takes. The knee is the batch at which the
flat time equals the batch's share of the other: (seconds of the shortest step) / (least seconds of a sample).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from offloadkit.engines.forecast import Forecast

_NEAR = 1.5
"""A knee within this factor of the smallest or the largest size lies at that end: too little was measured beyond it."""
_GROWS = 0.5
"""Exponent of seconds by rows above which the GPU's time is for its rows."""

FIXED = ("CPU step", "H2D", "D2H", "disk", "GPU step", "launches")
"""Resources whose seconds do not grow with the batch, or hardly."""


@dataclass(frozen=True)
class Knee:
    """Rows of a micro-batch. `where` says "within" the sizes, or which end the knee lies beyond; then `size` is that
    end's."""

    size: float
    where: Literal["within", "before", "beyond"]

    def place(self, sizes: Sequence[int]) -> int:
        """Index of the nearest of the sorted `sizes`, by ratio."""
        ordered = sorted(sizes)
        return min(range(len(ordered)), key=lambda index: abs(math.log(ordered[index] / self.size)))


def meeting(flat_seconds: float, compute_seconds: Mapping[int, float]) -> Knee | None:
    """Where `flat_seconds` meet the seconds of computing.

    Args:
        flat_seconds: of a step, whatever its size.
        compute_seconds: of steps by rows of a micro-batch; at least two, else there is no knee to be seen.
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
    """From the seconds of a step by rows of a micro-batch; None for less than two sizes."""
    return meeting(min(step_seconds.values()), step_seconds) if step_seconds else None


def predicted_knee(forecasts: Mapping[int, Forecast]) -> Knee | None:
    """From the plan's bound: the batch whose computing takes as long as the busiest of what does not grow with it
    (optimizer, bus, starting kernels, reading weights); None for less than two sizes, or without predicted seconds."""
    known = {size: made for size, made in forecasts.items() if made.step_seconds is not None}
    if not known:
        return None
    smallest = known[min(known)]
    flat = max(fixed_seconds(smallest)[1], smallest.busy["GPU"])
    return meeting(flat, {size: made.busy["GPU"] for size, made in known.items()})


def fixed_seconds(made: Forecast) -> tuple[str, float]:
    """The busiest of the resources that do not grow with the batch, and its seconds a step."""
    name = max(FIXED, key=lambda name: made.busy.get(name, 0.0))
    return name, made.busy.get(name, 0.0)


def reads_weights(forecasts: Mapping[int, Forecast]) -> bool:
    """Whether the GPU's time for the smallest size is not for its rows but for the weights that each row's product
    reads: it hardly grows to the next size."""
    first, *others = sorted(forecasts)
    if not others:
        return False
    grown = forecasts[others[0]].busy["GPU"] / forecasts[first].busy["GPU"]
    return bool(grown < (others[0] / first) ** _GROWS)
