"""`finetune` plans for the actual rows: at once if nothing must be downloaded, otherwise after tokenisation."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import offloadkit
from offloadkit.errors import DataError, DoesNotFitError, ModelNotFoundError
from offloadkit.hf.read import on_hub
from offloadkit.hf.source import resolve
from offloadkit.planner import Plan
from tests.hf.tiny import save_config, t5_config, word_tokenizer

PAIRS = [{"input": "1", "target": "1"}, *({"input": f"{number}+1", "target": str(number + 1)} for number in range(10))]
LONG = [{"input": "x" * 99, "target": "y" * 49}, {"input": "x", "target": "y"}]
OF_PAIRS: dict[str, Any] = {"max_input_length": 4, "max_target_length": 3}
ROWS = 4


pytestmark = pytest.mark.usefixtures("one_thread", "own_folder")


@pytest.fixture
def a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that the rows come from the hub."""
    monkeypatch.setattr(importlib.import_module("offloadkit.doors.finetuning"), "on_hub", lambda data: True)


@pytest.fixture
def t5() -> Any:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**t5_config().to_dict()))


def finetune(model: Any, rows: Any = PAIRS, **options: Any) -> Plan:
    defaults: dict[str, Any] = {"tokenizer": "byte", "max_steps": 1, "batch_size": ROWS, "use_cpu": True}
    defaults["overwrite"] = True
    return offloadkit.finetune(model, rows, save_strategy="no", **(defaults | options)).plan


def planned(model: Any, **lengths: Any) -> Plan:
    return offloadkit.plan(model, batch_size=ROWS, device=torch.device("cpu"), **lengths)


def test_rows_at_hand_are_planned_for_at_once(t5: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = finetune(t5)
    assert made == planned(t5, **OF_PAIRS) != planned(t5)
    shown = capsys.readouterr().out
    assert shown.count("FITS (on the CPU): ") == 1
    assert "planned again" not in shown


def test_rows_that_had_to_be_downloaded_are_planned_for_when_they_are_known(
    t5: Any, a_download: None, capsys: pytest.CaptureFixture[str]
) -> None:
    made = finetune(t5)
    assert made == planned(t5, **OF_PAIRS)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "planned again" in line]
    assert line == f"planned again, the longest row has 4 + 3 tokens: {made.verdict}"


def test_nothing_is_said_where_rows_are_as_long_as_was_planned(
    t5: Any, a_download: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune(t5, LONG, max_input_length=8, max_target_length=8).num_tokens == ROWS * 16
    assert "planned again" not in capsys.readouterr().out


def test_rows_of_one_length_are_planned_for_without_padding(
    t5: Any, a_download: None, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"input_ids": [5] * 8, "labels": [6] * 8}] * 2
    made = finetune(t5, rows, max_input_length=8, max_target_length=8)
    assert made != planned(t5, max_input_length=8, max_target_length=8)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "planned again" in line]
    assert line == f"planned again, the longest row has 8 + 8 tokens and no row has padding: {made.verdict}"


def test_rows_of_the_evaluation_count(t5: Any) -> None:
    made = finetune(t5, eval_dataset=LONG, eval_strategy="no")
    assert made == planned(t5, max_input_length=112, max_target_length=64)  # multiples of 16


def test_rows_that_came_as_tokens_and_are_longer_than_was_planned_are_planned_for(t5: Any, a_download: None) -> None:
    rows = [{"input_ids": [5] * 40, "labels": [6] * 30}, {"input_ids": [5], "labels": [6]}]
    made = finetune(t5, rows, max_input_length=8, max_target_length=8)
    assert made == planned(t5, max_input_length=48, max_target_length=32)


@pytest.mark.slow
def test_what_fits_with_the_rows_there_are_is_not_refused(t5: Any) -> None:
    """The longest rows allowed would not fit; if rows must be downloaded first, the run is refused for them."""
    short, long = (planned(t5, **lengths).needs()["ram"] for lengths in (OF_PAIRS, {}))
    assert long - short > 50 << 20
    budget = (short + long) // 2
    assert finetune(t5, ram=budget).fits
    with pytest.raises(DoesNotFitError):
        finetune(t5, "no-such/rows", ram=budget)
    with pytest.raises(DoesNotFitError):
        finetune(t5, [{"input": "x" * 600, "target": "y" * 200}], ram=budget)


@pytest.mark.slow
def test_rows_too_long_for_what_was_planned_are_refused_before_anything_is_loaded(t5: Any, a_download: None) -> None:
    rows = [{"input_ids": [5] * 400, "labels": [6] * 100}]
    budget = planned(t5, max_input_length=8, max_target_length=8).needs()["ram"] + (20 << 20)
    with pytest.raises(DoesNotFitError):
        finetune(t5, rows, max_input_length=8, max_target_length=8, ram=budget)


def test_what_needs_a_download_is_known(tmp_path: Path) -> None:
    folder = save_config(t5_config(), tmp_path / "model")
    made = T5ForConditionalGeneration(t5_config())
    assert resolve(folder, init="pretrained").needs_no_hub(None)
    assert resolve("t5-small", init="random").needs_no_hub("byte")
    assert resolve(made, init="pretrained").needs_no_hub(word_tokenizer())
    assert not resolve("t5-small", init="pretrained").needs_no_hub("byte")
    assert not resolve("t5-small", init="random").needs_no_hub(None)
    assert not resolve(folder, init="pretrained").needs_no_hub("t5-small")
    made.name_or_path = "google-t5/t5-small"
    assert not resolve(made, init="pretrained").needs_no_hub(None)
    assert [on_hub(data) for data in (PAIRS, None, "owner/rows", folder)] == [False, False, True, False]


def test_faults_of_names_are_those_of_before(t5: Any) -> None:
    with pytest.raises(ModelNotFoundError):
        finetune("./no-model", PAIRS)
    with pytest.raises(DataError, match=r"there is no file 'no\.jsonl'"):
        finetune(t5, "no.jsonl")
