"""The Triton kernels of the gradient norm; imported only where Triton is there.

Their binary trees are spelled out, so that the order of additions is the one of `gradient_norm`. Rows are added from
registers: the elements of one column of a block never leave their thread. (With the rows of a piece in one tile,
reshaped before each sum, the same tree took 43 ms over 2.85 G elements on an H200, in layout conversions.)
"""

# mypy: ignore-errors

import triton
import triton.language as tl

PIECES = 32
"""Pieces of a 65,536-element block: 2048 elements, 64 rows of 32 columns, each."""

PIECES_AT_ONCE = 8
"""Pieces of one program."""


@triton.jit
def _row(values, offsets, length, row):
    at = offsets + row * 32
    value = tl.load(values + at, mask=at < length, other=0.0).to(tl.float32).to(tl.float64)
    return value * value


@triton.jit
def _rows_4(values, offsets, length, row):
    first = _row(values, offsets, length, row) + _row(values, offsets, length, row + 1)
    return first + (_row(values, offsets, length, row + 2) + _row(values, offsets, length, row + 3))


@triton.jit
def _rows_16(values, offsets, length, row):
    first = _rows_4(values, offsets, length, row) + _rows_4(values, offsets, length, row + 4)
    return first + (_rows_4(values, offsets, length, row + 8) + _rows_4(values, offsets, length, row + 12))


@triton.jit
def sum_rows_of_pieces(gradient, blocks, rows_out):
    """A program takes 8 pieces: the 64 rows of squares of each become one row of 32 fp64 numbers."""
    program = tl.program_id(0).to(tl.int64)
    block, first_piece = program // 4, program % 4 * 8
    values, length = gradient + tl.load(blocks + 2 * block), tl.load(blocks + 2 * block + 1)
    pieces, columns = tl.arange(0, 8)[:, None], tl.arange(0, 32)[None, :]
    offsets = (first_piece + pieces) * 2048 + columns
    first = _rows_16(values, offsets, length, 0) + _rows_16(values, offsets, length, 16)
    sums = first + (_rows_16(values, offsets, length, 32) + _rows_16(values, offsets, length, 48))
    tl.store(rows_out + (block * 32 + first_piece + pieces) * 32 + columns, sums)


@triton.jit
def sum_pieces_of_block(rows_in, out):
    """A program takes one block: the rows of its 32 pieces become one row, and that row's columns one number.

    A sum over an axis of length 2 has one order only, so reshaping before each sum spells out the tree.
    """
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
