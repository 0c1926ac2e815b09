"""The step of matrices in a workspace: bit-equal to `reference.step_reference` on the same device, without allocating.

`step_matrices` steps whole matrices. Several ranks hold pieces of matrices: `write_update`, `orthogonalize` and
`apply_update` do the same operations one after the other. The first and the last take a piece, the second a matrix.

A step on the stepping thread must not run out of VRAM, so a plan counts `Matrix.workspace_bytes`. The workspace also
gives every matrix the same alignment, because BLAS libraries choose a kernel by alignment, and the fixed addresses that
CUDA graphs need. A step of one matrix is a Triton kernel, a graph of Newton-Schulz iterations and a Triton kernel.
Without Triton and graphs it is some dozens of torch operations with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offloadkit.errors import warn_once
from offloadkit.kernels.gpu import is_built
from offloadkit.optim.moments import CANONICAL_NAN
from offloadkit.optim.muon import MuonScalars, adjusted_lr
from offloadkit.optim.reference import round_to_fp32
from offloadkit.optim.table import FlatState, Matrix, Segment, check_state, state_table

try:
    from offloadkit.kernels import muon_triton
except ImportError:
    muon_triton = None  # type: ignore[assignment]

_FLAT, _TILE = (1, 1024), (64, 64)
"""Rows and columns of a Triton program, if the update is contiguous and if it is not."""


class _Arrays(NamedTuple):
    """The parts of a workspace's memory for one matrix."""

    one: Tensor
    two: Tensor
    gram: Tensor
    polynomial: Tensor
    fp32: Tensor
    mask: Tensor

    @classmethod
    def of(cls, memory: Tensor, matrix: Matrix) -> _Arrays:
        at, found = 0, {}
        for name, size in matrix.workspace.items():
            found[name], at = memory[at : at + size], at + size
        numel, short = matrix.rows * matrix.columns, min(matrix.rows, matrix.columns)
        one, two = (found[name].view(torch.bfloat16)[:numel] for name in ("one", "two"))
        squares = (found[name].view(torch.bfloat16)[: short**2] for name in ("gram", "polynomial"))
        gram, polynomial = (square.view(short, short) for square in squares)
        return cls(one, two, gram, polynomial, found["fp32"].view(torch.float32), found["mask"].view(torch.bool))


_Key = tuple[int, int, tuple[float, ...]]
Capture = Callable[[Callable[[], tuple[()]]], Callable[[], None]]
"""Captures work as a graph, and returns the function that replays it. It raises `RuntimeError` if it cannot."""


@dataclass(eq=False)
class Workspace:
    """Memory for the step of one matrix at a time, and graphs of Newton-Schulz iterations in this memory.

    Attributes:
        memory: uint8, at least `workspace_bytes` of each matrix.
    """

    memory: Tensor
    _arrays: dict[Matrix, _Arrays] = field(default_factory=dict)
    _graphs: dict[_Key, tuple[Callable[[], None], Tensor]] = field(default_factory=dict)
    """The function that replays, and the result."""

    def capture(self, matrices: Iterable[Matrix], scalars: Sequence[float], capture: Capture) -> None:
        """Capture the iterations of each shape with these scalars. Other shapes and scalars are iterated without a
        graph. Overwrites the memory.

        Call it on the main thread while no other work uses the memory. Another thread may replay the graphs.
        """
        s = MuonScalars(*scalars)  # type: ignore[arg-type]
        for matrix in matrices:
            key = _key(matrix, s)
            if key in self._graphs:
                continue
            arrays, found = self.arrays(matrix), list[Tensor]()
            staged = arrays.one.view(matrix.rows, matrix.columns)
            iterated(staged, arrays, s._replace(ns_steps=2))  # kernels are compiled and loaded before a capture

            def work(staged: Tensor = staged, arrays: _Arrays = arrays, found: list[Tensor] = found) -> tuple[()]:
                found.append(iterated(staged, arrays, s))
                return ()

            try:
                replay = capture(work)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                warn_once(f"The update of matrices uses no CUDA graphs, so it is slower: {error}", stacklevel=3)
                return
            self._graphs[key] = replay, found[0]

    def arrays(self, matrix: Matrix) -> _Arrays:
        if matrix not in self._arrays:
            self._arrays[matrix] = _Arrays.of(self.memory, matrix)
        return self._arrays[matrix]

    def staged(self, matrix: Matrix) -> Tensor:
        """The memory from which `orthogonalized` reads the update: [rows, columns] of the matrix."""
        return self.arrays(matrix).one.view(matrix.rows, matrix.columns)

    def orthogonalized(self, matrix: Matrix, s: MuonScalars) -> Tensor:
        if (captured := self._graphs.get(_key(matrix, s))) is not None:
            replay, result = captured
            replay()
            return result
        return iterated(self.staged(matrix), self.arrays(matrix), s)


def _key(matrix: Matrix, s: MuonScalars) -> _Key:
    return matrix.rows, matrix.columns, (s.eps, s.ns_steps, s.a, s.b, s.c)


def step_matrices(
    state: FlatState,
    gradient: Tensor,
    segments: Sequence[Segment],
    grad_scale: float,
    workspace: Workspace | None = None,
) -> None:
    """One step in place of the matrices that `segments` name, one after the other. Raises as `check_state` does.

    Args:
        workspace: None: memory is allocated.
    """
    check_state(state, gradient, segments)
    if workspace is None:
        sizes = [segment.matrix.workspace_bytes for segment in segments if segment.matrix is not None]
        workspace = Workspace(torch.empty(max(sizes, default=0), dtype=torch.uint8, device=gradient.device))
    scale = round_to_fp32(grad_scale)
    for segment in segments:
        assert segment.matrix is not None
        _step(state, gradient, segment, segment.matrix, scale, workspace)


def _step(
    state: FlatState, gradient: Tensor, segment: Segment, matrix: Matrix, scale: float, workspace: Workspace
) -> None:
    staged = workspace.staged(matrix)
    _write(state, gradient, segment, scale, staged.T if matrix.is_transposed else staged, workspace)
    update = workspace.orthogonalized(matrix, MuonScalars(*segment.scalars))  # type: ignore[arg-type]
    _apply(state, update.T if matrix.is_transposed else update, segment, workspace)


def write_update(
    state: FlatState, gradient: Tensor, segment: Segment, grad_scale: float, into: Tensor, workspace: Workspace
) -> None:
    """Update the momentum of a piece of a matrix, and write the piece's update before `orthogonalize`.

    Args:
        segment: the piece, with the whole matrix in `matrix`.
        into: bf16, 1-D, as long as the segment.
    """
    _write(state, gradient, segment, round_to_fp32(grad_scale), into.view(-1, 1), workspace)


def orthogonalize(update: Tensor, matrix: Matrix, scalars: Sequence[float], workspace: Workspace) -> None:
    """Orthogonalize the update of a matrix in place. `update`: bf16, 1-D, in the parameter's layout."""
    workspace.staged(matrix).copy_(matrix.of(update))
    matrix.of(update).copy_(workspace.orthogonalized(matrix, MuonScalars(*scalars)))  # type: ignore[arg-type]


def apply_update(state: FlatState, update: Tensor, segment: Segment, workspace: Workspace) -> None:
    """Step the master weights of a piece of a matrix by its part of the orthogonalized update, bf16, 1-D."""
    _apply(state, update.view(-1, 1), segment, workspace)


def _write(
    state: FlatState, gradient: Tensor, segment: Segment, scale: float, into: Tensor, workspace: Workspace
) -> None:
    """`into`: [rows, columns] with the elements of the segment."""
    if compiles(state.weights.dtype, gradient.dtype, gradient.device.type):
        launch_write(state, gradient, segment, scale, into)
        return
    s, arrays = MuonScalars(*segment.scalars), workspace.arrays(_matrix(segment))  # type: ignore[arg-type]
    for rows, at in _slices(segment, into, arrays):
        scratch = arrays.fp32[: at.stop - at.start]
        buffer = state["momentum_buffer"][at]
        buffer.lerp_(scratch.copy_(gradient[at]).mul_(scale), 1 - s.momentum)
        new = scratch.lerp_(buffer, s.momentum) if s.nesterov else buffer
        into[rows].copy_(new.view(-1, into.size(1)))


def _apply(state: FlatState, update: Tensor, segment: Segment, workspace: Workspace) -> None:
    """`update`: [rows, columns] with the elements of the segment."""
    if compiles(state.weights.dtype, torch.float32, update.device.type):
        launch_apply(state, update, segment)
        return
    s, arrays = MuonScalars(*segment.scalars), workspace.arrays(_matrix(segment))  # type: ignore[arg-type]
    for rows, at in _slices(segment, update, arrays):
        master = _read_master(state, at, arrays)
        master.mul_(s.decay)
        master.view(-1, update.size(1)).add_(update[rows], alpha=_rate(segment, s))
        _write_master(state, at, master, arrays)


def _matrix(segment: Segment) -> Matrix:
    assert segment.matrix is not None
    return segment.matrix


def _rate(segment: Segment, s: MuonScalars) -> float:
    matrix = _matrix(segment)
    return -adjusted_lr(s, matrix.rows, matrix.columns)


def _slices(segment: Segment, elements: Tensor, arrays: _Arrays) -> Iterator[tuple[slice, slice]]:
    """(rows of `elements`, range of the flat layer) of the parts that fit the workspace."""
    num_rows, row = elements.shape
    most = max(1, arrays.fp32.numel() // row)
    for first in range(0, num_rows, most):
        last = min(first + most, num_rows)
        yield slice(first, last), slice(segment.start + first * row, segment.start + last * row)


def iterated(update: Tensor, arrays: _Arrays, s: MuonScalars) -> Tensor:
    """`optim.muon.orthogonalized`. `update` is `arrays.one`; the result is `one` or `two`."""
    is_tall = update.size(0) > update.size(1)
    x, other = (update.T if is_tall else update), arrays.two
    x.div_(x.norm().clamp(min=s.eps))
    for _ in range(int(s.ns_steps)):
        gram = torch.mm(x, x.T, out=arrays.gram)
        polynomial = torch.addmm(gram, gram, gram, beta=s.b, alpha=s.c, out=arrays.polynomial)
        new = other.view(x.shape)
        if not x.is_contiguous() and compiles(torch.bfloat16, torch.bfloat16, x.device.type):
            launch_transpose(update, new)  # faster than the same copy in addmm
            torch.addmm(new, polynomial, x, beta=s.a, out=new)
        else:
            torch.addmm(x, polynomial, x, beta=s.a, out=new)
        x, other = new, arrays.one if other is arrays.two else arrays.two
    return x.T if is_tall else x


def _read_master(state: FlatState, at: slice, arrays: _Arrays) -> Tensor:
    weights, remainder = state.weights[at], state.remainder
    if remainder is None:
        return weights
    if weights.dtype == torch.float16:
        return remainder[at]
    master = arrays.fp32[: weights.numel()]
    bits = master.view(torch.int32)
    bits.copy_(weights.view(torch.int16)).bitwise_left_shift_(16).add_(remainder[at])
    return master


def _write_master(state: FlatState, at: slice, master: Tensor, arrays: _Arrays) -> None:
    """`master` is overwritten."""
    weights, remainder = state.weights[at], state.remainder
    if remainder is None:
        return
    if weights.dtype == torch.float16:
        weights.copy_(master)
        return
    is_nan = torch.ne(master, master, out=arrays.mask[: master.numel()])
    bits = master.view(torch.int32).masked_fill_(is_nan, CANONICAL_NAN)
    remainder[at].copy_(bits)
    weights.view(torch.int16).copy_(bits.add_(0x8000).bitwise_right_shift_(16))


# ---- kernels in Triton ----------------------------------------------------------------------------------------------


@cache
def compiles(weights: torch.dtype, gradient: torch.dtype, device: str) -> bool:
    """Whether Triton can build the kernels for these dtypes; warns if not."""
    if device != "cuda" or muon_triton is None:
        return False
    state = FlatState.cut(
        state_table("muon", "exact", weights),
        torch.zeros(64, dtype=weights, device=device),
        lambda numel, dtype: torch.zeros(numel, dtype=dtype, device=device),
    )
    scalars = MuonScalars(0.0, 1.0, 0.5, True, False, 1e-7, 5, 1.0, 1.0, 1.0)
    segment, update = Segment(0, 64, scalars, matrix=Matrix(8, 8)), torch.zeros(8, 8, device=device).bfloat16()

    def launch() -> None:
        for into in (update, update.T):
            launch_write(state, torch.zeros(64, dtype=gradient, device=device), segment, 1.0, into)
            launch_apply(state, into, segment)
        launch_transpose(update, torch.empty_like(update))

    return is_built("the kernels of the step of matrices, so slower torch operations are used", launch)


_fp32 = lru_cache(maxsize=256)(round_to_fp32)


def launch_write(state: FlatState, gradient: Tensor, segment: Segment, scale: float, into: Tensor) -> None:
    s = MuonScalars(*segment.scalars)  # type: ignore[arg-type]
    scalars = scale, _fp32(1 - s.momentum), _fp32(s.momentum)
    arrays = _bits(gradient), state["momentum_buffer"], _bits(into)
    _launch("write", arrays, segment, into, *scalars, bool(s.nesterov), gradient.dtype == torch.bfloat16)


def launch_apply(state: FlatState, update: Tensor, segment: Segment) -> None:
    s, weights = MuonScalars(*segment.scalars), _bits(state.weights)  # type: ignore[arg-type]
    arrays = weights, weights if state.remainder is None else state.remainder, _bits(update)
    _launch("apply", arrays, segment, update, _fp32(s.decay), _fp32(_rate(segment, s)))


def launch_transpose(source: Tensor, into: Tensor) -> None:
    """Copy the transpose of a contiguous bf16 matrix."""
    kernel: Any = muon_triton.transpose
    (num_rows, num_columns), (rows, columns) = source.shape, _TILE
    grid = -(-num_columns // columns), -(-num_rows // rows)
    with torch.cuda.device_of(source):  # type: ignore[no-untyped-call]
        kernel[grid](_bits(source), _bits(into), num_rows, num_columns, rows, columns)


def _launch(name: str, arrays: Sequence[Tensor], segment: Segment, update: Tensor, *scalars: float) -> None:
    kernel: Any = getattr(muon_triton, name)
    is_flat = update.is_contiguous()
    shape = (1, update.numel()) if is_flat else tuple(update.shape)
    strides = (0, 1) if is_flat else update.stride()
    rows, columns = _FLAT if is_flat else _TILE
    grid = -(-shape[1] // columns), -(-shape[0] // rows)
    with torch.cuda.device_of(update):  # type: ignore[no-untyped-call]
        kernel[grid](*arrays, segment.start, *shape, *strides, *scalars, rows, columns, enable_fp_fusion=False)


def _bits(array: Tensor) -> Tensor:
    return array.view(torch.int16) if array.dtype == torch.bfloat16 else array
