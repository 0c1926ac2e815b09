"""One call of a Trainer's `train()`: output folder, signals, rollbacks, and engines of other Trainers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any
from weakref import WeakSet

from transformers.integrations.neftune import deactivate_neftune

from offloadkit.checkpoint.folder import check_saving, explained_write_errors
from offloadkit.checkpoint.one_run import has_claimed, one_run
from offloadkit.checkpoint.values import random_states, set_random_states
from offloadkit.distributed import world
from offloadkit.errors import ConfigError, EngineStateError, RolledBackError
from offloadkit.facts.stopping import Stop
from offloadkit.facts.telemetry import STEPS_FILE
from offloadkit.hf.arguments import left_to_the_engine
from offloadkit.hf.callbacks import StopCallback, progress_of, stopped_by
from offloadkit.hf.checkpoints import TrainerCheckpoints
from offloadkit.hf.evaluations import TrainerEvaluations, worker_errors_named
from offloadkit.hf.trained import print_on_rank_0, ranks_of

_trainers: WeakSet[Any] = WeakSet()


class TrainerRun:
    """Runs a Trainer's loop, again after each rollback.

    Attributes:
        stops: the callback that ends this training on request; None outside `train`, because it refers to the Trainer.
        before_the_engine: changes of the arguments that `create_optimizer` undoes.
    """

    def __init__(self, checkpoints: TrainerCheckpoints, evaluations: TrainerEvaluations) -> None:
        self._checkpoints, self._evaluations = checkpoints, evaluations
        self.stops: StopCallback | None = None
        self.before_the_engine = ExitStack()

    def train(
        self, trainer: Any, loop: Callable[..., Any], resume_from: str | bool | None, *args: Any, **kwargs: Any
    ) -> Any:
        _check_rollback(trainer, resumes=bool(resume_from))
        with worker_errors_named(), ExitStack() as opened:
            if trainer.args.save_strategy != "no":
                world.run_on_rank_0("claiming output_dir", partial(_claim, trainer, opened, anew=not resume_from))
            known = trainer.callback_handler.callbacks
            stops = next((each for each in known if isinstance(each, StopCallback)), None)
            interrupts = stops is None
            if stops is None:
                stops = StopCallback(Stop(), trainer.any_flag, **trainer.stopping_options())
                trainer.add_callback(stops)
                opened.callback(trainer.remove_callback, stops)
                stops.stop.catch_signals()
                opened.callback(stops.stop.let_signals_go)
            self.stops = stops
            opened.callback(setattr, self, "stops", None)
            output = self._with_rollbacks(trainer, opened, loop, resume_from, *args, **kwargs)
            if stops.stop_signal is not None:
                raise stopped_by(trainer, stops.stop_signal)
            if stops.stopped and interrupts:
                error = KeyboardInterrupt()
                error.add_note(progress_of(trainer))
                raise error
            return output

    def _with_rollbacks(
        self,
        trainer: Any,
        opened: ExitStack,
        loop: Callable[..., Any],
        resume_from: str | bool | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._checkpoints.newest = None  # a checkpoint of an earlier `train()` does not belong to this run
        states = random_states()
        while True:
            try:
                return self._once(trainer, loop, resume_from, *args, **kwargs)
            except RolledBackError as back:
                print_on_rank_0(trainer, back)
                resume_from = str(back.checkpoint)
            opened.callback(setattr, trainer, "model_init", trainer.model_init)
            trainer.model_init = None  # the engine goes on with this model
            set_random_states(states)  # rows are shuffled by them, as if `train` had been called with that checkpoint

    def _once(
        self, trainer: Any, loop: Callable[..., Any], resume_from: str | bool | None, *args: Any, **kwargs: Any
    ) -> Any:
        if resume_from:
            find = partial(self._checkpoints.find, trainer, resume_from)
            resume_from = world.run_on_rank_0("looking for a checkpoint", find)
        _take_over(trainer)
        given = signature(loop).bind(None, *args, **kwargs).arguments
        self._evaluations.begin_training(given.get("ignore_keys_for_eval"))
        chosen = self._evaluations.filters_losses = trainer.args.logging_nan_inf_filter
        trainer.args.logging_nan_inf_filter = False  # it hides NaN losses and waits for the device in each micro-batch
        try:
            with self.before_the_engine:
                self.before_the_engine.enter_context(left_to_the_engine(trainer.args))
                trainer.is_in_loop = True
                output = loop(resume_from or None, *args, **kwargs)
        except RuntimeError as error:
            ranks_of(trainer).explain(error)
            raise
        finally:
            trainer.is_in_loop = False
            if trainer.engine is not None:
                trainer.engine.own_return = None
            trainer.args.logging_nan_inf_filter = chosen
            _remove_noise(trainer)
        if trainer.engine is not None:
            trainer.engine.synchronize()
        return output

    def check_evaluation_time(self, trainer: Any) -> None:
        """Raise `TrainingStoppedError` if a signal comes during an evaluation in training, at world size 1."""
        stops = self.stops
        if trainer.is_in_loop and trainer.args.world_size == 1 and stops is not None and stops.stop.ends_process:
            signal = stops.stop.signal
            raise stopped_by(trainer, 15 if signal is None else signal[0])


def _check_rollback(trainer: Any, *, resumes: bool) -> None:
    """Raise `ConfigError` if `on_nonfinite="rollback"` and training writes no checkpoint that it can go back to."""
    if trainer.offload.on_nonfinite != "rollback":
        return
    if trainer.args.save_strategy == "no" and trainer.offload.save_minutes is None and not resumes:
        raise ConfigError(
            "on_nonfinite='rollback' goes back to checkpoints, and save_strategy='no' writes none: pass "
            "save_strategy='steps' with save_steps, or OffloadConfig(save_minutes=...)"
        )


def _claim(trainer: Any, claims: ExitStack, *, anew: bool) -> None:
    folder = Path(trainer.args.output_dir)
    if not has_claimed(folder):  # `finetune` claims and checks its own folder
        with explained_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        check_saving(folder)
    claims.enter_context(one_run(folder))
    trainer.telemetry.log_to(folder / STEPS_FILE, anew=anew)  # memory keeps only the newest records


def _take_over(trainer: Any) -> None:
    """Close engines that other Trainers left open on this model, or on another wrapper of its modules: in a notebook
    the cell that makes a Trainer is run again.

    Raises `EngineStateError` if another Trainer is inside `train()` and calls this one from a callback.
    """
    modules = set(trainer.model.modules()) if trainer.model is not None else set()  # `model_init` makes a new model
    for other in list(_trainers):
        if other is trainer or other.engine is None or modules.isdisjoint(other.engine.module.modules()):
            continue
        if other.is_in_loop:
            raise EngineStateError(
                "another Trainer is inside train() on this model, and its optimizer states would be lost: train "
                "when its train() has returned, or train a deepcopy() of the model"
            )
        message = "another Trainer's engine on this model is closed: its optimizer states are gone, the weights stay"
        warnings.warn(message, RuntimeWarning, stacklevel=6)  # the caller of the Trainer's `train`
        other.close()
    _trainers.add(trainer)


def _remove_noise(trainer: Any) -> None:
    """Remove NEFTune's hook also after an interruption: another run would add noise twice."""
    hook = getattr(trainer, "neftune_hook_handle", None)
    if hook is not None and trainer.neftune_noise_alpha is not None:
        untyped: Any = deactivate_neftune
        untyped(trainer.model, hook, trainer.accelerator)
