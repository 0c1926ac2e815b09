"""A plan moves in mid-run: after `OffloadEngine.move` the numbers equal a run that never moved."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, permutations
from typing import Any

import pytest
import torch
from torch import nn

from offloadkit.device import host_memory
from offloadkit.device.host_memory import HostSlab
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ConfigError, EngineStateError, ModelError, OffloadkitError, OutOfVramError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.offload.external_writes import ExternalWrites
from offloadkit.offload.layers import flat_layers, plan_of
from offloadkit.offload.states import LayerState
from offloadkit.offload.update import StepThread
from offloadkit.offload.weights import ForwardHooks
from offloadkit.planner import Plan, placed, possible
from tests.models import TinyLM, assert_equal, numbers, tokens
from tests.offload.test_placements import DEVICES, batches, tiny

IN_VRAM = Placement(gradients="vram", states="vram", step="gpu")
VERY_DIFFERENT = [
    IN_VRAM,
    Placement(activations="checkpoint"),
    Placement(weights="ram", states="disk", activations="offload"),
    Placement(weights="ram", gradients="vram", step="gpu"),
    Placement(step="gpu", activations="checkpoint"),
]
"""States, weights and gradients in every place, every treatment of activations, and both processors."""


pytestmark = pytest.mark.usefixtures("one_thread", "what_left_a_buffer_is_nan")


def planned(model: nn.Module, config: OffloadConfig, *placements: Placement) -> Plan:
    """A plan with these placements in turn."""
    base = plan_of(model, flat_layers(model, config), config)
    in_turn = (placements[at % len(placements)] for at in range(len(base.layers)))
    return placed(base, [possible(each, layer) for each, layer in zip(in_turn, base.layers, strict=True)])


def lm(**options: Any) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(width=17, hidden=67, depth=3, dropout=0.1, **options)


def train(engine: OffloadEngine, given: Sequence[Any]) -> None:
    for batch in given:
        engine.backward(engine(**batch).loss if isinstance(batch, dict) else engine(batch))
        engine.step()


def route(*plans: Placement) -> list[Placement]:
    """A route over all placements that takes each transition once."""
    left, way = set(permutations(range(len(plans)), 2)), [0]
    while left:
        way.append(min((to for at, to in left if at == way[-1]), key=lambda to: way.count(to)))
        left.remove((way[-2], way[-1]))
        if left and not any(at == way[-1] for at, _ in left):
            way.append(min(left)[0])
    return [plans[at] for at in way]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_moves_between_any_two_placements_change_no_number(accumulation: int, device: str) -> None:
    """Dropout, a tied weight, bf16, and a move before each window."""
    config = OffloadConfig(learning_rate=1e-2, working_dtype="bf16", gradient_accumulation=accumulation)
    way = route(*VERY_DIFFERENT)
    found = []
    for moves in (False, True):
        with OffloadEngine(lm(), config, device=device) as engine:
            engine.train()
            torch.manual_seed(2)
            given = tokens(accumulation * len(way), device)
            for at, placement in enumerate(way):
                if moves:
                    engine.move(planned(engine.module, config, placement))
                    assert engine.plan.placements[1] == possible(placement, engine.plan.layers[1])
                train(engine, given[accumulation * at : accumulation * (at + 1)])
            found.append(numbers(engine))
    assert_equal(*found, "moved")


@pytest.mark.parametrize(("kind", "accumulation", "dtype"), [("t5", 2, "bf16"), ("llama", 1, "fp16")])
def test_mixed_plans_of_a_transformer_change_no_number(kind: str, accumulation: int, dtype: Any) -> None:
    config = OffloadConfig(learning_rate=1e-2, working_dtype=dtype, gradient_accumulation=accumulation)
    found = []
    for moves in (False, True):
        with OffloadEngine(tiny(kind), config, device="cpu") as engine:
            engine.train()
            torch.manual_seed(2)
            given = batches(kind, 3 * accumulation, "cpu")
            for at in range(3):
                if moves:
                    turned = (*VERY_DIFFERENT[at:], *VERY_DIFFERENT[:at])
                    engine.move(planned(engine.module, config, *turned))
                train(engine, given[accumulation * at : accumulation * (at + 1)])
            found.append(numbers(engine))
    assert_equal(*found, "moved")


def test_a_loss_that_is_kept_through_an_interrupted_backward_holds_nothing_that_moves() -> None:
    """The recomputation left views of a block's weights in the loss's graph."""
    config = OffloadConfig()

    def interrupts(_: torch.Tensor) -> None:
        raise KeyboardInterrupt

    model = lm()
    model.blocks[1].up.register_forward_hook(lambda module, args, output: output.register_hook(interrupts) and None)
    plan = planned(model, config, Placement(activations="checkpoint"))
    with OffloadEngine(model, config, device="cpu", plan=plan) as engine:
        loss = engine(tokens(1)[0])
        with pytest.raises(KeyboardInterrupt):
            engine.backward(loss)
        engine.move(planned(model, config, Placement("ram")))
        assert loss.grad_fn is None


def test_a_move_is_recorded_and_equal_layers_stay_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OffloadConfig()
    model, forgotten = lm(), list[torch.device]()
    for module in ("engine", "replanner"):  # the peak explains a full GPU
        monkeypatch.setattr(f"offloadkit.engine.{module}.forget_peak", forgotten.append)
    with OffloadEngine(model, config, device="cpu") as engine:
        train(engine, tokens(1))
        blocks = [at for at, layer in enumerate(engine.plan.layers) if layer.in_block]
        where = list(engine.plan.placements)
        where[blocks[0]] = IN_VRAM
        before, states = engine.plan, list(engine.placed.states)
        assert len(forgotten) == 1
        engine.move(placed(engine.plan, where), why="a test")
        assert len(forgotten) == 2
        assert [old is new for old, new in zip(states, engine.placed.states, strict=True)] == [
            at != blocks[0] for at in range(len(states))
        ]
        (move,) = engine.telemetry.moves
        assert (move.step, move.why) == (1, "a test")
        assert move.before == {tier: before.total_bytes(tier) for tier in ("vram", "ram", "disk")}
        assert move.after["vram"] > move.before["vram"]
        assert move.after["ram"] < move.before["ram"]
        train(engine, tokens(1))
        engine.synchronize()
        assert engine.telemetry.records[-1].bytes["vram"] == engine.plan.tiers["vram"]


def test_there_are_never_two_copies_of_more_than_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OffloadConfig()
    made: list[weakref.ref[LayerState]] = []
    with OffloadEngine(lm(), config, device="cpu") as engine:
        train(engine, tokens(2))
        engine.synchronize()
        most, real = [], LayerState.moved

        def moved(state: LayerState, *args: Any, **options: Any) -> LayerState:
            made.append(weakref.ref(state))
            most.append(sum(each() is not None for each in made))
            return real(state, *args, **options)

        monkeypatch.setattr(LayerState, "moved", moved)
        gc.disable()  # nothing may depend on a garbage collection
        try:
            for placement in (Placement(weights="ram"), IN_VRAM):
                engine.move(planned(engine.module, config, placement))
                train(engine, tokens(1))
        finally:
            gc.enable()
        assert len(most) > len(engine.plan.layers)
        assert set(most) == {1}


def test_a_move_takes_no_more_than_before_or_after_but_for_two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even layers go to VRAM while odd layers leave it."""
    config = OffloadConfig()
    before, after = (IN_VRAM, Placement()), (Placement(), IN_VRAM)
    torch.manual_seed(0)
    made = TinyLM(width=16, depth=12)
    order, real = list[int](), ExternalWrites.moved

    def moved(self: ExternalWrites, new: LayerState) -> None:
        order.append(new.layer.index)
        real(self, new)

    with OffloadEngine(made, config, device="cpu", plan=planned(made, config, *before)) as engine:
        plans = engine.plan, planned(made, config, *after)
        monkeypatch.setattr(ExternalWrites, "moved", moved)
        engine.move(plans[1])
    for bytes_of in ("vram_bytes", "ram_bytes"):
        old, new = (
            [
                sum(getattr(layer, bytes_of)(where, 1).values())
                for layer, where in zip(plan.layers, plan.placements, strict=True)
            ]
            for plan in plans
        )
        taken = list(accumulate((new[at] - old[at] for at in order), initial=sum(old)))
        assert len(order) > 8
        assert max(taken) <= max(sum(old), sum(new)) + 2 * max(*old, *new)


def test_a_window_must_be_over_and_the_plan_of_this_model() -> None:
    config = OffloadConfig(gradient_accumulation=2)
    with OffloadEngine(lm(), config, device="cpu") as engine:
        leaner = planned(engine.module, config, Placement(weights="ram"))
        train(engine, tokens(1))
        with pytest.raises(EngineStateError, match=r"inside an accumulation window: .*after drop_gradients\(\)"):
            engine.move(leaner)
        engine.drop_gradients()
        engine.module.norm.register_forward_hook(lambda *args: engine.move(leaner))
        with pytest.raises(EngineStateError, match="inside an accumulation window"):
            engine(tokens(1)[0])
        with pytest.raises(ModelError, match="made for another model"):
            engine.move(planned(TinyLM(), config, IN_VRAM))
        with pytest.raises(ConfigError, match="gradient_accumulation: 1 in the plan, 2"):
            engine.move(planned(engine.module, OffloadConfig(), IN_VRAM))
        assert engine.telemetry.moves == []


@pytest.mark.parametrize("weights", ["vram", "ram"])
def test_a_loss_of_before_a_move_is_refused(weights: Any) -> None:
    config = OffloadConfig()
    with OffloadEngine(lm(), config, device="cpu") as engine:
        engine.move(planned(engine.module, config, Placement(weights=weights)))
        loss = engine(tokens(1)[0])
        engine.move(planned(engine.module, config, Placement(weights="ram", states="disk")))
        with pytest.raises((RuntimeError, EngineStateError), match=r"inplace operation|moved after this loss"):
            engine.backward(loss)
        train(engine, tokens(1))


def test_what_a_module_keeps_of_a_parameters_memory_is_named() -> None:
    """No hook sees a module's reads while it runs, so a kept view would silently become stale."""
    config, kept = OffloadConfig(), []
    with OffloadEngine(lm(), config, device="cpu") as engine:
        block = engine.module.blocks[1]
        block.register_forward_pre_hook(lambda *_: None if kept else kept.append(block.up.weight.data))
        train(engine, tokens(1))
        before = engine.plan
        with pytest.raises(EngineStateError, match=r"'blocks.1.up.weight' cannot move: another tensor shares"):
            engine.move(planned(engine.module, config, Placement(weights="ram")))
        assert engine.plan is before
        engine.move(planned(engine.module, config, IN_VRAM))  # the weights stay where they are
        train(engine, tokens(1))
        engine.synchronize()
        assert torch.equal(kept[0], block.up.weight)
        kept[0] = kept[0].clone()
        engine.move(planned(engine.module, config, Placement(weights="ram")))


def test_what_was_taken_before_a_move_is_refused_after_it() -> None:
    config = OffloadConfig()
    with OffloadEngine(lm(), config, device="cpu") as engine:
        kept = engine.module.blocks[1].up.weight.data
        engine.move(planned(engine.module, config, IN_VRAM))  # the weights stay where they are
        train(engine, tokens(1))
        assert torch.equal(kept, engine.module.blocks[1].up.weight)
        engine.move(planned(engine.module, config, Placement(weights="ram")))
        with pytest.raises(EngineStateError, match=r"taken from parameter 'blocks.1.up.weight' before its layer moved"):
            kept.add_(1)
        train(engine, tokens(1))


@pytest.mark.parametrize("to", [Placement(weights="ram"), IN_VRAM])
def test_a_frozen_layer_and_an_empty_first_parameter_move_too(to: Placement) -> None:
    config = OffloadConfig(learning_rate=1e-2)
    found = []
    for moves in (False, True):
        model = lm()
        for block in model.blocks:
            block.empty = nn.Parameter(torch.empty(0))
        there, back = planned(model, config, to), planned(model, config, Placement())
        with OffloadEngine(model, config, device="cpu") as engine:
            train(engine, tokens(1))
            model.blocks[1].requires_grad_(False)
            for plan in (there, back, there) if moves else ():
                engine.move(plan)
            train(engine, tokens(1))
            model.requires_grad_(True)
            train(engine, tokens(2))
            found.append(numbers(engine))
    assert_equal(*found, to)


def test_a_dropped_window_leaves_no_job_behind_for_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued additions in RAM must not reach the memory that the next layer uses."""
    config = OffloadConfig(gradient_accumulation=2)
    settle, gate, done = StepThread.settle, threading.Event(), []
    monkeypatch.setattr(StepThread, "settle", lambda thread: (gate.set(), settle(thread)))
    with OffloadEngine(lm(), config, device="cpu") as engine:
        train(engine, tokens(1))
        engine.drop_gradients()
        engine.step_thread.submit(lambda: done.append(gate.wait(10)))
        engine.move(planned(engine.module, config, Placement(weights="ram")))
        assert done == [True]


def full_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, error: BaseException) -> None:
    """Makes the call with this number fail."""
    real, calls = getattr(owner, name), [0]

    def fails(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            raise error
        return real(*args, **options)

    monkeypatch.setattr(owner, name, fails)


@pytest.mark.parametrize("error", [OffloadkitError("no RAM"), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_move_that_fails_in_the_middle_leaves_a_mixed_plan(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    config = OffloadConfig(learning_rate=1e-2)
    found = []
    for moves in (False, True):
        with OffloadEngine(lm(), config, device="cpu") as engine:
            train(engine, tokens(1))
            if moves:
                with monkeypatch.context() as patch:
                    full_at(patch, LayerState, "moved", 2, error)
                    expected = OffloadkitError if isinstance(error, OffloadkitError) else OutOfVramError
                    with pytest.raises(expected):
                        engine.move(planned(engine.module, config, Placement(weights="ram")))
                assert len(set(engine.plan.placements)) == 2
                assert engine.plan.placements == engine.placed.layers.placements
                assert engine.telemetry.moves == []
            train(engine, tokens(2))
            found.append(numbers(engine))
    assert_equal(*found, "mixed")


def test_if_nothing_fits_any_more_the_engine_closes_and_the_model_has_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = OffloadConfig(gradient_accumulation=2)
    model = lm()
    engine = OffloadEngine(model, config, device="cpu")
    train(engine, tokens(2))
    engine.synchronize()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    leaner = planned(model, config, Placement(weights="ram"))
    ordinary: list[HostSlab] = []

    allocate = host_memory.allocate

    def full(sizes: Any, device: Any, what: str) -> Any:
        if what.startswith("the buffers"):  # every layer has moved by then
            raise OffloadkitError("no RAM")
        return allocate(sizes, device, what)

    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "allocate", full)
        patch.setattr(HostSlab, "make_ordinary", lambda slab: ordinary.append(slab))
        with pytest.raises(EngineStateError, match="the engine is closed, and the model has its weights"):
            engine.move(leaner)
    assert len(ordinary) == len(model.blocks)  # no longer pinned, and inherited by forked processes
    assert_equal(weights, dict(model.state_dict()), "closed")
    with pytest.raises(EngineStateError, match="closed"):
        engine.step()
    with OffloadEngine(model, replace(config, gradient_accumulation=1), device="cpu") as again:
        train(again, tokens(1))


def test_an_interrupt_in_the_middle_of_a_layer_closes_the_engine_and_no_weight_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = lm()
    engine = OffloadEngine(model, OffloadConfig(), device="cpu")
    train(engine, tokens(2))
    engine.synchronize()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    with monkeypatch.context() as patch:
        full_at(patch, ForwardHooks, "exchange", 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            engine.move(planned(model, OffloadConfig(), Placement(weights="ram")))
    assert_equal(weights, dict(model.state_dict()), "closed")
    with OffloadEngine(model, OffloadConfig(), device="cpu") as again:
        train(again, tokens(1))
