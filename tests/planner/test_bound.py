"""The bound of a step, computed by hand for four layers of a million elements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.fitted import DISK_OVERLAP, KERNEL_SECONDS
from offloadkit.facts.units import format_range
from offloadkit.optim.table import Matrix
from offloadkit.planner import MicroBatch, Pass, Plan, make_plan
from offloadkit.planner.layout import NUM_WEIGHT_BUFFERS
from tests.planner.machines import H200, shape, stage
from tests.planner.test_seconds import machine

N = 10**6
FORWARD, BACKWARD = 0.004, 0.008
"""Seconds of all blocks on a GPU of 1 TFLOP/s."""
IN_RAM = Placement()
IN_VRAM = Placement(weights="vram", gradients="vram", states="vram", step="gpu")
STREAMED = Placement(weights="ram")
THROUGH_VRAM = Placement(weights="ram", states="ram", step="gpu")


def planned(
    where: Placement, *, num_ranks: int = 1, accumulation: int = 1, num_frozen: int = 0, **options: Any
) -> Plan:
    """`options`: rates of the machine, and fields of the layers."""
    rates = {name: options.pop(name) for name in list(options) if name.endswith("_second") or name == "launch_seconds"}
    layers = [shape(f"block.{index}", N, **options).shared_by(num_ranks) for index in range(4)]
    layers[:num_frozen] = [replace(each, kind=replace(each.kind, trains="frozen")) for each in layers[:num_frozen]]
    passes: dict[str, Any] = {"forward": Pass(flops=10**9), "backward": Pass(flops=2 * 10**9)}
    work = MicroBatch(tuple(stage(layer.name, **passes) for layer in layers), 640)
    precision, optimizer = layers[-1].kind.precision, layers[-1].kind.optimizer
    config = OffloadConfig(
        placement=where, gradient_accumulation=accumulation, precision=precision, optimizer=optimizer
    )
    hardware = replace(machine(bf16_flops_per_second=1e12, **rates), num_ranks=num_ranks)
    made = make_plan(layers, config, work=work, hardware=hardware)
    assert made.bound is not None
    assert made.to_dict()["bound_seconds"] == made.bound.step
    return made


def seconds(plan: Plan) -> list[float]:
    """The seconds of forward with the update, of the other forwards, and of backward."""
    assert plan.bound is not None
    return [phase.seconds for phase in plan.bound.phases]


def about(*expected: float) -> Any:
    return pytest.approx(list(expected), rel=2e-3)


@pytest.mark.parametrize(
    ("layer", "bytes_each"),
    [
        ({}, 26),
        ({"precision": "compact"}, 18),
        ({"precision": "tiny"}, 14 + 1 / 16),
        ({"optimizer": "lion"}, 18),
        ({"num_frozen": 1}, 26 * 3 / 4),
    ],
)
@pytest.mark.parametrize("where", [IN_RAM, THROUGH_VRAM])
def test_states_in_ram_take_dram(layer: dict[str, Any], bytes_each: float, where: Placement) -> None:
    """The CPU reads and writes as many bytes as pass through VRAM for a step of the GPU."""
    found = planned(where, cpu_and_bus_bytes_per_second=1e9, **layer)
    assert seconds(found) == about(4 * bytes_each * N / 1e9, BACKWARD)


def test_weights_and_gradients_in_vram_do_not_pass_through_dram_again() -> None:
    """The GPU steps; master weights' low halves and both moments pass, 10 bytes each way."""
    where = Placement(gradients="vram", step="gpu")
    assert seconds(planned(where, cpu_and_bus_bytes_per_second=1e9)) == about(4 * 20 * N / 1e9, BACKWARD)


def test_with_everything_in_vram_the_gpu_alone_counts() -> None:
    """The step reads and writes 26 bytes for each parameter, at 85 % of the memory's rate."""
    found = planned(IN_VRAM, cpu_and_bus_bytes_per_second=1.0, h2d_bytes_per_second=1.0, vram_bytes_per_second=1e12)
    update = FORWARD + 4 * (26 * N / (0.85 * 1e12) + KERNEL_SECONDS)
    bucket = 4 * 3 * 2 * N / (0.85 * 1e12)
    assert seconds(found) == about(update, BACKWARD + bucket)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_muons_momentum_passes_through_dram(num_ranks: int) -> None:
    """18 bytes without a fp32 sum: weights and the masters' low halves (4) and the momentum (4) there and back, a
    gradient. Each of two ranks has half of the elements, and a gradient in fp32.
    """
    matrices = (Matrix(1000, 1000),)
    found = planned(
        THROUGH_VRAM, num_ranks=num_ranks, cpu_and_bus_bytes_per_second=1e8, optimizer="muon", matrices=matrices
    )
    bytes_each = 18 if num_ranks == 1 else (18 + 2) / 2
    assert seconds(found) == about(4 * bytes_each * N / 1e8, BACKWARD)


def test_a_rank_steps_its_share() -> None:
    """With fp32 sums of two gradients: 28 bytes for each of half of the elements."""
    found = planned(IN_RAM, num_ranks=2, cpu_and_bus_bytes_per_second=1e9)
    assert seconds(found) == about(4 * 28 * N / 2 / 1e9, BACKWARD)


def test_the_bus_carries_weights_and_gradients() -> None:
    """Streamed weights arrive for forward and, but for those that the buffers hold, for backward."""
    arriving = planned(STREAMED, h2d_bytes_per_second=1e8)
    assert seconds(arriving) == about(4 * 2 * N / 1e8, (4 - NUM_WEIGHT_BUFFERS) * 2 * N / 1e8)
    leaving = planned(STREAMED, d2h_bytes_per_second=1e8)
    assert seconds(leaving) == about(FORWARD, 4 * 2 * N / 1e8)
    both = planned(STREAMED, both_bytes_per_second=1e8)
    assert seconds(both) == about(4 * 2 * N / 1e8, (5 + 3 - NUM_WEIGHT_BUFFERS) * 2 * N / 1e8)


def test_micro_batches_add_gradients_and_the_norm_reads_the_sums() -> None:
    """Each of three gradients is written (2 bytes), read (2) and added to its sum (8); the step reads fp32 sums (28),
    after the norm read them (4)."""
    found = planned(IN_RAM, accumulation=3, cpu_and_bus_bytes_per_second=1e9)
    assert seconds(found) == about(4 * 32 * N / 1e9, 2 * FORWARD, 3 * 4 * 12 * N / 1e9)


def test_a_recomputed_block_and_its_input_count() -> None:
    where = Placement(activations="checkpoint")
    assert seconds(planned(where)) == about(FORWARD, BACKWARD + FORWARD)
    where = Placement(activations="offload")
    assert seconds(planned(where, d2h_bytes_per_second=1e3))[0] == pytest.approx(4 * 10 / 1e3)


def test_states_on_disk_are_read_and_written() -> None:
    """With a folder whose disk reads and writes 1 GB/s; 10 bytes for each parameter."""
    rates = {"disk_read_bytes_per_second": 1e9, "disk_write_bytes_per_second": 1e9}
    found = planned(Placement(states="disk"), **rates)
    assert seconds(found) == about(DISK_OVERLAP * 4 * 10 * N * 2 / 1e9, BACKWARD)


def test_a_plan_names_its_bound() -> None:
    """Four layers whose step takes 104 MB at 1 GB/s."""
    rates = dict.fromkeys(("cpu_and_bus_bytes_per_second", "cpu_adamw_bytes_per_second"), 1e9)
    expected = "the bound of a step is 112 ms: forward and update 104 ms (RAM at 1 GB/s), backward 8 ms (computing)"
    (line,) = [line for line in planned(IN_RAM, **rates).explain().splitlines() if "bound" in line]
    assert line == f"{expected}; the plan takes 1.04x as long"  # the CPU step takes 97 % of RAM's rate
    (line,) = [line for line in planned(IN_VRAM).explain().splitlines() if "bound" in line]
    assert line.endswith("; the plan takes as long")


@pytest.mark.parametrize("where", [IN_RAM, IN_VRAM, STREAMED, THROUGH_VRAM])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_no_step_is_planned_below_its_bound(where: Placement, accumulation: int) -> None:
    names = [name for name in vars(H200) if name.endswith("_per_second")]
    rates = {name: getattr(H200, name) for name in names if name != "bf16_flops_per_second"}
    found = planned(where, accumulation=accumulation, **rates)
    assert found.bound is not None
    assert found.seconds is not None
    assert found.bound.step <= found.seconds.step


def test_a_plan_that_python_bounds_says_a_range() -> None:
    found = planned(IN_VRAM, launch_seconds=2e-3)
    assert found.step_range is not None
    least, most = found.step_range
    said = f"{format_range(least, most, digits=2)} a step"
    assert said in found.verdict
    assert f"Python's time varies: a step takes {format_range(least, most)}" in found.explain()
    assert found.to_dict()["step_range_seconds"] == (least, most)
