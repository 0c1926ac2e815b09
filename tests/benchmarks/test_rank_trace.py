"""The summary of a profiler's trace, and ranks that are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import killed_ranks, table
from benchmarks.rank_trace import by_kind


def event(category: str, name: str, began: float, seconds: float, **args: Any) -> dict[str, Any]:
    """An event of a Chrome trace, whose times are microseconds."""
    return {"ph": "X", "cat": category, "name": name, "ts": began * 1e6, "dur": seconds * 1e6, "args": args}


def test_each_moment_of_the_gpu_counts_once() -> None:
    found = by_kind(
        [
            event("kernel", "gemm", 10, 4),
            event("kernel", "add", 12, 3),
            event("kernel", "ncclDevKernel_AllGather", 14, 4),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 17, 3, bytes=100),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 11, 1, bytes=7),
            event("cuda_runtime", "cudaLaunchKernel", 0, 50),
            event("kernel", "gemm", 23, 1),
            {"ph": "M", "name": "process_name"},
        ]
    )
    assert found == pytest.approx(
        {
            "traced step": 14,
            "computing": 6,
            "only NCCL": 3,
            "only copies": 2,
            "idle": 3,
            "NCCL": 4,
            "H2D": 3,
            "D2H": 1,
            "H2D bytes": 100,
            "D2H bytes": 7,
        }
    )


def test_a_trace_without_kernels_says_nothing() -> None:
    assert by_kind([event("cuda_runtime", "cudaLaunchKernel", 0, 1)]) == {}


def test_ranks_that_cannot_share_the_micro_batches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="5 ranks cannot share 24 micro-batches a step"):
        killed_ranks.run(ranks=5, out=tmp_path / "a.csv")


@pytest.mark.slow(20)
def test_killed_ranks_resume_to_the_same_weights(tmp_path: Path) -> None:
    row = killed_ranks.run(kills=1, ranks=2, device="cpu", out=tmp_path / "a.csv", say=lambda text: None)
    assert row["figures"]["resumed on ranks"] == [1, 2]
    assert row["figures"]["longest seconds"] < 60
    assert [each["case"] for each in table.read(tmp_path / "a.csv")] == ["killed ranks"]
