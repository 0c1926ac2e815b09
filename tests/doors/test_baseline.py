"""`finetune(..., baseline="measure")`: measured if plain training fits, otherwise predicted, and labelled as such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import T5Config, T5ForConditionalGeneration

import offloadkit
from offloadkit import Monitor
from offloadkit.doors.engines import baseline, forecast, runner
from offloadkit.hf.data import PreparedData
from tests.doors.comparing.made_up import GIB, T5_3B

PAIRS = [{"input": f"{number}+1", "target": str(number + 1)} for number in range(10)]
PLAIN = {"status": "measured", "step_seconds": 0.25, "vram_bytes": 0, "peak_ram_bytes": GIB}


pytestmark = pytest.mark.usefixtures("one_thread", "own_folder")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Tasks for fresh processes; each plan fits, and each step takes a quarter of a second."""
    tasks: list[dict[str, Any]] = []

    def answer(task: dict[str, Any], **_: Any) -> dict[str, Any]:
        tasks.append(task)
        made = forecast.replace(T5_3B, limits={"vram": 139 * GIB, "ram": 64 * GIB})
        return {"status": "measured", "forecasts": [forecast.as_row(made)]} if task["mode"] == "plan" else PLAIN

    monkeypatch.setattr(runner, "in_fresh_process", answer)
    return tasks


@pytest.fixture
def monitors(monkeypatch: pytest.MonkeyPatch) -> list[Monitor]:
    made: list[Monitor] = []
    start = Monitor.start
    monkeypatch.setattr(Monitor, "start", lambda self: (made.append(self), start(self))[1])
    return made


def t5() -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 384}
    return T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0))


def finetune(model: Any, **options: Any) -> offloadkit.FinetuneResult:
    defaults: dict[str, Any] = {"tokenizer": "byte", "max_steps": 3, "batch_size": 2, "use_cpu": True}
    defaults["overwrite"] = True
    return offloadkit.finetune(model, PAIRS, output_dir="out", save_strategy="no", **(defaults | options))


def test_a_step_of_rows_like_the_data_s_is_measured_before_anything_is_loaded(
    asked: list[dict[str, Any]], monitors: list[Monitor], capsys: pytest.CaptureFixture[str]
) -> None:
    finetune(t5(), baseline="measure", gradient_accumulation=2)
    work = asked[1]["work"]
    assert (asked[1]["engine"], work["dtype"], work["our_compute"]) == ("baseline", "fp32", True)
    assert (work["batch_size"], work["accumulation"]) == (2, 2)
    assert (work["input_length"], work["target_length"]) == (4, 2)
    shape = json.loads((Path(work["model"]) / "config.json").read_text())
    assert (shape["d_model"], shape["architectures"]) == (16, ["T5ForConditionalGeneration"])
    shown = capsys.readouterr().out
    assert shown.index("a step, ") < shown.index("measuring a step without offloading ...") < shown.index("step 1/3")
    figures = monitors[0].figures()
    assert figures.slowdown is not None
    assert (figures.slowdown.baseline, figures.slowdown.baseline_seconds) == ("measured", 0.25)
    finetune(t5(), baseline="measure", gradient_accumulation=2)
    assert len(asked) == 2  # the row was cached


def test_unasked_nothing_is_measured(asked: list[dict[str, Any]], monitors: list[Monitor]) -> None:
    finetune(t5())
    assert asked == []
    figures = monitors[0].figures()
    assert figures.slowdown is not None
    assert figures.slowdown.baseline == "predicted"


def frozen() -> Any:
    model = t5()
    model.shared.weight.requires_grad_(False)
    return model


class OfMyOwn(T5ForConditionalGeneration):
    """A class unknown to transformers."""


def of_my_own() -> Any:
    return OfMyOwn(t5().config)


@pytest.mark.parametrize(
    ("model", "reason"),
    [(frozen, "parts of the model are frozen"), (of_my_own, "OfMyOwn is not a transformers class")],
)
def test_what_cannot_be_made_again_is_predicted_and_the_reason_is_said(
    model: Any, reason: str, asked: list[dict[str, Any]], monitors: list[Monitor], capsys: pytest.CaptureFixture[str]
) -> None:
    finetune(model(), baseline="measure")
    assert f"not measured, but predicted: {reason}" in capsys.readouterr().out
    assert monitors[0].baseline_seconds is None


def test_what_does_not_fit_without_offloading_is_predicted_and_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, monitors: list[Monitor], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = {"status": "measured", "forecasts": [forecast.as_row(T5_3B)]}
    monkeypatch.setattr(runner, "in_fresh_process", lambda task, **_: plan)
    finetune(t5(), baseline="measure")
    assert "but predicted: does not fit: needs at least 44.9 GiB of VRAM, has 11 GiB" in capsys.readouterr().out
    assert monitors[0].baseline_seconds is None


@pytest.mark.slow(15)
def test_a_fresh_process_measures_a_model_that_was_handed_over(monitors: list[Monitor]) -> None:
    finetune(t5(), baseline="measure")
    assert 0 < (monitors[0].baseline_seconds or 0) < 5


def test_lengths_are_those_of_padded_micro_batches() -> None:
    inputs = [[0] * (2 if number % 2 else 10) for number in range(5000)]

    def collate(rows: Any) -> Any:
        longest = max(len(row["input_ids"]) for row in rows)
        return {"input_ids": torch.zeros(len(rows), longest), "labels": torch.zeros(len(rows))}

    data = PreparedData(Dataset.from_dict({"input_ids": inputs, "labels": [1] * 5000}), collate, "classification")
    assert baseline.padded_lengths(data, batch_size=64, by_length=False) == (10, 1)
    for other in ({"batch_size": 1, "by_length": False}, {"batch_size": 64, "by_length": True}):
        assert 2 < baseline.padded_lengths(data, **other)[0] < 10
