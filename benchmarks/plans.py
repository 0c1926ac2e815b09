"""Right plans: what the plan predicts beside what is measured, each case in a fresh process.

    python -m benchmarks.plans                    # every case
    python -m benchmarks.plans --case t5-3b-6 llama-8b-10

A case is a micro-batch of a model, a budget of VRAM and a precision; the plan chooses what lives where.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.run import Row, run_aloud, write_results

GIB = 1 << 30
T4: dict[str, Any] = {"vram_budget_gib": 15.0, "ram_budget_gib": 12.0, "cores": 2, "dtype": "fp16"}
"""A free notebook's machine."""


def drawn_cases(seed: int, number: int) -> dict[str, dict[str, Any]]:
    """Cases that nobody chose: model, micro-batch, accumulation, precision and budget drawn by `seed`."""
    draw, cases = random.Random(seed), {}
    for index in range(number):
        model, budgets = draw.choice([("t5-large", (3, 8)), ("t5-3b", (4, 30)), ("llama-3.2-3b", (8, 40))])
        work = {
            "model": model,
            "batch_size": draw.choice([1, 2, 4, 8]),
            "tokens": draw.choice([128, 256, 512, 1024]),
            "target_tokens": draw.choice([32, 64, 128, 256]) if model.startswith("t5") else 0,
            "accumulation": draw.choice([1, 1, 2]),
            "precision": draw.choice(["exact", "exact", "compact", "tiny"]),
            "vram_budget_gib": float(draw.randint(*budgets)),
        }
        cases[f"drawn-{index}"] = work
    return cases


T5 = {"tokens": 512, "target_tokens": 128}
CASES: dict[str, dict[str, Any]] = {
    "t5-large-4": {**T5, "model": "t5-large", "batch_size": 8, "vram_budget_gib": 4.0},
    "t5-large-24": {**T5, "model": "t5-large", "batch_size": 8, "vram_budget_gib": 24.0},
    "t5-large-disk": {
        **T5,
        "model": "t5-large",
        "batch_size": 8,
        "vram_budget_gib": 4.0,
        "ram_budget_gib": 6.0,
        "disk": tempfile.gettempdir(),
    },
    "t5-3b-3": {**T5, "model": "t5-3b", "batch_size": 1, "vram_budget_gib": 3.0},
    "t5-3b-6": {**T5, "model": "t5-3b", "batch_size": 1, "vram_budget_gib": 6.0},
    "t5-3b-6-compact": {
        **T5,
        "model": "t5-3b",
        "batch_size": 1,
        "vram_budget_gib": 6.0,
        "precision": "compact",
    },
    "t5-3b-24": {**T5, "model": "t5-3b", "batch_size": 8, "vram_budget_gib": 24.0},
    "t5-3b-24-2-cores": {**T5, "model": "t5-3b", "batch_size": 8, "vram_budget_gib": 24.0, "cores": 2},
    "t5-3b-16-large-batch": {**T5, "model": "t5-3b", "batch_size": 32, "vram_budget_gib": 16.0},
    "t5-3b-130": {**T5, "model": "t5-3b", "batch_size": 8, "vram_budget_gib": 130.0},
    "t5-3b-130-large-batch": {**T5, "model": "t5-3b", "batch_size": 32, "vram_budget_gib": 130.0},
    "t5-3b-16-accumulated": {**T5, "model": "t5-3b", "batch_size": 4, "accumulation": 4, "vram_budget_gib": 16.0},
    "t5-11b-8-compact": {**T5, "model": "t5-11b", "batch_size": 1, "vram_budget_gib": 8.0, "precision": "compact"},
    "t5-11b-24-compact": {**T5, "model": "t5-11b", "batch_size": 1, "vram_budget_gib": 24.0, "precision": "compact"},
    "llama-8b-10": {"model": "llama-3.1-8b", "batch_size": 1, "tokens": 2048, "vram_budget_gib": 10.0},
    "llama-8b-24": {"model": "llama-3.1-8b", "batch_size": 1, "tokens": 2048, "vram_budget_gib": 24.0},
    "llama-3b-6": {"model": "llama-3.2-3b", "batch_size": 8, "tokens": 1024, "vram_budget_gib": 6.0},
    "llama-3b-24": {"model": "llama-3.2-3b", "batch_size": 8, "tokens": 1024, "vram_budget_gib": 24.0},
    "llama-3b-48": {"model": "llama-3.2-3b", "batch_size": 8, "tokens": 1024, "vram_budget_gib": 48.0},
    "llama-3b-24-large-batch": {"model": "llama-3.2-3b", "batch_size": 32, "tokens": 1024, "vram_budget_gib": 24.0},
    "t4-t5-large": {**T5, "model": "t5-large", "batch_size": 4, **T4},
    "t4-t5-3b": {**T5, "model": "t5-3b", "batch_size": 1, "precision": "compact", **T4, "disk": tempfile.gettempdir()},
    "tiny": {"model": "t5-tiny", "batch_size": 2, "tokens": 16, "target_tokens": 8, "vram_budget_gib": 2.0},
    **drawn_cases(seed=1, number=6),
}


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run the cases; print planned and measured, write the result file, return the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--case", nargs="+", choices=CASES, default=[name for name in CASES if name != "tiny"])
    parser.add_argument("--compile", action="store_true", help="compile the repeated blocks")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one case")
    parser.add_argument("--out", type=Path, help="result file (default: a new one in benchmarks/results)")
    parser.add_argument("--commit", help="commit to write down where git is missing")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(arguments)
    options.mode, options.model = "plans", "cases"
    rows = []
    for name in options.case:
        task = {
            "mode": "plans",
            "engine": "planned",
            "work": {"cores": 0, "target_tokens": 0, **CASES[name], "steps": options.steps}
            | ({"compile_blocks": True} if options.compile else {}),
        }
        rows.append({"case": name} | run_aloud(name, task, options))
        write_results(options, rows)
    for line in table(rows):
        print(line)
    return rows


def table(rows: list[Row]) -> list[str]:
    """Planned / measured VRAM, RAM (GiB) and seconds a step, and by how much the plan is off."""
    lines = [f"{'case':20}{'VRAM':>20}{'off':>8}{'RAM':>20}{'off':>8}{'step':>18}{'off':>8}"]
    for row in rows:
        if "failed" in row:
            lines.append(f"{row['case']:20}{row['failed']}")
            continue
        planned, cells = row["planned"], []
        for key, measured, unit in (
            ("vram_bytes", row["vram_bytes"], GIB),
            ("ram_bytes", row["peak_ram_bytes"], GIB),
            ("step_seconds", row["step_seconds"], 1),
        ):
            expected = planned[key]
            digits = 3 if unit == 1 else 2
            shown = f"{expected / unit:.{digits}f} / {measured / unit:.{digits}f}" if expected else "-"
            cells.append(f"{shown:>{18 if unit == 1 else 20}}")
            cells.append(f"{expected / measured - 1:>8.1%}" if expected and measured else f"{'-':>8}")
        lines.append(f"{row['case']:20}" + "".join(cells))
    return lines


if __name__ == "__main__":
    main()
