"""The planner: how many bytes of each kind a run needs, where they live, and how long a step takes. Pure arithmetic.

`work`: what a micro-batch computes, as `tracing` counts it. `layout`: bytes of a layer and of a run. `seconds`: the
time of a step. `phases`: what reading, saving and closing take. `search`: the fastest placements. `plan`: all of it as
one `Plan`, and in words. `ranks`: one machine, as each of several ranks has it. `leaner`: another one for a run that is
short of memory. `faster`: another one for a machine whose rates are not those that were planned with.
"""

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
    step_buffer_bytes,
    tier_bytes,
)
from offloadkit.planner.leaner import leaner
from offloadkit.planner.plan import Plan, make_plan, placed
from offloadkit.planner.work import MicroBatch, Pass, Rows, Stage

__all__ = [
    "NUM_GRADIENT_BUCKETS",
    "NUM_STAGING",
    "NUM_STATE_BUFFERS",
    "NUM_STEP_BUFFERS",
    "NUM_WEIGHT_BUFFERS",
    "Dtype",
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
    "step_buffer_bytes",
    "tier_bytes",
]
