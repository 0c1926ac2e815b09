"""What a run leaves: a model card, a recipe that repeats it, and words about what was saved."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration, TrainerCallback

import offloadkit
from offloadkit import OffloadConfig
from offloadkit.doors import finetuning, recipes
from offloadkit.doors.model_card import model_card
from offloadkit.doors.recipes import as_yaml
from offloadkit.errors import ConfigError
from offloadkit.facts.units import rounded
from offloadkit.hf.options import FinetuneOptions
from tests.hf.tiny import t5_config

PAIRS = [{"input": f"{number}+1", "target": str(number + 1)} for number in range(20)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[offloadkit.FinetuneResult, Path]:
    """A finished run of a model and rows in files, and their folder."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    T5ForConditionalGeneration(t5_config()).save_pretrained(folder / "start")
    ByT5Tokenizer().save_pretrained(folder / "start")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    result = offloadkit.finetune(
        folder / "start",
        folder / "rows.jsonl",
        eval_dataset=0.1,
        output_dir=folder / "out",
        max_steps=3,
        learning_rate=1e-3,
        warmup_steps=1,
        use_cpu=True,
        save_strategy="no",
        hub_token="secret",
        offload=OffloadConfig(on_nonfinite="skip"),
    )
    return result, folder


def test_the_model_card_has_plan_figures_data_and_arguments(run: Any) -> None:
    result, folder = run
    card = ModelCard.load(folder / "out" / "model" / "README.md")
    assert card.data.library_name == "transformers"
    assert f"{result.plan.num_parameters:,} parameters" in card.text
    for name, value in result.metrics.items():
        assert f"| {name} | {rounded(value, 4)} |" in card.text
    assert "| steps | 3 |" in card.text
    assert "peak RAM" in card.text
    assert "rows.jsonl: 18 rows" in card.text
    assert "held out: 2 rows" in card.text
    assert result.plan.verdict in card.text
    assert "learning_rate: 0.001" in card.text
    assert f"AutoModelForSeq2SeqLM.from_pretrained('{result.model_dir}')" in card.text
    assert "secret" not in card.text


@pytest.mark.parametrize(
    ("given", "is_drawn", "base"),
    [("t5-small", False, "google-t5/t5-small"), ("t5-small", True, None), ("a/b", 0, None)],
)
def test_a_card_names_a_base_model_only_of_the_hub_whose_weights_were_read(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, is_drawn: bool, base: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a/b").mkdir(parents=True)
    data: Any = SimpleNamespace(task="seq2seq", longest_input=1, longest_target=1, rows_in_words="2 rows", dataset=None)
    options: Any = {
        "is_drawn": is_drawn,
        "recipe": "",
        "num_steps": 1,
        "peaks": {},
        "metrics": {"train_seconds": 12345},
    }
    sets = {"training": (0.002, data)}
    card = ModelCard(model_card(Path("out"), given, T5Config(), run[0].plan, sets, **options))
    assert card.data.base_model == base
    assert ("random weights" in card.text) == bool(is_drawn)
    assert "| train_seconds | 12345 |" in card.text
    assert "0.2 % of the training rows" in card.text


def test_the_recipe_of_a_run_repeats_it_bit_for_bit(run: Any) -> None:
    result, folder = run
    arguments = recipes.read(str(folder / "out" / "recipe.yaml"))
    assert arguments["batch_size"] == 8, "the size that auto has become"
    assert arguments["offload"] == {"on_nonfinite": "skip"}
    assert "hub_token" not in arguments
    arguments["offload"] = OffloadConfig(**arguments["offload"])
    (folder / "again").mkdir()
    (folder / "again" / "recipe.yaml").write_text("# of the user\n")
    again = offloadkit.finetune(**arguments, output_dir=folder / "again")
    assert (folder / "again" / "recipe.yaml").read_text() == "# of the user\n"
    weights, others = result.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_the_recipe_of_an_extended_run_does_not_say_that_it_repeats_the_run(tmp_path: Path) -> None:
    path, checkpoint = tmp_path / "recipe.yaml", tmp_path / "checkpoint-2"
    first = recipes.with_head("max_steps: 2\n", path, resumed=None)
    path.write_text(first)
    assert recipes.with_head("max_steps: 2\n", path, resumed=checkpoint) == first
    longer = recipes.with_head("max_steps: 4\n", path, resumed=checkpoint)
    path.write_text(longer)
    assert "from checkpoint-2 on, which do not repeat the run" in longer
    assert "# max_steps: 2\n" in longer
    assert recipes.read(str(path)) == {"max_steps": 4}
    assert not recipes.is_of_user(path)
    assert [recipes.repeats_the_run(text) for text in (first, longer)] == [True, False]
    assert recipes.with_head("max_steps: 4\n", path, resumed=checkpoint) == longer
    assert recipes.repeats_the_run(recipes.with_head("max_steps: 4\n", path, resumed=None))
    unknown = recipes.with_head("max_steps: 4\n", tmp_path / "none.yaml", resumed=checkpoint)
    assert "# (not known)" in unknown


def test_a_card_names_files_whose_names_are_not_utf8(tmp_path: Path) -> None:
    finetuning._write(tmp_path / "README.md", "rows of zeil\udcfc.jsonl")  # in Latin-1, as Python reads such names
    assert (tmp_path / "README.md").read_text() == r"rows of zeil\udcfc.jsonl"


def test_what_yaml_cannot_hold_is_named_in_a_comment() -> None:
    model = T5ForConditionalGeneration(t5_config())
    frame = pd.DataFrame(PAIRS)
    options = FinetuneOptions(
        model, frame, eval_dataset=PAIRS, tokenizer=ByT5Tokenizer(), callbacks=[TrainerCallback], epochs=np.float64(2)
    )
    text = as_yaml(options, batch_size=4)
    for name in (
        "model: a T5ForConditionalGeneration",
        "train_dataset: a DataFrame",
        "eval_dataset: a list",
        "callbacks: a",
    ):
        assert f"# {name}" in text
    assert yaml.safe_load(text) == {"epochs": 2.0, "batch_size": 4}


def test_numbers_with_an_exponent_are_numbers_and_texts_like_them_stay_texts(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("learning_rate: 1e-4\nweight_decay: -2.5E3\nadam_epsilon: .5e+1\nmodel: 1e\ninput_column: '1e-4'\n")
    read = {"learning_rate": 1e-4, "weight_decay": -2500.0, "adam_epsilon": 5.0, "model": "1e", "input_column": "1e-4"}
    assert recipes.read(str(path)) == read
    path.write_text(
        as_yaml(FinetuneOptions("t5-small", "rows.jsonl", learning_rate=1e-5, input_column="1e3"), batch_size=4)
    )
    assert recipes.read(str(path)).items() >= {"learning_rate": 1e-5, "input_column": "1e3"}.items()


def test_a_recipe_without_its_adapters_does_not_train_all_weights() -> None:
    peft = pytest.importorskip("peft")
    text = as_yaml(FinetuneOptions("t5-small", "rows.jsonl", lora=peft.LoraConfig(r=4)), batch_size=4)
    assert not recipes.repeats_the_run(text)
    with pytest.raises(ConfigError, match=r"peft\.LoraConfig, got 'a LoraConfig in memory, which is passed in Python'"):
        FinetuneOptions(**yaml.safe_load(text))


def test_arguments_that_are_the_defaults_are_left_out() -> None:
    options = FinetuneOptions("t5-3b", Path("rows.jsonl"), callbacks=[], resume=True, offload=OffloadConfig())
    assert as_yaml(options, batch_size=8) == "model: t5-3b\ntrain_dataset: rows.jsonl\nbatch_size: 8\n"
