"""Measured rates differ from the plan's: the run moves once, no number changes; with equal rates it stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from offloadkit.engine import outline
from offloadkit.engine.engine import OffloadEngine
from offloadkit.engine.replanner import Replanner
from offloadkit.errors import OffloadkitError
from offloadkit.facts import hardware
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.fitted import LOADED_LATER_BYTES
from offloadkit.facts.hardware import Hardware
from offloadkit.facts.telemetry import StepRecord, Telemetry
from offloadkit.monitor.monitor import Monitor
from offloadkit.offload import rate_watch, shortage
from offloadkit.offload.rate_watch import MAX_SEARCHES, RateWatch
from offloadkit.offload.update import StepBalancer
from offloadkit.planner import Plan, make_plan
from offloadkit.planner import layout as shapes
from offloadkit.planner.faster import COMPUTE, PYTHON, Rate
from offloadkit.planner.layout import ALLOCATOR_BYTES
from offloadkit.planner.seconds import StepModel
from tests.models import TinyLM, assert_equal, tokens
from tests.planner import test_faster
from tests.planner.machines import H200
from tests.synchronisations import of_the_callers, synchronisations

pytestmark = pytest.mark.usefixtures("one_thread")

VRAM = H200.vram_context_bytes + LOADED_LATER_BYTES + ALLOCATOR_BYTES + (1 << 20)
CONFIG = OffloadConfig(learning_rate=1e-2, vram=VRAM, ram="8GiB")
WARM_UP, NUM_STEPS = 2, 4
STEPS = WARM_UP + NUM_STEPS
LONG = 2 * STEPS + 6
"""Long enough for two judgements."""


def slower(machine: Hardware, factor: float) -> Hardware:
    """`machine` with all rates divided by `factor`, so that tiny models take as long as large ones."""
    rates: dict[str, Any] = {
        each.name: getattr(machine, each.name) / factor for each in fields(machine) if each.name.endswith("_per_second")
    }
    return replace(machine, **rates)


TRUE = slower(H200, 1e5)
SLOW_CPU = replace(TRUE, cpu_adamw_bytes_per_second=TRUE.cpu_adamw_bytes_per_second / 10)
FAST_BUS = slower(test_faster.times(10, *test_faster.BUS, "cpu_and_bus_bytes_per_second"), 1e5)
"""Wrong rates of the bus: plans with them have the GPU step most layers, through VRAM."""


class Measured(Telemetry):
    """The seconds of each step are computed from the bytes moved, at the rates of `TRUE`."""

    engine: OffloadEngine

    def add(self, record: StepRecord) -> None:
        plan, placements = self.engine.plan, self.engine.placed.layers.assigned
        assert plan.basis.work is not None
        model = StepModel(plan.layers, plan.basis.work, TRUE, plan.accumulation)
        rates = model.rates(placements)
        names = {"h2d": "H2D", "d2h": "D2H", "cpu_step": "CPU step"}
        took = {phase: record.moved[phase] / rates[name] for phase, name in names.items() if name in rates}
        super().add(
            replace(record, seconds=record.seconds | took | {"step": model.seconds(placements).step}),
        )


def trained(
    num_steps: int, telemetry: Telemetry | None = None, config: OffloadConfig = CONFIG
) -> tuple[OffloadEngine, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, example = TinyLM(width=32, hidden=255, depth=12, dropout=0.1), tokens(1)[0]
    with OffloadEngine(model, config, device="cpu", example=example, telemetry=telemetry) as engine:
        if isinstance(telemetry, Measured):
            telemetry.engine = engine
        engine.train()
        torch.manual_seed(1)
        for batch in tokens(num_steps):
            engine.backward(engine(batch))
            engine.step()
        return engine, engine.master_weights()


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """The weights of a run without a plan: the CPU steps all layers."""
    return trained(LONG, config=OffloadConfig(learning_rate=1e-2))[1]


@pytest.fixture(autouse=True)
def layers_stay_with_their_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers keep their processor, because real seconds of tiny steps are noise; no balance must settle first."""
    monkeypatch.setattr(StepBalancer, "correct", lambda *_: None)
    monkeypatch.setattr(rate_watch, "WARM_UP", WARM_UP)
    monkeypatch.setattr(rate_watch, "NUM_STEPS", NUM_STEPS)


def planned_with(machine: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "STEP_CHUNK", 4096)  # otherwise a tiny layer's buffers would be larger than its states
    monkeypatch.setattr(outline, "measured_by", lambda *_, **__: machine)


@pytest.mark.parametrize(("machine", "why"), [(SLOW_CPU, "optimizer step runs"), (FAST_BUS, "copies to the GPU run")])
def test_a_run_that_was_planned_with_wrong_rates_moves_once_and_no_number_changes(
    machine: Hardware, why: str, expected: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_with(machine, monkeypatch)
    calls = list[str]()
    for name in ("faster", "compared_rates"):
        real = getattr(rate_watch, name)
        monkeypatch.setattr(rate_watch, name, lambda *args, name=name, real=real: (calls.append(name), real(*args))[1])
    said = (
        rf"{why} at .* GB/s, but .* were planned after step .*: "
        r"the plan has moved in .* \(.*the GPU steps 1[01] -> [34]\)"
    )
    with pytest.warns(RuntimeWarning, match=said) as warned:
        engine, weights = trained(LONG, telemetry := Measured())
    assert len(warned) == 1
    (move,) = telemetry.moves
    assert STEPS < move.step <= STEPS + 4
    assert why in move.why
    assert calls.count("faster") == 1
    assert calls.count("compared_rates") > 1, "the watch must compare rates again after the move"
    before = make_plan(engine.plan.layers, CONFIG, work=engine.plan.basis.work, hardware=machine)
    assert engine.plan.seconds is not None
    assert engine.plan.seconds.step == pytest.approx(telemetry.records[-1].seconds["step"], rel=0.15)
    assert engine.plan.seconds.step < 0.6 * telemetry.records[0].seconds["step"]
    assert not engine.plan.lacking()
    assert Monitor(before, telemetry, display="none").figures().memory[0].planned == engine.plan.total_bytes("vram")
    assert_equal(expected, weights, "moved")


def test_a_run_whose_rates_agree_searches_for_nothing_and_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_with(TRUE, monkeypatch)
    judged = []
    real = rate_watch.compared_rates
    monkeypatch.setattr(rate_watch, "compared_rates", lambda *args: judged.append(real(*args)) or judged[-1])
    monkeypatch.setattr(rate_watch, "faster", None)
    with synchronisations() as found:
        engine, _ = trained(STEPS + 3, Measured())
    assert [each.keys() for each in judged] == [{"H2D", "D2H", "CPU step"}]
    assert engine.telemetry.moves == []
    assert not [each for each in of_the_callers(found) if "in judge" in each.stack]


def test_a_move_that_cannot_be_leaves_the_run_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planned_with(SLOW_CPU, monkeypatch)

    def fails(*_: Any) -> None:
        raise OffloadkitError("no RAM")

    monkeypatch.setattr(Replanner, "move", fails)
    engine, _ = trained(STEPS + 3, Measured())
    assert engine.num_updates == STEPS + 3
    assert "but the move to it failed: no RAM" in caplog.text


def judge(watch: RateWatch, plan: Plan, records: Sequence[StepRecord], room: Any = None) -> tuple[Plan, str] | None:
    for record in [*records[:1] * WARM_UP, *records]:
        watch.add(record)
    assert watch.is_due
    return watch.judge(plan.placements, lambda: room or test_faster.BUDGETS)


PLANNED_WITH = test_faster.times(0.1, "cpu_adamw_bytes_per_second")


def steps(plan: Plan, seconds: float, num_tokens: int | None = None) -> list[StepRecord]:
    """Step records with these seconds, as on the true machine."""
    records = test_faster.steps_on(H200, plan, NUM_STEPS)
    tokens = num_tokens or plan.num_tokens
    return [replace(each, num_tokens=tokens, seconds=each.seconds | {"step": seconds}) for each in records]


@pytest.mark.parametrize(
    ("seconds", "num_tokens", "back"), [(1.04, None, False), (1.2, None, True), (1.2, 9000, False)]
)
def test_a_move_after_which_steps_take_longer_is_undone_and_the_plan_moves_no_more(
    seconds: float, num_tokens: int | None, back: bool
) -> None:
    """Per token if the number of tokens is known."""
    before = test_faster.plan_on(PLANNED_WITH)
    watch = RateWatch(before)
    found = judge(watch, before, steps(before, 1.0))
    assert found is not None
    watch.begin(found[0])
    again = judge(watch, found[0], steps(found[0], seconds, num_tokens))
    assert (again is not None) == back
    if again is not None:
        assert again[0] is before
        assert again[1] == "steps took 1.2 times as long as before the last move"
        watch.begin(before)
        for record in 3 * steps(before, 1.0):
            watch.add(record)
        assert not watch.is_due


def test_a_plan_that_has_no_room_any_more_is_not_gone_back_to() -> None:
    before = test_faster.plan_on(PLANNED_WITH)
    watch = RateWatch(before)
    found = judge(watch, before, steps(before, 1.0))
    assert found is not None
    watch.begin(found[0])
    assert judge(watch, found[0], steps(found[0], 2.0), room={"vram": 1 << 30, "ram": 1 << 40}) is None


def test_where_a_move_failed_there_is_nothing_to_go_back_to() -> None:
    before = test_faster.plan_on(PLANNED_WITH)
    watch = RateWatch(before)
    assert judge(watch, before, steps(before, 1.0)) is not None
    assert judge(watch, before, steps(before, 2.0)) is None


def test_layers_are_judged_with_the_processor_that_steps_them_now(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_with(SLOW_CPU, monkeypatch)
    model = TinyLM(width=32, hidden=255, depth=12)
    with OffloadEngine(model, CONFIG, device="cpu", example=tokens(1)[0]) as engine:
        assert engine.placed.layers.assigned == engine.plan.placements
        at = next(at for at, state in enumerate(engine.placed.states) if state.switchable and state.on_gpu)
        engine.placed.states[at].on_gpu = False
        assert engine.placed.layers.assigned[at] == replace(engine.plan.placements[at], step="cpu")
        assert engine.placed.layers.placements == engine.plan.placements


@pytest.mark.parametrize("tier", ["vram", "ram"])
def test_the_room_for_another_plan_is_what_is_free_now_within_the_budgets(
    tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have taken some since planning."""
    plan, device, mib = test_faster.plan_on(H200), torch.device("cuda"), 1 << 20
    free = {"vram": 1 << 40, "ram": 1 << 40}
    monkeypatch.setattr(hardware, "vram_bytes", lambda _: (free["vram"], 1 << 40))
    monkeypatch.setattr(hardware, "ram_available_bytes", lambda: free["ram"])
    monkeypatch.setattr(shortage, "ram_floor", lambda: 0)
    monkeypatch.setattr(shortage.process_memory, "peak_reserved_bytes", lambda _: 5 * mib)
    assert shortage.room(plan, device) == test_faster.BUDGETS
    free[tier] = 7 * mib
    spare = 2 * mib if tier == "vram" else 7 * mib  # the peaks need the rest
    assert plan.needs()[tier] + spare < test_faster.BUDGETS[tier]
    assert shortage.room(plan, device) == test_faster.BUDGETS | {tier: plan.needs()[tier] + spare}


def test_a_move_for_another_reason_forgets_what_was_measured() -> None:
    """The old plan no longer fits, so the run cannot go back."""
    before = test_faster.plan_on(PLANNED_WITH)
    watch = RateWatch(before)
    found = judge(watch, before, steps(before, 1.0))
    assert found is not None
    smaller = OffloadConfig(vram="5GiB", ram="60GiB")
    leaner = make_plan(test_faster.LAYERS, smaller, work=test_faster.WORK, hardware=H200)
    assert leaner.placements != found[0].placements
    for record in steps(before, 1.0)[:3]:
        watch.add(record)
    watch.begin(leaner)
    assert judge(watch, leaner, steps(leaner, 9.0)) is None


def test_searches_are_few() -> None:
    plan, slow = test_faster.plan_on(H200), replace(steps(test_faster.plan_on(H200), 1.0)[0])
    watch = RateWatch(plan)
    for at in range(MAX_SEARCHES):  # the bus gets slower and slower, and no plan is faster
        factor = 4.0 ** -(at + 1)
        seconds = {name: took / factor for name, took in slow.seconds.items() if name in ("h2d", "d2h")}
        record = replace(slow, seconds=slow.seconds | seconds)
        assert judge(watch, plan, [record] * NUM_STEPS, room={"vram": 1 << 30, "ram": 1 << 30}) is None
    for record in 3 * steps(plan, 1.0):
        watch.add(record)
    assert not watch.is_due


def test_nothing_is_collected_where_nothing_was_searched_and_skipped_steps_count_for_nothing() -> None:
    plan = test_faster.plan_on(H200)
    chosen = replace(plan, basis=replace(plan.basis, config=replace(plan.basis.config, placement=Placement())))
    unknown = replace(plan, basis=replace(plan.basis, work=None))
    here = replace(plan, basis=replace(plan.basis, hardware=replace(H200, device="cpu")))
    skipped = [replace(record, skipped=True) for record in steps(plan, 1.0)]
    for given, records in [(chosen, 3), (unknown, 3), (here, 3)]:
        watch = RateWatch(given)
        for record in records * steps(plan, 1.0):
            watch.add(record)
        assert not watch.is_due
    watch = RateWatch(plan)
    for record in 3 * skipped:
        watch.add(record)
    assert not watch.is_due


def test_what_shorter_micro_batches_took_is_not_said_of_those_planned() -> None:
    said = {name: rate_watch.in_words({name: Rate(1 / 0.3, 1 / 0.2)}) for name in (COMPUTE, PYTHON)}
    assert said[COMPUTE] == "forward and backward take 300 ms, but 200 ms were planned"
    assert said[PYTHON] == "forward and backward of shorter micro-batches take 300 ms, but 200 ms were planned"
