"""`finetune` and the monitor: the display, stopping and resuming, and what a cell leaves behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration, TrainerCallback
from transformers.utils import logging
from typer.testing import CliRunner

import offloadkit
from offloadkit.checkpoint.folder import contents_of
from offloadkit.doors.cli import app
from offloadkit.errors import ConfigError
from offloadkit.facts import hardware
from offloadkit.hf import callbacks as progress
from offloadkit.monitor import terminal
from tests.hf.tiny import save_config
from tests.monitor.records import Watched

PAIRS = [{"input": f"{number}+1", "target": str(number + 1)} for number in range(10)]


pytestmark = pytest.mark.usefixtures("one_thread", "own_folder")


@pytest.fixture
def by_name(tmp_path: Path) -> str:
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 384}
    config = T5Config(**shape, decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"])
    folder = save_config(config, tmp_path / "by-name")
    ByT5Tokenizer().save_pretrained(folder)
    return str(folder)


def finetune(model: Any, output: str = "out", **options: Any) -> offloadkit.FinetuneResult:
    """3 updates an epoch, the last one with a single micro-batch; 8 updates in total."""
    defaults: dict[str, Any] = {"init": "random", "max_steps": 8, "batch_size": 2, "gradient_accumulation": 2}
    defaults |= {"use_cpu": True, "learning_rate": 1e-2, "save_strategy": "no"}
    defaults["overwrite"] = not options.get("resume")
    return offloadkit.finetune(model, PAIRS, output_dir=output, **(defaults | options))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """The monitor's drawings outside of a notebook and a terminal."""
    display = Watched()
    monkeypatch.setattr("offloadkit.doors.finetuning.can_be_drawn", lambda: True)
    monkeypatch.setattr(terminal, "LogLines", lambda: display)
    return display


def at_step(number: int, monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    """Call `act` on the training thread when step `number` begins."""

    class Acts(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == number - 1:
                act()

    monkeypatch.setattr(progress, "show_progress", _with(progress.show_progress, Acts))


def _with(show_progress: Any, callback: Any) -> Any:
    def show(trainer: Any, **options: Any) -> None:
        show_progress(trainer, **options)
        trainer.add_callback(callback())

    return show


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def weights(result: offloadkit.FinetuneResult) -> dict[str, torch.Tensor]:
    return dict(result.model.state_dict())


@pytest.fixture
def new_threads() -> Callable[[], list[str]]:
    """Names of the package's threads started by this test; another test's error may keep an engine alive."""
    before = set(threading.enumerate())
    return lambda: [thread.name for thread in {*threading.enumerate()} - before if "offloadkit" in thread.name]


# -- the display


def test_the_monitor_takes_the_place_of_bar_and_lines(
    by_name: str, watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    finetune(by_name, eval_dataset=PAIRS, eval_strategy="epoch", logging_steps=1)
    (end,) = watched.ends
    assert (end.state, end.steps_done, end.total_steps) == ("finished", 8, 8)
    assert end.slowdown is not None
    assert [step for step, _ in end.evaluations] == [3, 6, 8]
    assert end.epoch == pytest.approx(2.8), "4 of the third epoch's 5 micro-batches are done"
    shown = capsys.readouterr()
    assert "training:" not in shown.err
    assert "  step " not in shown.out
    assert "after step 3: evaluation loss" in shown.out


@pytest.mark.slow
def test_files_are_written_without_bars_beside_it(
    by_name: str, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    seen: list[bool] = []
    at_step(2, monkeypatch, lambda: seen.append(logging.is_progress_bar_enabled()))
    finetune(by_name)
    assert (seen, logging.is_progress_bar_enabled()) == ([False], True)
    fails(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        finetune(by_name)
    assert logging.is_progress_bar_enabled()


def test_without_it_there_are_lines(by_name: str, watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    finetune(by_name, monitor=False, logging_steps=4)
    assert watched.ends == []
    assert "step 4/8" in capsys.readouterr().out


def test_away_from_notebooks_and_terminals_there_are_lines(by_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    finetune(by_name, logging_steps=4)
    shown = capsys.readouterr().out
    assert "step 4/8" in shown
    assert "slowdown" not in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"monitor": "notebook"}, "monitor must be True or False, got 'notebook'"),
        ({"baseline": True}, "baseline must be 'predict' or 'measure', got True"),
    ],
)
def test_switches_without_a_meaning_are_refused(by_name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        finetune(by_name, **options)


# -- stopping and resuming


@pytest.mark.parametrize(
    ("step", "often"),
    [
        pytest.param(2, {"save_strategy": "epoch", "eval_strategy": "epoch"}, marks=pytest.mark.slow),
        pytest.param(3, {}, marks=pytest.mark.slow),
        pytest.param(4, {"save_strategy": "epoch", "eval_strategy": "epoch"}, marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_finishes_the_step_and_resume_gives_the_weights_of_a_run_that_was_not_interrupted(
    step: int,
    often: dict[str, Any],
    by_name: str,
    watched: Watched,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In mid-epoch, at the end of an epoch, and in an epoch's first step; the model has dropout."""
    options = {"eval_dataset": PAIRS, "eval_strategy": "no"} | often
    whole = finetune(by_name, "whole", **options)
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        at_step(step, patched, interrupt)
        stopped = finetune(by_name, **options)
    assert signal.getsignal(signal.SIGINT) == handler
    assert len(stopped.steps) == step
    assert (whole.stopped, stopped.stopped) == (False, True)
    assert stopped.model_dir.is_dir()
    assert "eval_loss" in stopped.metrics
    assert (
        f"stopped after step {step} of 8: resume=True (--resume) goes on from checkpoint-{step}"
        in capsys.readouterr().out
    )
    assert (watched.ends[-1].state, watched.ends[-1].steps_done) == ("stopped", step)
    resumed = finetune(by_name, resume=True, **options)
    assert (watched.ends[-1].state, watched.ends[-1].steps_done) == ("finished", 8)
    assert watched.ends[-1].loss_curve[0][0] == step + 1
    assert len(resumed.steps) == 8 - step
    assert all(torch.equal(weight, weights(resumed)[name]) for name, weight in weights(whole).items())


@pytest.mark.slow
def test_a_callback_that_stops_in_mid_epoch_leaves_a_checkpoint_as_an_interrupt_does(by_name: str) -> None:
    class Stops(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 4

    options: dict[str, Any] = {"eval_dataset": PAIRS, "save_strategy": "epoch", "eval_strategy": "epoch"}
    whole = finetune(by_name, "whole", **options)
    assert len(finetune(by_name, callbacks=[Stops], **options).steps) == 4
    resumed = finetune(by_name, resume=True, **options)
    assert len(resumed.steps) == 4
    assert all(torch.equal(weight, weights(resumed)[name]) for name, weight in weights(whole).items())
    finetune(by_name, callbacks=[Stops], **options | {"save_strategy": "no"})
    assert not list(Path("out").glob("checkpoint-*"))


def test_a_callback_that_stops_leaves_the_best_models_evaluation_to_the_trainer(by_name: str) -> None:
    """The unfinished epoch is evaluated, and its weights are the best."""

    class Stops(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 4

    options: dict[str, Any] = {"eval_dataset": PAIRS, "save_strategy": "epoch", "load_best_model_at_end": True}
    result = finetune(by_name, callbacks=[Stops], **options)
    losses = {log["step"]: log["eval_loss"] for log in result.history if "eval_loss" in log}
    assert losses.keys() == {3, 4}
    best = min(losses, key=losses.__getitem__)
    assert [path.name for path in Path("out").glob("checkpoint-*")] == [f"checkpoint-{best}"]


@pytest.mark.slow
def test_a_checkpoint_of_weights_alone_and_a_best_one_do_not_keep_the_stopped_one_from_being_resumed(
    by_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"eval_dataset": PAIRS, "save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2}
    options |= {"eval_steps": 2, "load_best_model_at_end": True, "save_only_model": True, "save_total_limit": 1}
    with monkeypatch.context() as patched:
        at_step(5, patched, interrupt)
        finetune(by_name, **options)
    with pytest.warns(RuntimeWarning, match="the checkpoint has the weights alone"):
        resumed = finetune(by_name, resume=True, **(options | {"save_only_model": False}))
    assert len(resumed.steps) == 3
    assert [contents_of(path) for path in Path("out").glob("checkpoint-*")].count("all") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "contents", "per_parameter"),
    [
        (["save_only_model=true"], "weights", 4),
        (["offload.checkpoint_precision=compact"], "compact", 8),
        ([], "all", 12),
    ],
)
def test_the_command_writes_the_checkpoint_that_it_was_asked_for(
    arguments: list[str], contents: str, per_parameter: int, by_name: str
) -> None:
    """fp32 weights on the CPU: 4 bytes and, with states, 4 or 8 of moments."""
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    given = ["train", by_name, "rows.jsonl", "--random-weights", "--output", "out", "max_steps=2", *arguments]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    (checkpoint,) = Path("out").glob("checkpoint-*")
    assert contents_of(checkpoint) == contents
    sizes = {path.name: path.stat().st_size for path in checkpoint.glob("*.safetensors")}
    assert sum(sizes.values()) == pytest.approx(per_parameter / 4 * sizes["model.safetensors"], rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(("best", "kept"), [(False, [5]), (True, [4, 5])])
def test_a_stopped_run_keeps_its_last_checkpoint_and_a_best_one_where_there_is_one(
    best: bool, kept: list[int], by_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    if best:
        options |= {"eval_dataset": PAIRS, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    at_step(5, monkeypatch, interrupt)
    finetune(by_name, **options)
    assert sorted(int(path.name.split("-")[1]) for path in Path("out").glob("checkpoint-*")) == kept


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "happens"), [(1, "are seen again"), (4, "are left out")])
def test_resuming_with_another_batch_size_says_what_differs(
    rows: int, happens: str, by_name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        at_step(2, patched, interrupt)
        finetune(by_name)
    finetune(by_name, resume=True, max_steps=3)
    assert "batch_size" not in capsys.readouterr().out
    finetune(by_name, resume=True, max_steps=3, batch_size=rows)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "batch_size" in line]
    assert line.startswith(f"batch_size is {rows} now and was 2: ")
    assert happens in line
    assert line.endswith("batch_size=2 continues exactly")


@pytest.mark.slow
@pytest.mark.parametrize("steps", [8, 9])
def test_resuming_what_was_done_already_takes_no_step_and_says_so(
    steps: int, by_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In mid-epoch, and at the end of an epoch."""
    options = {"save_strategy": "steps", "save_steps": steps, "eval_dataset": PAIRS, "eval_strategy": "no"}
    options |= {"lr_scheduler_type": "constant", "max_steps": steps}
    whole = finetune(by_name, **options)
    assert "nothing was left" not in capsys.readouterr().out
    again = finetune(by_name, resume=True, **options)
    assert f"nothing was left to train: {steps} of {steps} steps were done" in capsys.readouterr().out
    assert again.steps == []
    assert "nothing was trained" in repr(finetune(by_name, resume=True, save_strategy="no", max_steps=steps))
    assert set(again.metrics) == {"eval_loss", "exact_match"}
    assert all(torch.equal(weight, weights(again)[name]) for name, weight in weights(whole).items())


def test_an_interrupt_is_heeded_where_nothing_is_drawn(by_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at_step(2, monkeypatch, interrupt)
    assert len(finetune(by_name, monitor=False).steps) == 2
    assert Path("out/checkpoint-2/manifest.json").is_file()


@pytest.mark.slow
def test_in_a_shell_a_training_that_was_stopped_says_how_to_go_on_and_exits_as_interrupted(
    by_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    steps = ("--max-steps", "3", "--batch-size", "2", "--output", "out")
    train = ["train", by_name, "pairs.jsonl", "--random-weights", *steps]
    with monkeypatch.context() as patched:
        at_step(2, patched, interrupt)
        stopped = CliRunner().invoke(app, train)
    assert stopped.exit_code == 130, stopped.output
    assert "stopped after step 2 of 3: resume=True (--resume) goes on from checkpoint-2" in stopped.stdout
    assert stopped.stderr.endswith(f"stopped early; --resume goes on from {Path('out/checkpoint-2')}\n")
    assert Path("out/model/model.safetensors").is_file()
    assert CliRunner().invoke(app, [*train, "--resume"]).exit_code == 0


def test_a_second_interrupt_and_one_before_the_first_step_break_off(
    by_name: str, watched: Watched, new_threads: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(2, monkeypatch, lambda: (interrupt(), interrupt()))
    with pytest.raises(KeyboardInterrupt):
        finetune(by_name)
    assert watched.ends[-1].state == "stopped"
    assert new_threads() == []
    at_step(1, monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        finetune(by_name)
    assert not list(Path("out").glob("checkpoint-*"))


def test_an_interrupt_in_the_last_step_changes_nothing(
    by_name: str, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(8, monkeypatch, interrupt)
    result = finetune(by_name)
    assert (len(result.steps), result.stopped) == (8, False)
    assert watched.ends[-1].state == "finished"


# -- what a cell leaves behind


def fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def act() -> None:
        raise ZeroDivisionError("in the user's callback")

    at_step(4, monkeypatch, act)


def models() -> set[int]:
    """Identities of the models that are alive."""
    gc.collect()
    return {id(each) for each in gc.get_objects() if isinstance(each, T5ForConditionalGeneration)}


def test_an_error_in_mid_run_releases_everything_though_somebody_keeps_it(
    by_name: str, watched: Watched, new_threads: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = models()
    fails(monkeypatch)
    kept: list[BaseException] = []  # like a notebook, for its debugger
    try:
        finetune(by_name)
    except ZeroDivisionError as error:
        kept.append(error)
    assert len(kept) == 1
    assert watched.ends[-1].state == "failed"
    assert new_threads() == []
    assert models() <= before


@pytest.mark.slow
@pytest.mark.parametrize("with_an_error", [False, True])
def test_a_cell_that_runs_ten_times_ends_with_the_memory_and_the_threads_of_the_first(
    with_an_error: bool, by_name: str, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_an_error:
        fails(monkeypatch)
    after: list[tuple[int, int]] = []
    last: Any = None
    for _ in range(10):
        try:
            last = finetune(by_name)
        except ZeroDivisionError as error:
            last = error
        gc.collect()
        after.append((hardware.process_ram_bytes(), threading.active_count()))
    assert isinstance(last, ZeroDivisionError) is with_an_error
    assert after[-1][1] == after[0][1]
    assert after[-1][0] - after[0][0] < 8 << 20, after
