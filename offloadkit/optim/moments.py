"""Storage of moments in fewer bits than fp32: the definitions, in torch operations; C and Triton store the same bits.

bf16 (`compact`): rounded stochastically. 8 bits (`tiny`): a code per element and an fp32 scale per 256 elements. A step
updates the weights with the new fp32 moments and rounds only stored values. Random bits are a hash of a key (from seed,
step and parameter name) and the element's index in the parameter.

Rounding to nearest would let moments stall. A step moves exp_avg_sq by a thousandth, and exp_avg by a tenth, of its
distance to the new value, less than half the gap to the next number: 0.4 to 0.8 % in bf16; in the 8-bit maps 0.7 % near
the block's maximum, and more below it. A stalled exp_avg moves its weight in one direction forever.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
"""Elements per scale of 8-bit moments. Blocks start at the parameter's first element."""

INVERSE_OF_0_9 = 1.1111112
"""1 / 0.9 in fp32."""

_EXPONENT = 0x7F800000
CANONICAL_NAN = 0x7FC00000
_LOW_32 = 0xFFFFFFFF


def random_key(seed: int, name: str, step: int) -> int:
    """The 64-bit key of one parameter's random bits. `step` counts applied steps from 1."""
    text = f"{seed} {step} {name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def random_bits(key: int, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """32 random bits for elements first .. first + count of a parameter: int64 [count] of 0 .. 2**32 - 1.

    The lower 16 bits round the first moment, the upper 16 bits the second moment. The hash is lowbias32 (Wellons,
    "Prospecting for Hash Functions", 2018) of (element + lower half of the key), with the state xored with the upper
    half between the two multiplications. Every 2**32 elements use another upper half.
    """
    elements = torch.arange(first, first + count, dtype=torch.int64, device=device)
    upper = ((key >> 32) + (elements >> 32) * 0x9E3779B9) & _LOW_32
    state = (elements + (key & _LOW_32)) & _LOW_32
    state = ((state ^ (state >> 16)) * 0x7FEB352D) & _LOW_32
    state = (((state ^ (state >> 15)) ^ upper) * 0x846CA68B) & _LOW_32
    return state ^ (state >> 16)


def round_stochastically(values: Tensor, random: Tensor) -> Tensor:
    """Round fp32 to bf16, up or down with probabilities that preserve the mean.

    `random`: integers of 0 .. 65535, added to the fp32 bits before truncation to the upper half. Overflow of the
    largest bf16 becomes Inf; Inf stays; every NaN becomes one canonical NaN.
    """
    bits = values.view(torch.int32)
    rounded = torch.where((bits & _EXPONENT) == _EXPONENT, bits, bits + random.to(torch.int32))
    return (rounded.masked_fill(values.isnan(), CANONICAL_NAN) >> 16).to(torch.int16).view(torch.bfloat16)


class Map(NamedTuple):
    """A map of 8-bit codes to levels of 0 .. 1, after the dynamic tree of Dettmers et al., "8-bit Optimizers via
    Block-wise Quantization" (arXiv 2110.02861).

    Each of the seven decades from 1e-7 to 1 is cut into equal parts, whose midpoints are the levels; a decade has twice
    as many levels as the decade below. Number n, with n + 0.5 = y * 2**e and 1 <= y < 2, is the level (0.9 * y - 0.8) *
    10**(e - first_exponent) * 1e-6; the least number is zero, the largest 1. (With a table lookup, whose gathers the
    CPU waits for, the step took 3 times as long.)
    """

    least: int
    largest: int
    first_exponent: int


EXP_AVG_MAP = Map(0, 127, 0)
"""1, 2, 4 ... 64 levels per decade. A code is the number, with the sign in bit 7. Both signs have the level 1.0 instead
of the largest midpoint (0.993), so that a block's extreme is exact; the paper has only the positive 1.0.
"""

EXP_AVG_SQ_MAP = Map(1, 256, 1)
"""2, 4, 8 ... 128 levels per decade. A code is the number minus 1."""


def level(number: Tensor, map: Map) -> Tensor:
    """fp32 levels of integers, in the order of fp32 operations that C and Triton use."""
    bits = (number + 0.5).view(torch.int32)
    decade = ((bits >> 23) - 127 - map.first_exponent).clamp(0, 6)
    within = (bits & 0x7FFFFF | 0x3F800000).view(torch.float32) * 0.9 - 0.8
    value = within * _power_of_ten(decade) * 1e-6
    return value.masked_fill(number == map.least, 0.0).masked_fill(number == map.largest, 1.0)


def _power_of_ten(exponent: Tensor) -> Tensor:
    return torch.tensor([1.0, 10.0, 1e2, 1e3, 1e4, 1e5, 1e6], device=exponent.device)[exponent]


def round_to_number(shares: Tensor, random: Tensor, map: Map) -> Tensor:
    """Round `shares` (fp32 of 0 .. 1) to one of the two nearest levels and return its number (int32).

    `random`: 0 .. 65535; the upper level is taken with the probability that preserves the mean.
    """
    borders = torch.tensor([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1], device=shares.device)
    decade = torch.bucketize(shares, borders, right=True, out_int32=True)
    first = (decade + (127 + map.first_exponent) << 23).view(torch.float32)
    place = (shares * _power_of_ten(6 - decade) + 0.8) * INVERSE_OF_0_9 * first - 0.5
    lower = place.to(torch.int32).clamp(max=map.largest - 1)
    below = level(lower, map)
    return lower + (random * 2.0**-16 * (level(lower + 1, map) - below) < shares - below).to(torch.int32)


def encode_bf16(values: Tensor, random: Tensor, is_signed: bool) -> tuple[Tensor, None]:
    """Round fp32 [n] to bf16 [n] with `round_stochastically`. No scales."""
    return round_stochastically(values, random), None


def decode_bf16(stored: Tensor, scales: Tensor | None, is_signed: bool) -> Tensor:
    return stored.float()


def encode_8_bit(values: Tensor, random: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    """Encode fp32 [n] as codes (uint8 [n]) and scales (fp32 [n / 256, rounded up]).

    A block's scale is its largest magnitude. The ratio of a magnitude to the scale is rounded to one of the two nearest
    levels with probabilities that preserve the mean; `random`: integers of 0 .. 65535. A block with Inf or NaN gets the
    scale NaN and decodes to NaN.

    Unsigned values are not negative, and only zero is stored as zero. Values below the smallest level, 3.25e-7 of the
    block's maximum, are stored as that level, because zero would make exp_avg / eps the next update if the gradient
    vanishes. Such elements take smaller steps than in `exact`, never larger ones.
    """
    if is_signed:
        numbers, scales = _encode(values, random, EXP_AVG_MAP)
        sign = (values.view(torch.int32) >> 31 & 0x80).masked_fill(_spread(scales, values).isnan(), 0)
        return (numbers | sign).to(torch.uint8), scales
    numbers, scales = _encode(values, random, EXP_AVG_SQ_MAP)
    lost = (numbers == 1) & (values > 0) & ~_spread(scales, values).isnan()
    return (numbers.masked_fill(lost, 2) - 1).to(torch.uint8), scales


def decode_8_bit(codes: Tensor, scales: Tensor | None, is_signed: bool) -> Tensor:
    """Decode uint8 [n] and scales fp32 [n / 256, rounded up] to fp32 [n]: level times scale."""
    assert scales is not None
    codes = codes.to(torch.int32)
    if not is_signed:
        return level(codes + 1, EXP_AVG_SQ_MAP) * _spread(scales, codes)
    sign = (codes & 0x80) << 24
    return ((level(codes & 0x7F, EXP_AVG_MAP) * _spread(scales, codes)).view(torch.int32) ^ sign).view(torch.float32)


def _spread(scales: Tensor, like: Tensor) -> Tensor:
    return scales.repeat_interleave(BLOCK, output_size=scales.numel() * BLOCK)[: like.numel()]


def _encode(values: Tensor, random: Tensor, map: Map) -> tuple[Tensor, Tensor]:
    magnitudes = values.view(torch.int32) & 0x7FFFFFFF
    num_blocks = -(-values.numel() // BLOCK)
    padded = torch.nn.functional.pad(magnitudes, (0, num_blocks * BLOCK - values.numel()))
    largest = padded.view(num_blocks, BLOCK).amax(1)
    finite = largest < _EXPONENT
    scales = largest.masked_fill(~finite, CANONICAL_NAN).view(torch.float32)
    divisors = torch.where(finite & (largest > 0), scales, 1.0)
    shares = (magnitudes.view(torch.float32) / _spread(divisors, values)).masked_fill(~_spread(finite, values), 0.0)
    numbers = round_to_number(shares, random, map)
    return numbers.masked_fill(~_spread(finite, values), map.least), scales
