"""HuggingFace's Trainer on an `OffloadEngine`: `class Mine(OffloadTrainerMixin, AnyTrainer)` replaces `AnyTrainer`.

The Trainer keeps its loop, data, logs and files. Forward, `accelerator.backward`, `optimizer.step` and clipping go
through the engine. accelerate never prepares the model.

**Options.** `TrainingArguments` set learning rate, betas, eps, weight decay, clipping, accumulation, recomputation,
bf16 and fp16. `OffloadConfig` sets the rest.

**Loss.** Each micro-batch's mean loss is weighted by its share of the targets of the whole accumulated batch on all
ranks, whether or not the model's forward knows `num_items_in_batch`.

**Several ranks.** All ranks must take part when new weights arrive. A callback that uses weights on one rank alone, for
example to generate, must first call `trainer.engine.synchronize()` on all ranks, or it waits until the timeout.

**OOM.** The engine moves to a plan with less VRAM and repeats the accumulated batch (`window.py`), or the micro-batch
of an evaluation.

**NaN.** With `on_nonfinite="rollback"`, `train` starts again from the newest checkpoint of this run, with the same
engine and row order. Callbacks see `on_train_begin` again, and `steps.jsonl` has the repeated steps twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import has_length

from offloadkit.checkpoint.values import as_json
from offloadkit.distributed import world
from offloadkit.engine.checks import check_not_wrapped
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ConfigError, DataError, cut, shown
from offloadkit.facts.config import OffloadConfig
from offloadkit.facts.telemetry import Telemetry
from offloadkit.hf import packing
from offloadkit.hf.arguments import check_arguments, check_optim, engine_config
from offloadkit.hf.checkpoints import TrainerCheckpoints, check_best_model, missing_weights, report_ignored_scaler
from offloadkit.hf.evaluations import TrainerEvaluations
from offloadkit.hf.frozen_models import FrozenModels
from offloadkit.hf.hub import readable_push_errors
from offloadkit.hf.longest import evaluation_rows
from offloadkit.hf.loss import shifts_labels, targets_in
from offloadkit.hf.masks import PaddingCollator
from offloadkit.hf.ragged import OrderOfSeed, ResumableOrder, by_length
from offloadkit.hf.resumed import follow_own_schedule, other_length, warn_of_later_pass
from offloadkit.hf.saving import arguments_as_data
from offloadkit.hf.sharding import Counted, ShardedBatches, shard_batches
from offloadkit.hf.streams import EndlessRows
from offloadkit.hf.tracking import memory_and_speed
from offloadkit.hf.trained import WrappedModel, called_through_engine, phase_of, ranks_of, trained_module
from offloadkit.hf.trainer_plan import TrainerPlan
from offloadkit.hf.trainer_run import TrainerRun
from offloadkit.hf.widths import TrainerWidths
from offloadkit.hf.window import TrainingWindow
from offloadkit.planner import Plan

if TYPE_CHECKING:
    from torch import nn

_Base: Any = object

_GROUP_KEYS = ("params", "lr", "betas", "eps", "weight_decay")


class OffloadTrainerMixin(_Base):  # type: ignore[misc]
    """Puts an `OffloadEngine` under a Trainer class; list it first: `class Mine(OffloadTrainerMixin, SFTTrainer)`.

    Takes every argument of the Trainer, `offload` (an `OffloadConfig`), `telemetry` (a record of each step) and `plan`
    (see `OffloadEngine`). Without a `plan`, one is made for the longest rows and printed, or after the first update if
    the longest rows cannot be known. A scheduler in `optimizers=(None, scheduler)` sets the engine's learning rates.

    The engine is built when training starts; until then `engine` is None. It stays for further `train()` calls.
    `close()` frees its memory, and so does another Trainer's `train()` on the same model, with a warning.

    Raises:
        ConfigError: the engine does not support the arguments (another optimizer, FSDP, ...), or they contradict
            `offload`.
        ModelError: the model is compiled, or wrapped for distributed training.
    """

    engine: OffloadEngine | None = None
    is_in_loop = False
    order_of_seed = False
    """Sort rows by length with `OrderOfSeed` instead of HuggingFace's sampler."""
    saves_model = False
    """The model is saved into the output folder after training, so the disk must have room for it."""
    data_collator: Any
    model_init: Any
    gather_function: Any
    _tr_loss: Any
    _prepare_by_accelerate: Any
    optimizer: Any
    model_wrapped: Any

    def __init__(
        self,
        *args: Any,
        offload: OffloadConfig | None = None,
        telemetry: Telemetry | None = None,
        plan: Plan | None = None,
        **kwargs: Any,
    ) -> None:
        self.offload = offload or OffloadConfig()
        self.telemetry = telemetry or Telemetry()
        self._plan = TrainerPlan(plan)
        self.widths = TrainerWidths()
        self._window = TrainingWindow()
        self._dealt: ShardedBatches | None = None
        self._step_at_end_of_stream: int | None = None
        self._checkpoints = TrainerCheckpoints()
        self._evaluations = TrainerEvaluations()
        self._run = TrainerRun(self._checkpoints, self._evaluations)
        self.frozen_models = FrozenModels()
        given = kwargs.get("model", args[0] if args else None)
        if isinstance(given, torch.nn.Module):
            check_not_wrapped(given)  # transformers' messages for some of them are less clear
        super().__init__(*args, **kwargs)
        if self.model is not None:
            check_not_wrapped(self.model)
        if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            raise ConfigError(
                "offloadkit steps with its own optimizers, chosen by `optim`, and takes no optimizer. Leave "
                "`optimizers` and `optimizer_cls_and_kwargs` out. Set learning_rate, adam_beta1, adam_beta2, "
                "adam_epsilon and weight_decay in TrainingArguments. optimizers=(None, scheduler) may bring a scheduler"
            )
        self._own_scheduler = self.lr_scheduler

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments and route `accelerator.backward` to the engine.

        This is the first method that every Trainer's constructor calls; subclasses call it too.
        """
        check_arguments(self.args)
        engine_config(self.offload, self.args)
        if self.args.ddp_timeout != TrainingArguments.ddp_timeout:
            world.join(self.args.ddp_timeout)  # transformers does not pass the timeout to a CPU process group
        chosen = self.args.mixed_precision
        if self.args.fp16:
            self.args.mixed_precision = "no"  # else accelerate scales the loss itself
        try:
            super().create_accelerator_and_postprocess()
        finally:
            self.args.mixed_precision = chosen
        self.accelerator.backward = _weak(self._backward)
        self._prepare_by_accelerate = self.accelerator.prepare_model
        self.accelerator.prepare_model = _weak(self._prepare_model)
        if self.args.dataloader_pin_memory:  # else each batch's copy waits for all work queued on the GPU
            self.accelerator.dataloader_config.non_blocking = True

    # -- building the engine

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: the engine decides where weights live."""

    def _prepare_model(self, model: Any, *args: Any, evaluation_mode: bool = False, **kwargs: Any) -> Any:
        """Leaves a frozen model (a reference, teacher or reward model) to the engine."""
        if evaluation_mode and isinstance(model, torch.nn.Module) and model is not self.model:
            return self.frozen_models.prepare(model)
        return self._prepare_by_accelerate(model, *args, evaluation_mode=evaluation_mode, **kwargs)

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's log-probabilities of the reference before training, through the engine; the constructor calls it."""
        was_built, optimizer = self.engine is not None, self.optimizer
        if not was_built:
            self.create_optimizer()
        try:
            with phase_of(self, "evaluation"):
                return super()._precompute_ref_logps(*args, **kwargs)
        finally:
            if not was_built:
                self.optimizer = optimizer

    def get_optimizer_cls_and_kwargs(self, args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        """A torch AdamW that is never stepped, also for Lion: `create_optimizer` reads its parameter groups.

        Raises:
            ConfigError: the engine does not have the optimizer `optim`.
        """
        check_optim(args)
        chosen, args.optim = args.optim, "adamw_torch"
        try:
            _, theirs = super().get_optimizer_cls_and_kwargs(args, model)
        finally:
            args.optim = chosen
        groups = {key: theirs[key] for key in ("params", "model", "optimizer_dict") if key in theirs}
        betas = (args.adam_beta1, args.adam_beta2)
        return torch.optim.AdamW, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, **groups}

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the engine with the Trainer class's parameter groups; returns the engine's optimizer.

        Raises:
            ConfigError: the class does not make a plain torch.optim.AdamW.
            ModelError: the model cannot be trained.
        """
        self._run.before_the_engine.close()
        module = trained_module(self)
        if self.engine is not None and self.engine.module is not module:
            self.close()
        if self.engine is None:
            self.optimizer = None
            groups = _groups_of(super().create_optimizer(), type(self))
            self.optimizer = None
            config = engine_config(self.offload, self.args)
            plan = self._plan.make(self, config)
            self._checkpoints.check_room_by_plan(self, plan)
            self.engine = OffloadEngine(
                module,
                config,
                param_groups=groups,
                device=self.args.device,
                telemetry=self.telemetry,
                plan=plan,
                evaluation_rows=evaluation_rows(self),
            )
            self._plan.awaits_first_update = self.engine.is_beginning
        if self.is_in_loop:
            checkpoints = self._checkpoints
            self.engine.own_return = lambda: checkpoints.newest
        optimizer: Any = self.engine.optimizer
        # accelerate leaves a prepared optimizer alone; its own wrapper would copy all states to the GPU.
        optimizer._is_accelerate_prepared = True
        optimizer.step_was_skipped = False
        optimizer.repeat_window = _weak(self._repeat_window)
        self.optimizer = optimizer
        return self.engine.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The scheduler of the arguments on the engine's optimizer, or the one given to the constructor.

        Raises:
            DataError: the ranks differ in their rows or in the number of rows or steps.
        """
        _check_alike(self, num_training_steps)
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if scheduler is self._own_scheduler:
            _apply_schedule(scheduler, self.engine)
        if self.args.save_strategy != "no":
            as_json(scheduler.state_dict(), "the scheduler's state")  # refuse before training what cannot be saved
        if self.engine is not None:
            self._checkpoints.check_room(self, num_training_steps)
        return scheduler

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """The model as the loop calls it.

        Since it is not `self.model`, the Trainer skips `accelerator.prepare` and `prepare_model`, which would move,
        cast and copy weights.
        """
        return WrappedModel(self.model, self.engine)

    # -- one accumulated batch

    def get_train_dataloader(self) -> Any:
        """Like the Trainer's, padded to few widths; each batch says, while it is on the CPU, what its attention mask
        masks.

        With several ranks it also has its number of targets, except in a user's stream, which only rank 0 reads.
        """
        own, is_shared = self.data_collator, self.args.world_size > 1
        if is_endless := isinstance(self.train_dataset, EndlessRows):
            self.accelerator.dataloader_config.dispatch_batches = False
        if is_endless or not (is_shared and isinstance(self.train_dataset, IterableDataset)):
            self.data_collator = PaddingCollator(self.widths.collator(self), shifts_labels(self.model))
            if is_shared:
                count = partial(targets_in, shifted=shifts_labels(self.model))
                self.data_collator = Counted(self.data_collator, count)
        try:
            loader = super().get_train_dataloader()
        finally:
            self.data_collator = own
        self._dealt = shard_batches(loader)
        return loader

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Like the Trainer's, padded to the widths of training. Rows are dealt to ranks without repeating any."""
        return self._for_evaluation(super().get_eval_dataloader, *args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Like `get_eval_dataloader`."""
        return self._for_evaluation(super().get_test_dataloader, *args, **kwargs)

    def _for_evaluation(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.widths.used(self):
            loader = make(*args, **kwargs)
        if not self.args.dataloader_drop_last:
            shard_batches(loader)
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Like the Trainer's, but an order by length can be resumed. The dataloader has no public hook for it.

        Length-sorted windows hold the same number of updates on any number of ranks.
        """
        rows = self.train_dataset if train_dataset is None else train_dataset
        known = by_length(rows, self.args.train_batch_size * self.args.gradient_accumulation_steps, self.args)
        sampler = super()._get_train_sampler(train_dataset) if known is None else known
        self._checkpoints.order = None
        if isinstance(sampler, LengthGroupedSampler):
            sampler.batch_size *= self.args.world_size
            if self.order_of_seed:
                return OrderOfSeed(sampler, self.args)
            sampler = self._checkpoints.order = ResumableOrder(sampler)
        return sampler

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        known = by_length(eval_dataset, self.args.eval_batch_size, self.args)
        return super()._get_eval_sampler(eval_dataset) if known is None else known

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The micro-batches of the next update; counts their targets, and drops the gradients of an unfinished update.

        Empty if the resumed checkpoint is of the last step, in mid-epoch: the loop would take one step more.

        Raises:
            DataError: a whole pass over a stream holds no update, or no row.
        """
        if 0 < self.state.max_steps <= self.state.global_step:
            self.control.should_training_stop = True
            if self._run.stops is not None:
                self._run.stops.was_complete = True
            return [], None
        self._plan.report(self)
        try:
            samples = super().get_batch_samples(epoch_iterator, num_batches, device)
        except ValueError as error:  # accelerate's
            if has_length(self.train_dataset) or "does not contain any data" not in str(error):
                raise
            raise DataError(
                "a pass over the stream of rows gave no row: it is empty, or can be read only once. Its __iter__ must "
                "begin again at the first row"
            ) from error
        if 0 < len(samples[0]) < num_batches and not has_length(self.train_dataset):
            if self._step_at_end_of_stream == self.state.global_step:
                raise DataError(
                    f"the stream of rows ends after {len(samples[0])} micro-batches, and an update needs {num_batches} "
                    "(gradient_accumulation_steps), so no update would ever be done: reduce it, or give more rows"
                )
            self._step_at_end_of_stream = self.state.global_step
        at_the_end = self.accelerator.gradient_state.end_of_dataloader
        filler = bool(samples[0]) and at_the_end and self._dealt is not None and self._dealt.ends_with_filler
        for loss in self._window.begin(self, samples[0], num_batches, ends_with_filler=filler):
            self._tr_loss -= loss
        return samples

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one micro-batch; returns its part of the loss (see `TrainingWindow.train`).

        Raises:
            OutOfVramError: the GPU is full, and no plan needs less memory.
        """
        loss = self._window.train(self, inputs, partial(super().training_step, model))
        if self.accelerator.sync_gradients and self.lr_scheduler is self._own_scheduler:
            _apply_schedule(self.lr_scheduler, self.engine)
        return loss

    def _repeat_window(self) -> None:
        self._window.repeat(self, partial(super().training_step, self.model_wrapped))

    def _backward(self, loss: torch.Tensor, **_: Any) -> None:
        self._window.backward(self, loss)

    # -- the update

    def _clip_grad_norm(self, model: Any) -> None:
        """Does nothing: the engine clips inside its step."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Does nothing: reading the norm in each step would wait for the device. `log` adds it."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Like the Trainer's, with the gradient norm; for trackers such as wandb also memory, speed and slowdown.

        Raises:
            DataError: the loss is NaN or Inf although the gradients are finite.
        """
        if self.engine is not None and "loss" in logs and "learning_rate" in logs:
            self._tr_loss.zero_()  # the Trainer subtracts the sum from itself, which would keep a NaN
            if (grad_norm := self.engine.grad_norm()) is not None:
                logs["grad_norm"] = grad_norm
            if self.args.report_to:
                logs.update(memory_and_speed(self.telemetry))
            if not isfinite(logs["loss"]) and self.offload.on_nonfinite != "skip":
                _explain_loss(self, logs["loss"])
        super().log(logs, *args, **kwargs)

    # -- checkpoints: the Trainer's folder, with data files instead of pickles

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Like the Trainer's, but in pieces. Called before `create_optimizer`."""
        self._checkpoints.load_weights(self, Path(resume_from_checkpoint), model, super()._load_from_checkpoint)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Like the Trainer's, but a tied weight is not missing if the file has its other name."""
        missing = missing_weights(self, load_result.missing_keys)
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _load_best_model(self) -> None:
        """Like the Trainer's, after checking the files.

        Raises:
            ModelError: the weights differ from those that were saved. The model keeps the newest weights.
        """
        check_best_model(self)
        super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the files of `_save_optimizer_and_scheduler`, or of transformers' own Trainer.

        The user's scheduler continues from the rates of its own optimizer.
        """
        if checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        theirs = super()._load_optimizer_and_scheduler
        values = self._checkpoints.load_states(self, Path(checkpoint), theirs)
        self._evaluations.load(values)
        self.widths.compare(self, values)
        packing.compare(self, values)
        if other_length(Path(checkpoint), self.state.max_steps):
            follow_own_schedule(self.lr_scheduler)
        if self.lr_scheduler is self._own_scheduler:
            groups = self.lr_scheduler.optimizer.param_groups
            for group, rate in zip(groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Loads nothing, because the engine has its own loss scale; says so if transformers' Trainer wrote a file."""
        if checkpoint is not None:
            report_ignored_scaler(self, Path(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._checkpoints.load_random(self, None if checkpoint is None else Path(checkpoint)):
            self._evaluations.catch_up(self)
        else:
            super()._load_rng_state(checkpoint)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Like the Trainer's, but older checkpoints are deleted when this one is complete."""
        self._checkpoints.save(self, trial, partial(super()._save_checkpoint, model, trial))

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Like the Trainer's. In a checkpoint all ranks call it, and wait until rank 0 has made the folder."""
        with self._checkpoints.saving_model(self):
            super().save_model(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Like the Trainer's, with the arguments as JSON instead of the pickle `training_args.bin`.

        transformers 5.23 calls it on all ranks, older versions on the one that writes.
        """
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            self._checkpoints.save_weights(self, folder, partial(super()._save, output_dir, state_dict))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        values = self._evaluations.values(self, self._run.stops) | self.widths.to_dict()
        values |= packing.record(self.train_dataset)
        self._checkpoints.save_states(self, Path(output_dir), **values)

    def _save_rng_state(self, output_dir: str) -> None:
        self._checkpoints.save_random(self, Path(output_dir))

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Like the Trainer's, with clearer errors. The constructor calls it for `push_to_hub`."""
        with readable_push_errors():
            super().init_hf_repo(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self.is_world_process_zero():
            return
        with arguments_as_data(Path(self.args.output_dir), self):
            super()._push_from_checkpoint(checkpoint_folder)

    # -- evaluation

    def _evaluate(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """Like the Trainer's; if evaluation fails at world size 1, a checkpoint that is due is written first."""
        evaluate = partial(super()._evaluate, trial, *args, **kwargs)
        return self._evaluations.run(self, trial, self._run.stops, evaluate)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Like the Trainer's, through the engine. Before any training, the model is first moved to the device."""
        with self._evaluations.through_the_engine(self, dataloader):
            return super().evaluation_loop(dataloader, *args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Like the Trainer's. After an OOM the engine moves to a plan with less VRAM and repeats the micro-batch."""
        self._run.check_evaluation_time(self)
        run = partial(super().prediction_step, *args, **kwargs)
        with called_through_engine(self):
            return run() if self.engine is None else self.engine.run_eval(run, together=True)

    # -- around the loop

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Like the Trainer's; returns when the last update is done.

        Raises:
            ModelError: `resume_from_checkpoint` is incomplete or broken.
            ConfigError: `resume_from_checkpoint=True` and no checkpoint is complete (a broken checkpoint falls back to
                the one before); or `offload.on_nonfinite="rollback"` and no checkpoint will be written.
            NonFiniteGradientError: NaN or Inf gradients, unless `offload.on_nonfinite` is "skip". With "rollback":
                there is no checkpoint yet, or they come back after each rollback.
            EngineStateError: another Trainer is inside `train()` on this model.
            RankError: another rank has died or failed.
            TrainingStoppedError: SIGTERM or SIGHUP. The step was finished, and saved if there was time.
            KeyboardInterrupt: Ctrl-C. The step was finished and saved; a second Ctrl-C interrupts it.
            OutputError: another run writes into `args.output_dir`, or it cannot be made.
        """
        return self._run.train(self, super().train, resume_from_checkpoint, *args, **kwargs)

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Like the Trainer's, without its warning that a share such as `logging_steps=0.05` differs from the
        checkpoint's steps. On resume the checkpoint's steps hold. Warns if a stream goes on at other rows.
        """
        names = [f"{kind}_steps" for kind in ("logging", "eval", "save")]
        shares = {name: share for name in names if 0 < (share := getattr(self.args, name) or 0) < 1}
        given = signature(super()._init_training_state).bind(max_steps, *args, **kwargs).arguments
        try:
            for name in shares if given.get("resume_from_checkpoint") else ():
                setattr(self.args, name, None)
            found = super()._init_training_state(max_steps, *args, **kwargs)
            if given.get("resume_from_checkpoint") and not has_length(self.train_dataset):
                warn_of_later_pass(self)
            for each in (*self.callback_handler.callbacks, self.control):
                if isinstance(each, ExportableState):  # transformers looks for all of them when it saves
                    self.state.stateful_callbacks.setdefault(type(each).__name__, each.state())
            return found
        finally:
            for name, share in shares.items():
                setattr(self.args, name, share)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Like the Trainer's; the loss since the last log is averaged over ranks, like logged losses."""
        self._evaluations.catch_up(self)  # if no epoch was left
        if self.args.world_size > 1:
            self._tr_loss = self.accelerator.reduce(self._tr_loss, "mean")
        return super()._finalize_training(*args, **kwargs)

    # -- for code around the Trainer

    def any_rank(self, yes: bool) -> bool:
        """Whether `yes` is true on any rank. Every rank must call it, while the engine is open."""
        return bool(ranks_of(self).agree(np.array([int(yes)])).any())

    def any_flag(self, flags: int) -> int:
        """Bitwise-or over ranks of an int64. Every rank must call it."""
        return int(np.bitwise_or.reduce(ranks_of(self).agree(np.array([flags]))[:, 0]))

    def stopping_options(self) -> dict[str, Any]:
        """The options of `StopCallback` that this Trainer knows."""
        checkpoints = self._checkpoints
        return {
            "grace_seconds": self.offload.grace_seconds,
            "save_minutes": self.offload.save_minutes,
            "save_seconds": lambda: checkpoints.save_seconds,
            "resumes_weights": True,
        }

    def close(self) -> None:
        """Finish and close the engine; the model keeps its trained weights. A later `train()` builds a new engine."""
        if self.engine is not None:
            engine, self.engine, self.optimizer, self.model_wrapped = self.engine, None, None, self.model
            engine.close()


def _groups_of(theirs: torch.optim.Optimizer, trainer_class: type) -> list[dict[str, Any]]:
    if type(theirs) is not torch.optim.AdamW or theirs.defaults["amsgrad"] or theirs.defaults["maximize"]:
        raise ConfigError(
            f"{trainer_class.__name__}.create_optimizer makes {type(theirs).__name__}; offloadkit steps with "
            "its own optimizers and can take over the groups of a plain torch.optim.AdamW only"
        )
    return [{key: group[key] for key in _GROUP_KEYS} for group in theirs.param_groups if group["params"]]


def _apply_schedule(scheduler: Any, engine: OffloadEngine | None) -> None:
    assert engine is not None
    scheduler.optimizer._opt_called = True  # otherwise torch warns that its own optimizer never steps
    rates, groups = scheduler.get_last_lr(), engine.optimizer.param_groups
    if len(rates) not in (1, len(groups)):
        raise ConfigError(
            f"the scheduler sets {len(rates)} learning rates and the model has {len(groups)} parameter groups: "
            "build it over an optimizer with one group, or with as many groups"
        )
    for index, group in enumerate(groups):
        group["lr"] = float(rates[min(index, len(rates) - 1)])


def _check_alike(trainer: Any, num_steps: int) -> None:
    """Raise `DataError` if ranks have different data: they would wait for each other at the end of an epoch."""
    rows = trainer.train_dataset
    num_rows = len(rows) if has_length(rows) else -1
    own = np.array([num_rows, trainer._train_batch_size, num_steps])
    told = ranks_of(trainer).agree(own).tolist()
    if any(each != told[0] for each in told):
        listed = "; ".join(f"rank {rank}: {', '.join(map(str, each))}" for rank, each in enumerate(told))
        raise DataError(
            f"the ranks have other training data or arguments (rows, rows in a micro-batch, steps: {listed}): give "
            "all ranks all rows and the same arguments; the rows are dealt to them"
        )


def _explain_loss(trainer: Any, loss: float) -> None:
    """Raise `DataError`, unless all steps with a non-finite loss were skipped because fp16 overflowed."""
    trainer.engine.synchronize()
    found = any(not record.skipped and not isfinite(record.loss) for record in trainer.telemetry.records)
    if trainer.any_rank(found):
        raise DataError(
            f"the training loss is {loss} up to step {trainer.state.global_step} though the gradients are finite: "
            "some batch has no target (all its labels are -100). Check the labels, and that inputs are not cut "
            "before the targets begin"
        )


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` without a reference to its trainer, so that a dropped Trainer frees the model at once, like
    transformers'.
    """
    kept = WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        found = kept()
        assert found is not None, "the trainer's own objects call it"
        return found(*args, **kwargs)

    return call


class OffloadTrainer(OffloadTrainerMixin, Trainer):
    """`transformers.Trainer` with the optimizer in host RAM."""


class OffloadSeq2SeqTrainer(OffloadTrainerMixin, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` with the optimizer in host RAM."""

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """Like the Seq2SeqTrainer's. Raises `ConfigError` if the config cannot be read."""
        try:
            return Seq2SeqTrainer.load_generation_config(gen_config_arg)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"generation_config={shown(gen_config_arg)} cannot be used: {cut(str(error))}") from error
