"""The numbers of a run by name: what a checkpoint and `state_dict` contain."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from offloadkit.checkpoint.base import Base, Checksums
from offloadkit.checkpoint.origin import Origin
from offloadkit.checkpoint.run import RunSnapshot, SummationOrder
from offloadkit.checkpoint.values import why_unlike
from offloadkit.distributed.ranks import Ranks
from offloadkit.engine.loop import TrainingLoop
from offloadkit.errors import ConfigError, EngineStateError, ModelError, shown
from offloadkit.facts.config import OffloadConfig
from offloadkit.optim.table import options_of
from offloadkit.optim.torch_optimizer import OffloadOptimizer, changed_options, check_states

_BEGIN_ANEW = (
    "the checkpoint has the weights alone (save_only_model=True): the run goes on at its step, with its schedule and "
    "data, but moments begin at zero with a new bias correction, and master weights at the saved weights"
)


class RunState:
    """The numbers of a run by name: weights, states, options and counts. `OffloadEngine` documents the methods."""

    def __init__(self, loop: TrainingLoop, optimizer: OffloadOptimizer, config: OffloadConfig, ranks: Ranks) -> None:
        self._loop, self._optimizer, self._config, self._ranks = loop, optimizer, config, ranks
        self._summation_order = SummationOrder(ranks.size, config.gradient_accumulation, config.exchange)
        self._origin, self._checksums = ranks.broadcast_from(Origin.of_new_run), Checksums()

    @property
    def origin(self) -> Origin:
        """Identity of the run and its number of updates."""
        return self._origin._replace(num_updates=self._loop.num_updates)

    def _check_window(self) -> None:
        if self._loop.num_backwards:
            raise EngineStateError(
                f"{self._loop.num_backwards} micro-batches of an accumulation window are done, and their gradients are "
                "in no checkpoint: end the window with step() first, or drop them with optimizer.zero_grad()"
            )

    def state_dict(self) -> dict[str, Any]:
        self._check_window()
        self._loop.synchronize()
        placed, groups = self._loop.placed, self._optimizer.param_groups
        return {
            "module": placed.module.state_dict(),
            "optimizer": {view.name: self._optimizer.state[view.parameter] for view in placed.layers.views()},
            "param_groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
            "num_updates": self._loop.num_updates,
            "loss_scale": self._loop.loss_scale and self._loop.loss_scale.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check_window()
        self._loop.synchronize()
        placed, groups = self._loop.placed, self._optimizer.param_groups
        self._check_state(state)
        saved = state["optimizer"]
        parameters = {view.name: view.parameter for view in placed.layers.views()}
        if parameters.keys() != saved.keys():
            differing = sorted(parameters.keys() ^ saved.keys())
            raise ModelError(f"the saved run has other parameters than this model: {', '.join(differing[:5])} differ")
        if len(state["param_groups"]) != len(groups):
            raise ModelError(
                f"the saved run has {len(state['param_groups'])} parameter groups, this one has {len(groups)}"
            )
        for name, parameter in parameters.items():
            check_states(self._optimizer.state[parameter], saved[name])
        with placed.external_writes.released():
            placed.module.load_state_dict(state["module"])
        placed.layers.take_over_external_writes(keep_remainder=True)
        for name, parameter in parameters.items():
            self._optimizer.load_parameter_state(parameter, saved[name])
        if (warning := changed_options(groups, state["param_groups"])) is not None:
            warnings.warn(warning, RuntimeWarning, stacklevel=3)
        self._take(state["param_groups"], state)

    def _check_state(self, state: Any) -> None:
        """Raise `ModelError` if `state` is not a `state_dict()` of an engine of this model."""
        own = self.state_dict()
        lacks_scale = isinstance(state, Mapping) and state.get("loss_scale") is None
        wanted = {name: own[name] for name in own if name != "loss_scale" or not lacks_scale}
        needed = dict.fromkeys(name for name in wanted if name != "loss_scale")
        why = why_unlike(state, needed, "it", whole=True) or why_unlike(state, wanted, "it")
        if why is None and (type(done := state["num_updates"]) is not int or done < 0):
            why = f"num_updates is {shown(done)}, but a whole number >= 0 is needed"
        for at, group in enumerate(state["param_groups"] if why is None else ()):
            try:
                options_of(group)
            except ConfigError as error:
                why = f"in group {at}, {error}"
        if why is None:
            differing = sorted(own["module"].keys() ^ state["module"].keys(), key=str)
            both = own["module"].keys() & state["module"].keys()
            differing += sorted(name for name in both if _shape(own["module"][name]) != _shape(state["module"][name]))
            if differing:
                why = f"module[{differing[0]!r}] differs from this model"
        for name, arrays in own["optimizer"].items():
            for array, value in state["optimizer"].get(name, {}).items() if why is None else ():
                if array in arrays and torch.as_tensor(value).shape != arrays[array].shape:
                    why = f"{array} of {name!r} differs in shape from this model"
        if why is not None:
            raise ModelError(f"the state cannot be loaded: {why}. Load a state_dict() of an engine of this model")

    def snapshot(self) -> RunSnapshot:
        state, layers = self.state_dict(), self._loop.placed.layers
        views = list(layers.views())
        names: list[list[str]] = [[] for _ in state["param_groups"]]
        for view in views:
            names[view.group].append(view.name)
        groups = [{"options": group, "parameters": of} for group, of in zip(state["param_groups"], names, strict=True)]
        frozen, config = self._loop.placed.frozen_weights(), getattr(self._loop.placed.module, "config", None)
        model, written = str(getattr(config, "_name_or_path", "")), self._loop.placed.written_frozen()
        of_base = {name: value for name, value in state["module"].items() if name in frozen}
        facts: dict[str, Any] = {"optimizer": self._config.optimizer, "precision": self._config.precision}
        if self._config.precision != "exact":
            facts["seed"] = self._config.seed
        return RunSnapshot(
            {name: value for name, value in state["module"].items() if name not in frozen or name in written},
            state["optimizer"],
            {view.name: each.ranges_of(at) for each in layers.trained for at, view in enumerate(each.layer.views)},
            {view.name: tuple(view.parameter.shape) for view in views},
            groups,
            facts,
            {name: state[name] for name in ("num_updates", "loss_scale")},
            self._summation_order,
            self.origin,
            layers.forget_pages,
            layers.reset_states,
            self._config,
            Base(model, lambda: self._checksums.of(frozen), of_base) if frozen else None,
        )

    def go_on(self, values: dict[str, Any], origin: Callable[[], Origin]) -> None:
        """Take the options and counts of a saved run, and its origin, which rank 0 reads. Warns if the order of adding
        gradients or the options differ, or if there were no states."""
        saved_groups = [group["options"] for group in values["groups"]]
        scheduled = values.get("scheduler") is not None
        options = changed_options(self._optimizer.param_groups, saved_groups, scheduled=scheduled)
        order = SummationOrder(**values["adding"]).order_warning(self._summation_order)
        for warning in (_BEGIN_ANEW if values["contents"] == "weights" else None, order, options):
            if warning is not None and self._ranks.rank == 0:
                warnings.warn(warning, RuntimeWarning, stacklevel=4)
        self._take(saved_groups, values["counts"])
        self._origin = self._ranks.broadcast_from(origin)

    def _take(self, options: Sequence[Mapping[str, Any]], counts: Mapping[str, Any]) -> None:
        for group, saved in zip(self._optimizer.param_groups, options, strict=True):
            group.update(saved)
        self._loop.num_updates = counts["num_updates"]
        if self._loop.loss_scale is not None and counts.get("loss_scale"):
            self._loop.loss_scale.load_state_dict(counts["loss_scale"])

    def master_weights(self) -> dict[str, torch.Tensor]:
        self._loop.synchronize()
        return {view.name: state.master(view) for state in self._loop.placed.trained for view in state.layer.views}


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)
