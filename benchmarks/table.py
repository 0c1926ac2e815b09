"""The one table of figures: benchmarks/results.csv."""

from __future__ import annotations

import csv
import datetime
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""Values by column; an absent value is None."""

PATH = Path(__file__).parent / "results.csv"

COLUMNS: dict[str, type] = {
    "case": str,
    "engine": str,
    "status": str,
    "reason": str,
    "commit": str,
    "date": str,
    "gpu": str,
    "cpu": str,
    "cores": int,
    "ram_bytes": int,
    "torch": str,
    "transformers": str,
    "offloadkit": str,
    "peer": str,
    "model": str,
    "num_parameters": int,
    "batch_size": int,
    "input_length": int,
    "target_length": int,
    "accumulation": int,
    "mask": str,
    "tokens": int,
    "precision": str,
    "dtype": str,
    "recomputed": bool,
    "vram_budget_bytes": int,
    "ram_budget_bytes": int,
    "seconds": float,
    "min_seconds": float,
    "max_seconds": float,
    "turns": int,
    "warmup_steps": int,
    "steps": int,
    "vram_bytes": int,
    "vram_allocated_bytes": int,
    "ram_peak_bytes": int,
    "planned_vram_bytes": int,
    "planned_ram_bytes": int,
    "planned_disk_bytes": int,
    "planned_seconds": float,
    "placements": dict,
    "phases": dict,
    "rates": dict,
    "figures": dict,
    "notes": str,
}
"""Column: type; dicts are JSON. `status` is "measured", "planned", "does not fit" or "failed". `seconds` is a step's:
the median over the turns of each turn's median, `min_seconds` and `max_seconds` the least and the largest of these.
`vram_bytes` is the process's device memory by NVML, `vram_allocated_bytes` torch's peak. `tokens` are those of a step
without padding. `rates` are the machine's, as the plan measured them; `figures` are a case's other numbers, by name."""

BY_WIDTH = "seconds by width"
"""Name in `figures`, of ragged rows: {columns of the inputs: median seconds}, and the "slowest" step's."""


def read(path: Path = PATH) -> list[Row]:
    """All rows, in the order in which they were written; [] where there is no file.

    Raises:
        ValueError: the columns are not `COLUMNS`.
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        lines = csv.reader(file)
        header = next(lines)
        if header != list(COLUMNS):
            raise ValueError(f"{path} has the columns {header}, expected {list(COLUMNS)}: convert it first")
        return [
            {name: _value(text, kind) for text, (name, kind) in zip(line, COLUMNS.items(), strict=True)}
            for line in lines
        ]


def _value(text: str, kind: type) -> Any:
    if text == "":
        return None
    if kind is bool:
        return text == "yes"
    return json.loads(text) if kind is dict else kind(text)


def _text(value: Any, kind: type) -> str:
    if value is None:
        return ""
    if kind is bool:
        return "yes" if value else "no"
    if kind is dict:
        return json.dumps(value, separators=(",", ":"))
    return f"{value:.6g}" if kind is float else str(value)


def write(rows: Iterable[Row], path: Path = PATH) -> None:
    """Replace the file as a whole.

    Raises:
        ValueError: a row has a column that is none of `COLUMNS`.
    """
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(COLUMNS)
    for row in rows:
        if unknown := sorted(set(row) - set(COLUMNS)):
            raise ValueError(f"no such columns: {unknown}; the columns are {list(COLUMNS)}")
        out.writerow([_text(row.get(name), kind) for name, kind in COLUMNS.items()])
    new = path.with_name(f".{path.name}.part")
    new.write_text(text.getvalue())
    new.replace(path)


def append(rows: Iterable[Row], path: Path = PATH) -> None:
    """Write `rows` behind those that are there. Raises as `write`."""
    write([*read(path), *rows], path)


def of_figures(case: str, what: str, figures: Mapping[str, Any], commit: str, notes: str = "") -> Row:
    """A row of a case that measures no step of an engine, on the CPU."""
    row: Row = {"case": case, "engine": what, "status": "measured", "commit": commit, "date": now(), "gpu": "none"}
    return row | {"figures": dict(figures), "notes": notes}


def now() -> str:
    """For the column `date`."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def of_machine(machine: Mapping[str, Any]) -> Row:
    """The columns that say where a row was measured, from what `hardware.describe_machine` gives."""
    return {**{name: machine[name] for name in ("gpu", "cpu", "ram_bytes")}, "cores": machine["num_cores"]}


def latest(rows: Sequence[Row], case: str, engine: str) -> Row | None:
    """The last row of a case and an engine that holds seconds; measured ones come before planned ones."""
    found = [row for row in rows if (row["case"], row["engine"]) == (case, engine) and row["seconds"] is not None]
    measured = [row for row in found if row["status"] == "measured"]
    return (measured or found or [None])[-1]
