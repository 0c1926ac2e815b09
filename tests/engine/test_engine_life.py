"""Engines built on a used model, or forgotten, interrupted, loaded and closed, leave nothing wrong behind."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offloadkit.device import process_memory, watchdog
from offloadkit.engine.engine import OffloadEngine as EngineOfDevice
from offloadkit.errors import EngineStateError, ModelError, NonFiniteGradientError, OutOfVramError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.hardware import process_ram_bytes
from offloadkit.facts.telemetry import Telemetry
from offloadkit.offload import update
from offloadkit.offload.gradients import Gradients
from tests.models import TinyLM, tokens, train

OffloadEngine = partial(EngineOfDevice, device="cpu")


def test_gradients_from_before_the_engine_do_not_count() -> None:
    batch = tokens(1)[0]
    norms = []
    for used in (False, True):
        torch.manual_seed(0)
        model = TinyLM()
        if used:
            model(batch).backward()
        with OffloadEngine(model) as engine:
            train(engine, [batch])
            norms.append(engine.grad_norm())
    assert norms[0] == norms[1]


def test_an_engine_that_is_forgotten_lets_go_of_the_model() -> None:
    gc.collect()  # garbage of earlier tests
    model, num_threads = TinyLM(), threading.active_count()
    engine = OffloadEngine(model)
    train(engine, tokens(1))
    optimizer = engine.optimizer
    gc.disable()  # the engine must end with its last reference
    try:
        del engine
        assert threading.active_count() == num_threads
        assert process_memory.open_phases == []
    finally:
        gc.enable()
    with pytest.raises(EngineStateError, match="the engine of this optimizer was garbage-collected"):
        optimizer.step()
    model(tokens(1)[0]).backward()
    assert model.norm.weight.grad is not None
    before = model.norm.weight.detach().clone()
    with OffloadEngine(model) as second:
        train(second, tokens(1))
    assert not torch.equal(model.norm.weight, before)


def test_parameter_groups_may_be_generators() -> None:
    model = TinyLM()
    groups = [{"params": model.blocks.parameters(), "lr": 1e-2}, {"params": model.unused}]
    groups.append({"params": (p for name, p in model.named_parameters() if name.startswith(("embed", "norm", "head")))})
    with OffloadEngine(model, param_groups=groups) as engine:
        assert [len(group["params"]) for group in engine.optimizer.param_groups] == [16, 1, 3]
        assert len(engine.optimizer.state_dict()["state"]) == 20


def test_a_module_replaced_after_the_engine_was_built() -> None:
    model = TinyLM(tied=False)
    with OffloadEngine(model) as engine:
        model.head = nn.Linear(65, 61, bias=False)
        engine.backward(engine(tokens(1)[0]))
        with pytest.raises(ModelError, match=r"'head\.weight' was added, replaced or unfrozen"):
            engine.step()


def test_loading_ones_own_live_state_changes_nothing() -> None:
    config = OffloadConfig(learning_rate=1e-2, working_dtype="bf16")
    with OffloadEngine(TinyLM(), config) as engine:
        train(engine, tokens(3))
        before = copy.deepcopy(engine.state_dict()["optimizer"])
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        engine.load_state_dict(engine.state_dict())
        for name, state in engine.state_dict()["optimizer"].items():
            assert all(torch.equal(tensor, before[name][key]) for key, tensor in state.items()), name


def test_loading_resets_parameters_that_the_saved_run_had_not_stepped() -> None:
    model = TinyLM()
    saved = torch.optim.AdamW(copy.deepcopy(model).parameters()).state_dict()
    with OffloadEngine(model) as engine:
        train(engine, tokens(2))
        engine.optimizer.load_state_dict(saved)
        assert not any(t.any() for state in engine.optimizer.state_dict()["state"].values() for t in state.values())


def test_a_failing_update_does_not_block_the_next_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, *args: object) -> None:
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(update.LayerState, "step", broken)
    engine = OffloadEngine(TinyLM(), OffloadConfig(gradient_accumulation=2))
    for batch in tokens(2):
        engine.backward(engine(batch))
        engine.step()
    waiting = threading.Thread(target=lambda: engine.backward(engine(tokens(1)[0])), daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive()
    with pytest.raises(EngineStateError, match="half updated"):
        engine.close()


def test_a_backward_that_fails_leaves_no_gradient() -> None:
    """It fails when half of a block's gradients have been computed."""

    def trained(*, failing: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = TinyLM()
        with OffloadEngine(model, OffloadConfig(learning_rate=0.1)) as engine:
            batch = tokens(1)[0]
            if failing:
                weight: Any = model.blocks[1].up.weight
                hook = weight.register_hook(lambda gradient: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    engine.backward(engine(batch))
                hook.remove()
                assert all(parameter.grad is None for parameter in model.parameters())
            train(engine, [batch])
            return engine.master_weights()

    expected, found = trained(failing=False), trained(failing=True)
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())


def test_an_interrupted_forward_leaves_no_attribute_on_the_model() -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    model = TinyLM(tied=True)
    with OffloadEngine(model) as engine:
        hook = model.head.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine(tokens(1)[0])
        hook.remove()
        train(engine, tokens(1))
        model.head.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine(tokens(1)[0])
    assert "weight" not in model.head.__dict__


def test_closing_reports_a_last_step_that_was_not_applied_unless_another_error_is_on_its_way() -> None:
    batch = tokens(1)[0]
    model = TinyLM()
    engine = OffloadEngine(model)
    engine.backward(engine(batch) * float("nan"))
    engine.step()
    with pytest.raises(NonFiniteGradientError, match="step 1"):
        engine.close()
    engine = OffloadEngine(model)
    engine.backward(engine(batch) * float("nan"))
    engine.step()
    with pytest.raises(KeyboardInterrupt), engine:
        raise KeyboardInterrupt
    for call in (engine.grad_norm, engine.state_dict, lambda: engine.load_state_dict({"optimizer": {}})):
        with pytest.raises(EngineStateError, match="closed"):
            call()


def test_a_dropped_window_is_in_no_record() -> None:
    with OffloadEngine(TinyLM()) as engine:
        engine.backward(engine(tokens(1)[0]))
        engine.optimizer.zero_grad()
        loss = engine(tokens(1)[0])
        engine.backward(loss)
        engine.step()
        engine.synchronize()
        assert engine.telemetry.records[0].loss == pytest.approx(loss.item())


def test_one_log_serves_a_second_engine(tmp_path: Path) -> None:
    model, telemetry = TinyLM(), Telemetry(tmp_path / "steps.jsonl")
    for _ in range(2):
        with OffloadEngine(model, telemetry=telemetry) as engine:
            train(engine, tokens(2))
    telemetry.close()
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("submitted", [False, True], ids=["before the sum is queued", "when it was queued"])
def test_interrupts_lose_no_staging_memory(submitted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three interrupts: if their bytes were lost, the next backward would wait forever."""
    config = OffloadConfig(learning_rate=1e-2, gradient_accumulation=2)
    torch.manual_seed(0)
    expected = TinyLM()
    model = copy.deepcopy(expected)
    with OffloadEngine(expected, config) as engine:
        train(engine, tokens(4))
    submit, interrupts = update.StepThread.submit, [True] * 3

    def interrupted(self: update.StepThread, job: Callable[[], None]) -> None:
        if submitted or not interrupts:
            submit(self, job)
        if interrupts:
            interrupts.pop()
            raise KeyboardInterrupt

    monkeypatch.setattr(update.StepThread, "submit", interrupted)
    monkeypatch.setattr(watchdog, "LIMIT_SECONDS", 20.0)
    with OffloadEngine(model, config) as engine:
        while interrupts:
            with pytest.raises(KeyboardInterrupt):
                engine.backward(engine(tokens(1)[0]))
        train(engine, tokens(4))
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in expected.state_dict().items())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_closing_frees_the_states_and_copies_no_weights(device: str) -> None:
    """16 MiB of weights in RAM, and 48 MiB of moments and gradients."""
    model, mib = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]), 1 << 20
    config = OffloadConfig(placement=Placement(weights="ram", activations="checkpoint"))
    engine = OffloadEngine(model, config, device=device)
    engine.backward(engine(torch.ones(1, 1024, device=device)).sum())
    engine.step()
    engine.synchronize()
    before = process_ram_bytes()
    gc.disable()
    try:
        engine.close()
        after = process_ram_bytes()
    finally:
        gc.enable()
    assert engine.telemetry.peaks["closing"]["ram"] < before + 8 * mib
    assert after < before - 44 * mib
    assert {"reading", "first step", "closing"} == engine.telemetry.peaks.keys()


def test_a_loss_that_is_kept_keeps_no_states() -> None:
    """Its graph holds the hooks that pass on gradients of a tied weight."""
    with OffloadEngine(TinyLM(tied=True), OffloadConfig(), device="cpu") as engine:
        loss = engine(tokens(1)[0])
        engine.backward(loss)
        engine.step()
        kept = [weakref.ref(state.gradient) for state in engine.placed.states]
    gc.collect()
    assert loss.grad_fn is not None
    assert {gradient() for gradient in kept} == {None}


def test_an_error_in_the_middle_of_closing_leaves_the_model_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("no room")

    torch.manual_seed(0)
    model, expected = TinyLM(), TinyLM()
    expected.load_state_dict(model.state_dict())
    config = OffloadConfig(placement=Placement(weights="ram"))
    engine = OffloadEngine(model, config)
    with OffloadEngine(expected, config) as other:
        train(other, tokens(2))
    train(engine, tokens(2))
    with monkeypatch.context() as patch:
        patch.setattr(model, "to", full, raising=False)
        with pytest.raises(torch.OutOfMemoryError):
            engine.close()
    assert all(torch.equal(weight, expected.state_dict()[name]) for name, weight in model.state_dict().items())
    with OffloadEngine(model, config) as second:  # the first engine leaves no obstacle
        train(second, tokens(1))


UNFINISHED = """
import torch
from torch import nn
from offloadkit import OffloadConfig, OffloadEngine
engines = [OffloadEngine(nn.Sequential(*[nn.Linear(64, 64) for _ in range(100)]), OffloadConfig(), device="cpu")
           for _ in range(4)]
for engine in engines:
    engine.backward(engine(torch.rand(2, 64)).sum())
    engine.step()
"""


@pytest.mark.slow
def test_a_program_that_ends_without_closing_ends_well() -> None:
    """Its threads are in the middle of an update."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    ended = subprocess.run([sys.executable, "-c", UNFINISHED], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("placement", [Placement(), Placement(weights="ram", activations="checkpoint")])
def test_an_engine_that_could_not_be_built_leaves_no_hook(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrange = Gradients.arrange

    def full(*args: Any) -> None:
        arrange(*args)
        raise torch.OutOfMemoryError("CUDA out of memory")

    model, batches = TinyLM(), tokens(2)
    config = OffloadConfig(placement=placement)
    with monkeypatch.context() as patch:
        patch.setattr(Gradients, "arrange", full)
        with pytest.raises(OutOfVramError):
            OffloadEngine(model, config)
    assert not any(module._forward_pre_hooks or "forward" in vars(module) for module in model.modules())
    with OffloadEngine(model, config) as engine:
        train(engine, batches)


@pytest.mark.parametrize(
    "placement", [Placement(), Placement(step="gpu"), Placement(states="disk"), Placement(weights="ram")]
)
def test_a_parameter_without_elements_stays_so(placement: Placement) -> None:
    class WithNothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
            self.nothing = nn.Parameter(torch.zeros(0, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.sum() + self.nothing.float().sum()

    model = WithNothing()
    before = model.blocks[0].weight.detach().clone()
    with OffloadEngine(model, OffloadConfig(placement=placement, learning_rate=0.1)) as engine:
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
    assert model.nothing.shape == (0,)
    assert not torch.equal(model.blocks[0].weight, before)


@pytest.mark.parametrize("inside", [True, False])
def test_a_model_whose_part_is_trained_is_refused_by_name(inside: bool) -> None:
    model = TinyLM()
    outer = torch.nn.ModuleDict({"inner": model})
    first, second = (model, outer) if inside else (outer, model)
    said = "with parameters of this model already has an open engine"
    with OffloadEngine(first, OffloadConfig(), device="cpu"), pytest.raises(EngineStateError, match=said):
        OffloadEngine(second, OffloadConfig(), device="cpu")
    OffloadEngine(second, OffloadConfig(), device="cpu").close()
