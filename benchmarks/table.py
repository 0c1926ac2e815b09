"""The table of figures, benchmarks/results.csv."""

from __future__ import annotations

import csv
import datetime
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""Values by column; a missing value is None."""

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
"""Column: type; dicts are JSON. `status` is "measured", "planned", "does not fit" or "failed". `seconds` are per step:
the median over the turns of each turn's median; `min_seconds` and `max_seconds` are the smallest and largest turn.
`vram_bytes` is the process's device memory by NVML, `vram_allocated_bytes` torch's peak. `tokens` are per step, without
padding. `rates` are the machine's, as measured for the plan; `figures` are further numbers of a case, by name."""

BY_WIDTH = "seconds by width"
"""Name in `figures` of ragged rows: {columns of the inputs: median seconds}, and the seconds of the "slowest" step."""


RANGE = "planned_range"
"""Name in `figures` of the least and the most planned seconds of a step that Python bounds."""
BOUND = "bound_seconds"
"""Name in `figures` of the seconds of the plan's `bound` on the measured machine, for rows as long as planned."""


def read(path: Path = PATH) -> list[Row]:
    """All rows in the order of the file; [] without a file.

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
    """Replace the whole file.

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
    """Append rows to the file. Raises like `write`."""
    write([*read(path), *rows], path)


def of_figures(case: str, what: str, figures: Mapping[str, Any], commit: str, notes: str = "") -> Row:
    """A row of a case on the CPU without steps of an engine."""
    row: Row = {"case": case, "engine": what, "status": "measured", "commit": commit, "date": now(), "gpu": "none"}
    return row | {"figures": dict(figures), "notes": notes}


def beside_bound(measured: Mapping[str, Any]) -> str:
    """ ", 1.2x the bound of 0.296 s" of a row or of a process's figures; "" without a bound."""
    bound = (measured.get("figures") or {}).get(BOUND)
    seconds = measured.get("step_seconds") or measured.get("seconds")
    return f", {seconds / bound:.3g}x the bound of {bound:.3g} s" if bound and seconds else ""


def now() -> str:
    """The present time for the column `date`."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def of_machine(machine: Mapping[str, Any]) -> Row:
    """The columns that describe the machine, from `hardware.describe_machine`."""
    return {**{name: machine[name] for name in ("gpu", "cpu", "ram_bytes")}, "cores": machine["num_cores"]}


def latest(rows: Sequence[Row], case: str, engine: str) -> Row | None:
    """The last row of a case and engine with seconds; a measured row is preferred to a planned one."""
    found = [row for row in rows if (row["case"], row["engine"]) == (case, engine) and row["seconds"] is not None]
    measured = [row for row in found if row["status"] == "measured"]
    return (measured or found or [None])[-1]
