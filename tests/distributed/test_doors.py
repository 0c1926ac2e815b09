"""`finetune` and the Trainers under several ranks: the numbers, files and errors of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.doors import finetuned, pairs
from tests.distributed.pool import RankPool


def assert_same(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for each in found:
        for name, weights in expected["weights"].items():
            assert torch.equal(each["weights"][name], weights), name
        assert each["norms"] == expected["norms"]
        assert each["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert each["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
        assert each["samples"] == expected["samples"]


@pytest.mark.usefixtures("one_thread")
def test_finetune_on_two_ranks_is_that_on_one(ranks: RankPool, tmp_path: Path) -> None:
    """Eleven rows are six micro-batches, the last one short: the third update of an epoch has a filler."""
    options: dict[str, Any] = {"accumulation": 4, "eval_dataset": pairs(16, 11), "per_device_eval_batch_size": 2}
    found = ranks.run(2, finetuned, name="t5", folder=tmp_path / "two", **options)
    assert_same(found, finetuned("t5", tmp_path / "one", **options))
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == sorted(
        path.name for path in (tmp_path / "one").iterdir()
    )
