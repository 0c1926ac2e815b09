"""N ranks with K micro-batches equal one rank with N * K, bit for bit, wherever states and gradients live."""

from __future__ import annotations

from math import isfinite
from typing import Any

import pytest
import torch

from offloadkit.facts.config import Placement
from tests.distributed.pool import RankPool
from tests.distributed.runs import (
    CPU_STEP,
    GPU_ALONE,
    GPU_STEP,
    LATE_GRADIENTS,
    LEAST,
    ON_DISK,
    RESIDENT,
    STREAMED,
    STREAMED_TO_GPU,
    joined,
    train,
    train_by_graphs,
)


def assert_equal(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """All ranks have the weights of `expected`, their joined states are its states, and their operations are the
    same."""
    for each in found:
        for name, weights in expected["weights"].items():
            assert torch.equal(each["weights"][name], weights), name
        for name, buffer in expected["buffers"].items():
            assert torch.equal(each["buffers"][name], buffer), name
        assert each["norms"] == pytest.approx(expected["norms"], rel=0, abs=0, nan_ok=True)
        assert each["log"] == found[0]["log"] != []
    states = joined([expected])
    assert states.keys() == joined(found).keys()
    for name, values in joined(found).items():
        assert torch.equal(values, states[name]), name


EACH = {"exchange": "micro_batch"}
RANK_1_OWNS_NOTHING = {"hidden": 65, "spare": True}
"""Options of a model in which the second of four ranks owns no part of any layer."""
QUICK: list[tuple[int, int, dict[str, Any]]] = [
    (2, 1, {"placement": RESIDENT, "working_dtype": "bf16", "groups": True}),
    (3, 1, {"placement": CPU_STEP}),
    (3, 2, {**EACH, "placement": GPU_STEP, "working_dtype": "bf16", "precision": "tiny"}),
    (2, 2, {**EACH, "placement": LATE_GRADIENTS, "working_dtype": "fp16", "loss_scale": 2.0**10}),
    (2, 1, {"placement": RESIDENT, "working_dtype": "bf16", "hosts": True, "steps": 2}),
    (2, 2, {**EACH, "placement": LEAST, "seeds": True, "model_options": {"dropout": 0.3}, "steps": 2}),
]
SLOW: list[tuple[int, int, dict[str, Any]]] = [
    (2, 1, {"placement": STREAMED_TO_GPU, "working_dtype": "bf16", "move_to": ON_DISK, "steps": 2}),
    (2, 2, {**EACH, "placement": CPU_STEP, "hosts": True, "steps": 2}),
    (2, 2, {**EACH, "placement": RESIDENT, "seeds": True, "model_options": {"dropout": 0.3}, "steps": 2}),
    (2, 1, {"placement": GPU_ALONE, "precision": "compact", "max_grad_norm": None}),
    (3, 2, {**EACH, "placement": RESIDENT, "model_options": {"frozen": True, "tied": False}}),
    (4, 1, {"placement": CPU_STEP, "working_dtype": "bf16", "precision": "compact", "groups": True}),
    (3, 3, {**EACH, "placement": CPU_STEP, "working_dtype": "bf16"}),
    (2, 1, {"placement": CPU_STEP, "working_dtype": "fp16", "loss_factor": 1e4, "steps": 6}),
    (3, 1, {"placements": [CPU_STEP, RESIDENT, GPU_STEP], "working_dtype": "bf16", "activation_checkpointing": True}),
    (4, 2, {**EACH, "placement": RESIDENT, "optimizer": "lion"}),
    (3, 1, {"placement": RESIDENT, "late": 1, "working_dtype": "bf16", "steps": 4}),
    (2, 2, {**EACH, "placement": GPU_STEP, "late": 2, "working_dtype": "bf16", "steps": 4}),
    (3, 1, {"placement": CPU_STEP, "late": 3, "working_dtype": "bf16", "steps": 4}),
    (2, 1, {"placement": GPU_STEP, "move_to": RESIDENT, "working_dtype": "bf16", "halves": True}),
    (
        3,
        2,
        {
            **EACH,
            "placement": RESIDENT,
            "move_to": CPU_STEP,
            "working_dtype": "fp16",
            "halves": True,
        },
    ),
    (3, 1, {"placement": RESIDENT, "working_dtype": "bf16", "move_to": STREAMED_TO_GPU, "halves": True}),
    (2, 1, {"placement": STREAMED, "clamps": True, "steps": 2}),
    (4, 1, {"placement": STREAMED, "late": 4, "working_dtype": "bf16", "precision": "tiny"}),
    (3, 1, {"placements": [STREAMED, LEAST, STREAMED_TO_GPU], "groups": True, "activation_checkpointing": True}),
    (4, 1, {"placement": GPU_STEP, "move_to": ON_DISK, "model_options": RANK_1_OWNS_NOTHING}),
]


@pytest.mark.parametrize(
    ("size", "micro_batches", "options"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_ranks_equal_one_rank_with_all_their_micro_batches(
    ranks: RankPool, one_thread: None, size: int, micro_batches: int, options: dict[str, Any]
) -> None:
    found = ranks.run(size, train, micro_batches=micro_batches, **options)
    placed: dict[str, Any] = {"placement": Placement(), "placements": None, "late": None, "move_to": None}
    if "loss_factor" in options:  # this factor overflows fp16
        assert not all(map(isfinite, found[0]["norms"]))
    assert_equal(found, train(micro_batches=size * micro_batches, **{**options, **placed}))


@pytest.mark.slow
@pytest.mark.parametrize("placement", [RESIDENT, STREAMED, LEAST])
def test_ranks_whose_blocks_run_as_graphs_equal_one_rank(
    ranks: RankPool, one_thread: None, placement: Placement
) -> None:
    options: dict[str, Any] = {"working_dtype": "bf16", "steps": 5}
    found = ranks.run(2, train_by_graphs, placement=placement, **options)
    assert all(num > 0 for _, num in found)
    assert_equal([each for each, _ in found], train(2, placement=Placement(), **options))


STEP_QUICK: list[tuple[int, int, dict[str, Any]]] = [
    (3, 2, {"placement": STREAMED, "working_dtype": "bf16", "halves": True, "steps": 2}),
    (3, 2, {"placement": RESIDENT, "working_dtype": "bf16", "steps": 2}),
]
STEP_SLOW: list[tuple[int, int, dict[str, Any]]] = [
    (3, 3, {"placement": STREAMED, "working_dtype": "bf16", "precision": "tiny", "groups": True, "late": 6}),
    (2, 2, {"placement": LATE_GRADIENTS, "working_dtype": "fp16", "loss_factor": 1e4, "late": 7, "steps": 4}),
    (2, 2, {"placement": GPU_STEP, "model_options": {"frozen": True, "tied": False}, "halves": True, "steps": 2}),
    (3, 2, {"placement": STREAMED_TO_GPU, "move_to": LEAST, "working_dtype": "bf16", "steps": 2}),
]


@pytest.mark.parametrize(
    ("size", "micro_batches", "options"),
    [*STEP_QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in STEP_SLOW)],
)
def test_sums_that_are_exchanged_once_a_step_are_added_rank_by_rank(
    ranks: RankPool, one_thread: None, size: int, micro_batches: int, options: dict[str, Any]
) -> None:
    found = ranks.run(size, train, micro_batches=micro_batches, **options)
    placed: dict[str, Any] = {"placement": RESIDENT, "late": None, "move_to": None, "simulate_ranks": size}
    expected = train(micro_batches=size * micro_batches, **{**options, **placed})
    assert_equal(found, expected)
