"""Predictions compared with measurements on H200s (benchmarks/results.csv)."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import table
from benchmarks.cases import OURS
from benchmarks.plans import as_placed
from benchmarks.rank_cases import RANK_CASES
from benchmarks.report import BEFORE_STREAMED_STATES, GRAPHED, STREAMED, WITHIN, planned_rows
from benchmarks.table import Row
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.planner import make_plan
from tests.planner.machines import GIB, H200, TWO_CORES, t5_3b

ROWS = [row for row in table.read() if row["status"] == "measured" and row["engine"] in OURS]
ONE_PLACEMENT = {
    "placed-8": ("keep", H200),
    "placed-8-checkpoint": ("checkpoint", H200),
    "placed-32-checkpoint": ("checkpoint", H200),
    "placed-4x8": ("keep", H200),
    "placed-8-2-cores": ("keep", TWO_CORES),
}
BY_OLDER_PYTHON = "placed-8-checkpoint"
"""Bound by the time that Python took to recompute then. Python is faster now, so this step is not compared."""
COMMITS = ("e91df0c", "80b4ada", "ba2139a", "c40b67e", "17f72d8", "e70d484")
"""Commits of the rows that the plan's constants were fitted to. docs/results.md scores the rows of later commits."""


def named(rows: list[Row]) -> dict[str, Row]:
    """Rows with the machine's rates, named "case commit", with " compiled" and " again" to tell rows apart."""
    found: dict[str, Row] = {}
    for row in rows:
        name = f"{row['case']} {row['commit']}" + " compiled" * row["engine"].endswith("-compiled")
        found[f"{name} again" if name in found else name] = row
    return found


PLANNED = [row for row in ROWS if row["rates"]]
OLDER = named([row for row in PLANNED if row["commit"] in BEFORE_STREAMED_STATES])
"""Rows measured before states were streamed through VRAM."""
STEPS = named([row for row in PLANNED if row["commit"] in COMMITS])
CASES = OLDER | STEPS
BEFORE = [
    f"{case} c9fd74b"
    for case in (
        "w3",
        "plan-t5-3b-3",
        "plan-llama-8b-10",
        "plan-t5-11b-8-compact",
        "plan-t5-11b-24-compact",
        "plan-drawn-1",
        "plan-drawn-2",
    )
] + ["plan-t5-large-disk d6b17f7", "plan-drawn-4 d6b17f7", "plan-llama-3b-6 31ba1b9"]
"""Rows of `OLDER` with all states in RAM and stepped by the CPU. Small models, bound by Python, are faster now."""
STEP_WITHIN = {
    "plan-t5-large-24 e91df0c": 0.7,
    "w1 e91df0c": 0.2,
    "plan-drawn-1 c9fd74b": 0.2,
    "w3 c40b67e": 0.35,
    "w3 c40b67e compiled": 0.25,
    "growth-t5-large-32 e70d484 compiled": 0.2,
    "growth-t5-3b-2 e70d484 compiled": 0.2,
}
"""Tolerances other than 0.15. The first three rows had norms of seven operations, each quicker in Python than the
launch of one kernel. The next two are from a slow host. Python bounds the rest, and its time varies from run to run."""
LEANER = {
    "w6-48 80b4ada compiled",
    "w7 80b4ada compiled",
    "w6-48 c40b67e compiled",
    "w7 c40b67e compiled",
    "w7 c40b67e compiled again",
    "w3 c40b67e",
    "w3 c40b67e compiled",
    "growth-t5-large-8 e70d484 compiled",
}
"""Rows that took less VRAM than planned. Compiled blocks keep less for backward: Llama's 8 to 11 % less, T5-large's 6
%. T5-3B within 6 GiB, with 46 of 48 blocks recomputed, took 7 % less."""

RANKS = named(
    [
        row
        for row in table.read()
        if row["engine"] in ("ours", "ours-compiled")
        and RANK_CASES[row["case"]].num_gpus > 1
        and "rates that were measured while tests ran" not in (row["notes"] or "")
    ]
)
"""Steps on two and four GPUs, by the engine that shares them."""
RANKS_WITHIN = {
    "t5-3b-2x28 e91ecd8": 0.17,
    "t5-3b-2x24 07f6458 compiled": 0.27,
    "t5-3b-2x28 07f6458": 0.18,
    "t5-3b-2x28 07f6458 compiled": 0.38,
    "t5-3b-2x28 7633a8b compiled": 0.16,
}
"""Bounds other than 0.15, all of T5-3B on two GPUs, which Python bounds: turns of t5-3b-2x28 on one machine took 0.208
to 0.293 s."""


@pytest.mark.parametrize("name", ONE_PLACEMENT)
def test_memory_and_step_time_of_one_placement(name: str) -> None:
    """Measured with eager blocks, before the allocator's segments grew, when it took up to 0.8 GiB more VRAM."""
    activations, hardware = ONE_PLACEMENT[name]
    measured = next(row for row in ROWS if row["case"] == name)
    layers, work = t5_3b(measured["batch_size"])
    config: Any = {"placement": Placement(activations=activations), "gradient_accumulation": measured["accumulation"]}
    plan = make_plan(layers, OffloadConfig(**config), work=work, hardware=hardware)
    assert 0.92 * measured["vram_bytes"] < plan.total_bytes("vram") < 1.02 * measured["vram_bytes"]
    assert plan.total_bytes("ram") == pytest.approx(measured["ram_peak_bytes"], rel=0.05)
    assert plan.seconds is not None
    if name != BY_OLDER_PYTHON:
        assert plan.seconds.step == pytest.approx(measured["seconds"], rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*STEPS, *BEFORE])
def test_what_a_plan_of_its_own_choice_took(case: str) -> None:
    """With the present constants."""
    row = CASES[case]
    search, counts = as_placed(row)
    needs = search.needs(counts)
    assert needs.disk == pytest.approx(row["planned_disk_bytes"], rel=0.02)
    assert 0.97 * row["vram_bytes"] < needs.vram < (1.11 if case in LEANER else 1.05) * row["vram_bytes"]
    measuring = case == "plan-t5-large-24 e91df0c"  # its peak of RAM came from measuring the machine
    assert needs.ram == pytest.approx(row["ram_peak_bytes"], rel=0.35 if measuring else 0.05)
    step = search.phases(counts).step
    assert step == pytest.approx(row["seconds"], rel=STEP_WITHIN.get(case, 0.15))


@pytest.mark.slow
@pytest.mark.parametrize("case", RANKS)
def test_what_a_plan_of_several_ranks_took(case: str) -> None:
    """With the present constants."""
    row = RANKS[case]
    search, counts = as_placed(row)
    assert row["vram_bytes"] < search.needs(counts).vram < 1.06 * row["vram_bytes"]
    step = search.phases(counts).step
    assert step == pytest.approx(row["seconds"], rel=RANKS_WITHIN.get(case, 0.15))


def test_rows_of_several_ranks() -> None:
    assert len(RANKS) == 35
    assert RANKS_WITHIN.keys() < RANKS.keys()


@pytest.mark.slow
def test_nine_of_ten_steps_since_blocks_run_as_graphs_are_planned_right() -> None:
    """With the present constants.

    Ragged rows are left out, because the plan is for their longest, and rows of optimizers, adapters and models that
    `as_placed` does not know.
    """
    off: dict[str, float] = {}
    for row in planned_rows(table.read())[GRAPHED]:
        if row["rates"] and row["mask"] == "full" and row["engine"] in OURS:
            search, counts = as_placed(row)
            name = f"{row['case']} {row['commit']} {row['engine']}"
            off[name] = search.phases(counts).step / row["seconds"] - 1
    assert len(off) >= 17
    wrong = {name: round(value, 3) for name, value in off.items() if abs(value) > WITHIN}
    assert len(wrong) <= 0.1 * len(off), wrong


CHOSEN = (
    "w3 e91df0c",
    "w1 e91df0c",
    "w1 ba2139a",
    "w6 80b4ada compiled",
    "plan-t5-large-disk d6b17f7",
    "plan-drawn-1 c9fd74b",
)


@pytest.mark.slow
@pytest.mark.parametrize("case", CHOSEN)
def test_what_the_plan_chooses_now_is_not_slower(case: str) -> None:
    row = CASES[case]
    search, counts = as_placed(row)
    machine = row["rates"]
    vram, ram = row["vram_budget_bytes"], row["ram_budget_bytes"] or 120 * GIB
    chosen = search.best(vram, ram, machine["disk_free_bytes"] if machine["disk_read_bytes_per_second"] else 0)
    best = search.phases(counts).step
    assert search.model.seconds(chosen).step <= 1.002 * best  # the search is greedy and may stop just before the best


def test_the_table_of_right_plans() -> None:
    """The plan's predictions before each run, and the measurements."""

    def beyond(rows: dict[str, Row], planned: str, measured: str, bound: float) -> set[str]:
        return {case for case, row in rows.items() if abs(row[planned] / row[measured] - 1) > bound}

    assert len(OLDER) == 16
    assert beyond(OLDER, "planned_vram_bytes", "vram_bytes", 0.05) == set()
    assert beyond(OLDER, "planned_ram_bytes", "ram_peak_bytes", 0.05) == {"plan-t4-t5-large d6b17f7"}
    assert beyond(OLDER, "planned_seconds", "seconds", 0.15) == {
        "plan-drawn-0 c9fd74b",
        "plan-drawn-3 c9fd74b",
        "plan-t4-t5-3b d6b17f7",
    }
    assert len(STEPS) == 53
    assert beyond(STEPS, "planned_vram_bytes", "vram_bytes", 0.05) == LEANER
    assert beyond(STEPS, "planned_ram_bytes", "ram_peak_bytes", 0.05) == {"plan-t5-large-24 e91df0c"}
    assert beyond(STEPS, "planned_seconds", "seconds", 0.15) == {
        "plan-t5-large-4 e91df0c",
        "w1 c40b67e",
        "w3 c40b67e",
        "w3 c40b67e compiled",
        "w5 e70d484 compiled",
        *(f"growth-t5-large-{rows} e70d484" for rows in (2, 8, 32, 128)),
        *(f"growth-t5-large-{rows} e70d484 compiled" for rows in (2, 8, 32)),
    }


def test_the_plan_s_score_is_over_all_rows_that_were_planned() -> None:
    """Rows without the machine's rates count too: 42 of 62 steps; the 53 rows with rates alone give 41."""
    old = [row for row in ROWS if row["planned_seconds"] and row["commit"] in COMMITS]
    right = [row for row in old if abs(row["planned_seconds"] / row["seconds"] - 1) <= 0.15]
    assert (len(right), len(old)) == (42, 62)
    scored = planned_rows(table.read())[STREAMED]
    assert all(row in scored for row in old)
