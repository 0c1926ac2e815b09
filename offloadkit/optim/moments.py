"""How moments are stored in fewer bits than fp32: the definitions, in torch operations.

bf16 (`compact`): rounded stochastically. 8 bits (`tiny`): a code, and an fp32 scale for each 256 elements. A step reads
the moments to fp32, updates the weights with the new fp32 moments, and rounds only what it stores. C and Triton do the
same integer operations and the same fp32 operations, each rounded once, and store the same bits.

Random bits are a hash of a key and of the element within the parameter. The key is made from the seed, the step and the
parameter's name. So the bits depend on neither the processor, the cutting nor the threads.

Rounding to nearest would let moments stall. A step moves exp_avg_sq by a thousandth, and exp_avg by a tenth, of its
distance to the new value. That is less than half the gap to the next number: 0.4 to 0.8 % in bf16; in the 8-bit maps
0.7 % near the block's largest value, and more below it. An exp_avg that stalls moves its weight one way for ever.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
"""Elements that share a scale in 8 bits. Blocks start where their parameter starts."""

INVERSE_OF_0_9 = 1.1111112
"""1 / 0.9 in fp32."""

_EXPONENT = 0x7F800000
CANONICAL_NAN = 0x7FC00000
_LOW_32 = 0xFFFFFFFF


def random_key(seed: int, name: str, step: int) -> int:
    """The 64-bit key of one parameter's random bits: `step` is the number of the applied step, the first is 1."""
    text = f"{seed} {step} {name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def random_bits(key: int, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """32 random bits for each of the elements first .. first + count of a parameter: int64 [count] of 0 .. 2**32 - 1.

    The lower 16 bits round the first moment, the upper 16 the second. The hash is lowbias32 (Wellons, "Prospecting for
    Hash Functions", 2018) of (element + lower half of the key), its state xored with the upper half between the two
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
    return (rounded.masked_fill(values.isnan(), CANONICAL_NAN) >> 16).to(torch.int16).view(torch.bfloat16)


class Map(NamedTuple):
    """A map of 8-bit codes to levels of 0 .. 1, after the dynamic tree of Dettmers et al., "8-bit Optimizers via
    Block-wise Quantization" (arXiv 2110.02861).

    Levels are numbered. 0.1 .. 1 times a power of ten is cut into equal parts, whose middles are the levels; each of
    the seven decades from 1e-7 on has twice as many as the one before. Number n, with n + 0.5 = y * 2**e and
    1 <= y < 2, is the level (0.9 * y - 0.8) * 10**(e - first_exponent) * 1e-6; the least number is zero, the largest 1.
    (It is arithmetic since a table and a search in it made the CPU wait for gathers: the step took 3 times as long.)
    """

    least: int
    largest: int
    first_exponent: int


EXP_AVG_MAP = Map(0, 127, 0)
"""1, 2, 4 ... 64 levels a decade. A code is the number, and the sign as bit 7. The paper's 1.0, which has no negative,
is given to both signs instead of the largest middle (0.993), so that a block's extreme is exact whatever its sign."""

EXP_AVG_SQ_MAP = Map(1, 256, 1)
"""2, 4, 8 ... 128 levels a decade; a code is the number less 1."""


def level(number: Tensor, map: Map) -> Tensor:
    """fp32 levels of integers: one fp32 operation after the other, as C and Triton do them."""
    bits = (number + 0.5).view(torch.int32)
    decade = ((bits >> 23) - 127 - map.first_exponent).clamp(0, 6)
    within = (bits & 0x7FFFFF | 0x3F800000).view(torch.float32) * 0.9 - 0.8
    value = within * _power_of_ten(decade) * 1e-6
    return value.masked_fill(number == map.least, 0.0).masked_fill(number == map.largest, 1.0)


def _power_of_ten(exponent: Tensor) -> Tensor:
    """fp32 of 10**exponent, which is exact, for int32 of 0 .. 6."""
    return torch.tensor([1.0, 10.0, 1e2, 1e3, 1e4, 1e5, 1e6], device=exponent.device)[exponent]


def round_to_number(shares: Tensor, random: Tensor, map: Map) -> Tensor:
    """The number (int32) of one of the two levels around each of `shares`, fp32 of 0 .. 1.

    random: 0 .. 65535; the upper one is taken with the odds that make the mean the share.
    """
    borders = torch.tensor([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1], device=shares.device)
    decade = torch.bucketize(shares, borders, right=True, out_int32=True)
    first = (decade + (127 + map.first_exponent) << 23).view(torch.float32)
    place = (shares * _power_of_ten(6 - decade) + 0.8) * INVERSE_OF_0_9 * first - 0.5
    lower = place.to(torch.int32).clamp(max=map.largest - 1)
    below = level(lower, map)
    return lower + (random * 2.0**-16 * (level(lower + 1, map) - below) < shares - below).to(torch.int32)


def encode_bf16(values: Tensor, random: Tensor, is_signed: bool) -> tuple[Tensor, None]:
    """fp32 [n] as bf16 [n], see `round_stochastically`. There are no scales, and the sign is bf16's own."""
    return round_stochastically(values, random), None


def decode_bf16(stored: Tensor, scales: Tensor | None, is_signed: bool) -> Tensor:
    """fp32 of bf16, exactly."""
    return stored.float()


def encode_8_bit(values: Tensor, random: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    """fp32 [n] as codes (uint8 [n]) and scales (fp32 [n / 256, rounded up]).

    A block's scale is its largest magnitude. A magnitude over the scale lies between two levels and takes one of the
    two with the odds that make the mean the value; random: integers of 0 .. 65535. A block with Inf or NaN has the
    scale NaN and reads as NaN.

    Without a sign the numbers are not negative, and none but zero is stored as zero. A number below the smallest level,
    3.25e-7 of the largest in its block, is stored as that level. Stored as zero, it would leave exp_avg / eps as the
    next update where the gradient vanishes. So such an element takes smaller steps than in `exact`, never larger ones.
    """
    if is_signed:
        numbers, scales = _encode(values, random, EXP_AVG_MAP)
        sign = (values.view(torch.int32) >> 31 & 0x80).masked_fill(_spread(scales, values).isnan(), 0)
        return (numbers | sign).to(torch.uint8), scales
    numbers, scales = _encode(values, random, EXP_AVG_SQ_MAP)
    lost = (numbers == 1) & (values > 0) & ~_spread(scales, values).isnan()
    return (numbers.masked_fill(lost, 2) - 1).to(torch.uint8), scales


def decode_8_bit(codes: Tensor, scales: Tensor | None, is_signed: bool) -> Tensor:
    """fp32 [n] of uint8 [n] and fp32 [n / 256, rounded up]: the level times the scale."""
    assert scales is not None
    codes = codes.to(torch.int32)
    if not is_signed:
        return level(codes + 1, EXP_AVG_SQ_MAP) * _spread(scales, codes)
    sign = (codes & 0x80) << 24
    return ((level(codes & 0x7F, EXP_AVG_MAP) * _spread(scales, codes)).view(torch.int32) ^ sign).view(torch.float32)


def _spread(scales: Tensor, like: Tensor) -> Tensor:
    return scales.repeat_interleave(BLOCK, output_size=scales.numel() * BLOCK)[: like.numel()]


def _encode(values: Tensor, random: Tensor, map: Map) -> tuple[Tensor, Tensor]:
    """The magnitudes' numbers (int32 [n]) and the scales."""
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
