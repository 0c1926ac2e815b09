"""The benchmarks run on a CPU with tiny shapes: every mode, every column, and a run that fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import engines, measure, run, table, workloads

# The GPU baseline and offloadkit are in the package's own reach; peers are optional.
OURS = ("gpu", "gpu-ours", "offloadkit")
TINY = {
    "model": "t5-tiny",
    "batch_size": 2,
    "tokens": 12,
    "target_tokens": 6,
    "accumulation": 1,
    "checkpointing": False,
    "attention": "default",
    "vram_cap_gib": 0.0,
    "cores": 0,
    "steps": 2,
    "warmup": 1,
}


def measured(engine: str, mode: str = "steps", **task: Any) -> dict[str, Any]:
    work = {**TINY, **task.pop("work", {})}
    return {
        "engine": engine,
        "work": work,
        **task,
        **measure.measure({"mode": mode, "engine": engine, "work": work, **task}),
    }


@pytest.fixture(autouse=True)
def nondeterminism_comes_back() -> Iterator[None]:
    """The loader mode asks torch for deterministic kernels, in what is a process of its own elsewhere."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("work", [{}, {"accumulation": 2, "checkpointing": True}])
@pytest.mark.parametrize("model", [{}, {"model": "llama-tiny", "target_tokens": 0}])
def test_engines_do_the_same_work(model: dict[str, Any], work: dict[str, Any]) -> None:
    rows = [measured(engine, work={**model, **work}) for engine in OURS]
    assert len({row["losses"][0] for row in rows}) == 1
    torch.testing.assert_close(rows[2]["losses"], rows[1]["losses"], rtol=2e-2, atol=0)
    assert all(len(row["losses"]) == 5 for row in rows)
    assert all(row["step_seconds"] > 0 for row in rows)


def test_startup_splits_disk_to_first_step(tmp_path: Path) -> None:
    measured("gpu", "save", folder=str(tmp_path))
    rows = [measured(engine, "startup", folder=str(tmp_path), cold=True) for engine in ("gpu", "offloadkit")]
    assert len({row["losses"][0] for row in rows}) == 1
    table.print_table("startup", rows)


def test_forked_loader_workers_change_no_loss() -> None:
    rows = [measured("offloadkit", "loader", num_workers=num_workers) for num_workers in (0, 2)]
    table.print_table("loader", rows)
    assert "the same losses, the same weights" in table.loader_verdict(rows)


def test_the_command_writes_rows_with_machine_versions_and_commit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    command = "steps --model t5-tiny --batch 2 --tokens 8+4 --steps 1 --warmup 0 --cpu --cores 1 --engine gpu"
    run.main([*command.split(), "--out", str(out)])
    result = json.loads(out.read_text())
    assert {"machine", "versions", "commit", "date", "rows"} <= set(result)
    (row,) = result["rows"]
    assert row["slowdown_gpu"] == 1.0
    assert result["machine"]["num_cores"] == 1
    assert "s/step" in capsys.readouterr().out


def test_a_run_that_fails_is_a_row_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    options = run.parse(["steps", "--timeout", "120"])
    row = run.run_task({"mode": "steps", "engine": "no-such-engine", "work": TINY}, options)
    assert row["failed"].startswith("KeyError")
    table.print_table("steps", [row])
    assert "KeyError" in capsys.readouterr().out


def test_the_command_knows_every_engine() -> None:
    assert set(run.ENGINE_NAMES) == set(engines.ENGINES)


@pytest.mark.parametrize("model", workloads.MODELS)
def test_every_shape_is_a_configuration(model: str) -> None:
    assert workloads.model_config(model).vocab_size >= 512


@pytest.mark.parametrize("arguments", ["--model t5-3b --tokens 512", "--model llama-3.2-3b --tokens 8+8", "--tokens x"])
def test_token_counts_that_do_not_fit_the_model_are_refused(arguments: str) -> None:
    with pytest.raises(SystemExit):
        run.parse(["steps", *arguments.split()])
