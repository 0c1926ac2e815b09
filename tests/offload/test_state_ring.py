"""States in RAM that the GPU steps: chunks through a ring, layers that change the processor, failures.

Chunks are much smaller than layers, and freed buffers hold NaN. `test_placements.py` compares all placements.
"""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from offloadkit.device.streams import CopyStream, Event, Waits
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import EngineStateError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.offload import state_ring, states, update
from offloadkit.offload.graphs import BlockGraphs
from offloadkit.offload.layers import flat_layers, plan_of
from offloadkit.offload.state_ring import StateRing
from offloadkit.offload.update import StepBalancer
from offloadkit.offload.weight_ring import WeightRing
from offloadkit.optim.reference import split_master
from offloadkit.planner import Plan, possible, tier_bytes
from offloadkit.planner import layout as shapes
from tests.models import TinyLM, assert_equal, numbers, tokens, train
from tests.simulated_streams import Simulation

LEAST_RAM = Placement(gradients="vram", step="gpu")
IN_VRAM = Placement(gradients="vram", states="vram", step="gpu")
STREAMED = [Placement(weights=w, gradients=g, step="gpu") for w, g in product(("vram", "ram"), repeat=2)]  # type: ignore[arg-type]
EVERYWHERE = [
    Placement(),
    *STREAMED,
    Placement(weights="ram"),
    IN_VRAM,
    Placement(activations="checkpoint"),
    Placement(weights="ram", activations="offload"),
    replace(STREAMED[3], activations="offload"),
    replace(IN_VRAM, activations="offload"),
]
"""The first placement is for parameters outside of blocks."""
DTYPES = ["bf16", "fp16", "fp32"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(shapes, "STEP_CHUNK", 4096)
    monkeypatch.setattr(StateRing, "fill_with_nan", True)
    monkeypatch.setattr(WeightRing, "fill_with_nan", True)


def lm(depth: int = 3) -> TinyLM:
    """A model of `depth` + 1 flat layers."""
    torch.manual_seed(0)
    return TinyLM(depth=depth, width=33, hidden=257, dropout=0.1)


def mixed(config: OffloadConfig, placements: Sequence[Placement], depth: int = 3) -> Plan:
    """A plan that assigns these placements to the layers of `lm(depth)` in turn."""
    model = lm(depth)
    base = plan_of(model, flat_layers(model, config), config)
    in_turn = tuple(possible(placements[at % len(placements)], layer) for at, layer in enumerate(base.layers))
    return replace(base, placements=in_turn, tiers=tier_bytes(base.layers, in_turn, config.gradient_accumulation))


def trained(
    device: str, steps: int = 8, plan: Plan | None = None, bad: Sequence[int] = (), depth: int = 3, **options: Any
) -> dict[str, torch.Tensor]:
    """All weights and states after `steps` updates; the updates in `bad` have a NaN loss."""
    config = OffloadConfig(learning_rate=1e-2, on_nonfinite="skip", **options)
    with OffloadEngine(lm(depth), config, device=device, plan=plan) as engine:
        torch.manual_seed(1)
        batches = iter(tokens(steps * config.gradient_accumulation, device))
        for step in range(steps):
            for _ in range(config.gradient_accumulation):
                loss = engine(next(batches))
                engine.backward(loss * float("nan") if step in bad else loss)
                engine.step()
        return numbers(engine)


def at_random(seed: int) -> Callable[[StepBalancer, Sequence[states.LayerState]], None]:
    """A `StepBalancer.correct` that moves layers at random."""
    draw = random.Random(seed)

    def correct(self: StepBalancer, layers: Sequence[states.LayerState]) -> None:
        for layer in layers:
            if layer.switchable:
                layer.on_gpu = draw.random() < 0.5

    return correct


@pytest.mark.parametrize(("dtype", "precision"), [("bf16", "exact"), ("fp16", "compact"), ("fp32", "tiny")])
def test_chunks_through_vram_change_no_number(device: str, dtype: Any, precision: Any) -> None:
    options = {"working_dtype": dtype, "precision": precision}
    expected = trained(device, **options)
    for placement in STREAMED:
        assert_equal(expected, trained(device, placement=placement, **options), placement)


@pytest.mark.filterwarnings("ignore:the gradient norm:RuntimeWarning")
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_may_change_the_processor_before_every_step(
    device: str, dtype: Any, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With skipped steps: prefetched states are stale if their layer went to the CPU meanwhile."""
    options: dict[str, Any] = {"working_dtype": dtype, "gradient_accumulation": accumulation, "loss_scale": 1024.0}
    bad = (2, 3, 6)
    expected = trained(device, bad=bad, **options)
    plan = mixed(OffloadConfig(**options), [STREAMED[1], Placement(), STREAMED[3], Placement(weights="ram")])
    monkeypatch.setattr(StepBalancer, "correct", at_random(0))
    assert_equal(expected, trained(device, plan=plan, bad=bad, **options), plan.placements)


def test_only_the_plans_own_choices_are_switched(device: str) -> None:
    config = OffloadConfig()
    placements = [*STREAMED, Placement(), Placement(gradients="vram"), Placement(states="disk")]
    with OffloadEngine(lm(), config, device=device, plan=mixed(config, placements)) as engine:
        for state in engine.placed.states:
            where = state.placement
            assert state.switchable == (where.gradients == "ram" and where.states == "ram")
            assert state.on_gpu == (where.step == "gpu")
    for placement in (STREAMED[1], Placement()):
        with OffloadEngine(lm(), OffloadConfig(placement=placement), device=device) as engine:
            assert not any(state.switchable for state in engine.placed.states)


def test_step_buffers_and_ram_are_those_that_were_planned(device: str) -> None:
    config = OffloadConfig(working_dtype="bf16", gradient_accumulation=2)
    with OffloadEngine(lm(), config, device=device, plan=mixed(config, [*STREAMED, Placement()])) as engine:
        rings = {state.ring for state in engine.placed.states}
        (ring,) = rings
        assert sum(buffer.memory.numel() for buffer in ring.buffers) == engine.plan.tiers["vram"]["state buffers"]
    with OffloadEngine(lm(), OffloadConfig(working_dtype="bf16", placement=LEAST_RAM), device=device) as engine:
        ram = engine.plan.tiers["ram"]
        numel = sum(layer.numel for layer in engine.plan.layers)
        assert ram["master weights"] + ram["moments"] == 10 * numel
        assert ram.keys() == {"master weights", "moments", "gradients"}
        assert all(state.gradient.host is None for state in engine.placed.states)


@pytest.mark.parametrize("there", [LEAST_RAM, *STREAMED[1:]])
def test_a_run_goes_on_under_another_placement(device: str, there: Placement) -> None:
    config = OffloadConfig(learning_rate=1e-2, working_dtype="bf16")
    expected, batches = lm().eval(), tokens(6, device)
    with OffloadEngine(expected, config, device=device) as engine:
        train(engine, batches)
        whole = numbers(engine)
    for first, second in ((there, Placement()), (Placement(), there), (there, STREAMED[1])):
        with OffloadEngine(lm().eval(), replace(config, placement=first), device=device) as engine:
            train(engine, batches[:3])
            saved = engine.state_dict()
            with OffloadEngine(lm().eval(), replace(config, placement=second), device=device) as other:
                train(other, batches[:1])
                other.load_state_dict(saved)
                train(other, batches[3:])
                assert_equal(whole, numbers(other), (first, second))
            masters = engine.master_weights()
            for name, weight in engine.module.named_parameters():
                assert torch.equal(split_master(masters[name])[0].cpu(), weight.cpu().detach()), name


@pytest.mark.filterwarnings("ignore:the gradient norm:RuntimeWarning")
def test_what_was_fetched_ahead_of_a_skipped_step_is_fetched_again(device: str) -> None:
    config = OffloadConfig(learning_rate=1e-2, on_nonfinite="skip")
    results = []
    for placement in (Placement(), LEAST_RAM):
        with OffloadEngine(lm().eval(), replace(config, placement=placement), device=device) as engine:
            first, *others = tokens(4, device)
            train(engine, [first])
            saved = {key: value for key, value in engine.state_dict().items() if key != "module"}
            saved |= {"module": {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}}
            saved["optimizer"] = {
                name: {key: tensor.clone() for key, tensor in of.items()} for name, of in saved["optimizer"].items()
            }
            train(engine, others)
            engine.backward(engine(first) * float("nan"))
            engine.step()
            engine.synchronize()
            if placement is LEAST_RAM:
                ring = engine.placed.states[0].ring
                assert ring is not None
                assert len(ring.ahead) == 3
            engine.load_state_dict(saved)
            train(engine, others)
            results.append(numbers(engine))
    assert_equal(*results, "after a skipped step")


def test_weights_written_from_outside_while_the_copy_in_ram_is_out_of_date(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OffloadConfig(learning_rate=1e-2, working_dtype="bf16")
    best = {name: tensor.bfloat16() for name, tensor in TinyLM(depth=3, width=33, hidden=257).state_dict().items()}
    results = []
    for plan in (None, mixed(config, [STREAMED[1], STREAMED[3]])):
        turns = iter((True, True, False, False, True))
        monkeypatch.setattr(StepBalancer, "correct", lambda self, layers, turns=turns: switch(layers, next(turns)))
        with OffloadEngine(lm().eval(), config, device=device, plan=plan) as engine:
            train(engine, tokens(2, device))
            engine.module.blocks[1].load_state_dict(
                {name.removeprefix("blocks.1."): value for name, value in best.items() if name.startswith("blocks.1.")}
            )
            train(engine, tokens(3, device))
            results.append(numbers(engine))
    assert_equal(*results, "written from outside")


def switch(layers: Sequence[states.LayerState], on_gpu: bool) -> None:
    for layer in layers:
        if layer.switchable:
            layer.on_gpu = on_gpu


@pytest.mark.parametrize("side", ["gpu", "cpu"])
def test_a_step_that_fails_on_either_side_is_raised_and_nobody_hangs(
    device: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = state_ring.optimizer_step, []

    def broken(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3 or side == "cpu":
            raise RuntimeError("the kernel is on fire")
        real(*args)

    monkeypatch.setattr(state_ring if side == "gpu" else states, "optimizer_step", broken)
    config, model = OffloadConfig(), lm()
    before = threading.active_count()
    engine = OffloadEngine(model, config, device=device, plan=mixed(config, [STREAMED[0], Placement()]))
    batch = tokens(1, device)[0]
    engine.backward(engine(batch))
    engine.step()
    waiting = threading.Thread(target=lambda: engine.backward(engine(batch)), daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive()
    with pytest.raises(EngineStateError) as caught:
        engine.synchronize()
    assert "on fire" in str(caught.value.__cause__)
    with pytest.raises(EngineStateError, match="half updated"):
        engine.close()
    assert threading.active_count() == before
    monkeypatch.undo()
    with OffloadEngine(model, config, device=device, plan=mixed(config, [STREAMED[0], Placement()])) as engine:
        train(engine, tokens(2, device))


@pytest.mark.parametrize("forgotten", [False, True], ids=["closed", "forgotten"])
def test_an_engine_leaves_no_ring_and_no_thread(device: str, forgotten: bool) -> None:
    config, model, before = OffloadConfig(), lm(), threading.active_count()
    for _ in range(2):
        engine = OffloadEngine(model, config, device=device, plan=mixed(config, [*STREAMED, Placement()]))
        ring = weakref.ref(engine.placed.states[0].ring)
        buffer = weakref.ref(engine.placed.states[0].ring.buffers[0].memory)  # type: ignore[union-attr]
        train(engine, tokens(3, device))
        if not forgotten:
            engine.close()
            gc.collect()
            assert ring() is None
        del engine
        gc.collect()
        assert ring() is None
        assert buffer() is None
        assert threading.active_count() == before


@pytest.mark.parametrize("accumulation", [1, 2])
def test_random_delays_on_threads_and_streams_change_no_number(
    device: str, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, draw = {"cpu": 12, "cuda": 1000}[device] // accumulation**2, random.Random(0)
    options: dict[str, Any] = {"working_dtype": "bf16", "precision": "compact", "gradient_accumulation": accumulation}
    depth = len(EVERYWHERE) - 1
    expected = trained(device, steps, depth=depth, **options)
    plan = mixed(OffloadConfig(**options), EVERYWHERE, depth)
    assert set(plan.placements) == set(EVERYWHERE)

    def pause() -> None:
        if draw.random() < 0.03:
            time.sleep(draw.random() * 2e-3)

    def late(real: Callable[..., Any]) -> Callable[..., Any]:
        def later(*args: Any, **options: Any) -> Any:
            pause()
            stream = next((arg for arg in args if isinstance(arg, CopyStream)), None)
            if device == "cuda" and draw.random() < 0.1:
                cycles = int(draw.random() * 500_000)
                torch.cuda._sleep(cycles) if stream is None else stream.run(lambda: torch.cuda._sleep(cycles))
            return real(*args, **options)

        return later

    copies, compute = [(CopyStream, "copy"), (CopyStream, "copy_all")], [(Waits, "delay"), (BlockGraphs, "replay")]
    for owner, name in (*copies, (update.LayerState, "step"), *compute):
        monkeypatch.setattr(owner, name, late(getattr(owner, name)))
    monkeypatch.setattr(StepBalancer, "correct", at_random(1))
    assert_equal(expected, trained(device, steps, plan, depth=depth, **options), plan.placements)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_streams_that_run_late_change_no_number(seed: int, accumulation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are threads: a missing wait shows without a GPU too."""
    options: dict[str, Any] = {"working_dtype": DTYPES[seed], "gradient_accumulation": accumulation}
    placements, depth = list(EVERYWHERE), len(EVERYWHERE) - 1
    expected = trained("cpu", 8, depth=depth, **options)
    random.Random(seed).shuffle(placements)
    plan = mixed(OffloadConfig(**options), placements, depth)
    monkeypatch.setattr(StepBalancer, "correct", at_random(seed))
    with Simulation(seed=seed, longest=1e-3).running() as simulation:
        assert_equal(expected, trained("cpu", 8, plan, depth=depth, **options), placements)
    assert simulation.num_operations > 1000


@pytest.mark.slow
@pytest.mark.parametrize("placement", [LEAST_RAM, STREAMED[2]], ids=["weights in vram", "weights in ram"])
def test_what_is_still_on_its_way_to_ram_is_waited_for(placement: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single chunk, which the next step fetches first; and weights that are saved immediately."""
    monkeypatch.setattr(shapes, "STEP_CHUNK", 1 << 23)
    config, part = OffloadConfig(learning_rate=1e-2), "blocks.1"
    plan = mixed(config, [IN_VRAM])
    placements = tuple(
        placement if layer.name == part else where for layer, where in zip(plan.layers, plan.placements, strict=True)
    )
    plan = replace(plan, placements=placements, tiers=tier_bytes(plan.layers, placements, 1))
    results: list[list[torch.Tensor]] = []
    for simulation in (None, Simulation(seed=0, longest=0.0)):
        saved: list[torch.Tensor] = []
        with (
            nullcontext() if simulation is None else simulation.running(),
            OffloadEngine(lm().eval(), config, device="cpu", plan=plan) as engine,
        ):
            for step, batch in enumerate(tokens(12)):
                engine.backward(engine(batch))
                engine.step()
                if simulation is not None and step == 0:
                    (ring,) = {state.ring for state in engine.placed.states}
                    assert ring is not None
                    simulation.delay(ring.d2h, 0.2)
                if step % 4 == 3:
                    saved += [tensor.clone() for tensor in engine.module.get_submodule(part).state_dict().values()]
            saved += numbers(engine).values()
        results.append(saved)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_only_so_many_chunks_are_queued_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: list[int] = []
    monkeypatch.setattr(state_ring, "MOST_UNDER_WAY", 4)
    monkeypatch.setattr(Event, "done", lambda event: draw.random() < 0.2)
    draw, rings, real, queued = random.Random(0), list[StateRing](), state_ring.optimizer_step, StateRing.step

    def step(*args: Any) -> None:
        under_way.append(len(rings[-1].under_way))
        real(*args)

    monkeypatch.setattr(
        StateRing, "step", lambda ring, *args, **options: (rings.append(ring), queued(ring, *args, **options))[1]
    )
    monkeypatch.setattr(state_ring, "optimizer_step", step)
    trained("cpu", 2, placement=LEAST_RAM)
    assert max(under_way) == 3
    assert len(under_way) > 20


def test_the_gpus_steps_are_timed(device: str) -> None:
    for placement, is_timed in ((LEAST_RAM, True), (STREAMED[3], True), (Placement(), False)):
        with OffloadEngine(lm(), OffloadConfig(placement=placement), device=device) as engine:
            train(engine, tokens(8, device))
            seconds = [record.seconds for record in engine.telemetry.records][2:]
        for phases in seconds:
            assert ("gpu_step" in phases) == is_timed
            assert phases.get("gpu_step", 1.0) > 0
            assert phases["h2d"] > 0
            assert phases["d2h"] > 0
        on_gpu, on_cpu = (min(phases.get(name, 0.0) for phases in seconds) for name in ("gpu_step", "cpu_step"))
        assert (on_cpu < on_gpu) == is_timed
