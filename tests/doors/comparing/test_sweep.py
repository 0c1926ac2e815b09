"""`sweep`: sizes timed and trained, sizes that fail, cached rows."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from matplotlib.text import Text
from transformers import ByT5Tokenizer, T5ForConditionalGeneration

from offloadkit.doors.comparing import learning, sweeping
from offloadkit.doors.comparing.sweeping import Sweep, sweep
from offloadkit.doors.engines import baseline, forecast, runner
from offloadkit.doors.engines.work import config_of
from offloadkit.errors import ConfigError, DataError, ModelError, OutputError
from offloadkit.hf.data import load_dataset_like
from tests.doors.comparing.made_up import GIB, at_batch
from tests.messages import has_facts

Task = dict[str, Any]
Answers = Callable[[Callable[[Task], dict[str, Any]]], list[Task]]
SHORT: dict[str, Any] = {"max_input_length": 12, "max_target_length": 6}
PAIRS = [{"input": f"{number}", "target": f"{number % 7}"} for number in range(24)]


def never(task: Task) -> dict[str, Any]:
    raise AssertionError(f"run again: {task}")


@pytest.mark.slow
def test_sizes_are_timed_and_the_largest_is_tried(
    tmp_path: Path, in_this_process: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "MOST_TIMES_LARGER", 2)
    result = sweep("t5-tiny", batch_sizes=(2, 4), gradient_accumulation=(1, 2), **SHORT, steps=1, output_dir=tmp_path)
    assert [(row["batch_size"], row["accumulation"], row["status"]) for row in result.rows] == [
        (2, 1, "measured"),
        (4, 1, "measured"),
        (2, 2, "measured"),
        (4, 2, "measured"),
    ]
    for row in result.rows:
        rows = row["batch_size"] * row["accumulation"]
        assert row["sample_seconds"] == row["step_seconds"] / rows
        assert row["tokens_per_second"] == pytest.approx(18 * rows / row["step_seconds"])
        assert row["epoch_seconds"] == pytest.approx(row["step_seconds"] * 10_000 / rows)
    assert result.largest["batch_size"] == 8
    assert result.largest["is_most"]
    assert result.largest["status"] == "measured"
    assert has_facts(result.explain(), "at least 8 ", "iB")
    assert [task["mode"] for task in in_this_process] == ["plan", *["measure"] * 4, "largest", "measure"]
    saved = json.loads((tmp_path / "sweep.json").read_text())
    assert set(saved["knees"]) == {"1", "2"}
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    assert (tmp_path / "sweep.svg").exists()


def test_a_size_that_fails_shows_its_reason_and_the_sweep_goes_on(tmp_path: Path, answers: Answers) -> None:
    def answer(task: Task) -> dict[str, Any]:
        if task["mode"] == "plan":
            lacking = {"vram": (13 * GIB, 11 * GIB)}
            made = [at_batch(w["batch_size"], lacking=lacking if w["batch_size"] == 64 else {}) for w in task["works"]]
            return {"status": "measured", "forecasts": [forecast.as_row(each) for each in made]}
        if task["mode"] == "largest":
            return {"status": "measured", "batch_size": 32}
        size = task["work"]["batch_size"]
        if size == 4:
            return {"status": "failed", "reason": "took more than 9 s"}
        seconds = max(0.4, 0.025 * size)
        return {"status": "measured", "step_seconds": seconds, "vram_bytes": GIB * size, "peak_ram_bytes": GIB}

    asked = answers(answer)
    result = sweep("t5-3b", batch_sizes=(1, 4, 16, 32, 64), vram="11GiB", ram="64GiB", output_dir=tmp_path)
    assert [row["status"] for row in result.rows] == ["measured", "failed", "measured", "measured", "does not fit"]
    knee, predicted = result.knee(), result.predicted_knee()
    assert knee is not None
    assert predicted is not None
    assert knee.size == pytest.approx(16)
    assert predicted.size == pytest.approx(0.42 / 0.026)
    text = str(result)
    for shown in (text, result._repr_html_()):
        assert has_facts(shown, "16 rows", "1.0 times", "1 row")
        assert has_facts(shown, "is 32 ", "32 GiB of VRAM")
        assert has_facts(shown, "4 x 1", "took more than 9 s")
        assert has_facts(shown, "64 x 1", "13 GiB of VRAM", "11 GiB")
    html = result.chart()._repr_mimebundle_()["text/html"]
    widths = [int(re.findall(r'<svg[^>]* width="(\d+)', drawn)[0]) for drawn in svgs_of(html)]
    assert len(widths) == 3, "panels that wrap where the page is narrow"
    assert max(widths) < 350, "points; the whole chart has 864"
    assert "prefers-color-scheme:dark" in svgs_of(html)[0]
    shown = [item.get_text() for item in result.chart().findobj(Text) if isinstance(item, Text)]
    assert "does not fit" in shown
    assert "knee: 16" in shown
    assert any(has_facts(item, "batch 16 ", "CPU") for item in shown)

    del asked[:]
    sweep("t5-3b", batch_sizes=(1, 4, 16, 32, 64), vram="11GiB", ram="64GiB", output_dir=tmp_path)
    assert [task["work"]["batch_size"] for task in asked] == [4]


def svgs_of(html: str) -> list[str]:
    return [b64decode(data).decode() for data in re.findall(r"svg\+xml;base64,([^\"]+)", html)]


def test_the_largest_batch_by_the_plan_is_found_to_an_eighth(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(work: forecast.Work, device: object) -> forecast.Forecast:
        return at_batch(work.batch_size, lacking={"vram": (2, 1)} if work.batch_size > 77 else {})

    monkeypatch.setattr(forecast, "forecast", planned)
    work: Any = forecast.Work("t5-3b", 1, 512, 128)
    cpu: Any = None
    assert 70 <= (forecast.largest_batch(work, 512, cpu) or 0) <= 77
    assert forecast.largest_batch(work, 64, cpu) == 64
    monkeypatch.setattr(forecast, "forecast", lambda work, device: at_batch(1, lacking={"vram": (2, 1)}))
    assert forecast.largest_batch(work, 64, cpu) is None


@pytest.mark.slow
def test_training_on_own_rows_measures_the_held_out_loss(tmp_path: Path, in_this_process: list[Task]) -> None:
    result = sweep(
        "t5-tiny",
        PAIRS,
        eval_dataset=PAIRS[:8],
        tokenizer="byte",
        batch_sizes=(4, 16),
        scale_learning_rate=("none", "sqrt"),
        learning_rate=1e-3,
        **SHORT,
        output_dir=tmp_path,
    )
    assert [(row["batch_size"], row["scaling"], row["learning_rate"]) for row in result.rows] == [
        (4, "none", 1e-3),
        (16, "none", 1e-3),
        (16, "sqrt", 2e-3),
    ]
    assert [row["num_steps"] for row in result.rows] == [6, 1, 1]
    assert [row["num_samples"] for row in result.rows] == [24, 16, 16]
    losses = [row["eval_loss"] for row in result.rows]
    assert len(set(losses)) > 1
    assert all(0 < loss < 20 for loss in losses)
    assert all(row["tokens_per_second"] > 0 for row in result.rows)
    assert "the held-out loss is" in result.explain()
    shown = [item.get_text() for item in result.chart().findobj(Text) if isinstance(item, Text)]
    assert "learning rate scaled (sqrt)" in shown
    assert not list(tmp_path.glob("tmp*")), "trained models must be deleted"


def test_a_model_and_a_tokenizer_are_handed_to_other_processes_and_left_alone(tmp_path: Path, answers: Answers) -> None:
    model = T5ForConditionalGeneration(config_of("t5-tiny"))  # type: ignore[arg-type]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    seen: list[Task] = []

    def answer(task: Task) -> dict[str, Any]:
        seen.append(task)
        told = task["finetune"]
        assert T5ForConditionalGeneration.from_pretrained(told["model"]).num_parameters() == model.num_parameters()
        assert (Path(told["tokenizer"]) / "tokenizer_config.json").exists()
        assert len(load_dataset_like(told["train_dataset"])) == len(PAIRS)
        return {"status": "failed", "reason": "seen"}

    answers(answer)
    rows = sweep(model, PAIRS, tokenizer=ByT5Tokenizer(), batch_sizes=(2, 64), output_dir=tmp_path, seed=3).rows
    assert [row["reason"] for row in rows] == ["seen", "not trained: 24 samples are fewer than the 64 of one step"]
    assert seen[0]["finetune"]["seed"] == 3
    assert seen[0]["finetune"]["max_steps"] == 12
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())


def test_the_config_of_a_model_is_enough_for_timing(tmp_path: Path) -> None:
    model = T5ForConditionalGeneration(config_of("t5-tiny"))  # type: ignore[arg-type]
    folder = baseline.config_folder(model, tmp_path)
    assert config_of(folder).d_model == 64
    assert baseline.config_folder(model, tmp_path) == folder
    with pytest.raises(ModelError, match=r"^3 is .*model"):
        baseline.config_folder(3, tmp_path)


def test_learning_rates_are_scaled_from_the_smallest_step() -> None:
    made = learning.learning_rates(1e-3, [16, 64], ["none", "sqrt", "linear"])
    assert made == [(16, "none", 1e-3), (64, "none", 1e-3), (64, "sqrt", 2e-3), (64, "linear", 4e-3)]
    assert learning.learning_rates(1.0, [1, 4], ["linear"]) == [(1, "none", 1.0), (4, "linear", 4.0)]
    assert learning.base_rate(None, "random") == 5e-4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_sizes": (1, 1)}, "batch_sizes must be one or more different whole numbers"),
        ({"batch_sizes": 4}, "batch_sizes must be one or more different whole numbers"),
        ({"gradient_accumulation": (0,)}, "gradient_accumulation must be one or more different whole numbers"),
        ({"scale_learning_rate": ("log",)}, "scale_learning_rate must be one or more of 'none', 'sqrt', 'linear'"),
        ({"scale_learning_rate": ("sqrt",)}, "scale_learning_rate needs a train_dataset"),
        ({"batchsizes": (1, 2)}, "sweep has no argument 'batchsizes'; did you mean 'batch_sizes'?"),
        ({"train_dataset": PAIRS, "warmup_step": 3}, "no argument 'warmup_step'; did you mean 'warmup_steps'?"),
        ({"train_dataset": PAIRS, "xyzzy": 3}, "sweep has no argument 'xyzzy'$"),
        ({"eval_dataset": PAIRS}, "eval_dataset needs a train_dataset"),
        ({"init": "random"}, "init needs a train_dataset"),
        ({"max_input_length": 0}, "max_input_length must be a whole number >= 1, got 0"),
        ({"num_samples": 0}, "num_samples must be a whole number >= 1"),
        ({"train_dataset": PAIRS, "max_steps": 3}, "sweep sets max_steps of finetune by itself"),
        ({"train_dataset": PAIRS, "offload": object()}, "offload=.* goes to another process"),
        ({"train_dataset": PAIRS, "tokenizer": "byte", "learning_rate": -1}, "learning_rate must be a positive number"),
    ],
)
def test_what_has_no_meaning_is_refused(wrong: dict[str, Any], message: str, tmp_path: Path, answers: Answers) -> None:
    answers(never)
    with pytest.raises(ConfigError, match=message):
        sweep("t5-tiny", **{"output_dir": tmp_path, **wrong})


def test_columns_that_will_not_do_are_said_once(
    tmp_path: Path, in_this_process: list[Task], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"source": "1", "answer": "2"}] * 8
    with pytest.raises(DataError, match="Columns found: source, answer"):
        sweep("t5-tiny", rows, tokenizer="byte", batch_sizes=(1, 2, 4), output_dir=tmp_path)
    assert len(in_this_process) == 1
    assert capsys.readouterr().out.endswith("refused\n")
    with pytest.raises(ConfigError, match="bogus"):
        sweep("t5-tiny", PAIRS, tokenizer="byte", lr_scheduler_type="bogus", batch_sizes=(1, 2), output_dir=tmp_path)
    assert len(in_this_process) == 2


def test_columns_that_are_named_reach_training(tmp_path: Path, in_this_process: list[Task]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"q": "1", "a": "2"}\n' * 2)
    named = {"input_column": "q", "target_column": "a"}
    (row,) = sweep("t5-tiny", path, tokenizer="byte", batch_sizes=(2,), output_dir=tmp_path / "out", **named).rows
    assert row["status"] == "measured"


def test_rows_that_cannot_be_written_down_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(datasets.Dataset, "to_parquet", full)
    with pytest.raises(OutputError, match=r"train\.parquet could not be written.*No space left on device"):
        sweep("t5-tiny", PAIRS, output_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


def timed(seconds: dict[int, float], ram: float = 4.0) -> Sweep:
    """A sweep on a CPU with these seconds by number of rows; every size takes 0.01 GiB more RAM than the one before."""
    rows = [
        {"batch_size": size, "accumulation": 1, "scaling": "none", "status": "measured", "step_seconds": each}
        | {"sample_seconds": each / size, "epoch_seconds": each / size, "tokens_per_second": 1.0, "vram_bytes": 0}
        | {"peak_ram_bytes": int((ram + index / 100) * GIB)}
        for index, (size, each) in enumerate(seconds.items())
    ]
    return Sweep("t5-tiny", rows, {}, 100, None, None, {"gpu": "none"}, Path())


def test_sentences_make_sense_where_few_sizes_lie_below_the_knee() -> None:
    assert has_facts(timed({1: 0.010, 8: 0.030}).explain(), "8 rows", "3.0 times", "1 row")
    assert has_facts(timed({4: 0.01}).explain(), "atch 4 ", "no knee")
    assert has_facts(timed({2: 0.010, 8: 0.040}).explain(), "8 rows", "4.0 times", "2 rows")


def test_a_largest_batch_that_failed_or_was_not_run_says_so() -> None:
    found = {"batch_size": 176, "is_most": False}
    assert has_facts(replace(timed({4: 0.01}), largest=found).explain(), "176", "not run")
    late = found | {"status": "failed", "reason": "took more than 9 s (--timeout)"}
    assert has_facts(replace(timed({4: 0.01}), largest=late).explain(), "176", "failed", "took more than 9 s")
    full = found | {"status": "does not fit", "reason": "does not fit: needs more"}
    assert has_facts(replace(timed({4: 0.01}), largest=full).explain(), "176", "does not fit", "needs more")


def test_the_highest_point_of_memory_is_whole() -> None:
    memory = timed({1: 0.01, 2: 0.01, 4: 0.02}).chart().axes[2]
    assert memory.get_ylim()[1] > 1.05 * 4.02


def test_the_largest_batch_is_given_the_time_that_its_rows_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[int, float] = {}

    def run(task: Task, *, timeout: float, **_: Any) -> dict[str, Any]:
        if task["mode"] == "plan":
            return {"status": "measured", "forecasts": [forecast.as_row(at_batch(64)) for _ in task["works"]]}
        if task["mode"] == "largest":
            return {"status": "measured", "batch_size": 512}
        given[task["work"]["batch_size"]] = timeout
        return {"status": "measured", "step_seconds": 2.0, "vram_bytes": GIB, "peak_ram_bytes": GIB}

    monkeypatch.setattr(runner, "in_fresh_process", run)
    sweep("t5-3b", batch_sizes=(64,), output_dir=tmp_path)
    step = at_batch(64).step_seconds
    assert step is not None
    assert given == pytest.approx({64: 600 + 10 * 10 * step, 512: 600 + 10 * 3 * 8 * step})


def test_a_dataset_without_rows_is_refused(tmp_path: Path, answers: Answers) -> None:
    answers(never)
    with pytest.raises(DataError, match="empty"):
        sweep("t5-tiny", [], output_dir=tmp_path)
