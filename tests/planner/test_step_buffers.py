"""Bytes of layers with states in RAM that the GPU steps, by hand, and of the buffers they pass through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offloadkit.facts.config import Placement
from offloadkit.optim.table import LayerKind
from offloadkit.planner import layout as shapes
from offloadkit.planner import step_buffer_bytes, tier_bytes
from tests.planner.machines import shape

LEAST_RAM = Placement(gradients="vram", step="gpu")
EITHER = Placement(step="gpu")
WEIGHTS_IN_RAM = Placement(weights="ram", step="gpu")
LAYER = replace(shape(), num_norm_blocks=1)
SUMS = 256


@pytest.mark.parametrize(
    ("placement", "weights", "gradients"),
    [
        (LEAST_RAM, 0, 0),
        (EITHER, 2, 2),
        (WEIGHTS_IN_RAM, 2, 2),
        (Placement(weights="ram", gradients="vram", step="gpu"), 2, 0),
    ],
)
def test_ram_of_a_layer_whose_states_pass_through_vram(placement: Placement, weights: int, gradients: int) -> None:
    parts = LAYER.ram_bytes(placement, 1)
    assert parts["master weights"] == 2 * 1024
    assert parts["moments"] == 8 * 1024
    assert parts["gradients"] == SUMS + gradients * 1024
    assert parts.get("working weights", 0) == weights * 1024
    assert sum(LAYER.ram_bytes(placement, 4).values()) - sum(parts.values()) == (gradients > 0) * 2 * 1024


def test_the_norm_takes_eight_bytes_a_block() -> None:
    for blocks, num_bytes in ((1, 256), (32, 256), (33, 512), (3200, 25_600)):
        assert replace(LAYER, num_norm_blocks=blocks).sums_bytes() == num_bytes


def test_vram_is_that_of_the_same_layer_stepped_by_the_cpu() -> None:
    for placement in (LEAST_RAM, EITHER, WEIGHTS_IN_RAM):
        assert LAYER.vram_bytes(placement, 4) == LAYER.vram_bytes(replace(placement, step="cpu"), 4)


@pytest.mark.parametrize(
    ("placement", "accumulation", "bytes_a_parameter"),
    [
        (LEAST_RAM, 1, 10),
        (LEAST_RAM, 4, 10),
        (EITHER, 1, 12),
        (EITHER, 4, 14),
        (WEIGHTS_IN_RAM, 1, 14),
        (replace(WEIGHTS_IN_RAM, gradients="vram"), 4, 12),
    ],
)
def test_what_passes_through_a_step_buffer(placement: Placement, accumulation: int, bytes_a_parameter: int) -> None:
    assert step_buffer_bytes([(LAYER, placement)], accumulation) == bytes_a_parameter * 1024
    large = replace(LAYER, numel=3 * shapes.STEP_CHUNK)
    assert step_buffer_bytes([(LAYER, placement), (large, placement)], accumulation) == (
        bytes_a_parameter * shapes.STEP_CHUNK
    )


def test_step_buffers_hold_whatever_either_processor_can_step() -> None:
    wide = replace(LAYER, kind=LayerKind("fp32"))
    assert step_buffer_bytes([(LAYER, EITHER), (wide, Placement())], 1) == (4 + 8) * 1024
    assert step_buffer_bytes([(LAYER, EITHER), (wide, Placement(gradients="vram"))], 1) == 12 * 1024
    assert step_buffer_bytes([(LAYER, EITHER), (wide, Placement(states="disk"))], 1) == 12 * 1024
    tiny = replace(LAYER, kind=replace(LAYER.kind, precision="tiny"))
    assert step_buffer_bytes([(tiny, LEAST_RAM)], 1) == 2 * 1024 + 2 * (1024 + 256)


def test_without_a_layer_that_the_gpu_steps_from_ram_there_are_no_step_buffers() -> None:
    in_vram = Placement(gradients="vram", states="vram", step="gpu")
    for placements in ([Placement()], [in_vram, Placement()], [Placement(states="disk")]):
        assert "state buffers" not in tier_bytes([LAYER] * len(placements), placements, 1)["vram"]
    tiers = tier_bytes([LAYER, LAYER], [EITHER, Placement()], 1)
    assert tiers["vram"]["state buffers"] == 3 * 12 * 1024
    assert "state buffers" not in tiers["ram"]
