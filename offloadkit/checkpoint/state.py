"""The state of a run by name, wherever its tensors live: what a checkpoint holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offloadkit.errors import ModelError
from offloadkit.offload.model import PlacedModel
from offloadkit.optim.torch_optimizer import OffloadOptimizer, check_states


def run_state(module: nn.Module, optimizer: OffloadOptimizer, placed: PlacedModel) -> dict[str, Any]:
    """The state of the run. Its tensors are live, not copies.

    Returns:
        "module": the model's state_dict. "optimizer": the states by parameter name. "param_groups": options by group.
    """
    return {
        "module": module.state_dict(),
        "optimizer": {view.name: optimizer.state[view.parameter] for view in placed.views()},
        "param_groups": [
            {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ],
    }


def load_run_state(state: dict[str, Any], module: nn.Module, optimizer: OffloadOptimizer, placed: PlacedModel) -> None:
    """Load what `run_state` gave, in a run of any placement.

    Nothing is loaded where one of these errors is raised.

    Raises:
        ModelError: the parameter names or the number of groups differ.
        ConfigError: the saved states are another optimizer's, or have another precision or working dtype.
    """
    states = {view.name: optimizer.state[view.parameter] for view in placed.views()}
    _check_saved_run(state, states, len(optimizer.param_groups))
    module.load_state_dict(state["module"])
    placed.take_over_outside_writes(keep_remainder=True)
    for view in placed.views():
        optimizer.load_parameter_state(view.parameter, state["optimizer"][view.name])
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update(saved)


def _check_saved_run(saved: dict[str, Any], states: dict[str, dict[str, torch.Tensor]], num_groups: int) -> None:
    """Check that `OffloadEngine.state_dict()` is of a run with these states and groups.

    Args:
        states: the arrays of this run, by parameter name.

    Raises:
        ModelError: the parameter names or the number of groups differ.
        ConfigError: as `check_states`.
    """
    if states.keys() != saved["optimizer"].keys():
        differing = sorted(states.keys() ^ saved["optimizer"].keys())
        raise ModelError(f"the saved run has other parameters than this model: {', '.join(differing[:5])} differ")
    if len(saved["param_groups"]) != num_groups:
        raise ModelError(f"the saved run has {len(saved['param_groups'])} parameter groups, this one has {num_groups}")
    for name, own in states.items():
        check_states(own, saved["optimizer"][name])
