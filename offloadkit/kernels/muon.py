"""The step of matrices in a workspace: bit-equal to `reference.step_reference` on the same device, without allocating.

`step_matrices` steps whole matrices. Several ranks hold pieces of matrices: `write_update`, `orthogonalize` and
`apply_update` do the same operations one after the other. The first and the last take a piece, the second a matrix.

A step on the stepping thread must not run out of VRAM, so a plan counts `Matrix.workspace_bytes`. The workspace also
gives every matrix the same alignment, by which BLAS libraries choose a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offloadkit.optim.moments import CANONICAL_NAN
from offloadkit.optim.muon import MuonScalars, adjusted_lr
from offloadkit.optim.reference import round_to_fp32
from offloadkit.optim.table import FlatState, Matrix, Segment, check_state


class _Workspace:
    def __init__(self, memory: Tensor, matrix: Matrix) -> None:
        at, found = 0, {}
        for name, size in matrix.workspace.items():
            found[name], at = memory[at : at + size], at + size
        numel, short = matrix.rows * matrix.columns, min(matrix.rows, matrix.columns)
        self.one, self.two = (found[name].view(torch.bfloat16)[:numel] for name in ("one", "two"))
        self.gram, self.polynomial = (
            found[name].view(torch.bfloat16)[: short**2].view(short, short) for name in ("gram", "polynomial")
        )
        self.fp32, self.mask = found["fp32"].view(torch.float32), found["mask"].view(torch.bool)


def step_matrices(
    state: FlatState,
    gradient: Tensor,
    segments: Sequence[Segment],
    grad_scale: float,
    memory: Tensor | None = None,
) -> None:
    """One step in place of the matrices that `segments` name, one after the other. Raises as `check_state` does.

    Args:
        memory: uint8, the largest `workspace_bytes` of the matrices; None: it is allocated.
    """
    check_state(state, gradient, segments)
    sizes = [segment.matrix.workspace_bytes for segment in segments if segment.matrix is not None]
    if memory is None:
        memory = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=gradient.device)
    scale = round_to_fp32(grad_scale)
    for segment in segments:
        assert segment.matrix is not None
        _step(state, gradient, segment, segment.matrix, scale, _Workspace(memory, segment.matrix))


def _step(
    state: FlatState, gradient: Tensor, segment: Segment, matrix: Matrix, scale: float, workspace: _Workspace
) -> None:
    staged = workspace.one.view(matrix.rows, matrix.columns)
    _write(state, gradient, segment, scale, staged.T if matrix.is_transposed else staged, workspace)
    update = _orthogonalized(staged, workspace, MuonScalars(*segment.scalars))  # type: ignore[arg-type]
    _apply(state, update.T if matrix.is_transposed else update, segment, workspace)


def write_update(
    state: FlatState, gradient: Tensor, segment: Segment, grad_scale: float, into: Tensor, memory: Tensor
) -> None:
    """Update the momentum of a piece of a matrix, and write the piece's update before `orthogonalize`.

    Args:
        segment: the piece, with the whole matrix in `matrix`.
        into: bf16, 1-D, as long as the segment.
        memory: uint8, at least the matrix's `workspace_bytes`.
    """
    assert segment.matrix is not None
    workspace = _Workspace(memory, segment.matrix)
    _write(state, gradient, segment, round_to_fp32(grad_scale), into.view(-1, 1), workspace)


def orthogonalize(update: Tensor, matrix: Matrix, scalars: Sequence[float], memory: Tensor) -> None:
    """Orthogonalize the update of a matrix in place. `update`: bf16, 1-D, in the parameter's layout."""
    workspace = _Workspace(memory, matrix)
    staged = workspace.one.view(matrix.rows, matrix.columns)
    staged.copy_(matrix.of(update))
    matrix.of(update).copy_(_orthogonalized(staged, workspace, MuonScalars(*scalars)))  # type: ignore[arg-type]


def apply_update(state: FlatState, update: Tensor, segment: Segment, memory: Tensor) -> None:
    """Step the master weights of a piece of a matrix by its part of the orthogonalized update, bf16, 1-D."""
    assert segment.matrix is not None
    _apply(state, update.view(-1, 1), segment, _Workspace(memory, segment.matrix))


def _write(
    state: FlatState, gradient: Tensor, segment: Segment, scale: float, into: Tensor, workspace: _Workspace
) -> None:
    """`into`: [rows, columns] with the elements of the segment."""
    s = MuonScalars(*segment.scalars)  # type: ignore[arg-type]
    for rows, at in _slices(segment, into, workspace):
        scratch = workspace.fp32[: at.stop - at.start]
        buffer = state["momentum_buffer"][at]
        buffer.lerp_(scratch.copy_(gradient[at]).mul_(scale), 1 - s.momentum)
        new = scratch.lerp_(buffer, s.momentum) if s.nesterov else buffer
        into[rows].copy_(new.view(-1, into.size(1)))


def _apply(state: FlatState, update: Tensor, segment: Segment, workspace: _Workspace) -> None:
    """`update`: [rows, columns] with the elements of the segment."""
    s, matrix = MuonScalars(*segment.scalars), segment.matrix  # type: ignore[arg-type]
    assert matrix is not None
    rate = -adjusted_lr(s, matrix.rows, matrix.columns)
    for rows, at in _slices(segment, update, workspace):
        master = _read_master(state, at, workspace)
        master.mul_(s.decay)
        master.view(-1, update.size(1)).add_(update[rows], alpha=rate)
        _write_master(state, at, master, workspace)


def _slices(segment: Segment, elements: Tensor, workspace: _Workspace) -> Iterator[tuple[slice, slice]]:
    """(rows of `elements`, range of the flat layer) of the parts that fit the workspace."""
    num_rows, row = elements.shape
    most = max(1, workspace.fp32.numel() // row)
    for first in range(0, num_rows, most):
        last = min(first + most, num_rows)
        yield slice(first, last), slice(segment.start + first * row, segment.start + last * row)


def _orthogonalized(update: Tensor, workspace: _Workspace, s: MuonScalars) -> Tensor:
    is_tall = update.size(0) > update.size(1)
    x, other = (update.T if is_tall else update), workspace.two
    x.div_(x.norm().clamp(min=s.eps))
    for _ in range(int(s.ns_steps)):
        gram = torch.mm(x, x.T, out=workspace.gram)
        polynomial = torch.addmm(gram, gram, gram, beta=s.b, alpha=s.c, out=workspace.polynomial)
        new = torch.addmm(x, polynomial, x, beta=s.a, out=other.view(x.shape))
        x, other = new, workspace.one if other is workspace.two else workspace.two
    return x.T if is_tall else x


def _read_master(state: FlatState, at: slice, workspace: _Workspace) -> Tensor:
    weights, remainder = state.weights[at], state.remainder
    if remainder is None:
        return weights
    if weights.dtype == torch.float16:
        return remainder[at]
    master = workspace.fp32[: weights.numel()]
    bits = master.view(torch.int32)
    bits.copy_(weights.view(torch.int16)).bitwise_left_shift_(16).add_(remainder[at])
    return master


def _write_master(state: FlatState, at: slice, master: Tensor, workspace: _Workspace) -> None:
    """`master` is overwritten."""
    weights, remainder = state.weights[at], state.remainder
    if remainder is None:
        return
    if weights.dtype == torch.float16:
        weights.copy_(master)
        return
    is_nan = torch.ne(master, master, out=workspace.mask[: master.numel()])
    bits = master.view(torch.int32).masked_fill_(is_nan, CANONICAL_NAN)
    remainder[at].copy_(bits)
    weights.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))
