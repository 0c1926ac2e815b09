"""The plans of models and rows that barely fit: 30 and 32 G parameters on one H200 without a disk, and long rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.cases import CASES
from benchmarks.plans import layers_and_work
from offloadkit.facts.config import OffloadConfig
from offloadkit.planner import Plan, make_plan
from tests.planner.machines import GIB, H200


def plan_of(name: str, vram: float | None = None) -> Plan:
    """The plan of a benchmark case, by default within its budgets."""
    case = CASES[name]
    layers, work = layers_and_work(case.model, case.dtype, case.batch_size, case.input_length, 0)
    layers = [replace(layer, kind=replace(layer.kind, precision=case.precision)) for layer in layers]
    limits = {"vram": int((vram or case.vram or 0) * GIB), "ram": int(case.ram * GIB) if case.ram else None}
    config = OffloadConfig(precision=case.precision, working_dtype=case.dtype, **limits)  # type: ignore[arg-type]
    return make_plan(layers, config, work=work, hardware=H200)


@pytest.mark.slow(20)
@pytest.mark.parametrize("name", ["qwen3-32b-1x1024-h200", "qwen3-30b-a3b-1x1024-h200"])
def test_the_largest_models_are_planned_with_few_second_copies_of_weights(name: str) -> None:
    made = plan_of(name)
    assert made.fits
    assert made.seconds is not None
    assert made.seconds.step <= 6
    placed = list(zip(made.layers, made.placements, strict=True))
    weights = sum(layer.weight_bytes() for layer in made.layers)
    in_vram = sum(layer.weight_bytes() for layer, where in placed if where.weights == "vram")
    copies = made.tiers["ram"].get("working weights", 0) - (weights - in_vram)
    assert copies < (0.1 if name.startswith("qwen3-32b") else 0.25) * weights  # the smaller one has RAM for CPU steps
    assert all(where.weights == "vram" for layer, where in placed if not layer.in_block)  # embedding and head
    by_gpu = sum(layer.numel for layer, where in placed if where.step == "gpu")
    assert by_gpu > 0.75 * sum(layer.numel for layer in made.layers)
    assert "disk" not in {where.states for where in made.placements}


def test_a_row_of_131072_tokens_is_as_fast_in_18_gib_as_in_40() -> None:
    assert not plan_of("llama-3b-1x131072-40", vram=14).fits
    made = plan_of("llama-3b-1x131072-40", vram=18)
    assert made.fits
    assert made.seconds is not None
    assert made.seconds.step < 1.1 * plan_of("llama-3b-1x131072-40").seconds.step  # type: ignore[union-attr]
