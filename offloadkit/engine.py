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
import time
import traceback
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from offloadkit import hardware
from offloadkit.changes import changed
from offloadkit.checkpoint.folder import origin_from, written_to
from offloadkit.checkpoint.one_run import Saves
from offloadkit.checkpoint.origin import Origin
from offloadkit.checkpoint.run import Adding, RunNumbers, check_scheduler, load_run, save_run
from offloadkit.checkpoint.states import SavedStates
from offloadkit.checkpoint.values import random_states, set_random_states, why_unlike
from offloadkit.config import OffloadConfig
from offloadkit.device import watchdog
from offloadkit.device.assumed_disk import proposing_disk
from offloadkit.device.process_memory import VramCap, forget_peak, phase
from offloadkit.device.streams import record_compute
from offloadkit.distributed import world
from offloadkit.distributed.machine import shared_cores
from offloadkit.distributed.ranks import Group, joined_ranks
from offloadkit.errors import (
    ConfigError,
    EngineStateError,
    ModelError,
    NonFiniteGradientError,
    OffloadkitError,
    OutOfRamError,
    OutOfVramError,
    RankError,
    RepeatWindowError,
    RolledBackError,
    forget_last_error,
    shown,
)
from offloadkit.files import path_of
from offloadkit.offload.buffers import Buffers
from offloadkit.offload.layers import (
    FlatLayer,
    UntrainedParameters,
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
from offloadkit.offload.records import LOOK, StepRecords, num_tokens
from offloadkit.offload.shortage import (
    RamWatch,
    explained_shortage,
    full_gpu,
    moved_in_words,
    room,
    with_less_ram,
    with_less_vram,
    with_less_vram_at_rest,
    within_free_vram,
)
from offloadkit.offload.states import LayerState
from offloadkit.offload.update import StepThread, Update
from offloadkit.offload.weights import forked
from offloadkit.optim.loss_scale import LossScale
from offloadkit.optim.table import DTYPES, GroupOptions
from offloadkit.optim.torch_optimizer import OffloadOptimizer, changed_options, check_states
from offloadkit.outline import FirstWindow, chooses, plan_for
from offloadkit.planner import Plan, placed
from offloadkit.planner.plan import check_fits, of_rank
from offloadkit.telemetry import Move, Telemetry
from offloadkit.units import format_seconds, parse_bytes

logger = logging.getLogger(__name__)

MAX_ROLLBACKS = 3
"""Times that a run goes back to a checkpoint before it is past the step that held NaN."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Agreed:
    """What several ranks do at a boundary: the layers in the order in which they are stepped, the ranks where RAM is
    scarce, and whether all have measured enough steps."""

    order: Sequence[LayerState]
    scarce_on: list[int]
    rates_are_due: bool


_open_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[OffloadEngine]] = weakref.WeakKeyDictionary()


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


def is_trained(model: nn.Module) -> bool:
    """Whether an open engine trains parameters of `model`."""
    return _other(model) is not None


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")


def check_not_wrapped(model: nn.Module) -> None:
    """
    Raises:
        ModelError: the model is in a wrapper that trains it on several ranks, its weights are cut between them, or
            what is trained of it was compiled or scripted. Or it is quantised, without adapters beside.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {shown(model)}")
    for path, module in model.named_modules():
        name = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule) and any(each.requires_grad for each in module.parameters()):
            where = f"its module {path!r}" if path else "the model"
            raise ModelError(
                f"{where} is scripted (torch.jit.script or trace), and takes no hooks, by which the engine waits for "
                "weights: pass the module as it was before it was scripted, or freeze its parameters"
            )
        if name == "OptimizedModule" and any(parameter.requires_grad for parameter in module.parameters()):
            raise ModelError(
                "torch.compile() made this model, or a part of it: compiled as a whole, it would compute other numbers "
                "under each plan. Pass the model that was given to torch.compile(); OffloadConfig(compile_blocks=True) "
                "compiles its blocks"
            )
        if name in _WRAPPERS:
            raise ModelError(
                f"the model is wrapped in {name}, which is not needed: pass the module inside it (its `.module`). "
                "The engines of all ranks add up gradients themselves. In a loop with accelerate, give the DataLoader "
                "alone to `accelerator.prepare`"
            )
    for parameter_name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise ModelError(
                f"the parameter {parameter_name!r} is a DTensor, cut between ranks by FSDP or tensor parallelism: pass "
                "the model as it was before; the engines of all ranks share the states themselves"
            )
    _check_not_quantised(model)


_QUANTISERS = ("bitsandbytes", "torchao", "quanto", "optimum")
"""Packages whose kinds of tensors hold quantised weights."""


def _check_not_quantised(model: nn.Module) -> None:
    """
    Raises:
        ModelError: weights are quantised, and no adapters (PEFT) were put beside them: what is left would be trained.
    """
    modules = dict(model.named_modules())
    if any(getattr(module, "peft_config", None) for module in modules.values()):
        return
    what = None
    for path, module in modules.items():
        if getattr(module, "is_quantized", False) is True or ".quantized." in type(module).__module__:
            what = f"its module {path!r} ({type(module).__name__})" if path else f"the model ({type(module).__name__})"
    for name, parameter in model.named_parameters():
        if type(parameter).__module__.partition(".")[0] in _QUANTISERS:
            what = f"its parameter {name!r} ({type(parameter).__name__})"
    if what is not None:
        raise ModelError(
            f"{what} is quantised, and quantised weights cannot be trained: only what is left beside them would be. "
            "Load the model without quantization_config, or call its dequantize() first; or put adapters on it (PEFT)"
        )


def _check_free(model: nn.Module, config: OffloadConfig) -> None:
    """
    Raises:
        EngineStateError: an open engine trains the model, or another one that shares trained parameters with it. Or
            another one computes with frozen parameters of it, which would be cast.
    """
    if _other(model) is not None:
        forget_last_error()  # nobody may reach it any more: an interrupt's frames hold it, or a cycle does
    if (other := _other(model)) is not None:
        which = "this model" if other is model else f"a {type(other).__name__} with parameters of this model"
        raise EngineStateError(f"{which} already has an open engine: call its close() first, or that of its Trainer")
    if config.working_dtype == "auto":
        return
    dtype, others = DTYPES[config.working_dtype], [at for at, engine in list(_open_engines.items()) if engine()]
    theirs = {id(parameter) for other in others for parameter in other.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in theirs and parameter.dtype.is_floating_point and parameter.dtype != dtype:
            raise EngineStateError(
                f"the frozen parameter {name!r} is {parameter.dtype}, and another model with an open engine computes "
                f"with it: working_dtype={config.working_dtype!r} would cast it. Train both with one working dtype"
            )


def _other(model: nn.Module) -> nn.Module | None:
    """A model with an open engine that trains parameters of `model`."""
    trained = _trained(model)
    for other, engine in list(_open_engines.items()):
        if engine() is not None and not trained.isdisjoint(_trained(other)):
            return other
    return None


def _trained(model: nn.Module) -> set[int]:
    """The ids of parameters, since using one may be watched."""
    return {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


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
        _check_free(model, self.config)
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
        trained = {view.parameter for layer in layers for view in layer.views}
        self._first_window: FirstWindow | None = None
        plan = plan or self._planned(model, layers, example, evaluation_rows)
        check_plan(plan, layers, self.config)
        self._connect(plan)
        plan = self._own(plan, layers)
        here = (each for each in (*model.parameters(), *model.buffers()) if each.device == self.device)
        self.plan = within_free_vram(plan, self.device, sum(each.nbytes for each in here), self._ranks)
        if self.plan is not plan:
            self.plan = self._own(self.plan, layers)
            words = moved_in_words(plan, self.plan)
            message = f"less VRAM is free than was planned with: the plan is leaner ({words})"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        forget_peak(self.device)  # a full GPU is explained by this engine's
        self.step_thread = StepThread(self.device, self._ranks)
        self._undo.callback(self.step_thread.close)
        self._undo.callback(plain_copies(model))
        self.ram_watch = RamWatch(self.plan.tiers["ram"])
        self._undo.callback(self.ram_watch.close)
        self._rate_watch = RateWatch(self.plan)
        self._undo.callback(self.telemetry.subscribe(self._rate_watch.add))
        vram = self.config.vram
        self._vram_cap = VramCap(None if vram is None else parse_bytes(vram), self.device)
        self._undo.callback(self._vram_cap.remove)
        self._undo.callback(changed(model, self.config, kernels=self.device.type != "cpu"))
        self._steps_phase, self._phase_name = ExitStack(), ""
        self._undo.callback(self._steps_phase.close)
        begun = self.plan
        try:
            with explained_shortage(begun, self.device), phase("reading", self.telemetry.peaks, self.device):
                self.placed = PlacedModel(
                    model,
                    layers,
                    self.plan,
                    self.config,
                    self.device,
                    ranks=self._ranks,
                    ram_watch=self.ram_watch,
                    leaner=self._leaner,
                    submit=self.step_thread.submit,
                    settle=weakref.WeakMethod(self._settle),
                    undo=self._undo,
                )
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # the error may be kept: it must not hold what layers took
            self._finalizer()
            raise
        if self.plan is not begun:
            words = moved_in_words(begun, self.plan)
            message = f"the GPU was full while the engine was built: the plan is leaner ({words})"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            self.ram_watch.expect(self.plan.tiers["ram"])
        self.pinning_seconds = self.placed.pinning_seconds
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
        self._untrained = UntrainedParameters(model, trained)
        self._records = StepRecords(
            self.telemetry,
            self.plan,
            self.device,
            self.config.on_nonfinite,
            num_ranks=self._ranks.size,
        )
        has_fp16 = any(layer.dtype == torch.float16 for layer in layers)
        self.loss_scale = LossScale(self.config.loss_scale) if has_fp16 else None
        self.newest_update: Update | None = None
        self._last_checkpoint: Path | None = None
        self._origin = self._ranks.told(Origin.of_new_run)
        self._saves = Saves()
        self._scheduler: Any = None
        """That of the last checkpoint."""
        self._num_saved_updates = self._failed_at = self._num_rollbacks = 0
        """Updates in the last checkpoint; the furthest update that held NaN, and how often training went back since."""
        self.own_return: Callable[[], Path | None] | None = None
        self._profile: Profile | None = None
        self._ranks.take_received()  # it was no step's
        self.num_updates = self._num_backwards = 0
        self._stepped = self._overflow_known = self._open = True
        self._has_graph = self._in_last = False
        self.telemetry.plan = self.plan
        _open_engines[model] = weakref.ref(self)

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

    def _planned(self, model: nn.Module, layers: list[FlatLayer], example: Any, evaluation_rows: int) -> Plan:
        """The plan to begin with, where none is given.

        Raises:
            DoesNotFitError: it does not fit.
        """
        made = None
        if example is not None:
            more: Any = {"evaluation_rows": evaluation_rows, "ranks": self._ranks}
            made = plan_for(model, self.config, self.device, example, **more)
        if made is None and not chooses(self.config, self.device):
            return plan_of(model, layers, self.config)
        if made is None:
            first = FirstWindow(model, layers, self.config, self.device, evaluation_rows, self._ranks)
            made, self._first_window = first.plan, None if first.is_settled else first
        check_fits(proposing_disk(made))
        return made

    def _connect(self, plan: Plan) -> None:
        """Connect the ranks' GPUs as `plan` has it."""
        self._ranks.connect(plan.basis.hardware.most_ctas if plan.basis.hardware else 0)

    def _own(self, plan: Plan, layers: list[FlatLayer]) -> Plan:
        """`plan`, with what this rank has of each layer."""
        return plan if self._ranks.size == 1 else of_rank(plan, [layer.shape() for layer in layers])

    def _leaner(self) -> Plan | None:
        """Takes a plan with less in VRAM as the plan, and returns it; None if there is none."""
        plan = with_less_vram(self.plan, self.device) if self._ranks.size == 1 else None
        self.plan = plan or self.plan
        return plan

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
        if kwargs.get("use_cache") and self.placed.caching:
            raise ModelError(
                "use_cache=True in training: cached keys and values serve generation only. Leave it out, or call the "
                "engine under torch.no_grad()"
            )
        self._begin_phase("first step" if self.newest_update is None else "training")
        if not self.module.training and self.placed.recomputes_in_training and self.newest_update is None:
            warnings.warn(
                "the model is in eval mode, in which blocks of transformers keep their activations although the plan "
                "has them recomputed: call model.train() first",
                RuntimeWarning,
                stacklevel=2,
            )
        with (
            self.makes_room(),
            self._records.forward(num_tokens(self.module, kwargs)),
            self.placed.in_forward(),
        ):
            try:
                output = self.module(*args, **kwargs)
            except (RuntimeError, TypeError, AttributeError) as error:
                if not isinstance(error, torch.OutOfMemoryError):
                    self._untrained.check()  # it may be what made forward fail
                raise
        if self._first_window is not None:
            self._first_window.saw(args, kwargs)
        self._has_graph = True
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
        states, buffers = random_states(), Buffers()
        if self.module.training:
            buffers.keep(self.module)
        while True:
            try:
                with explained_shortage(self.plan, self.device):
                    found = run()
            except OutOfVramError as error:
                said = not isinstance(error.__cause__, torch.OutOfMemoryError)  # why it cannot go on, by a call within
                if said or not self._open or isinstance(error, RepeatWindowError):
                    raise
                traceback.clear_frames(error.__traceback__)  # what failed must not hold its activations any more
                self._leave_vram_at_rest(error)
                buffers.restore()
                set_random_states(states)
            except BaseException:
                if self._open:
                    self.placed.end_modules()
                raise
            else:
                self._vram_cap.renew("evaluation")
                return found

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
        if not isinstance(loss, torch.Tensor):
            raise TypeError(
                f"backward() takes the loss, a scalar tensor, and got a {type(loss).__name__}: pass the loss that the "
                "model's output holds, such as engine(**batch).loss"
            )
        accumulation = self.config.gradient_accumulation
        if accumulation == 1 and self._num_backwards:
            raise EngineStateError(
                "backward() was called twice before step(), but gradient_accumulation is 1: "
                "call step() after each backward(), or set OffloadConfig(gradient_accumulation=...)"
            )
        if self.placed.gradients.window_is_full:
            raise EngineStateError(
                f"backward() was called more than gradient_accumulation={accumulation} times in a window: the ranks "
                "exchange their sums in the last one. Call step(boundary=True) before it, or set "
                "OffloadConfig(gradient_accumulation=...)"
            )
        if loss.numel() != 1:
            raise ValueError(f"backward() takes a scalar loss, got a tensor of shape {tuple(loss.shape)}")
        if not loss.requires_grad:
            raise EngineStateError(
                "backward() got a loss that requires no gradient: compute it by engine(...) with gradients enabled, "
                "and do not detach it. (The loss of a backward() that failed is detached: call engine(...) again.)"
            )
        if self._exchanges_last and self._num_backwards + 1 == accumulation:
            self._check_whole(loss)
            self._in_last = True
        with self.makes_room():
            self._backward(loss, accumulation * self._ranks.size if scale_by_accumulation else 1)
        if self._exchanges_each:
            self._check_whole()
        self._num_backwards += 1
        self._stepped = self._has_graph = False

    def _backward(self, loss: torch.Tensor, divisor: int) -> None:
        given = loss
        if self.loss_scale is not None and self.config.loss_scale != 1:
            self._check_nothing_outside(loss)
        if divisor > 1:
            loss = loss / divisor
        self.placed.gradients.ends_window = self._num_backwards + 1 == self.config.gradient_accumulation
        with self._records.backward(loss):
            self._update_loss_scale()
            try:
                with self.placed.in_backward():
                    loss = loss if self.loss_scale is None else loss.float() * self.loss_scale.scale
                    loss.backward()  # type: ignore[no-untyped-call]
            except BaseException as error:
                if self._ranks.size == 1 or not isinstance(error, torch.OutOfMemoryError):
                    self.drop_gradients()  # else `makes_room` does, when the other ranks know
                with suppress(RuntimeError):  # a view of a larger tensor
                    given.detach_()  # somebody may keep it, and with it what its graph holds
                if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                    self._untrained.check()  # it may be what made backward fail
                raise

    def _check_nothing_outside(self, loss: torch.Tensor) -> None:
        """In the first backward: a scaled loss would give parameters outside of the model scaled gradients.

        Raises:
            EngineStateError: the loss reaches such a parameter.
        """
        if self.newest_update is not None or self._num_backwards:
            return
        own = {id(view.parameter) for view in self.placed.views()}
        seen, waiting = set(), [loss.grad_fn]
        while waiting:
            node: Any = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
                raise EngineStateError(
                    f"the loss reaches a parameter of shape {tuple(leaf.shape)} outside of the engine's model, and in "
                    "fp16 the engine multiplies the loss by a scale that only its own step divides by: make it part of "
                    "the model, freeze it, or train in bf16 or with OffloadConfig(loss_scale=1.0)"
                )
            waiting += [following for following, _ in node.next_functions]

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
        if self._stepped and not (boundary and self._num_backwards):
            raise EngineStateError("step() was called before backward(): call engine.backward(loss) first")
        if not (self._num_backwards >= self.config.gradient_accumulation if boundary is None else boundary):
            self._stepped = True
            return False
        self._untrained.check()
        self._vram_cap.renew("training")
        scarce, leaner = self.ram_watch.warning(), None
        if scarce is not None and self._ranks.size == 1:
            leaner = with_less_ram(self.plan, self.device)
            if leaner is None:
                raise OutOfRamError(scarce)
        self._read_reports()
        self.placed.take_over_outside_writes()
        agreed = self._agree(is_scarce=scarce is not None) if self._ranks.size > 1 else None
        # With several ranks the others step already: who is full here cannot have them repeat the window.
        alone = agreed is None
        with self.makes_room() if alone else explained_shortage(self.plan, self.device, self.drop_gradients):
            try:
                update = self._new_update(None if agreed is None else agreed.order)
                self.step_thread.start(update)
            except BaseException:  # also an interrupt: nothing may wait for an update that was never started
                self.placed.forget_pending()
                self.drop_gradients()
                raise
        self.num_updates += 1
        self.newest_update, self._overflow_known, self._stepped, self._num_backwards = update, False, True, 0
        self._in_last = False
        rate, received = self.optimizer.param_groups[0]["lr"], self._ranks.take_received()
        self._records.end_window(update, rate, self.placed.take_busy(), received)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers look at
        said = self._what_is_not_finite(update) if self.config.on_nonfinite == "rollback" else None
        if self._profile is not None and self._profile.step(self._settle, self._records.read, self.telemetry):
            self._profile = None
        if said is not None:
            raise self._roll_back(update.number, said)
        if agreed is not None and agreed.scarce_on:
            self._leave_ram_together(agreed.scarce_on, scarce)
        elif leaner is not None:
            self._leave_ram(leaner, scarce)
        elif self._first_window is not None:
            self._move_after(self._first_window)
        elif self._rates_are_due if agreed is None else agreed.rates_are_due:
            self._move_for_rates()
        return True

    def _agree(self, *, is_scarce: bool) -> _Agreed:
        """What all ranks do at this boundary.

        Raises:
            RepeatWindowError: a rank's GPU was full in this window, and all have moved to a leaner plan.
            OutOfVramError: so it was, and all stay where they are.
            EngineStateError: the ranks have gone apart.
        """
        if self._exchanges_last and not self._in_last:
            self._check_whole()
        window = self.num_updates, self._num_backwards
        try:
            wished, order = self.placed.agree(self._ranks, window, (False, is_scarce, self._rates_are_due))
        except BaseException:
            self.drop_gradients()
            raise
        full, scarce, due = wished.astype(bool).T
        if full.any():
            raise self._repeat_together(full)
        return _Agreed(order, np.flatnonzero(scarce).tolist(), bool(due.all()))

    @property
    def _rates_are_due(self) -> bool:
        return self._rate_watch.is_due and self._profile is None

    def _begin_phase(self, name: str) -> None:
        """The steps' peaks of memory count as those of `name` from here on."""
        if name != self._phase_name:
            self._steps_phase.close()
            self._steps_phase.enter_context(phase(name, self.telemetry.peaks, self.device))
            self._phase_name = name

    def _new_update(self, order: Sequence[LayerState] | None) -> Update:
        """A snapshot of what the stepping thread needs. From here on, forward waits for the updated layers.

        order: of the layers, where several ranks have agreed on it.
        """
        layers = self.placed.start_update(order)
        options = [GroupOptions.of(group) for group in self.optimizer.param_groups]
        update = Update(self.num_updates + 1, layers, options, self.config.max_grad_norm, record_compute(self.device))
        if self.loss_scale is not None:
            update.loss_scale, update.scale_may_fall = self.loss_scale.scale, self.loss_scale.can_fall
        if self._profile is not None:
            self._profile.boundary()
        return update

    def _update_loss_scale(self) -> None:
        """Adapt the loss scale to whether the last window overflowed, once per window.

        The wait for the norm is short: forward has already waited for that update.
        """
        if self.loss_scale is None or self.newest_update is None or self._overflow_known or self._num_backwards:
            return
        watchdog.wait(self.newest_update.norm_known, "the gradient norm")
        self._overflow_known = True
        self.loss_scale.update(overflow=self.newest_update.skipped)

    # ---- reading and settling ----------------------------------------------------------------------------------

    def grad_norm(self) -> float | None:
        """Global gradient norm of the newest update, before clipping; None before the first update.

        It waits until the norm is known.
        """
        self._check_open()
        if self.newest_update is None:
            return None
        watchdog.wait(self.newest_update.norm_known, "the gradient norm")
        self._raise_thread_error()
        return self.newest_update.norm

    def synchronize(self) -> None:
        """Wait until every update is applied, on the host and on the device.

        Raises:
            NonFiniteGradientError: as `step`.
        """
        self._check_open()
        self._settle()
        self._update_loss_scale()
        self.placed.take_over_outside_writes()
        self._records.wait()
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
        self._profile = Profile(steps, path_of(path, "path"), self.device, self._undo, self._ranks)
        return self._profile

    def drop_gradients(self) -> None:
        """Drop the gradients gathered since the last update, as `optimizer.zero_grad()` does."""
        self._check_open()
        self.placed.gradients.drop()
        self._records.drop_window()
        self._num_backwards, self._stepped, self._has_graph, self._in_last = 0, True, False, False

    def _settle(self) -> None:
        if os.getpid() != self._process:
            raise forked("the model was")
        if self.newest_update is not None:
            self.step_thread.finish(self.newest_update)
        self._raise_thread_error()
        self.placed.settle()

    def _read_reports(self) -> None:
        """Record the steps that have finished in the telemetry, and report those that were not applied."""
        self._raise_thread_error()
        try:
            self._records.read()
        except NonFiniteGradientError as error:
            self.drop_gradients()
            raise NonFiniteGradientError(f"{error}. {watchdog.in_words(self.last_checkpoint)}") from None

    def _what_is_not_finite(self, update: Update) -> str | None:
        """Wait for the newest update's norm; a sentence about it if it is not finite, and that is not the loss scale's
        fault. Several ranks have the same norm, so they go back together."""
        watchdog.wait(update.norm_known, "the gradient norm")
        self._raise_thread_error()
        try:
            self._records.read()
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
            if self._num_backwards or self.placed.is_busy:
                raise EngineStateError(
                    "move() was called inside an accumulation window: call it after the step() that ends the window, "
                    "or after drop_gradients()"
                )
            check_is_plan(plan)
            check_plan(plan, self._layers, replace(self.config, placement=plan.basis.config.placement))
        self.synchronize()
        self._move(plan, why)

    def _move(self, plan: Plan, why: str) -> None:
        """`move` where no gradients are gathered."""
        began, before, plan = time.perf_counter(), self.plan, self._own(plan, self._layers)
        self._settle()
        self.step_thread.settle()
        self.placed.take_over_outside_writes()
        with self._ranks.together("beginning to move"):
            self.placed.check_movable(plan.placements)
        try:
            self._connect(plan)
        except BaseException:
            self.close()  # nothing can go between the ranks any more; the model has its weights
            raise
        try:
            with explained_shortage(plan, self.device), torch.inference_mode(False), torch.no_grad():
                self.placed.move(plan.placements, self._has_moved)
        except BaseException as error:
            if not self.placed.is_whole:
                self.close()
                if not isinstance(error, Exception):
                    raise  # an interrupt
                alone = self._ranks.size == 1
                apart = "and so did going on with what had moved" if alone else "on this rank or another"
                raise EngineStateError(
                    f"a move failed, {apart}: the engine is closed, and the model has its weights; the optimizer's "
                    f"states are gone. Go on from a checkpoint ({error})"
                ) from error
            plan = placed(before, self.placed.placements)
            raise
        finally:
            if self._open:
                self.plan = self._records.plan = self.telemetry.plan = plan
                self.ram_watch.expect(plan.tiers["ram"])
                self._rate_watch.begin(plan)
        seconds = time.perf_counter() - began
        self._vram_cap.watch()
        forget_peak(self.device)  # it was the other plan's: a GPU that is full again is explained by this one's
        old, new = ({tier: each.total_bytes(tier) for tier in each.tiers} for each in (before, plan))
        self.telemetry.moves.append(Move(self.num_updates, why, old, new, seconds))

    @contextmanager
    def makes_room(self) -> Iterator[None]:
        """A context in which a full GPU makes the engine move to a leaner plan. It spans a micro-batch at most.

        With several ranks, this one computes nothing more in the window, and takes part in what the others wait for
        until all agree that it is void.

        Raises:
            RepeatWindowError: it did so. The gradients since the last update were dropped.
            OutOfVramError: no leaner plan is left, or the move failed. The gradients were dropped too.
        """
        num_backwards = self._num_backwards
        drop = self.drop_gradients if self._ranks.size == 1 else lambda: None
        try:
            with explained_shortage(self.plan, self.device, drop):
                yield
        except RepeatWindowError:
            raise
        except OutOfVramError as error:
            if error.is_final or not self._open:  # an inner one could not make room
                raise
            traceback.clear_frames(error.__traceback__)  # the failed window must not hold its activations any more
            if self._ranks.size == 1:
                raise self._leave_vram(error, "the GPU's memory was full") from error.__cause__
            full = self._void_window(error, has_joined=self._num_backwards > num_backwards)
            raise self._repeat_together(full, error) from error.__cause__

    @property
    def _exchanges_each(self) -> bool:
        """Whether several ranks exchange gradients in each of a window's micro-batches: they agree after each then."""
        return self._accumulates_on_ranks and self.config.exchange == "micro_batch"

    @property
    def _exchanges_last(self) -> bool:
        """Whether they do in the last one only: they agree before it, or where the window ends sooner."""
        return self._accumulates_on_ranks and self.config.exchange == "step"

    @property
    def _accumulates_on_ranks(self) -> bool:
        return self._ranks.size > 1 and self.config.gradient_accumulation > 1

    def _check_whole(self, loss: torch.Tensor | None = None) -> None:
        """Several ranks come here together, and know then whether one of them is full and waits here.

        loss: of a micro-batch that no backward follows if one is.

        Raises:
            OutOfVramError: one is; a `RepeatWindowError` if all have moved to a leaner plan.
        """
        full = self._ranks.agree(np.array([0]))[:, 0].astype(bool)
        if full.any():
            if loss is not None:
                with suppress(RuntimeError):  # a view of a larger tensor
                    loss.detach_()
            raise self._repeat_together(full)

    def _void_window(self, error: OutOfVramError, *, has_joined: bool) -> NDArray[np.bool_]:
        """This rank cannot finish the window: wait until all ranks know that. Returns which of them cannot.

        Args:
            has_joined: whether it has finished the backward of this micro-batch.

        Raises:
            OutOfVramError: it cannot know what the others do next.
        """
        if not has_joined:
            self.placed.gradients.ends_window = self._in_last
            with explained_shortage(self.plan, self.device):
                self.placed.join_rest()
        self._settle()
        if self._exchanges_last and not self._in_last:
            return self._ranks.agree(np.array([1]))[:, 0].astype(bool)
        if not self._exchanges_each:
            window = self.num_updates, self._num_backwards
            return self.placed.agree(self._ranks, window, (True, False, False))[0][:, 0].astype(bool)
        if has_joined:  # another micro-batch may come, or the end of the window
            self.drop_gradients()
            error.is_final = True
            raise error
        return self._ranks.agree(np.array([1]))[:, 0].astype(bool)

    def _repeat_together(self, full: NDArray[np.bool_], error: OutOfVramError | None = None) -> OutOfVramError:
        """All ranks know that the window is void: drop it and move; returns the error to raise.

        Args:
            full: [ranks], whose GPU is.
            error: this rank's, if its GPU is.
        """
        self.drop_gradients()
        self._settle()  # the stepping thread talks to the other ranks until then
        rank = int(full.argmax())
        said = f"the memory of rank {rank}'s GPU was full"
        return self._leave_vram(error or OutOfVramError(f"{said}: its error says more"), said)

    def _leave_vram(self, error: OutOfVramError, why: str) -> OutOfVramError:
        """Move to a plan with less VRAM; returns the error to raise."""
        plan, full = with_less_vram(self.plan, self.device, self._ranks), full_gpu(self.plan, self.device)
        error.is_final = True
        if plan is None:
            return error
        try:
            words = self._move_with_a_warning(plan, why, stacklevel=6)
        except OffloadkitError as failure:
            failed = OutOfVramError(f"{error}. The move to a leaner plan failed: {failure}")
            failed.is_final = True
            return failed
        if self._ranks.size > 1:
            full = why
        return RepeatWindowError(
            f"{full}. The engine has moved to a leaner plan ({words}), which changes no number. The gradients since "
            "the last update were dropped: repeat this window, from its first micro-batch and with the random states "
            "that it had, and training goes on as if nothing had been"
        )

    def _leave_vram_at_rest(self, error: OutOfVramError) -> None:
        """Move to a plan with less VRAM, between windows.

        Raises:
            OutOfVramError: `error`, with why there is no such move.
        """
        if self._num_backwards or self._has_graph or self.placed.is_busy:
            raise OutOfVramError(
                f"{error}. An accumulation window is under way, in which nothing can move: evaluate and generate after "
                "the step() that ends it, and the engine makes room"
            ) from error
        plan = with_less_vram_at_rest(self.plan, self.device) if self._ranks.size == 1 else None
        if plan is None:
            raise error
        try:
            self._move_with_a_warning(plan, "the GPU's memory was full in an evaluation", stacklevel=6)
        except OffloadkitError as why:
            raise OutOfVramError(f"{error}. The move to a leaner plan failed: {why}") from error

    def _leave_ram_together(self, ranks: list[int], scarce: str | None) -> None:
        """Several ranks move to a plan with less RAM, since it is scarce on some of them.

        Raises:
            OutOfRamError: no plan takes less, or the move failed.
        """
        self._settle()  # the stepping thread talks to the other ranks until then
        scarce = scarce or f"RAM is running out on rank {ranks[0]}, whose error says more"
        plan = with_less_ram(self.plan, self.device, self._ranks)
        if plan is None:
            raise OutOfRamError(scarce)
        self._leave_ram(plan, scarce)

    def _leave_ram(self, plan: Plan, scarce: str | None) -> None:
        """Move to a plan with less RAM.

        Raises:
            OutOfRamError: the move failed.
        """
        try:
            self._move_with_a_warning(plan, "RAM was running out", stacklevel=4)
        except OffloadkitError as error:
            raise OutOfRamError(f"{scarce}. The move to a plan with less RAM failed: {error}") from error

    def _move_with_a_warning(self, plan: Plan, why: str, *, stacklevel: int) -> str:
        """`_move`, and a line that says so; returns what changed, in words."""
        before = self.plan
        self._move(plan, why)
        words, seconds = moved_in_words(before, plan), format_seconds(self.telemetry.moves[-1].seconds)
        message = f"{why} after step {self.num_updates}: the plan has moved in {seconds} ({words})"
        warnings.warn(message, RuntimeWarning, stacklevel=stacklevel)
        return words

    def _move_after(self, first: FirstWindow) -> None:
        """Move to the plan for what the first window brought. Training goes on as it began if that cannot be.

        Raises:
            DoesNotFitError: there is no GPU, and a budget is too small for it; so it is after every further window.
        """
        if self._ranks.size > 1:
            self._settle()  # the stepping thread talks to the other ranks until then
        plan = first.plan_now()
        self._first_window = None
        if plan is None:
            return
        try:
            self._move(plan, "the first window was done, and its micro-batches are planned for")
        except OffloadkitError as error:
            if not self._open:
                raise
            logger.warning(f"training goes on as it began, not as planned for its micro-batches: {error}")

    def _move_for_rates(self) -> None:
        """Move where measured rates say that another plan is faster. Training goes on as it is if that cannot be."""
        if self._ranks.size > 1:
            self._settle()  # the stepping thread talks to the other ranks until then
        found = self._rate_watch.judge(self.placed.assigned, lambda: room(self.plan, self.device), self._ranks)
        if found is None:
            return
        try:
            self._move_with_a_warning(*found, stacklevel=4)
        except OffloadkitError as error:
            if not self._open:
                raise
            logger.warning(f"{found[1]}, and a faster plan was found, but the move to it failed: {error}")

    def _has_moved(self, state: LayerState) -> None:
        for at, view in enumerate(state.layer.views):
            self.optimizer.state[view.parameter].update(state.state_of(at))

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
        return self._last_checkpoint

    @last_checkpoint.setter
    def last_checkpoint(self, folder: Path) -> None:
        self._last_checkpoint = watchdog.state.last_checkpoint = folder
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
        if self._num_backwards:
            raise EngineStateError(
                f"{self._num_backwards} micro-batches of an accumulation window are done, and their gradients are in "
                "no checkpoint: end the window with step() first, or drop them with optimizer.zero_grad()"
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
        if self.newest_update is not None:
            self.step_thread.finish(self.newest_update)
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
            self._records.forget()
            self.newest_update = None
            self.placed.release()
        finally:
            del self.placed, self._records
            _open_engines.pop(self.module, None)
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
        lambda self: self._first_window is not None,
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

    def _raise_thread_error(self) -> None:
        if self.step_thread.error is None:
            return
        said = watchdog.in_words(self.last_checkpoint)
        if isinstance(self.step_thread.error, RankError):
            raise RankError(f"{self.step_thread.error}. {said}") from self.step_thread.error
        message = f"the optimizer step failed; the weights may be half updated: go on from a checkpoint. {said}"
        raise EngineStateError(message) from self.step_thread.error
