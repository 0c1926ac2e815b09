"""Triton kernels of the step of matrices. Imported only if Triton is installed.

They round as torch does on CUDA and on the CPU: `lerp` and `add(alpha=)` are one fused multiply-add, all other
operations round once (launched with `enable_fp_fusion=False`). bf16 arrays arrive as int16 bits.

A parameter is a matrix, contiguous from `start` in the flat layer. Its update has strides.
"""

import triton
import triton.language as tl

from offloadkit.kernels.gpu_triton import _gradient, _master, _store_master

# mypy: ignore-errors


@triton.jit
def _places(num_rows, num_columns, row_block: tl.constexpr, column_block: tl.constexpr):
    rows = (tl.program_id(1).to(tl.int64) * row_block + tl.arange(0, row_block))[:, None]
    columns = (tl.program_id(0).to(tl.int64) * column_block + tl.arange(0, column_block))[None, :]
    return rows, columns, (rows < num_rows) & (columns < num_columns)


@triton.jit
def _lerp(first, last, weight):
    difference = last - first
    return tl.where(
        tl.abs(weight) < 0.5,
        tl.fma(difference, weight, first),
        tl.fma(-difference, 1.0 - weight, last),
    )


@triton.jit
def _bf16_bits(values):
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values == values, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def write(
    gradient, buffer, update, start, num_rows, num_columns, row_stride, column_stride, grad_scale, weight, momentum,
    nesterov: tl.constexpr, is_bf16_gradient: tl.constexpr, row_block: tl.constexpr, column_block: tl.constexpr,
):  # fmt: skip
    """Update the momentum and write the update before Newton-Schulz."""
    rows, columns, inside = _places(num_rows, num_columns, row_block, column_block)
    at = start + rows * num_columns + columns
    g = _gradient(gradient, at, inside, is_bf16_gradient) * grad_scale
    m = _lerp(tl.load(buffer + at, mask=inside, other=0.0), g, weight)
    tl.store(buffer + at, m, mask=inside)
    if nesterov:
        m = _lerp(g, m, momentum)
    tl.store(update + rows * row_stride + columns * column_stride, _bf16_bits(m), mask=inside)


@triton.jit
def apply(
    weights, remainder, update, start, num_rows, num_columns, row_stride, column_stride, decay, rate,
    row_block: tl.constexpr, column_block: tl.constexpr,
):  # fmt: skip
    """Step the master weights by the update after Newton-Schulz."""
    rows, columns, inside = _places(num_rows, num_columns, row_block, column_block)
    at = start + rows * num_columns + columns
    u = tl.load(update + rows * row_stride + columns * column_stride, mask=inside, other=0)
    u = (u.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    w = _master(weights, remainder, at, inside) * decay
    _store_master(weights, remainder, at, inside, tl.fma(u, rate, w))


@triton.jit
def transpose(source, into, num_rows, num_columns, row_block: tl.constexpr, column_block: tl.constexpr):
    """`into`: [num_columns, num_rows]; both contiguous."""
    rows, columns, inside = _places(num_rows, num_columns, row_block, column_block)
    values = tl.load(source + rows * num_columns + columns, mask=inside, other=0)
    tl.store(into + columns * num_rows + rows, values, mask=inside)
