"""Triton kernels of a decoder block's element-wise parts. Imported only if Triton is installed.

Each value is rounded where torch's eager operations round it. `exp` and `tanh` are libdevice's, as in torch's CUDA
kernels, and `fma` is written out where nvcc contracts torch's code. Launches must set `enable_fp_fusion=False`.
"""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _rounded(values, like):
    return values.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _tanh_of_gelu(x):
    return libdevice.tanh(0.7978845608028654 * tl.fma(x * x * x, 0.044715, x))


@triton.jit
def _activated(x, is_gelu: tl.constexpr):
    if is_gelu:
        return 0.5 * x * (1.0 + _tanh_of_gelu(x))
    else:
        return tl.div_rn(x, 1.0 + libdevice.exp(-x))


@triton.jit
def _gradient_of_activation(gradient, x, is_gelu: tl.constexpr):
    if is_gelu:
        tanh = _tanh_of_gelu(x)
        of_tanh = tl.fma(-tanh, tanh, 1.0)
        of_inner = 0.7978845608028654 * tl.fma(x * x, 0.13414499163627625, 1.0)
        return gradient * (0.5 * (1.0 + tanh) + 0.5 * x * of_tanh * of_inner)
    else:
        sigmoid = tl.div_rn(1.0, 1.0 + libdevice.exp(-x))
        return gradient * sigmoid * tl.fma(x, 1.0 - sigmoid, 1.0)


@triton.jit
def gated(
    gate, up, out, gate_stride, up_stride, out_stride, width, is_gelu: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """`block` columns of a row per program: out = activation(gate) * up."""
    program, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(width, block)
    row, columns = program // blocks, program % blocks * block + tl.arange(0, block)
    inside = columns < width
    x = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, _rounded(_activated(x, is_gelu), gate) * y, mask=inside)


@triton.jit
def gated_backward(
    gradient, gate, up, d_gate, d_up, gradient_stride, gate_stride, up_stride, d_gate_stride, d_up_stride, width,
    is_gelu: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    program, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(width, block)
    row, columns = program // blocks, program % blocks * block + tl.arange(0, block)
    inside = columns < width
    g = tl.load(gradient + row * gradient_stride + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    of_gate = _gradient_of_activation(_rounded(g * y, gate), x, is_gelu)
    tl.store(d_gate + row * d_gate_stride + columns, of_gate, mask=inside)
    tl.store(d_up + row * d_up_stride + columns, g * _rounded(_activated(x, is_gelu), gate), mask=inside)


@triton.jit
def norm(x, weight, out, scales, rows, width, eps, offset, block_rows: tl.constexpr, block: tl.constexpr):
    """`block_rows` rows per program: out = x / rms(x) * (weight + offset)."""
    row, column = tl.program_id(0) * block_rows + tl.arange(0, block_rows), tl.arange(0, block)[None, :]
    inside = (row < rows)[:, None] & (column < width)
    at = row.to(tl.int64)[:, None] * width + column
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(values * values, 1) / width + eps))
    tl.store(scales + row, scale, mask=row < rows)
    factors = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    tl.store(out + at, values * scale[:, None] * factors, mask=inside)


@triton.jit
def norm_backward(
    gradient, x, weight, scales, d_x, d_weights, rows, width, offset, steps,
    block_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """`steps` times `block_rows` rows per program, whose share of the weight's gradient is a row of `d_weights`."""
    program, column = tl.program_id(0), tl.arange(0, block)[None, :]
    factors = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset
    d_weight = tl.zeros((block_rows, block), tl.float32)
    for step in range(steps):
        row = (program * steps + step) * block_rows + tl.arange(0, block_rows)
        inside = (row < rows)[:, None] & (column < width)
        at = row.to(tl.int64)[:, None] * width + column
        g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        d_weight += g * normed
        g *= factors
        of_x = (g - normed * (tl.sum(g * normed, 1) / width)[:, None]) * scale
        tl.store(d_x + at, of_x, mask=inside)
    column = tl.arange(0, block)
    tl.store(d_weights + program.to(tl.int64) * width + column, tl.sum(d_weight, 0), mask=column < width)


@triton.jit
def _rotate_heads(
    source, target, cos_1, cos_2, sin_1, sin_2, head_stride, heads: tl.constexpr, width: tl.constexpr,
    half: tl.constexpr, inverse: tl.constexpr, block: tl.constexpr, half_block: tl.constexpr, rest_block: tl.constexpr,
):  # fmt: skip
    for first in range(0, heads, block):
        head = (first + tl.arange(0, block)[:, None]).to(tl.int64)
        column = tl.arange(0, half_block)[None, :]
        inside = (head < heads) & (column < half)
        at, to = source + head * head_stride + column, target + head * width + column
        x_1 = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        x_2 = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
        if inverse:
            y_1 = _rounded(x_1 * cos_1, source) + _rounded(x_2 * sin_2, source)
            y_2 = _rounded(x_2 * cos_2, source) - _rounded(x_1 * sin_1, source)
        else:
            y_1 = _rounded(x_1 * cos_1, source) - _rounded(x_2 * sin_1, source)
            y_2 = _rounded(x_2 * cos_2, source) + _rounded(x_1 * sin_2, source)
        tl.store(to, y_1, mask=inside)
        tl.store(to + half, y_2, mask=inside)
        if 2 * half < width:
            column = 2 * half + tl.arange(0, rest_block)[None, :]
            inside = (head < heads) & (column < width)
            rest = tl.load(source + head * head_stride + column, mask=inside, other=0.0)
            tl.store(target + head * width + column, rest, mask=inside)


@triton.jit(do_not_specialize=["length"])
def rotary(
    query, key, cos, sin, query_out, key_out, length, query_row, query_head, query_token, key_row, key_head, key_token,
    cos_row, cos_token, sin_row, sin_token, query_heads: tl.constexpr, key_heads: tl.constexpr, width: tl.constexpr,
    half: tl.constexpr, inverse: tl.constexpr, block: tl.constexpr, half_block: tl.constexpr, rest_block: tl.constexpr,
):  # fmt: skip
    """One token per program. The first 2 * `half` numbers of each head are rotated, or rotated back if `inverse`.

    Outputs are (batch, length, heads, width) in memory.
    """
    token = tl.program_id(0).to(tl.int64)
    row, position = token // length, token % length
    column = tl.arange(0, half_block)[None, :]
    inside = column < half
    at_cos, at_sin = cos + row * cos_row + position * cos_token, sin + row * sin_row + position * sin_token
    cos_1 = tl.load(at_cos + column, mask=inside, other=0.0).to(tl.float32)
    cos_2 = tl.load(at_cos + half + column, mask=inside, other=0.0).to(tl.float32)
    sin_1 = tl.load(at_sin + column, mask=inside, other=0.0).to(tl.float32)
    sin_2 = tl.load(at_sin + half + column, mask=inside, other=0.0).to(tl.float32)
    _rotate_heads(
        query + row * query_row + position * query_token, query_out + token * query_heads * width,
        cos_1, cos_2, sin_1, sin_2, query_head, query_heads, width, half, inverse, block, half_block, rest_block,
    )  # fmt: skip
    _rotate_heads(
        key + row * key_row + position * key_token, key_out + token * key_heads * width,
        cos_1, cos_2, sin_1, sin_2, key_head, key_heads, width, half, inverse, block, half_block, rest_block,
    )  # fmt: skip
