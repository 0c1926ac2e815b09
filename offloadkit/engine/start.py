"""The start of an engine: parameter groups, layers divided between ranks, and the plan that it begins with."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from offloadkit.distributed.machine import shared_cores
from offloadkit.distributed.ranks import Group, Solo
from offloadkit.engine.outline import FirstWindow, needs_plan, plan_for, proposing_disk
from offloadkit.errors import RankError
from offloadkit.facts import hardware
from offloadkit.facts.config import OffloadConfig
from offloadkit.offload.layers import FlatLayer, check_plan, divided_groups, listed_groups, plan_of
from offloadkit.offload.shortage import move_summary, within_free_vram
from offloadkit.optim.table import options_of
from offloadkit.planner import Plan
from offloadkit.planner.make import with_layers
from offloadkit.planner.plan import check_fits
from offloadkit.planner.words import of_others


def checked_groups(
    model: nn.Module, config: OffloadConfig, param_groups: Sequence[dict[str, Any]] | None
) -> Sequence[dict[str, Any]] | None:
    """`param_groups` as lists, divided by optimizer.

    Raises:
        ConfigError: a group is invalid or has an unsupported option.
    """
    groups = divided_groups(model, config, listed_groups(param_groups))
    for group in groups or ():
        usual = {"lr": config.learning_rate, "eps": config.eps, "weight_decay": config.weight_decay}
        options_of({"betas": (0.0, 0.0), **usual, **group})
    return groups


def plan_of_rank(plan: Plan, layers: Sequence[FlatLayer], ranks: Solo | Group) -> Plan:
    return plan if ranks.size == 1 else with_layers(plan, [layer.shape() for layer in layers])


def connect(plan: Plan, ranks: Solo | Group) -> None:
    ranks.connect(plan.basis.hardware.most_ctas if plan.basis.hardware else 0)


@dataclass(frozen=True)
class Start:
    """The model, config and ranks that an engine is built for.

    Attributes:
        groups: the checked parameter groups; None: one group.
    """

    model: nn.Module
    layers: list[FlatLayer]
    config: OffloadConfig
    device: torch.device
    ranks: Solo | Group
    groups: Sequence[dict[str, Any]] | None

    def divide_layers(self, has_plan: bool, lacks_example: bool, undo: ExitStack) -> None:
        """Several ranks only: divide the layers, and the cores of the host.

        Raises:
            RankError: the ranks have different models or configs, or only some of them plan.
        """
        if not isinstance(self.ranks, Group):
            return
        planning = None if has_plan else (needs_plan(self.config, self.device), lacks_example)
        run = replace(self.config, placement=None, vram=None, ram=None, disk=None)
        facts = repr(([layer.shape() for layer in self.layers], run, planning)).encode()
        if len({*self.ranks.agree(np.array([zlib.crc32(facts)])).flat}) > 1:
            raise RankError(
                "the ranks build engines for different models, dtypes, parameter groups or configs: build the same on "
                "all ranks; only placement, vram, ram and disk may differ, and all ranks or none must pass a plan, "
                "pass an example and leave placements to choose"
            )
        for layer in self.layers:
            layer.cut_for(self.ranks.rank, self.ranks.size)
        undo.enter_context(shared_cores(self.ranks, self.device))

    def plan(self, given: Plan | None, example: Any, evaluation_rows: int) -> tuple[Plan, FirstWindow | None]:
        """The plan to begin with: `given` or a new one, or a leaner one, with a warning, if less VRAM is free. Connects
        the ranks.

        Returns:
            Also the planner for the end of the first window, if one is needed.

        Raises:
            DoesNotFitError: the model does not fit.
            ModelError, ConfigError: `given` is for another model or config.
        """
        plan, first_window = (given, None) if given is not None else self._make(example, evaluation_rows)
        check_plan(plan, self.layers, self.config)
        connect(plan, self.ranks)
        plan = plan_of_rank(plan, self.layers, self.ranks)
        tensors = (*self.model.parameters(), *self.model.buffers())
        freed = sum(each.nbytes for each in tensors if each.device == self.device)
        begun = within_free_vram(plan, self.device, freed, self.ranks)
        if begun is plan:
            return plan, first_window
        begun = plan_of_rank(begun, self.layers, self.ranks)
        words = move_summary(plan, begun)
        others = of_others(hardware.vram_of_others_bytes(self.device))
        message = f"less VRAM is free than the plan needs{others}: the plan is leaner ({words})"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return begun, first_window

    def _make(self, example: Any, evaluation_rows: int) -> tuple[Plan, FirstWindow | None]:
        made, first_window, model = None, None, self.model
        if example is not None:
            more: Any = {"evaluation_rows": evaluation_rows, "ranks": self.ranks, "param_groups": self.groups}
            made = plan_for(model, self.config, self.device, example, **more)
        if made is None and not needs_plan(self.config, self.device):
            return plan_of(model, self.layers, self.config), None
        if made is None:
            run = self.config, self.device, evaluation_rows, self.ranks, self.groups
            first = FirstWindow(model, self.layers, *run)
            made, first_window = first.plan, None if first.is_settled else first
        check_fits(proposing_disk(made))
        return made, first_window
