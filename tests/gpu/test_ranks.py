"""Two GPUs train as one, bit for bit, over NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.doors import finetuned, pairs
from tests.distributed.pool import RankPool
from tests.distributed.runs import CPU_STEP, GPU_STEP, RESIDENT, train
from tests.distributed.test_doors import assert_same
from tests.distributed.test_equal import assert_equal


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_two_gpus_equal_one(micro_batches: int) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pool = RankPool("nccl")
    try:
        for placement in (RESIDENT, CPU_STEP, GPU_STEP):
            options: dict[str, Any] = {"working_dtype": "bf16", "steps": 5, "device": "cuda"}
            found = pool.run(2, train, micro_batches=micro_batches, placement=placement, **options)
            assert_equal(found, train(2 * micro_batches, placement=placement, **options))
    finally:
        pool.close()


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
