"""Predictions against what was measured on H200s (benchmarks/results)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offloadkit.config import OffloadConfig, Placement
from offloadkit.hardware import Hardware
from offloadkit.plan import Plan, make_plan
from tests.plan_machines import H200, TWO_CORES, of_workload, t5_3b

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
ONE_PLACEMENT = {
    "t5-3b-8x640.json": (8, 1, "keep", H200),
    "t5-3b-8x640-ckpt.json": (8, 1, "checkpoint", H200),
    "t5-3b-32x640-ckpt.json": (32, 1, "checkpoint", H200),
    "t5-3b-4x8x640.json": (8, 4, "keep", H200),
    "t5-3b-8x640-2-cores.json": (8, 1, "keep", TWO_CORES),
}
ROWS = {row["case"]: row for row in json.loads((RESULTS / "plans-h200.json").read_text())["rows"]}


@pytest.mark.parametrize("name", ONE_PLACEMENT)
def test_memory_and_step_time_of_one_placement(name: str) -> None:
    """Measured before the allocator's segments grew: it took up to 0.8 GiB more VRAM."""
    batch_size, accumulation, activations, hardware = ONE_PLACEMENT[name]
    measured: dict[str, Any] = next(
        row for row in json.loads((RESULTS / name).read_text())["rows"] if row["engine"] == "offloadkit"
    )
    layers, work = t5_3b(batch_size)
    config: Any = {"placement": Placement(activations=activations), "gradient_accumulation": accumulation}
    plan = make_plan(layers, OffloadConfig(**config), work=work, hardware=hardware)
    assert 0.92 * measured["vram_bytes"] < plan.total_bytes("vram") < 1.02 * measured["vram_bytes"]
    assert plan.total_bytes("ram") == pytest.approx(measured["peak_ram_bytes"], rel=0.05)
    assert plan.seconds is not None
    assert plan.seconds.step == pytest.approx(measured["step_seconds"], rel=0.15)


def planned(row: dict[str, Any]) -> Plan:
    """The plan of a case on the machine as it was measured in that run."""
    work, found = row["work"], row["planned"]["hardware"]
    hardware = Hardware(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})
    names = {"accumulation": "gradient_accumulation", "dtype": "working_dtype"}
    wishes = {name: work[name] for name in ("precision", "accumulation", "dtype", "disk") if name in work}
    budgets = {name: f"{work[f'{name}_budget_gib']}GiB" for name in ("vram", "ram") if f"{name}_budget_gib" in work}
    config: Any = {names.get(name, name): value for name, value in wishes.items()} | budgets
    layers, micro_batch = of_workload(work)
    return make_plan(layers, OffloadConfig(**config), work=micro_batch, hardware=hardware)


@pytest.mark.parametrize("case", ["t5-3b-6", "t5-large-disk", "llama-8b-10", "drawn-1", "drawn-4"])
def test_what_a_plan_of_its_own_choice_took(case: str) -> None:
    row = ROWS[case]
    plan = planned(row)
    assert plan.total_bytes("vram") == pytest.approx(row["vram_bytes"], rel=0.05)
    assert plan.total_bytes("ram") == pytest.approx(row["peak_ram_bytes"], rel=0.05)
    assert plan.total_bytes("disk") == pytest.approx(row["planned"]["disk_bytes"], rel=0.02)
    assert plan.seconds is not None
    assert plan.seconds.step == pytest.approx(row["step_seconds"], rel=0.15)


def test_the_table_of_right_plans() -> None:
    """What the plan said before each run, beside what was measured then (docs/design.md, section 5)."""

    def off(row: dict[str, Any], planned: str, measured: str) -> float:
        return abs(row["planned"][planned] / row[measured] - 1)

    assert len(ROWS) >= 14
    beyond = {
        "VRAM": {case for case, row in ROWS.items() if off(row, "vram_bytes", "vram_bytes") > 0.05},
        "RAM": {case for case, row in ROWS.items() if off(row, "ram_bytes", "peak_ram_bytes") > 0.05},
        "step": {case for case, row in ROWS.items() if off(row, "step_seconds", "step_seconds") > 0.15},
    }
    assert beyond == {"VRAM": set(), "RAM": {"t4-t5-large"}, "step": {"drawn-0", "drawn-3", "t4-t5-3b"}}
