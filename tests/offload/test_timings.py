"""The breakdown of a step's time: waits and copies, and nothing else is counted."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch

from offloadkit.device.streams import BusyTime, Event, Waits, seconds_of_any
from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.telemetry import StepRecord
from offloadkit.offload import update
from tests.models import TinyLM, tokens, train

PAUSE = 0.01


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    real = update.LayerState.step

    def slow(self: Any, *args: Any) -> None:
        time.sleep(PAUSE)
        real(self, *args)

    monkeypatch.setattr(update.LayerState, "step", slow)


def records(num_steps: int = 4, device: str = "cpu", **options: Any) -> list[StepRecord]:
    config = OffloadConfig(learning_rate=1e-3, **options)
    with OffloadEngine(TinyLM(), config, device=device) as engine:
        train(engine, tokens(num_steps * config.gradient_accumulation, device))
        return list(engine.telemetry.records)


@pytest.mark.usefixtures("slow_steps")
def test_a_slow_cpu_step_is_what_forward_waited_for(device: str) -> None:
    last = records(device=device)[-1]
    seconds = last.seconds
    assert seconds["forward_wait"] > 2 * PAUSE
    assert 0 <= seconds["forward"] - seconds["forward_wait"] < PAUSE + seconds["forward"] / 2
    assert seconds["forward_wait"] <= seconds["forward"] <= seconds["step"]


@pytest.mark.parametrize("weights", ["vram", "ram"])
def test_copies_in_both_directions_are_timed(device: str, weights: Any) -> None:
    for record in records(8, device, placement=Placement(weights=weights))[2:]:
        assert 0 < record.seconds["h2d"] < record.seconds["step"]
        assert 0 < record.seconds["d2h"] < record.seconds["step"]


def test_weights_that_visit_vram_add_to_the_copies() -> None:
    def copied(**options: Any) -> int:
        with OffloadEngine(TinyLM(), OffloadConfig(learning_rate=1e-3, **options), device="cpu") as engine:
            engine.backward(engine(tokens(1)[0]))
            return sum(busy.num_bytes for name, busy in engine.placed.take_busy() if name == "h2d")

    assert copied() == 0
    assert copied(placement=Placement(weights="ram")) >= 4 * sum(each.numel() for each in TinyLM().blocks.parameters())


def test_what_was_moved_in_these_seconds_is_counted(device: str) -> None:
    """A step's copies belong to its backward and to the previous update, which ran during its forward."""
    with OffloadEngine(TinyLM(), OffloadConfig(learning_rate=1e-3), device=device) as engine:
        train(engine, tokens(3, device))
        first, *others = engine.telemetry.records
        layers = [layer for layer in engine.plan.layers if layer.num_parameters > 7]  # the rest has no gradient
    sent, brought = sum(each.bucket_bytes() for each in layers), sum(each.weight_bytes() for each in layers)
    stepped = sum(each.step_bytes(1) for each in layers)
    assert first.moved == {"cpu_step": stepped, "h2d": 0, "d2h": sent}
    assert all(record.moved == {"cpu_step": stepped, "h2d": brought, "d2h": sent} for record in others)


class At(Event):
    """An event with a given time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, At)
        return self.seconds - earlier.seconds


def test_copies_of_two_streams_at_once_count_once() -> None:
    """Both streams use one copy engine: one of them waits between its own events."""

    def busy(*spans: tuple[float, float]) -> BusyTime:
        found = BusyTime()
        for span in spans:
            found.add(*map(At, span), num_bytes=10)
        return found

    times = [busy((5.0, 6.0), (8.0, 9.0)), BusyTime(), busy((4.5, 5.5), (6.5, 7.0))]
    assert seconds_of_any(times) == pytest.approx(1.5 + 0.5 + 1)
    assert times[0].seconds() == 2
    assert times[0].num_bytes == 20
    assert seconds_of_any([]) == 0


def test_finished_work_is_not_asked_again_whether_it_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that takes as long as to ask for the seconds."""
    one, other = BusyTime(), BusyTime()
    one.add(At(1.0), At(3.0))
    other.add(At(2.0), At(4.0))
    assert one.done()
    monkeypatch.delattr(Event, "done")
    assert one.seconds() == seconds_of_any([other]) == 2
    assert seconds_of_any([one, other]) == 3


def test_evaluation_between_steps_is_in_no_step() -> None:
    config = OffloadConfig(learning_rate=1e-3, placement=Placement(weights="ram"))
    with OffloadEngine(TinyLM(), config, device="cpu") as engine:
        batches = tokens(2)
        train(engine, batches[:1])
        engine.placed.take_busy()
        with torch.no_grad():
            engine(batches[1])
        assert [busy.seconds() for _, busy in engine.placed.take_busy()] == [0.0] * 4


def test_gradients_that_accumulate_in_ram_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from offloadkit.kernels import cpu

    real = cpu.accumulate
    monkeypatch.setattr(cpu, "accumulate", lambda *args, **kwargs: (time.sleep(PAUSE), real(*args, **kwargs)))
    last = records(2, gradient_accumulation=2)[-1].seconds
    assert PAUSE < last["backward_wait"] < last["backward"]


def test_pairs_that_are_past_are_folded_and_memory_stays_small() -> None:
    busy, kept = BusyTime(), weakref.WeakSet[Event]()
    for at in range(1000):
        began = At(at)
        kept.add(began)
        busy.add(began, At(at + 0.5))
    del began
    assert len(kept) <= 256
    assert busy.seconds() == 500
    assert busy.done()


def test_outside_of_forward_and_backward_no_wait_is_timed() -> None:
    waits = Waits(torch.device("cpu"))
    with waits.blocking():
        pass
    assert waits.take() == {}
    with waits.during("forward"), waits.blocking():
        time.sleep(PAUSE)
    assert waits.take()["forward_wait"].seconds() >= PAUSE
    assert waits.take() == {}


def test_an_event_that_is_past_is_waited_for_without_marks() -> None:
    waits = Waits(torch.device("cpu"))
    with waits.during("backward"):
        waits.delay(Event())
    assert waits.take() == {}


@pytest.mark.gpu
def test_the_vram_of_the_process_is_torchs_and_the_context() -> None:
    (last, *_) = reversed(records(device="cuda"))
    vram = last.bytes["vram"]
    assert 0 < vram["process reserved"] <= vram["process"]
    assert 0 <= vram["process"] - vram["process reserved"] <= 1 << 30


class _OnceWaited(Event):
    """Simulates a GPU that is behind: the event is reached once some thread waits for it."""

    is_reached = False

    def done(self) -> bool:
        return self.is_reached

    def synchronize(self) -> None:
        self.is_reached = True


def test_a_synchronised_engine_has_a_record_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offloadkit.offload.records.record_compute", lambda device, timing: _OnceWaited())
    with OffloadEngine(TinyLM(), OffloadConfig(placement=Placement()), device="cpu") as engine:
        for number, batch in enumerate(tokens(3), start=1):
            engine.backward(engine(batch))
            engine.step()
            engine.synchronize()
            assert len(engine.telemetry.records) == number
