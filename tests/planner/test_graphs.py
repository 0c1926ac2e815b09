"""CUDA graphs of blocks in plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offloadkit.facts import graphs as facts_graphs
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.fitted import (
    BACKWARD_LAUNCHES,
    FORWARD_LAUNCHES,
    GRAPH_CALLS,
    GRAPHED_LAUNCHES,
    GRAPHS_DRIVER_BYTES,
    GRAPHS_WORKSPACE_BYTES,
    LAYER_LAUNCHES,
    OUTSIDE_LAUNCHES,
)
from offloadkit.facts.units import format_bytes
from offloadkit.planner import MicroBatch, Pass, Plan, make_plan
from offloadkit.planner.graphs import GraphBytes
from offloadkit.planner.layout import GRAPHS, choices
from offloadkit.planner.make import AS_FAST, GAINS_BY_GRAPHS, replanned, without_graphs
from offloadkit.planner.search import Search
from offloadkit.planner.seconds import StepModel
from tests.planner.machines import GIB, H200, shape, stage
from tests.planner.test_counts import WITH_DISK, adapted_layers, some_counts, unlike_layers

IN_VRAM = Placement(weights="vram", gradients="vram", states="vram", step="gpu")
MIB = 1 << 20
LAYERS = [shape("first", 2**20, in_block=False), *(shape(f"block.{index}", 2**20) for index in range(4))]
FIXED = GRAPHS_DRIVER_BYTES + GRAPHS_WORKSPACE_BYTES


@pytest.fixture(autouse=True)
def graphs_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_graphs, "device_types", {"cuda"})


def planned(placement: Placement | None = IN_VRAM, machine: Any = H200, **options: Any) -> Plan:
    blocks = (stage(f"block.{index}", kept=64 * MIB, input_bytes=4 * MIB) for index in range(4))
    work = MicroBatch((stage("", kept=MIB), *blocks, stage("", kept=0, backward_peak_bytes=256 * MIB)), 640)
    return make_plan(LAYERS, OffloadConfig(placement=placement, **options), work=work, hardware=machine)


def test_a_plan_counts_the_graphs_of_its_blocks() -> None:
    plan = planned()
    assert plan.graphs is not None
    assert plan.is_graphed
    assert plan.graphs.number == 2 * 4
    assert plan.tiers["vram"][GRAPHS] == plan.graphs.num_bytes
    assert plan.needs()["vram"] == plan.total_bytes("vram")
    assert plan.to_dict()["graphs"] == {"number": 8, "num_bytes": plan.graphs.num_bytes, "fit": True}
    assert "blocks run as 8 CUDA graphs" in plan.details()
    size = format_bytes(plan.graphs.num_bytes)
    assert f"blocks run as 8 CUDA graphs, which take {size} of VRAM, the driver's 64 MiB included" in plan.explain()


def test_a_recomputed_block_is_the_pools_temporary_memory() -> None:
    kept, recomputed = planned(), planned(replace(IN_VRAM, activations="checkpoint"))
    assert kept.graphs is not None
    assert recomputed.graphs is not None
    unused, of_inputs, gradients = 0.05, 4 * MIB, 2 * MIB
    of_one, of_all = 64 * MIB + gradients, 4 * 64 * MIB + gradients
    assert recomputed.graphs.num_bytes - FIXED == pytest.approx(of_one + of_inputs + unused * of_one, rel=1e-3)
    assert kept.graphs.num_bytes - FIXED == pytest.approx(gradients + of_inputs + unused * of_all, rel=1e-3)


def test_streamed_blocks_have_a_copy_of_their_weights() -> None:
    where = replace(IN_VRAM, activations="checkpoint", states="ram", step="gpu")
    resident, streamed = planned(where), planned(replace(where, weights="ram", gradients="ram"))
    assert resident.graphs is not None
    assert streamed.graphs is not None
    assert streamed.graphs.num_bytes - resident.graphs.num_bytes == 2 * 2**20


@pytest.mark.parametrize("options", [{"compile_blocks": True}, {"placement": replace(IN_VRAM, activations="cheap")}])
def test_plans_without_graphs(options: Any) -> None:
    plan = planned(**options)
    assert plan.graphs is None
    assert GRAPHS not in plan.tiers["vram"]
    assert "CUDA graphs" not in plan.details()
    assert "blocks run" not in plan.explain()


@pytest.mark.parametrize("compiled", [True, False])
def test_a_compiled_plan_says_that_graphs_would_be_faster(compiled: bool) -> None:
    passes = {"forward": Pass(num_operations=100), "backward": Pass(num_operations=200)}
    work = MicroBatch(tuple(stage(f"block.{index}", **passes) for index in range(4)), 640)
    config = OffloadConfig(placement=IN_VRAM, compile_blocks=compiled)
    text = make_plan(LAYERS, config, work=work, hardware=H200).explain()
    assert ("without compile_blocks, blocks would run as CUDA graphs: at least " in text) is compiled


def test_where_the_vram_does_not_suffice_blocks_run_eagerly() -> None:
    whole = planned()
    small = planned(vram=whole.total_bytes("vram") - 1)
    assert small.graphs is not None
    assert not small.is_graphed
    assert small.fits
    assert GRAPHS not in small.tiers["vram"]
    assert "blocks run eagerly, because their CUDA graphs would take" in small.explain()


def test_a_run_that_gave_up_its_graphs_plans_none() -> None:
    plan = without_graphs(planned())
    assert plan.graphs is None
    assert replanned(plan, vram=8 * GIB).graphs is None


@pytest.mark.parametrize("made", [unlike_layers, adapted_layers])
def test_a_search_counts_graphs_as_the_plan_does(made: Any) -> None:
    layers, work = made()
    machine = replace(WITH_DISK, num_cores=16, launch_seconds=1e-4)
    eager, graphed = (Search(layers, work, machine, 2, graphed=on) for on in (False, True))
    for counts in some_counts(40):
        placements = graphed.placements(counts)
        streams = any(
            layer.in_block and where.weights == "ram" for layer, where in zip(layers, placements, strict=True)
        )
        found = GraphBytes(layers, work).graphs(choices(layers, placements, work), streams=streams)
        more = 0 if found is None else found.num_bytes
        assert graphed.needs(counts).vram == pytest.approx(eager.needs(counts).vram + more)
        seconds, phases = graphed.model.seconds(placements), graphed.phases(counts)
        assert (phases.update, phases.backward) == (seconds.update_phase, seconds.backward_phase)
        assert phases.busy_forward == seconds.busy["forward"]


def test_a_graph_takes_less_of_pythons_time() -> None:
    forward = Pass(num_operations=100)
    blocks = tuple(stage(f"block.{index}", forward=forward, backward=forward) for index in range(4))
    work, machine = MicroBatch(blocks, 640), replace(H200, launch_seconds=1e-3)

    def launches(where: Placement, *, timed: bool = False, graphed: bool = True) -> float:
        of_work = replace(work, operation_launches=(2 * FORWARD_LAUNCHES, 2 * BACKWARD_LAUNCHES)) if timed else work
        seconds = StepModel(LAYERS, of_work, machine, 1, graphed=graphed).seconds([where] * 5)
        return seconds.busy["launches"] / 1e-3 - LAYER_LAUNCHES * 5

    checkpoint, cheap = (replace(IN_VRAM, activations=how) for how in ("checkpoint", "cheap"))
    outside, own = sum(OUTSIDE_LAUNCHES), 4 * sum(GRAPHED_LAUNCHES)
    assert launches(IN_VRAM) == pytest.approx(own + outside + 8 * GRAPH_CALLS)
    assert launches(checkpoint) == pytest.approx(own + outside + 8 * GRAPH_CALLS)
    assert launches(IN_VRAM, timed=True) == pytest.approx(2 * (own + outside) + 8 * GRAPH_CALLS)
    assert launches(cheap) == pytest.approx(launches(cheap, graphed=False) + outside)
    assert launches(IN_VRAM, graphed=False) > 3 * (own + 8 * GRAPH_CALLS)


def test_python_takes_a_share_of_the_gpus_time() -> None:
    def share(flops: int) -> float:
        block = stage("block.0", forward=Pass(num_operations=100, flops=flops), backward=Pass(num_operations=100))
        return StepModel(LAYERS, MicroBatch((block,), 640), H200, 1, graphed=True).python_share()

    assert share(0) > 1
    assert share(10**14) < GAINS_BY_GRAPHS


@pytest.mark.parametrize("budget", [0.5, 0.7, 2])
def test_graphs_take_no_vram_that_gains_more_elsewhere(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes 0.85 of the GPU's time."""
    layers = [shape("first", 2**24, in_block=False), *(shape(f"block.{index}", 2**26) for index in range(12))]
    passes = {"forward": Pass(num_operations=60, flops=10**12), "backward": Pass(num_operations=120, flops=2 * 10**12)}
    blocks = (stage(each.name, kept=64 * MIB, input_bytes=8 * MIB, **passes) for each in layers[1:])
    work = MicroBatch((stage("", kept=MIB), *blocks, stage("", kept=0, backward_peak_bytes=256 * MIB)), 2048)
    share = StepModel(layers, work, H200, 1).python_share()
    machine = replace(H200, launch_seconds=0.85 / share * H200.launch_seconds)

    def made(vram: float) -> Plan:
        return make_plan(layers, OffloadConfig(vram=int(vram)), work=work, hardware=machine)

    bytes_of_all = made(64 * GIB).total_bytes("vram")
    found = made(budget * bytes_of_all)
    monkeypatch.setattr(facts_graphs, "device_types", set())
    eager = made(budget * bytes_of_all)
    assert found.seconds is not None
    assert eager.seconds is not None
    assert found.seconds.step <= AS_FAST * eager.seconds.step
    assert found.is_graphed == (budget > 1)
