"""Flat states and gradients that the tests of the optimizer share."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from offloadkit.optim.adamw import FlatState, split_master

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_FULL_NAN = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
"""Carelessly split, this NaN would become -0."""

SPECIAL = torch.tensor(
    [
        *(
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            2.0,
            1e-45,
            -1e-45,
            1e-40,
            1.1754944e-38,
            5.9e-8,
            6.1e-5,
            65504.0,
            65519.0,
            65520.0,
        ),
        *(1e30, -1e30, 3.4028235e38, -3.4028235e38, 3.3961776e38, float("inf"), float("-inf"), float("nan")),
    ],
    dtype=torch.float32,
)
SPECIAL = torch.cat([SPECIAL, _FULL_NAN[None]])


def make_state(dtype: torch.dtype, length: int, *, seed: int = 0, unaligned_by: int = 0) -> FlatState:
    """A state in mid-training; `unaligned_by` elements shift every array off its allocation's start."""
    generator = torch.Generator().manual_seed(seed)
    total = length + unaligned_by
    master = torch.randn(total, generator=generator) * 10.0 ** torch.randint(-6, 3, (total,), generator=generator)
    exp_avg = torch.randn(total, generator=generator) * 1e-3
    exp_avg_sq = torch.rand(total, generator=generator) * 1e-6
    if dtype == torch.bfloat16:
        arrays = (*split_master(master), exp_avg, exp_avg_sq)
    elif dtype == torch.float16:
        arrays = (master.half(), master, exp_avg, exp_avg_sq)
    else:
        return FlatState(master[unaligned_by:], None, exp_avg[unaligned_by:], exp_avg_sq[unaligned_by:])
    return FlatState(*(array[unaligned_by:] for array in arrays))


def make_gradient(dtype: torch.dtype, length: int, *, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-5, 2, (length,), generator=generator)
    return (torch.randn(length, generator=generator) * scale).to(dtype)


def set_master(state: FlatState, master: Tensor) -> None:
    """Makes `master`, fp32, the state's master weights, its working weights their rounding."""
    if state.remainder is None:
        state.weights = master.clone()
    elif state.weights.dtype == torch.float16:
        state.weights, state.remainder = master.half(), master.clone()
    else:
        state.weights, state.remainder = split_master(master)


def clone(state: FlatState) -> FlatState:
    arrays = (getattr(state, field.name) for field in fields(state))
    return FlatState(*(array if array is None else array.clone() for array in arrays))


def assert_same_bits(actual: FlatState, expected: FlatState) -> None:
    """Every array equal bit for bit, -0 and 0 told apart; a NaN equals any NaN."""
    for field in fields(expected):
        one, other = getattr(actual, field.name), getattr(expected, field.name)
        if other is not None:
            assert_same_array_bits(one, other, field.name)


def assert_same_array_bits(actual: Tensor, expected: Tensor, name: str = "") -> None:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    differs = actual.view(integers) != expected.view(integers)
    if expected.is_floating_point():
        differs &= ~(actual.isnan() & expected.isnan())
    assert not differs.any(), (
        f"{name}: {int(differs.sum())} of {differs.numel()} elements differ, first at {int(differs.nonzero()[0])}: "
        f"{actual[differs][0].item()!r} and {expected[differs][0].item()!r}"
    )
