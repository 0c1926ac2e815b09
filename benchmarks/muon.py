"""Compare Muon with AdamW: cost of a step, seconds of Newton-Schulz, learning, and one update on CPU and GPU.

    python -m benchmarks.muon                              # everything: about three minutes on an H100
    python -m benchmarks.muon --parts steps --cases muon-t5-3b --steps 12
    python -m benchmarks.muon --tiny --out /tmp/rows.csv   # a try without a GPU

Parts, and the rows that they append:

- `steps`: each case by offloadkit and offloadkit-muon. Seconds, VRAM and RAM of a training step, planned and measured.
- `matrices`: each case, "step of matrices". Seconds of the steps of all matrices and of their Newton-Schulz iterations,
  planned and measured, and their share of the training step.
- `learning`: "learning, demo" by adamw and muon. Losses of the demo with the same learning rate.
- `update`: "one update" by cpu and cuda. Relative difference (Frobenius) of one update, which is at most `LIMIT`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import run, table
from benchmarks.cases import CASES, ENGINES, Case, config_of
from benchmarks.learning_tasks import Trial, run_trial
from benchmarks.table import Row
from offloadkit.doors.engines.forecast import planned
from offloadkit.doors.engines.work import model_to_plan
from offloadkit.facts import hardware
from offloadkit.facts.config import MuonOptions
from offloadkit.facts.fitted import STEP_EFFICIENCY
from offloadkit.facts.units import format_bytes
from offloadkit.kernels.muon import step_matrices
from offloadkit.offload.matrix_steps import workspace
from offloadkit.optim.muon import MuonScalars, muon_scalars
from offloadkit.optim.reference import join_master
from offloadkit.optim.table import FlatState, LayerKind, Matrix, Segment
from offloadkit.planner.seconds import newton_schulz_seconds

PARTS = ("steps", "matrices", "learning", "update")
MUON = "offloadkit-muon"
LIMIT = 0.03
"""Largest relative difference of one update between two kinds of device."""
SHAPES = ((1024, 16384), (16384, 1024), (1024, 4096), (3072, 3072))
"""Matrices of T5-3B and of a Llama of 3 billion parameters."""
TINY_SHAPES = ((64, 128), (128, 64), (64, 64))
_REPEATS = 5


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure the parts that the command line names, append their rows to the table, and return the rows."""
    options = parse(arguments)
    commit, rows = options.commit or run.git_commit(), []
    if "steps" in options.parts:  # in fresh processes, before this process takes VRAM
        rows += run.run(
            options.cases, engines=("offloadkit", MUON), steps=options.steps, out=options.out, commit=commit
        )
        for line in map(_steps_line, rows):
            print(line)
    more = []
    if "matrices" in options.parts:
        more += [
            _row(name, "step of matrices", time_matrices(CASES[name], rows, name), commit) for name in options.cases
        ]
    if "learning" in options.parts:
        more += learning(options.learning_steps, options.seeds, tiny=options.tiny, commit=commit)
    if "update" in options.parts:
        more += [_row("one update", device, found, commit) for device, found in updates(options.tiny).items()]
    for row in more:
        print(f"{row['case']}, {row['engine']}: {row['figures']}")
    table.append(more, options.out)
    return rows + more


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.muon", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help="default: T5-3B and Llama-3B")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a process")
    parser.add_argument("--learning-steps", type=int, help="default: 300")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of the demo with each optimizer")
    parser.add_argument("--tiny", action="store_true", help="tiny models and matrices, for trying it without a GPU")
    parser.add_argument("--out", type=Path, default=table.PATH, help="the table (default: benchmarks/results.csv)")
    parser.add_argument("--commit", help="commit to write down where git is missing")
    options = parser.parse_args(arguments)
    options.cases = options.cases or (["tiny-muon"] if options.tiny else ["muon-t5-3b", "muon-llama-3b"])
    options.learning_steps = options.learning_steps or (20 if options.tiny else 300)
    return options


def _row(case: str, engine: str, figures: dict[str, Any], commit: str, status: str = "measured") -> Row:
    machine = hardware.describe_machine(hardware.default_device())
    rounded = {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in figures.items()}
    row: Row = {"case": case, "engine": engine, "status": status, "commit": commit, "date": table.now()}
    return row | table.of_machine(machine) | {"torch": str(torch.__version__), "figures": rounded}


def _steps_line(row: Row) -> str:
    if row["status"] != "measured":
        return f"{row['case']}, {row['engine']}: {row['status']}, {row['reason']}"
    pairs = [("seconds", row["seconds"], row["planned_seconds"])]
    pairs += [
        (tier, row[f"{tier}_bytes" if tier == "vram" else "ram_peak_bytes"], row[f"planned_{tier}_bytes"])
        for tier in ("vram", "ram")
    ]
    said = [
        f"{name} {_shown(measured)} (planned {_shown(by_plan)})"
        for name, measured, by_plan in pairs
        if measured is not None
    ]
    return f"{row['case']}, {row['engine']}: {', '.join(said)}"


def _shown(value: float | int | None) -> str:
    return "unknown" if value is None else format_bytes(value) if isinstance(value, int) else f"{value:.4f}"


# ---- steps of matrices ----------------------------------------------------------------------------------------------


def time_matrices(case: Case, measured: Sequence[Row] = (), name: str = "") -> dict[str, Any]:
    """Seconds of the steps of all matrices of a case's model with states in VRAM, measured and planned.

    Args:
        measured: rows of `steps`. A row of the case `name` gives the measured seconds of a training step.
    """
    device = hardware.default_device()
    with tempfile.TemporaryDirectory() as folder:
        config_of(case.model).save_pretrained(folder)
        work = case.work(ENGINES[MUON], folder, folder)
        _, plan = planned(model_to_plan(folder), work, device)
    layers = [layer for layer in plan.layers if layer.matrices]
    step, newton_schulz = 0.0, 0.0
    for (matrix, kind), count in Counter((each, layer.kind) for layer in layers for each in layer.matrices).items():
        of_step, of_newton_schulz = _time_matrix(matrix, kind, device)
        step, newton_schulz = step + count * of_step, newton_schulz + count * of_newton_schulz
    machine = plan.basis.hardware
    assert machine is not None
    flops = sum(matrix.flops for layer in layers for matrix in layer.matrices)
    bandwidth = machine.vram_bytes_per_second * STEP_EFFICIENCY
    planned_iterations = sum(newton_schulz_seconds(matrix, machine) for layer in layers for matrix in layer.matrices)
    planned_traffic = sum(layer.step_bytes(case.accumulation) for layer in layers) / bandwidth
    row = next((row for row in measured if (row["case"], row["engine"]) == (name, MUON)), None)
    of_all = row["seconds"] if row and row["seconds"] else plan.seconds.step if plan.seconds else None
    return {
        "num_matrices": sum(len(layer.matrices) for layer in layers),
        "flops": flops,
        "step_seconds": step,
        "planned_step_seconds": planned_iterations + planned_traffic,
        "newton_schulz_seconds": newton_schulz,
        "planned_newton_schulz_seconds": planned_iterations,
        "newton_schulz_flops_per_second": flops / newton_schulz,
        "planned_flops_per_second": machine.bf16_flops_per_second,
        "share_of_training_step": newton_schulz / of_all if of_all else None,
        "training_step": "measured" if row and row["seconds"] else "planned",
    }


def _time_matrix(matrix: Matrix, kind: LayerKind, device: torch.device) -> tuple[float, float]:
    """Seconds of one step of a matrix, and of its Newton-Schulz iterations alone."""
    numel = matrix.rows * matrix.columns
    generator = torch.Generator(device).manual_seed(0)
    state = _state(torch.randn(numel, device=device, generator=generator) * 0.02, kind)
    gradient = torch.randn(numel, device=device, generator=generator).to(kind.weights_dtype)
    scalars = _scalars()
    memory = workspace(device, [matrix], MuonOptions())
    segments = [Segment(0, numel, scalars, matrix=matrix)]
    memory.staged(matrix).copy_(matrix.of(gradient))
    return (
        _seconds(lambda: step_matrices(state, gradient, segments, 1.0, memory), device),
        _seconds(lambda: memory.orthogonalized(matrix, MuonScalars(*scalars)), device),  # type: ignore[arg-type]
    )


def _scalars() -> tuple[float, ...]:
    return muon_scalars(lr=1e-3, options=MuonOptions(), step=1)


def _state(master: torch.Tensor, kind: LayerKind) -> FlatState:
    """A state with these master weights, and zeros in the other arrays."""
    weights = master.to(kind.weights_dtype)
    state = FlatState.cut(
        kind.states, weights, lambda numel, dtype: torch.zeros(numel, dtype=dtype, device=master.device)
    )
    if kind.dtype == "fp16":
        state["remainder"].copy_(master)
    return state


def _seconds(operation: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of one call, after a first call."""
    found = []
    for _ in range(1 + _REPEATS):
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            operation()
            ended.record()
            torch.cuda.synchronize(device)
            found.append(began.elapsed_time(ended) / 1000)
        else:
            at = time.perf_counter()
            operation()
            found.append(time.perf_counter() - at)
    return median(found[1:])


# ---- learning -------------------------------------------------------------------------------------------------------


def learning(steps: int, seeds: int, *, tiny: bool, commit: str) -> list[Row]:
    """The demo trained with either optimizer: one row for each optimizer and seed."""
    rows = []
    for seed in range(seeds):
        for optimizer in ("adamw", "muon"):
            found = run_trial(Trial("demo", seed=seed, steps=steps, tiny=tiny, optimizer=optimizer))
            names = ("first_loss", "train_loss", "held_out_loss", "exact_match", "curve", "seconds", "steps", "failed")
            figures = {"seed": seed} | {name: found[name] for name in names if name in found}
            if "curve" in figures:
                figures["curve"] = [float(f"{loss:.4g}") for loss in figures["curve"]]
            rows.append(
                _row("learning, demo", optimizer, figures, commit, "failed" if "failed" in found else "measured")
            )
    return rows


# ---- one update on two devices --------------------------------------------------------------------------------------


def updates(tiny: bool) -> dict[str, dict[str, Any]]:
    """One update of each shape on the CPU and, if there is one, on the GPU: norms, and differences from the CPU's.

    The singular values of the gradient decay as in training, so Newton-Schulz sees large and small singular values.
    """
    devices = dict.fromkeys([torch.device("cpu"), hardware.default_device()])
    found: dict[str, dict[str, Any]] = {device.type: {"limit": LIMIT} for device in devices}
    for rows, columns in TINY_SHAPES if tiny else SHAPES:
        made = {device.type: _update(rows, columns, device) for device in devices}
        for device, update in made.items():
            shape = f"{rows}x{columns}"
            found[device][f"norm of {shape}"] = float(update.norm())
            found[device][f"difference of {shape}"] = float((update - made["cpu"]).norm() / made["cpu"].norm())
    for figures in found.values():
        figures["largest_difference"] = max(value for name, value in figures.items() if name.startswith("difference"))
        figures["verdict"] = "holds" if figures["largest_difference"] <= LIMIT else "DOES NOT HOLD"
    return found


def _update(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """The change of fp64 master weights by one step, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    rank = min(rows, columns, 64)
    left, right = (torch.randn(size, rank, generator=generator) for size in (rows, columns))
    gradient = (left * torch.logspace(0, -3, rank)) @ right.T + 1e-3 * torch.randn(rows, columns, generator=generator)
    kind, matrix = LayerKind("bf16", "muon"), Matrix(rows, columns)
    state = _state((torch.randn(rows * columns, generator=generator) * 0.02).to(device), kind)
    before = join_master(state.weights, state["remainder"]).double().cpu()
    segments = [Segment(0, rows * columns, _scalars(), matrix=matrix)]
    step_matrices(state, gradient.flatten().bfloat16().to(device), segments, 1.0)
    return join_master(state.weights, state["remainder"]).double().cpu() - before


if __name__ == "__main__":
    main()
