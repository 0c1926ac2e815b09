"""One training, as often as it is tried: by its plan, and once more by a leaner one where the GPU's memory was full."""

from __future__ import annotations

import gc
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offloadkit import hardware
from offloadkit.config import OffloadConfig
from offloadkit.errors import OutOfVramError
from offloadkit.hf.data import PreparedData, with_decoder_inputs
from offloadkit.hf.models import Task, build_model, load_model
from offloadkit.hf.weight_files import Materialise
from offloadkit.monitor import Monitor
from offloadkit.offload.layers import flat_layers
from offloadkit.offload.shortage import leaner_budget
from offloadkit.plan import Plan, format_bytes
from offloadkit.plan.text import format_seconds
from offloadkit.planning import check_fits, plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Seq2SeqTrainingArguments

    from offloadkit.hf.stop_point import StopPoint
    from offloadkit.hf.trainer import OffloadSeq2SeqTrainer

_RESUME = "resume=True (--resume)"
_ONCE_MORE = ", or pass retry_leaner=True, which goes on from the last finished step by a leaner plan, once"


@dataclass(frozen=True)
class TrainingRun:
    """What every attempt at a training has in common."""

    model: Any
    init: str
    args: Seq2SeqTrainingArguments
    offload: OffloadConfig
    lengths: dict[str, Any]
    tokenizer: Any
    data: PreparedData
    evaluation: PreparedData | None
    monitor: Monitor
    """Watches every attempt, from its first step on; its `telemetry` holds what all of them recorded."""

    def train(
        self, sizes: Plan, checkpoint: Path | None, *, retry_leaner: bool
    ) -> tuple[OffloadSeq2SeqTrainer, Plan, dict[str, float]]:
        """A trainer that has trained, the plan that it did so by, and its metrics.

        Raises:
            OutOfVramError: the GPU's memory is full, and a leaner plan was not wished, is not there, or was not enough.
        """
        with ExitStack() as opened:
            opened.push(self.monitor)  # ends it; it begins when the weights are in place
            return self._attempts(sizes, checkpoint, retry_leaner=retry_leaner)

    def _attempts(
        self, sizes: Plan, checkpoint: Path | None, *, retry_leaner: bool
    ) -> tuple[OffloadSeq2SeqTrainer, Plan, dict[str, float]]:
        from offloadkit.hf.progress import AsksTheMonitor
        from offloadkit.hf.stop_point import StopPoint

        full = tried = ""
        if retry_leaner and self.args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.args.device)  # `leaner_budget` reads this run's
        while True:
            model, materialise = self._load(checkpoint, _loading_device(sizes, self.args))
            if full:
                sizes, tried = self._leaner(model, sizes, full, checkpoint)
            elif sizes.layers != tuple(layer.shape() for layer in flat_layers(model, self.offload)):
                # The rows made it another model: one with a head of as many classes as they have.
                sizes = checked_plan(model, self.args, self.offload, self.lengths)
            trainer, stop_point = self._trainer(model, materialise, sizes), StopPoint()
            trainer.add_callback(stop_point)
            trainer.add_callback(asks := AsksTheMonitor(self.monitor))
            self.monitor.plan = sizes
            with closing(asks), ExitStack() as opened:
                opened.enter_context(closing(trainer))
                try:
                    output = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
                    self._end(trainer, stopped=asks.stopped)
                    opened.pop_all()
                    return trainer, sizes, self._metrics(trainer, output)
                except OutOfVramError as error:
                    if full or not retry_leaner:
                        raise OutOfVramError(f"{error}{tried or _ONCE_MORE}") from error
                    full = str(error)
                # Only here, where the error is gone and holds no activations any more, the GPU has room again.
                checkpoint = self._to_go_on_from(trainer, stop_point, checkpoint)
            del trainer, model, materialise
            gc.collect()

    def _metrics(self, trainer: Any, output: Any) -> dict[str, float]:
        """Of this attempt. (transformers 5.17 divides its loss by the steps before a checkpoint too.)"""
        num_steps = trainer.state.global_step - self.monitor.steps_before
        if num_steps == 0:
            return {}
        mean_loss = trainer._total_loss_scalar / num_steps
        return {"train_loss": mean_loss, "train_seconds": output.metrics["train_runtime"]}

    def _end(self, trainer: OffloadSeq2SeqTrainer, *, stopped: bool) -> None:
        """The monitor's last view; and where to go on from a training that was stopped."""
        self.monitor.close("stopped" if stopped else "finished")
        if stopped:
            done, checkpoint = trainer.state.global_step, f"checkpoint-{trainer.state.global_step}"
            print(f"stopped after step {done} of {trainer.state.max_steps}: {_RESUME} goes on from {checkpoint}")
        elif trainer.state.global_step == self.monitor.steps_before:
            of = f"{trainer.state.global_step} steps were done and {trainer.state.max_steps} are wanted"
            print(f"nothing was left to train: {of}; more epochs or max_steps train on")

    def _to_go_on_from(self, trainer: Any, stop_point: StopPoint, began_from: Path | None) -> Path | None:
        """A checkpoint of the last finished step; None: from the beginning."""
        again = began_from is not None or isinstance(self.model, str | os.PathLike)
        if again and not stop_point.any_step_finished(trainer):
            return began_from
        self.args.ignore_data_skip = False  # the batches that are left, not those of the epoch's beginning
        return stop_point.save(trainer)  # of a model that was handed over, the engine has changed the weights already

    def _leaner(self, model: Any, sizes: Plan, full: str, checkpoint: Path | None) -> tuple[Plan, str]:
        """A plan with less in VRAM than `sizes`, which was too much as `full` says; and what that tries, in words."""
        budget = leaner_budget(sizes, self.args.device)
        leaner = _plan(model, self.args, replace(self.offload, vram=budget), self.lengths)
        resume = "" if checkpoint is None else f"; {_RESUME} goes on from {checkpoint}"
        before, after = (made.total_bytes("vram") for made in (sizes, leaner))
        if not leaner.fits or after >= before:
            why = "it would take as much" if leaner.fits else leaner.explain().splitlines()[0]
            raise OutOfVramError(
                f"{full}. retry_leaner found no plan for {format_bytes(budget)} of VRAM that changes no number: "
                f"{why}{resume}"
            )
        warnings.warn(f"{full}. Training goes on by a leaner plan", RuntimeWarning, stacklevel=5)
        print(leaner, flush=True)
        sizes_tried = f"the first was planned with {format_bytes(before)} of VRAM, this one with {format_bytes(after)}"
        return leaner, f". This was the second attempt: {sizes_tried}{resume}"

    def _trainer(self, model: PreTrainedModel, materialise: Materialise | None, sizes: Plan) -> OffloadSeq2SeqTrainer:
        from offloadkit.hf.progress import show_progress
        from offloadkit.hf.trainer import OffloadSeq2SeqTrainer

        smooths = self.args.label_smoothing_factor and self.data.task == "seq2seq"
        trainer = OffloadSeq2SeqTrainer(
            model=model,
            materialise=materialise,
            plan=sizes,
            args=self.args,
            offload=self.offload,
            telemetry=self.monitor.telemetry,
            train_dataset=self.data.dataset,
            eval_dataset=None if self.evaluation is None else self.evaluation.dataset,
            data_collator=with_decoder_inputs(self.data.collator, model) if smooths else self.data.collator,
            processing_class=self.tokenizer,
        )
        show_progress(trainer, monitored=self.monitor.is_drawn)
        return trainer

    def _load(self, checkpoint: Path | None, device: torch.device) -> tuple[PreTrainedModel, Materialise | None]:
        """The model, and what reads or draws its weights once the engine has a place for them: those of `checkpoint`
        where there is one. A model that was handed over comes back on `device`, as it is."""
        from transformers import set_seed

        set_seed(self.args.seed)
        task, id2label = self.data.task, self.data.id2label
        if not isinstance(self.model, str | os.PathLike):
            return load_model(self.model, task=task, id2label=id2label, device=device), None
        if checkpoint is not None:
            return build_model(checkpoint, task=task, init="pretrained", id2label=id2label)
        return build_model(self.model, task=task, init=self.init, id2label=id2label)


def _plan(
    model: str | os.PathLike[str] | PreTrainedModel,
    args: Seq2SeqTrainingArguments,
    offload: OffloadConfig,
    lengths: dict[str, Any],
) -> Plan:
    from offloadkit.hf.training_arguments import engine_config

    batch_size = args.per_device_train_batch_size
    return plan(model, batch_size=batch_size, **lengths, offload=engine_config(offload, args), device=args.device)


def checked_plan(model: Any, args: Seq2SeqTrainingArguments, offload: OffloadConfig, lengths: dict[str, Any]) -> Plan:
    """The plan, printed; raises `DoesNotFitError` where it does not fit."""
    sizes = _plan(model, args, offload, lengths)
    print(sizes, flush=True)
    check_fits(sizes)
    return sizes


def longest_row(*prepared: PreparedData | None) -> dict[str, Any]:
    """The lengths to plan for once the rows are tokenised: no batch is longer."""
    some = [data for data in prepared if data is not None]
    lengths = {name: max(getattr(data, name) for data in some) for name in ("longest_input", "longest_target")}
    return {"max_input_length": lengths["longest_input"], "max_target_length": lengths["longest_target"]}


def plan_for_rows(
    model: Any,
    args: Seq2SeqTrainingArguments,
    offload: OffloadConfig,
    lengths: dict[str, Any],
    *,
    assumed: Plan | None,
    task: Task,
) -> Plan:
    """The plan for rows of known `lengths`. They may be longer than was assumed: rows that came as tokens are not cut.

    Args:
        assumed: the plan that was shown before; then one line says what is otherwise now.
        task: what the rows teach.

    Raises:
        DoesNotFitError: it does not fit.
    """
    if assumed is None:
        return checked_plan(model, args, offload, lengths)
    sizes = _plan(model, args, offload, lengths)
    if sizes == assumed:
        return assumed
    target = f" + {lengths['max_target_length']}" if task == "seq2seq" else ""
    takes = [f"{format_seconds(sizes.seconds.step)} a step"] if sizes.seconds else []
    tiers = {"ram": "RAM"} if sizes.on_cpu else {"vram": "VRAM", "ram": "RAM"}
    takes += [f"{format_bytes(sizes.needs()[tier])} of {name}" for tier, name in tiers.items()]
    print(
        f"planned again, the longest row has {lengths['max_input_length']}{target} tokens: {', '.join(takes)}",
        flush=True,
    )
    check_fits(sizes)
    return sizes


def _loading_device(sizes: Plan, args: Seq2SeqTrainingArguments) -> torch.device:
    """Where a model that was handed over waits for the engine: on the GPU where it, fp32 at most, fits beside what the
    plan puts there; else in RAM, from where the engine takes its weights one by one."""
    free = hardware.vram_bytes(args.device)[0]
    fits = 4 * sizes.num_parameters + sizes.total_bytes("vram") < 0.9 * free
    return args.device if fits else torch.device("cpu")


@contextmanager
def errors_hold_nothing() -> Iterator[None]:
    """Clear the frames of an error that passes, and of those behind it: a notebook remembers its last error, and with
    its frames the weights and activations that they hold. (A debugger finds no local variables in them afterwards.)"""
    outside = sys.exception()
    try:
        yield
    except BaseException as error:
        behind: list[BaseException | None] = [error]
        seen = [None, outside]
        while behind:
            each = behind.pop()
            if each not in seen and each is not None:
                seen.append(each)
                traceback.clear_frames(each.__traceback__)
                behind += [each.__cause__, each.__context__]
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise
