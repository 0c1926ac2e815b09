"""One command for every comparison: each engine runs the same work in a fresh process, one after the other.

    python -m benchmarks.run steps --model t5-3b --batch 8 --tokens 512+128 --budget 24
    python -m benchmarks.run startup --model t5-3b --engine offloadkit zero2
    python -m benchmarks.run loader --model t5-base

The table goes to the screen, all figures with machine, versions, commit and date to a JSON file in benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.table import label, loader_verdict, print_table

Row = dict[str, Any]
ROOT = Path(__file__).parent.parent
ENGINE_NAMES = ("gpu", "gpu-ours", "offloadkit", "zero2", "zero3", "ao", "ao-amp", "roundpipe")
PLANNED = {"planned": False, "planned-compiled": True}
"""offloadkit by a plan within each --budget: with compiled blocks?"""
DEFAULT_ENGINES = {"steps": ENGINE_NAMES, "startup": ("offloadkit", "zero2"), "loader": ("offloadkit",)}
LOADER_WORKERS = (0, 4)
MEASURE = "benchmarks.measure"
"""The module that measures one task in a process of its own."""


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run what the command line asks for; print the table, write the result file, return the rows."""
    options = parse(arguments)
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    options.commit = options.commit or git_commit()  # now: a result file of before makes the tree dirty
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        asked = tasks(options)
        if options.mode == "startup":
            folder = options.folder or Path(scratch) / "model"
            save_model(folder, asked[0]["work"], options)
            asked = [{**task, "folder": str(folder), "cold": options.cold} for task in asked]
        elif options.mode == "loader":
            asked = [{**task, "num_workers": num_workers} for task in asked for num_workers in LOADER_WORKERS]
        try:
            for task in asked:
                rows.append(run_aloud(label(task), task, options))
                options.out = write_results(options, rows)
        finally:
            print_table(options.mode, rows)
    if options.mode == "loader":
        print(loader_verdict(rows))
    write_results(options, rows)  # with the slowdowns
    return rows


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; --tokens becomes two numbers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.split("\n", 1)[0])
    parser.add_argument("mode", choices=list(DEFAULT_ENGINES), help="seconds a step | disk to first step | DataLoader")
    parser.add_argument("--model", default="t5-3b", help="t5-small..11b, llama-3.2-3b, llama-3.1-8b, *-tiny")
    names = (*ENGINE_NAMES, *PLANNED)
    parser.add_argument("--engine", nargs="+", choices=names, help="default: all that the mode knows")
    parser.add_argument(
        "--budget", nargs="+", type=float, default=[], metavar="GIB", help="VRAM of planned and planned-compiled"
    )
    parser.add_argument("--batch", type=int, default=8, help="sequences a micro-batch")
    parser.add_argument("--tokens", help="512+128 (encoder+decoder, T5) or 1024 (Llama)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches a step")
    parser.add_argument(
        "--ckpt",
        nargs="*",
        choices=ENGINE_NAMES,
        help="activation checkpointing, of these engines (none named: of all; a plan decides by itself)",
    )
    parser.add_argument(
        "--attention",
        default="default",
        help="of offloadkit and gpu-ours: default (what finetune has), eager, sdpa",
    )
    parser.add_argument("--vram", type=float, default=0.0, metavar="GIB", help="cap on torch's VRAM, but for planned")
    parser.add_argument("--cores", type=int, default=0, help="CPU cores to bind to")
    parser.add_argument("--steps", type=int, default=6, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="run without the GPU")
    parser.add_argument("--timeout", type=int, default=900, help="seconds for one engine")
    parser.add_argument("--folder", type=Path, help="startup: where the model is kept (default: a temporary folder)")
    parser.add_argument("--cold", action="store_true", help="startup: evict the model from the page cache first")
    parser.add_argument("--out", type=Path, help="result file (default: a new one in benchmarks/results)")
    parser.add_argument("--commit", help="commit to write down where git is missing")
    parser.add_argument("--verbose", action="store_true", help="show what the engines print")
    options = parser.parse_args(arguments)
    options.engine = options.engine or [*DEFAULT_ENGINES[options.mode], *(PLANNED if options.budget else ())]
    planned = [name for name in options.engine if name in PLANNED]
    if bool(planned) != bool(options.budget):
        parser.error("--engine planned and planned-compiled take --budget GIB, and nothing else does: give both")
    if planned and options.mode != "steps":
        parser.error(f"{planned[0]} runs in mode steps, got {options.mode}: take --engine offloadkit")
    if options.ckpt == []:
        options.ckpt = list(ENGINE_NAMES)
    is_t5 = options.model.startswith("t5")
    numbers = (options.tokens or ("512+128" if is_t5 else "1024")).split("+")
    if len(numbers) != 1 + is_t5 or not all(number.isdigit() for number in numbers):
        parser.error(f"--tokens of {options.model} look like {'512+128' if is_t5 else '1024'}, got {options.tokens}")
    options.numbers = [int(number) for number in numbers]
    return options


def tasks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What is measured, in order: each engine once, by a plan once a budget."""
    found: list[dict[str, Any]] = []
    for name in options.engine:
        task, work = {"mode": options.mode, "engine": name}, work_of(options)
        if name in PLANNED:
            task["engine"], own = "planned", {"vram_cap_gib": 0.0, "compile_blocks": PLANNED[name]}
            found += [{**task, "work": work | own | {"vram_budget_gib": budget}} for budget in options.budget]
        else:
            found.append({**task, "work": work | {"checkpointing": name in (options.ckpt or ())}})
    return found


def work_of(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of `workloads.Workload` that all engines share, as JSON carries them."""
    return {
        "model": options.model,
        "batch_size": options.batch,
        "tokens": options.numbers[0],
        "target_tokens": options.numbers[1] if len(options.numbers) > 1 else 0,
        "accumulation": options.accumulation,
        "checkpointing": False,
        "attention": options.attention,
        "vram_cap_gib": options.vram,
        "cores": options.cores,
        "steps": options.steps,
        "warmup": options.warmup,
    }


def save_model(folder: Path, work: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the random model as safetensors into `folder`, unless one of that shape is there already."""
    written_for = folder / "benchmark.json"
    shape = json.dumps({"model": work["model"]})
    if written_for.exists() and written_for.read_text() == shape:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    row = run_task(
        {"mode": "save", "engine": "gpu", "work": {**work, "vram_cap_gib": 0.0}, "folder": str(folder)}, options
    )
    if "failed" in row:
        raise SystemExit(f"the model could not be saved: {row['failed']}")
    written_for.write_text(shape)


def run_aloud(name: str, task: dict[str, Any], options: argparse.Namespace) -> Row:
    """`run_task`, with a line that says what runs, and what a step took or why there is none."""
    print(f"{name} ...", end=" ", flush=True, file=sys.stderr)
    row = run_task(task, options)
    print(row.get("failed") or f"{row['step_seconds']:.3f} s a step", file=sys.stderr)
    return row


def run_task(task: dict[str, Any], options: argparse.Namespace) -> Row:
    """Measure one task in a fresh process; what goes wrong there becomes the row's `failed`."""
    from offloadkit.comparing.runner import in_fresh_process

    asked: Row = {key: value for key, value in task.items() if key != "folder"}
    with tempfile.TemporaryDirectory() as scratch:
        log = None if options.verbose else Path(scratch) / "log"
        with ended_by_signals():
            row = in_fresh_process(task, timeout=options.timeout, ram=None, log=log, module=MEASURE)
    return asked | ({"failed": row["reason"]} if "status" in row else row)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT raise here, so that the process being waited for, which has a session of its own, is ended.

    By default SIGTERM ends this process alone, and a shell's background jobs ignore SIGINT.

    Raises:
        SystemExit: such a signal came.
    """

    def end(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second one would stop the clearing up
        raise SystemExit(f"ended by {signal.Signals(number).name}: what ran is ended, rows measured before are written")

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


def write_results(options: argparse.Namespace, rows: list[Row]) -> Path:
    """One JSON file: {machine, versions, commit, date, mode, command, rows}."""
    now = datetime.datetime.now(datetime.UTC)
    machine = next((row["machine"] for row in rows if "machine" in row), {})
    result = {
        "machine": machine,
        "versions": next((row["versions"] for row in rows if "versions" in row), {}),
        "commit": options.commit or git_commit(),
        "date": now.isoformat(timespec="seconds"),
        "mode": options.mode,
        "rows": [{key: value for key, value in row.items() if key not in ("machine", "versions")} for row in rows],
    }
    path = options.out or ROOT / "benchmarks" / "results" / f"{now:%Y%m%d-%H%M%S}-{options.mode}-{options.model}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")
    return path


def git_commit() -> str:
    """The commit of the working tree, "-dirty" where it holds more than that."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


if __name__ == "__main__":
    main()
