"""Measured rates of a GPU against the plan's: a plan with wrong rates moves, a plan with right rates stays."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from offloadkit import OffloadConfig, OffloadEngine, Placement
from offloadkit.device.measure import measure
from offloadkit.engine import outline
from offloadkit.facts.hardware import Hardware
from offloadkit.facts.telemetry import Move
from offloadkit.offload import rate_watch
from offloadkit.offload.rate_watch import NUM_STEPS, WARM_UP
from offloadkit.offload.update import StepBalancer
from offloadkit.planner import Plan
from offloadkit.planner.faster import Rate

pytestmark = pytest.mark.usefixtures("alone")
GIB = 1 << 30
STEPS = 2 * (WARM_UP + NUM_STEPS) + 6


def _trained(config: OffloadConfig) -> tuple[dict[str, torch.Tensor], Sequence[Move]]:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_heads": 16, "num_layers": 12}
    model = T5ForConditionalGeneration(T5Config(**shape, vocab_size=512, decoder_start_token_id=0, dropout_rate=0.1))
    generator = torch.Generator().manual_seed(1)

    def batch() -> dict[str, torch.Tensor]:
        ids, labels = (torch.randint(3, 500, (8, length), generator=generator) for length in (256, 64))
        return {"input_ids": ids.cuda(), "labels": labels.cuda()}

    with OffloadEngine(model, config, device="cuda", example=batch()) as engine:
        engine.train()
        torch.manual_seed(2)
        for _ in range(STEPS):
            engine.backward(engine(**batch()).loss)
            engine.step()
        engine.synchronize()
        return {name: weight.cpu() for name, weight in engine.master_weights().items()}, engine.telemetry.moves


def _config(**options: Any) -> OffloadConfig:
    return OffloadConfig(learning_rate=1e-4, working_dtype="bf16", **options)


def _budgets(machine: Hardware) -> dict[str, int]:
    """Budgets for a third of the model."""
    gc.collect()
    torch.cuda.empty_cache()
    return {"vram": machine.vram_context_bytes + torch.cuda.memory_allocated() + 22 * GIB // 10, "ram": 30 * GIB}


def _rates(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Rate]]:
    """The rates that the engine is going to compare, in order."""
    found: list[dict[str, Rate]] = []
    real = rate_watch.compared_rates

    def recorded(plan: Plan, *rest: Any) -> dict[str, Rate]:
        print(plan.details())
        found.append(real(plan, *rest))
        return found[-1]

    monkeypatch.setattr(rate_watch, "compared_rates", recorded)
    return found


def test_a_plan_that_takes_the_bus_for_ten_times_slower_moves_and_no_bit_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, _ = _trained(_config(placement=Placement(weights="ram", activations="checkpoint")))
    machine = measure()
    names = ("h2d_bytes_per_second", "d2h_bytes_per_second", "both_bytes_per_second")
    slow: dict[str, Any] = {name: getattr(machine, name) / 10 for name in names}
    monkeypatch.setattr(outline, "measured_by", lambda *_, **__: replace(measure(), **slow))
    # A balanced plan is nearly as fast as the right one, and stays.
    monkeypatch.setattr(StepBalancer, "correct", lambda *_: None)
    rates = _rates(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about the move
        found, moves = _trained(_config(**_budgets(machine)))
    print(*rates, *moves, sep="\n")
    assert moves
    assert "copies to the GPU run at" in moves[0].why
    assert [name for name, weight in expected.items() if not torch.equal(weight, found[name])] == []


def test_the_measured_rates_of_copies_and_steps_are_those_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without forward and backward, which Python bounds here, at the host's speed."""
    found = _rates(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        _, moves = _trained(_config(**_budgets(measure())))
    print(*found, *moves, sep="\n")
    rates = {name: rate for name, rate in found[0].items() if name in ("H2D", "D2H", "CPU step")}
    assert len(rates) == 3
    # The plan slows the CPU step alone where DRAM is short. On some hosts the copies to the GPU are slowed instead.
    assert [name for name, rate in rates.items() if rate.differs and name != "H2D"] == []
    assert rates["H2D"].measured > 0.6 * rates["H2D"].planned
