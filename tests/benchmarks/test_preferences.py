"""The benchmark of TRL's Trainers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("trl")

from benchmarks import preferences


@pytest.mark.slow(60)
def test_a_part_prints_its_row_and_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    [row] = preferences.main(["--tiny", "--parts", "grpo-12", "--steps", "3", f"--out={out}"])
    assert "failed" not in row, row
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text()) == row
    assert row["updates"] == 3
    assert row["plain_tokens_per_second"] > 0 < row["generation_tokens_per_second"]


@pytest.mark.slow(60)
def test_no_update_begins_after_the_time_is_over() -> None:
    row = preferences.measure("dpo-24", 3, 0.0, tiny=True)
    assert row["updates"] == 1
    assert row["step_seconds"] > 0
