"""Triton kernels: the gradient norm's block sums on CUDA, with the bits of `gradient_norm.block_sums_reference`.

Where Triton is missing or cannot compile, `available()` is false and callers use torch operations.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_PIECES = 32
"""Pieces of a 65,536-element block: 2048 elements, 64 rows of 32 columns, each."""

_BLOCKS_AT_ONCE = 1024
"""Blocks of one launch: their pieces' rows take 8 MiB between the two kernels."""


def _sum_rows_of_piece(gradient, blocks, rows_out):  # type: ignore[no-untyped-def]  # Triton resolves annotations
    """One program a piece: its 64 rows of squares become one row of 32 fp64 numbers. A sum over an axis of length 2
    has one order only, so reshaping before each sum spells out the tree."""
    program = tl.program_id(0).to(tl.int64)
    block, piece = program // 32, program % 32
    start, length = tl.load(blocks + 2 * block), tl.load(blocks + 2 * block + 1)
    offsets = piece * 2048 + tl.arange(0, 2048)
    values = tl.load(gradient + start + offsets, mask=offsets < length, other=0.0).to(tl.float32).to(tl.float64)
    rows = tl.sum(tl.reshape(values * values, (32, 2, 32)), 1)
    rows = tl.sum(tl.reshape(rows, (16, 2, 32)), 1)
    rows = tl.sum(tl.reshape(rows, (8, 2, 32)), 1)
    rows = tl.sum(tl.reshape(rows, (4, 2, 32)), 1)
    rows = tl.sum(tl.reshape(rows, (2, 2, 32)), 1)
    row = tl.sum(tl.reshape(rows, (2, 32)), 0)
    tl.store(rows_out + program * 32 + tl.arange(0, 32), row)


def _sum_pieces_of_block(rows_in, out):  # type: ignore[no-untyped-def]
    """One program a block: the rows of its 32 pieces become one row, and that row's columns one number."""
    block = tl.program_id(0).to(tl.int64)
    values = tl.load(rows_in + block * 1024 + tl.arange(0, 1024))
    rows = tl.sum(tl.reshape(values, (16, 2, 32)), 1)
    rows = tl.sum(tl.reshape(rows, (8, 2, 32)), 1)
    rows = tl.sum(tl.reshape(rows, (4, 2, 32)), 1)
    rows = tl.sum(tl.reshape(rows, (2, 2, 32)), 1)
    columns = tl.sum(tl.reshape(rows, (2, 32)), 0)
    columns = tl.sum(tl.reshape(columns, (16, 2)), 1)
    columns = tl.sum(tl.reshape(columns, (8, 2)), 1)
    columns = tl.sum(tl.reshape(columns, (4, 2)), 1)
    columns = tl.sum(tl.reshape(columns, (2, 2)), 1)
    tl.store(out + block, tl.sum(columns, 0))


@cache
def _kernels() -> tuple[Any, Any]:
    return triton.jit(_sum_rows_of_piece), triton.jit(_sum_pieces_of_block)


@cache
def available() -> bool:
    """Whether the kernels run on this machine's current CUDA device; warns once where Triton is there but fails."""
    if triton is None or not torch.cuda.is_available():
        return False
    gradient = torch.zeros(32, dtype=torch.bfloat16, device="cuda")  # the dtype that older devices lack
    try:
        block_sums(gradient, torch.tensor([[0, 32]], device="cuda"), torch.empty(1, dtype=torch.float64, device="cuda"))
    except Exception as error:  # the compiler, its driver and the C compiler it calls raise many types
        warnings.warn(
            f"Triton could not build the gradient norm's kernel, so slower torch operations are used: {error}",
            stacklevel=2,
        )
        return False
    return True


def block_sums(gradient: Tensor, blocks: Tensor, out: Tensor) -> None:
    """`gradient_norm.block_sums`, which checks its arguments, on the gradient's device and current stream."""
    sum_rows, sum_pieces = _kernels()
    with torch.cuda.device_of(gradient):  # type: ignore[no-untyped-call]
        for first in range(0, blocks.shape[0], _BLOCKS_AT_ONCE):
            some = blocks[first : first + _BLOCKS_AT_ONCE]
            num_blocks = some.shape[0]
            rows = torch.empty(num_blocks * _PIECES * 32, dtype=torch.float64, device=gradient.device)
            sum_rows[(num_blocks * _PIECES,)](gradient, some, rows, enable_fp_fusion=False)
            sum_pieces[(num_blocks,)](rows, out[first : first + num_blocks], enable_fp_fusion=False)
