"""The plan: how many bytes of each kind a run needs, where they live, and how long a step takes. Pure arithmetic."""

from __future__ import annotations

from offloadkit.plan.shapes import (
    NUM_LANDINGS,
    NUM_STAGING,
    NUM_WEIGHT_BUFFERS,
    Dtype,
    LayerShape,
    Plan,
    format_bytes,
    make_plan,
    possible,
    tier_bytes,
)
from offloadkit.plan.work import MicroBatch, Pass, Stage

__all__ = [
    "NUM_LANDINGS",
    "NUM_STAGING",
    "NUM_WEIGHT_BUFFERS",
    "Dtype",
    "LayerShape",
    "MicroBatch",
    "Pass",
    "Plan",
    "Stage",
    "format_bytes",
    "make_plan",
    "possible",
    "tier_bytes",
]
