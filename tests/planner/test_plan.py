"""The plan's arithmetic: bytes of each category by hand, and the text about them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from offloadkit.errors import ConfigError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.planner import MicroBatch, Pass, make_plan, possible, tier_bytes
from offloadkit.planner.layout import ALLOCATOR_BYTES, FRAMEWORK_RAM_BYTES, activations, run_bytes
from offloadkit.planner.work import Cheap
from tests.planner.machines import H200, shape, stage

IN_RAM = Placement()
IN_VRAM = Placement(weights="vram", gradients="vram", states="vram", step="gpu")
ON_DISK = Placement(states="disk")
STREAMED = Placement(weights="ram")


# -- one layer


@pytest.mark.parametrize(
    ("dtype", "precision", "master", "moments"),
    [
        ("bf16", "exact", 2 * 1024, 8 * 1024),
        ("bf16", "compact", 2 * 1024, 4 * 1024),
        ("bf16", "tiny", 2 * 1024, 2 * (1024 + 256)),  # four scales, in a view of 256 bytes
        ("fp16", "exact", 4 * 1024, 8 * 1024),
        ("fp32", "compact", 0, 4 * 1024),
    ],
)
def test_states_by_dtype_and_precision(dtype: Any, precision: Any, master: int, moments: int) -> None:
    layer = shape(dtype=dtype, precision=precision)
    assert layer.state_bytes() == {"master weights": master, "moments": moments}


def test_the_scales_of_tiny_are_a_64th_of_its_bytes() -> None:
    layer = shape(numel=2**20, precision="tiny")
    assert layer.state_bytes()["moments"] == 2 * 2**20 * (1 + 4 / 256)


def test_gradients_are_fp32_where_several_are_added_or_the_weight_is_tied() -> None:
    layer = shape()
    assert layer.gradient_bytes(1) == layer.bucket_bytes() == 2 * 1024
    assert layer.gradient_bytes(4) == 4 * 1024
    assert replace(layer, shared=True).gradient_bytes(1) == 4 * 1024


def test_traffic_of_the_step_is_26_bytes_a_parameter() -> None:
    assert shape().step_bytes(1) == 26 * 1024
    assert shape().step_bytes(2) == 28 * 1024
    assert shape(precision="compact").step_bytes(1) == 18 * 1024


def test_what_lies_outside_the_blocks_keeps_weights_and_activations() -> None:
    wish = Placement(weights="ram", activations="offload")
    assert possible(wish, shape()) == wish
    assert possible(wish, shape(in_block=False)) == Placement()
    assert possible(wish, shape(shared=True)) == Placement(activations="offload")


# -- all layers


def tiers(*placements: Placement, accumulation: int = 1, **changes: Any) -> dict[str, dict[str, int]]:
    layers = [shape(f"block.{index}", **changes) for index in range(len(placements))]
    return tier_bytes(layers, placements, accumulation)


def test_states_in_ram() -> None:
    found = tiers(*[IN_RAM] * 4)
    n, sums = 4 * 1024, 4 * 256
    assert found["vram"] == {"working weights": 2 * n, "gradients": sums + 2 * 2 * 1024}  # two buckets
    assert found["ram"] == {
        "working weights": 2 * n,
        "gradients": 2 * n + sums,
        "master weights": 2 * n,
        "moments": 8 * n,
    }
    assert found["disk"] == {}


def test_everything_in_vram() -> None:
    found = tiers(*[IN_VRAM] * 4)
    n, sums = 4 * 1024, 4 * 256
    assert found["vram"] == {
        "working weights": 2 * n,
        "gradients": 2 * n + sums + 2 * 1024,  # autograd's, of one layer
        "master weights": 2 * n,
        "moments": 8 * n,
    }
    assert found["ram"] == {"gradients": sums}


def test_streamed_weights_pass_through_three_buffers() -> None:
    found = tiers(*[STREAMED] * 4, IN_RAM)
    assert found["vram"]["working weights"] == 2 * 1024
    assert found["vram"]["weight buffers"] == 3 * 2 * 1024


def test_a_block_of_two_dtypes_has_one_buffer_for_both() -> None:
    layers = [shape("block.0", dtype="fp16"), shape("block.0", numel=512, dtype="fp32")]
    found = tier_bytes(layers, [STREAMED, STREAMED], 1)
    assert found["vram"]["weight buffers"] == 3 * (2 * 1024 + 4 * 512)


def test_states_on_disk_pass_through_buffers_in_ram() -> None:
    found = tiers(ON_DISK, ON_DISK, IN_RAM)
    assert found["disk"] == {"master weights": 2 * 2 * 1024, "moments": 2 * 8 * 1024}
    assert found["ram"]["state buffers"] == 3 * 10 * 1024
    assert found["ram"]["moments"] == 8 * 1024


def test_accumulation_in_ram_needs_fp32_sums_and_staging() -> None:
    found = tiers(*[IN_RAM] * 4, accumulation=2)
    assert found["ram"]["gradients"] == 4 * (4 * 1024 + 256) + 2 * 2 * 1024
    assert found["vram"]["gradients"] == 4 * 256 + 2 * 2 * 1024


def test_accumulation_in_vram_needs_fp32_sums_there() -> None:
    found = tiers(*[replace(IN_RAM, gradients="vram")] * 4, accumulation=2)
    assert found["vram"]["gradients"] == 4 * (4 * 1024 + 256) + 2 * 2 * 1024
    assert found["ram"]["gradients"] == 4 * (4 * 1024 + 256)


def test_a_tied_weights_bucket_is_there_beside_the_others() -> None:
    layers = [shape("embed", shared=True, in_block=False), *(shape(f"block.{index}") for index in range(3))]
    found = tier_bytes(layers, [IN_RAM] * 4, 1)
    assert found["vram"]["gradients"] == 4 * 256 + 4 * 1024 + 2 * 2 * 1024


# -- activations


WORK = MicroBatch((stage("", 50), stage("block.0"), stage("block.1"), stage("block.2"), stage("", 20)), 640)


def test_kept_activations_add_up() -> None:
    assert activations(WORK, ["keep"] * 5).vram == 50 + 3 * 100 + 20


def test_backwards_needs_come_on_top_where_they_arise() -> None:
    late = replace(WORK, stages=(*WORK.stages[:4], stage("", 20, backward_peak_bytes=7)))
    assert activations(late, ["keep"] * 5).vram == 370 + 7
    early = replace(WORK, stages=(stage("", 50, backward_peak_bytes=7), *WORK.stages[1:]))
    assert activations(early, ["keep"] * 5).vram == 370


def test_forwards_needs_go_before_backward_begins() -> None:
    wide = replace(WORK, stages=(*WORK.stages[:4], stage("", 20, forward_peak_bytes=90)))
    assert activations(wide, ["keep"] * 5).vram == 50 + 300 + 90


def test_recomputed_blocks_keep_their_outputs() -> None:
    held = activations(WORK, ["keep", *["checkpoint"] * 3, "keep"])
    assert held.vram == 50 + 2 * 10 + 100  # the last block, recomputed


def test_blocks_that_keep_their_matmuls() -> None:
    cheap = Cheap(kept_bytes=60, backward_peak_bytes=70, again=Pass())
    work = replace(WORK, stages=tuple(replace(each, cheap=cheap if each.block else None) for each in WORK.stages))
    assert activations(work, ["keep", *["cheap"] * 3, "keep"]).vram == 50 + 3 * 60 + 70
    assert activations(work, ["keep", "checkpoint", "cheap", "keep", "keep"]).vram == 50 + 10 + 60 + 100 + 20


def test_offloaded_inputs_are_in_ram() -> None:
    held = activations(WORK, ["keep", *["offload"] * 3, "keep"])
    assert held.ram == 3 * 10
    assert held.vram == 50 + 2 * 10 - 3 * 10 + 100 + 2 * 10  # two inputs on their way


def test_gradients_of_shared_inputs_are_there_in_backward() -> None:
    biased = replace(WORK, stages=tuple(replace(s, shared_bytes=5 if s.block else 0) for s in WORK.stages))
    assert activations(biased, ["keep", *["checkpoint"] * 3, "keep"]).vram == 50 + 2 * 10 + 100 + 5


# -- the run


def test_the_framework_is_counted() -> None:
    layers = [shape(f"block.{index}") for index in range(3)]
    held = activations(WORK, ["keep", *["checkpoint"] * 3, "keep"])
    found = run_bytes(layers, [IN_RAM] * 3, 1, frozen_bytes=11, held=held, context_bytes=7)
    assert found["vram"]["framework"] == 7 + ALLOCATOR_BYTES
    assert found["vram"]["activations"] == held.vram
    assert found["vram"]["frozen weights"] == 11
    assert found["ram"]["framework"] == FRAMEWORK_RAM_BYTES["cuda"]
    on_cpu = run_bytes(layers, [IN_RAM] * 3, 1, held=held, device_type="cpu")
    assert "framework" not in on_cpu["vram"]
    assert on_cpu["ram"]["framework"] == FRAMEWORK_RAM_BYTES["cpu"]


def test_without_a_machine_every_layer_is_in_ram() -> None:
    plan = make_plan([shape(), shape("head", in_block=False)], OffloadConfig(activation_checkpointing=True))
    assert [where.states for where in plan.placements] == ["ram", "ram"]
    assert [where.activations for where in plan.placements] == ["checkpoint", "keep"]
    assert plan.fits
    assert plan.seconds is None
    assert "optimizer states in RAM" in plan.details()
    assert re.match("AT LEAST: .*\n.*\n.*come on top", str(plan))


def test_a_wished_placement_is_taken() -> None:
    layers = [shape(f"block.{index}") for index in range(3)]
    plan = make_plan(layers, OffloadConfig(placement=STREAMED), work=WORK, hardware=H200)
    assert plan.placements == (STREAMED,) * 3


@pytest.mark.parametrize("how", ["cheap", "checkpoint", "offload"])
def test_a_wished_kind_of_recomputation_is_taken(how: Any) -> None:
    config = OffloadConfig(placement=replace(STREAMED, activations=how), activation_checkpointing=True)
    assert make_plan([shape()], config, work=WORK, hardware=H200).placements[0].activations == how


def test_checkpoints_on_disk() -> None:
    plan = make_plan([shape()], OffloadConfig(), frozen=5, frozen_bytes=10)
    assert plan.checkpoint_bytes == 10 + 12 * 1024
    assert plan.checkpoint_peak_bytes == 2 * plan.checkpoint_bytes + 10 + 2 * 1024
    assert (plan.num_parameters, plan.num_trainable_parameters) == (1029, 1024)
    cases: tuple[tuple[dict[str, Any], int], ...] = (
        ({"checkpoint_precision": "compact"}, 8),
        ({"precision": "compact", "checkpoint_precision": "compact"}, 8),
        ({"save_only_model": True}, 2),
    )
    for changes, per_parameter in cases:
        layer = shape(precision=changes.get("precision", "exact"))
        small = make_plan([layer], OffloadConfig(**changes), frozen=5, frozen_bytes=10)
        assert small.checkpoint_bytes == 10 + per_parameter * 1024
        assert small.checkpoint_peak_bytes == 2 * small.checkpoint_bytes + 10 + 2 * 1024
    assert plan.checkpoint_bytes_of("weights") == 10 + 2 * 1024


@pytest.mark.parametrize("wish", ["8 GiBs", "", "-3GiB", 0, True, 1.5])
def test_budgets_that_cannot_be_read_are_refused(wish: Any) -> None:
    for name in ("vram", "ram"):
        with pytest.raises(ConfigError, match=r"size|bytes"):
            OffloadConfig(**{name: wish})


def test_unknown_precisions_are_refused() -> None:
    with pytest.raises(ConfigError, match="precision must be one of 'exact', 'compact', 'tiny'; got 'exakt'"):
        OffloadConfig(precision="exakt")  # type: ignore[arg-type]
