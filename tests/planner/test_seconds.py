"""The step's seconds on a machine with round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offloadkit.facts.config import Placement
from offloadkit.facts.fitted import (
    ADD_EFFICIENCY,
    ATTENTION_EFFICIENCY,
    ATTENTION_LAUNCHES,
    BACKWARD_LAUNCHES,
    CHEAP_LAUNCHES,
    COMPILED_LAUNCHES,
    CPU_EFFICIENCY,
    DISK_OVERLAP,
    ENGINE_LAUNCHES,
    FORWARD_LAUNCHES,
    KERNEL_SECONDS,
    LAYER_LAUNCHES,
    NORM_EFFICIENCY,
    PYTHON_VARIES,
    RECOMPUTED_LAUNCHES,
    SDPA_EFFICIENCY,
    SDPA_KEYS,
    STEP_EFFICIENCY,
    STEP_LAUNCHES,
    STREAMED_LAUNCHES,
    THREAD_SLOWS,
)
from offloadkit.facts.hardware import Hardware
from offloadkit.planner import LayerShape, MicroBatch, Pass
from offloadkit.planner.seconds import WIDEST_RANGE, StepModel, layer_cost, pass_seconds, step_range
from offloadkit.planner.work import Cheap
from tests.planner.machines import H200, shape, stage

N = 10**6
"""Elements per layer."""
LARGE = 1e18
"""A rate that takes no time."""
IN_RAM = Placement()
IN_VRAM = Placement(weights="vram", gradients="vram", states="vram", step="gpu")
STREAMED = Placement(weights="ram")


def machine(**rates: float) -> Hardware:
    """Only the named rates take time."""
    names = [name for name in vars(H200) if name.endswith("_per_second")]
    every: dict[str, Any] = dict.fromkeys(names, LARGE) | {"launch_seconds": 0.0} | rates
    return replace(H200, **every)


def model(hardware: Hardware, *, num_blocks: int = 4, accumulation: int = 1, **work: Any) -> StepModel:
    layers = [shape(f"block.{index}", N) for index in range(num_blocks)]
    batch = MicroBatch(tuple(stage(f"block.{index}", **work) for index in range(num_blocks)), 640)
    return StepModel(layers, batch, hardware, accumulation)


def test_a_pass_takes_what_its_products_and_its_other_operations_take() -> None:
    work = Pass(flops=10**12, moved_bytes=0, num_operations=0)
    assert pass_seconds(work, machine(bf16_flops_per_second=1e12), "bf16") == pytest.approx(1.0)
    assert pass_seconds(work, machine(fp16_flops_per_second=1e12), "bf16") < 1e-3
    both = machine(bf16_flops_per_second=1e12, vram_bytes_per_second=1e12)
    assert pass_seconds(replace(work, matmul_bytes=3 * 10**12), both, "bf16") == pytest.approx(1 + 3)
    own = Pass(fused_attention_flops=10**12)
    assert pass_seconds(own, machine(bf16_flops_per_second=1e12), "bf16") == pytest.approx(1 / ATTENTION_EFFICIENCY)
    of_torch = Pass(sdpa_flops=10**12, sdpa_flops_of_a_key=10**9)
    expected = (1 + SDPA_KEYS / 1000) / SDPA_EFFICIENCY
    assert pass_seconds(of_torch, machine(bf16_flops_per_second=1e12), "bf16") == pytest.approx(expected)


@pytest.mark.parametrize("own", [0, 50])
def test_many_small_operations_take_as_long_as_starting_them(own: int) -> None:
    """offloadkit's attention counts as several operations, except in the additional launches of recomputation."""
    work = Pass(num_operations=1000, num_attention=own)
    assert pass_seconds(work, machine(), "bf16") == pytest.approx(1000 * KERNEL_SECONDS)
    step = model(machine(launch_seconds=1e-3), forward=work, backward=replace(work, num_operations=2000))
    more = own * ATTENTION_LAUNCHES / 1000
    forward = FORWARD_LAUNCHES * (1 + more)
    plain = 4 * (forward + BACKWARD_LAUNCHES * (2 + more))
    started = 4 * LAYER_LAUNCHES / 1000
    assert step.on_large_gpu() == pytest.approx(plain + started, rel=1e-3)
    seconds = step.seconds([IN_RAM] * 4)
    beside = plain + started + 3 * STEP_LAUNCHES / 1000 * (1 - 1 / (1 + THREAD_SLOWS))  # launches of the CPU step
    assert seconds.step == pytest.approx(beside + STEP_LAUNCHES / 1000, rel=1e-3)
    assert seconds.busy["launches"] == pytest.approx(beside, rel=1e-3)
    again = sum(RECOMPUTED_LAUNCHES) + forward
    recomputed = step.seconds([replace(IN_RAM, activations="checkpoint")] * 4).step
    assert recomputed == pytest.approx(beside + 4 * again, rel=1e-3)
    streamed = step.seconds([STREAMED] * 4).step
    streaming = 4 * sum(STREAMED_LAUNCHES) + STEP_LAUNCHES
    assert streamed == pytest.approx(beside + streaming / 1000, rel=1e-3)


def test_python_is_slower_beside_each_thread_of_the_update_as_long_as_that_works() -> None:
    """No slowdown if the CPU step and Python take turns, or during other micro-batches."""
    alone = 4 * FORWARD_LAUNCHES  # seconds; the CPU steps a layer in 2.5 s, and two layers stream through VRAM in 4 s
    through_vram = replace(IN_RAM, step="gpu")
    streamed = model(machine()).layers[0].transfer_bytes(through_vram)[0]
    rates = {"launch_seconds": 1e-3, "cpu_adamw_bytes_per_second": 26e6 / 2.5 / CPU_EFFICIENCY["exact"]}
    hardware = machine(h2d_bytes_per_second=2 * streamed / 4, **rates)

    def forward(first: Placement, num_cores: int = 16, accumulation: int = 1) -> float:
        there, placements = replace(hardware, num_cores=num_cores), [first] * 2 + [IN_RAM] * 2
        work = model(there, accumulation=accumulation, forward=Pass(num_operations=1000))
        return work.seconds(placements).update_phase

    def gained(*spans: tuple[float, float]) -> float:
        """How much longer a step is than Python alone, with (seconds, slowdown) spans."""
        return sum(seconds * (1 - 1 / factor) for seconds, factor in spans)

    one, both = 1 + THREAD_SLOWS, 1 + 2 * THREAD_SLOWS
    on_cpu = 2.5 + alone + gained((7.5, one))  # Python waits for the first layer
    assert forward(IN_RAM) == pytest.approx(on_cpu, rel=0.01)
    assert forward(through_vram) == pytest.approx(alone + gained((4, both), (1, one)), rel=0.01)
    assert forward(IN_RAM, num_cores=2) == pytest.approx(10 + alone, rel=0.02)
    summed = model(hardware, accumulation=2).layers[0]
    first, others = 4 * summed.norm_in_ram + summed.cpu_step, 3 * summed.cpu_step
    twice = first + alone + gained((others, one)) + alone
    assert forward(IN_RAM, accumulation=2) == pytest.approx(twice, rel=0.01)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_python_takes_is_what_was_timed_with_the_models_blocks(compiled: bool) -> None:
    """Plus the engine's work for each block, which is not part of the timing."""
    work = Pass(num_operations=1000, num_attention=5)
    layers = [shape(f"block.{index}", N) for index in range(4)]
    stages = *(stage(layer.name, forward=work, backward=work) for layer in layers), stage("", forward=work)
    batch = MicroBatch(stages, 640, operation_launches=(2, 3))
    step = StepModel(layers, batch, machine(launch_seconds=1e-3), 1, compiled=compiled)
    more, of_block = 5 * ATTENTION_LAUNCHES, 1000 * (COMPILED_LAUNCHES if compiled else 1)
    own = (4 * ENGINE_LAUNCHES + 4 * LAYER_LAUNCHES) * 1e-3
    timed = 4 * (of_block + more) * (2e-3 + 3e-3) + (1000 + more) * 2e-3
    assert step.on_large_gpu() == pytest.approx(timed + own, rel=1e-6)


@pytest.mark.parametrize("own", [0, 7])
def test_compiled_blocks_take_less_to_start(own: int) -> None:
    """Except offloadkit's attention, which a compiler launches unchanged."""
    hardware, work = machine(launch_seconds=1e-3), Pass(num_operations=1000, num_attention=own)
    layers = [shape(f"block.{index}", N) for index in range(4)]
    batch = MicroBatch(
        (*(stage(layer.name, forward=work, backward=work) for layer in layers), stage("", forward=work)), 640
    )
    eager, compiled = (StepModel(layers, batch, hardware, 1, compiled=how).on_large_gpu() for how in (False, True))
    saved = 4 * (1 - COMPILED_LAUNCHES) * (FORWARD_LAUNCHES + BACKWARD_LAUNCHES)
    assert eager - compiled == pytest.approx(saved, rel=1e-3)  # operations outside of blocks are not compiled
    operations = 1000 + own * ATTENTION_LAUNCHES
    started = (5 * FORWARD_LAUNCHES + 4 * BACKWARD_LAUNCHES) * operations / 1000 + 4 * LAYER_LAUNCHES / 1000
    assert eager == pytest.approx(started, rel=1e-3)


def test_python_waits_for_a_layers_update() -> None:
    """A layer's forward starts once the layer is stepped, and takes longer to launch than to compute."""
    hardware = machine(cpu_adamw_bytes_per_second=26e6 / CPU_EFFICIENCY["exact"], launch_seconds=1 / FORWARD_LAUNCHES)
    seconds = model(hardware, forward=Pass(num_operations=1)).seconds([IN_RAM] * 4)
    last = 1  # the CPU step has ended
    assert seconds.update_phase == pytest.approx(4 * (1 + STEP_LAUNCHES / FORWARD_LAUNCHES) + last, rel=1e-3)


def test_with_two_cores_python_and_the_cpu_step_take_turns() -> None:
    hardware = machine(cpu_adamw_bytes_per_second=26e6 / CPU_EFFICIENCY["exact"], launch_seconds=1e-3)
    hidden, in_turn = (
        model(replace(hardware, num_cores=num_cores), forward=Pass(num_operations=100)).seconds([IN_RAM] * 4)
        for num_cores in (3, 2)
    )
    launches = 4 * FORWARD_LAUNCHES * 100 / 1000
    waits = launches - launches / 4
    assert in_turn.update_phase - hidden.update_phase == pytest.approx(waits, rel=2e-2)


def test_the_cpu_step_reads_and_writes_26_bytes() -> None:
    seconds = model(machine(cpu_adamw_bytes_per_second=26e6 / CPU_EFFICIENCY["exact"])).seconds([IN_RAM] * 4)
    assert seconds.busy["CPU step"] == pytest.approx(4, rel=1e-3)
    assert seconds.update_phase == pytest.approx(4, rel=1e-3)
    assert seconds.step == pytest.approx(4, rel=1e-3)


def test_the_norm_of_what_was_added_in_ram_is_taken_there_first() -> None:
    hardware = machine(cpu_adamw_bytes_per_second=4e6)
    through_ram = model(hardware, accumulation=2).seconds([IN_RAM] * 4)
    in_vram = model(hardware, accumulation=2).seconds([Placement(gradients="vram")] * 4)
    difference = through_ram.update_phase - in_vram.update_phase
    assert difference == pytest.approx(4 / NORM_EFFICIENCY, rel=1e-3)  # 4 bytes an element


def test_precisions_have_rates_of_their_own() -> None:
    layers = [shape("block.0", N, precision="tiny")]
    batch = MicroBatch((stage("block.0"),), 640)
    hardware = machine(cpu_tiny_bytes_per_second=1e6 / CPU_EFFICIENCY["tiny"])
    step = StepModel(layers, batch, hardware, 1).seconds([IN_RAM]).busy["CPU step"]
    assert step == pytest.approx(layers[0].step_bytes(1) / 1e6, rel=1e-3)


def test_forward_hides_under_the_cpu_step_but_for_the_last_layer() -> None:
    hardware = machine(cpu_adamw_bytes_per_second=26e6 / CPU_EFFICIENCY["exact"], bf16_flops_per_second=1.0)
    seconds = model(hardware, forward=Pass(flops=1)).seconds([IN_RAM] * 4)
    assert seconds.update_phase == pytest.approx(5, rel=1e-3)
    assert seconds.exposed == pytest.approx(1, rel=1e-3)


def test_gradients_leave_behind_backward() -> None:
    hardware = machine(d2h_bytes_per_second=2e6, bf16_flops_per_second=1.0)
    seconds = model(hardware, backward=Pass(flops=1)).seconds([IN_RAM] * 4)
    assert seconds.backward_phase == pytest.approx(5, rel=1e-3)
    assert seconds.busy["D2H"] == pytest.approx(4)


def test_backward_waits_for_a_bucket() -> None:
    """Copies of 3 s after blocks of 1 s: block 3 waits for the copy of block 1."""
    hardware = machine(d2h_bytes_per_second=2e6 / 3, bf16_flops_per_second=1.0)
    assert model(hardware, backward=Pass(flops=1)).seconds([IN_RAM] * 4).backward_phase == pytest.approx(13, rel=1e-3)


def test_streamed_weights_come_twice_but_for_those_still_there() -> None:
    hardware = machine(h2d_bytes_per_second=2e6)
    resident = model(hardware, num_blocks=6).seconds([IN_RAM] * 6)
    streamed = model(hardware, num_blocks=6).seconds([STREAMED] * 6)
    assert resident.busy["H2D"] == pytest.approx(6)
    assert streamed.busy["H2D"] == pytest.approx(6 + 3)


def test_recomputation_is_a_second_forward() -> None:
    hardware = machine(bf16_flops_per_second=1.0)
    step = model(hardware, forward=Pass(flops=1), backward=Pass(flops=2))
    kept = step.seconds([IN_VRAM] * 4)
    assert kept.step == pytest.approx(12, rel=1e-3)
    assert step.seconds([replace(IN_VRAM, activations="checkpoint")] * 4).step == pytest.approx(16, rel=1e-3)
    assert step.on_large_gpu() == pytest.approx(kept.step)
    assert kept.exposed == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("bound", ["bf16_flops_per_second", "launch_seconds"])
def test_cheap_recomputation_computes_the_rest_again(bound: str) -> None:
    """Python passes every operation of forward and of the second run through a dispatch mode."""
    forward, again = Pass(flops=8, num_operations=8), Pass(flops=1, num_operations=6)
    of = {"forward": forward, "backward": Pass(flops=16), "cheap": Cheap(60, 70, again)}
    step = model(machine(**{bound: 1.0}), **of)
    kept, cheap = (step.seconds([replace(IN_VRAM, activations=how)] * 4).step for how in ("keep", "cheap"))
    by_python = FORWARD_LAUNCHES * 6 + sum(CHEAP_LAUNCHES) * 8
    assert cheap - kept == pytest.approx(4 * (1 if bound.startswith("bf16") else by_python), rel=1e-3)
    assert step.gains_by_cheap() == bound.startswith("bf16")


def test_offloaded_inputs_go_and_come() -> None:
    step = model(machine(h2d_bytes_per_second=1, d2h_bytes_per_second=1, both_bytes_per_second=2), input_bytes=3)
    busy = step.seconds([replace(IN_VRAM, activations="offload")] * 4).busy
    assert busy["H2D"] == pytest.approx(4 * 3)
    assert busy["D2H"] == pytest.approx(4 * 3)


def test_both_directions_share_the_bus_in_backward() -> None:
    rates = {"h2d_bytes_per_second": 2e6, "d2h_bytes_per_second": 2e6}
    alone = model(machine(**rates, both_bytes_per_second=4e6)).seconds([STREAMED] * 4)
    shared = model(machine(**rates, both_bytes_per_second=2e6)).seconds([STREAMED] * 4)
    assert shared.busy["D2H"] == pytest.approx(2 * alone.busy["D2H"])


def test_states_on_disk_are_read_and_written() -> None:
    hardware = machine(disk_read_bytes_per_second=10e6, disk_write_bytes_per_second=5e6)
    seconds = model(hardware).seconds([Placement(states="disk")] * 4)
    assert seconds.busy["disk"] == pytest.approx(DISK_OVERLAP * 4 * (1 + 2), rel=1e-3)
    assert seconds.step == pytest.approx(DISK_OVERLAP * 12, rel=1e-3)


def test_accumulation_repeats_forward_and_backward_and_sends_once_from_vram() -> None:
    hardware = machine(bf16_flops_per_second=1.0, d2h_bytes_per_second=2e6)
    step = model(hardware, accumulation=3, forward=Pass(flops=1), backward=Pass(flops=1))
    through_ram, in_vram = (step.seconds([Placement(gradients=where)] * 4) for where in ("ram", "vram"))
    assert through_ram.busy["D2H"] == pytest.approx(3 * 4)
    assert in_vram.busy["D2H"] == pytest.approx(2 * 4)  # fp32, once
    assert through_ram.busy["forward"] == pytest.approx(3 * 4, rel=1e-3)
    assert through_ram.busy["backward"] == pytest.approx(3 * 4, rel=1e-3)
    assert in_vram.step == pytest.approx(3 * 8 + 8, rel=1e-3)


def test_layers_outside_the_blocks_wait_where_they_are_computed() -> None:
    outside: dict[str, Any] = {"numel": N, "in_block": False}
    layers: list[LayerShape] = [shape("embed", **outside), shape("block.0", N), shape("head", **outside)]
    hardware = machine(cpu_adamw_bytes_per_second=26e6 / CPU_EFFICIENCY["exact"], bf16_flops_per_second=1.0)
    one = Pass(flops=1)
    batch = MicroBatch((stage("", forward=one), stage("block.0", forward=one), stage("", forward=one)), 640)
    assert StepModel(layers, batch, hardware, 1).seconds([IN_RAM] * 3).update_phase == pytest.approx(4, rel=1e-3)


def test_gradients_are_added_at_the_speed_of_the_memory_that_holds_the_sum() -> None:
    layer, vram = shape(numel=1 << 20), H200.vram_bytes_per_second * STEP_EFFICIENCY
    cost = layer_cost(0, layer, H200, accumulation=4)
    # The fp32 sum is read and written, the bf16 gradient is read; in RAM the gradient was written first.
    assert cost.adding_in_vram == pytest.approx((4 + 4 + 2) * layer.numel / vram)
    assert cost.adding_in_ram == pytest.approx(
        (4 + 4 + 2 + 2) * layer.numel / (H200.cpu_adamw_bytes_per_second * ADD_EFFICIENCY)
    )


@pytest.mark.parametrize(("flops", "spread"), [(0, 1.0), (0, 1.3), (10**12, 1.0), (10**13, 1.0)])
def test_a_step_that_python_bounds_has_a_range(flops: int, spread: float) -> None:
    """Four blocks with 1000 operations each and launches of 1 ms; the GPU takes 0, 4 or 40 s of 21.6 s of Python."""
    hardware = machine(launch_seconds=1e-3, bf16_flops_per_second=1e12)
    layers = [shape(f"block.{index}", N) for index in range(4)]
    work = Pass(flops=flops, num_operations=1000)
    batch = MicroBatch(tuple(stage(layer.name, forward=work) for layer in layers), 640, python_spread=spread)
    found = step_range(layers, batch, hardware, 1, [IN_VRAM] * 4)
    if flops == 10**13:
        assert found is None
        return
    assert found is not None
    python = 4 * (FORWARD_LAUNCHES + LAYER_LAUNCHES / 1000)
    least, most = python / PYTHON_VARIES, python * PYTHON_VARIES * spread
    narrower = (most / least / WIDEST_RANGE) ** 0.5
    assert found == pytest.approx((least * narrower, most / narrower), rel=1e-2)
    assert found[1] / found[0] == pytest.approx(WIDEST_RANGE)


@pytest.mark.parametrize("spread", [1.0, 1.3, 2.0, 3.0])
def test_the_range_contains_the_planned_step(spread: float) -> None:
    layers, hardware = [shape(f"block.{index}", N) for index in range(4)], machine(launch_seconds=1e-3)
    work = Pass(num_operations=1000)
    batch = MicroBatch(tuple(stage(layer.name, forward=work) for layer in layers), 640, python_spread=spread)
    found = step_range(layers, batch, hardware, 1, [IN_VRAM] * 4)
    assert found is not None
    least, most = found
    assert least <= StepModel(layers, batch, hardware, 1).seconds([IN_VRAM] * 4).step <= most
    assert most <= WIDEST_RANGE * least * (1 + 1e-9)


def test_what_python_does_not_bound_makes_the_range_narrower() -> None:
    """Python starts forward in 10.8 s and backward in 15; the GPU computes backward in 20."""
    hardware = machine(launch_seconds=1e-3, bf16_flops_per_second=1e12)
    layers = [shape(f"block.{index}", N) for index in range(4)]
    passes: dict[str, Any] = {"forward": Pass(num_operations=500), "backward": Pass(5 * 10**12, num_operations=625)}
    work = MicroBatch(tuple(stage(layer.name, **passes) for layer in layers), 640)
    found = step_range(layers, work, hardware, 1, [IN_VRAM] * 4)
    assert found == pytest.approx((10.8 / PYTHON_VARIES + 20, (10.8 + 15) * PYTHON_VARIES), rel=0.01)
