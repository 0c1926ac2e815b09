"""Evaluations of a Trainer: through the engine, and on resume in the order of an uninterrupted run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from offloadkit.checkpoint.values import random_states, set_random_states
from offloadkit.device.process_memory import VramCap
from offloadkit.engine.checks import is_trained
from offloadkit.errors import OutOfVramError, TrainingStoppedError, WorkerError
from offloadkit.facts.units import parse_bytes
from offloadkit.hf.callbacks import StopCallback, stopped_by
from offloadkit.hf.checkpoints import checkpoint_folder
from offloadkit.hf.frozen_models import frozen_models_of
from offloadkit.hf.load import fill
from offloadkit.hf.sharding import GatheredRows, ShardedBatches
from offloadkit.hf.trained import phase_of

_IS_DUE = "evaluation_is_due"
"""In `run.json`: the checkpoint was written before an evaluation of its step."""


@contextmanager
def worker_errors_named() -> Iterator[None]:
    """Turn torch's error about a killed DataLoader worker, which any operation may raise, into `WorkerError`."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise WorkerError(
            f"{error}. Its process was killed without a message; RAM, or /dev/shm, may have been full. Start fewer "
            "(dataloader_num_workers), or none (0), and the error of a row itself is shown"
        ) from error


class TrainerEvaluations:
    """The evaluations of one Trainer.

    A checkpoint may precede the evaluation of its step: a signal left no time for it, it failed, or it follows the end
    of the epoch. A resumed run then evaluates first.

    Attributes:
        filters_losses: `logging_nan_inf_filter` of the arguments, which is off while the Trainer trains.
    """

    def __init__(self) -> None:
        self.filters_losses = True
        self._newest_step = -1
        self._has_failed = self._is_due = False
        self._ignored_keys: list[str] | None = None

    def begin_training(self, ignored_keys: list[str] | None) -> None:
        self._newest_step, self._has_failed, self._is_due = -1, False, False
        self._ignored_keys = ignored_keys

    def run(self, trainer: Any, trial: Any, stops: StopCallback | None, evaluate: Callable[[], Any]) -> Any:
        """Evaluate. If it fails at world size 1, a checkpoint that is due is written first, and the error says so.

        A GPU that is full after the last step does not end a run, unless the run looks for the best model.
        """
        before = random_states()
        try:
            metrics = evaluate()
            self._newest_step = trainer.state.global_step
            return metrics
        except Exception as error:
            has_ended = trainer.state.global_step >= trainer.state.max_steps
            if isinstance(error, OutOfVramError) and has_ended and trainer.args.metric_for_best_model is None:
                self._has_failed = True
                warnings.warn(f"the last evaluation is incomplete, because {error}", RuntimeWarning, stacklevel=2)
                return {}
            if self._is_checkpoint_due(trainer, trial, stops, error):
                self._has_failed = True
                set_random_states(before)  # a run that goes on evaluates first
                _save_before(error, trainer, trial)
            raise

    def _is_checkpoint_due(self, trainer: Any, trial: Any, stops: StopCallback | None, error: Exception) -> bool:
        ends = isinstance(error, TrainingStoppedError)
        due = trainer.control.should_save or (ends and trainer.args.save_strategy != "no")
        if ends and stops is not None and not stops.has_time_to_save():
            due = False
        engine, step = trainer.engine, trainer.state.global_step
        is_saved = engine is not None and engine.last_checkpoint == checkpoint_folder(trainer, trial).absolute()
        return due and trainer.args.world_size == 1 and step > 0 and not is_saved

    def values(self, trainer: Any, stops: StopCallback | None) -> dict[str, bool]:
        """For `run.json`: whether this checkpoint precedes an evaluation of its step."""
        args, state = trainer.args, trainer.state
        if self._newest_step == state.global_step:
            return {}
        by_epoch = args.eval_strategy == "epoch" and args.eval_delay <= (state.epoch or 0)
        ends_epoch = float(state.epoch or 0).is_integer() or state.global_step >= state.max_steps
        skipped = stops is not None and stops.evaluation_skipped
        return {_IS_DUE: True} if self._has_failed or skipped or (by_epoch and ends_epoch) else {}

    def load(self, values: dict[str, Any]) -> None:
        self._is_due = bool(values.get(_IS_DUE))

    def catch_up(self, trainer: Any) -> None:
        """Run the evaluation that a resumed checkpoint precedes."""
        if not self._is_due or trainer.args.eval_strategy == "no":
            return
        metrics = trainer._evaluate(None, self._ignored_keys)
        self._is_due = False
        newest = None if trainer.engine is None else trainer.engine.last_checkpoint
        if trainer._determine_best_metric(metrics=metrics, trial=None) and newest is not None:
            trainer.state.best_model_checkpoint = str(newest)

    @contextmanager
    def through_the_engine(self, trainer: Any, dataloader: Any) -> Iterator[None]:
        """A context for the Trainer's loop over evaluated rows. Before training, the model is moved to the device.

        If the weights exceed half of the VRAM budget, or the Trainer calls frozen models too, the engine is built and
        places them. A model trained by another
        Trainer's engine stays in place.
        """
        args, model = trainer.args, trainer.model
        weights = sum(parameter.nbytes for parameter in model.parameters())
        vram = None if trainer.offload.vram is None else parse_bytes(trainer.offload.vram)
        is_placed = trainer.engine is not None or is_trained(model)
        if not is_placed and (frozen_models_of(trainer) or (vram is not None and 2 * weights > vram)):
            trainer.create_optimizer()
            is_placed = True
        with ExitStack() as opened:
            if trainer.is_in_loop:
                opened.callback(setattr, args, "logging_nan_inf_filter", args.logging_nan_inf_filter)
                args.logging_nan_inf_filter = self.filters_losses
            if not is_placed:
                opened.callback(VramCap(vram, args.device).remove)
                fill(model, args.device)
            opened.enter_context(phase_of(trainer, "evaluation"))
            opened.enter_context(worker_errors_named())
            if trainer.engine is not None and args.world_size > 1:
                trainer.engine.synchronize()  # ranks may use different weights while generating
            if isinstance(getattr(dataloader, "batch_sampler", None), ShardedBatches):
                whole = trainer.gather_function == trainer.accelerator.gather
                trainer.gather_function = GatheredRows(trainer.accelerator, args.eval_batch_size, whole)
            yield


def _save_before(error: Exception, trainer: Any, trial: Any) -> None:
    try:
        trainer._save_checkpoint(trainer.model, trial)
        if isinstance(error, TrainingStoppedError):  # its message names the newest checkpoint
            error.args = stopped_by(trainer, error.signal).args
        else:
            error.add_note(f"The checkpoint of step {trainer.state.global_step} was written before this was raised.")
    except Exception as lost:
        error.add_note(f"The checkpoint that was due could not be written: {lost}")
