"""The error of a full GPU: bytes planned and used, and remedies."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloadkit.device import process_memory
from offloadkit.engine import replanner
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import OutOfRamError, OutOfVramError, RepeatWindowError
from offloadkit.facts import hardware
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.offload import model as placed_model
from offloadkit.offload import shortage
from offloadkit.offload.model import PlacedModel
from offloadkit.planner import MicroBatch, make_plan
from tests.models import TinyLM, tokens, train
from tests.planner.machines import H200, shape, stage


class Hungry(TinyLM):
    """Raises an OOM error while `hungry`."""

    hungry = False
    in_backward = False

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss = super().forward(batch)
        if self.hungry and not self.in_backward:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB. GPU 0 has ...")
        if self.hungry:
            loss.register_hook(_fail)
        return loss


def _fail(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_full_gpu_is_explained_and_training_can_go_on(in_backward: bool) -> None:
    torch.manual_seed(0)
    expected, model = TinyLM(), Hungry()
    model.load_state_dict(expected.state_dict())
    with OffloadEngine(expected, OffloadConfig(), device="cpu") as engine:
        train(engine, tokens(4))
    with OffloadEngine(model, OffloadConfig(placement=Placement()), device="cpu") as engine:  # a plan that cannot move
        train(engine, tokens(2))
        model.hungry, model.in_backward = True, in_backward
        with pytest.raises(OutOfVramError, match=r"Planned were .*working weights .*Use a smaller micro-batch"):
            engine.backward(engine(tokens(1)[0]))
        model.hungry = False
        train(engine, tokens(4)[2:])
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in expected.state_dict().items())


@pytest.mark.parametrize("in_backward", [False, True])
def test_the_window_in_which_the_gpu_is_full_is_dropped_as_a_whole(in_backward: bool) -> None:
    """Its first micro-batch does not count: the next two form a new window."""
    config = OffloadConfig(gradient_accumulation=2)
    torch.manual_seed(0)
    expected, model = TinyLM(), Hungry()
    model.load_state_dict(expected.state_dict())
    with OffloadEngine(expected, config, device="cpu") as engine:
        train(engine, tokens(5)[3:])
    with OffloadEngine(model, config, device="cpu") as engine:
        train(engine, tokens(5)[:1])
        model.hungry, model.in_backward = True, in_backward
        with pytest.raises(OutOfVramError):
            engine.backward(engine(tokens(1)[0]))
        model.hungry = False
        train(engine, tokens(5)[3:])
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in expected.state_dict().items())


@pytest.mark.parametrize(
    ("planned", "used", "asked", "times", "budget"),
    [
        *[(800, 850, 0, 0, 700), (800, 1000, 0, 0, 400), (800, 600, 0, 0, 500)],
        *[(800, 800, 8, 0, 775), (800, 800, 8, 1, 750), (800, 800, 8, 2, 700), (800, 800, 8, 9, 700)],
        *[(800, 850, 50, 0, 600), (800, 600, 50, 0, 575)],
    ],
)
def test_a_leaner_plan_gets_less_than_was_planned_and_than_there_was(
    planned: int, used: int, asked: int, times: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = SimpleNamespace(total_bytes=lambda tier: planned)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: used - 100)
    monkeypatch.setattr(hardware, "vram_context_bytes", lambda device: 100)
    assert shortage.leaner_budget(plan, torch.device("cuda"), asked, times) == budget  # type: ignore[arg-type]
    assert shortage.leaner_budget(plan, torch.device("cpu"), 0, 0) == 700  # type: ignore[arg-type]


def test_a_full_gpu_costs_a_plan_little_more_than_was_short() -> None:
    layers = [shape(f"block.{index}", 2**26) for index in range(16)]
    work = MicroBatch(tuple(stage(layer.name, kept=2**24) for layer in layers), 640)
    plan = make_plan(layers, OffloadConfig(vram="8 GiB"), work=work, hardware=H200)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 100.00 MiB. GPU 0 has ...")
    for leaner, at_rest in (
        (shortage.with_less_vram(plan, torch.device("cpu"), error, 0), False),
        (shortage.with_less_vram_at_rest(plan, error, 0), True),
    ):
        assert leaner is not None
        before, after = (shortage._at_rest(each) if at_rest else each.total_bytes("vram") for each in (plan, leaner))
        assert 100 << 20 < before - after < 1 << 30


def test_each_full_gpu_costs_more_than_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    own, seen, model = shortage.with_less_vram, list[tuple[int, int]](), Hungry()

    def recorded(plan: Any, device: Any, error: Any, times: int, ranks: Any) -> Any:
        seen.append((process_memory.asked_bytes(error), times))
        return own(plan, device, error, times, ranks)

    monkeypatch.setattr(replanner, "with_less_vram", recorded)
    with OffloadEngine(model, OffloadConfig(), device="cpu") as engine:
        train(engine, tokens(1))
        model.hungry = True
        for _ in range(2):
            with pytest.warns(RuntimeWarning), pytest.raises(RepeatWindowError):
                engine(tokens(1)[0])
    assert seen == [(2048, 0), (2048, 1)]


@pytest.mark.gpu
def test_a_gpu_that_is_really_full() -> None:
    class Grows(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).repeat(100_000_000, 1)

    engine = OffloadEngine(Grows(1000, 1000), OffloadConfig(), device="cuda")
    with engine, pytest.raises(OutOfVramError, match="the GPU's memory is full: torch used up to"):
        engine(torch.zeros(10, 1000, device="cuda"))


def test_a_gpu_that_is_full_in_evaluation_is_explained_and_no_gradient_is_lost() -> None:
    model = Hungry()
    with OffloadEngine(model, OffloadConfig(), device="cpu") as engine:
        engine.backward(engine(tokens(1)[0]))
        model.hungry = True
        with torch.no_grad(), pytest.raises(OutOfVramError, match="memory is full"):
            engine(tokens(1)[0])
        model.hungry = False
        assert engine.step()


def test_a_gpu_that_is_full_while_the_engine_is_built_or_steps_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(placed_model, "move_rest", full)
        with pytest.raises(OutOfVramError, match="memory is full"):
            OffloadEngine(TinyLM(), OffloadConfig(), device="cpu")
    with OffloadEngine(TinyLM(), OffloadConfig(), device="cpu") as engine:
        with monkeypatch.context() as patched:
            patched.setattr(PlacedModel, "start_update", full)
            engine.backward(engine(tokens(1)[0]))
            with pytest.raises(OutOfVramError, match="memory is full"):
                engine.step()
        train(engine, tokens(1))


def test_the_error_keeps_no_activations() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []
    model = Hungry()
    model.blocks[0].register_forward_hook(lambda block, args, output: kept.append(weakref.ref(output)))
    model.hungry = True
    with OffloadEngine(model, OffloadConfig(), device="cpu") as engine:
        with pytest.raises(OutOfVramError) as raised:
            engine(tokens(1)[0])
        assert kept[0]() is None
        assert raised.value.__cause__ is not None


def test_tokens_of_a_forward_that_failed_are_in_no_record() -> None:
    model = Hungry()
    with OffloadEngine(model, OffloadConfig(), device="cpu") as engine:
        model.hungry = True
        with pytest.raises(OutOfVramError):
            engine(batch=tokens(1)[0])
        model.hungry = False
        engine.backward(engine(batch=tokens(1)[0]))
        engine.step()
        engine.synchronize()
        once = engine.telemetry.records[-1].num_tokens
        engine.backward(engine(batch=tokens(1)[0]))
        engine.step()
        engine.synchronize()
        assert engine.telemetry.records[-1].num_tokens == once


def test_a_step_refused_for_want_of_ram_may_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with OffloadEngine(TinyLM(), OffloadConfig(), device="cpu") as engine:
        engine.backward(engine(tokens(1)[0]))
        with monkeypatch.context() as patched:
            patched.setattr(engine.ram_watch, "warning", lambda: "no RAM left")
            with pytest.raises(OutOfRamError, match="no RAM left"):
                engine.step()
        assert engine.step()
