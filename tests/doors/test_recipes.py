"""The package's recipes: what they say, that the command line finds them, and that each trains."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import (
    BertForSequenceClassification,
    ByT5Tokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

import offloadkit
from offloadkit import OffloadConfig
from offloadkit.doors import recipes
from offloadkit.doors.cli import app
from offloadkit.hf.options import FinetuneOptions
from tests import images, speech
from tests.hf import tiny

ROOT = Path(__file__).parents[2]
YAML = [name for name in recipes.names() if recipes.find(name).suffix == ".yaml"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})


def options_of(name: str, **changes: Any) -> FinetuneOptions:
    arguments = recipes.read(name) | changes
    if "lora" in arguments:
        pytest.importorskip("peft")
    own = {key: arguments.pop(key) for key in list(arguments) if key in FinetuneOptions.__dataclass_fields__}
    own["offload"] = OffloadConfig(**own.get("offload", {}))
    return FinetuneOptions(**own, training_arguments=arguments)


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_says_what_it_needs_how_to_start_it_and_what_to_change(name: str) -> None:
    text = recipes.find(name).read_text()
    assert recipes.about(name).endswith(".")
    for part in ("Needs:", "Start:", "Change:"):
        assert part in text
    start = f"offloadkit train {name} train_dataset=" if name in YAML else f"offloadkit recipes cp {name}"
    assert start in text


@pytest.mark.parametrize("name", YAML)
def test_the_arguments_of_a_recipe_are_those_of_finetune(name: str) -> None:
    options = options_of(name)
    assert {"model", "train_dataset", "eval_dataset", "learning_rate"} <= set(recipes.read(name))
    assert options.training_arguments.keys() <= {"lr_scheduler_type"}


def test_recipes_are_listed_shown_and_copied(tmp_path: Path) -> None:
    listed = run("recipes", "ls").output.splitlines()
    assert [line.split()[0] for line in listed] == recipes.names()
    assert run("recipes", "show", "chat").output == recipes.find("chat").read_text()
    assert run("recipes", "cp", "chat", str(tmp_path / "new")).exit_code == 0
    assert (tmp_path / "new" / "chat.yaml").read_text() == recipes.find("chat").read_text()
    again = run("recipes", "cp", "chat", str(tmp_path / "new"))
    assert again.exit_code == 1
    assert "exists already" in again.stderr
    (tmp_path / "rows.jsonl").touch()
    onto = run("recipes", "cp", "chat", str(tmp_path / "rows.jsonl"))
    assert f"{tmp_path / 'rows.jsonl'} exists already" in onto.stderr
    assert run("recipes", "cp", "chat", str(tmp_path / "mine.yaml")).exit_code == 0
    assert (tmp_path / "mine.yaml").read_text() == recipes.find("chat").read_text()
    below = run("recipes", "cp", "chat", str(tmp_path / "mine.yaml" / "folder"))
    assert "cannot be written" in below.stderr


def test_a_recipe_that_is_not_there_names_the_nearest() -> None:
    for command in (("recipes", "show", "summarisation"), ("train", "summarisation.yaml", "rows.jsonl")):
        done = run(*command)
        assert done.exit_code == 1
        assert "did you mean 'summarization'" in done.stderr
    assert "did you mean the recipe 'chat'" in run("train", "chta", "train_dataset=rows.jsonl").stderr
    assert "recipes cp dpo" in run("train", "dpo", "rows.jsonl").stderr


def test_the_page_lists_the_recipes() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    rows = [f"| `{name}` | {recipes.about(name)} | `{recipes.read(name)['model']}` |" for name in YAML]
    assert "\n".join(rows) in page
    for name in {*recipes.names()} - {*YAML}:
        assert f"`{name}`" in page
        assert recipes.about(name) in page


PAIRS = [("the cat sat on the mat", "good"), ("a dog ran under the tree", "bad")]
ROWS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "summarization": lambda text, answer: {"document": text, "summary": answer},
    "translation": lambda text, answer: {"en": text, "de": answer},
    "question-answering": lambda text, answer: {"context": text, "question": "the", "answer": answer},
    "instruction-tuning": lambda text, answer: {"instruction": "good", "input": text, "output": answer},
    "chat": lambda text, answer: {
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    },
    "completion": lambda text, answer: {"prompt": text, "completion": f" {answer}"},
    "continued-pretraining": lambda text, answer: {"text": text},
    "classification": lambda text, answer: {"text": text, "label": answer},
    "t5-3b-8gib": lambda text, answer: {"input": text, "target": answer},
    "t5-11b-24gib": lambda text, answer: {"input": text, "target": answer},
    "llama-8b-24gib": lambda text, answer: {"text": text},
    "llama-8b-lora-8gib": lambda text, answer: {"text": text},
    "two-gpus": lambda text, answer: {"input": text, "target": answer},
    "whisper": lambda text, answer: speech.rows(2)[answer == "bad"],
    "images": lambda text, answer: {
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}],
        "images": [f"{answer}.png"],
    },
}
DECODERS = ("chat", "completion", "continued-pretraining", "llama-8b-24gib", "llama-8b-lora-8gib")
LEAST_FALL = 0.5
"""Nats a token by which the loss falls over the steps."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders "t5", "decoder", "classification", "whisper" and "images" with tiny models and their tokenizers."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    words = tiny.word_tokenizer(chat_template=tiny.CHAT_TEMPLATE)
    made: dict[str, tuple[PreTrainedModel, Any]] = {
        "t5": (T5ForConditionalGeneration(tiny.t5_config(d_model=32)), ByT5Tokenizer()),
        "decoder": (LlamaForCausalLM(tiny.llama_config(hidden_size=32)), words),
        "classification": (BertForSequenceClassification(tiny.bert_config(hidden_size=32)), words),
        "whisper": (speech.model(), speech.processor()),
        "images": images.gemma(),
    }
    for name, (model, tokenizer) in made.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow(20 if name == "two-gpus" else 5)) for name in YAML]
)
def test_a_recipe_trains_and_its_loss_falls(
    name: str, models: Path, one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe itself, with a tiny model and few rows. Two GPUs are two processes on the CPU."""
    monkeypatch.chdir(tmp_path)
    options_of(name)
    own = ("classification", "whisper", "images")
    model = models / (name if name in own else "decoder" if name in DECODERS else "t5")
    rows = recipes.read(name)["train_dataset"].replace("*", "part")
    Path(rows).parent.mkdir(exist_ok=True)
    made = [ROWS[name](*PAIRS[number % 2]) for number in range(32)]
    for text, answer in PAIRS:
        images.picture(text == PAIRS[0][0]).save(f"{answer}.png")
    if rows.endswith(".parquet"):
        Dataset.from_list(made).to_parquet(rows)
    else:
        Path(rows).write_text("".join(json.dumps(row) + "\n" for row in made))
    changes = ["max_steps=25", "learning_rate=0.02", "save_strategy=steps", "eval_strategy=no", "batch_size=4"]
    changes += ["gradient_accumulation=1", "use_cpu=True", "vram=None", "ram=None", "output_dir=out"]
    done = run("train", name, f"model={model}", *changes)
    assert done.exit_code == 0, done.output + done.stderr
    found = losses(Path("out"))
    least = LEAST_FALL / 2 if "lora" in recipes.read(name) else LEAST_FALL  # the head keeps its random numbers
    assert sum(found[-5:]) / 5 < found[0] - least
    assert (tmp_path / "out" / "model" / "README.md").is_file()
    repeated = recipes.read("out/recipe.yaml")
    assert (repeated["max_steps"], repeated["learning_rate"]) == (25, 0.02)


@pytest.mark.slow(20)
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_a_script_trains_on_preferences_and_its_loss_falls(name: str, models: Path, tmp_path: Path) -> None:
    """The loss falls by 0.1 in twelve steps. That of KTO begins at 0.5."""
    pytest.importorskip("trl")
    pairs = [{"prompt": text, "chosen": f" {answer}", "rejected": " hello"} for text, answer in PAIRS]
    judged = [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for pair in pairs
        for name in ("chosen", "rejected")
    ]
    rows = pairs if name == "dpo" else judged
    found = losses(by_script(name, models, tmp_path, rows * 16, max_steps=12, learning_rate=1e-2))
    assert found[-1] < found[0] - 0.1


@pytest.mark.slow(20)
def test_the_grpo_script_trains_and_its_reward_rises(models: Path, tmp_path: Path) -> None:
    """The mean reward of the last four of twelve steps is 0.2 higher than that of the first four."""
    pytest.importorskip("trl")
    rows = [{"prompt": text, "answer": "good"} for text, _ in PAIRS]
    options = {"max_steps": 12, "learning_rate": 3e-2, "max_completion_length": 6}
    output = by_script("grpo", models, tmp_path, rows * 32, **options)
    (state,) = output.glob("checkpoint-*/trainer_state.json")
    rewards = [log["reward"] for log in json.loads(state.read_text())["log_history"] if "reward" in log]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2


def by_script(name: str, models: Path, folder: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    """Train by the recipe `name`, a script; returns its output folder."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    command = [sys.executable, recipes.find(name), models / "decoder", folder / "rows.jsonl", *given]
    output = folder / "out"
    done = subprocess.run([*command, f"--output={output}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (output / "model.safetensors").is_file()
    return output


MEMORY = {"t5-3b-8gib": ("7GiB", "40GiB"), "t5-11b-24gib": ("22GiB", "114GiB"), "llama-8b-24gib": ("22GiB", "110GiB")}
MEMORY |= {"two-gpus": ("11GiB", "46GiB"), "llama-8b-lora-8gib": ("7GiB", "21GiB")}


@pytest.mark.slow(20)
@pytest.mark.parametrize("name", MEMORY)
def test_a_recipe_fits_where_it_says(name: str) -> None:
    options = options_of(name, vram=MEMORY[name][0], ram=MEMORY[name][1])
    assert recipes.read(name)["vram"] == MEMORY[name][0]
    assert f"{int(MEMORY[name][1].removesuffix('GiB')) - (name != 't5-3b-8gib')} GiB of free RAM" in (
        recipes.find(name).read_text()
    )
    planned = offloadkit.plan(
        options.model,
        batch_size=options.batch_size,
        max_input_length=options.max_input_length,
        max_target_length=options.max_target_length,
        gradient_accumulation=options.gradient_accumulation,
        lora=options.lora,
        offload=options.engine_config,
        num_gpus=options.num_gpus,
    )
    assert planned.fits, planned.explain()


def test_a_dry_run_shows_arguments_and_plan_and_writes_nothing(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("train", "t5-3b-8gib", f"model={models / 't5'}", "vram=None", "--dry-run")
    assert done.exit_code == 0, done.output + done.stderr
    assert "no file 'pairs.jsonl'" in done.output
    Path("pairs.jsonl").write_text(json.dumps({"input": "a", "target": "b"}) * 1)
    done = run("train", "t5-3b-8gib", f"model={models / 't5'}", "eval_dataset=None", "vram=None", "--dry-run")
    assert "FITS" in done.output
    assert "1 row to train on" in done.output
    assert "%|" not in done.stderr, "bars where nothing can be redrawn"
    assert "learning_rate: 0.0001" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.jsonl"]
