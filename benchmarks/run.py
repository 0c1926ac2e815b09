"""Each engine of each case alone in a fresh process, one after the other; one table row each."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import table
from benchmarks.cases import CASES, ENGINES, Case, EngineSetup, config_of
from benchmarks.ragged import RAGGED_STEPS, steps_of
from benchmarks.table import BY_WIDTH, Row
from offloadkit.doors.engines.timing import BY_LEANER_PLAN
from offloadkit.doors.engines.work import Work

ROOT = Path(__file__).parent.parent
WARMUP, STEPS = 6, 6
"""For every engine: layers that the plan moves between processors have settled after six steps."""
MANY_MICRO_BATCHES, LONG_ROW, FEW_WARMUP, FEW_STEPS = 16, 65_536, 0, 2
"""Warm-up and timed steps where a step has this many micro-batches or more, or rows of this many tokens or more."""
ROUNDS = 3
"""Number of timings of each step with ragged rows."""


def run(
    cases: Sequence[str],
    *,
    engines: Sequence[str] = (),
    turns: int = 1,
    steps: int = STEPS,
    out: Path = table.PATH,
    commit: str | None = None,
    timeout: float = 600.0,
    device: str | None = None,
    verbose: bool = False,
    notes: str = "",
) -> list[Row]:
    """Measure, append a row for each case and engine to `out`, and return these rows.

    Within a case the turns alternate between the engines. The file is written after each process.

    Args:
        engines: keys of `ENGINES`; none: the engines of each case.
        turns: fresh processes for each engine.
        device: "cpu" hides the GPU.
        notes: written into each row.
    """
    commit = commit or git_commit()  # before the table makes the tree dirty
    before, made = table.read(out), []
    for name in cases:
        case = CASES[name]
        found: dict[str, list[Row]] = {engine: [] for engine in engines or case.engines}
        for turn in range(1, turns + 1):
            for engine in found:
                print(f"{name}, {ENGINES[engine].title}, turn {turn} of {turns} ...", end=" ", flush=True)
                raw = _measured(case, ENGINES[engine], steps, timeout, device, verbose)
                found[engine].append(raw)
                print(_said(raw), flush=True)
                done = [
                    row_of(name, case, each, ENGINES[each], raws, commit, notes) for each, raws in found.items() if raws
                ]
                table.write([*before, *made, *done], out)
        made += done
    return made


def parser_for(script: str, document: str, engines: Sequence[str]) -> argparse.ArgumentParser:
    """The command line of a script that measures the cases of one claim; `by_options` measures what it says.

    Args:
        script: module in `benchmarks`.
        document: its docstring.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{script}", description=document.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help="default: all of this claim")
    parser.add_argument("--engines", nargs="+", choices=engines, default=(), help="default: those of each case")
    parser.add_argument("--turns", type=int, default=1, help="processes of each engine")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of a process")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for a process")
    parser.add_argument("--tiny", action="store_true", help="tiny models, for trying it without a GPU")
    parser.add_argument("--verbose", action="store_true", help="show what the processes print")
    parser.add_argument("--out", type=Path, default=table.PATH, help="the table (default: benchmarks/results.csv)")
    parser.add_argument("--commit", help="commit to write down where git is missing")
    return parser


def by_options(options: argparse.Namespace) -> list[Row]:
    """`run` with the options of `parser_for`."""
    names = ("engines", "turns", "steps", "out", "commit", "timeout", "verbose")
    return run(options.cases, **{name: getattr(options, name) for name in names})


def _said(raw: dict[str, Any]) -> str:
    if raw["status"] != "measured":
        return str(raw["reason"])
    sizes = f"VRAM {raw['vram_bytes'] / 2**30:.2f} GiB, RAM {raw['peak_ram_bytes'] / 2**30:.1f} GiB"
    bound = "" if "seconds_by_width" in raw else table.beside_bound(raw)  # the bound is of the longest rows
    return f"{raw['step_seconds']:.4f} s{bound}, {sizes}, {raw['process_seconds']:.0f} s in all"


def _measured(
    case: Case, setup: EngineSetup, steps: int, timeout: float, device: str | None, verbose: bool
) -> dict[str, Any]:
    """One turn; an engine without a plan recomputes activations only if it does not fit otherwise."""
    with tempfile.TemporaryDirectory() as scratch, ended_by_signals():
        config_of(case.model).save_pretrained(scratch)
        if case.mask == "ragged" and not setup.is_door:
            steps = ROUNDS * RAGGED_STEPS
        warmup = WARMUP
        if case.accumulation >= MANY_MICRO_BATCHES or case.input_length >= LONG_ROW:
            steps, warmup = min(steps, FEW_STEPS), FEW_WARMUP
        work = replace(case.work(setup, scratch, tempfile.gettempdir()), steps=steps, warmup=warmup)
        if setup.is_door:
            _write_weights(work, timeout)
        raw = in_fresh_process(work, case, setup, timeout, device, verbose)
        if raw["status"] == "does not fit" and not setup.plans:
            raw = in_fresh_process(replace(work, recomputed=True), case, setup, timeout, device, verbose)
        return raw


def _write_weights(work: Work, timeout: float) -> None:
    """Write the weights for the doors once, in a separate process."""
    from benchmarks.doors import folder_of
    from offloadkit.doors.engines.runner import in_fresh_process

    folder = folder_of(work)
    if not folder.exists():
        task = {"function": "benchmarks.doors:prepare", "work": work.to_dict(), "folder": str(folder)}
        in_fresh_process(task, timeout=timeout, ram=None, log=None)


def in_fresh_process(
    work: Work, case: Case, setup: EngineSetup, timeout: float, device: str | None, verbose: bool
) -> dict[str, Any]:
    from offloadkit.doors.engines.runner import in_fresh_process
    from offloadkit.facts import hardware

    task = {
        "mode": "measure",
        "function": "benchmarks.run:measure_here",
        "engine": setup.engine,
        "work": work.to_dict(),
        "device": device,
    }
    cores = case.cores or hardware.num_cores()
    with tempfile.TemporaryDirectory() as logs:
        log = None if verbose else Path(logs) / "log"
        raw = in_fresh_process(task, timeout=timeout, ram=work.ram, log=log, cores=cores)
        if log is not None and raw["status"] == "failed":
            sys.stderr.write(log.read_text(errors="replace")[-3000:])
    return raw | {"recomputed": work.recomputed}


def measure_here(task: dict[str, Any]) -> dict[str, Any]:
    """The figures of one engine in this process, with the names of the machine and the libraries."""
    import os

    if task["device"] == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from offloadkit import __version__
    from offloadkit.doors.engines.runner import version
    from offloadkit.facts import hardware

    work, name = Work(**task["work"]), task["engine"]
    if name.startswith("offloadkit-"):
        from benchmarks import doors

        row = doors.measured(work, name)
    elif name.startswith("any"):
        from benchmarks import sub_models

        row = sub_models.measured(work, name)
    else:
        from benchmarks.peer_engines import ENGINES as FACTORIES
        from offloadkit.doors.engines import worker

        steps = None if work.mask == "full" else steps_of(work, hardware.default_device())
        row = worker.measured(work, FACTORIES[name], steps)
    machine = dict(hardware.describe_machine(hardware.default_device()))
    versions = {name: version(name) for name in ("torch", "transformers", "deepspeed", "torchao", "roundpipe", "peft")}
    versions["offloadkit"] = __version__  # a checkout need not be installed
    return row | {"machine": machine, "versions": versions}


def row_of(
    name: str, case: Case, engine: str, setup: EngineSetup, raws: list[dict[str, Any]], commit: str, notes: str
) -> Row:
    """The row of one engine's turns: seconds over all turns, the rest of the last turn. `notes` also tell if a turn
    moved to a leaner plan."""
    last = raws[-1]
    moved = BY_LEANER_PLAN if any(raw.get("moves") for raw in raws) else ""
    row: Row = of_case(name, case, setup) | {
        "engine": engine,
        "status": last["status"],
        "reason": last.get("reason"),
        "commit": commit,
        "date": table.now(),
        "recomputed": last["recomputed"],
        "notes": "; ".join(filter(None, [notes, moved])) or None,
    }
    for raw in raws:
        if raw["status"] != "measured":
            return row | {"status": raw["status"], "reason": raw["reason"]}
    seconds = [raw["step_seconds"] for raw in raws]
    machine, versions, planned = last["machine"], last["versions"], last.get("planned", {})
    phases = dict(last["phase_seconds"]) | {
        name: number for name, number in last.get("telemetry_seconds", {}).items() if name in _OWN_PHASES
    }
    return row | {
        **table.of_machine(machine),
        **({"cores": case.cores} if case.cores else {}),
        **{name: versions[name] for name in ("torch", "transformers", "offloadkit")},
        "peer": f"{setup.package} {versions[setup.package]}" if setup.package else None,
        "num_parameters": last["num_parameters"],
        "tokens": last["num_tokens"],
        "dtype": last["dtype"],
        "seconds": median(seconds),
        "min_seconds": min(seconds),
        "max_seconds": max(seconds),
        "turns": len(raws),
        "warmup_steps": last["num_warmup"],
        "steps": len(last["all_step_seconds"]),
        "vram_bytes": max(raw["vram_bytes"] for raw in raws),
        "vram_allocated_bytes": max(raw["max_allocated_bytes"] for raw in raws),
        "ram_peak_bytes": max(raw["peak_ram_bytes"] for raw in raws),
        **{f"planned_{name}": planned.get(name) for name in ("vram_bytes", "ram_bytes", "disk_bytes")},
        "planned_seconds": planned.get("step_seconds"),
        "placements": planned.get("placements"),
        "phases": {name: float(f"{number:.4g}") for name, number in phases.items()},
        "rates": planned.get("hardware"),
        "figures": _figures(case, raws),
    }


def _figures(case: Case, raws: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The figures of the last turn. Ragged rows have no planned range and no bound: both are of the longest rows."""
    last = raws[-1]
    found: dict[str, Any] | None = last.get("figures")
    if case.mask != "ragged" or "seconds_by_width" not in last:
        return found
    return {name: each for name, each in (found or {}).items() if name not in (table.RANGE, table.BOUND)} | _by_width(
        raws
    )


def _by_width(raws: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median over the turns of the seconds of steps of each width, and of the slowest step, for ragged rows."""
    widths = raws[-1]["seconds_by_width"]
    found = {name: median(raw["seconds_by_width"][name] for raw in raws) for name in widths}
    found["slowest"] = median(max(raw["all_step_seconds"]) for raw in raws)
    return {BY_WIDTH: {str(name): float(f"{number:.4g}") for name, number in found.items()}}


_OWN_PHASES = ("cpu_step", "gpu_step", "norm", "gradient_wait", "forward_wait")
"""Phases of offloadkit's telemetry."""


def of_case(name: str, case: Case, setup: EngineSetup) -> Row:
    """The columns that a case decides."""
    limits = case.limits(setup)
    return {
        "case": name,
        "model": case.model,
        "batch_size": case.batch_size,
        "input_length": case.input_length,
        "target_length": case.target_length,
        "accumulation": case.accumulation,
        "mask": case.mask,
        "precision": case.precision if setup.plans else None,
        "dtype": case.dtype,
        "vram_budget_bytes": limits["vram"],
        "ram_budget_bytes": limits["ram"],
    }


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise on SIGTERM and SIGINT, so that a child process in a separate session is ended too.

    Raises:
        SystemExit: such a signal came.
    """

    def end(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second signal would stop the cleanup
        raise SystemExit(f"ended by {signal.Signals(number).name}; rows measured before are in the table")

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


def git_commit() -> str:
    """The commit of the working tree, with "-dirty" if files are changed; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
