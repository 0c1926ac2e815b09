"""Learning under memory savings: final losses of the precisions, and of fp16 compared with fp32.

    python -m benchmarks.learning precisions            # exact, compact, tiny on two tasks, five seeds each
    python -m benchmarks.learning fp16                  # 300 steps of T5 v1.0 and v1.1 in fp32, fp16 and bf16

`precisions`: a precision learns if its mean held-out loss lies within two standard deviations (over the seeds) of
`exact`. The tasks are the demo's, and a small Llama that reads source code as bytes. A seed decides initial weights,
order of the rows and stochastic rounding; the rows are the same for all seeds. `fp16`: no loss is NaN, and the mean of
the last 30 losses is within 2 % of fp32's, with equal weights and batches.

Small models leave most of a machine idle, so `--jobs` runs go side by side, each on its share of the cores.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks import table
from benchmarks.learning_tasks import LAST, Trial, run_trial
from benchmarks.run import git_commit

Row = dict[str, Any]

PRECISIONS = ("exact", "compact", "tiny")
DTYPES = ("fp32", "fp16", "bf16")
TASKS = {"precisions": ("demo", "llama"), "fp16": ("t5 v1.0", "t5 v1.1")}
NUM_DEVIATIONS = 2.0
"""Tolerance of a precision's mean, in standard deviations of `exact`."""
FP16_BOUND = 0.02
"""Tolerance of fp16's final loss, relative to fp32's."""


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run the selected mode, print the table, write the result file, and return its rows."""
    options = parse(arguments)
    trials = trials_of(options)
    print(f"{len(trials)} trainings, {options.jobs} at a time", file=sys.stderr)
    rows = run_trials(trials, options.jobs)
    summaries = compare_precisions(rows) if options.mode == "precisions" else compare_dtypes(rows)
    for line in lines_of(options.mode, summaries):
        print(line)
    for row in rows:
        if "failed" in row:
            print(f"{name_of(row)}: {row['failed']}")
    commit = options.commit or git_commit()
    table.write([*table.read(options.out), *(_in_table(row, commit) for row in summaries)], options.out)
    return summaries + rows


def _in_table(summary: Row, commit: str) -> table.Row:
    """A summary as a row of results.csv: the case is the task, the engine a precision or dtype."""
    from offloadkit.facts import hardware

    machine = hardware.describe_machine(hardware.default_device())
    kind = "precision" if "precision" in summary else "dtype"
    figures = {name: value for name, value in summary.items() if name not in ("task", kind)}
    return {
        "case": f"learning, {summary['task']}",
        "engine": summary[kind],
        "status": "failed" if summary["verdict"] == "failed" else "measured",
        "commit": commit,
        "date": table.now(),
        **table.of_machine(machine),
        kind: summary[kind],
        "figures": {
            name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in figures.items()
        },
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__.split("\n", 1)[0])
    parser.add_argument("mode", choices=list(TASKS), help="exact, compact, tiny | fp32, fp16, bf16")
    parser.add_argument("--task", nargs="+", help="default: both of the mode's")
    parser.add_argument("--seeds", type=int, default=5, help="precisions: trainings of each kind")
    parser.add_argument("--steps", type=int, help="default: 700 (demo), 600 (llama), 300 (fp16)")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, len(os.sched_getaffinity(0)) // 2)))
    parser.add_argument("--tiny", action="store_true", help="models and batches for trying it without a GPU")
    parser.add_argument("--out", type=Path, default=table.PATH, help="the table (default: benchmarks/results.csv)")
    parser.add_argument("--commit", help="commit to write down where git is missing")
    options = parser.parse_args(arguments)
    options.task = options.task or list(TASKS[options.mode])
    for task in options.task:
        if task not in TASKS[options.mode]:
            parser.error(
                f"--task of {options.mode} is one of {', '.join(map(repr, TASKS[options.mode]))}; got {task!r}"
            )
    if options.seeds < 2:
        parser.error(f"--seeds must be at least 2, for a standard deviation; got {options.seeds}")
    for name in ("steps", "jobs"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name} must be at least 1, got {value}")
    return options


def trials_of(options: argparse.Namespace) -> list[Trial]:
    """All trainings of a mode; trainings that are compared are neighbours."""
    common: dict[str, Any] = {"steps": options.steps, "tiny": options.tiny}
    if options.mode == "fp16":
        return [Trial(task, dtype=dtype, **common) for task in options.task for dtype in DTYPES]
    return [
        Trial(task, precision, seed=seed, **common)
        for task in options.task
        for seed in range(options.seeds)
        for precision in PRECISIONS
    ]


def name_of(row: Row) -> str:
    """The name of a row's training."""
    return f"{row['task']}, {row['precision']}, {row['dtype']}, seed {row['seed']}"


# ---- processes -------------------------------------------------------------------------------------------------------


def run_trials(trials: Sequence[Trial], jobs: int) -> list[Row]:
    """A row for each trial, in order; with one job in this process."""
    rows: dict[Trial, Row] = {}
    for trial, row in _finished(trials, jobs):
        rows[trial] = row
        text = row.get("failed") or f"loss {row['first_loss']:.4f} -> {row['train_loss']:.4f}, {row['seconds']:.0f} s"
        print(f"{len(rows)}/{len(trials)} {name_of(row)}: {text}", file=sys.stderr)
    return [rows[trial] for trial in trials]


def _finished(trials: Sequence[Trial], jobs: int) -> Iterator[tuple[Trial, Row]]:
    if jobs == 1:
        yield from ((trial, run_trial(trial)) for trial in trials)
        return
    context = multiprocessing.get_context("spawn")  # a forked child cannot use CUDA
    shares = context.Queue()
    for share in core_shares(jobs):
        shares.put(share)
    with (
        tempfile.TemporaryDirectory() as scratch,
        ProcessPoolExecutor(jobs, context, initializer=_begin_worker, initargs=(shares, scratch)) as pool,
    ):
        futures = {pool.submit(run_trial, trial): trial for trial in trials}
        yield from ((futures[future], future.result()) for future in as_completed(futures))


def core_shares(jobs: int) -> list[list[int]]:
    """The cores of this process divided over `jobs`; jobs share cores if there are more jobs than cores."""
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // jobs)
    return [[cores[(job * size + index) % len(cores)] for index in range(size)] for job in range(jobs)]


def _begin_worker(shares: Any, scratch: str) -> None:
    """Bind the worker before a library counts cores; rates measured here are not cached for the machine."""
    cores = shares.get()
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    os.environ["XDG_CACHE_HOME"] = scratch


# ---- summaries -------------------------------------------------------------------------------------------------------


def compare_precisions(rows: Sequence[Row]) -> list[Row]:
    """For each task and precision, the mean held-out loss and its distance from `exact`.

    `difference_in_sds` and `train_difference_in_sds` are in standard deviations (of a sample, over the seeds) of
    `exact`; positive means a higher loss. `paired_difference` is the mean difference between trainings with the same
    seed, and `paired_error` its standard error: they detect smaller effects, because a seed moves both losses alike.
    """
    summaries = []
    for task in dict.fromkeys(row["task"] for row in rows):
        by_precision: dict[str, list[Row]] = {}
        for row in rows:
            if row["task"] == task:
                by_precision.setdefault(row["precision"], []).append(row)
        reference = by_precision["exact"]
        for precision, runs in by_precision.items():
            summary: Row = {"task": task, "precision": precision, "num_seeds": len(runs)}
            if any("failed" in row for row in (*runs, *reference)):
                summary["verdict"] = "failed"
            elif not all(math.isfinite(row["held_out_loss"] + row["train_loss"]) for row in (*runs, *reference)):
                summary["verdict"] = "NOT within"
            else:
                summary |= _distance(runs, reference)
                if precision == "exact":
                    summary["verdict"] = "reference"
            summaries.append(summary)
    return summaries


def _distance(runs: Sequence[Row], reference: Sequence[Row]) -> Row:
    losses, exact = ([row["held_out_loss"] for row in part] for part in (runs, reference))
    train, exact_train = ([row["train_loss"] for row in part] for part in (runs, reference))
    pairs = [own - other for own, other in zip(losses, exact, strict=True)]
    difference = (fmean(losses) - fmean(exact)) / stdev(exact)
    within = abs(difference) <= NUM_DEVIATIONS
    matches = [row["exact_match"] for row in runs if row["exact_match"] is not None]
    return {
        "mean": fmean(losses),
        "sd": stdev(losses),
        "exact_sd": stdev(exact),
        "difference_in_sds": difference,
        "train_mean": fmean(train),
        "train_difference_in_sds": (fmean(train) - fmean(exact_train)) / stdev(exact_train),
        "paired_difference": fmean(pairs),
        "paired_error": stdev(pairs) / math.sqrt(len(pairs)),
        "exact_match": fmean(matches) if matches else None,
        "verdict": "within" if within else "lower" if difference < 0 else "NOT within",
    }


def compare_dtypes(rows: Sequence[Row]) -> list[Row]:
    """For each task and dtype, the final loss (mean of the last 30 losses) and its relative difference from fp32's, the
    mean and largest relative difference of single losses, NaN losses, skipped steps, and whether the bound holds."""
    summaries = []
    for task in dict.fromkeys(row["task"] for row in rows):
        runs = {row["dtype"]: row for row in rows if row["task"] == task}
        for dtype, row in runs.items():
            summary: Row = {"task": task, "dtype": dtype, "bound": FP16_BOUND}
            if "failed" in row or "failed" in runs["fp32"]:
                summary["verdict"] = "failed"
            else:
                reference = runs["fp32"]
                off = [abs(own / other - 1) for own, other in zip(row["losses"], reference["losses"], strict=True)]
                relative = row["train_loss"] / reference["train_loss"] - 1
                holds = row["num_nan_losses"] == 0 and abs(relative) <= FP16_BOUND
                summary |= {name: row[name] for name in ("first_loss", "train_loss", "num_nan_losses", "num_skipped")}
                summary |= {"relative": relative, "mean_relative": fmean(off), "largest_relative": max(off)}
                summary["verdict"] = "reference" if dtype == "fp32" else "holds" if holds else "DOES NOT HOLD"
            summaries.append(summary)
    return summaries


COLUMNS = {
    "precisions": {
        "precision": "",
        "mean": ".5f",
        "exact_sd": ".5f",
        "difference_in_sds": "+.2f",
        "paired_difference": "+.5f",
        "paired_error": ".5f",
        "train_mean": ".5f",
        "train_difference_in_sds": "+.2f",
        "exact_match": ".3f",
    },
    "fp16": {
        "dtype": "",
        "first_loss": ".4f",
        "train_loss": ".4f",
        "relative": "+.3%",
        "mean_relative": ".3%",
        "largest_relative": ".3%",
        "num_nan_losses": "d",
        "num_skipped": "d",
    },
}


def lines_of(mode: str, summaries: Iterable[Row]) -> list[str]:
    """One line for each summary, and an explanation of the verdict."""
    columns = COLUMNS[mode]
    lines = [["task", *columns, "verdict"]]
    for row in summaries:
        cells = ["-" if (value := row.get(name)) is None else format(value, form) for name, form in columns.items()]
        lines.append([row["task"], *cells, row["verdict"]])
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    if mode == "precisions":
        text.append(f"within: mean held-out loss at most {NUM_DEVIATIONS:g} standard deviations from that of exact")
    else:
        text.append(f"holds: no NaN, and the mean of the last {LAST} losses within {FP16_BOUND:.0%} of that of fp32")
    return text


if __name__ == "__main__":
    main()
