"""The monitor's figures for hand-made records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.monitor import words
from offloadkit.monitor.figures import (
    MAX_POINTS,
    NUM_RECENT,
    Figures,
    History,
    LossCurve,
    Machine,
    beside,
    divided,
    figures,
    gpu_step_seconds,
    memory,
    recomputed_share,
    split,
)
from offloadkit.monitor.page import page
from offloadkit.monitor.terminal import view
from offloadkit.planner import MicroBatch, Plan, make_plan
from tests.monitor.records import BYTES, GIB, SECONDS, record
from tests.planner.machines import H200, shape, stage


def history(*records: object) -> History:
    made = History()
    for one in records:
        made.add(one)  # type: ignore[arg-type]
    return made


def plan(placement: Placement | None = None, num_layers: int = 4) -> Plan:
    layers = [shape(f"block.{index}", 1 << 26) for index in range(num_layers)]
    work = MicroBatch(tuple(stage(layer.name) for layer in layers), 640)
    return make_plan(layers, OffloadConfig(placement=placement, vram="11GiB"), work=work, hardware=H200)


def test_the_parts_of_a_step_add_up_to_it() -> None:
    parts = dict(split(SECONDS))
    assert parts == pytest.approx(
        {
            "forward": 0.2,
            "backward": 0.3,
            "wait for bus": 0.05 + 0.1 + (0.16 - 0.1),  # gradient copies longer than the pause before forward
            "wait for CPU step": 0.25 - 0.06,
            "step on the GPU": 0.0,
            "data and the rest": 0.1,
        }
    )
    assert sum(parts.values()) == pytest.approx(SECONDS["step"])


def test_a_gradient_that_arrives_before_forward_begins_is_no_wait() -> None:
    assert dict(split(SECONDS | {"gradient_tail": 0.05}))["wait for CPU step"] == pytest.approx(0.25)


def test_gradients_that_wait_for_the_cpu_in_backward_are_its_wait() -> None:
    parts = dict(split(SECONDS | {"backward_wait": 0.03, "forward_gpu_step_wait": 0.02}))
    assert parts["wait for CPU step"] == pytest.approx(0.19 + 0.03)
    assert parts["backward"] == pytest.approx(0.27)
    assert parts["step on the GPU"] == pytest.approx(0.02)


def test_what_worked_meanwhile_is_beside_the_step() -> None:
    assert dict(beside(SECONDS)) == {"CPU step": 0.6, "RAM -> GPU": 0.2, "GPU -> RAM": 0.3}
    assert dict(beside(SECONDS | {"gpu_step": 0.4}))["GPU step"] == 0.4
    assert beside({"step": 1.0}) == ()


def test_without_a_gpu_there_is_no_bus_and_nothing_is_offloaded() -> None:
    on_cpu = record(1, bytes={"ram": {"process": GIB}})
    shown = figures(history(on_cpu, on_cpu), engines_plan())
    assert dict(shown.beside) == {"CPU step": 0.6}
    assert not shown.is_offloaded
    assert figures(history(record(1)), plan(Placement())).is_offloaded
    resident = Placement(weights="vram", gradients="vram", states="vram", step="gpu")
    assert not figures(history(record(1)), plan(resident)).is_offloaded
    assert figures(history(record(1)), plan(replace(resident, activations="checkpoint"))).is_offloaded


def test_measured_memory_is_divided_among_what_is_allocated_then_the_estimates_and_the_rest_is_other() -> None:
    vram, ram = memory(BYTES, None)
    assert dict(vram.parts) == {
        "working weights": 4 * GIB,
        "activations": 2 * GIB,
        "framework": GIB,
        "other": GIB,
    }
    assert (vram.used, vram.planned) == (8 * GIB, 7 * GIB)
    assert dict(ram.parts) == {"master weights": 4 * GIB, "moments": 16 * GIB}
    assert sum(size for _, size in ram.parts) == ram.used


@pytest.mark.parametrize(
    ("used", "parts"),
    [
        (0, {}),
        (3, {"working weights": 3}),
        (6, {"working weights": 5, "framework": 1}),
        (9, {"working weights": 5, "framework": 2, "activations": 2}),
        (12, {"working weights": 5, "framework": 2, "activations": 4, "other": 1}),
    ],
)
def test_less_than_planned_is_taken_from_the_estimates(used: int, parts: dict[str, int]) -> None:
    assert divided({"working weights": 5, "activations": 4, "framework": 2}, used) == parts


def test_without_a_gpu_all_memory_is_ram() -> None:
    tiers = {"vram": {"working weights": 3}, "ram": {"working weights": 2, "gradients": 4, "process": 10}}
    (ram,) = memory(tiers, None)
    assert ram.name == "RAM"
    assert dict(ram.parts) == {"working weights": 5, "gradients": 4, "other": 1}


def test_before_the_first_step_the_plan_is_shown() -> None:
    made = plan()
    shown = figures(History(), made, total_steps=10)
    assert [tier.name for tier in shown.memory] == ["VRAM", "RAM"]
    assert all(tier.used is None and sum(size for _, size in tier.parts) == tier.planned for tier in shown.memory)
    assert shown.memory[0].budget == 11 * GIB
    assert shown.slowdown is not None
    assert shown.slowdown.is_planned
    assert shown.slowdown.factor == pytest.approx(made.slowdown)
    assert (shown.steps_done, shown.eta_seconds, shown.loss) == (0, None, None)


def test_with_nothing_known_nothing_is_made_up() -> None:
    shown = figures(History())
    assert shown.memory == ()
    assert shown.slowdown is None
    assert shown.why_no_slowdown == "no step was timed yet"
    without_machine = figures(history(record(1)))
    assert without_machine.slowdown is None
    assert "without a plan the optimizer step in VRAM cannot be predicted" in without_machine.why_no_slowdown


def engines_plan(**options: Any) -> Plan:
    """A plan made by an engine alone: without a micro-batch and without a machine."""
    return make_plan([shape(f"block.{index}", 1 << 26) for index in range(4)], OffloadConfig(**options))


CARD = Machine(on_gpu=True, vram_bytes_per_second=4e12, budgets={"vram": 24 * GIB, "ram": 64 * GIB})


def test_an_engines_own_plan_is_set_against_the_machine_that_is_there() -> None:
    made = engines_plan(ram="40GiB")
    shown = figures(history(record(1), record(2)), made, machine=CARD)
    assert shown.slowdown is not None
    assert shown.slowdown.baseline == "predicted"
    gpu_step = 4 * (2**26 * 26) / (4e12 * 0.85) + 4 * 4e-6
    assert shown.slowdown.baseline_seconds == pytest.approx(0.2 + 0.3 + 0.1 + gpu_step)
    assert [tier.budget for tier in shown.memory] == [24 * GIB, 40 * GIB], "the user's budget precedes the free memory"
    assert figures(History(), made, machine=CARD).memory[0].budget == 24 * GIB


def test_an_engine_on_the_cpu_of_a_gpus_machine_keeps_its_budget_of_ram() -> None:
    on_cpu = {"ram": {"process": GIB}}
    shown = figures(history(record(1, bytes=on_cpu), record(2, bytes=on_cpu)), engines_plan(), machine=CARD)
    assert [(tier.name, tier.budget) for tier in shown.memory] == [("RAM", 64 * GIB)]
    assert shown.slowdown is None


def test_a_plan_without_a_micro_batch_says_what_it_leaves_out() -> None:
    (ram, *_) = memory(None, engines_plan(), Machine(False, 5e10))
    assert (ram.name, ram.planned_whole) == ("RAM", False)
    assert all(tier.planned_whole for tier in memory(None, plan()))


@pytest.mark.parametrize(
    ("made", "machine", "why"),
    [
        (None, CARD, "without a plan the optimizer step in VRAM cannot be predicted: pass Monitor(engine.plan, ...)"),
        (engines_plan(), None, "the device that the engine computes on is unknown"),
        (engines_plan(), Machine(False, 5e10), "the device that the engine computes on is unknown"),
        (engines_plan(), replace(CARD, vram_bytes_per_second=None), "VRAM is too full to measure its speed"),
    ],
)
def test_what_is_missing_for_a_predicted_slowdown_is_said(made: Any, machine: Any, why: str) -> None:
    shown = figures(history(record(1), record(2)), made, machine=machine)
    assert shown.slowdown is None
    assert shown.why_no_slowdown.startswith(why)
    assert "as baseline_seconds" in shown.why_no_slowdown
    measured = figures(history(record(1), record(2)), made, machine=machine, baseline_seconds=0.5)
    assert measured.slowdown is not None


def test_slowdown_against_a_measured_baseline_says_what_it_is_made_of() -> None:
    slow = figures(history(record(1), record(2)), baseline_seconds=0.5).slowdown
    assert slow is not None
    assert (slow.factor, slow.baseline) == (pytest.approx(2.0), "measured")
    assert sum(seconds for _, seconds in slow.parts) == pytest.approx(slow.step_seconds - slow.baseline_seconds)
    assert dict(slow.parts)["wait for CPU step"] == pytest.approx(0.19)


def test_a_predicted_baseline_is_the_computing_and_the_rest_measured_here_and_adamw_in_vram() -> None:
    made = plan(Placement())
    gpu_step = gpu_step_seconds(made, Machine.of(made))
    assert gpu_step is not None
    assert gpu_step == pytest.approx(4 * (2**26 * 26) / (4.05e12 * 0.85) + 4 * 4e-6)
    slow = figures(history(record(1), record(2)), made).slowdown
    assert slow is not None
    assert slow.baseline == "predicted"
    assert slow.baseline_seconds == pytest.approx(0.2 + 0.3 + 0.1 + gpu_step)
    assert dict(slow.parts)["AdamW in VRAM"] == pytest.approx(-gpu_step)


def test_states_that_come_from_ram_are_waited_for_beyond_adamw_in_vram() -> None:
    made = plan(Placement(gradients="vram", step="gpu"))
    gpu_step = gpu_step_seconds(made, Machine.of(made))
    assert gpu_step is not None
    waited = record(1)
    waited.seconds["forward_gpu_step_wait"] = 0.15
    slow = figures(history(waited), made).slowdown
    assert slow is not None
    assert dict(slow.parts)["wait for GPU step"] == pytest.approx(0.15 - gpu_step)
    assert "AdamW in VRAM" not in dict(slow.parts)
    assert slow.baseline_seconds + sum(seconds for _, seconds in slow.parts) == pytest.approx(slow.step_seconds)


def test_recomputed_blocks_are_not_part_of_the_baseline() -> None:
    made = plan(Placement(activations="checkpoint"))
    assert recomputed_share(made) == 1.0
    assert recomputed_share(replace(made, placements=(Placement(),) * 2 + made.placements[2:])) == 0.5
    slow = figures(history(record(1), record(2)), made).slowdown
    assert slow is not None
    assert dict(slow.parts)["recomputed activations"] == pytest.approx(0.2)
    assert slow.baseline_seconds == pytest.approx(0.3 + 0.1 + gpu_step_seconds(made, Machine.of(made)))


def test_a_plan_for_a_gpu_that_is_trained_without_one_says_so() -> None:
    on_cpu = record(1, bytes={"vram": {"working weights": GIB}, "ram": {"process": 2 * GIB}})
    shown = figures(history(on_cpu, on_cpu), plan())
    assert shown.slowdown is None
    assert shown.why_no_slowdown.startswith("the plan was made for another device than the engine computes on; ")


def test_time_left_agrees_with_the_step_and_counts_pauses_at_their_rate() -> None:
    steps = [record(1, step=50.0), *(record(step, step=2.0) for step in range(2, 10))]
    shown = figures(history(*steps), total_steps=29)
    assert shown.eta_seconds == pytest.approx(20 * 2.0), "a slow first step says nothing about the rest"
    shown = figures(history(*steps, record(10, step=12.0)), total_steps=30)
    assert shown.eta_seconds == pytest.approx(20 * (2.0 + 10 / 10))
    assert shown.elapsed_seconds == pytest.approx(78)
    assert shown.step_seconds == pytest.approx(2.0), "neither the warm-up nor the evaluation is a typical step"
    assert shown.tokens_per_second == pytest.approx(320)


def test_a_run_that_went_on_past_its_end_has_no_time_left() -> None:
    assert figures(history(record(1), record(7)), total_steps=5).eta_seconds == 0


@pytest.mark.parametrize("number", [1, 2, 150, 151, 1000, 12_345])
def test_a_loss_curve_has_few_points_and_keeps_the_extremes(number: int) -> None:
    curve = LossCurve()
    losses = {step: 1 + (step * 7919 % 101) / 100 for step in range(1, number + 1)}
    losses[number // 2 + 1] = 9.5
    losses[number // 3 + 1] = -4.5 if number > 2 else losses[number // 3 + 1]
    for step, loss in losses.items():
        curve.add(step, loss)
    points = curve.points()
    assert len(points) <= MAX_POINTS
    assert all(losses[step] == loss for step, loss in points)
    assert [step for step, _ in points] == sorted({step for step, _ in points})
    values = [loss for _, loss in points]
    assert (min(values), max(values)) == (min(losses.values()), max(losses.values()))
    if number > 40:
        assert curve.trend()[-1][1] == pytest.approx(1.5, abs=0.4)


def test_what_comes_from_other_ranks_is_shown_where_there_are_some() -> None:
    alone = figures(history(record(1)))
    together = figures(history(replace(record(1), received={"exchange": 3 << 30, "gather": 0, "norm": 1 << 10})))
    assert words.received(alone) == ""
    assert words.received(together) == "From the other GPUs in a step: exchange 3 GiB, norm 1 KiB."
    displays: list[Callable[[Figures], str]] = [
        words.summary,
        lambda found: page(found, "m"),
        lambda found: " ".join(line.plain for line in view(found, 90).renderables),  # type: ignore[union-attr]
    ]
    for shown in displays:
        assert "From the other GPUs in a step: exchange" in shown(together)
        assert "other GPUs" not in shown(alone)


def test_losses_that_are_not_finite_are_left_out_and_skipped_steps_counted() -> None:
    shown = figures(history(record(1), record(2, float("nan"), skipped=True), record(3, 2.0)))
    assert shown.loss_curve == ((1, 1.0), (3, 2.0))
    assert shown.num_skipped == 1


def test_a_long_run_takes_no_more_memory() -> None:
    made = History()
    for step in range(1, 5001):
        made.add(record(step, float(step)))
    assert len(made.typical()) == NUM_RECENT
    assert 100 < len(made.loss.points()) <= MAX_POINTS
