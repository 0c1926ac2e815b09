"""The command line: what it prints, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration
from typer.testing import CliRunner, Result

import offloadkit
from offloadkit.cli import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(vocab_size=384, decoder_start_token_id=0, **shape)).save_pretrained(
        tmp_path / "tiny"
    )
    ByT5Tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_plan_prints_where_everything_goes() -> None:
    done = run("plan", "t5-small", "--dtype", "bf16")
    assert done.exit_code == 0
    assert "60,506,624 parameters" in done.stdout
    assert "exp_avg" in done.stdout


def test_train_goes_from_a_file_to_a_model(model_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps({"input": f"{n}+1", "target": str(n + 1)}) + "\n" for n in range(8)))
    output = tmp_path / "out"
    where = ("--eval-dataset", str(data), "--output", str(output))
    done = run("train", str(model_folder), str(data), *where, "--max-steps", "2")
    assert done.exit_code == 0, done.output
    assert "exact_match" in done.stdout
    assert (output / "model" / "model.safetensors").is_file()


def test_errors_of_ours_are_one_message_and_exit_with_one(model_folder: Path, tmp_path: Path) -> None:
    done = run("train", str(model_folder), str(tmp_path / "missing.jsonl"), "--output", str(tmp_path / "out"))
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert "missing.jsonl" in done.stderr
    assert "Traceback" not in done.output
    zero = run("train", str(model_folder), "data.jsonl", "--batch-size", "0")
    assert zero.exit_code == 1
    assert "batch_size must be a whole number >= 1, got 0" in zero.stderr


def test_ctrl_c_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["offloadkit.finetune"], "finetune", interrupted)
    done = run("train", "model", "data.jsonl")
    assert done.exit_code == 130
    assert "interrupted; --resume goes on" in done.stderr


def test_switches_of_train_are_those_of_finetune(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, object]] = []
    monkeypatch.setattr(sys.modules["offloadkit.finetune"], "finetune", lambda *_, **options: told.append(options))
    for switches in ((), ("--resume",), ("--retry-leaner",)):
        assert run("train", "model", "data.jsonl", *switches).exit_code == 0
    assert [(options["resume"], options["retry_leaner"]) for options in told] == [
        (False, False),
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "only-a-model"),
        ("train", "m", "d", "--batch-size", "many"),
        ("plan", "t5-small", "--colour"),
        ("fly",),
    ],
)
def test_wrong_usage_exits_with_two(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_the_module_is_the_command() -> None:
    command, root = [sys.executable, "-m", "offloadkit", "--help"], Path(offloadkit.__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert all(command in done.stdout for command in ("demo", "plan", "train"))
