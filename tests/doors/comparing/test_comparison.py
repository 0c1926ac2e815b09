"""`compare`: bars, reasons for missing bars, cached rows, and the chart."""

from __future__ import annotations

import io
import json
import re
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from matplotlib.text import Text

from offloadkit.doors.comparing import comparison
from offloadkit.doors.comparing.comparison import Comparison, compare
from offloadkit.doors.comparing.figures import Chart
from offloadkit.doors.engines import forecast, runner
from offloadkit.errors import ConfigError, ModelNotFoundError, OutputError
from tests.doors.comparing import made_up
from tests.doors.comparing.made_up import GIB, T5_3B, bar, no_bar

TINY: dict[str, Any] = {
    "num_samples": 64,
    "batch_size": 2,
    "max_input_length": 12,
    "max_target_length": 6,
    "steps": 2,
}
Answers = Callable[[Callable[[dict[str, Any]], dict[str, Any]]], list[dict[str, Any]]]


def never(task: dict[str, Any]) -> dict[str, Any]:
    raise AssertionError(f"run again: {task}")


@pytest.mark.slow(15)
def test_each_engine_runs_in_a_process_of_its_own_and_its_row_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison.deepspeed_process, "is_installed", lambda: False)
    result = compare(("t5-tiny",), **TINY, vram="1GiB", output_dir=tmp_path)
    baseline, ours, deepspeed = result.rows
    for row in (baseline, ours):
        assert row["status"] == "measured"
        assert len(row["all_step_seconds"]) == 2
        assert row["seconds"] == pytest.approx(row["step_seconds"] * 32)
        assert row["peak_ram_bytes"] > 100 << 20
        assert row["num_parameters"] == 189_440
    assert baseline["last_loss"] == pytest.approx(ours["last_loss"], rel=0.01)  # weights from one distribution
    assert deepspeed["reason"] == "deepspeed is not installed: pip install 'offloadkit[deepspeed]'"
    assert {path.name for path in tmp_path.glob("comparison.*")} == {
        "comparison.json",
        "comparison.png",
        "comparison.svg",
    }
    saved = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["status"] for row in saved["rows"]] == ["measured", "measured", "failed"]
    assert "[3/3] t5-tiny, DeepSpeed ... deepspeed is not installed" in capsys.readouterr().out

    answers(never)
    assert "There is no GPU here, so the limit of 1 GiB of VRAM has no effect." in str(result)
    again = compare(("t5-tiny",), **TINY, vram="1GiB", output_dir=tmp_path)
    assert [row.get("step_seconds") for row in again.rows] == [row.get("step_seconds") for row in result.rows]
    with pytest.raises(AssertionError, match="run again"):
        compare(("t5-tiny",), **{**TINY, "batch_size": 3}, output_dir=tmp_path)


@pytest.mark.slow
def test_a_limit_of_ram_keeps_the_plan_out_and_kills_the_others(tmp_path: Path) -> None:
    result = compare(("t5-tiny",), ("baseline", "offloadkit"), **TINY, ram="90MiB", output_dir=tmp_path)
    baseline, ours = result.rows
    assert baseline["reason"] == "does not fit: needs more than 90 MiB of RAM"
    assert ours["reason"].startswith("does not fit: needs ")
    assert ours["reason"].endswith(" of RAM, has 90 MiB")
    assert "needs more than 90 MiB of RAM" in str(result)


def forecasts(task: dict[str, Any], made: forecast.Forecast = T5_3B) -> dict[str, Any]:
    return {"status": "measured", "forecasts": [forecast.as_row(made) for _ in task["works"]]}


FIGURES = {"status": "measured", "step_seconds": 0.5, "vram_bytes": GIB, "peak_ram_bytes": GIB}


def full(task: dict[str, Any]) -> dict[str, Any]:
    return {"status": "does not fit", "reason": f"does not fit: {task['engine']} is full"}


def test_deepspeed_goes_to_stage_3_where_stage_2_does_not_fit(
    tmp_path: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison.deepspeed_process, "is_installed", lambda: True)

    def answer(task: dict[str, Any]) -> dict[str, Any]:
        if task["mode"] == "plan":
            return forecasts(task)
        return FIGURES if task["engine"] == "zero3" else full(task)

    asked = answers(answer)
    (row,) = compare(("t5-3b",), ("deepspeed",), output_dir=tmp_path).rows
    assert row["variant"] == "ZeRO-3, activations recomputed"
    assert row["seconds"] == 0.5 * 1000 / 8
    assert [tried["variant"] for tried in row["tried"]] == ["ZeRO-2", "ZeRO-2, activations recomputed"]
    tried = [(task["engine"], task["work"]["recomputed"]) for task in asked[1:]]
    assert tried == [("zero2", False), ("zero2", True), ("zero3", True)]


def test_a_run_whose_plan_has_moved_says_so(tmp_path: Path, answers: Answers) -> None:
    moved = {**FIGURES, "moves": ["the GPU's memory was full"]}
    answers(lambda task: forecasts(task) if task["mode"] == "plan" else moved)
    result = compare(("t5-3b",), ("offloadkit",), output_dir=tmp_path)
    assert "memory ran out: by a leaner plan" in str(result)


def test_memory_past_the_limit_is_remarked_on(tmp_path: Path, answers: Answers) -> None:
    over = {**FIGURES, "vram_bytes": 11 * GIB + (100 << 20)}
    answers(lambda task: forecasts(task) if task["mode"] == "plan" else over)
    result = compare(("t5-3b",), ("offloadkit",), vram="11GiB", output_dir=tmp_path)
    assert "t5-3b, offloadkit: 100 MiB over the limit, used by CUDA's libraries outside torch." in str(result)


def test_what_arithmetic_shows_not_to_fit_is_not_run(tmp_path: Path, answers: Answers) -> None:
    asked = answers(lambda task: forecasts(task) if task["mode"] == "plan" else never(task))
    (row,) = compare(("t5-3b",), ("baseline",), output_dir=tmp_path).rows
    assert row["reason"] == "does not fit: needs at least 42.7 GiB of VRAM, has 11 GiB"
    assert len(asked) == 1


def test_the_least_that_each_engine_needs() -> None:
    assert forecast.why_cannot_fit("zero2", T5_3B, recomputed=False) is None
    small = forecast.replace(T5_3B, limits={"vram": 3 * GIB, "ram": 20 * GIB})
    assert forecast.why_cannot_fit("zero2", small, recomputed=False) == (
        "does not fit: needs at least 7.71 GiB of VRAM, has 3 GiB, and needs at least 31.9 GiB of RAM, has 20 GiB"
    )
    assert forecast.why_cannot_fit("zero3", small, recomputed=True) == (
        "does not fit: needs at least 37.2 GiB of RAM, has 20 GiB"
    )
    on_cpu = forecast.replace(small, on_cpu=True, dtype="fp32", limits={"ram": 20 * GIB})
    assert "42.7 GiB of RAM, has 20 GiB" in str(forecast.why_cannot_fit("baseline", on_cpu, recomputed=True))
    assert (
        forecast.why_cannot_fit("baseline", forecast.replace(T5_3B, limits={"vram": 60 * GIB}), recomputed=False)
        is None
    )


def test_a_run_that_fails_is_a_row_and_is_tried_again(tmp_path: Path, answers: Answers) -> None:
    def answer(task: dict[str, Any]) -> dict[str, Any]:
        if task["mode"] == "plan":
            return forecasts(task)
        return {"status": "failed", "reason": "took more than 1 s"} if task["work"]["model"] == "t5-base" else FIGURES

    asked = answers(answer)
    first = compare(("t5-base", "t5-3b"), ("offloadkit",), output_dir=tmp_path)
    assert [row["status"] for row in first.rows] == ["failed", "measured"]
    assert "took more than 1 s" in str(first)
    del asked[:]
    compare(("t5-base", "t5-3b"), ("offloadkit",), output_dir=tmp_path)
    assert [task["work"]["model"] for task in asked] == ["t5-base"]


def test_a_plan_that_fails_is_the_reason_of_its_model_alone(tmp_path: Path, answers: Answers) -> None:
    def answer(task: dict[str, Any]) -> dict[str, Any]:
        if task["mode"] == "plan":
            good, bad = forecasts(task)["forecasts"][0], {"failed": "no such head"}
            return {"status": "measured", "forecasts": [bad, good]}
        return FIGURES

    answers(answer)
    rows = compare(("t5-base", "t5-3b"), ("offloadkit",), output_dir=tmp_path).rows
    assert [row.get("reason") for row in rows] == ["no such head", None]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"models": "t5-base"}, "models must be one or more different names"),
        ({"models": ()}, "models must be one or more different names"),
        ({"engines": ("gpu",)}, "no engine 'gpu': choose one of 'baseline', 'offloadkit', 'deepspeed'"),
        ({"engines": ("baseline", "baseline")}, "engines must be one or more different names"),
        ({"num_samples": 0}, "num_samples must be a whole number >= 1, got 0"),
        ({"batch_size": 1.5}, "batch_size must be a whole number >= 1, got 1.5"),
        ({"vram": "much"}, "cannot read 'much' as a size"),
        ({"steps": 0}, "steps must be a whole number >= 1, got 0"),
    ],
)
def test_what_has_no_meaning_is_refused(wrong: dict[str, Any], message: str, tmp_path: Path, answers: Answers) -> None:
    answers(never)
    with pytest.raises(ConfigError, match=message):
        compare(**{"models": ("t5-tiny",), "output_dir": tmp_path / "new", **wrong})
    assert not (tmp_path / "new").exists()


def test_unknown_models_and_folders_that_cannot_be_written_are_refused(tmp_path: Path, answers: Answers) -> None:
    answers(never)
    with pytest.raises(ModelNotFoundError):
        compare((str(tmp_path / "no-model"),), output_dir=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="is a file"):
        compare(("t5-tiny",), output_dir=tmp_path / "file")
    with pytest.raises(ConfigError, match="timeout must be a positive number of seconds, or None; got 0"):
        compare(("t5-tiny",), timeout=0, output_dir=tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "rows").touch()
    with pytest.raises(OutputError, match="taken/rows is a file"):
        compare(("t5-tiny",), output_dir=tmp_path / "taken")


@pytest.mark.parametrize("name", ["comparison.json", "comparison.svg", "comparison.png"])
def test_what_cannot_be_saved_is_named_and_what_was_there_stays(name: str, tmp_path: Path, answers: Answers) -> None:
    answers(lambda task: forecasts(task) if task["mode"] == "plan" else FIGURES)
    (tmp_path / name).mkdir()
    with pytest.raises(OutputError, match=rf"{name} could not be written, .* are free there .*make room, or pass"):
        compare(("t5-3b",), ("offloadkit",), output_dir=tmp_path)
    assert (tmp_path / name).is_dir()
    assert not list(tmp_path.glob(".*"))


def test_a_full_disk_is_an_error_of_one_line(tmp_path: Path, drawn: Comparison) -> None:
    class Full:
        def savefig(self, path: Path, **_: Any) -> None:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

    (tmp_path / "comparison.svg").write_text("before")
    with pytest.raises(OutputError, match=r"comparison\.svg could not be written.*No space left on device") as caught:
        comparison.save(tmp_path / "comparison", drawn.to_dict(), Full)
    assert "\n" not in str(caught.value)
    assert {path.name: path.read_text()[:6] for path in tmp_path.iterdir()} == {
        "comparison.json": '{\n "ro',
        "comparison.svg": "before",
    }


def test_a_process_may_take_what_is_planned_or_what_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def run(task: dict[str, Any], *, timeout: float, **_: Any) -> dict[str, Any]:
        given.append(timeout)
        return forecasts(task) if task["mode"] == "plan" else FIGURES

    monkeypatch.setattr(runner, "in_fresh_process", run)
    compare(("t5-3b",), ("offloadkit",), output_dir=tmp_path / "planned")
    compare(("t5-3b",), ("offloadkit",), steps=100, output_dir=tmp_path / "more")
    compare(("t5-3b",), ("offloadkit",), steps=100, timeout=9, output_dir=tmp_path / "told")
    assert given == [600, 600 + 10 * 10 * 0.5, 600, 600 + 10 * 104 * 0.5, 9, 9]


@pytest.fixture
def drawn() -> Comparison:
    """Every kind of row."""
    return made_up.comparison(
        [
            bar("t5-base", "baseline", 0.05, 7.1, 1.9),
            bar("t5-base", "offloadkit", 0.07, 5.5, 5.2),
            bar("t5-base", "deepspeed", 0.16, 6.2, 9.1, "ZeRO-2"),
            no_bar(
                "t5-3b", "baseline", "does not fit: needs at least 44 GiB of VRAM, has 11 GiB", variant="lean <way>"
            ),
            bar("t5-3b", "offloadkit", 0.57, 10.8, 37.2),
            no_bar("t5-3b", "deepspeed", "deepspeed is not installed: pip install it", "failed"),
        ]
    )


def test_the_chart_shows_bars_and_reasons(drawn: Comparison, tmp_path: Path) -> None:
    chart = drawn.chart()
    texts = {text.get_text() for text in chart.findobj(Text) if isinstance(text, Text)}
    assert "8.75 s" in texts
    assert "20 s  (ZeRO-2)" in texts
    assert "✕ even with lean <way>: needs at least 44 GiB of VRAM, has 11 GiB" in texts
    assert "✕ no bar: deepspeed is not installed" in texts
    assert "peak VRAM, limit 11 GiB" in texts
    lengths = [patch.get_width() for axes in chart.axes[::3] for patch in axes.patches]
    assert lengths == pytest.approx([6.25, 8.75, 20.0, 71.25])
    chart.savefig(tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000


def test_a_chart_in_a_notebook_is_an_svg_a_png_and_a_table(drawn: Comparison) -> None:
    shown = InteractiveShell.instance().display_formatter.format(drawn.chart())[0]
    assert "<svg" in shown["image/svg+xml"]
    images = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)', shown["text/html"])
    widths = [float(re.findall(r'<svg[^>]* width="([\d.]+)pt"', b64decode(each).decode())[0]) for each in images]
    assert len(widths) == 2, "they stand below each other where the page is narrow"
    assert max(widths) * 96 / 72 < 600, "each fits on a page of 600 pixels"
    assert b64decode(shown["image/png"]).startswith(b"\x89PNG")
    assert shown["text/plain"] == str(drawn)


def test_no_value_lies_on_the_line_of_a_limit_and_the_title_is_off_the_edge(drawn: Comparison) -> None:
    for row, gib in zip(drawn.rows, (9.7, 8.6, 10.8, 0, 7, 0), strict=True):
        row.update({"vram_bytes": int(gib * GIB)} if gib else {})
    chart = drawn.chart()
    parts = [each for each in chart.panels if isinstance(each, Chart)]
    for each in (chart, *parts):
        each.savefig(io.BytesIO())
    values = []
    for axes in (axes for each in (chart, *parts) for axes in each.axes):
        lines = [line.get_window_extent().x0 for line in axes.get_lines()]
        boxes = [text.get_window_extent() for text in axes.texts]
        assert not [x for x in lines for box in boxes if box.x0 - 1 < x < box.x1 + 1]
        assert all(box.x1 < axes.figure.bbox.x1 for box in boxes)
        values += [text.get_text() for text in axes.texts] if lines else []
    assert {"9.7", "8.6", "10.8", "7"} < set(values)
    title = chart._suptitle  # type: ignore[attr-defined]
    assert chart.bbox.y1 - title.get_window_extent().y1 >= 0.09 * chart.dpi


def test_the_table_has_ratios_and_reasons(drawn: Comparison) -> None:
    lines = str(drawn).splitlines()
    assert lines[0] == "1,000 samples, 8 x (512+128) tokens a step, NVIDIA H200, within 11 GiB of VRAM, 64 GiB of RAM"
    assert [line.split()[-1] for line in lines[3:6]] == ["1.00", "1.40", "3.20"]
    assert lines[6].endswith("does not fit: needs at least 44 GiB of VRAM, has 11 GiB")
    assert lines[7].endswith("-")
    html = drawn._repr_html_()
    assert 'colspan="5"' in html
    assert "lean &lt;way&gt;" in html
    with pytest.raises(KeyError, match="t5-11b"):
        drawn.row("t5-11b", "baseline")
