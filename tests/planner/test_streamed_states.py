"""Seconds of layers with states in RAM that the GPU steps, on a machine with round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offloadkit.facts.config import Placement
from offloadkit.facts.fitted import (
    CHUNK_LAUNCHES,
    CPU_EFFICIENCY,
    STEP_EFFICIENCY,
)
from offloadkit.planner import MicroBatch, Pass
from offloadkit.planner.seconds import Queues, Ring, StepModel, both_ways
from tests.planner.machines import shape, stage
from tests.planner.test_seconds import LARGE, machine, model

ON_CPU = Placement()
ON_GPU = Placement(step="gpu")
LEAST_RAM = Placement(gradients="vram", step="gpu")
CPU_SECOND = {"cpu_adamw_bytes_per_second": 26e6 / CPU_EFFICIENCY["exact"]}
"""The CPU steps a layer of a million elements in one second."""
UP_SECOND = {"h2d_bytes_per_second": 10e6}
"""A layer's states go to VRAM in one second."""


@pytest.mark.parametrize(
    ("placement", "h2d", "d2h"),
    [
        (LEAST_RAM, 10, 10),
        (ON_GPU, 12, 10),
        (Placement(weights="ram", gradients="vram", step="gpu"), 12 + 2, 12),  # and the stepped weights
        (Placement(weights="ram", step="gpu"), 14 + 2, 12),
    ],
)
def test_bytes_a_parameter_each_way(placement: Placement, h2d: int, d2h: int) -> None:
    rates = {"h2d_bytes_per_second": 1e6, "d2h_bytes_per_second": 1e6}
    first = model(machine(**rates), num_blocks=3).seconds([placement] * 3)  # weights are still in VRAM in backward
    assert first.busy["H2D"] == pytest.approx(3 * h2d, rel=1e-3)
    in_backward = 2 if placement.gradients == "ram" else 0
    assert first.busy["D2H"] == pytest.approx(3 * (d2h + in_backward), rel=1e-3)
    assert first.busy["CPU step"] == 0


def test_accumulated_gradients_are_four_bytes() -> None:
    hardware = machine(h2d_bytes_per_second=1e6)
    assert model(hardware, accumulation=2).seconds([ON_GPU] * 4).busy["H2D"] == pytest.approx(4 * 14, rel=1e-3)
    assert model(hardware, accumulation=2).seconds([LEAST_RAM] * 4).busy["H2D"] == pytest.approx(4 * 10, rel=1e-3)


def test_forward_waits_layer_by_layer() -> None:
    hardware = machine(**UP_SECOND, bf16_flops_per_second=1.0)
    seconds = model(hardware, forward=Pass(flops=1)).seconds([LEAST_RAM] * 4)
    assert seconds.update_phase == pytest.approx(5, rel=1e-3)
    assert seconds.exposed == pytest.approx(1, rel=1e-3)


def test_cpu_and_gpu_step_at_once() -> None:
    hardware = machine(**CPU_SECOND, **UP_SECOND)
    step = model(hardware)
    assert step.seconds([ON_CPU] * 4).step == pytest.approx(4 + 0.2, rel=1e-3)  # upload of the last layer
    assert step.seconds([LEAST_RAM] * 4).step == pytest.approx(4, rel=1e-3)
    both = step.seconds([ON_CPU, LEAST_RAM, ON_CPU, LEAST_RAM])
    assert both.step == pytest.approx(2 + 2 * 0.2, rel=1e-3)  # states wait for two uploads
    assert both.busy["CPU step"] == pytest.approx(2, rel=1e-3)
    assert both.busy["H2D"] == pytest.approx(2.4, rel=1e-3)


def test_a_processor_that_is_behind_does_not_hold_up_the_other() -> None:
    """The GPU's layers come after the CPU's in forward, and are stepped at the same time from the beginning."""
    step = model(machine(**CPU_SECOND, **UP_SECOND))
    assert step.seconds([ON_CPU, ON_CPU, LEAST_RAM, LEAST_RAM]).step == pytest.approx(2.4, rel=1e-3)


def test_the_gpus_kernel_takes_from_its_computing() -> None:
    hardware = machine(vram_bytes_per_second=26e6 / STEP_EFFICIENCY, bf16_flops_per_second=1.0)
    seconds = model(hardware, forward=Pass(flops=10)).seconds([LEAST_RAM] * 4)
    assert seconds.busy["GPU step"] == pytest.approx(4, rel=1e-3)
    assert seconds.update_phase == pytest.approx(4 * (10 + 1), rel=1e-3)


def test_both_directions_share_the_bus_as_long_as_both_are_in_use() -> None:
    hardware = machine(h2d_bytes_per_second=10.0, d2h_bytes_per_second=10.0, both_bytes_per_second=10.0)
    assert both_ways(50, 50, hardware) == pytest.approx((5, 5))
    assert both_ways(100, 50, hardware) == pytest.approx((100 / 15, 5))
    assert both_ways(50, 100, hardware) == pytest.approx((5, 100 / 15))
    assert both_ways(100, 0, hardware) == both_ways(0, 100, hardware) == (10, 10)
    assert both_ways(1e6, 1e6, replace(hardware, both_bytes_per_second=99.0)) == pytest.approx((10, 10))
    one_slow = machine(h2d_bytes_per_second=1.0, d2h_bytes_per_second=10.0)
    assert both_ways(50, 50, one_slow) == pytest.approx((1, 10))


def test_a_layers_chunks_follow_each_other_through_the_ring() -> None:
    ring = Ring(Queues(16))
    stepped, back = ring.step(h2d=4, d2h=4, kernel=0.4, num_chunks=4)
    assert stepped == pytest.approx(4 + 0.4)  # each chunk waits for the step of the chunk before
    assert back == pytest.approx(4 + 0.4 + 1)  # plus the last chunk's way back


def test_a_chunk_waits_until_one_of_three_buffers_is_back() -> None:
    """Only the way back takes time: three layers of one chunk each are stepped at once, then the next layer waits."""
    seconds = model(machine(d2h_bytes_per_second=10e6)).seconds([LEAST_RAM] * 4)
    assert seconds.update_phase == pytest.approx(1, rel=1e-3)
    assert seconds.busy["D2H"] == pytest.approx(4, rel=1e-3)  # continues under backward


def test_uploads_go_before_states() -> None:
    ring = Ring(Queues(16))
    ring.give_way(end=3, seconds=1)
    ring.give_way(end=9, seconds=1)
    assert ring.step(h2d=4, d2h=0, kernel=0, num_chunks=1)[0] == 5
    assert ring.step(h2d=2, d2h=0, kernel=0, num_chunks=1)[0] == 7
    assert ring.step(h2d=2, d2h=0, kernel=0, num_chunks=1)[0] == 10


def test_inputs_on_their_way_to_ram_are_before_states_too() -> None:
    ring = Ring(Queues(16))
    ring.sent(3)
    assert ring.step(h2d=1, d2h=1, kernel=0, num_chunks=1) == (1, 4)


def test_python_takes_its_time_for_each_chunk() -> None:
    layers = [shape("block.0", 3 << 23), shape("block.1", 1 << 22)]
    step = StepModel(layers, MicroBatch((stage("block.0"), stage("block.1")), 640), machine(launch_seconds=1e-3), 1)
    more = step.seconds([ON_GPU] * 2).busy["launches"] - step.seconds([ON_CPU] * 2).busy["launches"]
    assert more == pytest.approx((3 + 1) * CHUNK_LAUNCHES / 1000, rel=1e-6)


def test_cores_and_copies_share_what_dram_gives() -> None:
    """Each processor has two layers: 52 MB in 2 s by the CPU, 24 MB up and 20 MB down in 2.4 s. That is 44.3 MB/s, and
    DRAM gives 36 while both run."""
    rates = {"h2d_bytes_per_second": 10e6, "d2h_bytes_per_second": 10e6, "both_bytes_per_second": 20e6}
    hardware = machine(**CPU_SECOND, **rates, cpu_and_bus_bytes_per_second=36e6)
    placements = [ON_CPU, LEAST_RAM, ON_CPU, LEAST_RAM]
    slower = (26 + 44 / 2.4) / 36
    busy = model(hardware).seconds(placements).busy
    assert busy["CPU step"] == pytest.approx(2 * slower, rel=1e-3)
    assert busy["H2D"] == pytest.approx(2 * slower + 0.4, rel=1e-3)  # alone in the last 0.4 s
    roomy = replace(hardware, cpu_and_bus_bytes_per_second=46e6)
    assert model(roomy).seconds(placements).busy["CPU step"] == pytest.approx(2, rel=1e-3)
    assert model(hardware).seconds([ON_CPU] * 4).busy["CPU step"] == pytest.approx(4, rel=1e-3)


def test_a_large_machine_hides_all_of_it() -> None:
    assert model(machine()).seconds([ON_GPU] * 4).step == pytest.approx(0, abs=1e-4)
    assert machine().h2d_bytes_per_second == LARGE
