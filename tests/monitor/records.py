"""Hand-made step records, and a display that keeps figures."""

from __future__ import annotations

from typing import Any

from offloadkit.facts.telemetry import StepRecord
from offloadkit.monitor.figures import Figures

GIB = 1 << 30

SECONDS = {
    "step": 1.0,
    "forward": 0.5,
    "backward": 0.4,
    "forward_wait": 0.25,
    "forward_bus_wait": 0.05,
    "backward_bus_wait": 0.1,
    "gradient_tail": 0.16,
    "cpu_step": 0.6,
    "h2d": 0.2,
    "d2h": 0.3,
}
"""A step of one second; a tenth of it is neither forward nor backward."""

BYTES = {
    "vram": {"working weights": 4 * GIB, "activations": 2 * GIB, "framework": GIB, "process": 8 * GIB},
    "ram": {"master weights": 4 * GIB, "moments": 16 * GIB, "framework": GIB, "process": 20 * GIB},
}


def record(
    number: int, loss: float = 1.0, /, *, skipped: bool = False, bytes: Any = BYTES, **seconds: float
) -> StepRecord:
    """One step with `SECONDS`, updated by the given values."""
    return StepRecord(number, loss, 640, 1.0, 1e-3, skipped, SECONDS | seconds, bytes)


class Watched:
    """A display that keeps the figures it receives."""

    def __init__(self) -> None:
        self.ends: list[Figures] = []

    def open(self, figures: Figures) -> None: ...

    def update(self, figures: Figures, *, is_polled: bool) -> None: ...

    def close(self, figures: Figures) -> None:
        self.ends.append(figures)
