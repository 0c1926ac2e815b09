"""Finds a leaner plan for a run that has less memory than planned.

A plan with a known micro-batch and GPU is searched again with smaller budgets. Any other plan goes down a few rungs: a
rung moves one kind of data out of the tier that is short, for as many layers as needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from offloadkit.facts.config import Placement
from offloadkit.planner.layout import TIERS, WeightsAlone, for_matrices, is_built, possible, tier_bytes
from offloadkit.planner.make import budget_options, placed, replanned
from offloadkit.planner.plan import Plan
from offloadkit.planner.seconds import IN_VRAM

_SMALLER = 7 / 8
_LEAST_BUDGET = 1 << 16
"""Bytes; a config refuses less."""

_Rung = Callable[[Placement], Placement]


def leaner(plan: Plan, short: Literal["vram", "ram"], budgets: Mapping[str, int]) -> Plan | None:
    """The fastest plan of the same run that takes less of the tier that is `short`.

    Args:
        budgets: bytes that the plan may take, by tier; a missing tier has the plan's present bytes. If no plan fits the
            budget of `short`, the leanest plan is returned.

    Returns:
        None if the user has chosen one placement for all layers, or no plan takes less.
    """
    if plan.basis.config.placement is not None:
        return None
    budgets = {tier: plan.total_bytes(tier) for tier in TIERS} | dict(budgets)
    known = plan.basis.work is not None and plan.basis.hardware is not None and not plan.on_cpu
    return _searched(plan, short, budgets) if known else _down_the_rungs(plan, short, budgets)


def _searched(plan: Plan, short: str, budgets: Mapping[str, int]) -> Plan | None:
    least = {tier: max(_LEAST_BUDGET, budgets[tier]) for tier in ("vram", "ram")}
    while True:
        other = replanned(plan, **budget_options(plan, least))
        is_leaner = other.total_bytes(short) < plan.total_bytes(short)
        if is_leaner and other.lacking().keys() <= {short}:
            return other
        if not other.fits or least[short] == _LEAST_BUDGET:
            return None
        least[short] = max(_LEAST_BUDGET, int(_SMALLER * least[short]))


def _down_the_rungs(plan: Plan, short: str, budgets: Mapping[str, int]) -> Plan | None:
    where, now = list(plan.placements), {tier: plan.total_bytes(tier) for tier in TIERS}
    planned = tier_bytes(plan.layers, plan.placements, plan.accumulation)
    one_host = plan.num_gpus == plan.num_on_host

    def totals(placements: Sequence[Placement]) -> dict[str, int]:
        tiers = tier_bytes(plan.layers, placements, plan.accumulation)
        return {tier: now[tier] + sum(tiers[tier].values()) - sum(planned[tier].values()) for tier in TIERS}

    def too_much(found: Mapping[str, int]) -> bool:
        others = (tier for tier in TIERS if tier != short)
        return any(found[tier] > max(now[tier], budgets[tier]) for tier in others)

    for rung in _rungs(short, on_disk=plan.basis.config.disk is not None):
        before = list(where)
        for at in reversed(range(len(where))):
            old, new = where[at], for_matrices(possible(rung(where[at]), plan.layers[at]), plan.layers[at])
            where[at] = new if is_built(new, plan.layers[at], plan.accumulation, one_host=one_host) else old
            found = totals(where)
            if too_much(found):
                where[at] = old
            elif rung not in _OF_ACTIVATIONS and found[short] <= budgets[short]:
                return placed(plan, where)
        if rung in _OF_ACTIVATIONS and where != before:  # the saving is unknown
            return placed(plan, where)
        if totals(where)[short] >= totals(before)[short]:
            where = before
    return placed(plan, where) if totals(where)[short] < now[short] else None


def _states_to_ram(where: Placement) -> Placement:
    return replace(where, states="ram", gradients="ram", step="cpu") if where.states == "vram" else where


def _recompute(where: Placement) -> Placement:
    return replace(where, activations="checkpoint") if where.activations in ("keep", "cheap") else where


def _gradients_to_ram(where: Placement) -> Placement:
    return replace(where, gradients="ram") if where.states != "vram" else where


def _weights_to_ram(where: Placement) -> Placement:
    return replace(where, weights="ram") if where.states != "vram" or isinstance(where, WeightsAlone) else where


def _inputs_to_ram(where: Placement) -> Placement:
    return replace(where, activations="offload")


def _step_by_cpu(where: Placement) -> Placement:
    return replace(where, step="cpu") if where.states == "ram" and where.gradients == "ram" else where


def _all_to_vram(where: Placement) -> Placement:
    return replace(IN_VRAM, activations=where.activations)


def _step_by_gpu(where: Placement) -> Placement:
    return replace(where, gradients="vram", step="gpu") if where.states == "ram" else where


def _states_to_disk(where: Placement) -> Placement:
    return replace(where, states="disk", gradients="ram", step="cpu") if where.states == "ram" else where


_OF_ACTIVATIONS: tuple[_Rung, ...] = (_recompute, _inputs_to_ram)


def _rungs(short: str, *, on_disk: bool) -> list[_Rung]:
    if short == "vram":
        return [_states_to_ram, _recompute, _step_by_cpu, _gradients_to_ram, _weights_to_ram, _inputs_to_ram]
    return [_all_to_vram, _step_by_gpu, *([_states_to_disk] if on_disk else [])]
