"""Two GPUs train as one, bit for bit, over NCCL and through RAM that they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.doors import finetuned, pairs
from tests.distributed.pool import RankPool
from tests.distributed.runs import CPU_STEP, GPU_STEP, RESIDENT, STREAMED, STREAMED_TO_GPU, train
from tests.distributed.test_doors import assert_same
from tests.distributed.test_equal import assert_equal


def two_equal_one(micro_batches: int, runs: list[dict[str, Any]], **of_one: Any) -> None:
    """Each of `runs` is the same on two GPUs, and on one with twice the micro-batches, in VRAM."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pool = RankPool("nccl")
    try:
        for run in runs:
            options: dict[str, Any] = {"working_dtype": "bf16", "steps": 5, "device": "cuda", **run}
            found = pool.run(2, train, micro_batches=micro_batches, **options)
            alone = {**options, "placement": RESIDENT, "move_to": None, **of_one}
            assert_equal(found, train(2 * micro_batches, **alone))
    finally:
        pool.close()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_two_gpus_equal_one(micro_batches: int) -> None:
    places = (RESIDENT, CPU_STEP, GPU_STEP, STREAMED, STREAMED_TO_GPU)
    two_equal_one(micro_batches, [{"placement": place, "exchange": "micro_batch"} for place in places])


def test_sums_that_are_exchanged_once_a_step_are_added_rank_by_rank() -> None:
    places = (RESIDENT, CPU_STEP, STREAMED, STREAMED_TO_GPU)
    two_equal_one(2, [{"placement": place} for place in places], simulate_ranks=2)


def test_shared_weights_are_written_between_steps_and_move() -> None:
    """A layer that was written is unpinned until the next step, and pinned again then."""
    runs: list[dict[str, Any]] = [{"placement": STREAMED, "halves": True}]
    runs.append({"placement": STREAMED_TO_GPU, "halves": True, "move_to": RESIDENT})
    runs.append({"placement": RESIDENT, "halves": True, "move_to": STREAMED})
    two_equal_one(1, runs)


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_finetune_on_two_gpus_is_that_on_one(tmp_path: Path, name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pool = RankPool("nccl")
    options: dict[str, Any] = {"accumulation": 4, "eval_dataset": pairs(16, 11), "on_gpu": True, "monitor": False}
    try:
        found = pool.run(2, finetuned, name=name, folder=tmp_path / "two", **options)
    finally:
        pool.close()
    assert_same(found, finetuned(name, tmp_path / "one", **options))
