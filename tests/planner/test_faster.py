"""Measured rates differ from the plan's: which rates are judged, the corrected machine, and the plan for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.hardware import Hardware
from offloadkit.facts.telemetry import StepRecord
from offloadkit.planner import MicroBatch, Pass, Plan, Stage, make_plan
from offloadkit.planner.faster import COMPUTE, MIN_SECONDS, PYTHON, TOLERANCE, Rate, compared_rates, corrected, faster
from offloadkit.planner.seconds import StepModel
from tests.planner.machines import GIB, H200, TWO_CORES, shape, stage

LAYERS = [shape(f"block.{at}", 1 << 26) for at in range(24)]
PASS = Pass(flops=1 << 41, matmul_bytes=1 << 28, num_operations=40)
BLOCKS: list[Stage] = [
    stage(layer.name, 1 << 28, forward=PASS, backward=PASS + PASS, input_bytes=1 << 24) for layer in LAYERS
]
WORK = MicroBatch((stage("", 0), *BLOCKS, stage("", 0)), 4096)
BUDGETS = {"vram": 6 * GIB, "ram": 60 * GIB}
BUS = ("h2d_bytes_per_second", "d2h_bytes_per_second", "both_bytes_per_second")


def times(factor: float, *names: str) -> Hardware:
    changes: dict[str, Any] = {name: factor * getattr(H200, name) for name in names}
    return replace(H200, **changes)


@cache
def plan_on(machine: Hardware) -> Plan:
    return make_plan(LAYERS, OffloadConfig(vram="6GiB", ram="60GiB"), work=WORK, hardware=machine)


def model_of(plan: Plan, machine: Hardware) -> StepModel:
    return StepModel(LAYERS, WORK, machine, plan.accumulation)


def computing(plan: Plan, machine: Hardware) -> float:
    """Seconds of forward and backward with all weights in VRAM and an update that occupies its threads but takes no
    time."""
    where = [replace(each, weights="vram") for each in plan.placements]
    no_time: dict[str, Any] = {name: 1e30 for name in vars(H200) if name.endswith("_bytes_per_second")}
    at_once = replace(machine, **no_time | {"vram_bytes_per_second": machine.vram_bytes_per_second})
    seconds = model_of(plan, at_once).seconds(where)
    return seconds.step - seconds.busy["GPU step"]


def steps_on(machine: Hardware, plan: Plan, number: int = 3) -> list[StepRecord]:
    """Records of steps by `plan`, as the model predicts them for `machine`."""
    phases, rates = {"H2D": "h2d", "D2H": "d2h", "CPU step": "cpu_step"}, model_of(plan, machine).rates(plan.placements)
    seconds = {phases[name]: GIB / rate for name, rate in rates.items()}
    seconds |= {"forward": computing(plan, machine) + 0.5, "forward_bus_wait": 0.5}
    moved = {phases[name]: GIB for name in rates}
    return [StepRecord(at, 1.0, plan.num_tokens, 1.0, 1e-3, False, seconds, moved=moved) for at in range(number)]


def found_in(plan: Plan, machine: Hardware, records: Sequence[StepRecord]) -> dict[str, Rate]:
    return compared_rates(plan, machine, plan.placements, records)


@pytest.mark.parametrize(
    ("planned_with", "truth", "wrong"),
    [
        (times(5, *BUS, "cpu_and_bus_bytes_per_second"), H200, {"H2D", "D2H"}),
        (times(0.1, "cpu_adamw_bytes_per_second"), H200, {"CPU step"}),
        (H200, times(0.3, "bf16_flops_per_second", "vram_bytes_per_second"), {COMPUTE}),
    ],
)
def test_the_corrected_machine_does_what_was_measured_and_the_plan_for_it_is_as_fast_as_one_for_the_truth(
    planned_with: Hardware, truth: Hardware, wrong: set[str]
) -> None:
    plan = plan_on(planned_with)
    assert {where.step for where in plan.placements} == {"cpu", "gpu"}
    records = steps_on(truth, plan)
    rates = found_in(plan, planned_with, records)
    assert wrong <= {name for name, rate in rates.items() if rate.differs}
    machine = corrected(plan, planned_with, plan.placements, rates)
    assert machine is not None
    now = found_in(plan, machine, records)
    assert all(now[name].measured == pytest.approx(now[name].planned, rel=0.02) for name in wrong)
    assert not any(rate.differs for rate in now.values())
    best = plan_on(truth).seconds
    other = faster(plan, machine, plan.placements, BUDGETS)
    assert best is not None
    assert other is not None
    assert model_of(plan, truth).seconds(plan.placements).step > 1.05 * best.step
    assert model_of(plan, truth).seconds(other.placements).step < 1.1 * best.step
    assert other.basis.hardware == machine
    assert corrected(other, machine, other.placements, found_in(other, machine, steps_on(truth, other))) is None
    assert faster(other, machine, other.placements, BUDGETS) is None


def test_where_python_bounds_a_pass_its_launches_are_corrected() -> None:
    plan, slow = plan_on(H200), times(10, "launch_seconds")
    machine = corrected(plan, slow, plan.placements, found_in(plan, slow, steps_on(times(25, "launch_seconds"), plan)))
    assert machine is not None
    assert machine.launch_seconds == pytest.approx(25 * H200.launch_seconds, rel=0.15)  # without streamed weights
    assert machine.bf16_flops_per_second == H200.bf16_flops_per_second


def test_what_the_updates_threads_take_from_python_is_planned_and_no_error_of_its_rate() -> None:
    """Python bounds this plan. Forward and backward take as long as their launches, which are slower during the
    update."""
    plan = plan_on(H200)
    slow = replace(times(25, "launch_seconds"), cpu_adamw_bytes_per_second=0.1 * H200.cpu_adamw_bytes_per_second)
    beside, alone = (
        model_of(plan, replace(slow, num_cores=cores)).seconds(plan.placements).busy["launches"] for cores in (16, 2)
    )
    assert beside > 1.05 * alone
    bus, records = 0.5, steps_on(slow, plan)
    taken = {"forward": beside + bus, "backward": 0.0, "forward_bus_wait": bus}
    records = [replace(each, seconds=each.seconds | taken) for each in records]
    rate = found_in(plan, slow, records)[COMPUTE]
    assert rate.measured == pytest.approx(rate.planned, rel=0.02)


def test_shorter_rows_tell_what_python_takes_and_nothing_of_the_gpu() -> None:
    """The true GPU is the plan's; rows have half the length. Python takes 25 times the seconds of a bare H200, then as
    long as on a bare H200."""
    plan, slow = plan_on(H200), times(8, "launch_seconds")
    records = [replace(each, num_tokens=2048) for each in steps_on(times(25, "launch_seconds"), plan)]
    assert PYTHON not in found_in(plan, H200, records), "the GPU bounds this plan"
    rates = found_in(plan, slow, records)
    assert COMPUTE not in rates
    machine = corrected(plan, slow, plan.placements, rates)
    assert machine is not None
    assert machine.launch_seconds == pytest.approx(25 * H200.launch_seconds, rel=0.15)  # as with rows of planned length

    half = times(2, "bf16_flops_per_second", "vram_bytes_per_second")  # twice the speed, for half the rows
    records = [replace(each, num_tokens=2048) for each in steps_on(half, plan)]
    machine = corrected(plan, slow, plan.placements, found_in(plan, slow, records))
    assert machine is not None
    assert machine.launch_seconds == pytest.approx(H200.launch_seconds, rel=0.1)
    assert replace(machine, launch_seconds=slow.launch_seconds) == slow


def test_nothing_is_said_of_forward_and_backward_where_fewer_tokens_may_be_something_else() -> None:
    plan, slow = plan_on(H200), times(10, "launch_seconds")
    records = [replace(each, num_tokens=2048) for each in steps_on(slow, plan)]
    longer = [replace(each, num_tokens=number) for each, number in zip(records, (4096, 4096, 4097), strict=True)]
    unknown = [replace(records[0], num_tokens=None), *records[1:]]
    fewer = replace(plan, accumulation=4)  # a window that ended early has fewer micro-batches
    several = replace(plan, layers=tuple(replace(layer, num_ranks=2) for layer in plan.layers))
    assert PYTHON in found_in(plan, slow, records)
    for made, some in ((plan, longer), (plan, unknown), (fewer, records), (several, steps_on(slow, plan))):
        assert not {COMPUTE, PYTHON} & found_in(made, slow, some).keys()


def test_a_plan_that_needs_more_than_there_is_is_none() -> None:
    plan = plan_on(times(0.1, "cpu_adamw_bytes_per_second"))
    assert faster(plan, H200, plan.placements, BUDGETS) is not None
    assert faster(plan, H200, plan.placements, BUDGETS | {"vram": GIB // 2}) is None


def test_rates_within_the_tolerance_are_the_models_error() -> None:
    plan = plan_on(H200)
    for factor in (0.99 * TOLERANCE, 1.01 / TOLERANCE):
        rates = {name: Rate(factor, 1.0) for name in ("H2D", "D2H", "CPU step", COMPUTE)}
        assert corrected(plan, H200, plan.placements, rates) is None
    assert corrected(plan, H200, plan.placements, rates | {"H2D": Rate(0.99 / TOLERANCE, 1.0)}) is not None


def test_a_direction_that_was_not_judged_is_as_wrong_as_the_other() -> None:
    plan = plan_on(H200)
    expected = model_of(plan, H200).rates(plan.placements)
    rates = {"H2D": Rate(expected["H2D"] / 4, expected["H2D"])}
    machine = corrected(plan, H200, plan.placements, rates)
    assert machine is not None
    assert machine.d2h_bytes_per_second / H200.d2h_bytes_per_second == pytest.approx(
        machine.h2d_bytes_per_second / H200.h2d_bytes_per_second
    )
    machine = corrected(plan, H200, plan.placements, rates | {"D2H": Rate(expected["D2H"], expected["D2H"])})
    assert machine is not None
    assert machine.d2h_bytes_per_second == H200.d2h_bytes_per_second


def test_the_rates_of_one_copy_at_a_time_are_the_machines() -> None:
    where = [Placement(gradients="vram", states="vram", step="gpu", activations="offload")] * len(LAYERS)
    rates = StepModel(LAYERS, WORK, H200, 1).rates(where)
    assert rates == pytest.approx({"H2D": H200.h2d_bytes_per_second, "D2H": H200.d2h_bytes_per_second})
    on_cpu = StepModel(LAYERS, WORK, H200, 2).rates([Placement()] * len(LAYERS))
    assert on_cpu["CPU step"] == pytest.approx(0.97 * H200.cpu_adamw_bytes_per_second, rel=0.05)


def test_what_cannot_be_judged_is_left_out() -> None:
    plan = plan_on(H200)
    records = steps_on(H200, plan)
    assert found_in(plan, H200, records).keys() == {"H2D", "D2H", "CPU step", COMPUTE}
    others = [replace(record, num_tokens=4095) for record in records]
    assert not {COMPUTE, PYTHON} & found_in(plan, H200, others).keys()
    assert found_in(plan, replace(H200, num_cores=TWO_CORES.num_cores), records).keys() == {"H2D", "D2H"}
    on_disk = [replace(plan.placements[0], states="disk", step="cpu"), *plan.placements[1:]]
    slow_disk = replace(H200, disk_read_bytes_per_second=1e9, disk_write_bytes_per_second=1e9)
    assert "CPU step" not in compared_rates(plan, slow_disk, on_disk, records)
    short = MIN_SECONDS / 2
    little = [
        replace(each, seconds=each.seconds | {"h2d": short, "d2h": 2.0}, moved=each.moved | {"h2d": 1000, "d2h": 1000})
        for each in records
    ]  # d2h: many tiny copies
    assert found_in(plan, H200, little).keys() == {"CPU step", COMPUTE}


def test_a_step_with_a_pause_counts_for_nothing() -> None:
    plan = plan_on(H200)
    first, *others = steps_on(H200, plan)
    paused = replace(first, seconds=dict.fromkeys(first.seconds, 9.0))
    assert found_in(plan, H200, [paused, *others]) == found_in(plan, H200, others)
