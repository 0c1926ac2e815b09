"""How exp_avg and exp_avg_sq are kept between steps: the definitions, in torch operations.

`exact`: fp32. `compact`: bf16, stochastically rounded. `tiny`: 8 bits and an fp32 scale for each 256 elements. A step
reads the moments to fp32, computes as `exact` does, updates the weights with the new fp32 moments, and rounds only what
it stores. C and Triton do the same integer operations and the same fp32 operations, each rounded once, and store the
same bits.

Random bits are a hash of (a key of the step and the parameter, the element within the parameter), so they depend on
neither the processor, the cutting, nor the threads.

Rounding is stochastic since nearest rounding lets moments stall: a step moves exp_avg_sq by a thousandth and exp_avg by
a tenth of what is missing, which is less than half the gap to the next number of bf16 (0.4 to 0.8 %; exp_avg_sq) or of
the 8-bit maps (0.7 % near the block's extreme, several times the number far below it; both). An exp_avg that stalls is
worse than coarse: it moves its weight one way for ever.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Precision = Literal["exact", "compact", "tiny"]

MOMENT_DTYPES: dict[Precision, torch.dtype] = {
    "exact": torch.float32,
    "compact": torch.bfloat16,
    "tiny": torch.uint8,
}

BLOCK = 256
"""Elements that share a scale in `tiny`. Blocks start where their parameter starts."""

FIRST_BUCKET = 105 << 7
"""Upper 16 bits of the pattern of 2**-22, which lies below every level but zero."""

_EXPONENT = 0x7F800000
_CANONICAL_NAN = 0x7FC00000
_LOW_32 = 0xFFFFFFFF


def random_key(seed: int, name: str, step: int) -> int:
    """The 64-bit key of one parameter's random bits: `step` is the number of the applied step, the first is 1."""
    text = f"{seed} {step} {name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def random_bits(key: int, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """32 random bits for each of the elements first .. first + count of a parameter: int64 [count] of 0 .. 2**32 - 1.

    The lower 16 bits round exp_avg, the upper 16 exp_avg_sq. The hash is lowbias32 (Wellons, "Prospecting for Hash
    Functions", 2018) of (element + lower half of the key), its state xored with the upper half between the two
    multiplications; each 2**32 elements have an upper half of their own.
    """
    elements = torch.arange(first, first + count, dtype=torch.int64, device=device)
    upper = ((key >> 32) + (elements >> 32) * 0x9E3779B9) & _LOW_32
    state = (elements + (key & _LOW_32)) & _LOW_32
    state = ((state ^ (state >> 16)) * 0x7FEB352D) & _LOW_32
    state = (((state ^ (state >> 15)) ^ upper) * 0x846CA68B) & _LOW_32
    return state ^ (state >> 16)


def round_stochastically(values: Tensor, random: Tensor) -> Tensor:
    """fp32 `values` as bf16: up or down with the odds that make the mean the value.

    random: integers of 0 .. 65535, added to the fp32 pattern, whose upper half is kept. What that carries past the
    largest bf16 becomes Inf; Inf stays; every NaN becomes one NaN.
    """
    bits = values.view(torch.int32)
    rounded = torch.where((bits & _EXPONENT) == _EXPONENT, bits, bits + random.to(torch.int32))
    return (rounded.masked_fill(values.isnan(), _CANONICAL_NAN) >> 16).to(torch.int16).view(torch.bfloat16)


def _means(decade: int, count: int) -> list[float]:
    """The middles of `count` equal parts of 0.1 .. 1, times 10**decade."""
    return [10.0**decade * (0.1 + 0.9 * (part + 0.5) / count) for part in range(count)]


@cache
def exp_avg_levels() -> tuple[float, ...]:
    """The 128 magnitudes of exp_avg by code, ascending; bit 7 of a code is the sign.

    The dynamic tree map of Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861): zero
    and, in the seven decades from 1e-7, 1, 2, 4 ... 64 numbers each. Its 1.0, which has no negative, is given to both
    signs instead of the largest mean (0.993), so that a block's extreme is exact whatever its sign.
    """
    means = [mean for exponent in range(7) for mean in _means(exponent - 6, 2**exponent)]
    return (0.0, *means[:-1], 1.0)


@cache
def exp_avg_sq_levels() -> tuple[float, ...]:
    """The 256 numbers of exp_avg_sq by code, ascending: the unsigned map of the same paper, with 2, 4 ... 128 numbers
    a decade, zero and 1.0."""
    means = [mean for exponent in range(7) for mean in _means(exponent - 6, 2 ** (exponent + 1))]
    return (0.0, *means, 1.0)


class Tables(NamedTuple):
    """The maps as C and Triton read them."""

    levels: Tensor
    """fp32 [386]: the magnitudes of exp_avg, Inf, the numbers of exp_avg_sq, Inf."""
    buckets: Tensor
    """int32 [2817]: by the upper 16 bits of the pattern of a number of 0 .. 1, less FIRST_BUCKET (below it: 0), the
    code of the largest level at or below the least such number, exp_avg's in the lower byte, exp_avg_sq's in the next.
    No bucket has more than one level above its least number."""


@cache
def tables(device: torch.device) -> Tables:
    """The maps on `device`."""
    inf = float("inf")
    signed, unsigned = torch.tensor(exp_avg_levels()), torch.tensor(exp_avg_sq_levels())
    patterns = torch.arange(FIRST_BUCKET, (0x3F800000 >> 16) + 1, dtype=torch.int32)
    least = (patterns << 16).view(torch.float32)
    codes = [torch.searchsorted(levels, least, right=True) - 1 for levels in (signed, unsigned)]
    levels = torch.cat([signed, torch.tensor([inf]), unsigned, torch.tensor([inf])])
    return Tables(levels.to(device), (codes[0] | codes[1] << 8).to(torch.int32).to(device))


def encode_exp_avg(values: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [n] as codes (uint8 [n]) and scales (fp32 [n / 256, rounded up]).

    A block's scale is its largest magnitude. A magnitude over the scale lies between two levels and takes one of the
    two with the odds that make the mean the value; random: integers of 0 .. 65535. A block with Inf or NaN has the
    scale NaN and reads as NaN.
    """
    codes, scales = _encode(values, random, torch.tensor(exp_avg_levels(), device=values.device))
    sign = (values.view(torch.int32) >> 31 & 0x80).masked_fill(_spread(scales, values).isnan(), 0)
    return (codes | sign).to(torch.uint8), scales


def encode_exp_avg_sq(values: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """As `encode_exp_avg`, for numbers that are not negative; none but zero is stored as zero.

    A number below the smallest level, 3.25e-7 of the largest in its block, is stored as that level: as zero it would
    leave exp_avg / eps as the next update where the gradient vanishes. So such an element takes smaller steps than it
    would in `exact`, never larger ones.
    """
    codes, scales = _encode(values, random, torch.tensor(exp_avg_sq_levels(), device=values.device))
    lost = (codes == 0) & (values > 0) & ~_spread(scales, values).isnan()
    return codes.masked_fill(lost, 1).to(torch.uint8), scales


def decode_exp_avg(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32 [n] of uint8 [n] and fp32 [n / 256, rounded up]: the level times the scale."""
    levels = torch.tensor(exp_avg_levels(), device=codes.device)
    return torch.cat([levels, -levels])[codes.long()] * _spread(scales, codes)


def decode_exp_avg_sq(codes: Tensor, scales: Tensor) -> Tensor:
    """As `decode_exp_avg`."""
    return torch.tensor(exp_avg_sq_levels(), device=codes.device)[codes.long()] * _spread(scales, codes)


def _spread(scales: Tensor, like: Tensor) -> Tensor:
    return scales.repeat_interleave(BLOCK, output_size=scales.numel() * BLOCK)[: like.numel()]


def _encode(values: Tensor, random: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """The levels' indices (int64 [n]) of the magnitudes, and the scales."""
    magnitudes = values.view(torch.int32) & 0x7FFFFFFF
    num_blocks = -(-values.numel() // BLOCK)
    padded = torch.nn.functional.pad(magnitudes, (0, num_blocks * BLOCK - values.numel()))
    largest = padded.view(num_blocks, BLOCK).amax(1)
    finite = largest < _EXPONENT
    scales = largest.masked_fill(~finite, _CANONICAL_NAN).view(torch.float32)
    divisors = torch.where(finite & (largest > 0), scales, 1.0)
    shares = (magnitudes.view(torch.float32) / _spread(divisors, values)).masked_fill(~_spread(finite, values), 0.0)
    lower = torch.searchsorted(levels, shares, right=True) - 1
    level, gap = levels[lower], torch.diff(levels, append=levels.new_tensor([torch.inf]))[lower]
    up = random.float() * 2.0**-16 * gap < shares - level
    return lower + up.long(), scales
