"""Flat states and gradients for the optimizer's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from offloadkit.facts.config import Precision
from offloadkit.kernels import cpu
from offloadkit.optim.reference import split_master
from offloadkit.optim.table import OPTIMIZERS, FlatState, state_table
from offloadkit.optim.table import PRECISIONS as KEPT

PRECISIONS: tuple[Precision, ...] = ("exact", "compact", "tiny")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_FULL_NAN = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
"""A careless split would turn this NaN into -0."""

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


def make_state(
    dtype: torch.dtype,
    length: int,
    *,
    seed: int = 0,
    unaligned_by: int = 0,
    kept: Precision = "exact",
    optimizer: str = "adamw",
) -> FlatState:
    """A state in mid-training; `unaligned_by` elements shift every array off its allocation's start.

    kept: the moments' precision; with "tiny", `length` is a multiple of 256.
    """
    generator = torch.Generator().manual_seed(seed)
    total = length + unaligned_by
    master = torch.randn(total, generator=generator) * 10.0 ** torch.randint(-6, 3, (total,), generator=generator)
    exp_avg = torch.randn(total, generator=generator) * 1e-3
    exp_avg_sq = torch.rand(total, generator=generator) * 1e-6
    weights, remainder = {
        torch.bfloat16: lambda: split_master(master),
        torch.float16: lambda: (master.half(), master),
        torch.float32: lambda: (master, None),
    }[dtype]()
    averages = (exp_avg[unaligned_by:], exp_avg_sq[unaligned_by:])[: len(OPTIMIZERS[optimizer].moments)]
    remainder = None if remainder is None else remainder[unaligned_by:]
    state = flat(weights[unaligned_by:], remainder, *averages, optimizer=optimizer)
    return keep(state, kept, generator)


def flat(weights: Tensor, remainder: Tensor | None, *moments: Tensor, optimizer: str = "adamw") -> FlatState:
    """A state with moments in fp32."""
    table = state_table(optimizer, "exact", weights.dtype)
    arrays = {} if remainder is None else {"remainder": remainder}
    names = [moment.name for moment in table.optimizer.moments]
    return FlatState(table, weights, arrays | dict(zip(names, moments, strict=True)))


def keep(state: FlatState, kept: Precision, generator: torch.Generator | None = None) -> FlatState:
    """The state with its fp32 moments rounded to what `kept` stores."""
    table, encode = state_table(state.table.optimizer.name, kept, state.weights.dtype), KEPT[kept].encode
    randoms = torch.randint(0, 1 << 16, (2, state.weights.numel()), generator=generator)
    if encode is None:
        return state
    arrays = dict(state.arrays)
    for moment, random in zip(table.optimizer.moments, randoms, strict=True):
        arrays[moment.name], scales = encode(state[moment.name], random, moment.is_signed)
        if scales is not None:
            arrays[f"{moment.name}_scale"] = scales
    return FlatState(table, state.weights, arrays)


def make_gradient(dtype: torch.dtype, length: int, *, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-5, 2, (length,), generator=generator)
    return (torch.randn(length, generator=generator) * scale).to(dtype)


def set_master(state: FlatState, master: Tensor) -> None:
    """Set the master weights to `master` (fp32), and the working weights to its rounding."""
    if state.remainder is None:
        state.weights = master.clone()
    elif state.weights.dtype == torch.float16:
        state.weights, state.arrays["remainder"] = master.half(), master.clone()
    else:
        state.weights, state.arrays["remainder"] = split_master(master)


def special_state(
    weights: torch.dtype, gradients: torch.dtype, place: str, kept: Precision = "exact", optimizer: str = "adamw"
) -> tuple[FlatState, Tensor]:
    """Every special value as gradient with every special value in `place`: "master", "exp_avg" or "exp_avg_sq".

    The second half has finite values of moderate size, almost entirely in separate blocks of 256 elements, because a
    block of "tiny" with Inf or NaN hides its other values.
    """
    gradient, other = SPECIAL.repeat(SPECIAL.numel()), SPECIAL.repeat_interleave(SPECIAL.numel())
    gradient, other = (
        torch.cat([special, special.nan_to_num(0.5, 0.25, -0.25).clamp(-1e18, 1e18)]) for special in (gradient, other)
    )
    padding = -gradient.numel() % 256
    gradient, other = (torch.nn.functional.pad(special, (0, padding)) for special in (gradient, other))
    state = make_state(weights, gradient.numel(), optimizer=optimizer)
    if place == "master":
        set_master(state, other)
    else:
        state.arrays[place] = other.abs() if place == "exp_avg_sq" and kept == "tiny" else other
    return keep(state, kept), gradient.to(gradients)


def clone(state: FlatState) -> FlatState:
    return to(state, "cpu")


def to(state: FlatState, device: str) -> FlatState:
    """A copy on `device`."""
    arrays = {name: array.to(device, copy=True) for name, array in state.arrays.items()}
    return FlatState(state.table, state.weights.to(device, copy=True), arrays)


def assert_same_bits(actual: FlatState, expected: FlatState) -> None:
    """Every array equal bit for bit, with -0 different from 0; any NaN equals any NaN."""
    assert actual.arrays.keys() == expected.arrays.keys()
    assert_same_array_bits(actual.weights, expected.weights, "weights")
    for name, array in expected.arrays.items():
        assert_same_array_bits(actual[name], array, name)


def assert_same_array_bits(actual: Tensor, expected: Tensor, name: str = "") -> None:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    differs = actual.view(integers) != expected.view(integers)
    if expected.is_floating_point():
        differs &= ~(actual.isnan() & expected.isnan())
    assert not differs.any(), (
        f"{name}: {int(differs.sum())} of {differs.numel()} elements differ, first at {int(differs.nonzero()[0])}: "
        f"{actual[differs][0].item()!r} and {expected[differs][0].item()!r}"
    )


@contextmanager
def forced_level(name: str) -> Iterator[None]:
    """In this process, the C kernels of one level. `name`: one of `cpu.cpu_levels()`."""
    library = cpu.c_library()
    assert library is not None
    library.force_level(cpu.LEVELS.index(name))
    try:
        yield
    finally:
        library.force_level(-1)
