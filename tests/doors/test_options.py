"""`FinetuneOptions`: the arguments of `finetune`, its docstring, the command line, recipes and docs/finetune.md."""

from __future__ import annotations

import importlib
import inspect
import pydoc
import re
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import offloadkit
from offloadkit import OffloadConfig
from offloadkit.doors import recipes
from offloadkit.doors.cli import app
from offloadkit.errors import ConfigError
from offloadkit.facts.field_help import field_docs
from offloadkit.hf.options import FinetuneOptions

ROOT = Path(__file__).parents[2]
DOCS = field_docs(FinetuneOptions)


def test_finetune_has_an_argument_per_option() -> None:
    *arguments, others = inspect.signature(offloadkit.finetune).parameters.values()
    *options, last = fields(FinetuneOptions)
    assert (others.kind, others.name) == (inspect.Parameter.VAR_KEYWORD, last.name)
    found = [(each.name, each.annotation, each.default) for each in arguments]
    expected = [(each.name, each.type, each.default) for each in options]
    assert found == [
        (name, kind, inspect.Parameter.empty if default is MISSING else default) for name, kind, default in expected
    ]


def test_help_of_finetune_documents_every_option() -> None:
    help_text = inspect.getdoc(offloadkit.finetune) or ""
    assert set(DOCS) == {each.name for each in fields(FinetuneOptions)}
    for each in fields(FinetuneOptions):
        first = DOCS[each.name].split("\n")[0]
        assert f"    {each.name} ({each.type}):\n        {first}\n" in help_text
    assert "\nRaises:\n    ConfigError: " in help_text


@pytest.mark.parametrize("name", ["OffloadConfig", "Placement", "MuonOptions", "DynamicLossScale", "FinetuneResult"])
def test_help_of_public_records_documents_every_field(name: str) -> None:
    record = getattr(offloadkit, name)
    said = pydoc.render_doc(record, renderer=pydoc.plaintext)
    assert {each.name for each in fields(record) if f"{each.name}:\n" not in said} == undocumented(record)


def undocumented(record: type) -> set[str]:
    return {each.name for each in fields(record)} - field_docs(record).keys()


def test_the_page_shows_the_options() -> None:
    rows = [["argument", "", "default", "type"], ["---"] * 4]
    for each in fields(FinetuneOptions):
        default = "required" if each.default is MISSING else f"`{each.default!r}`"
        about = DOCS[each.name].split("\n\n")[0].replace("\n", " ")
        rows.append([f"`{each.name}`", about, default, f"`{each.type}`".replace(" | ", " or ")])
    rows[-1][0], rows[-1][2] = "`**training_arguments`", ""
    assert "\n".join(f"| {' | '.join(row)} |" for row in rows) in (ROOT / "docs" / "finetune.md").read_text()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments that the command line passes to `finetune`."""
    calls: list[dict[str, Any]] = []
    finetuning = importlib.import_module("offloadkit.doors.finetuning")
    monkeypatch.setattr(finetuning, "finetune", lambda **given: calls.append(given) or SimpleNamespace(stopped=False))
    return calls


def train(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def test_the_command_line_has_an_option_per_field() -> None:
    shown = train("--help").output
    flags = {each.name: f"--{each.name.replace('_', '-')}" for each in fields(FinetuneOptions)}
    flags |= {"output_dir": "--output", "init": "--random-weights", "offload": "--disk"}
    for name in ("callbacks", "compute_metrics", "model", "train_dataset", "training_arguments"):
        del flags[name]
    assert [flag for flag in flags.values() if not re.search(rf"{flag}\s", shown)] == []
    assert DOCS["epochs"].split("\n")[0] in shown


def test_options_that_are_not_given_keep_the_defaults_of_finetune(told: list[dict[str, Any]]) -> None:
    train("t5-small", "rows.jsonl")
    train("t5-small", "rows.jsonl", "--no-monitor", "--engine", "deepspeed", "--output", "out", "--batch-size", "4")
    given = {"model": "t5-small", "train_dataset": "rows.jsonl", "offload": OffloadConfig()}
    assert told[0] == given
    assert told[1] == given | {"monitor": False, "engine": "deepspeed", "output_dir": "out", "batch_size": 4}


def test_the_command_line_overrides_a_recipe(told: list[dict[str, Any]], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: t5-small\ntrain_dataset: rows.jsonl\nnum_train_epochs: 3\nwarmup_steps: 10\nlearning_rate: 1.0e-4\n"
        "eval_dataset: 0.1\ninit: random\noffload:\n  on_nonfinite: rollback\n  weight_decay: 0.5\n"
    )
    own = ["learning_rate=1e-3", "num_train_epochs=2", "offload.seed=3", "eval_dataset=held_out.jsonl"]
    done = train(str(recipe), "warmup_steps=20", *own, "--on-nonfinite", "skip")
    assert done.exit_code == 0, done.output
    assert told == [
        {
            "model": "t5-small",
            "train_dataset": "rows.jsonl",
            "epochs": 2,
            "warmup_steps": 20,
            "learning_rate": 1e-3,
            "eval_dataset": "held_out.jsonl",
            "init": "random",
            "offload": OffloadConfig(on_nonfinite="skip", weight_decay=0.5, seed=3),
        }
    ]


def test_a_file_whose_name_looks_like_an_argument_is_a_file(
    told: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("year=2024").mkdir()
    Path("year=2024/rows.jsonl").write_text("")
    for given in ("year=2024/rows.jsonl", "year=2024/*.jsonl"):
        assert train("t5-small", given, "seed=3").exit_code == 0
        assert told[-1]["train_dataset"] == given
        assert told[-1]["seed"] == 3
    done = train("t5-small", "year=2025/rows.jsonl")
    assert "no argument 'year'" in done.stderr


def test_arguments_by_name_need_no_recipe(told: list[dict[str, Any]]) -> None:
    train("t5-small", "rows.jsonl", "max_steps=3", "report_to=none", "use_cpu=True")
    train("model=t5-small", "train_dataset=rows.jsonl", "max_steps=3", "--batch-size", "2")
    same = {"model": "t5-small", "train_dataset": "rows.jsonl", "max_steps": 3, "offload": OffloadConfig()}
    assert told == [same | {"report_to": "none", "use_cpu": True}, same | {"batch_size": 2}]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[model", "cannot be read: while parsing"),
        ("- model", r"must map arguments of finetune to values, got \['model'\]"),
        ("offload: {disc: /tmp}", "OffloadConfig has no field 'disc'; did you mean 'disk'"),
        ("offload: 3", "section offload .* holds fields of OffloadConfig"),
        ("learning_rat: 3", "no argument 'learning_rat'; did you mean 'learning_rate'"),
        ("xyzzy: 3", r"no argument 'xyzzy': help\(offloadkit.finetune\) lists them"),
        ("offload: {xyzzy: 3}", "no field 'xyzzy': its fields are optimizer, .*, vram, ram, "),
        ("epochs: 1\nepochs: 2", r"cannot be read: it has 'epochs' twice"),
        ("offload: {vram: 1GiB, ram: 1GiB, vram: 2GiB}", "it has 'vram' twice"),
        (None, "no recipe '.*recipe.yaml'"),
    ],
)
def test_a_recipe_without_a_meaning_is_refused(text: str | None, why: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "recipe.yaml").write_text(text)
    done = train(str(tmp_path / "recipe.yaml"), "rows.jsonl")
    assert done.exit_code == 1
    assert re.search(why, done.stderr)


def test_a_recipe_may_merge_mappings_that_give_a_name_again(tmp_path: Path) -> None:
    """PyYAML merges into a mapping before it reads it, so each of its names may then be there twice."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "parts: {large: &large {<<: {vram: 1GiB}, vram: 2GiB}, on_disk: &on_disk {disk: /tmp}}\n"
        "offload:\n  <<: *large\n  <<: *on_disk\n  vram: 3GiB\n"
    )
    assert recipes.read(str(recipe))["offload"] == {"vram": "3GiB", "disk": "/tmp"}


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--init", "No such option: --init. Arguments without an option are KEY=VALUE: init=VALUE"),
        ("--warmup-steps", "KEY=VALUE: warmup_steps=VALUE"),
        ("--vrm", "--vram"),
        ("--gpu", r"No such option: --gpu(?!.*KEY=VALUE)"),
    ],
)
def test_an_argument_that_is_no_option_is_written_as_key_and_value(option: str, why: str) -> None:
    done = train("chat", "rows.jsonl", option, "3")
    assert done.exit_code == 2
    assert re.search(why, re.sub(r"\s+", " ", done.stderr))


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("epoch=3", "no argument 'epoch'; did you mean 'epochs'"),
        ("warmup_step=3", "no argument 'warmup_step'; did you mean 'warmup_steps'"),
        ("disk=/tmp", r"did you mean offload\.disk"),
        ("offload.disc=/tmp", "no field 'disc'; did you mean 'disk'"),
        ("max_length=3", "did you mean max_input_length"),
        ("train_batch_size=9", "did you mean batch_size"),
        ("no_cuda=true", "did you mean use_cpu=True"),
        ("nonsense", "'nonsense' is not KEY=VALUE"),
    ],
)
def test_an_unknown_key_names_the_nearest(setting: str, why: str) -> None:
    done = train("chat", "rows.jsonl", setting)
    assert done.exit_code == 1
    assert re.search(why, done.stderr)


def test_a_key_is_given_once() -> None:
    assert "epochs is given twice" in train("chat", "rows.jsonl", "epochs=1", "num_train_epochs=2").stderr
    assert "given twice" in train("chat", "rows.jsonl", "epochs=1", "--epochs", "2").stderr


def test_a_model_and_rows_are_needed() -> None:
    done = train("t5-small")
    assert done.exit_code == 2
    assert "TRAIN_DATASET: pass it, or train_dataset=... with a recipe" in done.stderr


@pytest.mark.parametrize("name", ["precison", "epoch", "overwite", "max_input_lenght"])
def test_an_unknown_argument_names_the_nearest(name: str) -> None:
    nearest = {
        "precison": "precision",
        "epoch": "epochs",
        "overwite": "overwrite",
        "max_input_lenght": "max_input_length",
    }
    with pytest.raises(ConfigError, match=f"no argument '{name}'; did you mean '{nearest[name]}'"):
        offloadkit.finetune("t5-tiny", [{"input": "1", "target": "2"}], tokenizer="byte", init="random", **{name: 1})
