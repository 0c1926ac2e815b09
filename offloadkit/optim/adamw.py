"""AdamW as offloadkit computes it: the formula, its scalars, and split master weights, in torch operations.

How the moments are kept between steps is defined in `precision`.

The C kernel (cpu_adamw.c) and the GPU kernels do these operations in this order, each rounded once to fp32, and give
the same bits. Where a step stores NaN, NaN is promised but not its payload.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from offloadkit.config import Precision
from offloadkit.optim import moments
from offloadkit.optim.moments import BLOCK, MOMENT_DTYPES

_SLICE = 1 << 18
"""Elements stepped at a time by the reference: its temporaries stay at a few MiB, most of them in the caches."""

_CANONICAL_NAN = 0x7FC00000


class AdamWScalars(NamedTuple):
    """What one step needs to know beside the arrays; each value is a float that fp32 holds exactly."""

    beta1: float
    beta2: float
    one_minus_beta1: float
    one_minus_beta2: float
    eps: float
    decay: float
    """1 - lr * weight_decay"""
    step_size: float
    """lr / (1 - beta1**step)"""
    inv_sqrt_bias_correction2: float
    """1 / sqrt(1 - beta2**step)"""


def round_to_fp32(value: float) -> float:
    """The fp32 number nearest to `value`, as a Python float."""
    return float(torch.tensor(value, dtype=torch.float32).item())


def adamw_scalars(*, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int) -> AdamWScalars:
    """The scalars of step number `step` (the first is 1), computed in fp64 and rounded once to fp32.

    Formula: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", as torch.optim.AdamW computes it.
    """
    if step < 1:
        raise ValueError(f"step is {step}: AdamW counts its steps from 1")
    beta1, beta2 = betas
    exact = (
        beta1,
        beta2,
        1.0 - beta1,
        1.0 - beta2,
        eps,
        1.0 - lr * weight_decay,
        lr / (1.0 - beta1**step),
        1.0 / math.sqrt(1.0 - beta2**step),
    )
    return AdamWScalars(*torch.tensor(exact, dtype=torch.float32).tolist())


class Segment(NamedTuple):
    """Elements start .. start + length of a flat layer, stepped with one set of scalars.

    In `compact` and `tiny` they belong to one parameter; in `exact` they may be several neighbours.
    """

    start: int
    """`tiny`: a multiple of 256."""
    length: int
    scalars: AdamWScalars
    random_key: int = 0
    """`moments.random_key` of the step and the parameter; unused in `exact`."""
    offset: int = 0
    """Elements of the parameter that come before the segment, where it is cut: a multiple of 256; unused in `exact`."""


@dataclass(slots=True)
class FlatState:
    """The arrays of one flat layer that a step reads and writes: 1-D, contiguous, of equal length (but for the scales),
    on one device."""

    weights: Tensor
    """Working weights: bf16, fp16 or fp32 (then they are the master weights too)."""
    remainder: Tensor | None
    """What the master weights hold beyond the working weights. bf16: int16, the low half of the split master.
    fp16: the fp32 master weights. fp32: None."""
    exp_avg: Tensor
    """fp32; `compact`: bf16; `tiny`: uint8"""
    exp_avg_sq: Tensor
    """of exp_avg's dtype"""
    exp_avg_scale: Tensor | None = None
    """`tiny`: fp32 [numel / 256], numel being a multiple of 256; else None"""
    exp_avg_sq_scale: Tensor | None = None
    """as exp_avg_scale"""

    @property
    def precision(self) -> Precision:
        """Follows from the moments' dtype. Raises TypeError for a dtype of none."""
        for name, dtype in MOMENT_DTYPES.items():
            if self.exp_avg.dtype == self.exp_avg_sq.dtype == dtype:
                return name
        raise TypeError(
            "exp_avg and exp_avg_sq must be fp32 (exact), bf16 (compact) or uint8 (tiny), both the same, not "
            f"{self.exp_avg.dtype}, {self.exp_avg_sq.dtype}"
        )


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Cuts fp32 master weights into bf16 working weights (rounded to nearest) and int16 remainders.

    `join_master` gives every finite value and Inf back bit for bit. Any NaN becomes (NaN, 0). A finite value of at
    least 2**127 * (2 - 2**-8) has Inf as its bf16 half, as in a cast to bf16, and still joins to itself. An exact tie
    goes away from zero, unlike in a cast. Source: Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training".
    """
    bits = master.view(torch.int32).masked_fill(master.isnan(), _CANONICAL_NAN)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join_master(weights: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master weights of bf16 working weights and int16 remainders of the same shape."""
    return ((weights.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def check_state(state: FlatState, gradient: Tensor, segments: Sequence[Segment]) -> None:
    """Raises TypeError for a dtype and ValueError for a length, layout or device that a step cannot work with."""
    dtypes = {torch.bfloat16: torch.int16, torch.float16: torch.float32, torch.float32: None}
    if state.weights.dtype not in dtypes:
        raise TypeError(f"weights are {state.weights.dtype}: a step works on bf16, fp16 or fp32 weights")
    if gradient.dtype not in dtypes:
        raise TypeError(f"the gradient is {gradient.dtype}: a step takes bf16, fp16 or fp32 gradients")
    expected = dtypes[state.weights.dtype]
    if (state.remainder.dtype if state.remainder is not None else None) != expected:
        found = None if state.remainder is None else state.remainder.dtype
        raise TypeError(f"the remainder of {state.weights.dtype} weights must be {expected}, not {found}")
    length, device = state.weights.numel(), state.weights.device
    arrays = {"weights": state.weights, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq, "gradient": gradient}
    if state.remainder is not None:
        arrays["remainder"] = state.remainder
    lengths = dict.fromkeys(arrays, length)
    if state.precision == "tiny":
        scales = {"exp_avg_scale": state.exp_avg_scale, "exp_avg_sq_scale": state.exp_avg_sq_scale}
        arrays |= _checked_scales(scales, length)
        lengths |= dict.fromkeys(scales, length // BLOCK)
    for name, array in arrays.items():
        if array.dim() != 1 or not array.is_contiguous():
            raise ValueError(f"{name} has shape {tuple(array.shape)}, strides {array.stride()}: flat arrays are needed")
        if array.numel() != lengths[name] or array.device != device:
            raise ValueError(
                f"{name} has {array.numel()} elements on {array.device}, the weights {length} on {device}: "
                "all arrays of a flat layer must have one length (scales: a 256th) and one device"
            )
    for segment in segments:
        _check_segment(segment, length, state.precision)


def _checked_scales(scales: dict[str, Tensor | None], length: int) -> dict[str, Tensor]:
    if length % BLOCK:
        raise ValueError(f"the flat layer has {length} elements: 8-bit moments need a multiple of {BLOCK}")
    present = {name: scale for name, scale in scales.items() if scale is not None and scale.dtype == torch.float32}
    if len(present) < len(scales):
        found = ", ".join(f"{name} {None if scale is None else scale.dtype}" for name, scale in scales.items())
        raise TypeError(f"8-bit moments need fp32 scales, not {found}")
    return present


def _check_segment(segment: Segment, length: int, kept: Precision) -> None:
    start, end = segment.start, segment.start + segment.length
    if start < 0 or segment.length < 0 or end > length:
        raise ValueError(f"segment [{start}, {end}) leaves the flat layer of {length} elements")
    if kept == "exact":
        return
    if not 0 <= segment.random_key < 2**64:
        raise ValueError(f"random_key is {segment.random_key}: a key has 64 bits, see moments.random_key")
    if segment.offset < 0 or segment.offset % BLOCK or (kept == "tiny" and start % BLOCK):
        raise ValueError(
            f"a segment starts at {start}, {segment.offset} elements into its parameter: moments in {kept!r} are cut "
            f"at multiples of {BLOCK} elements of a parameter"
            + (", which are multiples of the flat layer too" if kept == "tiny" else "")
        )


def adamw_step_reference(state: FlatState, gradient: Tensor, segments: Sequence[Segment], grad_scale: float) -> None:
    """One AdamW step in torch operations, in place; on CPU and CUDA tensors alike.

    Elements outside the segments are untouched. `gradient` is bf16, fp16 or fp32, of the weights' length;
    `grad_scale` (rounded to fp32) multiplies it first. Raises as `check_state` does.
    """
    check_state(state, gradient, segments)
    scale = round_to_fp32(grad_scale)
    for segment in segments:
        end = segment.start + segment.length
        for first in range(segment.start, end, _SLICE):
            at = slice(first, min(first + _SLICE, end))
            _step_slice(state, gradient[at].float(), at, segment, scale)


def _step_slice(state: FlatState, gradient: Tensor, at: slice, segment: Segment, grad_scale: float) -> None:
    """Every torch operation here rounds once: no `alpha`, no addcmul, which may fuse, and no division by a scalar.

    The square root goes through fp64: torch's fp32 one on the CPU (MKL) is one ulp off in a fifth of all cases. An
    fp32 root is never within 2**-50 of a rounding border, so an fp64 one within its own ulp rounds to the right fp32.
    """
    s = segment.scalars
    g = gradient * grad_scale
    m, v = read_moments(state, at)
    m.mul_(s.beta1).add_(g * s.one_minus_beta1)
    v.mul_(s.beta2).add_((g * s.one_minus_beta2).mul_(g))
    denominator = v.double().sqrt_().float().mul_(s.inv_sqrt_bias_correction2).add_(s.eps)
    update = (m / denominator).mul_(s.step_size)
    weights, remainder = state.weights[at], state.remainder
    if remainder is None:
        weights.mul_(s.decay).sub_(update)
    elif weights.dtype == torch.float16:
        weights.copy_(remainder[at].mul_(s.decay).sub_(update))
    else:
        master = join_master(weights, remainder[at]).mul_(s.decay).sub_(update)
        high, low = split_master(master)
        weights.copy_(high)
        remainder[at].copy_(low)
    if state.precision != "exact":
        first = segment.offset + at.start - segment.start
        random = moments.random_bits(segment.random_key, first, m.numel(), m.device)
        _store_moments(state, at, m, v, random)


def read_moments(state: FlatState, at: slice) -> tuple[Tensor, Tensor]:
    """fp32 exp_avg and exp_avg_sq of a range of elements: in `exact` the arrays' own views, else copies.

    In `tiny`, `at` starts at a multiple of 256.
    """
    m, v = state.exp_avg[at], state.exp_avg_sq[at]
    if state.exp_avg_scale is None or state.exp_avg_sq_scale is None:
        return m.float(), v.float()
    blocks = slice(at.start // BLOCK, -(-at.stop // BLOCK))
    return (
        moments.decode_exp_avg(m, state.exp_avg_scale[blocks]),
        moments.decode_exp_avg_sq(v, state.exp_avg_sq_scale[blocks]),
    )


def _store_moments(state: FlatState, at: slice, m: Tensor, v: Tensor, random: Tensor) -> None:
    """random: int64, 32 bits for each element."""
    m_random, v_random = random & 0xFFFF, random >> 16
    if state.exp_avg_scale is None or state.exp_avg_sq_scale is None:
        state.exp_avg[at] = moments.round_stochastically(m, m_random)
        state.exp_avg_sq[at] = moments.round_stochastically(v, v_random)
        return
    blocks = slice(at.start // BLOCK, -(-at.stop // BLOCK))
    state.exp_avg[at], state.exp_avg_scale[blocks] = moments.encode_exp_avg(m, m_random)
    state.exp_avg_sq[at], state.exp_avg_sq_scale[blocks] = moments.encode_exp_avg_sq(v, v_random)
