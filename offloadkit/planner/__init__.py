"""The plan: how many bytes of each kind a run needs, where they live, and how long a step takes. Pure arithmetic.

`shapes` (bytes of a layer), `memory` (bytes of a run), `costs` (seconds of a layer and of a pass), `queues` (who is
busy until when), `seconds` (a step), `search` (placements), `plan` (all of it), `text` and `explain` (in words); `work`
is what a micro-batch computes, as `offload.micro_batch` found it.
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
    is_small,
    possible,
    step_buffer_bytes,
    tier_bytes,
)
from offloadkit.planner.plan import Plan, make_plan
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
    "is_small",
    "make_plan",
    "possible",
    "step_buffer_bytes",
    "tier_bytes",
]
