"""Makes the plan of a run: searches the placements, or takes the given ones, and computes bytes and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.fitted import CROWDED, FEW_CTAS, LOADED_LATER_BYTES
from offloadkit.facts.graphs import may_capture
from offloadkit.facts.hardware import Hardware
from offloadkit.facts.units import parse_bytes
from offloadkit.planner.graphs import GraphBytes, Graphs
from offloadkit.planner.layout import (
    GRAPHS,
    LayerShape,
    activations,
    check_matrices,
    choices,
    for_matrices,
    of_kind,
    outside_bytes,
    possible,
    run_bytes,
)
from offloadkit.planner.prediction import Basis, Prediction
from offloadkit.planner.ranks import for_ranks
from offloadkit.planner.search import Search
from offloadkit.planner.seconds import StepModel
from offloadkit.planner.work import MicroBatch

P = TypeVar("P", bound=Prediction)
GAINS_BY_GRAPHS = 0.7
"""A step may gain by CUDA graphs if Python takes more than this fraction of the GPU's time with eager blocks."""
AS_FAST = 1.02
"""A plan with graphs may take so many times the seconds of one with eager blocks, because Python's time varies."""


def make(kind: type[P], layers: Sequence[LayerShape], basis: Basis) -> P:
    """The plan of a model cut into `layers`. With several ranks, `layers` and `hardware` are one rank's.

    Every layer gets the config's placement as far as possible. Without one, given `work` and a GPU in `hardware`, the
    placements with the fastest predicted step within the config's `vram` and `ram`, or else the free memory, are
    searched; otherwise all states are in RAM. If the link was also measured with few NCCL thread blocks, the plan
    chooses between few and NCCL's own choice (`Hardware.most_ctas`).
    """
    config, work, hardware = basis.config, basis.work, basis.hardware
    sums, precision = config.exchange == "step", config.precision
    layers = tuple(
        replace(layer, kind=replace(layer.kind, precision=precision), exchanges_sums=sums) for layer in layers
    )
    budgets = _budgets(config, hardware, layers[0].num_ranks)
    if work is None or hardware is None or not hardware.few_ctas_link_bytes_per_second:
        return _plan(kind, layers, basis, budgets, _placements(layers, basis, budgets))
    few, own = (
        _plan(kind, layers, each, budgets, _placements(layers, each, budgets))
        for each in (replace(basis, hardware=machine) for machine in _with_ctas(hardware))
    )
    assert few.seconds is not None
    assert own.seconds is not None
    is_fast = few.seconds.step <= CROWDED * own.seconds.step
    return few if not own.fits or (few.fits and is_fast) else own


def _with_ctas(machine: Hardware) -> tuple[Hardware, Hardware]:
    own = replace(machine, few_ctas_link_bytes_per_second=0.0)
    return replace(own, most_ctas=FEW_CTAS, link_bytes_per_second=machine.few_ctas_link_bytes_per_second), own


def placed(plan: P, placements: Sequence[Placement]) -> P:
    return _plan(type(plan), plan.layers, plan.basis, plan.budgets, tuple(placements))


def with_layers(plan: P, layers: Sequence[LayerShape]) -> P:
    return _plan(type(plan), tuple(layers), plan.basis, plan.budgets, plan.placements)


def replanned(
    plan: P, *, work: Any = None, hardware: Hardware | None = None, num_gpus: int | None = None, **changes: Any
) -> P:
    """The plan made again, with `changes` in its config (vram, ram, precision, ...), another micro-batch or machine.

    Args:
        num_gpus: number of GPUs of the same kind with as much VRAM as now; the host's RAM stays the same.
    """
    basis, layers = plan.basis, plan.layers
    config = replace(basis.config, **changes)
    if num_gpus is not None:
        layers = tuple(layer.shared_by(num_gpus) for layer in layers)
        hardware = basis.hardware and for_ranks(basis.hardware, num_gpus)
    work, hardware = work or basis.work, hardware or basis.hardware
    fresh = Basis(config, basis.frozen, basis.frozen_bytes, work, hardware, basis.assumed)
    kept = {
        name: getattr(basis, name)
        for name in ("unsaved_bytes", "saves_adapters", "eager", "cache_bytes", "generates", "frozen_models")
    }
    return make(type(plan), layers, replace(fresh, **kept))


def generating_in_vram(plan: P) -> P | None:
    """The fastest plan whose weights fit in VRAM while text is generated; None if `plan` is one, or there is none."""
    basis = plan.basis
    is_fixed = basis.config.placement is not None or basis.work is None or basis.hardware is None
    if not basis.generates or is_fixed or plan.on_cpu or plan.generates_in_vram:
        return None
    found = make(type(plan), plan.layers, basis)
    return found if found.fits and found.generates_in_vram else None


def without_graphs(plan: P) -> P:
    """`plan` with eager blocks, as all plans made from it."""
    eager = replace(plan, basis=replace(plan.basis, eager=True))
    return placed(eager, plan.placements)


def never_cheap(plan: P, layers: Sequence[int]) -> P:
    """`plan` with these layers' blocks recomputed as a whole if they were "cheap". No plan made from it has them so."""
    names, work, placements = {plan.layers[at].name for at in layers}, plan.basis.work, list(plan.placements)
    if work is not None:
        stages = (replace(each, cheap=None) if each.block in names else each for each in work.stages)
        work = replace(work, stages=tuple(stages))
    for at in layers:
        if placements[at].activations == "cheap":
            placements[at] = replace(placements[at], activations="checkpoint")
    return placed(replace(plan, basis=replace(plan.basis, work=work)), placements)


def with_other_exchange(plan: P) -> P:
    """The plan made again with the other order of gradient exchange between GPUs (`OffloadConfig.exchange`)."""
    return replanned(plan, exchange="micro_batch" if plan.basis.config.exchange == "step" else "step")


def budget_options(plan: Prediction, budgets: Mapping[str, float]) -> dict[str, Any]:
    """`vram` and `ram` of a config that gives each rank of `plan` this many bytes."""
    return {tier: int(size * (plan.num_on_host if tier == "ram" else 1)) for tier, size in budgets.items()}


def is_short_of_ram(plan: Prediction) -> bool:
    work, hardware = plan.basis.work, plan.basis.hardware
    assert work is not None
    assert hardware is not None
    if plan.basis.config.placement is not None:
        return False
    room = _room(plan.basis.config, plan.budgets, hardware)
    return _whole_search(plan.layers, plan.basis, work, hardware, room).is_short_of_ram(*room)


def _plan(
    kind: type[P],
    layers: tuple[LayerShape, ...],
    basis: Basis,
    budgets: dict[str, int],
    placements: tuple[Placement, ...],
) -> P:
    config, work, hardware, frozen_bytes = basis.config, basis.work, basis.hardware, basis.frozen_bytes
    placements = tuple(of_kind(where, layer) for where, layer in zip(placements, layers, strict=True))
    held = activations(work, choices(layers, placements, work)) if work else None
    graphs = _graphs(layers, basis, placements)
    tiers = run_bytes(
        layers,
        placements,
        config.gradient_accumulation,
        frozen_bytes=frozen_bytes,
        held=held,
        graph_bytes=graphs.num_bytes if graphs else 0,
        context_bytes=outside_bytes(layers, hardware) if hardware else 0,
        device_type="cpu" if hardware and hardware.device == "cpu" else "cuda",
    )
    num_trainable = sum(layer.num_parameters for layer in layers if layer.kind.is_trained)
    made = kind(
        layers,
        placements,
        config.gradient_accumulation,
        basis.frozen + sum(layer.num_parameters for layer in layers),
        num_trainable,
        tiers,
        budgets,
        None,
        None,
        layers[0].num_ranks * config.gradient_accumulation * work.num_tokens if work else None,
        basis,
        graphs,
    )
    if work is None or hardware is None:
        return made
    if graphs is not None and "vram" in budgets and made.needs()["vram"] > _room(config, budgets, hardware)[0]:
        eager = {category: size for category, size in tiers["vram"].items() if category != GRAPHS}
        made = replace(made, tiers=tiers | {"vram": eager}, graphs=replace(graphs, fit=False))
    how = {"compiled": config.compile_blocks, "graphed": made.is_graphed}
    model = StepModel(layers, work, hardware, config.gradient_accumulation, **how)
    return replace(made, seconds=model.seconds(placements), large_gpu_seconds=model.on_large_gpu())


def _graphs(layers: Sequence[LayerShape], basis: Basis, placements: Sequence[Placement]) -> Graphs | None:
    if basis.work is None or not _may_capture(basis):
        return None
    in_ram = (layer.in_block and where.weights == "ram" for layer, where in zip(layers, placements, strict=True))
    return GraphBytes(layers, basis.work).graphs(choices(layers, placements, basis.work), streams=any(in_ram))


def _may_capture(basis: Basis) -> bool:
    if basis.hardware is None or basis.eager:
        return False
    return may_capture(basis.hardware.device, compiled=basis.config.compile_blocks)


def _budgets(config: OffloadConfig, hardware: Hardware | None, num_ranks: int) -> dict[str, int]:
    """Available bytes by tier: the config's budgets, or else the free bytes. Ranks of one host share its RAM evenly.

    The CUDA context's VRAM is part of the budget, since the plan counts it as needed.
    """
    found: dict[str, int] = {}
    if hardware is not None:
        found = {"ram": hardware.ram_available_bytes, "disk": hardware.disk_free_bytes}
        if hardware.device != "cpu":
            found["vram"] = hardware.vram_free_bytes + hardware.vram_context_bytes
    for tier, wish in (("vram", config.vram), ("ram", config.ram)):
        if wish is not None:
            found[tier] = parse_bytes(wish)
    on_host = hardware.num_ranks if hardware is not None else num_ranks
    return found | {tier: found[tier] // on_host for tier in ("ram", "disk") if tier in found}


def _placements(layers: Sequence[LayerShape], basis: Basis, budgets: dict[str, int]) -> tuple[Placement, ...]:
    config, work, hardware = basis.config, basis.work, basis.hardware
    if config.placement is None and work is not None and hardware is not None and hardware.device != "cpu":
        return _searched(tuple(layers), basis, work, hardware, _room(config, budgets, hardware))
    placement = config.placement or Placement()
    if config.activation_checkpointing and placement.activations == "keep":
        placement = replace(placement, activations="checkpoint")
    found = tuple(possible(placement, layer) for layer in layers)
    if config.placement is None:
        return tuple(for_matrices(where, layer) for where, layer in zip(found, layers, strict=True))
    if layers[0].num_ranks > 1 or (hardware is not None and hardware.device != "cpu"):
        check_matrices(layers, found)
    return found


def _searched(
    layers: tuple[LayerShape, ...], basis: Basis, work: MicroBatch, hardware: Hardware, room: tuple[int, int, int]
) -> tuple[Placement, ...]:
    """The fastest placements. They leave VRAM for graphs where Python bounds forward and backward, or nearly, and the
    step is then not slower, and for all weights while text is generated, if that is possible.
    """
    search = _whole_search(layers, basis, work, hardware, room)
    if basis.generates and not search.fits(*room):
        basis = replace(basis, generates=False)
        search = _whole_search(layers, basis, work, hardware, room)
    if search.graphed or not _may_capture(basis) or search.model.python_share() <= GAINS_BY_GRAPHS:
        return search.best(*room)
    graphed = _search(layers, basis, work, hardware, graphed=True)
    eager = search.counts(*room)
    found = graphed.adapted(eager, *room)
    if found is None or graphed.phases(found).step > AS_FAST * search.phases(eager).step:
        return search.placements(eager)
    return graphed.placements(found)


def _whole_search(
    layers: tuple[LayerShape, ...], basis: Basis, work: MicroBatch, hardware: Hardware, room: tuple[int, int, int]
) -> Search:
    """The search of all placements: with graphs if Python is the busiest with eager blocks, and if graphs fit."""
    eager = _search(layers, basis, work, hardware)
    if _may_capture(basis) and eager.model.python_share() > 1:
        graphed = _search(layers, basis, work, hardware, graphed=True)
        if graphed.fits(*room):
            return graphed
    return eager


def _search(
    layers: tuple[LayerShape, ...], basis: Basis, work: MicroBatch, hardware: Hardware, *, graphed: bool = False
) -> Search:
    config = basis.config
    return _kept_search(
        layers,
        work,
        hardware,
        config.gradient_accumulation,
        frozen_bytes=basis.frozen_bytes,
        all_recomputed=config.activation_checkpointing,
        compiled=config.compile_blocks,
        graphed=graphed,
        generating=basis.cache_bytes if basis.generates else None,
        beside=tuple(at for model in basis.frozen_models for at in model.layers),
    )


_kept_search = lru_cache(maxsize=4)(Search)


def _room(config: OffloadConfig, budgets: Mapping[str, int], hardware: Hardware) -> tuple[int, int, int]:
    held_back = LOADED_LATER_BYTES if config.vram is not None and hardware.vram_context_bytes > 0 else 0
    disk = budgets["disk"] if hardware.disk_read_bytes_per_second else 0
    return budgets["vram"] - held_back, budgets["ram"], disk
