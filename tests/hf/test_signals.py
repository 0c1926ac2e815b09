"""SIGTERM, SIGHUP and Ctrl-C: the step is finished and saved, and a resumed run equals an uninterrupted one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import offloadkit
from offloadkit import OffloadConfig, OffloadSeq2SeqTrainer
from offloadkit.errors import TrainingStoppedError
from offloadkit.facts.stopping import SIGNALS
from tests.hf.training import arguments, seq2seq_rows, t5

ROOT = Path(__file__).parent.parent.parent
PAIRS = [{"input": f"{number}+1", "target": str(number + 1)} for number in range(8)]
TERM, HUP, INT = signal.SIGTERM, signal.SIGHUP, signal.SIGINT


class Sends(TrainerCallback):
    """Sends this process a signal in step 2 or 4, or in an evaluation after step 2."""

    def __init__(self, number: int, *, at: str = "step") -> None:
        self._number, self._at = number, at

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == {"step": 1, "epoch": 3}.get(self._at):
            os.kill(os.getpid(), self._number)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._at == "evaluation" and state.global_step == 2:
            self._at = ""
            os.kill(os.getpid(), self._number)


@pytest.fixture(autouse=True)
def _signals_are_as_before() -> Iterator[None]:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


def trainer(folder: Path, *callbacks: TrainerCallback, offload: Any = None, **options: Any) -> OffloadSeq2SeqTrainer:
    defaults = {"save_strategy": "steps", "save_steps": 1000, "max_steps": 4, "per_device_train_batch_size": 2}
    args = arguments(folder, **(defaults | options))
    return OffloadSeq2SeqTrainer(
        model=t5(dropout=0.1), args=args, train_dataset=seq2seq_rows(), eval_dataset=seq2seq_rows(), offload=offload,
        callbacks=list(callbacks),
    )  # fmt: skip


def weights(one: OffloadSeq2SeqTrainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in one.model.state_dict().items()}


@pytest.mark.parametrize(("number", "error"), [(TERM, TrainingStoppedError), (INT, KeyboardInterrupt)])
def test_a_trainer_finishes_and_saves_the_step_and_the_resumed_run_is_the_whole_one(
    tmp_path: Path, number: int, error: type[BaseException]
) -> None:
    whole = trainer(tmp_path / "whole")
    whole.train()
    stopped = trainer(tmp_path / "run", Sends(number))
    with pytest.raises(error) as raised:
        stopped.train()
    said = "".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert f"2 of 4 steps were done; the newest checkpoint is {tmp_path / 'run' / 'checkpoint-2'}" in said
    if isinstance(raised.value, TrainingStoppedError):
        assert raised.value.signal == number
    stopped.close()
    resumed = trainer(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert all(torch.equal(weight, weights(whole)[name]) for name, weight in weights(resumed).items())


def test_an_evaluation_is_broken_off_after_the_step_before_it_is_saved(tmp_path: Path) -> None:
    stopped = trainer(
        tmp_path, Sends(TERM, at="evaluation"), eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=2
    )
    with pytest.raises(TrainingStoppedError, match=r"2 of 4 steps were done; the newest checkpoint is .*checkpoint-2:"):
        stopped.train()
    assert (tmp_path / "checkpoint-2" / "manifest.json").is_file()
    assert not any("eval_loss" in log for log in stopped.state.log_history)


def test_the_first_step_is_saved_too(tmp_path: Path) -> None:
    class SendsAfterIt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            os.kill(os.getpid(), INT)

    with pytest.raises(KeyboardInterrupt) as raised:
        trainer(tmp_path, SendsAfterIt()).train()
    assert f"1 of 4 steps were done; the newest checkpoint is {tmp_path / 'checkpoint-1'}" in raised.value.__notes__[0]


def evaluations(one: OffloadSeq2SeqTrainer) -> dict[int, float]:
    logs = [log for log in one.state.log_history if "eval_loss" in log]
    assert len({log["step"] for log in logs}) == len(logs)  # no step twice
    return {log["step"]: log["eval_loss"] for log in logs}


@pytest.mark.parametrize(
    ("at", "options"),
    [
        pytest.param("step", {"eval_strategy": "steps", "eval_steps": 2}, marks=pytest.mark.slow),
        ("evaluation", {"eval_strategy": "steps", "eval_steps": 2}),
        ("epoch", {"eval_strategy": "epoch"}),
        pytest.param("saved", {"eval_strategy": "epoch", "save_steps": 4}, marks=pytest.mark.slow),
        ("saved", {"eval_strategy": "epoch", "save_steps": 6}),
    ],
)
def test_an_evaluation_that_a_checkpoint_comes_before_is_made_first_when_the_run_goes_on(
    tmp_path: Path, at: str, options: dict[str, Any]
) -> None:
    options |= {"max_steps": 6, "per_device_eval_batch_size": 2, "load_best_model_at_end": False}
    whole = trainer(tmp_path / "whole", **options)
    whole.train()
    folder = tmp_path / "run"
    if at == "saved":  # as if killed before the evaluation
        step = options["save_steps"]
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    else:
        with pytest.raises(TrainingStoppedError):
            trainer(folder, Sends(TERM, at=at), **options).train()
    resumed = trainer(folder, **options)
    resumed.train(resume_from_checkpoint=True)
    assert all(torch.equal(weight, weights(whole)[name]) for name, weight in weights(resumed).items())
    assert evaluations(resumed) == evaluations(whole)
    assert resumed.state.global_step == 6


@pytest.mark.slow
def test_the_best_model_may_be_that_of_an_evaluation_that_was_left_out(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "save_steps": 2, "eval_steps": 2}
    options |= {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "learning_rate": 1e-2,
    }
    whole = trainer(tmp_path / "whole", **options)
    whole.train()
    with pytest.raises(TrainingStoppedError):
        trainer(tmp_path / "run", Sends(TERM), **options).train()
    resumed = trainer(tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint=True)
    assert whole.state.best_global_step == resumed.state.best_global_step == 2
    assert all(torch.equal(weight, weights(whole)[name]) for name, weight in weights(resumed).items())


def test_a_run_that_has_nothing_left_evaluates_and_saves_nothing_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": 6}
    whole = trainer(tmp_path, **options)
    whole.train()
    before = (tmp_path / "checkpoint-6" / "manifest.json").stat().st_mtime_ns
    resumed = trainer(tmp_path, **options)
    resumed.train(resume_from_checkpoint=True)
    assert evaluations(resumed) == evaluations(whole)
    assert (tmp_path / "checkpoint-6" / "manifest.json").stat().st_mtime_ns == before


def test_no_save_is_begun_that_takes_longer_than_the_grace(tmp_path: Path) -> None:
    stopped = trainer(tmp_path, Sends(TERM), offload=OffloadConfig(grace_seconds=1.0), save_steps=1)
    save_model = stopped.save_model

    def slow(*args: Any, **kwargs: Any) -> None:
        save_model(*args, **kwargs)
        time.sleep(1.1)

    stopped.save_model = slow  # type: ignore[method-assign]
    with pytest.raises(TrainingStoppedError, match=r"the newest checkpoint is .*checkpoint-1"):
        stopped.train()
    assert not (tmp_path / "checkpoint-2").exists()


@pytest.mark.slow
def test_finetune_raises_and_resumes_to_the_same_weights(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokenizer": "byte", "batch_size": 2, "use_cpu": True, "max_steps": 4}

    def model() -> Any:
        from transformers import T5Config, T5ForConditionalGeneration

        from tests.hf.tiny import t5_config

        torch.manual_seed(0)
        return T5ForConditionalGeneration(T5Config(**t5_config().to_dict()))

    whole = offloadkit.finetune(model(), PAIRS, output_dir=tmp_path / "whole", **options).model.state_dict()
    with pytest.raises(TrainingStoppedError, match="checkpoint-2"):
        offloadkit.finetune(model(), PAIRS, output_dir=tmp_path / "run", callbacks=[Sends(HUP)], **options)
    resumed = offloadkit.finetune(model(), PAIRS, output_dir=tmp_path / "run", resume=True, **options)
    assert all(torch.equal(weight, whole[name]) for name, weight in resumed.model.state_dict().items())


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        run = trainer(tmp_path, Sends(HUP))
        run.train()
        assert run.state.global_step == 4
    finally:
        signal.signal(HUP, before)


def test_an_earlier_handler_is_called_too(tmp_path: Path) -> None:
    called: list[int] = []
    before = signal.signal(TERM, lambda number, frame: called.append(number))
    try:
        with pytest.raises(TrainingStoppedError):
            trainer(tmp_path, Sends(TERM)).train()
        assert called == [TERM]
    finally:
        signal.signal(TERM, before)


def test_off_the_main_thread_nothing_is_installed_and_a_line_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = trainer(tmp_path)
    thread = threading.Thread(target=run.train)
    thread.start()
    thread.join()
    assert run.state.global_step == 4
    assert "not run on the main thread" in capfd.readouterr().err


def test_a_save_comes_after_so_many_minutes(tmp_path: Path) -> None:
    trainer(tmp_path, offload=OffloadConfig(save_minutes=1e-9)).train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{step}" for step in (1, 2, 3, 4)}


SECOND = """
import os, signal
from offloadkit.facts.stopping import Stop
stop = Stop()
stop.catch_signals()
assert not stop.requested  # the loop heeds it
os.kill(os.getpid(), signal.SIGTERM)
assert stop.requested and stop.ends_process
print("first", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("never")
"""


def test_a_second_signal_leaves_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", SECOND], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == "first\n"


RANKS = """
import os, signal, sys, threading, time
from pathlib import Path
import offloadkit
from transformers import T5Config, T5ForConditionalGeneration
from tests.hf.tiny import t5_config

folder = Path(sys.argv[1])
def send():
    while not any(folder.glob("checkpoint-*/manifest.json")):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=send, daemon=True).start()
rows = [{"input": f"{n}+1", "target": str(n + 1)} for n in range(8)]
try:
    offloadkit.finetune(
        T5ForConditionalGeneration(T5Config(**t5_config().to_dict())), rows, tokenizer="byte", batch_size=1,
        max_steps=3000, save_strategy="steps", save_steps=2, save_total_limit=2, num_gpus=2, use_cpu=True,
        output_dir=folder, monitor=False,
    )
except offloadkit.errors.TrainingStoppedError as error:
    print("stopped:", error.signal, error, flush=True)
"""


@pytest.mark.slow(20)
def test_two_ranks_agree_on_the_step_that_they_save(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", RANKS, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, env=environment,
        timeout=240, check=False,
    )  # fmt: skip
    assert "stopped: 15 SIGTERM has ended training" in done.stdout, done.stdout + done.stderr
