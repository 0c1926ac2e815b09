"""The command line: output and exit codes."""

from __future__ import annotations

import errno
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration
from typer.testing import CliRunner, Result

import offloadkit
from offloadkit import OffloadConfig
from offloadkit.doors.cli import app
from offloadkit.doors.comparing import comparison, sweeping
from offloadkit.doors.engines import forecast, runner
from offloadkit.errors import TrainingStoppedError
from offloadkit.facts.calls import as_here
from tests.doors.comparing.made_up import T5_3B


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
    assert done.stdout.startswith("FITS (on the CPU): ")
    assert "60,506,624 parameters in bf16" in done.stdout
    assert "Adam moments" not in done.stdout
    assert "Adam moments" in run("plan", "t5-small", "--verbose").stdout


def test_help_breaks_no_line_within_a_paragraph() -> None:
    """typer keeps the line breaks of every paragraph except the first."""
    for command in app.registered_commands:
        _, *paragraphs = inspect.cleandoc(getattr(command.callback, "__doc__", None) or "").split("\n\n")
        assert not any("\n" in paragraph for paragraph in paragraphs), command.callback


def test_help_at_80_columns_has_all_names_and_summaries() -> None:
    assert "..." not in CliRunner().invoke(app, ["--help"], terminal_width=80).stdout.split("Commands:")[1]
    lines = CliRunner().invoke(app, ["train", "--help"], terminal_width=80).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 120
    assert {"--gradient-accumulation", "--max-target-length"} <= {line.split()[0] for line in lines if line.strip()}


def test_arguments_have_the_names_that_texts_give_them() -> None:
    for command in app.registered_commands:
        name = str(getattr(command.callback, "__name__", None))
        usage, text = (
            CliRunner().invoke(app, [name, "--help"], terminal_width=80).stdout.split("Arguments:")[0].split("\n", 1)
        )
        named = set(re.findall(r"\b(MODELS?|TRAIN_DATASET|DATASET)\b", text))
        assert named <= set(re.findall(r"\w+", usage)), usage
    assert "Missing argument 'MODEL'" in run("plan").output
    for name in ("plan", "train"):
        assert re.search("--lora RANK .*--freeze NAME ", run(name, "--help").stdout, re.DOTALL), name


@pytest.mark.parametrize(
    ("command", "module", "function"),
    [
        ("demo", "demo.run", "run_demo"),
        ("train", "finetuning", "finetune"),
        ("compare", "comparing.comparison", "compare"),
        ("sweep", "comparing.sweeping", "sweep"),
    ],
)
def test_commands_that_print_a_plan_write_commands(
    command: str, module: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    inside = importlib.import_module(f"offloadkit.doors.{module}")
    monkeypatch.setattr(inside, function, lambda *_, **__: found.append(as_here("a command", "a call")))
    run(command, *(["t5-small", "rows.jsonl"] if command in ("train", "sweep") else []))
    assert found == ["a command"]


def test_train_goes_from_a_file_to_a_model(model_folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps({"input": f"{n}+1", "target": str(n + 1)}) + "\n" for n in range(8)))
    output = tmp_path / "out"
    where = ("--eval-dataset", str(data), "--output", str(output))
    done = run("train", str(model_folder), str(data), *where, "--max-steps", "2")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("exact_match") == done.stdout.count(f"model is in {output}") == 1, "nothing is said twice"
    assert (output / "model" / "model.safetensors").is_file()
    done = run("train", str(model_folder), str(data), "--output", str(tmp_path / "other"), "--max-steps", "1")
    assert re.search(r"^train_loss \S+  train_seconds ", done.stdout, re.MULTILINE)


def test_errors_of_ours_are_one_message_and_exit_with_one(model_folder: Path, tmp_path: Path) -> None:
    done = run("train", str(model_folder), str(tmp_path / "missing.jsonl"), "--output", str(tmp_path / "out"))
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert "missing.jsonl" in done.stderr
    assert "Traceback" not in done.output
    quantised = tmp_path / "quantised"
    shutil.copytree(model_folder, quantised)
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantised / "config.json").write_text(json.dumps(config))
    data = tmp_path / "pairs.jsonl"
    data.write_text(json.dumps({"input": "1", "target": "2"}))
    refused = run("train", str(quantised), str(data), "--output", str(tmp_path / "out"))
    assert refused.exit_code == 1
    assert "are quantised (quantization_config in its config.json: 4-bit" in " ".join(refused.stderr.split())
    zero = run("train", str(model_folder), "data.jsonl", "--batch-size", "0")
    assert zero.exit_code == 1
    assert "batch_size must be a whole number >= 1, got 0" in zero.stderr
    assert "output_dir is empty" in run("train", str(model_folder), str(model_folder), "--output", "").stderr


def test_warnings_and_a_full_disk_behind_stdout_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    formatted = []

    def fills_the_disk(*_: object, **__: object) -> None:
        formatted.append(warnings.formatwarning("slow", RuntimeWarning, "measure.py", 3, "measure()"))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(importlib.import_module("offloadkit.doors.finetuning"), "finetune", fills_the_disk)
    done = run("train", "t5-small", "rows.jsonl")
    assert formatted == ["warning: slow\n"]
    assert warnings.formatwarning("slow", RuntimeWarning, "measure.py", 3, "measure()") != formatted[0]
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (
        1,
        "error: the output cannot be written: No space left on device",
    )


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("offloadkit.doors.finetuning"), "finetune", interrupted)
    done = run("train", "model", "data.jsonl", "--output", str(tmp_path))
    assert done.exit_code == 130
    assert f"interrupted; there is no checkpoint in {tmp_path} to resume from" in done.stderr
    for name in ("trainer_state.json", "optimizer.pt"):
        (tmp_path / "checkpoint-3").mkdir(exist_ok=True)
        (tmp_path / "checkpoint-3" / name).touch()
    done = run("train", "model", "data.jsonl", "--output", str(tmp_path))
    assert f"interrupted; --resume goes on from {tmp_path / 'checkpoint-3'}" in done.stderr


def test_sigterm_exits_with_its_number_and_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise TrainingStoppedError("SIGTERM has ended training. checkpoint-3: --resume")

    monkeypatch.setattr(importlib.import_module("offloadkit.doors.finetuning"), "finetune", stopped)
    done = run("train", "model", "data.jsonl")
    assert done.exit_code == 143
    assert "SIGTERM has ended training. checkpoint-3: --resume" in done.stderr


def test_switches_of_train_are_those_of_finetune(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, object]] = []
    done, finetune = SimpleNamespace(stopped=False), importlib.import_module("offloadkit.doors.finetuning")
    monkeypatch.setattr(finetune, "finetune", lambda *_, **options: (told.append(options), done)[1])
    names = ("resume", "overwrite", "compile_blocks")
    for switches in ((), *((f"--{name.replace('_', '-')}",) for name in names)):
        assert run("train", "model", "data.jsonl", *switches).exit_code == 0
    found = [[name for name in names if options.get(name)] for options in told]
    assert found == [[], *([name] for name in names)]


def test_train_takes_what_nan_in_gradients_does(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    done, finetune = SimpleNamespace(stopped=False), importlib.import_module("offloadkit.doors.finetuning")
    monkeypatch.setattr(finetune, "finetune", lambda *_, **options: (told.append(options), done)[1])
    for given in ((), ("--on-nonfinite", "rollback")):
        assert run("train", "model", "data.jsonl", *given).exit_code == 0
    assert [options["offload"].on_nonfinite for options in told] == ["raise", "rollback"]


def test_train_takes_the_names_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, object]] = []
    done, finetune = SimpleNamespace(stopped=False), importlib.import_module("offloadkit.doors.finetuning")
    monkeypatch.setattr(finetune, "finetune", lambda *_, **options: (told.append(options), done)[1])
    values = {"input_column": "q", "target_column": "a", "template": "{q}?"}
    given = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", value)]
    assert run("train", "model", "data.jsonl", *given).exit_code == 0
    assert {name: told[0][name] for name in values} == values


def test_train_takes_any_training_argument_and_a_share_to_hold_out(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    done, finetune = SimpleNamespace(stopped=False), importlib.import_module("offloadkit.doors.finetuning")
    monkeypatch.setattr(finetune, "finetune", lambda *_, **options: (told.append(options), done)[1])
    values = {
        "run_name": "2024",
        "warmup_steps": "10",
        "save_steps": "0.5",
        "bf16": "true",
        "tf32": "False",
        "optim": "lion_32bit",
    }
    given = [f"{name}={value}" for name, value in values.items()]
    assert run("train", "model", "data.jsonl", "--eval-dataset", "0.1", "--verbose", *given).exit_code == 0
    expected = {
        "run_name": "2024",
        "warmup_steps": 10,
        "save_steps": 0.5,
        "bf16": True,
        "tf32": False,
        "optim": "lion_32bit",
    }
    assert {name: told[0][name] for name in values} == expected
    assert (told[0]["eval_dataset"], told[0]["verbose"]) == (0.1, True)


def test_the_version_is_the_packages() -> None:
    assert run("--version").stdout == f"offloadkit {offloadkit.__version__}\n"


def test_train_takes_the_lengths_and_the_dtype_that_plan_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    done, finetuning = SimpleNamespace(stopped=False), importlib.import_module("offloadkit.doors.finetuning")
    monkeypatch.setattr(finetuning, "finetune", lambda *_, **options: (told.append(options), done)[1])
    sizes = ("--max-input-length", "64", "--max-target-length", "16", "--dtype", "fp32")
    for given in ((), sizes):
        assert run("train", "model", "data.jsonl", *given).exit_code == 0
    names = ("max_input_length", "max_target_length")
    found = [(*(options.get(name) for name in names), options["offload"].working_dtype) for options in told]
    assert found == [(None, None, "auto"), (64, 16, "fp32")]
    assert "working_dtype must be one of" in run("train", "model", "data.jsonl", "--dtype", "int8").stderr


@pytest.mark.slow
def test_a_folder_for_states_on_disk_is_told_to_plan_and_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[OffloadConfig] = []
    done, finetune = SimpleNamespace(stopped=False), importlib.import_module("offloadkit.doors.finetuning")
    monkeypatch.setattr(finetune, "finetune", lambda *_, offload, **__: (told.append(offload), done)[1])
    for given in ((), ("--disk", str(tmp_path))):
        assert run("train", "model", "data.jsonl", *given).exit_code == 0
    assert [config.disk for config in told] == [None, str(tmp_path)]
    small = ("plan", "t5-base", "--vram", "1.5GiB", "--ram", "2.8GiB", "--batch-size", "1", "--dtype", "bf16")
    refused = run(*small)
    assert refused.exit_code == 1
    assert " --disk " in refused.stdout
    planned = run(*small, "--disk", str(tmp_path), "--json")
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["bytes"]["disk"]


def test_compiled_blocks_are_told_to_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[OffloadConfig] = []
    planned = SimpleNamespace(fits=True, explain=lambda: "")
    monkeypatch.setattr("offloadkit.doors.planning.plan", lambda *_, offload, **__: (told.append(offload), planned)[1])
    for given in ((), ("--compile-blocks",)):
        assert run("plan", "t5-small", *given).exit_code == 0
    assert [config.compile_blocks for config in told] == [False, True]


@pytest.mark.parametrize("vram", [(), ("--vram", "8GiB")])
def test_a_folder_for_states_that_is_not_there_is_refused(vram: tuple[str, ...]) -> None:
    done = run("plan", "t5-small", "--disk", "/no/such", *vram)
    assert done.exit_code == 1
    assert done.stderr.startswith("error: /no/such is not a folder: ")


def answered(task: dict[str, Any], **_: Any) -> dict[str, Any]:
    """A fresh process that fits everything."""
    if task["mode"] == "plan":
        made = forecast.as_row(replace(T5_3B, limits={"vram": 139 << 30, "ram": 64 << 30}))
        return {"status": "measured", "forecasts": [made] * len(task["works"])}
    if task["mode"] == "largest":
        return {"status": "measured", "batch_size": 8}
    return {"status": "measured", "step_seconds": 0.5, "vram_bytes": 1 << 30, "peak_ram_bytes": 1 << 30}


def test_compare_measures_the_models_and_engines_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(runner, "in_fresh_process", lambda task, **_: (asked.append(task), answered(task))[1])
    engines = ("--engine", "baseline", "--engine", "offloadkit")
    sizes = ("--batch-size", "2", "--max-input-length", "64", "--num-samples", "100", "--vram", "11GiB")
    done = run("compare", "t5-small", "t5-tiny", *engines, *sizes, "--output", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    works = [(task["engine"], task["work"]["model"]) for task in asked[1:]]
    assert works == [(engine, model) for model in ("t5-small", "t5-tiny") for engine in ("baseline", "offloadkit")]
    work = asked[1]["work"]
    assert (work["batch_size"], work["input_length"], work["vram"]) == (2, 64, 11 << 30)
    assert "100 samples, 2 x (64+128) tokens a step" in done.stdout
    assert (tmp_path / "out" / "comparison.png").is_file()


def test_compare_without_names_is_the_chart_of_all_sizes_of_t5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    measured = SimpleNamespace(rows=[{"status": "measured"}])
    monkeypatch.setattr(comparison, "compare", lambda *names, **_: (told.append(names), measured)[1])
    assert run("compare", "--output", str(tmp_path)).exit_code == 0
    assert told == [(comparison.T5_MODELS, comparison.ENGINES)]


def test_sweep_times_each_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(runner, "in_fresh_process", lambda task, **_: (asked.append(task), answered(task))[1])
    grid = ("--batch-sizes", "1,2,4", "--gradient-accumulation", "1,2")
    done = run("sweep", "t5-tiny", *grid, "--max-input-length", "64", "--output", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    timed = [(task["work"]["batch_size"], task["work"]["accumulation"]) for task in asked if task["mode"] == "measure"]
    assert timed[:6] == [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]
    assert "a sample" in done.stdout
    assert (tmp_path / "out" / "sweep.json").is_file()


def test_sweep_of_a_dataset_tells_what_training_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    measured = SimpleNamespace(rows=[{"status": "measured"}])
    monkeypatch.setattr(sweeping, "sweep", lambda *names, **options: (told.append((names, options)), measured)[1])
    learning = ("--eval-dataset", "held.jsonl", "--scale-learning-rate", "none,sqrt", "--learning-rate", "0.001")
    done = run("sweep", "t5-small", "rows.jsonl", *learning, "--tokenizer", "byte", "--output", str(tmp_path))
    assert done.exit_code == 0, done.output
    ((names, options),) = told
    assert names == ("t5-small", "rows.jsonl")
    assert (options["eval_dataset"], options["scale_learning_rate"]) == ("held.jsonl", ["none", "sqrt"])
    assert (options["learning_rate"], options["tokenizer"], options["batch_sizes"][-1]) == (0.001, "byte", 64)


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_where_nothing_was_measured_the_exit_code_says_so(command: str, tmp_path: Path) -> None:
    done = run(command, "t5-tiny", "--timeout", "0.1", "--output", str(tmp_path))
    assert done.exit_code == 1
    assert "the plan failed: took more than 0.1 s (--timeout)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("compare", "t5-tiny", "--engine", "fly"),
            "no engine 'fly': choose one of 'baseline', 'offloadkit', 'deepspeed'",
        ),
        (("compare", "no-model"), "no model 'no-model'"),
        (("compare", "t5-tiny", "--batch-size", "0"), "batch_size must be a whole number >= 1, got 0"),
        (("compare", "t5-tiny", "--vram", "much"), "vram: cannot read 'much' as a size"),
        (("sweep", "t5-tiny", "--batch-sizes", "2,2"), "batch_sizes must be one or more different whole numbers"),
        (("sweep", "t5-tiny", "--scale-learning-rate", "cubic"), "scale_learning_rate must be one or more of 'none'"),
        (("sweep", "t5-tiny", "--eval-dataset", "held.jsonl"), "eval_dataset needs a train_dataset"),
    ],
)
def test_compare_and_sweep_refuse_what_has_no_meaning(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = run(*arguments, "--output", str(tmp_path / "out"))
    assert done.exit_code == 1
    assert done.stderr.startswith(f"error: {message}")


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "only-a-model"),
        ("sweep", "t5-tiny", "--batch-sizes", "1,x"),
        ("sweep", "t5-tiny", "--gradient-accumulation", ""),
        ("compare", "t5-tiny", "--steps", "few"),
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
    assert all(command in done.stdout for command in ("demo", "plan", "train", "compare", "sweep"))
