"""`OffloadEngine`: exact AdamW training of models larger than the GPU, with weights and states in pinned RAM.

engine = OffloadEngine(model, OffloadConfig(learning_rate=1e-4))
for batch in batches:
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from offloadkit.checkpoint.origin import Origin
from offloadkit.checkpoint.run import RunSnapshot
from offloadkit.device import watchdog
from offloadkit.device.process_memory import forget_peak, phase
from offloadkit.distributed import world
from offloadkit.distributed.ranks import joined_ranks
from offloadkit.engine.checkpoints import Checkpoints
from offloadkit.engine.checks import (
    check_arguments,
    check_free,
    check_not_wrapped,
    engine_closed,
    engine_opened,
    used_elsewhere,
)
from offloadkit.engine.generation import Generation
from offloadkit.engine.loop import TrainingLoop
from offloadkit.engine.outline import FirstWindow
from offloadkit.engine.replanner import Replanner, Watches
from offloadkit.engine.run_state import RunState
from offloadkit.engine.start import Start, checked_groups
from offloadkit.errors import (
    EngineStateError,
    OffloadkitError,
)
from offloadkit.facts import hardware
from offloadkit.facts.changes import changed
from offloadkit.facts.config import OffloadConfig
from offloadkit.facts.files import path_of
from offloadkit.facts.telemetry import Telemetry
from offloadkit.offload.layers import (
    check_is_plan,
    check_memory,
    check_plan,
    flat_layers,
)
from offloadkit.offload.model import PlacedModel
from offloadkit.offload.plain import plain_copies
from offloadkit.offload.profiling import Profile
from offloadkit.offload.records import StepRecords
from offloadkit.offload.shortage import (
    explained_shortage,
    move_summary,
)
from offloadkit.offload.update import StepThread, Update
from offloadkit.offload.weights import forked_error
from offloadkit.optim.loss_scale import LossScale
from offloadkit.optim.torch_optimizer import OffloadOptimizer
from offloadkit.planner import Plan

_T = TypeVar("_T")


def _let_go_here(process: int, undo: ExitStack) -> None:
    """Detach from the model, except in a forked process, which has no threads, GPU or pinned memory."""
    if os.getpid() == process:
        with _disable_current_modes():  # the engine may be collected during torch.compile tracing
            undo.close()


class OffloadEngine:
    """Trains a module in place; its parameters become views of the engine's flat buffers.

    Attributes:
        module: the model. It can be used, saved and loaded at any time. Between steps its weights can be read and
            written as usual tensors; writes through raw pointers are not noticed.
        optimizer: a `torch.optim.Optimizer` for schedulers and checkpoints.
        plan: sizes and placement of everything. It changes when memory runs out, when measured rates differ from
            planned rates, and by `move`.
        telemetry: a record of every step.
        num_updates: updates so far, including those before a resume.
        loss_scale: factor for the next loss; None without fp16 working weights.
        own_return: set by a Trainer, which loads its own checkpoints: returns the checkpoint to go back to. None: the
            engine loads `last_checkpoint`.
        pinning_seconds: seconds spent populating and pinning RAM.
        newest_update: the last update that was started, or None.
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
        """Place the model. While the engine is open, transformers models compute as `docs/design.md` says.

        With several ranks (processes of a launcher, or of torch.distributed), the engines train one model on different
        micro-batches. All ranks must build, call and close their engines alike: building, backward, `step`, saving,
        moving, and the first use of weights after a `step` wait for the other ranks. After `synchronize` a rank may use
        the weights alone. Writes to weights must be made on all ranks.

        Args:
            model: any module. The plan places its trainable parameters, frozen ones of repeated blocks and frozen
                embeddings; other frozen parameters move to `device`. Parameters that `offloadkit.from_pretrained` left
                unread are read now, one flat layer at a time.
            param_groups: as for a torch optimizer. A group's lr, betas, eps and weight_decay override the config's;
                `optimizer` names its optimizer. Groups of `optimizer="muon"` have Muon's options instead of betas.
                Other options of torch's optimizers are refused if they would change the step.
            device: None: the GPU if available, else the CPU.
            plan: a plan for this model; None: the engine makes one. If free VRAM is too small for the plan, the engine
                begins with a leaner plan, with a warning.
            example: the largest expected micro-batch, for planning: a dict of forward's keyword arguments, a tuple or
                list of positional arguments, or one tensor. Shapes, dtypes, and integers that the model reads, such as
                `image_grid_thw`, matter: an attention mask, even of ones, is planned as one over padding. None: the
                engine begins with little in VRAM, and after the first window plans for the window's largest micro-batch
                and moves.
            evaluation_rows: batch size of evaluation, if larger than training's; counted by plans made here.

        Raises:
            ModelError: nothing can be trained, a dtype is not supported, or the plan is for another model.
            ModelError: the model is compiled, scripted or wrapped for distributed training, or a trained parameter
                shares memory with another tensor of the model.
            ConfigError: the plan was made with another accumulation, recomputation or placement, or a parameter group
                has an unsupported option. With several ranks: a layer's weights are in RAM on some ranks and in VRAM on
                others, or weights are in RAM and the ranks on several hosts.
            RankError: the ranks have different models or configs, only some of them plan, or they cannot share memory.
            EngineStateError: another open engine trains parameters of this model.
            DoesNotFitError: the plan made here exceeds the machine, or the config's `vram` or `ram`.
            OffloadkitError: too little RAM, an unsuitable disk, or a full GPU (`OutOfVramError`). The model is then
                restored, except for frozen parameters and buffers.
        """
        world.join()
        check_arguments(config, plan, evaluation_rows)
        self.module, self.config = model, config or OffloadConfig()
        check_not_wrapped(model)
        check_free(model, self.config)
        self.device, self.telemetry = hardware.device_of(device), telemetry or Telemetry()
        check_memory(model)
        groups = checked_groups(model, self.config, param_groups)
        self._layers = flat_layers(model, self.config, groups, used_elsewhere(model))
        self._undo = ExitStack()
        # Without the finalizer, an engine dropped without close() would keep its model and threads until exit.
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, _let_go_here, self._process, self._undo)
        self._ranks = joined_ranks(self.device)
        self._undo.callback(self._ranks.close)
        start = Start(model, self._layers, self.config, self.device, self._ranks, groups)
        start.divide_layers(plan is not None, example is None, self._undo)
        begun, first_window = start.plan(plan, example, evaluation_rows)
        watches = self._begin_watching(begun)
        self._place(begun)
        self._begin_run(groups, first_window, watches)
        self._open = True
        engine_opened(model, self)

    def _begin_watching(self, plan: Plan) -> Watches:
        """Start the threads, and make the changes to the model that do not depend on its placement."""
        forget_peak(self.device)  # OOM messages must report this engine's peak only
        self.step_thread = StepThread(self.device, self._ranks)
        self._undo.callback(self.step_thread.close)
        self._undo.callback(plain_copies(self.module))
        watches = Watches.start(plan, self.config, self.device, self.telemetry, self._undo)
        self.ram_watch = watches.ram
        self._undo.callback(changed(self.module, self.config, kernels=self.device.type != "cpu"))
        self._steps_phase, self._phase_name = ExitStack(), ""
        self._undo.callback(self._steps_phase.close)
        return watches

    def _place(self, plan: Plan) -> None:
        try:
            with explained_shortage(plan, self.device), phase("reading", self.telemetry.peaks, self.device):
                self.placed = PlacedModel(
                    self.module,
                    self._layers,
                    plan,
                    self.config,
                    self.device,
                    ranks=self._ranks,
                    ram_watch=self.ram_watch,
                    step_thread=self.step_thread,
                    settle=weakref.WeakMethod(self._settle),
                    undo=self._undo,
                )
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # a kept error must not keep layers' memory alive
            self._finalizer()
            raise
        if self.placed.plan is not plan:
            words = move_summary(plan, self.placed.plan)
            message = f"the GPU was full while the engine was built: the plan is leaner ({words})"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
            self.ram_watch.expect(self.placed.plan.tiers["ram"])
        self.pinning_seconds = self.placed.layers.pinning_seconds

    def _begin_run(
        self, groups: Sequence[dict[str, Any]] | None, first_window: FirstWindow | None, watches: Watches
    ) -> None:
        """Build the objects that train the placed model."""
        trained = {view.parameter for view in self.placed.layers.views()}
        self.optimizer = OffloadOptimizer(
            groups or [{"params": [p for p in self.module.parameters() if p in trained]}],
            self.config,
            self,
            {
                view.parameter: state.state_of(at)
                for state in self.placed.trained
                for at, view in enumerate(state.layer.views)
            },
        )
        records = StepRecords(
            self.telemetry, self.placed.plan, self.device, self.config.on_nonfinite, num_ranks=self._ranks.size
        )
        run = self.config, self.device, self._ranks
        self.loop = TrainingLoop(self.placed, self.step_thread, self.optimizer, records, *run)
        self.replanner = Replanner(
            self.loop, self.optimizer, self._layers, *run, self.telemetry, first_window=first_window, watches=watches
        )
        self._generation = Generation(self.loop, self.replanner, self.device, self.telemetry)
        state = RunState(self.loop, self.optimizer, self.config, self._ranks)
        self.checkpoints = Checkpoints(state, self.loop, self._ranks, self.telemetry, self.device)
        self.own_return: Callable[[], Path | None] | None = None
        self._ranks.take_received()  # not counted for any step
        self.telemetry.plan = self.plan

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

    # ---- one step, in time order -------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. Each layer's last update is finished before the layer is used.

        With gradients enabled, HuggingFace models do not use their key/value cache. Without gradients, a full GPU is
        handled as by `run_eval`.

        Raises:
            OutOfVramError: the GPU is out of memory. With gradients enabled, the gradients since the last update are
                dropped, and the error is a `RepeatWindowError` if the engine has moved to a leaner plan.
            ModelError: `use_cache=True` with gradients enabled.
        """
        self._check_open()
        if not torch.is_grad_enabled():
            return self.run_eval(lambda: self.module(*args, **kwargs))
        self._begin_phase("first step" if self.loop.newest_update is None else "training")
        with self._closing_if_lost(), self.replanner.recover_from_oom():
            output = self.loop.forward(args, kwargs)
        self.replanner.record_micro_batch(args, kwargs)
        return output

    def run_eval(self, run: Callable[[], _T], *, together: bool = False) -> _T:
        """Call `run()`, an evaluation or generation without gradients, with OOM recovery; returns its result.

        If the GPU is out of memory, the engine moves to a leaner plan and calls `run()` again. Random states, and
        buffers of a model in training mode, are reset to their values at the first call.

        Args:
            together: all ranks call it. If a GPU is full, all move, and the ranks with a full GPU call `run()` again.
                Otherwise several ranks cannot move, and the error is raised.

        Raises:
            OutOfVramError: no leaner plan is left, or an accumulation window is open (its gradients are kept).
        """
        self._check_open()
        with self._closing_if_lost():
            return self.replanner.run_eval(run, together=together)

    def run_generation(self, run: Callable[[], _T], *, model: nn.Module | None = None, cache_bytes: int = 0) -> _T:
        """Call `run()`, which generates text without gradients; returns its result.

        Weights in RAM stay in VRAM while it runs, if they fit beside the plan; otherwise they stream for every token,
        and a warning says so once. A full GPU is handled as by `run_eval`. All ranks must call it.

        Args:
            model: the part of the module that generates; None: all of it.
            cache_bytes: of keys and values at the end of `run`. The plan counts them in its phase `generation`.

        Raises:
            OutOfVramError: as `run_eval`.
        """
        self._check_open()
        with self._closing_if_lost():
            return self._generation.run(run, self.module if model is None else model, cache_bytes)

    def backward(self, loss: torch.Tensor, *, scale_by_accumulation: bool = True) -> None:
        """Backward of one micro-batch. Gradients are gathered, and sent to RAM, layer by layer.

        An error raised by backward itself drops the gradients since the last update and detaches `loss`, to free its
        graph.

        Args:
            loss: a scalar.
            scale_by_accumulation: divide the loss by `config.gradient_accumulation` and by the number of ranks. False:
                sum the gradients of all micro-batches of all ranks.

        Raises:
            EngineStateError: the loss requires no gradient, or in fp16 reaches parameters outside the model; or
                `backward` was called twice before `step()` without accumulation, or, on several ranks, more than
                `gradient_accumulation` times; or the last update has failed.
            OutOfVramError: the GPU is out of memory; a `RepeatWindowError` if the engine has moved to a leaner plan.
            TypeError: the loss is not a tensor.
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
        """Call after each `backward`. At the end of the accumulation window, starts the update without waiting for it.

        Args:
            boundary: whether the window ends here. None: it ends after `config.gradient_accumulation` micro-batches.

        Returns:
            Whether an update was started.

        Raises:
            EngineStateError: no `backward` since the last call.
            NonFiniteGradientError: NaN or Inf in the gradients of an earlier step (`on_nonfinite="raise"`), or of this
                step (`on_nonfinite="rollback"`). It is a `RolledBackError`, which says where to continue, if the engine
                has gone back to the last checkpoint; not without a checkpoint, or after `MAX_ROLLBACKS` times.
            ModelError: parameters were added, replaced or unfrozen since the engine was built.
            OutOfRamError: RAM is running out. Either no plan takes less and nothing was done, so `step` may be called
                again, or the update was started, but the move failed or, with several ranks, no leaner plan exists.
            OutOfVramError: a rank's GPU is out of memory, and the window's gradients are dropped; a `RepeatWindowError`
                if the engine has moved to a leaner plan.
        """
        self._check_open()
        if not self.loop.ends_window(boundary):
            return False
        self.loop.untrained.check()
        with self._closing_if_lost():
            shortage = self.replanner.check_memory()
            self.loop.read_reports()
            self.placed.layers.take_over_external_writes()
            agreed = self.replanner.agree(shortage)
            with self.replanner.recover_at_boundary():
                update = self.loop.start_update(agreed.order)
            self.loop.end_window(update)
            said = self.loop.why_not_finite(update) if self.config.on_nonfinite == "rollback" else None
            profile = self.loop.profile
            if profile is not None and profile.step(self._settle, self.loop.records.read, self.telemetry):
                self.loop.profile = None
            if said is not None:
                raise self.checkpoints.roll_back(update.number, said, self.own_return)
            self.replanner.after_update(agreed)
        return True

    def _begin_phase(self, name: str) -> None:
        if name != self._phase_name:
            self._steps_phase.close()
            self._steps_phase.enter_context(phase(name, self.telemetry.peaks, self.device))
            self._phase_name = name

    # ---- reading and settling ----------------------------------------------------------------------------------

    def grad_norm(self) -> float | None:
        """Global gradient norm of the newest update, before clipping; None before the first update. Waits for the
        norm.
        """
        self._check_open()
        if self.loop.newest_update is None:
            return None
        watchdog.wait(self.loop.newest_update.norm_known, "the gradient norm")
        self.loop.raise_thread_error()
        return self.loop.newest_update.norm

    def synchronize(self) -> None:
        """Wait until every update is applied, on host and device. Raises `NonFiniteGradientError` as `step`."""
        self._check_open()
        self.loop.synchronize()

    def profile(self, *, steps: int = 3, path: str | Path = "offloadkit-trace.json") -> Profile:
        """Trace `steps` steps, starting at the next boundary.

        Then writes a Chrome trace to `path` and prints the time of each phase and its bound, Python's time, and why
        blocks did not run as CUDA graphs. All ranks must call it; rank 1 writes to "NAME-rank1.json", and so on. The
        track "ranks" shows communication.

        Raises:
            OffloadkitError: `steps` is not a positive int, a trace is already running, or `path` cannot be written.
        """
        self.synchronize()
        self.loop.profile = Profile(
            steps, path_of(path, "path"), self.device, self._undo, self._ranks, self.placed.graphs
        )
        return self.loop.profile

    def drop_gradients(self) -> None:
        """Drop the gradients since the last update, as `optimizer.zero_grad()` does."""
        self._check_open()
        self.loop.drop_gradients()

    def _settle(self) -> None:
        if os.getpid() != self._process:
            raise forked_error("the model was")
        self.loop.settle()

    # ---- moving -------------------------------------------------------------------------------------------------

    def move(self, plan: Plan, *, why: str = "move() was called") -> None:
        """Move weights, gradients, states and activations to another plan of this model. No number changes.

        The engine finishes its updates and moves layer by layer, with at most one layer existing twice. Tensors of
        `optimizer.state` or `state_dict()` from before a move are no longer updated. All ranks must call it at the same
        step, with equal places for weights, and move together or not at all. If a move fails after layers have moved,
        all engines close.

        Args:
            plan: made for this model and config; only its `placement` may differ from the config's.
            why: for `telemetry.moves`.

        Raises:
            ModelError, ConfigError: the plan is for another model or config. Nothing has moved.
            EngineStateError: gradients are pending, or an outside tensor shares memory of a parameter that would move.
                Nothing has moved. Or the engine had to close: see below.
            NonFiniteGradientError: as `step`. Nothing has moved.
            OffloadkitError: too little RAM or disk, or a full GPU (`OutOfVramError`). Moved layers stay, `plan` has the
                present placements, and training can go on. If it cannot, the engine closes, and the model keeps its
                weights.
            RankError: another rank did not call it, or cannot move. Or the GPUs could not be reconnected: the engine
                closes, and the model keeps its weights.
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
    def recover_from_oom(self) -> Iterator[None]:
        """Context for at most one micro-batch: if the GPU runs out of memory, the engine moves to a leaner plan.

        Raises:
            RepeatWindowError: the engine has moved. The gradients since the last update were dropped.
            OutOfVramError: no leaner plan is left, or the move failed. The gradients were dropped too.
        """
        with self._closing_if_lost(), self.replanner.recover_from_oom():
            yield

    @contextmanager
    def _closing_if_lost(self) -> Iterator[None]:
        """Close the engine if a failed move makes it impossible to go on."""
        try:
            yield
        except BaseException:
            if self._open and self.replanner.is_lost:
                self.close()
            raise

    # ---- states by name ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of the run, as live tensors, not copies. With several ranks, "optimizer" has this rank's part.

        Returns:
            "module": the model's state_dict. "optimizer": the optimizer's `state`, by parameter name. "param_groups":
                options by group. "num_updates". "loss_scale": the state of the fp16 loss scale, else None.

        Raises:
            EngineStateError: an accumulation window is open, whose gradients would be lost.
        """
        self._check_open()
        return self.checkpoints.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict()` of an engine with the same parameters. Placements may differ. These errors
        change nothing:

        Raises:
            ModelError: the parameter names or the number of groups differ.
            ConfigError: the saved states have another optimizer, precision or working dtype.
            EngineStateError: an accumulation window is open.
        """
        self._check_open()
        self.checkpoints.state.load_state_dict(state)

    def snapshot(self) -> RunSnapshot:
        """The numbers of the run by name, settled and live: the content of a checkpoint.

        Raises:
            EngineStateError: as `state_dict`.
        """
        self._check_open()
        return self.checkpoints.state.snapshot()

    @property
    def origin(self) -> Origin:
        """Identity of the run and its number of updates, stored in a checkpoint's files."""
        return self.checkpoints.state.origin

    def save_checkpoint(self, folder: str | Path, *, scheduler: Any = None, position: Any = None) -> None:
        """Write everything that an exact continuation needs: weights, states, counts and random states. Frozen
        weights are included if the program wrote them after the engine was built; the base model has all other frozen
        weights. `checkpoint_precision` and `save_only_model` of the config make it smaller.

        An older checkpoint in `folder` stays until the new one is complete. All ranks save together, into a shared
        folder. Any number of ranks may continue from it; new ranks take rank 0's random states. If the continued run
        adds gradients in another order, its last bits differ, with a warning. With accumulation on several ranks,
        `exchange="micro_batch"` keeps the order for any number of ranks.

        Args:
            scheduler: a learning-rate scheduler, whose `state_dict()` is saved.
            position: the loop's position in its data, as numbers, texts, lists, dicts and tensors.

        Raises:
            EngineStateError: an accumulation window is open, whose gradients would be lost.
            OutputError: `folder` cannot be written, is too small, holds other files, or is being written by another
                process.
            ConfigError: `position` or the scheduler's state holds an object that is not data.
            ModelError: the module's `state_dict()` does.
        """
        self._check_open()
        self.checkpoints.save(folder, scheduler, position)

    def load_checkpoint(self, folder: str | Path, *, scheduler: Any = None) -> Any:
        """Continue from `save_checkpoint`, with any placement. A checkpoint without optimizer states
        (`save_only_model`) sets moments and step counts to zero, with a warning.

        Args:
            scheduler: a scheduler like the saved one.

        Returns:
            The saved `position`.

        Raises:
            ModelError: the folder is incomplete, a file is truncated, or it is of another model or other frozen
                weights. Nothing is changed.
            ConfigError: another optimizer, precision, seed or working dtype, or no saved scheduler. Nothing is changed.
            EngineStateError: an accumulation window is open.
        """
        self._check_open()
        return self.checkpoints.load(folder, scheduler)

    @property
    def last_checkpoint(self) -> Path | None:
        """The folder last saved or resumed from, for errors and `on_nonfinite="rollback"`."""
        return self.checkpoints.last

    @last_checkpoint.setter
    def last_checkpoint(self, folder: Path) -> None:
        self.checkpoints.last = folder

    def load_states(self, folder: Path, *, scheduler: Any = None) -> dict[str, Any]:
        """Load the states of a checkpoint whose weights the module already has; returns the values in its `run.json`.

        Args:
            scheduler: a scheduler whose state the checkpoint must hold; not loaded here.

        Raises:
            ModelError, ConfigError: as `load_checkpoint`.
        """
        self._check_open()
        return self.checkpoints.load_states(folder, scheduler)

    def master_weights(self) -> dict[str, torch.Tensor]:
        """fp32 copies of the master weights in RAM, by parameter name; with several ranks this rank's part, 1-D."""
        self._check_open()
        return self.checkpoints.state.master_weights()

    # ---- closing -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Apply pending updates, detach from the model and free the engine's memory.

        The model keeps its trained weights, on its device if all of them were there, otherwise all in RAM. Optimizer
        states are freed before weights move, so there is no second copy of the weights. In a forked process, nothing
        happens.

        All ranks must close. While an exception propagates (also in `except` and `finally`), this rank does not wait
        for the other ranks, which get a `RankError`. Its weights may then lack parts of the newest update that other
        ranks stepped; a note on the exception says so.

        Raises:
            NonFiniteGradientError: as `step`. The engine is closed nevertheless.
        """
        if not self._open or os.getpid() != self._process:
            return
        failing = sys.exception() is not None  # do not hide an exception that is propagating
        try:
            if self._ranks.is_failing:
                self._abandon()
            else:
                self._settle()
                self.loop.read_reports()
        except OffloadkitError:
            if not failing:
                raise
        finally:
            self._open = False
            self.checkpoints.end()
            self._steps_phase.close()
            with phase("closing", self.telemetry.peaks, self.device):
                self._let_go()

    def _abandon(self) -> None:
        """Notify the other ranks of this rank's failure, without waiting for them.

        The newest update is finished first: all ranks have begun it, or fail as well.
        """
        if self.loop.newest_update is not None:
            self.step_thread.finish(self.loop.newest_update)
        lacks = self.placed.abandon_ranks()
        self._ranks.fail()
        error = sys.exception()
        if lacks and error is not None:
            said = (
                "The weights of this process lack parts of the newest update that other ranks have stepped: do not "
                "save them, and resume from a checkpoint"
            )
            error.add_note(said)
            warnings.warn(said, RuntimeWarning, stacklevel=3)  # a handler may swallow the error

    def _let_go(self) -> None:
        """Detach from the model and free memory. After any failure in here, the model still owns its weights."""
        try:
            if self.replanner.first_window is not None:
                self.replanner.first_window.close()
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

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise EngineStateError(
            "an engine can be neither copied nor pickled, as it has threads and pinned memory: copy or pickle "
            "engine.module, which gives a plain model, or call engine.save_checkpoint()"
        )

    # ---- access to the module, and checks ------------------------------------------------------------------------

    ranks = property(lambda self: self._ranks, doc="The processes that train the model together.")

    is_beginning = property(
        lambda self: self.replanner.first_window is not None,
        doc=(
            "Whether the engine still uses its initial placements; it plans for the first window's micro-batches at "
            "its end."
        ),
    )

    training = property(lambda self: self.module.training, doc="The module's mode.")

    def train(self, mode: bool = True) -> Self:
        """Set the module's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the module's evaluation mode."""
        return self.train(False)

    def _check_open(self) -> None:
        if not self._open:
            raise EngineStateError("this engine is closed: build a new OffloadEngine to train on")
        if os.getpid() != self._process:
            raise forked_error("the engine was")
