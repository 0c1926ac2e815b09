"""The benchmark of TRL's Trainers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl")

from benchmarks import preferences
from offloadkit.facts.telemetry import Telemetry
from offloadkit.planner.phases import Phase


@pytest.mark.slow(60)
def test_a_part_prints_its_row_and_writes_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    [row] = preferences.main(["--tiny", "--parts", "grpo-12", "--steps", "3", f"--out={out}"])
    assert "failed" not in row, row
    printed = capfd.readouterr()
    assert json.loads(printed.out) == json.loads(out.read_text()) == row
    assert printed.err.index("plain generate ran at") < printed.err.index("update 3 was started")
    assert row["updates"] == 3
    assert row["plain_tokens_per_second"] > 0 < row["generation_tokens_per_second"]


@pytest.mark.slow(60)
def test_after_its_time_a_part_does_two_updates() -> None:
    reported: list[preferences.Row] = []
    row = preferences.measure("grpo-24", 4, 0.0, reported.append, tiny=True)
    assert reported == [row]
    assert row["updates"] == 2
    assert row["step_seconds"] > 0 < row["share_of_plain"]


@pytest.mark.slow(60)
def test_a_part_of_one_update_says_that_nothing_is_left_to_compare() -> None:
    row = preferences.measure("grpo-24", 1, 0.0, tiny=True)
    assert row["first_generation_tokens_per_second"] > 0
    assert row["generation_tokens_per_second"] is None
    assert "after the first generation" in row["share_of_plain"]


def test_the_planned_bytes_of_a_phase_are_those_of_the_plan_in_force() -> None:
    def plan(vram: int, ram: int) -> Any:
        names = ("reading", "first step", "training", "generation")
        return SimpleNamespace(phases=[Phase(name, vram, ram) for name in names])

    telemetry = Telemetry()
    watch = preferences.Watch(0.0, telemetry)
    for num_updates, telemetry.plan in ((0, plan(4, 50)), (1, plan(24, 35)), (2, plan(23, 36))):
        watch.note_plan(num_updates)
    assert watch.planned("reading") == {"vram": 4, "ram": 50}
    assert watch.planned("first step") == watch.planned("generation") == {"vram": 24, "ram": 50}
    assert watch.planned("training") == {"vram": 24, "ram": 36}
    assert watch.planned("no phase") is None
