"""Plans with frozen layers: weights alone, in VRAM or in RAM."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from offloadkit.engine.outline import outlined
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.planner import make_plan, placed
from offloadkit.planner.layout import LayerShape, WeightsAlone, possible, tier_bytes
from offloadkit.planner.leaner import leaner
from offloadkit.planner.search import Search
from offloadkit.planner.seconds import IN_VRAM, StepModel
from tests.offload.test_frozen import Adapted
from tests.planner.machines import GIB, H200, LLAMA_8B, T4
from tests.planner.test_counts import adapted_layers

LAYERS, WORK = adapted_layers()
FROZEN = next(layer for layer in LAYERS if not layer.kind.is_trained)


@pytest.mark.parametrize(("accumulation", "num_ranks"), [(1, 1), (4, 1), (1, 2), (4, 2)])
def test_a_frozen_layer_takes_its_weights_and_nothing_else(accumulation: int, num_ranks: int) -> None:
    layer = replace(FROZEN, exchanges_sums=True).shared_by(num_ranks)
    in_table = tier_bytes([replace(layer, in_block=False, looked_up=True)], [WeightsAlone(weights="ram")], accumulation)
    assert in_table == {"vram": {}, "ram": {"frozen weights": 2 * 2**23 // num_ranks}, "disk": {}}
    of_all = {where: tier_bytes([layer], [WeightsAlone(weights=where)], accumulation) for where in ("vram", "ram")}
    assert of_all["vram"] == {"vram": {"frozen weights": 2 * 2**23}, "ram": {}, "disk": {}}
    in_ram = {"vram": {"weight buffers": 3 * 2 * 2**23}, "ram": {"frozen weights": 2 * 2**23 // num_ranks}, "disk": {}}
    assert of_all["ram"] == in_ram, "ranks share the weights in RAM"


def test_a_frozen_layer_costs_copies_alone() -> None:
    """Two blocks are as fast as ever where all is in VRAM; in RAM their weights are copied once for each pass."""
    here, there = WeightsAlone(), WeightsAlone(weights="ram")
    trained = [layer for layer in LAYERS if layer.kind.is_trained]
    alone, both = (StepModel(layers, WORK, T4, 1) for layers in (trained, LAYERS))
    assert alone.seconds([IN_VRAM] * len(trained)).step == both.seconds([IN_VRAM] * len(LAYERS)).step
    where = [IN_VRAM if layer.kind.is_trained else here for layer in LAYERS]
    resident = both.seconds(where)
    assert resident.busy.get("H2D", 0) == 0
    streamed = both.seconds([there if each is here else each for each in where])
    assert streamed.busy["H2D"] > 0
    assert {name: streamed.busy.get(name, 0) for name in ("D2H", "CPU step", "GPU step")} == {
        name: resident.busy.get(name, 0) for name in ("D2H", "CPU step", "GPU step")
    }


def test_a_plan_streams_frozen_blocks_when_vram_is_short_and_small_trained_layers_stay() -> None:
    config = OffloadConfig()
    machine = replace(T4, vram_free_bytes=15 * GIB, ram_available_bytes=12 * GIB)
    roomy = make_plan(LAYERS, config, work=WORK, hardware=machine)
    assert {where.weights for where in roomy.placements} == {"vram"}
    needed = roomy.needs()["vram"]
    tight = make_plan(LAYERS, replace(config, vram=needed - 6 * 2**24, ram=12 * GIB), work=WORK, hardware=machine)
    assert tight.fits
    assert tight.needs()["vram"] < needed
    small = [where for layer, where in zip(tight.layers, tight.placements, strict=True) if layer.numel == 2**12]
    assert {where.weights for where in small} == {"vram"}
    for plan in (roomy, tight):
        for layer, where in zip(plan.layers, plan.placements, strict=True):
            assert isinstance(where, WeightsAlone) != layer.kind.is_trained
    search = Search(tuple(tight.layers), WORK, machine, 1)
    least = search.best(1, 12 * GIB)
    kept = {where.weights for layer, where in zip(LAYERS, least, strict=True) if not layer.kind.is_trained}
    assert kept == {"ram"}, "embeddings too"
    assert "frozen embeddings looked up in RAM" in placed(roomy, least).details()


def test_the_plan_counts_frozen_parameters_and_their_bytes() -> None:
    plan = make_plan(LAYERS, OffloadConfig(), frozen=7, frozen_bytes=14)
    frozen = sum(layer.num_parameters for layer in LAYERS if not layer.kind.is_trained)
    assert plan.num_parameters - plan.num_trainable_parameters == frozen + 7
    in_layers = sum(layer.weight_bytes() for layer in LAYERS if not layer.kind.is_trained)
    assert plan.tiers["vram"]["frozen weights"] == in_layers + 14
    streamed = make_plan(LAYERS, OffloadConfig(placement=Placement(weights="ram")), frozen=7, frozen_bytes=14)
    assert streamed.tiers["vram"]["frozen weights"] == 14
    assert streamed.tiers["ram"]["frozen weights"] == in_layers
    closing = next(phase for phase in streamed.phases if phase.name == "closing")
    assert closing.ram >= 14 + sum(layer.weight_bytes() for layer in LAYERS)
    assert f"({frozen + 7:,} frozen)" in str(plan)
    assert "frozen weights in RAM" in streamed.details()


def test_a_leaner_plan_moves_frozen_weights_to_ram() -> None:
    plan, found = make_plan(LAYERS, OffloadConfig()), []
    while plan is not None:
        found.append({where.weights for where in plan.placements if isinstance(where, WeightsAlone)})
        plan = leaner(plan, "vram", {"vram": int(0.95 * plan.total_bytes("vram")), "ram": 100 * GIB})
    assert found[0] == {"vram"}
    assert found[-1] == {"ram"}


def test_only_blocks_and_embeddings_may_leave_vram() -> None:
    outside: LayerShape = replace(FROZEN, in_block=False)
    looked_up = replace(outside, looked_up=True)
    assert possible(Placement(weights="ram", activations="checkpoint"), looked_up) == WeightsAlone(weights="ram")
    assert possible(Placement(weights="ram"), replace(looked_up, shared=True)) == WeightsAlone()
    assert possible(Placement(weights="ram", activations="checkpoint"), outside) == WeightsAlone()
    kept = possible(Placement(weights="ram", activations="checkpoint"), FROZEN)
    assert kept == WeightsAlone(weights="ram", activations="checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "vram"), [(4, 6), (8, 10)])
def test_lora_of_a_llama_of_8_billion_fits_a_small_card(rows: int, vram: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=8192, use_cache=False, **LLAMA_8B)).bfloat16()
        model.requires_grad_(False)
        for block in model.model.layers:
            for owner, names in ((block.self_attn, "qkvo"), (block.mlp, ("gate", "up", "down"))):
                for name in (f"{each}_proj" for each in names):
                    setattr(owner, name, Adapted(getattr(owner, name), rank=16))
        ids = torch.zeros((rows, 1024), dtype=torch.long)
    machine = replace(H200, ram_available_bytes=20 * GIB)
    outline = outlined(model, OffloadConfig(vram=vram * GIB, ram=20 * GIB), machine)
    plan = outline.plan(outline.work({"input_ids": ids, "labels": ids}))
    assert plan.fits, plan
    assert plan.num_trainable_parameters == 41_943_040
    placed = list(zip(plan.layers, plan.placements, strict=True))
    assert {where.weights for layer, where in placed if layer.looked_up} == {"ram"}
    assert {where.weights for layer, where in placed if layer.kind.is_trained} == {"vram"}
    assert plan.tiers["ram"]["frozen weights"] > 10 * GIB
    assert plan.slowdown is not None
    assert plan.slowdown < 2
