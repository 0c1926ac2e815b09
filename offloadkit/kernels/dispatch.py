"""Optimizer step, block sums of the norm and split of master weights, dispatched by the arrays' device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offloadkit.kernels import cpu, gpu
from offloadkit.kernels.muon import Workspace, step_matrices
from offloadkit.optim.norm import block_sums_reference, check_arguments
from offloadkit.optim.reference import split_master, step_reference
from offloadkit.optim.table import FlatState, Segment


def optimizer_step(
    state: FlatState,
    gradient: Tensor,
    segments: Sequence[Segment],
    grad_scale: float,
    workspace: Workspace | None = None,
) -> None:
    """One optimizer step in place on the arrays' device (CUDA: asynchronous, on the current stream).

    Elements outside the segments are untouched. `gradient` is bf16, fp16 or fp32, as long as the weights, and is first
    multiplied by `grad_scale`. CPU, GPU and `step_reference` are bit-equal for optimizers of elements. Matrices use
    `workspace` as `step_matrices` does. Raises TypeError for a wrong dtype and ValueError for a wrong length, layout or
    device.
    """
    if state.table.optimizer.step_unit == "matrix":
        step_matrices(state, gradient, segments, grad_scale, workspace)
        return
    step = {"cpu": cpu.optimizer_step, "cuda": gpu.optimizer_step}.get(state.weights.device.type, step_reference)
    step(state, gradient, segments, grad_scale)


def split_into(master: Tensor, weights: Tensor, remainder: Tensor) -> None:
    """Split fp32 master weights as `split_master` does, into arrays on any devices.

    All arrays are 1-D, contiguous and of equal length. If `master` is on the CPU, a wrong dtype raises TypeError, a
    wrong layout ValueError.
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
    """Write the sum of squares of every block to `out`, without host synchronization on CUDA.

    Arguments and errors as for `block_sums_reference`, but on CUDA the blocks' values are not checked.
    """
    check_arguments(gradient, blocks, out)
    if gradient.device.type == "cpu" and cpu.available():
        cpu.block_sums(gradient, blocks, out)
    elif gradient.device.type == "cuda" and gpu.available():
        gpu.block_sums(gradient, blocks, out)
    else:
        block_sums_reference(gradient, blocks, out)
