"""Run with TRITON_INTERPRET=1 by test_gpu.py: the AdamW kernel against the reference, on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

from offloadkit.kernels import gpu
from offloadkit.optim.adamw import adamw_scalars
from offloadkit.optim.lion import lion_scalars
from offloadkit.optim.moments import random_key
from offloadkit.optim.reference import step_reference
from offloadkit.optim.table import Segment, state_table
from tests.optim.states import (
    DTYPES,
    PRECISIONS,
    assert_same_bits,
    clone,
    make_gradient,
    make_state,
    special_state,
)

OPTIONS = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01}


def ragged_segments(number: int) -> list[Segment]:
    """Segments of 3000, 1 and 2000 elements, with two sets of scalars, for step `number`."""
    scalars = adamw_scalars(betas=(0.9, 0.999), step=number, **OPTIONS)
    other = adamw_scalars(betas=(0.8, 0.99), step=number, **OPTIONS)
    keys = [random_key(0, name, number) for name in "abc"]
    return [
        Segment(0, 3000, scalars, keys[0]),
        Segment(3072, 1, other, keys[1]),
        Segment(3328, 2000, scalars, keys[2], 2**32 - 512),
    ]


def in_pairs(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Combinations in which each two values occur together; tests/gpu has all of the combinations."""
    for (row, one), (column, other) in product(enumerate(first), enumerate(second)):
        yield one, other, third[(row + column) % len(third)]


def main() -> None:
    for weights, gradients, kept in in_pairs(DTYPES, DTYPES, PRECISIONS):
        state = make_state(weights, 5632, kept=kept)
        expected = clone(state)
        for number in (1, 2):
            gradient, segments = make_gradient(gradients, 5632, seed=number), ragged_segments(number)
            gpu.optimizer_step(state, gradient, segments, 0.7312345)
            step_reference(expected, gradient, segments, 0.7312345)
        assert_same_bits(state, expected)
    for weights, place, kept in in_pairs(DTYPES, ("master", "exp_avg", "exp_avg_sq"), PRECISIONS):
        state, gradient = special_state(weights, torch.float32, place, kept)
        segments = [ragged_segments(3)[0]._replace(length=gradient.numel())]
        expected = clone(state)
        gpu.optimizer_step(state, gradient, segments, 0.9)
        step_reference(expected, gradient, segments, 0.9)
        assert_same_bits(state, expected)
    scalars = lion_scalars(betas=(0.9, 0.99), step=1, **OPTIONS)
    for weights, gradients, place in in_pairs(DTYPES, DTYPES, ("master", "exp_avg")):
        state, gradient = special_state(weights, gradients, place, optimizer="lion")
        expected, segments = clone(state), [Segment(256, 700, scalars)]
        for _ in range(2):
            gpu.optimizer_step(state, gradient, segments, 0.9)
            step_reference(expected, gradient, segments, 0.9)
        assert_same_bits(state, expected)
    for optimizer in ("adamw", "lion"):
        assert gpu.step_compiles(state_table(optimizer, "exact", torch.bfloat16), torch.bfloat16)
