"""Which parameters Muon steps, and parameter groups of one optimizer each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from offloadkit.errors import ConfigError
from offloadkit.facts.config import OffloadConfig
from offloadkit.optim.table import Matrix, optimizer_named

_ROUTERS = ("gate", "router", "classifier", "shared_expert_gate")
"""Linear layers that choose experts. (An MLP's gate has another name: "gate_proj".)"""


def matrices_of(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> dict[nn.Parameter, Matrix]:
    """The parameters that Muon steps: weights of linear layers in `blocks`, as matrices [outputs, inputs].

    A weight is a `torch.nn.Linear`'s, or the transpose of one of transformers' `Conv1D`. Left out are tied weights,
    output embeddings, routers and LoRA's factors.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    used: dict[nn.Parameter, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            used[parameter] = used.get(parameter, 0) + 1
    found: dict[nn.Parameter, Matrix] = {}
    for block_name, block in blocks:
        for name, module in block.named_modules():
            path = f"{block_name}.{name}".split(".")
            is_conv1d = any(f"{base.__module__}.{base.__name__}" == _CONV1D for base in type(module).__mro__)
            if not (isinstance(module, nn.Linear) or is_conv1d) or module is head:
                continue
            is_router = path[-1] in _ROUTERS or any("router" in part.lower() for part in path)
            weight = module.weight
            if is_router or any(part.startswith("lora_") for part in path) or used[weight] > 1 or not weight.numel():
                continue
            rows, columns = reversed(weight.shape) if is_conv1d else weight.shape
            found[weight] = Matrix(rows, columns, is_conv1d)
    return found


_CONV1D = "transformers.pytorch_utils.Conv1D"


def several_optimizers(config: OffloadConfig, param_groups: Sequence[dict[str, Any]] | None) -> bool:
    return config.optimizer == "muon" or any("optimizer" in group for group in param_groups or ())


def one_optimizer_each(
    model: nn.Module,
    matrices: dict[nn.Parameter, Matrix],
    config: OffloadConfig,
    param_groups: Sequence[dict[str, Any]] | None,
) -> list[dict[str, Any]]:
    """`param_groups` (None: one group of all trainable parameters) with one optimizer for each group, under
    "optimizer".

    A group for Muon is divided into its matrices and a group of AdamW, unless it names its optimizer itself.

    Raises:
        ConfigError: there is no matrix for Muon, a group that names Muon holds other parameters, or a group names an
            unknown optimizer.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    if param_groups is None:
        param_groups = [{"params": [parameter for parameter in names if parameter.requires_grad]}]
    found: list[dict[str, Any]] = []
    for at, group in enumerate(param_groups):
        name = optimizer_named(group.get("optimizer", config.optimizer)).name
        if name != "muon":
            found.append({"betas": config.betas or optimizer_named(name).betas, **group, "optimizer": name})
            continue
        others = [parameter for parameter in group["params"] if parameter not in matrices]
        if "optimizer" in group and (trained := [each for each in others if each.requires_grad]):
            raise ConfigError(
                f"param_groups[{at}] has optimizer='muon', which steps weights of linear layers inside of the model's "
                f"blocks, and holds {names.get(trained[0], 'another tensor')!r}: put it into a group with "
                "optimizer='adamw', or leave optimizer= out, and the group is divided"
            )
        own = {name: value for name, value in asdict(config.muon).items() if name != "learning_rate"}
        if config.muon.learning_rate is not None:
            own["lr"] = config.muon.learning_rate
        if "optimizer" in group:
            own |= group
        members = [parameter for parameter in group["params"] if parameter in matrices]
        if members:
            found.append({**group, **own, "params": members, "optimizer": "muon"})
        if others:
            found.append({**group, "params": others, "optimizer": "adamw"})
    if config.optimizer == "muon" and not any(group["optimizer"] == "muon" for group in found):
        raise ConfigError(
            "optimizer='muon' finds no matrix to step: no trainable parameter is the weight of a linear layer "
            "inside of a repeated block (LoRA's factors, heads, routers and tied weights do not count). Choose "
            "optimizer='adamw'"
        )
    return found
