"""A `torch.optim.Optimizer` over offloaded states, for schedulers, trainers and checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from offloadkit.errors import ConfigError, EngineStateError, ModelError, RepeatWindowError
from offloadkit.facts.config import OffloadConfig
from offloadkit.optim.loss_scale import LossScale
from offloadkit.optim.table import check_options, optimizer_named


class Run(Protocol):
    num_updates: int

    @property
    def loss_scale(self) -> LossScale | None: ...
    def step(self, *, boundary: bool | None = None) -> bool: ...
    def synchronize(self) -> None: ...
    def drop_gradients(self) -> None: ...


class OffloadOptimizer(torch.optim.Optimizer):
    """`OffloadEngine.optimizer`: a torch optimizer, for schedulers and training loops, whose `step` is the engine's.

    `state[parameter]` holds "step" (fp32 scalar) and the arrays of `table.state_table`, such as "exp_avg" and
    "exp_avg_sq", in the parameter's shape; block scales are 1-D. With several ranks all arrays are 1-D: this rank's
    part. "remainder" is the low half of the split master weights (int16) for bf16 working weights, and the master
    weights (fp32) for fp16 working weights. All arrays are views of the engine's memory: read them after `state_dict()`
    or `engine.synchronize()`.

    Attributes:
        repeat_window: recomputes the window's micro-batches after an OOM recovery; None if the training loop cannot.
    """

    repeat_window: Callable[[], None] | None = None

    def __init__(
        self, param_groups: Sequence[dict[str, Any]], config: OffloadConfig, run: Run, states: dict[nn.Parameter, Any]
    ) -> None:
        self._run: ref[Run] | None = None
        defaults = {
            "lr": config.learning_rate,
            "betas": config.betas or optimizer_named(config.optimizer).betas,
            "eps": config.eps,
            "weight_decay": config.weight_decay,
        }
        super().__init__([dict(group) for group in param_groups], defaults)
        for parameter, state in states.items():
            self.state[parameter] = state
        self._run = ref(run)  # weak, so that a dropped engine frees the model at once

    def _engine(self) -> Run:
        run = None if self._run is None else self._run()
        if run is None:
            raise EngineStateError(
                "the engine of this optimizer was garbage-collected: keep the OffloadEngine in a variable while you "
                "train"
            )
        return run

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Run the engine's `step` at the end of an accumulation window.

        After an OOM recovery that needs the window again, calls `repeat_window` and then steps.

        Raises:
            EngineStateError: `closure` is given, or the engine was dropped.
            RepeatWindowError: as `OffloadEngine.step`, without a `repeat_window`.
        """
        if closure is not None:
            raise EngineStateError("offloadkit's optimizer takes no closure: call engine.backward(loss), then step()")
        while True:
            try:
                self._engine().step(boundary=True)
                return
            except RepeatWindowError:
                if self.repeat_window is None:
                    raise
            self.repeat_window()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """`torch.amp.GradScaler` reads it before it steps. Always raises `EngineStateError`."""
        raise EngineStateError(
            "torch.amp.GradScaler cannot step offloadkit's optimizer. The engine scales the loss of fp16 itself: leave "
            "the scaler out, or use GradScaler(enabled=False), and call engine.backward(loss), then engine.step()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine().drop_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises `ModelError` if the engine is already built, because groups are fixed then."""
        if self._run is not None:
            raise ModelError(
                "a parameter group cannot be added after the engine was built: its parameters have no flat layer. "
                "Close the engine and build a new one with all groups"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Synchronize and return the live states as torch does, with "num_updates" and, for fp16, "loss_scale"."""
        run = self._engine()
        run.synchronize()
        more = {} if run.loss_scale is None else {"loss_scale": run.loss_scale.state_dict()}
        return super().state_dict() | {"num_updates": run.num_updates} | more

    @torch.no_grad()
    def load_parameter_state(self, parameter: nn.Parameter, state: dict[str, torch.Tensor]) -> None:
        """Copy a saved state into the parameter's state.

        Missing arrays become zero, since a parameter without moments was never stepped. A missing "remainder" makes the
        weights the master weights.
        """
        for name, target in self.state[parameter].items():
            if name in state:
                target.copy_(torch.as_tensor(state[name]))
            elif name == "remainder" and target.dtype == torch.float32:
                target.copy_(parameter)
            else:
                target.zero_()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of this class or of `torch.optim.AdamW` in place.

        fp32 moments stay fp32. Without "remainder" the weights become the master weights.

        Raises:
            ValueError: the groups or a tensor's shape differ. Nothing is loaded.
            ConfigError: as `check_states` and `check_options`. Nothing is loaded.
        """
        self._engine().synchronize()
        saved_groups = state_dict["param_groups"]
        ours = [len(group["params"]) for group in self.param_groups]
        theirs = [len(group["params"]) for group in saved_groups]
        for saved in saved_groups:
            check_options(saved)
        if ours != theirs:
            raise ValueError(f"the saved optimizer has groups of {theirs} parameters, but this optimizer of {ours}")
        pairs = []
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                state = state_dict["state"].get(index, {})
                if parameter in self.state:
                    _check_shapes(self.state[parameter], state)
                    check_states(self.state[parameter], state)
                    pairs.append((parameter, state))
        if (warning := changed_options(self.param_groups, saved_groups)) is not None:
            warnings.warn(warning, RuntimeWarning, stacklevel=2)
        for parameter, state in pairs:
            self.load_parameter_state(parameter, state)
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        run = self._engine()
        run.num_updates = state_dict.get("num_updates", run.num_updates)
        if run.loss_scale is not None and "loss_scale" in state_dict:
            run.loss_scale.load_state_dict(state_dict["loss_scale"])


def changed_options(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], *, scheduled: bool = False
) -> str | None:
    """A warning that names the options that a resumed run was given but replaces with saved ones, or None.

    Saved options win, as in `torch.optim`. With a scheduler (`scheduled`), which sets `lr`, the initial learning rates
    are compared.
    """
    found = []
    for at, (own, before) in enumerate(zip(groups, saved, strict=True)):
        varies = scheduled or "initial_lr" in own or "initial_lr" in before
        names = (own.keys() & before.keys()) - {"params", "lr" if varies else "initial_lr"}
        for name in sorted(names):
            value, given = (tuple(each) if isinstance(each, list) else each for each in (before[name], own[name]))
            if value != given:  # betas are lists in JSON
                of = f" of group {at}" if len(groups) > 1 else ""
                found.append(f"{name.removeprefix('initial_')}={value}{of} (given now: {given})")
    if not found:
        return None
    return (
        f"the resumed run uses the options that it was saved with: {', '.join(found)}. To change one, set it in "
        "optimizer.param_groups, or in the scheduler's base_lrs, after loading the checkpoint"
    )


def check_states(own: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """Check that a run with states `own` can resume from a parameter's `saved` states. Empty ones pass: never stepped.

    Raises:
        ConfigError: the states belong to another optimizer or have an incompatible dtype.
    """
    if "remainder" in saved and "remainder" not in own:
        raise ConfigError(
            "the saved master weights have more bits than this run's working weights: resume with the working dtype "
            "that the run was saved with"
        )
    for name in sorted(saved.keys() & own.keys() - {"step"}):
        if saved[name].dtype == own[name].dtype:
            continue
        if not (own[name].dtype == torch.float32 and saved[name].is_floating_point()):
            raise ConfigError(
                f"saved {name} is {saved[name].dtype}, but this run's is {own[name].dtype}: resume with the precision "
                "and the working dtype that the run was saved with"
            )
    moments, saved_moments = own.keys() - {"step", "remainder"}, saved.keys() - {"step", "remainder"}
    if saved_moments and moments != saved_moments:
        raise ConfigError(
            f"the saved optimizer keeps {', '.join(sorted(saved_moments))}, but this run's "
            f"{', '.join(sorted(moments))}: resume with the optimizer and the precision that the run was saved with"
        )


def _check_shapes(own: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    for name in sorted(saved.keys() & own.keys() - {"step"}):
        if saved[name].shape != own[name].shape:
            raise ValueError(
                f"saved {name} has shape {tuple(saved[name].shape)}, but this run's {tuple(own[name].shape)}"
            )
