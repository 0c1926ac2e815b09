"""HuggingFace's Trainer with the engine inside: `class Mine(OffloadTrainerMixin, AnyTrainer)` replaces `AnyTrainer`.

The Trainer keeps its loop, its data, its logs and its files. Four things go through the engine instead: the forward of
the wrapped model, `accelerator.backward`, `optimizer.step`, and clipping. accelerate never prepares the model.

**Whose value holds.** `TrainingArguments` set learning rate, betas, eps, weight decay (with the Trainer's groups that
do not decay), clipping, accumulation, recomputation, bf16 and fp16. `OffloadConfig` sets the rest. A field that was
changed from its default and contradicts the arguments raises `ConfigError`.

**Loss.** Each micro-batch's mean loss is weighted by its share of the targets of the whole accumulated batch. This
holds for every model, whether or not its forward knows `num_items_in_batch`. Over a large vocabulary the loss is taken
in chunks (`loss.py`): the logits exist whole only where somebody reads them.

**Rows of several lengths.** With `train_sampling_strategy="group_by_length"` they come in HuggingFace's order; an epoch
that is resumed goes on in the same one (`ragged.py`).

**Several ranks.** `torchrun` or `accelerate launch` starts them; micro-batches are dealt to them (`dealing.py`), and a
loss is weighted by the targets of all ranks. Rank 0 prints and writes; each rank writes its part of the states. New
weights come to a rank together with the other ranks. So a callback that uses weights on one rank alone, to generate
say, first calls `trainer.engine.synchronize()` on all ranks, or it waits for them until the timeout.

**A full GPU.** The engine moves to a leaner plan, and the accumulated batch is repeated (`Window`), or the
micro-batch of an evaluation (`OffloadEngine.evaluates`).

**NaN.** With `on_nonfinite="rollback"`, `train` begins again from the newest checkpoint of this run, with the engine
and the output folder that it has. Rows come in the same order again, and a line is printed. Callbacks see another
`on_train_begin`; `steps.jsonl` has the steps that were repeated twice.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from inspect import signature
from math import ceil, isfinite
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, WeakSet

import numpy as np
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset
from transformers import PreTrainedConfig, Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.integrations.neftune import deactivate_neftune
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from offloadkit.checkpoint.folder import (
    MANIFEST,
    check_readable,
    check_room,
    check_saving,
    free_bytes,
    lost_with_runtime,
    newest_checkpoint,
    rotate_checkpoints,
    set_aside,
    write_manifest,
    written_to,
)
from offloadkit.checkpoint.one_run import has_claimed, one_run
from offloadkit.checkpoint.origin import Origin
from offloadkit.checkpoint.run import read_random, write_random
from offloadkit.checkpoint.values import as_json, random_states, set_random_states
from offloadkit.checkpoint.weights import num_bytes_of
from offloadkit.device.process_memory import VramCap, phase
from offloadkit.distributed import world
from offloadkit.distributed.ranks import SOLO, Ranks
from offloadkit.engine.checks import check_not_wrapped, is_trained
from offloadkit.engine.engine import OffloadEngine
from offloadkit.engine.outline import chooses, plan_for, proposing_disk
from offloadkit.engine.replanner import Window
from offloadkit.errors import (
    ConfigError,
    DataError,
    EngineStateError,
    ModelError,
    RepeatWindowError,
    RolledBackError,
    TrainingStoppedError,
    WorkerError,
    cut,
    shown,
)
from offloadkit.facts.config import OffloadConfig
from offloadkit.facts.files import path_of
from offloadkit.facts.stopping import Stop
from offloadkit.facts.telemetry import STEPS_FILE, Telemetry
from offloadkit.facts.units import parse_bytes
from offloadkit.hf.arguments import check_arguments, check_optim, engine_config, left_to_the_engine
from offloadkit.hf.callbacks import StopsWhenAsked
from offloadkit.hf.dealing import TARGETS, Counted, DealtBatches, GatheredRows, deal, without_targets
from offloadkit.hf.hub import readable_push_errors
from offloadkit.hf.load import fill
from offloadkit.hf.longest import NotReadableError, evaluation_rows, is_standard, longest_batch
from offloadkit.hf.loss import num_targets, on_device, shifts_labels, targets_in, with_a_target
from offloadkit.hf.losses import WithLosses, called_through, losses_of
from offloadkit.hf.masks import Noted, answering, without_note
from offloadkit.hf.ragged import OrderOfSeed, ResumableOrder
from offloadkit.hf.resumed import check_same_model, check_trainer_state
from offloadkit.hf.saving import arguments_as_data, load_in_pieces, read_later, saved_in_pieces
from offloadkit.offload.unread import is_unread, make_real
from offloadkit.planner import Plan
from offloadkit.planner.plan import check_fits

if TYPE_CHECKING:
    from torch import nn

_Base: Any = object
"""Stands in for the Trainer class that follows the mixin."""


@contextmanager
def _workers_named() -> Iterator[None]:
    """A context in which a process that prepares batches may be killed: torch raises that wherever it is noticed.

    Raises:
        WorkerError: it was.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise WorkerError(
            f"{error}. Whoever killed it says no more; RAM, or /dev/shm, may have been full. Start fewer "
            "(dataloader_num_workers), or none (0), and the error of a row itself is shown"
        ) from error


_trainers: WeakSet[OffloadTrainerMixin] = WeakSet()
"""Those that have begun to train."""
_BEGINS = "the first update runs with little in VRAM, and training is planned for its micro-batches"
_BEGINS_ON_CPU = "the budget is checked for the micro-batches of the first update, after it"
_NOT_TRACED = (
    "the longest rows do not run on the meta device, so activations cannot be planned: weights and states are planned "
    "alone, and on a GPU training begins with little in VRAM"
)
_EVALUATION_IS_DUE = "evaluation_is_due"
"""In `run.json`: the checkpoint was written before an evaluation of its step."""
_GROUP_KEYS = ("params", "lr", "betas", "eps", "weight_decay")


class OffloadTrainerMixin(_Base):  # type: ignore[misc]
    """Puts an `OffloadEngine` under a Trainer class; goes before it: `class Mine(OffloadTrainerMixin, SFTTrainer)`.

    Takes every argument of the Trainer, `offload` (an `OffloadConfig`) and `telemetry` (a record of each step). `plan`
    is that of `OffloadEngine`. A model of `offloadkit.from_pretrained` is read when training or evaluation begins.
    Without a `plan`, where a GPU or a budget gives something to choose, one is made for the longest rows (see
    `longest.py`) and printed. If these cannot be known, it is made after the first update, for its micro-batches. A
    scheduler in `optimizers=(None, scheduler)` sets the engine's learning rates. The engine is built when training
    starts; until then `engine` is None. It stays for further `train()` calls; `close()` frees its memory. So does
    another Trainer's `train()` on the same model, with a warning.

    Raises:
        ConfigError: the engine cannot work with the arguments (another optimizer, FSDP, ...), or they contradict
            `offload`.
        ModelError: the model is compiled, or wrapped for distributed training.
    """

    engine: OffloadEngine | None = None
    order_of_seed = False
    """Whether rows by length come in the order of `OrderOfSeed`, not in HuggingFace's."""
    saves_model = False
    """Whether the model is saved into the output folder after training, which must have room for it."""
    data_collator: Any
    model_init: Any
    gather_function: Any
    _tr_loss: Any

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
        self._plan = plan
        self._window_targets: torch.Tensor | int = 0
        self._num_micro_batches = 1
        self._target_share: torch.Tensor | float | None = None
        self._filters_losses = True
        self._save_seconds = 0.0
        self._stops: StopsWhenAsked | None = None
        self._evaluated_at = -1
        self._evaluation_failed = self._evaluation_is_due = False
        self._ignored_keys: list[str] | None = None
        self._returns_to: Path | None = None
        self._window_losses: list[torch.Tensor] = []
        self._unfinished = self._begins = self._is_saving = self._is_in_loop = False
        self._unplanned = ""
        self._dealt: DealtBatches | None = None
        self._window = Window()
        self._order: ResumableOrder | None = None
        self._with_losses: WithLosses | None = None
        self._before_the_engine = ExitStack()
        given = kwargs.get("model", args[0] if args else None)
        if isinstance(given, torch.nn.Module):
            check_not_wrapped(given)  # transformers would refuse some of them in its own words
        super().__init__(*args, **kwargs)
        if self.model is not None:
            check_not_wrapped(self.model)
        if self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            raise ConfigError(
                "offloadkit steps with optimizers of its own, chosen by `optim`, and takes no optimizer. Leave "
                "`optimizers` and `optimizer_cls_and_kwargs` out. Set learning_rate, adam_beta1, adam_beta2, "
                "adam_epsilon and weight_decay in TrainingArguments. optimizers=(None, scheduler) may bring a scheduler"
            )
        self._own_scheduler = self.lr_scheduler

    def create_accelerator_and_postprocess(self) -> None:
        """Check the arguments before anything is built, and route `accelerator.backward` to the engine.

        This is the first method that every Trainer's constructor calls; subclasses call it too.
        """
        check_arguments(self.args)
        engine_config(self.offload, self.args)
        if self.args.ddp_timeout != TrainingArguments.ddp_timeout:
            world.join(self.args.ddp_timeout)  # transformers does not tell it to a group of processes on the CPU
        chosen = self.args.mixed_precision
        if self.args.fp16:
            self.args.mixed_precision = "no"  # else accelerate scales the loss itself
        try:
            super().create_accelerator_and_postprocess()
        finally:
            self.args.mixed_precision = chosen
        self.accelerator.backward = _weak(self._backward)
        if self.args.dataloader_pin_memory:  # else each batch's copy waits for all work queued on the GPU
            self.accelerator.dataloader_config.non_blocking = True

    # -- building the engine

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: the engine decides where weights live. (A private method of the Trainer.)"""

    def get_optimizer_cls_and_kwargs(self, args: TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        """A torch AdamW that is never stepped, also for Lion: `create_optimizer` reads its parameter groups.

        Raises:
            ConfigError: `optim` names an optimizer that the engine does not have.
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

    def _module(self) -> nn.Module:
        """What is trained: the model, with its losses where the Trainer class keeps them beside it."""
        losses = losses_of(self)
        if not losses:
            return self.model  # type: ignore[no-any-return]
        kept = self._with_losses
        if kept is None or kept.model is not self.model or dict(kept.losses.items()) != losses:
            self._with_losses = kept = WithLosses(self.model, losses)
        return kept

    def _through_losses(self) -> AbstractContextManager[None]:
        """A context in which such losses are called through the engine."""
        if not losses_of(self):
            return nullcontext()
        return called_through(self, _WrappedModel(self._module(), self.engine))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the engine over the parameter groups that the Trainer class makes; returns the engine's optimizer.

        Raises:
            ConfigError: the class does not make a plain torch.optim.AdamW, whose groups are taken over.
            ModelError: the model cannot be trained.
        """
        self._before_the_engine.close()
        if self.engine is not None and self.engine.module is not self._module():
            self.close()
        if self.engine is None:
            self.optimizer = None
            groups = super().create_optimizer()
            self.optimizer = None
            if type(groups) is not torch.optim.AdamW or groups.defaults["amsgrad"] or groups.defaults["maximize"]:
                raise ConfigError(
                    f"{type(self).__name__}.create_optimizer makes {type(groups).__name__}; offloadkit steps with "
                    "optimizers of its own and can take over the groups of a plain torch.optim.AdamW only"
                )
            some = [group for group in groups.param_groups if group["params"]]
            config = engine_config(self.offload, self.args)
            self.engine = OffloadEngine(
                self._module(),
                config,
                param_groups=[{key: group[key] for key in _GROUP_KEYS} for group in some],
                device=self.args.device,
                telemetry=self.telemetry,
                plan=self._plan or self._plan_for_rows(config),
                evaluation_rows=evaluation_rows(self),
            )
            self._begins = self.engine.is_beginning
        if self._is_in_loop:
            self.engine.own_return = self._own_return
        optimizer: Any = self.engine.optimizer
        # accelerate leaves a prepared optimizer alone; its own wrapper would copy all states to the GPU.
        optimizer._is_accelerate_prepared = True
        optimizer.step_was_skipped = False
        optimizer.repeat_window = _weak(self._repeat_wrapped)
        self.optimizer = optimizer
        return self.engine.optimizer

    def _plan_for_rows(self, config: OffloadConfig) -> Plan | None:
        """The plan for the longest rows, printed; None where nothing is to be chosen, or they cannot be read.

        What is printed then is for training: see `_say_how_it_is_planned`.

        Raises:
            DoesNotFitError: the plan does not fit.
        """
        if not chooses(config, self.args.device):
            return None
        try:
            batch, said = longest_batch(self)
        except NotReadableError as error:
            self._unplanned = f"the longest rows are not known before training ({error})"
            return None
        rows: dict[str, Any] = {"rows_option": "per_device_train_batch_size", "evaluation_rows": evaluation_rows(self)}
        plan = plan_for(self.model, config, self.args.device, batch, **rows)
        if plan is None:
            self._unplanned = _NOT_TRACED
            return None
        check_fits(proposing_disk(plan))
        self._say(f"{plan}\n  ({said})" if said else plan)
        return plan

    def _say(self, text: object) -> None:
        """Print it, on rank 0."""
        if self.is_world_process_zero():
            print(text, flush=True)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """The scheduler of the arguments on the engine's optimizer, or the one given to the constructor.

        Raises:
            DataError: the ranks have other rows, or take other numbers of them or of steps.
        """
        self._check_alike(num_training_steps)
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if scheduler is self._own_scheduler:
            self._apply_own_schedule()
        if self.args.save_strategy != "no" and not self.args.save_only_model:
            as_json(scheduler.state_dict(), "the scheduler's state")  # what cannot be saved is refused before training
        if self.engine is not None:
            self._check_room(num_training_steps)
        return scheduler

    def _check_room(self, num_steps: int) -> None:
        """Check before training that the disk has room for two checkpoints, while one replaces another, and the model.

        Where it has none for all checkpoints that will be there, a line says so. Others say so where one alone is
        kept, and where all are lost with the runtime.

        Raises:
            OutputError: it has not.
        """
        strategy = str(getattr(self.args.save_strategy, "value", self.args.save_strategy))
        num_saves = {"no": 0, "epoch": ceil(self.args.num_train_epochs), "best": 1}.get(strategy)
        if num_saves is None:
            every = self.args.save_steps if self.args.save_steps >= 1 else ceil(num_steps * self.args.save_steps)
            num_saves = num_steps // max(1, int(every))
        num_bytes, model = self._checkpoint_bytes()
        output, limit = Path(self.args.output_dir), self.args.save_total_limit
        with self._together("checking the disk"):
            if not self.args.should_save:
                return
            rest = model if self.saves_model else 0
            least = min(num_saves, 2)
            what = ["the model", "a checkpoint", "two checkpoints"][least] + " and the model" * (rest > 0 and least > 0)
            check_room(output, least * num_bytes + rest, what)
            if (least or rest) and (lost := lost_with_runtime(output)) is not None:
                self._say(lost)
            if limit == 1 and num_saves > 1:
                self._say(
                    "save_total_limit=1 keeps the newest checkpoint alone: if that one is broken, there is none before "
                    "it to go back to. save_total_limit=2 keeps two"
                )
            most = num_saves if not limit else min(num_saves, limit + 1)
            room = (free_bytes(output) - rest) // max(1, num_bytes)
            if room < most:
                self._say(
                    f"{output} has room for {room} checkpoints of {num_bytes / 2**30:.2f} GiB, and {most} will be "
                    "there: pass a smaller save_total_limit, or make room"
                )

    def _checkpoint_bytes(self) -> tuple[int, int]:
        """Bytes of a checkpoint, and of the weights in it. All ranks must ask together."""
        assert self.engine is not None
        numbers = self.engine.numbers()
        weights = num_bytes_of(numbers.weights)
        return weights if self.args.save_only_model else numbers.num_bytes(self.args.world_size), weights

    def _check_alike(self, num_steps: int) -> None:
        """Several ranks whose data differ would wait for each other at the end of an epoch. Raises `DataError`."""
        rows = self.train_dataset
        num_rows = len(rows) if has_length(rows) else -1
        told = self._ranks.agree(np.array([num_rows, self._train_batch_size, num_steps])).tolist()
        if any(each != told[0] for each in told):
            listed = "; ".join(f"rank {rank}: {', '.join(map(str, each))}" for rank, each in enumerate(told))
            raise DataError(
                f"the ranks have other training data or arguments (rows, rows in a micro-batch, steps: {listed}): give "
                "all ranks all rows and the same arguments; the rows are dealt to them"
            )

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """The model as the loop calls it. (A private method of the Trainer.)

        Since it is not `self.model`, the Trainer skips `accelerator.prepare` and `prepare_model`, which would move,
        cast and copy weights.
        """
        return _WrappedModel(self.model, self.engine)

    # -- one accumulated batch

    def get_train_dataloader(self) -> Any:
        """As the Trainer; each batch says whether its attention mask masks anything, before it is on the device.

        With several ranks it also says how many targets it has. (Not in a stream, which rank 0 alone reads.)
        """
        own, is_shared = self.data_collator, self.args.world_size > 1
        if not (is_shared and isinstance(self.train_dataset, IterableDataset)):
            self.data_collator = Noted(self.data_collator)
            if is_shared:
                count = partial(targets_in, shifted=shifts_labels(self.model))
                self.data_collator = Counted(self.data_collator, count)
        try:
            loader = super().get_train_dataloader()
        finally:
            self.data_collator = own
        self._dealt = deal(loader)
        return loader

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer; rows are dealt to ranks without adding any."""
        return self._dealt_for_evaluation(super().get_eval_dataloader(*args, **kwargs))

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """As `get_eval_dataloader`."""
        return self._dealt_for_evaluation(super().get_test_dataloader(*args, **kwargs))

    def _dealt_for_evaluation(self, loader: Any) -> Any:
        if not self.args.dataloader_drop_last:
            deal(loader)
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """As the Trainer; an order by length can be resumed. (Private; the dataloader has no public hook for it.)

        Windows of rows that are sorted by length hold as many updates on any number of ranks.
        """
        sampler = super()._get_train_sampler(train_dataset)
        self._order = None
        if isinstance(sampler, LengthGroupedSampler):
            sampler.batch_size *= self.args.world_size
            if self.order_of_seed:
                return OrderOfSeed(sampler, self.args)
            self._order = ResumableOrder(sampler)
        return sampler if self._order is None else self._order

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The micro-batches of the next update; counts their targets, drops the gradients of an unfinished update.

        There are none if the resumed checkpoint is of the last step, in mid-epoch: the loop would take one step more.
        """
        if 0 < self.state.max_steps <= self.state.global_step:
            self.control.should_training_stop = True
            if self._stops is not None:
                self._stops.nothing_is_left = True
            return [], None
        self._say_how_it_is_planned()
        samples = super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = samples[0]
        if self.args.world_size > 1:
            self._share_window(batches, num_batches)
        else:
            self._num_micro_batches = len(batches)
            self._window_targets = sum(num_targets(self.model, batch) for batch in batches)
        if self._unfinished and self.engine is not None:
            self.engine.optimizer.zero_grad()
            for loss in self._window_losses:  # rows without an update count in no logged loss
                self._tr_loss -= loss
        self._window_losses.clear()
        self._window.begin(self.model)
        return samples

    def _share_window(self, batches: list[Any], num_batches: int) -> None:
        """Count the micro-batches and targets of all ranks. Where a stream has ended on one, the others leave theirs.

        Args:
            batches: this rank's; a filler is marked.
            num_batches: how many there are at most.
        """
        assert self.engine is not None
        at_the_end = self.accelerator.gradient_state.end_of_dataloader
        if batches and at_the_end and self._dealt is not None and self._dealt.ends_with_filler:
            batches[-1] = {**batches[-1], TARGETS: 0}
        counts = np.full(num_batches, -1, dtype=np.int64)
        for at, batch in enumerate(batches):
            inputs, known = without_targets(batch)
            counts[at] = int(num_targets(self.model, inputs)) if known is None else known
        told = self.engine.ranks.agree(counts)
        num = int((told >= 0).sum(1).min())
        del batches[num:]
        self._num_micro_batches = num * self.args.world_size
        self._window_targets = on_device(int(told[:, :num].sum()), self.args.device)

    def _say_how_it_is_planned(self) -> None:
        """Print why there is no plan before the first update, and after it the plan for its micro-batches."""
        if not self._begins or self.engine is None:
            return
        if not self.engine.is_beginning:
            self._begins = False
            self._say(self.engine.plan)
        elif self._unplanned:
            how = _BEGINS_ON_CPU if self.engine.plan.on_cpu else _BEGINS
            self._say(self._unplanned if self._unplanned == _NOT_TRACED else f"{self._unplanned}: {how}")
            self._unplanned = ""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of one micro-batch.

        If the GPU's memory is full and the engine has moved to a leaner plan, the window so far is repeated.

        Returns:
            This micro-batch's part of the accumulated batch's loss, a scalar on the device. With several ranks it is
            multiplied by their number, since the Trainer logs the mean over ranks.

        Raises:
            OutOfVramError: the GPU's memory is full, and no leaner plan is left.
        """
        self._window.add(inputs)
        loss = None
        with suppress(RepeatWindowError):
            loss = self._micro_batch(model, inputs)
        if loss is None:
            loss = self._repeat_window(model)
        if not self.accelerator.sync_gradients:
            self._accumulate()
        elif self.lr_scheduler is self._own_scheduler:
            self._apply_own_schedule()
        loss = loss if self.args.world_size == 1 else loss * self.args.world_size
        self._window_losses.append(loss)
        return loss

    def _repeat_wrapped(self) -> None:
        self._repeat_window(self.model_wrapped)

    def _repeat_window(self, model: Any) -> torch.Tensor:
        """The newest micro-batch's loss, after all micro-batches of the window so far."""
        while True:
            with suppress(RepeatWindowError):  # the next plan is leaner yet
                for number, inputs in enumerate(self._window.again()):
                    if number:
                        self._accumulate()
                    loss = self._micro_batch(model, inputs)
                return loss

    def _accumulate(self) -> None:
        """Another micro-batch of the window follows."""
        assert self.engine is not None
        self.engine.step(boundary=False)

    def _micro_batch(self, model: Any, inputs: Any) -> torch.Tensor:
        engine = self.engine
        assert engine is not None
        inputs, full = without_note(inputs)
        inputs, targets = without_targets(inputs)
        one_mask = not getattr(getattr(self.model, "config", None), "is_encoder_decoder", True)
        if not is_standard(type(self).compute_loss) or (full and not one_mask):
            full = None  # other masks than the batch's may be asked about
        share: torch.Tensor | float | None = None
        if self._num_micro_batches != 1:
            inputs, count = with_a_target(inputs, num_targets(self.model, inputs))
            share = count * 0.0 if targets == 0 else count / self._window_targets
        # A loss divided by this number is the micro-batch's mean, as it is if the model ignores `num_items_in_batch`.
        # `True` says that the user's compute_loss divides by the targets of the whole accumulated batch.
        if getattr(self, "loss_is_scaled_for_ga", None) is True:
            share, num_items = 0.0 if targets == 0 else None, self._window_targets
        else:
            num_items = num_targets(self.model, inputs)
        self._target_share = share
        self.current_gradient_accumulation_steps = 1
        with engine.makes_room(), answering(full), self._through_losses():  # also in the user's compute_loss
            loss: torch.Tensor = super().training_step(model, inputs, on_device(num_items, self.args.device))
        return loss if share is None else loss * share

    def _backward(self, loss: torch.Tensor, **_: Any) -> None:
        """Stands in for `accelerator.backward`."""
        assert self.engine is not None
        if self._target_share is not None:
            loss = loss * self._target_share
        self.engine.backward(loss, scale_by_accumulation=False)
        self._unfinished = not self.accelerator.sync_gradients

    # -- the update

    def _clip_grad_norm(self, model: Any) -> None:
        """Does nothing: the engine clips inside its step. (Private; the loop has no public hook for it.)"""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Does nothing: reading the norm in each step would wait for the device. `log` adds it. (Private, as above.)"""

    def _apply_own_schedule(self) -> None:
        """Pass the learning rates of the user's scheduler to the engine."""
        assert self.engine is not None
        self.lr_scheduler.optimizer._opt_called = True  # else torch warns that its own optimizer never steps
        rates, groups = self.lr_scheduler.get_last_lr(), self.engine.optimizer.param_groups
        if len(rates) not in (1, len(groups)):
            raise ConfigError(
                f"the scheduler sets {len(rates)} learning rates and the model has {len(groups)} parameter groups: "
                "build it over an optimizer with one group, or with as many groups"
            )
        for index, group in enumerate(groups):
            group["lr"] = float(rates[min(index, len(rates) - 1)])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """As the Trainer, but in pieces. Unread weights are read from the checkpoint when the engine is built.

        (Private; called before `create_optimizer`.)
        """
        with self._phase("resuming"):
            if is_unread(self.model):
                if read_later(self.model, Path(resume_from_checkpoint)):
                    return
                make_real(self.model.parameters())
            ours = model is None and self.engine is None
            if not ours or not load_in_pieces(self.model, Path(resume_from_checkpoint)):
                given = () if model is None else (model,)  # sentence-transformers' method takes none
                try:
                    super()._load_from_checkpoint(resume_from_checkpoint, *given)
                except ModelError as error:
                    raise ModelError(f"{resume_from_checkpoint}: {error}") from error
            if isinstance(trained := self._module(), WithLosses):
                trained.read(Path(resume_from_checkpoint), incomplete=self.offload.resume_incomplete)

    def _load_best_model(self) -> None:
        """As the Trainer, from weights that are those that were saved. (Private.)

        Raises:
            ModelError: they are not. The model keeps the newest weights.
        """
        best = Path(str(self.state.best_model_checkpoint))
        if (best / MANIFEST).is_file():
            try:
                world.from_first("checking the best model", partial(check_readable, best, weights_alone=True))
            except ModelError as error:
                raise ModelError(
                    f"{error}. It is the best model's: to have the newest weights instead, go on with "
                    "resume_from_checkpoint=True (resume=True) and load_best_model_at_end=False"
                ) from error
        super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load what `_save_optimizer_and_scheduler` wrote, or the files of transformers' own Trainer. (Private.)

        The user's scheduler continues from the rates of its own optimizer.
        """
        if checkpoint is not None and self._order is not None:
            self._order.read(Path(checkpoint))
        with nullcontext() if checkpoint is None else self._phase("resuming"):
            if checkpoint is not None and self.engine is not None and (Path(checkpoint) / MANIFEST).is_file():
                self.engine.drop_gradients()
                with self._together("resuming"):
                    values = self.engine.load_states(Path(checkpoint), scheduler=self.lr_scheduler)
                self.lr_scheduler.load_state_dict(values["scheduler"])
                self._evaluation_is_due = bool(values.get(_EVALUATION_IS_DUE))
            elif checkpoint is not None and not (Path(checkpoint) / SCHEDULER_NAME).is_file():
                self._load_optimizer_alone(Path(checkpoint))
            else:
                super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.engine is not None:
            self.engine.last_checkpoint = self._returns_to = Path(checkpoint).absolute()
        if checkpoint is not None and self.lr_scheduler is self._own_scheduler:
            groups = self.lr_scheduler.optimizer.param_groups
            for group, rate in zip(groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate

    def _load_optimizer_alone(self, checkpoint: Path) -> None:
        """Load `optimizer.pt` where `scheduler.pt` is missing; the Trainer would load neither.

        The scheduler goes on from this run's schedule at the checkpoint's step.
        """
        optimizer: Any = self.optimizer
        optimizer.load_state_dict(torch.load(checkpoint / OPTIMIZER_NAME, map_location="cpu", weights_only=True))
        done = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME)).global_step
        optimizer._opt_called = True  # else torch warns that no step came before the scheduler's
        for _ in range(0 if isinstance(self.lr_scheduler, ReduceLROnPlateau) else done):
            self.lr_scheduler.step()

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Loads nothing: the engine has its own loss scale. A file of transformers' Trainer is named. (Private.)"""
        if checkpoint is not None and (path := Path(checkpoint) / SCALER_NAME).is_file():
            self._say(f"{path} is ignored: the engine scales the loss by itself, and begins with its own loss scale")

    # -- checkpoints: the Trainer's folder, with data in the place of its pickles

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As the Trainer, but older ones go when this one is whole. (Private; the loop has no public hook for it.)

        With several ranks each writes its states and random states, and rank 0 all the rest.

        Raises:
            OutputError: the disk is full.
            RankError: another rank has failed in it.
        """
        output, limit = Path(self._get_output_dir(trial=trial)), self.args.save_total_limit
        folder = output / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.engine is not None:  # on all ranks: rank 0 then reads the weights by itself
            num_bytes, _ = self._checkpoint_bytes()
            with self._together("checking the disk"):
                if self.args.should_save:
                    check_room(output, num_bytes, f"checkpoint-{self.state.global_step}")
        self.args.save_total_limit, self._is_saving = None, True
        began = time.monotonic()
        try:
            replaced = set_aside(folder) if self.args.should_save else nullcontext()
            with self._phase("saving"), written_to(output), replaced:
                with self._together("writing a checkpoint"):
                    super()._save_checkpoint(model, trial)
                with self._together("writing a checkpoint"):
                    if self.args.should_save:
                        write_manifest(folder, self._origin())
                if self.engine is not None:
                    self.engine.last_checkpoint = self._returns_to = folder.absolute()
        finally:
            self.args.save_total_limit, self._is_saving = limit, False
            self._save_seconds = max(self._save_seconds, time.monotonic() - began)
        if self.args.should_save:
            rotate_checkpoints(output, limit, self.state.best_model_checkpoint)

    def _origin(self) -> Origin:
        """What the files of a checkpoint say of themselves."""
        assert self.engine is not None
        return self.engine.origin

    def _evaluate(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer; where it fails on the only rank, a checkpoint that is due is written first. (Private.)"""
        before = random_states()
        try:
            metrics = super()._evaluate(trial, *args, **kwargs)
            self._evaluated_at = self.state.global_step
            return metrics
        except Exception as error:
            ends = isinstance(error, TrainingStoppedError)
            due = self.control.should_save or (ends and self.args.save_strategy != "no")
            if ends and self._stops is not None and not self._stops.has_time_to_save():
                due = False
            folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            is_saved = self.engine is not None and self.engine.last_checkpoint == folder.absolute()
            if due and self.args.world_size == 1 and self.state.global_step > 0 and not is_saved:
                self._evaluation_failed = True
                set_random_states(before)  # a run that goes on evaluates first
                try:
                    self._save_checkpoint(self.model, trial)
                    if isinstance(error, TrainingStoppedError):  # whose message names the newest checkpoint
                        error.args = self._stopped_by(error.signal).args
                    else:
                        error.add_note(
                            f"The checkpoint of step {self.state.global_step} was written before this was raised."
                        )
                except Exception as lost:
                    error.add_note(f"The checkpoint that was due could not be written: {lost}")
            raise

    def _leaves_an_evaluation(self) -> bool:
        """Whether a checkpoint that is written now comes before an evaluation of its step."""
        args, state, stops = self.args, self.state, self._stops
        if self._evaluated_at == state.global_step:
            return False
        by_epoch = args.eval_strategy == "epoch" and args.eval_delay <= (state.epoch or 0)
        ends_epoch = float(state.epoch or 0).is_integer() or state.global_step >= state.max_steps
        left_out = stops is not None and stops.leaves_an_evaluation
        return self._evaluation_failed or left_out or (by_epoch and ends_epoch)

    def _evaluate_late(self) -> None:
        """Make the evaluation that the checkpoint came before, as an undisturbed run did."""
        if not self._evaluation_is_due or self.args.eval_strategy == "no":
            return
        metrics = self._evaluate(None, self._ignored_keys)
        self._evaluation_is_due = False
        newest = None if self.engine is None else self.engine.last_checkpoint
        if self._determine_best_metric(metrics=metrics, trial=None) and newest is not None:
            self.state.best_model_checkpoint = str(newest)

    @property
    def _ranks(self) -> Ranks:
        return SOLO if self.engine is None else self.engine.ranks

    def _together(self, what: str) -> AbstractContextManager[None]:
        """A context after which all ranks have done `what`, or raise an error."""
        return self._ranks.together(what)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer. In a checkpoint all ranks call it, and wait for the one that writes: its folder is there."""
        with self._together("writing the model") if self._is_saving else nullcontext():
            super().save_model(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """As the Trainer, with the arguments as JSON: `training_args.bin` is a pickle. (Private, as above.)

        transformers 5.23 calls it on all ranks, and older ones on the one that writes.
        """
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            with saved_in_pieces(), arguments_as_data(folder, self), self._phase("saving"):
                super()._save(output_dir, state_dict)
                if self._is_saving and isinstance(trained := self._module(), WithLosses):
                    trained.write(folder, self._origin())

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer, with errors that say what to do. Its constructor calls it for `push_to_hub`."""
        with readable_push_errors():
            super().init_hf_repo(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """As the Trainer, with the arguments as JSON. (Private, as above.)"""
        if not self.is_world_process_zero():
            return
        with arguments_as_data(Path(self.args.output_dir), self):
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Both as data, in `run.json` and `states-*.safetensors`. (Private, as above.)"""
        assert self.engine is not None
        rank, num_ranks = self.args.process_index, self.args.world_size
        values: dict[str, Any] = {"scheduler": self.lr_scheduler.state_dict()}
        values |= {_EVALUATION_IS_DUE: True} if self._leaves_an_evaluation() else {}
        self.engine.numbers().write(Path(output_dir), rank, num_ranks, **values)

    def _save_rng_state(self, output_dir: str) -> None:
        """The random states and the order of the rows, as data. (Private, as above.)"""
        write_random(Path(output_dir), self._origin(), self.args.process_index)
        if self._order is not None and self.args.should_save:
            self._order.write(Path(output_dir), self._origin())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load what `_save_rng_state` wrote, or the file of transformers' own Trainer. (Private, as above.)

        The loop calls it before it takes the rows if an epoch begins, and else when it has taken the first ones.
        """
        if self._order is not None:
            self._order.begin_anew()
        if checkpoint is not None and (Path(checkpoint) / MANIFEST).is_file():
            read_random(Path(checkpoint), self.args.process_index)
            self._evaluate_late()
        else:
            super()._load_rng_state(checkpoint)

    # -- around the loop

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer; returns when the last update is done.

        Raises:
            ModelError: `resume_from_checkpoint` is not whole, or a file of it is cut.
            ConfigError: it is True, and no checkpoint is complete. A broken one is named, and the one before is taken.
                Or `offload.on_nonfinite` is "rollback", and there will be nothing to go back to.
            NonFiniteGradientError: NaN or Inf gradients, unless `offload.on_nonfinite` is "skip". If it is "rollback",
                there is no checkpoint yet, or they come again and again.
            EngineStateError: another Trainer is inside `train()` on this model.
            RankError: another rank has died or failed.
            TrainingStoppedError: SIGTERM or SIGHUP came. The step was finished, and saved if there was time.
            KeyboardInterrupt: Ctrl-C. The step was finished and saved; a second Ctrl-C breaks it off.
            OutputError: another run writes into `args.output_dir`, or it cannot be made.
        """
        self._check_rollback(resumes=bool(resume_from_checkpoint))
        with _workers_named(), ExitStack() as opened:
            if self.args.save_strategy != "no":
                world.from_first("claiming output_dir", partial(self._claim, opened, anew=not resume_from_checkpoint))
            stops = next((each for each in self.callback_handler.callbacks if isinstance(each, StopsWhenAsked)), None)
            if stops is None:
                stops = StopsWhenAsked(Stop(), self.any_flag, **self.stopping_options())
                self.add_callback(stops)
                opened.callback(self.remove_callback, stops)
                stops.stop.catch_signals()
                opened.callback(stops.stop.let_signals_go)
                interrupts = True
            else:
                interrupts = False
            self._stops = stops
            opened.callback(setattr, self, "_stops", None)  # it refers back to this Trainer
            output = self._train_on(opened, resume_from_checkpoint, *args, **kwargs)
            if stops.ended_by is not None:
                raise self._stopped_by(stops.ended_by)
            if stops.stopped and interrupts:
                error = KeyboardInterrupt()
                error.add_note(self._where_it_is(stops.stopped))
                raise error
            return output

    def _check_rollback(self, *, resumes: bool) -> None:
        """Raise `ConfigError` where training could never go back to a checkpoint, as `on_nonfinite` has it."""
        if self.offload.on_nonfinite != "rollback":
            return
        if self.args.save_only_model:
            raise ConfigError(
                "on_nonfinite='rollback' goes back to checkpoints, and save_only_model=True leaves out what they need: "
                "leave one of them out"
            )
        if self.args.save_strategy == "no" and self.offload.save_minutes is None and not resumes:
            raise ConfigError(
                "on_nonfinite='rollback' goes back to checkpoints, and save_strategy='no' writes none: pass "
                "save_strategy='steps' with save_steps, or OffloadConfig(save_minutes=...)"
            )

    def _own_return(self) -> Path | None:
        return self._returns_to

    def _train_on(self, opened: ExitStack, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any) -> Any:
        """`_train`, which begins again from a checkpoint where `on_nonfinite` has it so."""
        self._returns_to = None  # one of an earlier `train()` is no state of this run
        states = random_states()
        while True:
            try:
                return self._train(resume_from_checkpoint, *args, **kwargs)
            except RolledBackError as back:
                self._say(back)
                resume_from_checkpoint = str(back.checkpoint)
            opened.callback(setattr, self, "model_init", self.model_init)
            self.model_init = None  # the engine goes on with this model
            set_random_states(states)  # rows are shuffled by them, as if `train` had been called with that checkpoint

    def _stopped_by(self, number: int) -> TrainingStoppedError:
        """The error for a training that SIGTERM or SIGHUP has ended."""
        error = TrainingStoppedError(f"{Signals(number).name} has ended training. {self._where_it_is(True)}")
        error.signal = number
        return error

    def _where_it_is(self, stopped: bool) -> str:
        newest = None if self.engine is None else self.engine.last_checkpoint
        done = f"{self.state.global_step} of {self.state.max_steps} steps were done"
        if newest is None:
            return f"{done}, and there is no checkpoint"
        return f"{done}; the newest checkpoint is {newest}: resume from it (finetune: resume=True, --resume)"

    def _claim(self, claims: ExitStack, *, anew: bool) -> None:
        """Claim the output folder for this run, and log its steps there. Raises `OutputError`."""
        folder = Path(self.args.output_dir)
        if not has_claimed(folder):  # `finetune` has checked the folder that it claims
            with written_to(folder):
                folder.mkdir(parents=True, exist_ok=True)
            check_saving(folder)
        claims.enter_context(one_run(folder))
        self.telemetry.log_to(folder / STEPS_FILE, anew=anew)  # memory keeps the newest records alone

    def _train(self, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint:
            given = resume_from_checkpoint
            resume_from_checkpoint = world.from_first("looking for a checkpoint", partial(self._checkpoint, given))
        self._take_over()
        self._evaluated_at, self._evaluation_failed, self._evaluation_is_due = -1, False, False
        self._ignored_keys = signature(super().train).bind(None, *args, **kwargs).arguments.get("ignore_keys_for_eval")
        chosen = self._filters_losses = self.args.logging_nan_inf_filter
        self.args.logging_nan_inf_filter = False  # it hides NaN losses and waits for the device on each micro-batch
        try:
            with self._before_the_engine:
                self._before_the_engine.enter_context(left_to_the_engine(self.args))
                self._is_in_loop = True
                output = super().train(resume_from_checkpoint or None, *args, **kwargs)
        except RuntimeError as error:
            self._ranks.explain(error)
            raise
        finally:
            self._is_in_loop = False
            if self.engine is not None:
                self.engine.own_return = None
            self.args.logging_nan_inf_filter = chosen
            self._remove_noise()
        if self.engine is not None:
            self.engine.synchronize()
        return output

    def _checkpoint(self, given: str | bool) -> str:
        """The checkpoint to go on from, which can be read. Raises as `train`."""
        recut = self.offload.resume_incomplete
        if given is True:
            found = newest_checkpoint(Path(self.args.output_dir), recut=recut)
        else:
            found = path_of(given, "resume_from_checkpoint")
            check_readable(found, recut=recut)
        check_trainer_state(found / TRAINER_STATE_NAME)
        if not (found / MANIFEST).is_file():
            self._check_theirs(found)
        config = getattr(self.model, "config", None)
        if isinstance(config, PreTrainedConfig) and (differing := check_same_model(found, config)) is not None:
            self._say(f"{differing}. The run goes on with this model's")
        return str(found)

    def _check_theirs(self, checkpoint: Path) -> None:
        """Raise `ConfigError` where a checkpoint of transformers' Trainer lacks what a run needs to go on exactly."""
        ranks = range(self.args.world_size)
        random_files = [f"rng_state_{rank}.pth" for rank in ranks] if len(ranks) > 1 else ["rng_state.pth"]
        lacking = [name for name in (SCHEDULER_NAME, *random_files) if not (checkpoint / name).is_file()]
        if not lacking:
            return
        said = f"{checkpoint} lacks {', '.join(lacking)}"
        if not self.offload.resume_incomplete:
            raise ConfigError(
                f"{said}: the run that goes on would not be the run that was saved. Resume from a checkpoint that has "
                "all files, or pass offload=OffloadConfig(resume_incomplete=True) to go on all the same"
            )
        self._say(f"{said}: training goes on without (resume_incomplete=True)")

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer, which would compare a share such as `logging_steps=0.05` with a checkpoint's steps, and warn.

        In resuming the checkpoint's steps hold. (Private.)
        """
        names = [f"{kind}_steps" for kind in ("logging", "eval", "save")]
        shares = {name: share for name in names if 0 < (share := getattr(self.args, name) or 0) < 1}
        given = signature(super()._init_training_state).bind(max_steps, *args, **kwargs).arguments
        try:
            for name in shares if given.get("resume_from_checkpoint") else ():
                setattr(self.args, name, None)
            found = super()._init_training_state(max_steps, *args, **kwargs)
            for each in (*self.callback_handler.callbacks, self.control):
                if isinstance(each, ExportableState):  # transformers looks for all of them when it saves
                    self.state.stateful_callbacks.setdefault(type(each).__name__, each.state())
            return found
        finally:
            for name, share in shares.items():
                setattr(self.args, name, share)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer; the loss since it was last logged is the mean over ranks, as the logged one. (Private.)"""
        self._evaluate_late()  # where no epoch was left
        if self.args.world_size > 1:
            self._tr_loss = self.accelerator.reduce(self._tr_loss, "mean")
        return super()._finalize_training(*args, **kwargs)

    def _remove_noise(self) -> None:
        """Remove NEFTune's hook also where training was interrupted: another run would add noise twice."""
        hook = getattr(self, "neftune_hook_handle", None)
        if hook is not None and self.neftune_noise_alpha is not None:
            untyped: Any = deactivate_neftune
            untyped(self.model, hook, self.accelerator)

    def _take_over(self) -> None:
        """Close engines that other Trainers have left open on this model, or on another wrapper of its modules.

        Nobody may hold those Trainers any more: in a notebook the cell that makes one is run again.

        Raises:
            EngineStateError: one of them is inside `train()`: this is called by a callback of it.
        """
        modules = set(self.model.modules()) if self.model is not None else set()  # `model_init` makes a new model
        for other in list(_trainers):
            if other is self or other.engine is None or modules.isdisjoint(other.engine.module.modules()):
                continue
            if other._is_in_loop:
                raise EngineStateError(
                    "another Trainer is inside train() on this model, and its optimizer states would be lost: train "
                    "when its train() has returned, or train a deepcopy() of the model"
                )
            message = (
                "another Trainer's engine on this model is closed: its optimizer states are gone, the weights stay"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)
            other.close()
        _trainers.add(self)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """While it is open, peaks of memory are those of `name` in the telemetry."""
        return phase(name, self.telemetry.peaks, self.args.device)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """As the Trainer, but a tied weight is not missing if the file has it under its other name. (Private.)

        Raises:
            ModelError: the checkpoint lacks weights.
        """
        weights = self.model.state_dict(keep_vars=True)
        loaded = {id(weight) for name, weight in weights.items() if name not in load_result.missing_keys}
        missing = [name for name in load_result.missing_keys if id(weights.get(name)) not in loaded]
        by_design = set(getattr(self.model, "_keys_to_ignore_on_save", None) or ())
        if (lost := [name for name in missing if name not in by_design]) and not self.offload.resume_incomplete:
            raise ModelError(
                f"the checkpoint lacks {len(lost)} of the model's {len(weights)} tensors, such as {lost[0]!r}: resume "
                "with the model of that run, or pass offload=OffloadConfig(resume_incomplete=True) to go on with the "
                "values that the model has"
            )
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer, with the gradient norm.

        Raises:
            DataError: the loss is NaN or Inf and yet the gradients are not.
        """
        if self.engine is not None and "loss" in logs and "learning_rate" in logs:
            self._tr_loss.zero_()  # the Trainer subtracts the sum from itself, which would keep a NaN
            if (grad_norm := self.engine.grad_norm()) is not None:
                logs["grad_norm"] = grad_norm
            if not isfinite(logs["loss"]) and self.offload.on_nonfinite != "skip":
                self._explain_loss(logs["loss"])
        super().log(logs, *args, **kwargs)

    def _explain_loss(self, loss: float) -> None:
        """Raise `DataError`, unless every step with a loss that is not finite was skipped because fp16 overflowed."""
        assert self.engine is not None
        self.engine.synchronize()
        found = any(not record.skipped and not isfinite(record.loss) for record in self.telemetry.records)
        if self.any_rank(found):
            raise DataError(
                f"the training loss is {loss} up to step {self.state.global_step} though the gradients are finite: "
                "some batch has no target (all its labels are -100). Check the labels, and that inputs are not cut "
                "before the targets begin"
            )

    def any_rank(self, yes: bool) -> bool:
        """Whether it is so on any rank. All of them must ask together, while the engine is open."""
        return bool(self._ranks.agree(np.array([int(yes)])).any())

    def any_flag(self, flags: int) -> int:
        """The flags, bits of an int64, that are set on any rank. All of them must ask together."""
        return int(np.bitwise_or.reduce(self._ranks.agree(np.array([flags]))[:, 0]))

    def stopping_options(self) -> dict[str, Any]:
        """The options of `StopsWhenAsked` that this Trainer knows."""
        return {
            "grace_seconds": self.offload.grace_seconds,
            "save_minutes": self.offload.save_minutes,
            "save_seconds": lambda: self._save_seconds,
        }

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer. Before any training, the model is first moved to the device.

        With a budget of VRAM that its weights would take more than half of, the engine is built and streams them. A
        model that another Trainer's engine trains is evaluated as it is there.
        """
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        vram = None if self.offload.vram is None else parse_bytes(self.offload.vram)
        is_placed = self.engine is not None or is_trained(self.model)
        if not is_placed and vram is not None and 2 * weights > vram:
            self.create_optimizer()
            is_placed = True
        with ExitStack() as opened:
            if self._is_in_loop:  # `train` has switched it off for training steps
                opened.callback(setattr, self.args, "logging_nan_inf_filter", self.args.logging_nan_inf_filter)
                self.args.logging_nan_inf_filter = self._filters_losses
            if not is_placed:
                opened.callback(VramCap(vram, self.args.device).remove)
                fill(self.model, self.args.device)
            opened.enter_context(self._phase("evaluation"))
            opened.enter_context(_workers_named())
            if self.engine is not None and self.args.world_size > 1:
                self.engine.synchronize()  # generating, ranks do not use the weights alike
            if isinstance(getattr(dataloader, "batch_sampler", None), DealtBatches):
                whole = self.gather_function == self.accelerator.gather
                self.gather_function = GatheredRows(self.accelerator, self.args.eval_batch_size, whole)
            return super().evaluation_loop(dataloader, *args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer. If the GPU is full, the engine moves to a leaner plan, and the micro-batch is repeated."""
        stops = self._stops
        if self._is_in_loop and self.args.world_size == 1 and stops is not None and stops.stop.ends_process:
            signal = stops.stop.signal
            raise self._stopped_by(15 if signal is None else signal[0])
        run = partial(super().prediction_step, *args, **kwargs)
        with self._through_losses():
            return run() if self.engine is None else self.engine.evaluates(run)

    def close(self) -> None:
        """Finish and close the engine; the model keeps its trained weights. A later `train()` builds a new engine."""
        if self.engine is not None:
            engine, self.engine, self.optimizer, self.model_wrapped = self.engine, None, None, self.model
            engine.close()


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, without a reference to its trainer: one that is dropped lets go of the model at once, as stock does."""
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
        """As the Seq2SeqTrainer. Raises `ConfigError` where it cannot be read."""
        try:
            return Seq2SeqTrainer.load_generation_config(gen_config_arg)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"generation_config={shown(gen_config_arg)} cannot be used: {cut(str(error))}") from error


class _WrappedModel:
    """The model that the Trainer's loop calls. Calls go through the engine; every other attribute is the module's."""

    def __init__(self, module: nn.Module, engine: OffloadEngine | None) -> None:
        self.module = module
        self.engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.engine or self.module
        if torch.is_grad_enabled() or getattr(self.module, "dtype", None) is not torch.bfloat16:
            return call(*args, **kwargs)
        # A loss in bf16 has three digits, too few to tell two checkpoints apart. The weights are bf16 already, so
        # autocast changes the loss alone, to fp32.
        with torch.autocast(next(self.module.parameters()).device.type, torch.bfloat16):
            return call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the engine takes each gradient as it is computed."""

    def to(self, *args: Any, **kwargs: Any) -> _WrappedModel:
        """Returns itself: the engine decides on the device and dtype of weights."""
        return self
