"""The AdamW formula in torch operations, its scalars, and split master weights."""

from __future__ import annotations

import math

import pytest
import torch

from offloadkit.kernels import cpu
from offloadkit.optim.adamw import AdamWScalars, adamw_scalars
from offloadkit.optim.reference import join_master, round_to_fp32, split_master, step_reference
from offloadkit.optim.table import Segment
from tests.optim.states import (
    DTYPES,
    SPECIAL,
    assert_same_array_bits,
    assert_same_bits,
    clone,
    flat,
    make_gradient,
    make_state,
)

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def random_bits(count: int) -> torch.Tensor:
    bits = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(0))
    return bits.to(torch.int32).view(torch.float32)


def test_joining_a_split_gives_every_finite_master_back_bit_for_bit() -> None:
    master = torch.cat([SPECIAL, random_bits(200_000)])
    master = master[~master.isnan()]
    assert master.isinf().any()
    assert_same_array_bits(join_master(*split_master(master)), master)


def test_the_high_half_is_the_nearest_bf16() -> None:
    master = random_bits(200_000)
    master = master[master.isfinite()]
    high, _ = split_master(master)
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert_same_array_bits(high[~tie], master[~tie].bfloat16())


def test_a_nan_master_stays_nan_in_both_halves_joined_and_apart() -> None:
    patterns = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF, -1, -0x7FFFFF, -0x8000], dtype=torch.int32)
    master = patterns.view(torch.float32)
    assert master.isnan().all()
    high, low = split_master(master)
    assert high.isnan().all()
    assert join_master(high, low).isnan().all()


def test_scalars_are_computed_in_fp64_and_rounded_once() -> None:
    scalars = adamw_scalars(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, step=7)
    exact = (0.9, 0.999, 1 - 0.9, 1 - 0.999, 1e-8, 1 - 1e-4 * 0.1, 1e-4 / (1 - 0.9**7), 1 / math.sqrt(1 - 0.999**7))
    assert tuple(scalars) == tuple(torch.tensor(exact, dtype=torch.float64).float().tolist())


def test_step_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="counts its steps from 1"):
        adamw_scalars(step=0, **OPTIONS)


def test_the_square_root_is_correctly_rounded() -> None:
    """torch's own fp32 square root on the CPU is not; with eps 0 and weights 0 the update is -m / sqrt(v)."""
    v = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    state = flat(torch.zeros_like(v), None, torch.ones_like(v), v.clone())
    scalars = adamw_scalars(**OPTIONS, step=1)._replace(
        beta1=1.0, beta2=1.0, eps=0.0, decay=1.0, step_size=1.0, inv_sqrt_bias_correction2=1.0
    )
    step_reference(state, torch.zeros_like(v), [Segment(0, v.numel(), scalars)], 1.0)
    expected = [-1.0 / root for root in torch.tensor([math.sqrt(x) for x in v.tolist()]).tolist()]
    assert_same_array_bits(state.weights, torch.tensor(expected, dtype=torch.float64).float())


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", [step_reference, cpu.optimizer_step], ids=["reference", "c"])
def test_200_steps_stay_within_5e_6_of_torch_adamw_in_fp32(weights_dtype: torch.dtype, step) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(20_000, generator=generator) * 0.02
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([parameter], **OPTIONS)
    zeros = torch.zeros_like(start)
    if weights_dtype == torch.bfloat16:
        state = flat(*split_master(start), zeros.clone(), zeros.clone())
    else:
        state = flat(start.clone(), None, zeros.clone(), zeros.clone())
    for number in range(1, 201):
        gradient = (torch.randn(start.numel(), generator=generator) * 10.0 ** (number % 4 - 4)).bfloat16()
        parameter.grad = gradient.float() * 0.75
        optimizer.step()
        step(state, gradient, [Segment(0, start.numel(), adamw_scalars(step=number, **OPTIONS))], 0.75)
    master = state.weights if state.remainder is None else join_master(state.weights, state.remainder)
    assert ((master - parameter.detach()).norm() / parameter.detach().norm()).item() <= 5e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_outside_the_segments_are_untouched(dtype: torch.dtype) -> None:
    state, gradient = make_state(dtype, 1000), make_gradient(dtype, 1000)
    before = clone(state)
    scalars = adamw_scalars(step=2, **OPTIONS)
    step_reference(state, gradient, [Segment(100, 50, scalars), Segment(500, 0, scalars)], 1.0)
    changed = state["exp_avg"] != before["exp_avg"]
    assert changed[100:150].all()
    assert int(changed.sum()) == 50
    for start, end in ((0, 100), (150, 1000)):
        assert_same_array_bits(state.weights[start:end], before.weights[start:end])


def test_the_reference_gives_the_same_bits_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, gradient = make_state(torch.bfloat16, 1000), make_gradient(torch.bfloat16, 1000)
    sliced = clone(whole)
    segments = [Segment(1, 998, adamw_scalars(step=2, **OPTIONS))]
    step_reference(whole, gradient, segments, 0.5)
    monkeypatch.setattr("offloadkit.optim.reference.SLICE", 77)
    step_reference(sliced, gradient, segments, 0.5)
    assert_same_bits(sliced, whole)


def plain_python_step(w: float, m: float, v: float, gradient: float, s: AdamWScalars) -> tuple[float, float, float]:
    """The formula in Python's fp64, each operation rounded to fp32: as good as rounding the exact result once."""
    r = round_to_fp32
    m = r(r(s.beta1 * m) + r(s.one_minus_beta1 * gradient))
    v = r(r(s.beta2 * v) + r(r(s.one_minus_beta2 * gradient) * gradient))
    denominator = r(r(r(math.sqrt(v)) * s.inv_sqrt_bias_correction2) + s.eps)
    return r(r(w * s.decay) - r(s.step_size * r(m / denominator))), m, v


@pytest.mark.parametrize("step", [step_reference, cpu.optimizer_step], ids=["reference", "c"])
def test_exact_is_the_formula_in_plain_python_whatever_the_random_key(step) -> None:  # type: ignore[no-untyped-def]
    state, gradient = make_state(torch.float32, 100), make_gradient(torch.float32, 100)
    rows = zip(
        state.weights.tolist(), state["exp_avg"].tolist(), state["exp_avg_sq"].tolist(), gradient.tolist(), strict=True
    )
    scalars = adamw_scalars(step=4, **OPTIONS)
    expected = torch.tensor([plain_python_step(*row, scalars) for row in rows], dtype=torch.float64).float()
    step(state, gradient, [Segment(0, 100, scalars, random_key=12345, offset=3)], 1.0)
    for actual, column in zip((state.weights, state["exp_avg"], state["exp_avg_sq"]), expected.unbind(1), strict=True):
        assert_same_array_bits(actual, column.contiguous())
