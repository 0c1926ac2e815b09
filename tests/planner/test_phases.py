"""The bytes of reading, saving and closing next to the training steps, and the plan's text about them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.planner import LayerShape, MicroBatch, Plan, Rows, make_plan
from offloadkit.planner.layout import activations, choices, run_bytes
from offloadkit.planner.phases import PHASES, READ_AHEAD_BYTES, Phase, differing
from tests.planner.machines import GIB, H200, shape, stage

LAYERS = [shape(f"block.{index}", 2**27) for index in range(8)]
WORK = MicroBatch(tuple(stage(layer.name, kept=1 << 20) for layer in LAYERS), 640)
WEIGHTS = 8 * 2**28
IN_VRAM = Placement(states="vram", gradients="vram", step="gpu")


def planned(*placements: Placement, layers: list[LayerShape] = LAYERS) -> Plan:
    """A plan for the H200 with `placements` for the first layers; all further layers are in VRAM."""
    every = (*placements, *[IN_VRAM] * (len(layers) - len(placements)))
    held = activations(WORK, choices(layers, every, WORK))
    tiers = run_bytes(layers, every, 1, held=held, context_bytes=H200.vram_context_bytes)
    made = make_plan(layers, OffloadConfig(), work=WORK, hardware=replace(H200, ram_available_bytes=999 * GIB))
    return replace(made, placements=every, tiers=tiers)


def by_name(plan: Plan) -> dict[str, Phase]:
    assert tuple(phase.name for phase in plan.phases) == PHASES
    return {phase.name: phase for phase in plan.phases}


def test_a_model_that_moves_to_ram_at_the_end_needs_room_for_all_of_it() -> None:
    """One layer's weights are in RAM. Closing brings all layers there, and needs more room than training."""
    resident, mixed = planned(), planned(Placement(weights="ram"))
    assert by_name(resident)["closing"].ram == by_name(resident)["training"].ram
    framework = mixed.tiers["ram"]["framework"]
    assert mixed.total_bytes("ram") < framework + WEIGHTS
    assert by_name(mixed)["closing"].ram == framework + WEIGHTS == mixed.needs()["ram"]
    short = replace(mixed, budgets={"vram": 64 * GIB, "ram": mixed.total_bytes("ram")})
    assert short.lacking() == {"ram": framework + WEIGHTS - mixed.total_bytes("ram")}


def test_states_in_ram_leave_room_for_the_weights_when_they_are_gone() -> None:
    phases = by_name(planned(*[Placement(weights="ram")] * 8))
    assert phases["closing"] == replace(phases["training"], name="closing")
    assert phases["saving"].ram == phases["training"].ram


def test_a_large_layer_is_staged_in_ram_while_it_is_read() -> None:
    embedding = shape("embedding", 2**30)
    phases = by_name(planned(layers=[embedding, *LAYERS]))
    late = phases["training"].ram + embedding.weight_bytes() - phases["reading"].ram
    assert 0 < late < GIB  # the framework's memory from the first step on
    assert phases["resuming"].ram == phases["reading"].ram > phases["training"].ram
    assert phases["reading"].vram < phases["training"].vram


def test_small_layers_are_staged_together_in_the_room_of_what_the_framework_takes_later() -> None:
    one, two, all_of_them = (by_name(planned(layers=LAYERS[:number])) for number in (1, 2, len(LAYERS)))
    early = one["training"].ram - one["reading"].ram
    assert two["training"].ram - two["reading"].ram == early - LAYERS[1].weight_bytes() > 0
    late = early + LAYERS[0].weight_bytes()
    assert all_of_them["training"].ram - all_of_them["reading"].ram == late - READ_AHEAD_BYTES > 0


def test_what_is_not_known_of_the_framework_is_not_taken_for_reading_either() -> None:
    for where in ("vram", "ram"):
        made = make_plan(LAYERS, OffloadConfig(placement=Placement(weights=where)))
        assert "framework" not in made.tiers["ram"]
        assert made.needs()["ram"] == made.total_bytes("ram") + LAYERS[0].weight_bytes()


def test_of_a_model_in_memory_no_more_than_a_layer_is_staged() -> None:
    made = planned(layers=LAYERS[:2])
    held = replace(made, basis=replace(made.basis, held_bytes=GIB))
    fewer = by_name(made)["reading"].ram - by_name(held)["reading"].ram
    assert fewer == LAYERS[1].weight_bytes() - GIB


def test_without_a_gpu_a_model_in_memory_is_freed_while_it_is_read() -> None:
    """At first it is whole, beside the weights of one layer in place; at the end all weights are in place."""
    made = make_plan(LAYERS, OffloadConfig(), work=WORK, hardware=replace(H200, device="cpu"))
    alone, one = by_name(made)["reading"].ram, LAYERS[0].weight_bytes()
    for held in (WEIGHTS, 2 * WEIGHTS):
        phase = by_name(replace(made, basis=replace(made.basis, held_bytes=held)))["reading"]
        assert phase.ram == alone - (WEIGHTS + one) + held + one
    resuming = by_name(replace(made, basis=replace(made.basis, held_bytes=WEIGHTS)))["resuming"]
    assert resuming == by_name(made)["resuming"]


def test_without_a_gpu_everything_is_ram_and_activations_go_after_each_step() -> None:
    made = make_plan(LAYERS, OffloadConfig(), work=WORK, hardware=replace(H200, device="cpu"))
    phases = by_name(made)
    assert phases["training"].ram == made.total_bytes("ram") + made.total_bytes("vram") == made.needs()["ram"]
    assert phases["training"].ram - phases["saving"].ram == made.tiers["vram"]["activations"]


def test_the_phases_are_a_small_table_in_the_details() -> None:
    made = planned(Placement(weights="ram"))
    table = made.details().split("\n  peaks by phase:\n    ")[1]
    assert max(map(len, table.splitlines())) <= 80
    lines = re.split(r"\n    (?=\S)", table)  # continuation lines are indented further
    assert [" ".join(name.split()) for line in lines for name in line.split(": ")[1].split(",")] == list(PHASES)
    assert "GiB of VRAM and " in lines[0]
    assert made.to_dict()["phases"][0]["name"] == "reading"
    assert "peaks by phase" not in replace(made, budgets={"vram": 1, "ram": 1}).details()


@pytest.mark.parametrize(("took", "named"), [(9.6, False), (10.4, False), (11, True), (9, True)])
def test_a_peak_is_named_if_it_is_not_what_was_planned(took: float, named: bool) -> None:
    phases = [Phase("closing", 0, 10 * GIB), Phase("reading", 0, GIB // 4)]
    said = list(differing(phases, {"closing": {"ram": int(took * GIB)}, "reading": {"ram": GIB // 2}}))
    assert said == [f"memory: closing took {took:g} GiB of RAM, 10 GiB were planned"] * named


@pytest.mark.parametrize(
    ("vram", "took", "named"), [(GIB, 2.1, False), (GIB, 2.3, True), (GIB, 0.4, True), (0, 2.1, True)]
)
def test_reading_on_a_gpu_may_begin_with_the_libraries_of_a_measured_step(vram: int, took: float, named: bool) -> None:
    said = list(differing([Phase("reading", vram, GIB)], {"reading": {"ram": int(took * GIB)}}))
    assert len(said) == named


@pytest.mark.parametrize("took", [2.4, 2.6])
def test_reading_may_take_the_file_of_a_model_in_memory(took: float) -> None:
    phases, peaks = [Phase("reading", 0, GIB), Phase("saving", 0, GIB)], {"reading": {"ram": int(took * GIB)}}
    assert len(list(differing(phases, peaks, held_bytes=GIB))) == (took > 2.5)
    assert len(list(differing(phases, peaks | {"saving": {"ram": 2 * GIB}}, held_bytes=GIB))) == 1 + (took > 2.5)


def test_a_larger_micro_batch_of_evaluation_counts() -> None:
    """If it takes more than training, the plan keeps less in VRAM, or explains why it does not fit."""
    held = 4 * GIB
    larger = replace(WORK, evaluation=MicroBatch((stage("block.0", forward_peak_bytes=held),), 640))
    card = replace(H200, ram_available_bytes=999 * GIB)
    plans = {}
    for vram in (6, 3):
        for work in (WORK, larger):
            made = make_plan(LAYERS, OffloadConfig(vram=vram * GIB), work=work, hardware=card)
            plans[vram, work is larger] = made
    assert all(plans[key].fits for key in ((6, False), (6, True), (3, False)))
    assert by_name(plans[6, True])["evaluation"].vram == plans[6, True].needs()["vram"] <= 6 * GIB
    assert plans[6, True].total_bytes("vram") < plans[6, False].total_bytes("vram") - GIB
    assert plans[3, True].lacking()["vram"] > held - 3 * GIB
    assert "evaluation takes the most VRAM: a smaller per_device_eval_batch_size" in plans[3, True].explain()


def test_encoder_decoders_generate_for_as_many_rows_as_fit() -> None:
    read = tuple(replace(each, forward=replace(each.forward, read_key_bytes=2 * GIB)) for each in WORK.stages)
    found = []
    for rows in (Rows(64, 512, 128), Rows(64, 512, None)):
        work = replace(WORK, stages=read, rows=rows)
        for vram in (64, 24):
            config = OffloadConfig(working_dtype="bf16", vram=vram * GIB, placement=IN_VRAM)
            made = make_plan(LAYERS, config, work=work, hardware=H200)
            assert made.fits
            found.append(by_name(made)["generation"].vram)
    whole, small, *of_one_row = found
    assert whole > 24 * GIB == small
    assert of_one_row[0] == of_one_row[1] < whole - 15 * GIB
