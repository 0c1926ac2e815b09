"""The benchmark of Python's time, and the pictures of result files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import launches
from offloadkit import hardware
from tests.plan_machines import H200

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def test_each_placement_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "NUM_STEPS", 4)
    monkeypatch.setattr(hardware, "measure", lambda device: H200)
    command = ["--blocks", "2", "--eager", "--out", str(tmp_path / "out.json"), "--commit", "abc"]
    rows = launches.main(command)
    assert [(row["model"], row["where"]) for row in rows] == [
        (model, where) for model in ("t5", "llama") for where in launches.WHERE
    ]
    for row in rows:
        assert 0 < row["forward_seconds"] <= row["median_forward_seconds"]
        bare = row["num_operations"]["backward"] * H200.launch_seconds
        assert row["backward_launches"] == pytest.approx(row["backward_seconds"] / bare)
    kept, _, recomputed, _ = rows[:4]
    assert recomputed["backward_seconds"] > kept["backward_seconds"]
    assert json.loads((tmp_path / "out.json").read_text())["commit"] == "abc"
    assert "llama, streamed and recomputed" in capsys.readouterr().out


def test_a_picture_has_a_bar_for_each_engine(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import chart

    result = json.loads((RESULTS / "t5-3b-8x640-24gib-h200.json").read_text())
    drawn_as = [chart.label_of(row) for row in result["rows"]]
    assert drawn_as[2:4] == ["offloadkit 24 GiB", "offloadkit 24 GiB compiled"]
    assert len(set(drawn_as)) == len(result["rows"]) == 6
    chart.draw(result, tmp_path / "chart.svg")
    drawn = (tmp_path / "chart.svg").read_text()
    assert all(f"<!-- {seconds} -->" in drawn for seconds in ("0.34", "0.38", "1.72"))
