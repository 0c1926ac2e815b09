"""The definitions of `compact` and `tiny`: stored values, rounding probabilities, and stability over many steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from offloadkit.facts.config import Precision
from offloadkit.optim import reference, table
from offloadkit.optim.adamw import adamw_scalars
from offloadkit.optim.moments import (
    EXP_AVG_MAP,
    EXP_AVG_SQ_MAP,
    decode_8_bit,
    encode_8_bit,
    level,
    random_bits,
    random_key,
    round_stochastically,
)
from offloadkit.optim.reference import read_moments, step_reference
from offloadkit.optim.table import FlatState, Segment, state_table
from tests.optim.states import assert_same_array_bits, assert_same_bits, clone, make_gradient, make_state

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
ROUNDED = pytest.mark.parametrize("kept", ["compact", "tiny"])


def half_bits(key: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = random_bits(key, 0, count)
    return random & 0xFFFF, random >> 16


SIGNED = {"exp_avg": True, "exp_avg_sq": False}


def zero_state(kept: Precision, length: int) -> FlatState:
    def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype)

    return FlatState.cut(state_table("adamw", kept, torch.float32), torch.zeros(length), zeros)


def test_random_bits_follow_the_definition_in_plain_python() -> None:
    key = random_key(17, "decoder.block.3.layer.0.weight", 5)
    elements = [0, 1, 255, 256, 2**32 - 1, 2**32, 2**33 + 7]
    for element in elements:
        state = (element + key) % 2**32
        state = ((state ^ state >> 16) * 0x7FEB352D) % 2**32
        upper = (key // 2**32 + element // 2**32 * 0x9E3779B9) % 2**32
        state = ((state ^ state >> 15 ^ upper) * 0x846CA68B) % 2**32
        assert random_bits(key, element, 1).tolist() == [state ^ state >> 16]


def test_keys_tell_step_seed_and_name_apart_and_never_change() -> None:
    assert random_key(0, "weight", 1) == 13816518043846178843
    keys = {random_key(seed, name, step) for seed in (0, 1, -1) for name in ("a", "b", "1 a") for step in (1, 2, 11)}
    assert len(keys) == 27
    assert all(0 <= key < 2**64 for key in keys)


def test_random_bits_are_even_and_unrelated() -> None:
    """Over elements, from step to step, and between the halves for the two moments."""
    count = 1 << 18
    low, high = half_bits(random_key(0, "weight", 1), count)
    other, _ = half_bits(random_key(0, "weight", 2), count)
    for bits in (low, high, other):
        sixteenths = torch.bincount(bits >> 12, minlength=16)
        assert (sixteenths - count / 16).abs().max() < 6 * math.sqrt(count / 16)
    columns = torch.stack([low, high, other, low.roll(1), high.roll(1), low.roll(256)]).double()
    assert (torch.corrcoef(columns) - torch.eye(6)).abs().max() < 6 / math.sqrt(count)


def test_a_bf16_is_one_of_the_two_neighbours_and_its_mean_is_the_value() -> None:
    values = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(2000, dtype=torch.float64)
    for step in range(1, 1001):
        stored = round_stochastically(values, half_bits(random_key(0, "w", step), 2000)[0]).float()
        assert ((stored - values).abs() < 2.0**-7 * values.abs()).all()
        total += stored
    assert ((total / 1000 - values).abs() < 6 * 2.0**-8 / math.sqrt(1000) * values.abs()).all()


def test_special_values_in_bf16() -> None:
    inf = math.inf
    values = torch.tensor([0.0, -0.0, inf, -inf, math.nan, 1e-45, 3.4028235e38, -3.4028235e38, 1.5])
    up = round_stochastically(values, torch.full((9,), 65535))
    down = round_stochastically(values, torch.zeros(9))
    tiny, largest = 2.0**-133, 2.0**127 * (2 - 2.0**-7)
    assert_same_array_bits(up.float(), torch.tensor([0.0, -0.0, inf, -inf, math.nan, tiny, inf, -inf, 1.5]))
    assert_same_array_bits(down.float(), torch.tensor([0.0, -0.0, inf, -inf, math.nan, 0, largest, -largest, 1.5]))
    assert up.view(torch.int16)[4] == 0x7FC0


def test_the_maps_are_those_of_the_paper() -> None:
    """bitsandbytes' create_dynamic_map, with 1.0 for 0.993 in the signed map."""
    signed, unsigned = [], []
    for exponent in range(7):
        for levels, count in ((signed, 2**exponent), (unsigned, 2 ** (exponent + 1))):
            borders = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
            levels += (10.0 ** (exponent - 6) * (borders[:-1] + borders[1:]) / 2).tolist()
    assert level(torch.arange(128), EXP_AVG_MAP).tolist() == pytest.approx([0.0, *signed[:-1], 1.0], rel=1e-6)
    assert level(torch.arange(1, 257), EXP_AVG_SQ_MAP).tolist() == pytest.approx([0.0, *unsigned, 1.0], rel=1e-6)


@pytest.mark.parametrize("which", ["exp_avg", "exp_avg_sq"])
def test_an_8_bit_number_is_a_neighbouring_level_and_its_mean_is_the_value(which: str) -> None:
    is_signed = SIGNED[which]
    levels = level(torch.arange(128), EXP_AVG_MAP) if is_signed else level(torch.arange(1, 257), EXP_AVG_SQ_MAP)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1000, generator=generator) * 10.0 ** -(torch.rand(1000, generator=generator) * 6)
    values = values if which == "exp_avg" else values.abs()
    _, scales = encode_8_bit(values, torch.zeros(1000), is_signed)
    assert scales.tolist() == [block.abs().max().item() for block in values.split(256)]
    scale = scales.repeat_interleave(256)[:1000]
    above = torch.searchsorted(levels, values.abs() / scale).clamp(1, levels.numel() - 1)
    gap = (levels[above] - levels[above - 1]) * scale
    total = torch.zeros(1000, dtype=torch.float64)
    for step in range(1, 1001):
        low, high = half_bits(random_key(0, "w", step), 1000)
        stored = decode_8_bit(*encode_8_bit(values, low if is_signed else high, is_signed), is_signed)
        assert ((stored - values).abs() <= gap * 1.0001).all()
        total += stored
    representable = (which == "exp_avg") | (values >= levels[1] * scale)
    assert ((total / 1000 - values).abs() <= 3 * gap / math.sqrt(1000))[representable].all()


def test_what_is_stored_reads_as_itself() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for random in (0, 65535):
        for scale in (1.0, 3e38, 1e-37, 1e-3):
            scales, bits = torch.tensor([scale]), torch.full((256,), random)
            exact = scale == 1.0
            for is_signed in SIGNED.values():
                again, scales_again = encode_8_bit(decode_8_bit(codes, scales, is_signed), bits, is_signed)
                assert scales_again.item() == scales.item()
                if exact:
                    assert torch.equal(again, codes)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_that_is_not_finite_reads_as_nan_and_leaves_the_others(bad: float) -> None:
    values = torch.ones(600)
    values[300] = bad
    for is_signed in SIGNED.values():
        read = decode_8_bit(*encode_8_bit(values, torch.zeros(600), is_signed), is_signed)
        assert read[256:512].isnan().all()
        assert (read[:256] == 1).all()
        assert (read[512:] == 1).all()


def test_no_exp_avg_sq_but_zero_is_stored_as_zero() -> None:
    values = torch.tensor([1.0, 0.0, 3e-7, 1e-10, 1e-38, 1e-45])
    for random in (0, 65535):
        codes, _ = encode_8_bit(values, torch.full((6,), random), False)
        assert codes.tolist() == [255, 0, 1, 1, 1, 1]


@ROUNDED
def test_vanishing_gradients_beside_large_ones_make_no_large_update(kept: Precision) -> None:
    """If an exp_avg_sq far below its block's largest were rounded to zero, the next update would be exp_avg / eps."""
    state = zero_state(kept, 512)
    small = 10.0 ** -torch.linspace(0, 12, 511)
    for step in range(1, 31):
        gradient = torch.cat([torch.ones(1), small * (step <= 5)])
        before = state.weights.clone()
        segment = Segment(0, 512, adamw_scalars(step=step, **OPTIONS), random_key(0, "w", step))
        step_reference(state, gradient, [segment], 1.0)
        assert (state.weights - before).abs().max() < 1.5 * OPTIONS["lr"]


def test_with_nearest_rounding_a_dead_element_would_drift_with_stochastic_it_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its exp_avg loses a tenth a step, less than half the gap to the next level, so nearest rounding restores it."""

    def drift() -> torch.Tensor:
        state = zero_state("tiny", 256)
        for step in range(1, 201):
            if step == 101:
                state.weights.zero_()
            gradient = torch.full((256,), 3e-3 * (step <= 10))
            gradient[0] = 1.0
            segment = Segment(0, 256, adamw_scalars(step=step, **OPTIONS), random_key(0, "w", step))
            step_reference(state, gradient, [segment], 1.0)
        return state.weights[1:].abs().mean() / OPTIONS["lr"]

    stochastic = drift()

    def nearest(values: torch.Tensor, random: torch.Tensor, is_signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return encode_8_bit(values, torch.full_like(random, 0x8000) if is_signed else random, is_signed)

    monkeypatch.setitem(table.PRECISIONS, "tiny", replace(table.PRECISIONS["tiny"], encode=nearest))
    assert drift() > 5
    assert stochastic < 0.5


@ROUNDED
def test_exp_avg_sq_follows_its_mean(kept: Precision) -> None:
    """Gradients grow fourfold. The mean over elements equals `exact`; with nearest rounding bf16 would not change."""
    exact, rounded = zero_state("exact", 2048), zero_state(kept, 2048)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 401):
        gradient = torch.randn(2048, generator=generator) * (1.0 if step <= 200 else 4.0)
        segment = Segment(0, 2048, adamw_scalars(step=step, **OPTIONS), random_key(0, "w", step))
        for state in (exact, rounded):
            step_reference(state, gradient, [segment], 1.0)
    for mine, true in zip(read_moments(rounded, slice(0, 2048)), read_moments(exact, slice(0, 2048)), strict=True):
        assert mine.abs().mean().item() == pytest.approx(true.abs().mean().item(), rel=0.02)


@ROUNDED
def test_neither_cutting_nor_slices_change_a_bit(monkeypatch: pytest.MonkeyPatch, kept: Precision) -> None:
    whole, gradient = make_state(torch.bfloat16, 2048, kept=kept), make_gradient(torch.bfloat16, 2048)
    cut = clone(whole)
    scalars = adamw_scalars(step=2, **OPTIONS)
    step_reference(whole, gradient, [Segment(0, 2001, scalars, 99)], 0.5)
    monkeypatch.setattr(reference, "SLICE", 256)
    parts = [Segment(0, 512, scalars, 99), Segment(512, 256, scalars, 99, 512), Segment(768, 1233, scalars, 99, 768)]
    step_reference(cut, gradient, parts, 0.5)
    assert_same_bits(cut, whole)


@pytest.mark.parametrize(
    ("kept", "segment", "words"),
    [
        (
            "tiny",
            (100, 50, 0, 0),
            "starts at 100, 0 elements into its parameter: moments in 'tiny' are cut",
        ),
        ("tiny", (256, 50, 0, 7), "7 elements into its parameter"),
        ("compact", (256, 50, 0, 255), "255 elements into its parameter"),
        ("compact", (3, 50, 2**64, 0), "a key has 64 bits"),
        ("compact", (3, 50, -1, 0), "a key has 64 bits"),
    ],
)
def test_a_segment_that_cuts_a_block_is_refused(
    kept: Precision, segment: tuple[int, int, int, int], words: str
) -> None:
    state = make_state(torch.float32, 512, kept=kept)
    start, length, key, offset = segment
    with pytest.raises(ValueError, match=words):
        step_reference(
            state,
            torch.zeros(512),
            [Segment(start, length, adamw_scalars(step=1, **OPTIONS), key, offset)],
            1.0,
        )


def test_8_bit_moments_without_fitting_scales_are_refused() -> None:
    state, segments = make_state(torch.float32, 512, kept="tiny"), [Segment(0, 512, adamw_scalars(step=1, **OPTIONS))]
    state.arrays["exp_avg_sq_scale"] = torch.zeros(3)
    with pytest.raises(ValueError, match="exp_avg_sq_scale has 3 elements"):
        step_reference(state, torch.zeros(512), segments, 1.0)
    del state.arrays["exp_avg_sq_scale"]
    with pytest.raises(TypeError, match=r"exp_avg_sq_scale is None: adamw keeps it in torch\.float32 .* 'tiny'"):
        step_reference(state, torch.zeros(512), segments, 1.0)
    with pytest.raises(ValueError, match="500 elements: 8-bit moments need a multiple of 256"):
        step_reference(zero_state("tiny", 500), torch.zeros(500), [], 1.0)
    mixed = make_state(torch.float32, 512)
    mixed.arrays["exp_avg"] = mixed["exp_avg"].bfloat16()
    with pytest.raises(TypeError, match=r"exp_avg is torch\.bfloat16: adamw keeps it in torch\.float32"):
        step_reference(mixed, torch.zeros(512), segments, 1.0)
