"""The benchmark of Python's time, and the pictures of result files."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks import launches
from offloadkit import hardware
from offloadkit.planner import seconds
from tests.plan_machines import H200

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def test_each_placement_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "NUM_STEPS", 2)
    monkeypatch.setattr(launches, "NUM_WARM", 1)
    monkeypatch.setattr(hardware, "measure", lambda device: H200)
    placed, measure = [], launches.measure

    def spied(model: str, num_blocks: int, placement: dict[str, Any], *args: Any, **options: Any) -> Any:
        placed.append(placement)
        return measure(model, num_blocks, placement, *args, **options)

    monkeypatch.setattr(launches, "measure", spied)
    command = ["--blocks", "2", "--eager", "--out", str(tmp_path / "out.json"), "--commit", "abc"]
    rows = launches.main(command)
    assert [(row["model"], row["where"]) for row in rows] == [
        (model, where) for model in ("t5", "llama") for where in launches.WHERE
    ]
    for row in rows:
        assert 0 < row["forward_seconds"] <= row["median_forward_seconds"]
        bare = row["num_operations"]["backward"] * H200.launch_seconds
        assert row["backward_launches"] == pytest.approx(row["backward_seconds"] / bare)
    assert placed == 2 * list(launches.WHERE.values())
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


def test_the_plans_constants_are_those_of_the_result_file() -> None:
    """Means of T5 and Llama; of recomputation and of streaming, each also beside the other, eager and compiled too."""
    rows = json.loads((RESULTS / "launches-h200.json").read_text())["rows"]
    timed = {(row["model"], row["compiled"], row["where"]): row for row in rows}
    num_blocks = {"t5": 32, "llama": 16}

    def more(model: str, compiled: bool, part: str, where: str, than: str) -> Any:
        """Bare launches that `where` takes beyond `than`."""
        one, other = timed[model, compiled, where], timed[model, compiled, than]
        return (one[f"{part}_seconds"] - other[f"{part}_seconds"]) / one["launch_seconds"]

    kept = {compiled: [timed[model, compiled, "kept"] for model in num_blocks] for compiled in (False, True)}
    for part, constant in (("forward", seconds.FORWARD_LAUNCHES), ("backward", seconds.BACKWARD_LAUNCHES)):
        assert mean(row[f"{part}_launches"] for row in kept[False]) == pytest.approx(constant, rel=0.02)
        of_compiled = constant * seconds.COMPILED_LAUNCHES
        assert mean(row[f"{part}_launches"] for row in kept[True]) == pytest.approx(of_compiled, rel=0.1)
    recomputed: list[tuple[float, float]] = []
    streamed: list[tuple[float, float]] = []
    both = "streamed and recomputed"
    for model, compiled in product(num_blocks, (False, True)):
        row = timed[model, compiled, "kept"]
        num = row["num_operations"]["forward"]
        unit, again = num * (seconds.COMPILED_LAUNCHES if compiled else 1.0), num * row["forward_launches"]
        for one, other in (("recomputed", "kept"), (both, "streamed")):
            forward, backward = (more(model, compiled, part, one, other) for part in ("forward", "backward"))
            recomputed.append((forward / unit, (backward - again) / unit))
        for one, other in (("streamed", "kept"), (both, "recomputed")):
            forward, backward = (more(model, compiled, part, one, other) for part in ("forward", "backward"))
            streamed.append((forward / num_blocks[model], backward / num_blocks[model]))
    found = [mean(column) for column in zip(*recomputed, strict=True)]
    assert found == pytest.approx(list(seconds.RECOMPUTED_LAUNCHES), rel=0.04)
    assert [mean(column) for column in zip(*streamed, strict=True)] == pytest.approx(
        list(seconds.STREAMED_LAUNCHES), rel=0.04
    )


def test_what_our_attention_takes_is_that_of_its_result_file() -> None:
    """T5's operations beyond its attention take Python as long as Llama's. Recomputation adds no more to an attention
    than to an operation."""
    rows = json.loads((RESULTS / "launches-attention-h200.json").read_text())["rows"]
    timed = {(row["model"], row["where"]): row for row in rows if not row["compiled"]}
    t5, llama = timed["t5", "kept"], timed["llama", "kept"]
    num_attentions = 16 + 2 * 16
    beyond = []
    for part in ("forward", "backward"):
        operations = t5[f"{part}_launches"] / llama[f"{part}_launches"] * t5["num_operations"][part]
        beyond.append((operations - t5["num_operations"][part]) / num_attentions)
    assert mean(beyond) == pytest.approx(seconds.ATTENTION_LAUNCHES, rel=0.1)
    assert beyond == pytest.approx([seconds.ATTENTION_LAUNCHES] * 2, rel=0.2)
    planned = sum(seconds.RECOMPUTED_LAUNCHES) * t5["num_operations"]["forward"]
    for one, other in (("recomputed", "kept"), ("streamed and recomputed", "streamed")):
        took, kept = (
            row["forward_seconds"] + row["backward_seconds"] for row in (timed["t5", one], timed["t5", other])
        )
        more = (took - kept - t5["forward_seconds"]) / t5["launch_seconds"]
        assert 0.6 * planned < more < planned
