"""Triton kernels of the optimizer step and the gradient norm. Imported only if Triton is installed.

The step performs the operations of `adamw`, `lion` and `moments` in order, each rounded once: it is launched with
`enable_fp_fusion=False`, and division and root are correctly rounded. The norm's binary trees are written out to fix
the order of additions to the order in `norm`. Rows are added in registers: a thread keeps whole columns of a block.
"""

import triton
import triton.language as tl

# mypy: ignore-errors


LAUNCHES_TAKE_CONSTANTS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)
"""Whether a compiled kernel takes all arguments of its function; earlier versions leave constants out."""
ROWS = 4
PRECISIONS = ("exact", "compact", "tiny")


@triton.jit
def _gradient(gradient, at, inside, is_bf16: tl.constexpr):
    """Load gradients as fp32. bf16 arrives as int16 bits, so that devices without bf16 can shift it."""
    value = tl.load(gradient + at, mask=inside, other=0)
    if is_bf16:
        return (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def _master(weights, remainder, at, inside):
    if weights.dtype.element_ty == tl.int16:
        high = tl.load(weights + at, mask=inside, other=0).to(tl.int32) << 16
        low = tl.load(remainder + at, mask=inside, other=0).to(tl.int32)
        return (high + low).to(tl.float32, bitcast=True)
    elif weights.dtype.element_ty == tl.float16:
        return tl.load(remainder + at, mask=inside, other=0.0)
    else:
        return tl.load(weights + at, mask=inside, other=0.0)


@triton.jit
def _store_master(weights, remainder, at, inside, master):
    if weights.dtype.element_ty == tl.int16:
        bits = tl.where(master == master, master.to(tl.int32, bitcast=True), 0x7FC00000)
        tl.store(weights + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
        tl.store(remainder + at, bits.to(tl.int16), mask=inside)
    elif weights.dtype.element_ty == tl.float16:
        tl.store(weights + at, master.to(tl.float16), mask=inside)
        tl.store(remainder + at, master, mask=inside)
    else:
        tl.store(weights + at, master, mask=inside)


@triton.jit
def _random_bits(key_low, key_upper, elements):
    upper = key_upper.to(tl.uint32) + (elements >> 32).to(tl.uint32) * 0x9E3779B9
    state = elements.to(tl.uint32) + key_low.to(tl.uint32)
    state = (state ^ (state >> 16)) * 0x7FEB352D
    state = (state ^ (state >> 15) ^ upper) * 0x846CA68B
    return state ^ (state >> 16)


@triton.jit
def _round_stochastically(values, random):
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    bits = tl.where(magnitude < 0x7F800000, bits + random, bits)
    bits = tl.where(magnitude > 0x7F800000, 0x7FC00000, bits)
    return (bits >> 16).to(tl.int16)


@triton.jit
def _power_of_ten(exponent):
    low = tl.where((exponent & 1) != 0, 10.0, 1.0) * tl.where((exponent & 2) != 0, 100.0, 1.0)
    return low * tl.where((exponent & 4) != 0, 10000.0, 1.0)


@triton.jit
def _level(number, least: tl.constexpr, largest: tl.constexpr, first_exponent: tl.constexpr):
    bits = (number.to(tl.float32) + 0.5).to(tl.int32, bitcast=True)
    decade = (bits >> 23) - 127 - first_exponent
    within = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) * 0.9 - 0.8
    value = within * _power_of_ten(decade) * 1e-6
    return tl.where(number == largest, 1.0, tl.where(number == least, 0.0, value))


@triton.jit
def _number(share, random, least: tl.constexpr, largest: tl.constexpr, first_exponent: tl.constexpr):
    decade = (share >= 1e-6).to(tl.int32) + (share >= 1e-5).to(tl.int32) + (share >= 1e-4).to(tl.int32)
    decade += (share >= 1e-3).to(tl.int32) + (share >= 1e-2).to(tl.int32) + (share >= 1e-1).to(tl.int32)
    first = ((decade + (127 + first_exponent)) << 23).to(tl.float32, bitcast=True)
    place = (share * _power_of_ten(6 - decade) + 0.8) * 1.1111112 * first - 0.5
    lower = tl.minimum(place.to(tl.int32), largest - 1)
    below = _level(lower, least, largest, first_exponent)
    gap = _level(lower + 1, least, largest, first_exponent) - below
    return lower + (random.to(tl.float32) * (1.0 / 65536) * gap < share - below).to(tl.int32)


@triton.jit
def _load_moment(moment, scale, at, inside, rows, has_row, has_sign: tl.constexpr):
    """Load a moment as fp32 from fp32, bf16 (int16 bits) or 8-bit codes."""
    stored = tl.load(moment + at, mask=inside, other=0)
    if moment.dtype.element_ty == tl.float32:
        return stored
    elif moment.dtype.element_ty == tl.int16:
        return (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        code = stored.to(tl.int32)
        scales = tl.load(scale + rows, mask=has_row, other=0.0)[:, None]
        if has_sign:
            value = _level(code & 0x7F, 0, 127, 0) * scales
            return (value.to(tl.int32, bitcast=True) ^ ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
        else:
            return _level(code + 1, 1, 256, 1) * scales


@triton.jit
def _store_moment(moment, scale, at, inside, rows, has_row, values, random, has_sign: tl.constexpr):
    """`random`: uint32; the lower half rounds signed moments, the upper half unsigned moments."""
    if moment.dtype.element_ty == tl.float32:
        tl.store(moment + at, values, mask=inside)
    else:
        half = ((random & 0xFFFF) if has_sign else (random >> 16)).to(tl.int32)
        if moment.dtype.element_ty == tl.int16:
            tl.store(moment + at, _round_stochastically(values, half), mask=inside)
        else:
            bits = values.to(tl.int32, bitcast=True)
            magnitudes = bits & 0x7FFFFFFF
            largest = tl.max(magnitudes, 1)
            finite = largest < 0x7F800000
            scales = tl.where(finite, largest, 0x7FC00000).to(tl.float32, bitcast=True)
            tl.store(scale + rows, scales, mask=has_row)
            divisors = tl.where(finite & (largest > 0), scales, 1.0)[:, None] + tl.zeros_like(values)
            shares = tl.div_rn(magnitudes.to(tl.float32, bitcast=True), divisors)
            shares = tl.where(finite[:, None], shares, 0.0)
            if has_sign:
                code = _number(shares, half, 0, 127, 0) | ((bits >> 24) & 0x80)
            else:
                code = _number(shares, half, 1, 256, 1) - 1
                code |= ((code == 0) & (values > 0)).to(tl.int32)
            tl.store(moment + at, tl.where(finite[:, None], code, 0).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["key_low", "key_upper", "offset"])
def adamw(
    weights, remainder, gradient, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, start, length, grad_scale,
    beta1, beta2, one_minus_beta1, one_minus_beta2, eps, decay, step_size, inv_sqrt_bias_correction2,
    key_low, key_upper, offset, is_bf16_gradient: tl.constexpr,
):  # fmt: skip
    """Step 4 rows of 256 elements per program, in the segment of `length` elements at `start`.

    bf16 arrays arrive as int16 bits, the halves of the random key as int32. Only 8-bit moments have scales.
    """
    rows = tl.program_id(0).to(tl.int64) * 4 + tl.arange(0, 4)
    has_row = rows * 256 < length
    elements = rows[:, None] * 256 + tl.arange(0, 256)[None, :]
    inside = elements < length
    at = elements + start
    rows += start // 256
    g = _gradient(gradient, at, inside, is_bf16_gradient) * grad_scale
    m = _load_moment(exp_avg, exp_avg_scale, at, inside, rows, has_row, True)
    v = _load_moment(exp_avg_sq, exp_avg_sq_scale, at, inside, rows, has_row, False)
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + (one_minus_beta2 * g) * g
    denominator = tl.sqrt_rn(v) * inv_sqrt_bias_correction2 + eps
    w = _master(weights, remainder, at, inside) * decay - step_size * tl.div_rn(m, denominator)
    _store_master(weights, remainder, at, inside, w)
    random = _random_bits(key_low, key_upper, elements + offset)
    _store_moment(exp_avg, exp_avg_scale, at, inside, rows, has_row, m, random, True)
    _store_moment(exp_avg_sq, exp_avg_sq_scale, at, inside, rows, has_row, v, random, False)


@triton.jit(do_not_specialize=["key_low", "key_upper", "offset"])
def lion(
    weights, remainder, gradient, exp_avg, exp_avg_scale, start, length, grad_scale,
    beta1, beta2, one_minus_beta1, one_minus_beta2, decay, lr,
    key_low, key_upper, offset, is_bf16_gradient: tl.constexpr,
):  # fmt: skip
    """Like `adamw`, with fp32 exp_avg and without stochastic rounding."""
    rows = tl.program_id(0).to(tl.int64) * 4 + tl.arange(0, 4)
    elements = rows[:, None] * 256 + tl.arange(0, 256)[None, :]
    inside = elements < length
    at = elements + start
    g = _gradient(gradient, at, inside, is_bf16_gradient) * grad_scale
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    mean = beta1 * m + one_minus_beta1 * g
    direction = (mean > 0).to(tl.float32) - (mean < 0).to(tl.float32)
    w = _master(weights, remainder, at, inside) * decay - direction * lr
    _store_master(weights, remainder, at, inside, w)
    tl.store(exp_avg + at, beta2 * m + one_minus_beta2 * g, mask=inside)


PIECES = 32
"""Pieces of a 65,536-element block: 2048 elements each, 64 rows of 32 columns."""

PIECES_AT_ONCE = 8


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
    """Reduce 8 pieces per program: 64 rows of squares to one row of 32 fp64 numbers."""
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
    """Reduce one block per program: the rows of its 32 pieces to one row, then the columns to one number.

    A sum over an axis of length 2 has only one order, so reshaping before every sum fixes the tree.
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
