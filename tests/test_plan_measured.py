"""Predictions against what was measured: T5-3B on one H200 (benchmarks/results)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offloadkit.config import OffloadConfig, Placement
from offloadkit.plan import make_plan
from tests.plan_machines import H200, TWO_CORES, t5_3b

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
CASES = {
    "t5-3b-8x640.json": (8, 1, "keep", H200),
    "t5-3b-8x640-ckpt.json": (8, 1, "checkpoint", H200),
    "t5-3b-32x640-ckpt.json": (32, 1, "checkpoint", H200),
    "t5-3b-4x8x640.json": (8, 4, "keep", H200),
    "t5-3b-8x640-2-cores.json": (8, 1, "keep", TWO_CORES),
}


@pytest.mark.parametrize("name", CASES)
def test_memory_and_step_time_of_t5_3b(name: str) -> None:
    batch_size, accumulation, activations, hardware = CASES[name]
    measured: dict[str, Any] = next(
        row for row in json.loads((RESULTS / name).read_text())["rows"] if row["engine"] == "offloadkit"
    )
    layers, work = t5_3b(batch_size)
    config: Any = {"placement": Placement(activations=activations), "gradient_accumulation": accumulation}
    plan = make_plan(layers, OffloadConfig(**config), work=work, hardware=hardware)
    assert plan.total_bytes("vram") == pytest.approx(measured["vram_bytes"], rel=0.05)
    assert plan.total_bytes("ram") == pytest.approx(measured["peak_ram_bytes"], rel=0.05)
    assert plan.seconds is not None
    assert plan.seconds.step == pytest.approx(measured["step_seconds"], rel=0.15)
