"""Rows as text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]
GIB = 1 << 30


def _seconds(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key]:.3f}"


def _phase(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row['phase_seconds'][name]:.3f}"


def _gib(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row[key] / GIB:.2f}"


def _slowdown(baseline: str) -> Callable[[Row], str]:
    key = f"slowdown_{baseline}"
    return lambda row: f"{row[key]:.2f}" if key in row else "-"


def _tokens_per_second(row: Row) -> str:
    work = row["work"]
    tokens = work["accumulation"] * work["batch_size"] * (work["tokens"] + work["target_tokens"])
    return f"{tokens / row['step_seconds']:.0f}"


def _first_and_last_loss(row: Row) -> str:
    return f"{row['losses'][0]:.4f} > {row['losses'][-1]:.4f}"


def _pinning(row: Row) -> str:
    return f"{row['part_seconds']['pin']:.1f}" if "pin" in row["part_seconds"] else "-"


def _disk_to_first_step(row: Row) -> str:
    return f"{row['load_seconds'] + row['engine_seconds'] + row['first_step_seconds']:.1f}"


MEMORY: list[Column] = [
    ("VRAM", _gib("vram_bytes")),
    ("alloc", _gib("max_allocated_bytes")),
    ("resvd", _gib("max_reserved_bytes")),
    ("RAM", _gib("peak_ram_bytes")),
    ("RAM B/param", lambda row: f"{row['peak_ram_bytes'] / row['num_parameters']:.1f}"),
]
STEP: list[Column] = [
    ("s/step", _seconds("step_seconds")),
    ("min", _seconds("min_step_seconds")),
    ("settled", _seconds("settled_seconds")),
]
COLUMNS: dict[str, list[Column]] = {
    "steps": [
        *STEP,
        ("fwd", _phase("forward")),
        ("bwd", _phase("backward")),
        ("step", _phase("step")),
        ("x gpu", _slowdown("gpu")),
        ("x gpu-ours", _slowdown("gpu-ours")),
        ("tok/s", _tokens_per_second),
        *MEMORY,
        ("init s", _seconds("engine_seconds")),
        ("loss", _first_and_last_loss),
    ],
    "startup": [
        ("disk to step", _disk_to_first_step),
        ("load", _seconds("load_seconds")),
        ("engine", _seconds("engine_seconds")),
        ("of it pinning", _pinning),
        ("first step", _seconds("first_step_seconds")),
        ("imports", _seconds("import_seconds")),
        ("process", _seconds("process_seconds")),
        *MEMORY,
    ],
    "loader": [("workers", lambda row: str(row["num_workers"])), *STEP, *MEMORY, ("loss", _first_and_last_loss)],
}


def label(row: Row) -> str:
    """The engine of a row or task, and what sets it apart from another one of the same work."""
    work, words = row["work"], [row["engine"]]
    if row["engine"] == "planned":
        words += [f"{work['vram_budget_gib']:g} GiB"] + ["compiled"] * work.get("compile_blocks", False)
    return " ".join(words + ["ckpt"] * work.get("checkpointing", False))


def add_slowdowns(rows: list[Row]) -> None:
    """Put into each row how many times as long its step takes as that of each baseline that ran."""
    for baseline in ("gpu", "gpu-ours"):
        seconds = next((row["step_seconds"] for row in rows if row["engine"] == baseline and "failed" not in row), None)
        for row in rows:
            if seconds is not None and "failed" not in row:
                row[f"slowdown_{baseline}"] = row["step_seconds"] / seconds


def print_table(mode: str, rows: list[Row]) -> None:
    """Print `rows` in the columns of `mode`; memory in GiB. A run that failed shows why."""
    add_slowdowns(rows)
    columns = COLUMNS[mode]
    lines = [["engine", *(title for title, _ in columns)]]
    lines += [[label(row), *(show(row) for _, show in columns)] for row in rows if "failed" not in row]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    for row in rows:
        if "failed" in row:
            print(f"{label(row)}: {row['failed']}")
    sources = {row["vram_source"] for row in rows if "failed" not in row} - {"none"}
    if sources:
        print(f"VRAM: device memory used ({'; '.join(sorted(sources))}); alloc, resvd: torch's peaks. GiB.")


def loader_verdict(rows: list[Row]) -> str:
    """Whether forked workers changed a loss, and what they cost."""
    lines = []
    for engine in dict.fromkeys(row["engine"] for row in rows):
        runs = [row for row in rows if row["engine"] == engine]
        if any("failed" in row for row in runs):
            lines.append(f"{engine}: a run failed, nothing to compare")
            continue
        alone, *forked = runs
        for row in forked:
            same = "the same losses" if row["losses"] == alone["losses"] else "OTHER LOSSES"
            same += ", the same weights" if row["weights_sha256"] == alone["weights_sha256"] else ", OTHER WEIGHTS"
            ratio = row["step_seconds"] / alone["step_seconds"]
            lines.append(f"{engine}: {row['num_workers']} workers: {same}, {ratio:.3f} x the time of 0 workers")
    return "\n".join(lines)
