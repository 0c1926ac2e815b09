"""`OffloadEngine`: one training step, with exact AdamW and with what does not fit on the GPU in pinned RAM.

engine = OffloadEngine(model, OffloadConfig(learning_rate=1e-4))
for batch in batches:
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from offloadkit import hardware
from offloadkit.changes import changed
from offloadkit.checkpoint.folder import origin_from, written_to
from offloadkit.checkpoint.one_run import Saves
from offloadkit.checkpoint.origin import Origin
from offloadkit.checkpoint.run import Adding, RunNumbers, check_scheduler, load_run, save_run
from offloadkit.checkpoint.states import SavedStates
from offloadkit.checkpoint.values import why_unlike
from offloadkit.config import OffloadConfig
from offloadkit.device import watchdog
from offloadkit.device.assumed_disk import proposing_disk
from offloadkit.device.process_memory import VramCap, forget_peak, phase
from offloadkit.distributed import world
from offloadkit.distributed.machine import shared_cores
from offloadkit.distributed.ranks import Group, joined_ranks
from offloadkit.engine.checks import check_free, check_not_wrapped, engine_closed, engine_opened
from offloadkit.engine.loop import TrainingLoop
from offloadkit.engine.replanner import Replanner, connect, own_part
from offloadkit.errors import (
    ConfigError,
    EngineStateError,
    ModelError,
    NonFiniteGradientError,
    OffloadkitError,
    RankError,
    RolledBackError,
    shown,
)
from offloadkit.files import path_of
from offloadkit.offload.layers import (
    FlatLayer,
    check_is_plan,
    check_memory,
    check_plan,
    flat_layers,
    listed_groups,
    plan_of,
)
from offloadkit.offload.model import PlacedModel
from offloadkit.offload.plain import plain_copies
from offloadkit.offload.profiling import Profile
from offloadkit.offload.rate_watch import RateWatch
from offloadkit.offload.records import LOOK, StepRecords
from offloadkit.offload.shortage import (
    RamWatch,
    explained_shortage,
    moved_in_words,
    within_free_vram,
)
from offloadkit.offload.update import StepThread, Update
from offloadkit.offload.weights import forked
from offloadkit.optim.loss_scale import LossScale
from offloadkit.optim.table import GroupOptions
from offloadkit.optim.torch_optimizer import OffloadOptimizer, changed_options, check_states
from offloadkit.outline import FirstWindow, chooses, plan_for
from offloadkit.planner import Plan
from offloadkit.planner.plan import check_fits
from offloadkit.telemetry import Telemetry
from offloadkit.units import parse_bytes

logger = logging.getLogger(__name__)

MAX_ROLLBACKS = 3
"""Times that a run goes back to a checkpoint before it is past the step that held NaN."""

_T = TypeVar("_T")


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)


def _states_of(scheduler: Any) -> dict[str, Any] | None:
    """A scheduler's `state_dict()`; None where there is no scheduler. Raises `ConfigError` for what is none."""
    if scheduler is None:
        return None
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "state_dict", None)):
        raise ConfigError(f"scheduler must be a scheduler of torch.optim.lr_scheduler, got {shown(scheduler)}")
    states: dict[str, Any] = scheduler.state_dict()
    return states


def _let_go_here(process: int, undo: ExitStack) -> None:
    """Detach from the model, but not in a forked process: threads, GPU and pinned memory stayed in `process`."""
    if os.getpid() == process:
        with _disable_current_modes():  # an engine may be collected while torch.compile traces something
            undo.close()


class OffloadEngine:
    """Trains a module in place; its parameters become views of the engine's flat buffers.

    Attributes:
        module: the model. You may evaluate it, generate with it, save it and load into it at any time. Between steps
            you may read and write its weights as any tensors; only writes through raw pointers are not seen.
        optimizer: a `torch.optim.Optimizer` for schedulers and checkpoints.
        device: where the model computes.
        plan: the sizes of everything and where they live. It moves where memory runs out, where the machine's rates
            turn out to be others than planned, and by `move`.
        telemetry: a record of every step.
        num_updates: updates so far, including those of a run it resumed. Telemetry numbers steps by it.
        loss_scale: what the next loss is multiplied by; None without fp16 working weights.
        own_return: a Trainer's while it trains, since it loads its checkpoints by itself: gives the one to go back to.
            None: the engine loads `last_checkpoint`.
        pinning_seconds: how long it took to populate and pin the RAM.
        placed: the model's flat layers in their placements, until the engine is closed.
        step_thread: runs the updates.
        newest_update: the last update that was started; None before the first one.
        ram_watch: watches the RAM that is left.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OffloadConfig | None = None,
        *,
        param_groups: Sequence[dict[str, Any]] | None = None,
        device: torch.device | str | None = None,
        telemetry: Telemetry | None = None,
        plan: Plan | None = None,
        example: Any = None,
        evaluation_rows: int = 0,
    ) -> None:
        """Place the model. While the engine is open, models of transformers compute as `docs/design.md` says.

        Where a launcher has started several processes, or torch.distributed is initialised with more than one rank, the
        engines of all ranks train the model together, each with micro-batches of its own. All of them must be built,
        called and settled alike: building, backward, `step`, saving, moving, and the first use of weights after a
        `step` wait for the other ranks. After `synchronize` a rank may use the weights by itself. What is written to
        weights must be written on all ranks.

        Args:
            model: any module. Its trainable parameters live where the plan says; frozen ones move to `device`. What
                `offloadkit.from_pretrained` left unread is read now, one flat layer after the other, so that there is
                never a second copy of it.
            param_groups: as for a torch optimizer. A group's lr, betas, eps and weight_decay override the config's.
                Other options of torch's optimizers are refused where they would change the step.
            device: where to compute. None: the GPU if there is one, else the CPU.
            plan: what lives where, layer by layer, planned for this model before. None: it is made here. If less VRAM
                is free than it takes, or the GPU is full before all is there, the engine begins by a leaner one, with a
                warning.
            example: the largest micro-batch that will come, to plan for: a dict of forward's keyword arguments, a tuple
                or list of positional ones, or one tensor. Only shapes and dtypes matter. None, where there are
                placements to choose: the engine begins with little in VRAM; when the first window is done, it plans for
                the window's largest micro-batch and moves.
            evaluation_rows: of the largest micro-batch of evaluations, which plans made here count where training's has
                fewer.

        Raises:
            ModelError: nothing can be trained, a parameter's dtype is not supported, the plan is another model's, or
                the model is compiled, scripted or wrapped for distributed training already, or a trained parameter
                shares memory with another parameter or a buffer.
            ConfigError: the plan was made with another accumulation, recomputation or placement, or a parameter group
                has an option that is not built. With several ranks:
                some have weights in RAM that others have in VRAM, or weights are in RAM and the ranks on several hosts.
            RankError: the ranks have other models or configs, only some of them plan, or they cannot share memory.
            EngineStateError: another engine that is still open trains this model, or parameters of it.
            DoesNotFitError: the plan made here needs more than there is, or than the config's `vram` or `ram`.
            OffloadkitError: there is too little RAM, the disk is unsuitable, or the GPU is full (`OutOfVramError`). The
                model is as it was then, but for frozen parameters and buffers.
        """
        world.join()
        if config is not None and not isinstance(config, OffloadConfig):
            given = shown(config)
            raise ConfigError(f"config must be an OffloadConfig, such as OffloadConfig(vram='8GiB'), got {given}")
        if plan is not None:
            check_is_plan(plan)
        if type(evaluation_rows) is not int or not 0 <= evaluation_rows < 2**31:
            raise ConfigError(f"evaluation_rows must be a whole number >= 0, got {shown(evaluation_rows)}")
        self.module, self.config = model, config or OffloadConfig()
        check_not_wrapped(model)
        check_free(model, self.config)
        self.device = hardware.device_of(device)
        self.telemetry = telemetry or Telemetry()
        check_memory(model)
        param_groups = listed_groups(param_groups)
        for group in param_groups or ():
            usual = {"lr": self.config.learning_rate, "eps": self.config.eps, "weight_decay": self.config.weight_decay}
            GroupOptions.of({"betas": (0.0, 0.0), **usual, **group})
        layers = flat_layers(model, self.config, param_groups)
        self._undo = ExitStack()
        # Without this, an engine dropped without close() would keep its model and its threads until the program ends.
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, _let_go_here, self._process, self._undo)
        self._ranks = joined_ranks(self.device)
        self._undo.callback(self._ranks.close)
        if isinstance(self._ranks, Group):
            planning = None if plan is not None else (chooses(self.config, self.device), example is None)
            self._join(self._ranks, layers, planning)
            self._undo.enter_context(shared_cores(self._ranks, self.device))
        planned, first_window = plan, None
        if planned is None:
            planned, first_window = self._planned(model, layers, example, evaluation_rows)
        check_plan(planned, layers, self.config)
        connect(planned, self._ranks)
        planned = own_part(planned, layers, self._ranks)
        here = (each for each in (*model.parameters(), *model.buffers()) if each.device == self.device)
        begun = within_free_vram(planned, self.device, sum(each.nbytes for each in here), self._ranks)
        if begun is not planned:
            begun = own_part(begun, layers, self._ranks)
            words = moved_in_words(planned, begun)
            message = f"less VRAM is free than was planned with: the plan is leaner ({words})"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        forget_peak(self.device)  # a full GPU is explained by this engine's
        self.step_thread = StepThread(self.device, self._ranks)
        self._undo.callback(self.step_thread.close)
        self._undo.callback(plain_copies(model))
        self.ram_watch = RamWatch(begun.tiers["ram"])
        self._undo.callback(self.ram_watch.close)
        rate_watch = RateWatch(begun)
        self._undo.callback(self.telemetry.subscribe(rate_watch.add))
        vram = self.config.vram
        vram_cap = VramCap(None if vram is None else parse_bytes(vram), self.device)
        self._undo.callback(vram_cap.remove)
        self._undo.callback(changed(model, self.config, kernels=self.device.type != "cpu"))
        self._steps_phase, self._phase_name = ExitStack(), ""
        self._undo.callback(self._steps_phase.close)
        try:
            with explained_shortage(begun, self.device), phase("reading", self.telemetry.peaks, self.device):
                self.placed = PlacedModel(
                    model,
                    layers,
                    begun,
                    self.config,
                    self.device,
                    ranks=self._ranks,
                    ram_watch=self.ram_watch,
                    step_thread=self.step_thread,
                    settle=weakref.WeakMethod(self._settle),
                    undo=self._undo,
                )
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # the error may be kept: it must not hold what layers took
            self._finalizer()
            raise
        if self.placed.plan is not begun:
            words = moved_in_words(begun, self.placed.plan)
            message = f"the GPU was full while the engine was built: the plan is leaner ({words})"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            self.ram_watch.expect(self.placed.plan.tiers["ram"])
        self.pinning_seconds = self.placed.pinning_seconds
        trained = {view.parameter for view in self.placed.views()}
        self.optimizer = OffloadOptimizer(
            param_groups or [{"params": [p for p in model.parameters() if p in trained]}],
            self.config,
            self,
            {
                view.parameter: state.state_of(at)
                for state in self.placed.states
                for at, view in enumerate(state.layer.views)
            },
        )
        self._layers = layers
        records = StepRecords(
            self.telemetry,
            self.placed.plan,
            self.device,
            self.config.on_nonfinite,
            num_ranks=self._ranks.size,
        )
        self.loop = TrainingLoop(
            self.placed, self.step_thread, self.optimizer, records, self.config, self.device, self._ranks
        )
        self.replanner = Replanner(
            self.loop,
            self.optimizer,
            layers,
            self.config,
            self.device,
            self._ranks,
            self.telemetry,
            first_window=first_window,
            ram_watch=self.ram_watch,
            rate_watch=rate_watch,
            vram_cap=vram_cap,
        )
        self._origin = self._ranks.told(Origin.of_new_run)
        self._saves = Saves()
        self._scheduler: Any = None
        """That of the last checkpoint."""
        self._num_saved_updates = self._failed_at = self._num_rollbacks = 0
        """Updates in the last checkpoint; the furthest update that held NaN, and how often training went back since."""
        self.own_return: Callable[[], Path | None] | None = None
        self._ranks.take_received()  # it was no step's
        self._open = True
        self.telemetry.plan = self.plan
        engine_opened(model, self)

    @property
    def plan(self) -> Plan:
        return self.replanner.plan

    @property
    def loss_scale(self) -> LossScale | None:
        return self.loop.loss_scale

    @property
    def newest_update(self) -> Update | None:
        return self.loop.newest_update

    @property
    def num_updates(self) -> int:
        return self.loop.num_updates

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        self.loop.num_updates = number

    def _join(self, ranks: Group, layers: list[FlatLayer], planning: tuple[bool, bool] | None) -> None:
        """Share the layers between the ranks.

        Args:
            planning: whether there are placements to choose, and no example to plan for; None if there is a plan.

        Raises:
            RankError: the ranks have other models or configs, or only some of them plan.
        """
        run = replace(self.config, placement=None, vram=None, ram=None, disk=None)
        facts = repr(([layer.shape() for layer in layers], run, planning)).encode()
        if len({*ranks.agree(np.array([zlib.crc32(facts)])).flat}) > 1:
            raise RankError(
                "the ranks build engines for other models, dtypes, parameter groups or configs: build the same on all "
                "ranks; only placement, vram, ram and disk may differ, and a plan, an example and something to choose "
                "are there on all ranks or on none"
            )
        for layer in layers:
            layer.cut_for(ranks.rank, ranks.size)

    def _planned(
        self, model: nn.Module, layers: list[FlatLayer], example: Any, evaluation_rows: int
    ) -> tuple[Plan, FirstWindow | None]:
        """The plan to begin with, where none is given, and what plans again after the first window, if anything does.

        Raises:
            DoesNotFitError: it does not fit.
        """
        made, first_window = None, None
        if example is not None:
            more: Any = {"evaluation_rows": evaluation_rows, "ranks": self._ranks}
            made = plan_for(model, self.config, self.device, example, **more)
        if made is None and not chooses(self.config, self.device):
            return plan_of(model, layers, self.config), None
        if made is None:
            first = FirstWindow(model, layers, self.config, self.device, evaluation_rows, self._ranks)
            made, first_window = first.plan, None if first.is_settled else first
        check_fits(proposing_disk(made))
        return made, first_window

    # ---- one step, in time order -------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. Each layer first waits for its own update of the last step.

        With gradients enabled, HuggingFace models cache no keys and values.

        Without gradients enabled it is an evaluation, and a full GPU is treated as `evaluates` says.

        Raises:
            OutOfVramError: the GPU's memory is full. With gradients enabled, the gradients gathered since the last
                update are dropped, and it is a `RepeatWindowError` if the engine has moved to a leaner plan.
            ModelError: `use_cache=True` with gradients enabled.
        """
        self._check_open()
        if not torch.is_grad_enabled():
            return self.evaluates(lambda: self.module(*args, **kwargs))
        self._begin_phase("first step" if self.loop.newest_update is None else "training")
        with self._closing_if_lost(), self.replanner.recover_from_oom():
            output = self.loop.forward(args, kwargs)
        self.replanner.saw(args, kwargs)
        return output

    def evaluates(self, run: Callable[[], _T]) -> _T:
        """What `run()` gives: an evaluation or a generation with the model, in which no graph is built.

        If the GPU's memory is full, the engine moves to a plan with less in VRAM, and `run()` is called again, until
        it succeeds. Random states, and the buffers of a model in training mode, are what they were at the first call.

        Raises:
            OutOfVramError: the GPU's memory is full, and no leaner plan is left, or an accumulation window is under
                way. Its gradients are kept.
        """
        self._check_open()
        with self._closing_if_lost():
            return self.replanner.run_eval(run)

    def backward(self, loss: torch.Tensor, *, scale_by_accumulation: bool = True) -> None:
        """Backward of one micro-batch. Gradients are gathered, and sent to RAM, layer by layer.

        After any error raised by backward itself, the gradients gathered since the last update are dropped, and `loss`
        is detached, so that nothing of its graph is held.

        Args:
            loss: a scalar.
            scale_by_accumulation: divide it by `config.gradient_accumulation` first, and by the number of ranks. If
                not, all micro-batches of all ranks are simply added.

        Raises:
            EngineStateError: the loss requires no gradient, or in fp16 reaches parameters outside of the model; or it
                was called again before `step()`, without gradient accumulation; or, on several ranks, more than
                `gradient_accumulation` times.
            OutOfVramError: the GPU's memory is full. It is a `RepeatWindowError` if the engine has moved to a leaner
                plan.
            TypeError: the loss is no tensor.
            ValueError: the loss is not a scalar.
        """
        self._check_open()
        self.loop.check_loss(loss)
        divisor = self.config.gradient_accumulation * self._ranks.size if scale_by_accumulation else 1
        with self._closing_if_lost():
            self.replanner.before_backward(loss)
            with self.replanner.recover_from_oom():
                self.loop.backward(loss, divisor)
            self.replanner.after_backward()
        self.loop.added()

    def step(self, *, boundary: bool | None = None) -> bool:
        """Call it after each `backward`. At the end of the accumulation window it starts the update, without waiting.

        Args:
            boundary: whether the window ends here. None: it ends after `config.gradient_accumulation` micro-batches.

        Returns:
            Whether an update was started.

        Raises:
            EngineStateError: there was no `backward` since the last call.
            NonFiniteGradientError: the gradients of an earlier step held NaN or Inf (`on_nonfinite="raise"`). Or this
                step's did (`on_nonfinite="rollback"`): it is a `RolledBackError` if the engine has gone back to the
                last checkpoint, and says where to go on. Nothing has gone back if there is no checkpoint, or after
                `MAX_ROLLBACKS` times.
            ModelError: parameters were added, replaced or unfrozen since the engine was built.
            OutOfRamError: the system is about to run out of RAM, and no plan takes less. Nothing was done; `step` may
                be called again. Or the update was started, but the move to a plan with less RAM failed, or, with
                several ranks, there is none.
            OutOfVramError: the GPU's memory is full, this rank's or another one's. The window's gradients are dropped.
                It is a `RepeatWindowError` if the engine has moved to a leaner plan.
        """
        self._check_open()
        if not self.loop.ends_window(boundary):
            return False
        self.loop.untrained.check()
        with self._closing_if_lost():
            shortage = self.replanner.check_memory()
            self._read_reports()
            self.placed.take_over_outside_writes()
            agreed = self.replanner.agree(shortage)
            with self.replanner.recover_at_boundary():
                update = self.loop.start_update(agreed.order)
            self.loop.end_window(update)
            said = self._what_is_not_finite(update) if self.config.on_nonfinite == "rollback" else None
            profile = self.loop.profile
            if profile is not None and profile.step(self._settle, self.loop.records.read, self.telemetry):
                self.loop.profile = None
            if said is not None:
                raise self._roll_back(update.number, said)
            self.replanner.after_update(agreed)
        return True

    def _begin_phase(self, name: str) -> None:
        """The steps' peaks of memory count as those of `name` from here on."""
        if name != self._phase_name:
            self._steps_phase.close()
            self._steps_phase.enter_context(phase(name, self.telemetry.peaks, self.device))
            self._phase_name = name

    # ---- reading and settling ----------------------------------------------------------------------------------

    def grad_norm(self) -> float | None:
        """Global gradient norm of the newest update, before clipping; None before the first update.

        It waits until the norm is known.
        """
        self._check_open()
        if self.loop.newest_update is None:
            return None
        watchdog.wait(self.loop.newest_update.norm_known, "the gradient norm")
        self.loop.raise_thread_error()
        return self.loop.newest_update.norm

    def synchronize(self) -> None:
        """Wait until every update is applied, on the host and on the device.

        Raises:
            NonFiniteGradientError: as `step`.
        """
        self._check_open()
        self._settle()
        self.loop.update_loss_scale()
        self.placed.take_over_outside_writes()
        self.loop.records.wait()
        self._read_reports()

    def profile(self, *, steps: int = 3, path: str | Path = "offloadkit-trace.json") -> Profile:
        """Trace `steps` steps, starting at the next boundary.

        After them a Chrome trace is written to `path`, and the time of each phase and its bound are printed. Of
        several ranks all must call it; rank 1 writes to "NAME-rank1.json", and so on. The track "ranks" has what they
        exchange and gather.

        Raises:
            OffloadkitError: `steps` is not a positive int, a trace is already running, or `path` cannot be written.
        """
        self.synchronize()
        self.loop.profile = Profile(steps, path_of(path, "path"), self.device, self._undo, self._ranks)
        return self.loop.profile

    def drop_gradients(self) -> None:
        """Drop the gradients gathered since the last update, as `optimizer.zero_grad()` does."""
        self._check_open()
        self.loop.drop_gradients()

    def _settle(self) -> None:
        if os.getpid() != self._process:
            raise forked("the model was")
        self.loop.settle()

    def _read_reports(self) -> None:
        """Record the steps that have finished in the telemetry, and report those that were not applied."""
        self.loop.raise_thread_error()
        try:
            self.loop.records.read()
        except NonFiniteGradientError as error:
            self.loop.drop_gradients()
            raise NonFiniteGradientError(f"{error}. {watchdog.in_words(self.last_checkpoint)}") from None

    def _what_is_not_finite(self, update: Update) -> str | None:
        """Wait for the newest update's norm; a sentence about it if it is not finite, and that is not the loss scale's
        fault. Several ranks have the same norm, so they go back together."""
        watchdog.wait(update.norm_known, "the gradient norm")
        self.loop.raise_thread_error()
        try:
            self.loop.records.read()
        except NonFiniteGradientError as error:
            return str(error)
        return None

    def _roll_back(self, step: int, said: str) -> NonFiniteGradientError:
        """Go back to the last checkpoint, since gradients held NaN or Inf; returns the error to raise.

        Args:
            step: the number of the update.
            said: a sentence about it.

        Raises:
            ModelError, ConfigError: as `load_checkpoint`.
        """
        folder = self.last_checkpoint if self.own_return is None else self.own_return()
        if folder is None:
            return NonFiniteGradientError(
                f"{said}, and on_nonfinite='rollback' has nothing to go back to. {watchdog.in_words(None)}: save "
                f"sooner, in a loop before the first step. {LOOK}, or pass on_nonfinite='skip' to skip such steps"
            )
        if step > self._failed_at:
            self._failed_at, self._num_rollbacks = step, 0
        if self._num_rollbacks == MAX_ROLLBACKS:
            return NonFiniteGradientError(
                f"{said}. Training has gone back {MAX_ROLLBACKS} times and has not come past step {self._failed_at}, "
                f"so the fault does not pass. {LOOK}, or go on with on_nonfinite='skip' to skip such steps. "
                f"{watchdog.in_words(folder)}"
            )
        self._num_rollbacks += 1
        back = RolledBackError(
            f"{said}. Training goes back to step {self._num_saved_updates}, {str(folder)!r} "
            f"(time {self._num_rollbacks} of {MAX_ROLLBACKS} before step {self._failed_at} is passed)"
        )
        back.step, back.num_updates, back.checkpoint = step, self._num_saved_updates, folder
        if self.own_return is not None:
            self.num_updates = self._num_saved_updates  # a checkpoint of transformers' Trainer does not hold it
            return back
        try:
            back.position = self.load_checkpoint(folder, scheduler=self._scheduler)
        except OffloadkitError as error:
            error.add_note(str(back))
            raise
        return back

    # ---- moving -------------------------------------------------------------------------------------------------

    def move(self, plan: Plan, *, why: str = "move() was called") -> None:
        """Go on by another plan of this model: weights, gradients, states and activations live where it says.

        No number changes. The engine finishes its updates, and moves layer by layer: there are never two copies of
        more than one layer. Layers whose placement is equal stay untouched. What `optimizer.state` and `state_dict()`
        gave before a move is not written any more: ask again.

        With several ranks all must call it, between the same steps and with the same places for weights. It moves on
        all of them or on none; where it fails after layers have moved, the engines of all ranks close.

        Args:
            plan: made for this model and config; only its `placement` may be another than the config's.
            why: for `telemetry.moves`.

        Raises:
            ModelError, ConfigError: the plan was made for another model or config. Nothing has moved.
            EngineStateError: gradients are gathered, or a tensor outside shares memory of a parameter that would move.
                Nothing has moved. Or the engine had to close itself: see below.
            NonFiniteGradientError: as `step`. Nothing has moved.
            OffloadkitError: there is too little RAM or disk, or the GPU is full (`OutOfVramError`). Layers that moved
                before stay there, and training can go on: `plan` says what is where. If not even that is possible, the
                engine closes, and the model has its weights.
            RankError: another rank did not call it, or cannot move. Or the GPUs could not be connected anew as the plan
                has it: then the engine closes, and the model has its weights.
        """
        self._check_open()
        with self._ranks.together("calling move()"):
            if self.loop.num_backwards or self.placed.is_busy:
                raise EngineStateError(
                    "move() was called inside an accumulation window: call it after the step() that ends the window, "
                    "or after drop_gradients()"
                )
            check_is_plan(plan)
            check_plan(plan, self._layers, replace(self.config, placement=plan.basis.config.placement))
        self.synchronize()
        with self._closing_if_lost():
            self.replanner.move(plan, why)

    @contextmanager
    def makes_room(self) -> Iterator[None]:
        """A context in which a full GPU makes the engine move to a leaner plan. It spans a micro-batch at most.

        Raises:
            RepeatWindowError: it did so. The gradients since the last update were dropped.
            OutOfVramError: no leaner plan is left, or the move failed. The gradients were dropped too.
        """
        with self._closing_if_lost(), self.replanner.recover_from_oom():
            yield

    @contextmanager
    def _closing_if_lost(self) -> Iterator[None]:
        """A context after which the engine is closed if a move failed so that training cannot go on."""
        try:
            yield
        except BaseException:
            if self._open and self.replanner.is_lost:
                self.close()
            raise

    # ---- states by name ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the run. Its tensors are live, not copies. With several ranks, "optimizer" has this one's part.

        Returns:
            "module": the model's state_dict. "optimizer": the optimizer's `state`, by parameter name. "param_groups":
            options by group. "num_updates". "loss_scale": the state of the fp16 loss scale, else None.

        Raises:
            EngineStateError: in the middle of an accumulation window, whose gradients are no part of it.
        """
        self._check_window()
        self.synchronize()
        return {
            "module": self.module.state_dict(),
            "optimizer": {view.name: self.optimizer.state[view.parameter] for view in self.placed.views()},
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
            ],
            "num_updates": self.num_updates,
            "loss_scale": self.loss_scale and self.loss_scale.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict()` of an engine with the same parameters. Placements may differ.

        Nothing is loaded where one of these errors is raised.

        Raises:
            ModelError: the parameter names or the number of groups differ.
            ConfigError: the saved states are another optimizer's, or have another precision or working dtype.
            EngineStateError: in the middle of an accumulation window, whose gradients are of other weights.
        """
        self._check_window()
        self.synchronize()
        groups = self.optimizer.param_groups
        self._check_state(state)
        saved = state["optimizer"]
        parameters = {view.name: view.parameter for view in self.placed.views()}
        if parameters.keys() != saved.keys():
            differing = sorted(parameters.keys() ^ saved.keys())
            raise ModelError(f"the saved run has other parameters than this model: {', '.join(differing[:5])} differ")
        if len(state["param_groups"]) != len(groups):
            raise ModelError(
                f"the saved run has {len(state['param_groups'])} parameter groups, this one has {len(groups)}"
            )
        for name, parameter in parameters.items():
            check_states(self.optimizer.state[parameter], saved[name])
        with self.placed.outside.released():
            self.module.load_state_dict(state["module"])
        self.placed.take_over_outside_writes(keep_remainder=True)
        for name, parameter in parameters.items():
            self.optimizer.load_parameter_state(parameter, saved[name])
        if (warning := changed_options(groups, state["param_groups"])) is not None:
            warnings.warn(warning, RuntimeWarning, stacklevel=2)
        for group, options in zip(groups, state["param_groups"], strict=True):
            group.update(options)
        self.num_updates = state["num_updates"]
        if self.loss_scale is not None and state.get("loss_scale"):
            self.loss_scale.load_state_dict(state["loss_scale"])

    def _check_state(self, state: Any) -> None:
        """Raise `ModelError` or `ConfigError` for what is no `state_dict()` of such a model."""
        own = self.state_dict()
        lacks_scale = isinstance(state, Mapping) and state.get("loss_scale") is None
        wanted = {name: own[name] for name in own if name != "loss_scale" or not lacks_scale}
        needed = dict.fromkeys(name for name in wanted if name != "loss_scale")
        why = why_unlike(state, needed, "it", whole=True) or why_unlike(state, wanted, "it")
        if why is None and (type(done := state["num_updates"]) is not int or done < 0):
            why = f"num_updates is {shown(done)}, and a whole number >= 0 is needed"
        for at, group in enumerate(state["param_groups"] if why is None else ()):
            try:
                GroupOptions.of(group)
            except ConfigError as error:
                why = f"in group {at}, {error}"
        if why is None:
            differing = sorted(own["module"].keys() ^ state["module"].keys(), key=str)
            both = own["module"].keys() & state["module"].keys()
            differing += sorted(name for name in both if _shape(own["module"][name]) != _shape(state["module"][name]))
            if differing:
                why = f"module[{differing[0]!r}] is not as in this model"
        for name, arrays in own["optimizer"].items():
            for array, value in state["optimizer"].get(name, {}).items() if why is None else ():
                if array in arrays and torch.as_tensor(value).shape != arrays[array].shape:
                    why = f"{array} of {name!r} has another shape than in this model"
        if why is not None:
            raise ModelError(f"the state cannot be loaded: {why}. Load a state_dict() of an engine of this model")

    def numbers(self) -> RunNumbers:
        """All numbers of the run by name, settled and live: what a checkpoint holds.

        Raises:
            EngineStateError: as `state_dict`.
        """
        state, views = self.state_dict(), list(self.placed.views())
        names: list[list[str]] = [[] for _ in state["param_groups"]]
        for view in views:
            names[view.group].append(view.name)
        groups = [{"options": group, "parameters": of} for group, of in zip(state["param_groups"], names, strict=True)]
        facts: dict[str, Any] = {"optimizer": self.config.optimizer, "precision": self.config.precision}
        if self.config.precision != "exact":
            facts["seed"] = self.config.seed
        return RunNumbers(
            state["module"],
            state["optimizer"],
            {view.name: each.ranges_of(at) for each in self.placed.states for at, view in enumerate(each.layer.views)},
            {view.name: tuple(view.parameter.shape) for view in views},
            groups,
            facts,
            {name: state[name] for name in ("num_updates", "loss_scale")},
            self._adding,
            self.origin,
            self.placed.forget_pages,
        )

    @property
    def origin(self) -> Origin:
        """The run and its updates so far: what the files of a checkpoint say of themselves."""
        return self._origin._replace(num_updates=self.num_updates)

    @property
    def _adding(self) -> Adding:
        return Adding(self._ranks.size, self.config.gradient_accumulation, self.config.exchange)

    def save_checkpoint(self, folder: str | Path, *, scheduler: Any = None, position: Any = None) -> None:
        """Write all that a run needs to go on exactly: weights, states, counts and random states.

        An older checkpoint in `folder` stays until the new one is whole. All ranks save together, into a folder that
        all of them see. Any number of ranks may go on from it; ranks that are new take rank 0's random states. A run
        that then adds gradients in another order is not the same in its last bits, and a warning says so: with several
        ranks that accumulate, `exchange="micro_batch"` keeps the order on any number of them.

        Args:
            scheduler: a learning-rate scheduler, whose `state_dict()` is saved.
            position: where the loop is in its data, as numbers, texts, lists, dicts and tensors.

        Raises:
            EngineStateError: in the middle of an accumulation window: its gradients would be lost.
            OutputError: it cannot be written, `folder` holds other files, or another process writes it.
            ConfigError: `position` or the scheduler's state holds something that is not data.
            ModelError: the module's `state_dict()` does.
        """
        states = _states_of(scheduler)
        where = Path(os.path.realpath(path_of(folder, "folder")))  # a link stays, and what it leads to is replaced
        with phase("saving", self.telemetry.peaks, self.device):
            with self._ranks.together("claiming a checkpoint"):
                if self._ranks.rank == 0:
                    with written_to(where):
                        where.parent.mkdir(parents=True, exist_ok=True)
                        self._saves.claim(where)
            save_run(where, self.numbers(), self._ranks, scheduler=states, position=position)
        self.last_checkpoint, self._scheduler = where, scheduler

    def load_checkpoint(self, folder: str | Path, *, scheduler: Any = None) -> Any:
        """Go on from `save_checkpoint`, under any placement.

        Args:
            scheduler: one like that which was saved.

        Returns:
            The `position` that was saved.

        Raises:
            ModelError: the folder is not whole, a file is cut, or it is of another model. Nothing is changed then.
            ConfigError: another optimizer, precision, seed or working dtype, or it holds no scheduler. Nothing is
                changed then.
            EngineStateError: in the middle of an accumulation window.
        """
        self._check_open()
        folder, own = Path(os.path.realpath(path_of(folder, "folder"))), _states_of(scheduler)

        def took_weights() -> None:
            self.placed.take_over_outside_writes(keep_remainder=True)

        # Released: watched weights are copied before each piece is written, for remainders that are loaded anyway.
        # Weights in RAM that ranks share are written by all of them, with the same numbers, while nobody reads them.
        with (
            phase("resuming", self.telemetry.peaks, self.device),
            self.placed.outside.released(),
            self._ranks.together("resuming"),
        ):
            with self._ranks.together("beginning to resume"):
                numbers = self.numbers()
            values = load_run(folder, numbers, scheduler=own, took_weights=took_weights, ranks=self._ranks)
            self._go_on(values)
            self._origin = self._ranks.told(lambda: origin_from(folder))
        if scheduler is not None:
            scheduler.load_state_dict(values["scheduler"])
        self.last_checkpoint, self._scheduler = folder, scheduler
        self._saves.go_on_from(folder)
        return values.get("position")

    @property
    def last_checkpoint(self) -> Path | None:
        """The folder that this run has saved last, or goes on from. Errors of the update and of NaN name it, and
        `on_nonfinite="rollback"` goes back to it."""
        return self.loop.last_checkpoint

    @last_checkpoint.setter
    def last_checkpoint(self, folder: Path) -> None:
        self.loop.last_checkpoint = watchdog.state.last_checkpoint = folder
        self._num_saved_updates = self.num_updates

    def load_states(self, folder: Path, *, scheduler: Any = None) -> dict[str, Any]:
        """Load the states of a checkpoint whose weights the module has; returns the values in its `run.json`.

        Args:
            scheduler: one whose state they must hold; it is not loaded here.

        Raises:
            ModelError, ConfigError: as `load_checkpoint`.
        """
        numbers = self.numbers()
        with SavedStates(folder) as saved:
            values = numbers.check(folder, saved)
            if (states := _states_of(scheduler)) is not None:
                check_scheduler(folder, values, states)
            numbers.load_states(saved)
        self._go_on(values)
        self._origin = self._ranks.told(lambda: origin_from(folder))
        return values

    def _go_on(self, values: dict[str, Any]) -> None:
        """Take the options and counts of a saved run.

        It warns where gradients are added in another order now, and where this run was given other options.
        """
        saved_groups = [group["options"] for group in values["groups"]]
        scheduled = values.get("scheduler") is not None
        options = changed_options(self.optimizer.param_groups, saved_groups, scheduled=scheduled)
        for warning in (Adding(**values["adding"]).other_order(self._adding), options):
            if warning is not None and world.rank() == 0:
                warnings.warn(warning, RuntimeWarning, stacklevel=3)
        for group, saved in zip(self.optimizer.param_groups, values["groups"], strict=True):
            group.update(saved["options"])
        self.num_updates = values["counts"]["num_updates"]
        if self.loss_scale is not None and values["counts"]["loss_scale"]:
            self.loss_scale.load_state_dict(values["counts"]["loss_scale"])

    def _check_window(self) -> None:
        self._check_open()
        if self.loop.num_backwards:
            raise EngineStateError(
                f"{self.loop.num_backwards} micro-batches of an accumulation window are done, and their gradients are "
                "in no checkpoint: end the window with step() first, or drop them with optimizer.zero_grad()"
            )

    def master_weights(self) -> dict[str, torch.Tensor]:
        """fp32 copies of all master weights, in RAM, by parameter name; with several ranks this one's part, 1-D."""
        self.synchronize()
        return {view.name: state.master(view) for state in self.placed.states for view in state.layer.views}

    # ---- closing -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Apply pending updates, detach from the model and free the engine's memory.

        The model keeps its trained weights. It stays on its device if all its weights were there; else all of it is in
        RAM then, and weights that were there stay where they are. The optimizer's states are gone, and are freed
        before anything moves: closing takes no second copy of the weights. In a forked process nothing happens.

        Of several ranks all must close it. If an error is on its way to the caller (in `except` and `finally` too),
        this rank waits for no other one: these get a `RankError`. Parts of the newest update that other ranks have
        stepped may be missing in its weights then; a note on the error says so.

        Raises:
            NonFiniteGradientError: as `step`. The engine is closed then too.
        """
        if not self._open or os.getpid() != self._process:
            return
        failing = sys.exception() is not None  # an error is already on its way to the caller: do not hide it
        try:
            if self._ranks.is_failing:
                self._abandon()
            else:
                self._settle()
                self._read_reports()
        except OffloadkitError:
            if not failing:
                raise
        finally:
            self._open = False
            self._saves.end()
            self._steps_phase.close()
            with phase("closing", self.telemetry.peaks, self.device):
                self._let_go()

    def _abandon(self) -> None:
        """Tell the other ranks that this one has failed. They may wait for it anywhere, so it waits for nothing there.

        The newest update is done first: all ranks have begun it, or fail as well.
        """
        if self.loop.newest_update is not None:
            self.step_thread.finish(self.loop.newest_update)
        lacks = self.placed.abandon_ranks()
        self._ranks.fail()
        error = sys.exception()
        if lacks and error is not None:
            said = (
                "The weights of this process lack what other ranks have stepped in the newest update: save nothing of "
                "them, and go on from a checkpoint"
            )
            error.add_note(said)
            warnings.warn(said, RuntimeWarning, stacklevel=3)  # a handler may swallow the error

    def _let_go(self) -> None:
        """Detach from the model and free memory. Whatever fails, the model's weights are its own afterwards."""
        try:
            self._finalizer()
            self.optimizer.state.clear()
            self.loop.records.forget()
            self.loop.newest_update = None
            self.placed.release()
        finally:
            self.loop.let_go()
            del self.placed
            engine_closed(self.module)
            self.telemetry.close()
            hardware.trim_heap()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- as the module, and checks -------------------------------------------------------------------------------

    ranks = property(lambda self: self._ranks, doc="The processes that train the model together.")

    is_beginning = property(
        lambda self: self.replanner.first_window is not None,
        doc="Whether the placements are those to begin with: what the first window brings is planned for at its end.",
    )

    training = property(lambda self: self.module.training, doc="The module's mode.")

    def train(self, mode: bool = True) -> Self:
        """The module's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """The module's evaluation mode."""
        return self.train(False)

    def _check_open(self) -> None:
        if not self._open:
            raise EngineStateError("this engine is closed: build a new OffloadEngine to train on")
        if os.getpid() != self._process:
            raise forked("the engine was")
