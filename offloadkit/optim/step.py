"""The AdamW step wherever a flat layer lies: one name for the kernels of all processors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from offloadkit.optim import cpu, gpu
from offloadkit.optim.adamw import FlatState, Segment, adamw_step_reference


def adamw_step(state: FlatState, gradient: Tensor, segments: Sequence[Segment], grad_scale: float) -> None:
    """One AdamW step, in place, on the arrays' device (on CUDA: on the current stream, without waiting for it).

    Elements outside the segments are untouched. `gradient` is bf16, fp16 or fp32, of the weights' length;
    `grad_scale` multiplies it first. The CPU, the GPU and `adamw_step_reference` give the same bits. Raises TypeError
    for a dtype and ValueError for a length, layout or device that a step cannot work with.
    """
    step = {"cpu": cpu.adamw_step, "cuda": gpu.adamw_step}.get(state.weights.device.type, adamw_step_reference)
    step(state, gradient, segments, grad_scale)
