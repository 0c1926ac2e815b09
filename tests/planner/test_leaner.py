"""A leaner plan for a run in progress."""

from __future__ import annotations

from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.offload.layers import flat_layers, plan_of
from offloadkit.planner import MicroBatch, Plan, leaner, make_plan, placed, possible
from tests.models import TinyLM
from tests.planner.machines import H200, shape, stage

IN_VRAM = Placement(gradients="vram", states="vram", step="gpu")


def unsearched(where: Placement, **options: object) -> Plan:
    """The plan of a bare engine, without a micro-batch or a machine."""
    config, model = OffloadConfig(**options), TinyLM(depth=12)  # type: ignore[arg-type]
    base = plan_of(model, flat_layers(model, config), config)
    return placed(base, [possible(where, layer) for layer in base.layers])


def test_step_by_step_everything_leaves_vram() -> None:
    plan, went = unsearched(IN_VRAM), []
    while True:
        found = leaner(plan, "vram", {"vram": plan.total_bytes("vram") * 7 // 8, "ram": 1 << 40})
        if found is None:
            break
        recomputed = [each.activations for each in found.placements] != [each.activations for each in plan.placements]
        assert recomputed or found.total_bytes("vram") < plan.total_bytes("vram")
        plan = found
        went.append(plan.placements[3])
    assert went[0] == IN_VRAM, "the last layers must move first"
    assert set(plan.placements[1:-1]) == {Placement(weights="ram", activations="offload")}
    assert len(went) < 40


def test_no_more_goes_than_must() -> None:
    plan = unsearched(IN_VRAM)
    found = leaner(plan, "vram", {"vram": plan.total_bytes("vram") - 1, "ram": 1 << 40})
    assert found is not None
    assert [each.states for each in found.placements].count("ram") < len(found.placements)
    without_ram = leaner(plan, "vram", {"vram": 1})
    assert without_ram is not None
    assert {(each.states, each.weights) for each in without_ram.placements} == {("vram", "vram")}
    assert {each.activations for each in without_ram.placements[1:-1]} == {"checkpoint"}


def test_ram_is_left_for_vram_or_for_the_disk_that_the_user_named() -> None:
    plan = unsearched(Placement())
    needs = plan.total_bytes("ram") * 7 // 8
    assert leaner(plan, "ram", {"ram": needs}) is None
    to_vram = leaner(plan, "ram", {"ram": needs, "vram": 1 << 40})
    assert to_vram is not None
    assert {each.states for each in to_vram.placements} == {"ram", "vram"}
    plan = unsearched(Placement(), disk="/folder")
    to_disk = leaner(plan, "ram", {"ram": needs, "disk": 1 << 40})
    assert to_disk is not None
    assert to_disk.total_bytes("ram") <= needs
    assert {each.states for each in to_disk.placements} == {"ram", "disk"}


def test_a_placement_that_the_user_chose_stays() -> None:
    plan = unsearched(IN_VRAM, placement=IN_VRAM)
    assert leaner(plan, "vram", {"vram": 1, "ram": 1 << 40}) is None


def test_a_plan_that_knows_its_machine_is_searched_again() -> None:
    layers = [shape(f"block.{index}", 2**24) for index in range(4)]
    work = MicroBatch(tuple(stage(layer.name, kept=2**26) for layer in layers), 640)
    plan, budgets = make_plan(layers, OffloadConfig(), work=work, hardware=H200), list[int]()
    ram = 8 * plan.total_bytes("ram")
    while (found := leaner(plan, "vram", {"vram": plan.total_bytes("vram") * 7 // 8, "ram": ram})) is not None:
        assert found.total_bytes("vram") < plan.total_bytes("vram")
        assert found.seconds is not None
        plan = found
        budgets.append(plan.budgets["vram"])
    assert len(budgets) > 1
    assert {(each.weights, each.states) for each in plan.placements} == {("ram", "ram")}


def test_the_leanest_plan_is_found_where_nothing_fits_what_is_left() -> None:
    """A GPU that has lost as much as the plan takes leaves a budget of one byte."""
    layers = [shape(f"block.{index}", 2**24) for index in range(4)]
    work = MicroBatch(tuple(stage(layer.name, kept=2**26) for layer in layers), 640)
    plan = make_plan(layers, OffloadConfig(), work=work, hardware=H200)
    found = leaner(plan, "vram", {"vram": 1, "ram": 8 * plan.total_bytes("ram")})
    assert found is not None
    assert {(each.weights, each.states) for each in found.placements} == {("ram", "ram")}
    assert leaner(found, "vram", {"vram": 1, "ram": 8 * plan.total_bytes("ram")}) is None
