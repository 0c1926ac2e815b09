"""How a step grows (benchmarks/growth.py): measured with a tiny model, gone on with, put in a table, drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import growth

TINY = ["--models", "t5-tiny", "--steps", "2", "--commit", "abc"]


def row(engine: str, batch_size: int = 2, accumulation: int = 1, **values: Any) -> dict[str, Any]:
    work = {"model": "t5-3b", "batch_size": batch_size, "accumulation": accumulation, "tokens": 512}
    work |= {"target_tokens": 128, **values.pop("work", {})}
    return {"engine": engine, "gpu": "a GPU", "work": work, "step_seconds": 1.0, **values}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of 2 and one of 64 samples (two micro-batches), measured in three goes; that of the first is made up."""
    out = tmp_path_factory.mktemp("growth") / "growth.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growth, "run_aloud", lambda name, task, options: task | {"step_seconds": 99.0})
        growth.main([*TINY, "--samples", "2", "64", "--engine", "gpu-ours", "--out", str(out)])
    growth.main([*TINY, "--samples", "2", "--engine", "gpu-ours", "--out", str(out)])
    growth.main([*TINY, "--samples", "64", "--engine", "planned", "--out", str(out)])
    return out


def test_rows_of_a_second_go_replace_those_of_the_first(result: Path) -> None:
    rows = json.loads(result.read_text())["rows"]
    assert [growth.key_of(row) for row in rows] == [
        ("gpu-ours", "t5-tiny", 1536),
        ("gpu-ours", "t5-tiny", 48),
        ("planned", "t5-tiny", 1536),
    ]
    assert [row["step_seconds"] == 99 for row in rows] == [True, False, False]
    assert [(row["work"]["batch_size"], row["work"]["accumulation"]) for row in rows[1:]] == [(2, 1), (32, 2)]
    assert {row["commit"] for row in rows} == {"abc"}


def test_a_planned_row_says_what_bounds_it(result: Path) -> None:
    for row in json.loads(result.read_text())["rows"]:
        assert "failed" not in row
        assert ("bound_seconds" in row) is (row["engine"] == "planned")
        if row["engine"] == "planned":
            first, warm_up, fills_the_pipeline, timed = 1, 2, 1, 2  # none of them traced
            assert len(row["losses"]) == first + warm_up + fills_the_pipeline + timed
            assert 0 < row["bound_seconds"] == sum(share["seconds"] for share in row["bound_by"].values())
            assert set(row["bound_by"]) == {"update and forward", "backward"}
            assert row["traced_step_seconds"] > 0


def test_the_chart_of_a_result_file(result: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "growth.png"
    growth.main(["--chart", str(result), str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "x our compute" in capsys.readouterr().out


def test_the_chart_has_a_panel_a_model_and_the_slowdown_beside_its_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offloadkit.comparing.figures import Chart

    drawn: list[Any] = []
    monkeypatch.setattr(Chart, "savefig", lambda figure, *_, **__: drawn.append(figure))
    alone = row("gpu-ours", 32, work={"checkpointing": True})
    compiled = row("planned", 32, step_seconds=1.25, work={"compile_blocks": True})
    growth.draw([alone, compiled, row("planned", 32, step_seconds=1.5), row("gpu", failed="full")], tmp_path / "x.png")
    growth.draw([row("gpu"), row("gpu", work={"model": "t5-large"})], tmp_path / "x.png")
    first, second = drawn
    assert [text.get_text() for text in first.axes[0].texts] == ["*", "1.50×", "1.25×"]
    assert [line.get_linestyle() for line in first.axes[0].get_lines()] == ["--", "-", "-"]
    assert "recomputed" in first.get_supxlabel()
    assert [axes.get_title(loc="left") for axes in second.axes] == ["t5-3b", "t5-large"]


def test_the_table_sets_slowdown_and_bound_beside_the_seconds() -> None:
    alone = {"checkpointing": True}
    compiled = row(
        "planned", 32, 4, step_seconds=3.0, bound_seconds=2.4, traced_step_seconds=3.0, work={"compile_blocks": True}
    )
    rows = [row("gpu", 32, 4, step_seconds=4.0, work=alone), row("gpu-ours", 32, 4, step_seconds=2.5, work=alone)]
    rows += [
        row("planned", 32, 4, step_seconds=5.0, bound_seconds=2.5, traced_step_seconds=5.0),
        compiled,
        row("gpu-ours", 2),
    ]
    rows += [row("planned", 8, failed="OutOfVramError: full")]
    found = [line.split() for line in growth.table(rows)]
    assert found[2] == ["t5-3b", "1,280", "-", "1.000", "-", "-", "-", "-", "-", "-"]
    assert found[3] == ["t5-3b", "81,920", "*4.000", "*2.500", "5.000", "eager", "1.25", "2.00", "2.500", "50%"]
    assert found[4] == ["t5-3b", "81,920", "*4.000", "*2.500", "3.000", "compiled", "0.75", "1.20", "2.400", "80%"]
    assert found[-1] == ["planned", "t5-3b", "5120:", "OutOfVramError:", "full"]


def test_where_the_baselines_recompute_and_what_is_compiled() -> None:
    tasks = growth.tasks(growth.parse(["--compile"]))
    assert len(tasks) == 2 * 4 * 3
    works = {growth.key_of(task): task["work"] for task in tasks}
    recomputed = {key for key, work in works.items() if work.get("checkpointing")}
    assert recomputed == {("gpu", "t5-3b", tokens) for tokens in (20480, 81920)}
    budgets = {key[:2]: work["vram_budget_gib"] for key, work in works.items() if "vram_budget_gib" in work}
    assert budgets == {("planned compiled", "t5-large"): 8.0, ("planned compiled", "t5-3b"): 24.0}


@pytest.mark.parametrize("samples", ["0", "33"])
def test_steps_that_no_micro_batches_make_up_are_refused(samples: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        growth.parse(["--samples", samples])
    assert f"1 to 32 or a multiple of 32, got {samples}" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "no JSON", "[]", '{"mode": "plans", "rows": []}'])
def test_another_file_is_refused_and_left_alone(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
        with pytest.raises(SystemExit, match="is no result file"):
            growth.main([*TINY, "--out", str(path)])
        assert path.read_text() == text
    with pytest.raises(SystemExit, match="there is no file" if text is None else "is no result file"):
        growth.main(["--chart", str(path), str(tmp_path / "x.png")])


@pytest.mark.parametrize("picture", ["none/x.png", "x.unknown"])
def test_a_chart_that_cannot_be_written_says_so(picture: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=rf"the chart cannot be written to .*{picture}: "):
        growth.draw([row("gpu")], tmp_path / picture)


def test_nothing_measured_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no row of the file was measured"):
        growth.draw([row("gpu", failed="full")], tmp_path / "x.png")
