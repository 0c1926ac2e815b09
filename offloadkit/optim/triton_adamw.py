"""The Triton kernel of the AdamW step; imported only where Triton is there.

It does the operations of `adamw` in their order, each rounded once: launched with `enable_fp_fusion=False`, with
correctly rounded division and root.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

ROWS = 4
"""Rows of 256 elements that one program steps."""


@triton.jit
def _gradient(gradient, at, inside, is_bf16: tl.constexpr):
    """fp32 of gradients; those in bf16 come as int16 patterns, which devices without bf16 can shift too."""
    value = tl.load(gradient + at, mask=inside, other=0)
    if is_bf16:
        return (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(tl.float32)


@triton.jit
def _master(weights, remainder, at, inside):
    """fp32 master weights: of int16 halves (split bf16), beside fp16 weights, or the weights themselves."""
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
def adamw(
    weights,
    remainder,
    exp_avg,
    exp_avg_sq,
    gradient,
    start,
    length,
    grad_scale,
    beta1,
    beta2,
    one_minus_beta1,
    one_minus_beta2,
    eps,
    decay,
    step_size,
    inv_sqrt_bias_correction2,
    is_bf16_gradient: tl.constexpr,
):
    """A program steps 4 rows of 256 elements of the segment of `length` elements at `start`.

    bf16 weights and gradients come as int16 patterns.
    """
    rows = tl.program_id(0).to(tl.int64) * 4 + tl.arange(0, 4)
    elements = rows[:, None] * 256 + tl.arange(0, 256)[None, :]
    inside = elements < length
    at = elements + start
    g = _gradient(gradient, at, inside, is_bf16_gradient) * grad_scale
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + (one_minus_beta2 * g) * g
    denominator = tl.sqrt_rn(v) * inv_sqrt_bias_correction2 + eps
    w = _master(weights, remainder, at, inside) * decay - step_size * tl.div_rn(m, denominator)
    _store_master(weights, remainder, at, inside, w)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
