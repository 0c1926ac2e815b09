"""The planner: bytes of each kind that a run needs, their places, and the seconds of a step. Pure arithmetic."""

from __future__ import annotations

from offloadkit.optim.table import Dtype
from offloadkit.planner.layout import (
    NUM_GRADIENT_BUCKETS,
    NUM_STAGING,
    NUM_STATE_BUFFERS,
    NUM_STEP_BUFFERS,
    NUM_WEIGHT_BUFFERS,
    LayerShape,
    chunk_numel,
    cpu_can_step,
    gpu_can_step,
    is_built,
    is_small,
    possible,
    reaches_ram,
    step_buffer_bytes,
    tier_bytes,
)
from offloadkit.planner.leaner import leaner
from offloadkit.planner.make import placed
from offloadkit.planner.plan import Plan, make_plan
from offloadkit.planner.prediction import FrozenModel
from offloadkit.planner.work import MicroBatch, Pass, Rows, Stage

__all__ = [
    "NUM_GRADIENT_BUCKETS",
    "NUM_STAGING",
    "NUM_STATE_BUFFERS",
    "NUM_STEP_BUFFERS",
    "NUM_WEIGHT_BUFFERS",
    "Dtype",
    "FrozenModel",
    "LayerShape",
    "MicroBatch",
    "Pass",
    "Plan",
    "Rows",
    "Stage",
    "chunk_numel",
    "cpu_can_step",
    "gpu_can_step",
    "is_built",
    "is_small",
    "leaner",
    "make_plan",
    "placed",
    "possible",
    "reaches_ram",
    "step_buffer_bytes",
    "tier_bytes",
]
