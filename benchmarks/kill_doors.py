"""Small trainings through each door, which `kills.py` starts, kills and resumes.

Each resumes from the contents of its folder and reports its progress: "began 6", "step 7", "saved 9". They run in
processes forked from one that has imported everything; `command` starts a fresh process.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)
from transformers import trainer as transformers_trainer

from benchmarks.killed_ranks import engine_for, micro_batch, newest_step
from offloadkit import Monitor, OffloadSeq2SeqTrainer, finetune
from offloadkit.checkpoint.folder import MANIFEST
from offloadkit.distributed import world
from offloadkit.doors import cli
from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts.config import OffloadConfig

NUM_STEPS, SAVE_STEPS, EVAL_STEPS = 24, 3, 4
MICRO_BATCHES = 6
"""Micro-batches of all ranks in a step of the loop."""
_NUM_ROWS, _HIDDEN = 24, 256
_SHAPE = {"vocab_size": 384, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}


@dataclass(frozen=True)
class Work:
    """Settings of a training.

    Attributes:
        folder: the output folder.
        inputs: folder with the model's config and rows for doors that read files; see `write_inputs`.
        by_epoch: save and evaluate after each epoch of 12 steps, and let the loop save into one folder repeatedly;
            otherwise save every `SAVE_STEPS` steps into a folder for each step, and evaluate every `EVAL_STEPS`.
        draws: whether the loop's rows depend on the random state, which additional ranks do not have.
        resumes: whether to resume from the folder's contents.
        overwrites: whether `finetune` and the command line replace the folder's contents, as after a killed first save.
        pause: seconds after each step.
        report: called with each report.
        acts: called with a description at the end of each step and in each evaluation step.
    """

    folder: Path
    inputs: Path
    by_epoch: bool = False
    draws: bool = True
    resumes: bool = True
    overwrites: bool = False
    pause: float = 0.0
    report: Callable[[str], object] = lambda text: None
    acts: Callable[[str], object] = lambda where: None

    @property
    def has_checkpoint(self) -> bool:
        return self.resumes and newest_step(self.folder) > 0

    @property
    def replaces(self) -> bool:
        return self.overwrites or (self.resumes and not self.has_checkpoint and any(self.folder.glob("checkpoint-*")))


def write_inputs(folder: Path) -> None:
    """Write a model's config and rows."""
    T5Config(
        **_SHAPE, dropout_rate=0.1, decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"]
    ).save_pretrained(folder / "model")
    rows = [{"input": f"{number}+{number}", "target": str(2 * number)} for number in range(_NUM_ROWS)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


class Reports(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Reports a Trainer's progress on rank 0."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def _report(self, text: str) -> None:
        if world.rank() == 0:
            self._work.report(text)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._report(f"began {state.global_step}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._report(f"step {state.global_step}")
        self._work.acts("at a step's end")
        time.sleep(self._work.pause)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._work.acts("in an evaluation")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._report(f"saved {state.global_step}")


# -- the doors


def _engine(num_ranks: int) -> OffloadEngine:
    return engine_for(num_ranks, MICRO_BATCHES, _HIDDEN, torch.device("cpu"))


def loop(work: Work) -> None:
    """A bare loop on one or several ranks. A monitor handles signals."""
    world.join()
    rank, size = world.rank(), world.size()
    alone, report = size == 1, work.report if rank == 0 else lambda text: None
    with _engine(size) as engine, Monitor(engine.plan, engine.telemetry, display="none") as monitor:
        schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda done: 1 / (1 + done))
        step = load(engine, work, schedule)
        report(f"began {step}")
        while step < NUM_STEPS:
            for at in range(rank, MICRO_BATCHES, size):
                batch = micro_batch(MICRO_BATCHES * step + at)
                if work.draws:
                    batch += torch.rand(batch.shape) / 8
                engine.backward(engine(batch))
                engine.step()
            schedule.step()
            step += 1
            stops = torch.tensor([int(monitor.stop_requested)])
            if not alone:
                dist.all_reduce(stops)
            report(f"step {step}")
            work.acts("at a step's end")
            time.sleep(work.pause)
            if step % SAVE_STEPS == 0 or stops:
                name = "checkpoint" if work.by_epoch else f"checkpoint-{step}"
                engine.save_checkpoint(work.folder / name, scheduler=schedule, position=step)
                report(f"saved {step}")
                for old in work.folder.glob("checkpoint-*") if rank == 0 else ():
                    if int(old.name.removeprefix("checkpoint-")) <= step - 2 * SAVE_STEPS:
                        shutil.rmtree(old, ignore_errors=True)
            if stops:
                said = f"{step} of {NUM_STEPS} steps were done; the newest checkpoint is {engine.last_checkpoint}\n"
                print(said, end="")  # in one write: ranks share the log
                sys.exit(128 + (monitor.stop.signal[0] if monitor.stop.signal else 0))


def load(engine: OffloadEngine, work: Work, schedule: Any = None) -> int:
    """Resume from the loop's checkpoint; returns the number of completed steps."""
    where = work.folder / ("checkpoint" if work.by_epoch else f"checkpoint-{newest_step(work.folder)}")
    beside = [where, *(where.with_name(f".{where.name}-{what}") for what in ("new", "old"))]  # a save may be half done
    if not work.resumes or not any((each / MANIFEST).is_file() for each in beside):
        return 0
    return int(engine.load_checkpoint(where, scheduler=schedule))


def rewritten(work: Work) -> None:
    """Save the last checkpoint of several ranks again as one rank."""
    with _engine(1) as engine:
        schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda done: 1 / (1 + done))
        load(engine, work, schedule)
        assert engine.last_checkpoint is not None
        engine.save_checkpoint(engine.last_checkpoint, scheduler=schedule, position=NUM_STEPS)


def trainer(work: Work) -> None:
    """The Trainer on one or several ranks."""
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**_SHAPE, dropout_rate=0.1, decoder_start_token_id=0))
    rows = [{"input_ids": torch.randint(2, 40, (6,)), "labels": torch.randint(2, 40, (4,))} for _ in range(_NUM_ROWS)]
    args = Seq2SeqTrainingArguments(
        output_dir=str(work.folder), report_to="none", disable_tqdm=True, **_arguments(work)
    )
    made = OffloadSeq2SeqTrainer(
        model=model, args=args, train_dataset=rows, eval_dataset=rows[:6], callbacks=[Reports(work)],
        offload=OffloadConfig(exchange="micro_batch"),
    )  # fmt: skip
    made.train(resume_from_checkpoint=True if work.has_checkpoint else None)
    made.close()


def _arguments(work: Work) -> dict[str, Any]:
    often: dict[str, Any] = {"save_strategy": "epoch", "eval_strategy": "epoch"}
    if not work.by_epoch:
        often = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": SAVE_STEPS, "eval_steps": EVAL_STEPS}
    more = {"max_steps": NUM_STEPS, "save_total_limit": 2, "per_device_train_batch_size": 2 // world.size(), "seed": 1}
    return {**often, **more, "use_cpu": True, "logging_steps": 5, "per_device_eval_batch_size": 1}


def tuned(work: Work) -> None:
    arguments = _arguments(work)
    arguments["batch_size"] = arguments.pop("per_device_train_batch_size")
    result = finetune(
        work.inputs / "model", str(work.inputs / "rows.jsonl"), eval_dataset=0.25, tokenizer="byte", init="random",
        output_dir=work.folder, monitor=False, callbacks=[Reports(work)], resume=work.has_checkpoint,
        overwrite=work.replaces, learning_rate=1e-3, **arguments,
    )  # fmt: skip
    if result.stopped:
        sys.exit(128 + signal.SIGINT)


def command(work: Work, num_ranks: int = 1) -> list[str]:
    """The arguments of the command line."""
    arguments = _arguments(work)
    for name in ("max_steps", "per_device_train_batch_size", "seed"):
        arguments.pop(name)
    given = [str(work.inputs / "model"), str(work.inputs / "rows.jsonl"), "--eval-dataset=0.25", "--tokenizer=byte"]
    given += ["--random-weights", f"--output={work.folder}", f"--max-steps={NUM_STEPS}", "--seed=1"]
    given += [f"--batch-size={2 // num_ranks}", "--learning-rate=1e-3"]
    given += [f"--set={name}={json.dumps(value)}" for name, value in arguments.items()]
    given += [f"--num-gpus={num_ranks}"] if num_ranks > 1 else []
    given += ["--resume"] if work.has_checkpoint else []
    return ["train", *given, *(["--overwrite"] if work.replaces else [])]


def commanded(work: Work) -> None:
    transformers_trainer.DEFAULT_CALLBACKS.append(Reports(work))
    cli.app(command(work))


DOORS: dict[str, Callable[[Work], None]] = {
    "loop": loop,
    "trainer": trainer,
    "finetune": tuned,
    "cli": commanded,
    "rewritten": rewritten,
}
