"""The optimizer step, the norm's block sums and the split of master weights wherever the arrays lie: one name for the
kernels of all processors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offloadkit.kernels import cpu, gpu
from offloadkit.optim.norm import block_sums_reference, check_arguments
from offloadkit.optim.reference import split_master, step_reference
from offloadkit.optim.table import FlatState, Segment


def optimizer_step(state: FlatState, gradient: Tensor, segments: Sequence[Segment], grad_scale: float) -> None:
    """One step of the state's optimizer, in place, on the arrays' device (CUDA: on the current stream, not waited for).

    Elements outside the segments are untouched. `gradient` is bf16, fp16 or fp32, of the weights' length;
    `grad_scale` multiplies it first. The CPU, the GPU and `step_reference` give the same bits. Raises TypeError for a
    dtype and ValueError for a length, layout or device that a step cannot work with.
    """
    step = {"cpu": cpu.optimizer_step, "cuda": gpu.optimizer_step}.get(state.weights.device.type, step_reference)
    step(state, gradient, segments, grad_scale)


def split_into(master: Tensor, weights: Tensor, remainder: Tensor) -> None:
    """Writes the halves that `split_master` cuts fp32 master weights into, wherever each of the three arrays lies.

    All are 1-D, contiguous and of one length. From the CPU a wrong dtype raises TypeError, a wrong layout ValueError.
    """
    halves = weights, remainder
    if master.device.type == "cpu":
        made = [half if half.device == master.device else torch.empty_like(half, device="cpu") for half in halves]
        cpu.split_into(master, *made)
    else:
        made = list(split_master(master))
    for half, found in zip(halves, made, strict=True):
        if half is not found:
            half.copy_(found)


def block_sums(gradient: Tensor, blocks: Tensor, out: Tensor) -> None:
    """Writes the sum of squares of each block to `out`, without a host synchronisation on CUDA.

    gradient: bf16, fp16 or fp32, 1-D. blocks: int64 [num_blocks, 2] from `norm_blocks`. out: fp64 [num_blocks].
    All three on one device. Raises TypeError or ValueError for anything else; on CUDA the blocks' values are trusted.
    """
    check_arguments(gradient, blocks, out)
    if gradient.device.type == "cpu" and cpu.available():
        cpu.block_sums(gradient, blocks, out)
    elif gradient.device.type == "cuda" and gpu.available():
        gpu.block_sums(gradient, blocks, out)
    else:
        block_sums_reference(gradient, blocks, out)
