"""Run one task: `python -m offloadkit.doors.engines.worker TASK.json ROW.json`, started by runner.py."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from offloadkit import errors
from offloadkit.device.process_memory import DeviceMemory, asked_bytes, forget_peak, let_segments_grow
from offloadkit.doors.engines import forecast
from offloadkit.doors.engines.deepspeed import Zero2, Zero3
from offloadkit.doors.engines.engine import EngineFactory
from offloadkit.doors.engines.ours import Offloadkit
from offloadkit.doors.engines.plain import Baseline
from offloadkit.doors.engines.timing import timed_steps
from offloadkit.doors.engines.work import Batch, Work, num_tokens, random_steps
from offloadkit.facts import hardware
from offloadkit.facts.units import format_bytes
from offloadkit.hf.hub import causes

Row = dict[str, Any]

ENGINES: dict[str, EngineFactory] = {
    "offloadkit": Offloadkit,
    "baseline": Baseline,
    "zero2": Zero2,
    "zero3": Zero3,
}

_FAULTS = (errors.ConfigError, errors.DataError, errors.DownloadError, errors.ModelError, errors.OutputError)
"""Errors in the task's input, which do not depend on the batch size."""


def main(task_path: str, row_path: str) -> None:
    """Run the task and write a row: the figures, or `status` and `reason`."""
    task = json.loads(Path(task_path).read_text())
    try:
        row = {"status": "measured"} | do(task)
    except BaseException as error:  # another engine's library may call sys.exit
        traceback.print_exc()
        row = why(error, task.get("work", {}).get("vram"))
    Path(row_path).write_text(json.dumps(row))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads or process groups of another engine may hang an orderly exit


def do(task: dict[str, Any]) -> Row:
    """A task's row, from its `function` ("module:name") or else its `mode`."""
    if "function" in task:
        row: Row = resolve_name(task["function"])(task)
        return row
    if task["mode"] == "plan":
        return plans(task)
    if task["mode"] == "largest":
        return {"batch_size": forecast.largest_batch(Work(**task["work"]), task["most"], hardware.default_device())}
    return measured(Work(**task["work"]), ENGINES[task["engine"]])


def plans(task: dict[str, Any]) -> Row:
    device = hardware.default_device()
    made: list[Row] = []
    for work in task["works"]:
        try:
            made.append(forecast.as_row(forecast.forecast(Work(**work), device)))
        except errors.OffloadkitError as error:
            made.append({"failed": first_line(error)})
    return {"forecasts": made, "machine": hardware.describe_machine(device)}


def measured(
    work: Work, make_engine: EngineFactory, steps: list[list[Batch]] | None = None, tokens: int | None = None
) -> Row:
    """The engine's figures. None: steps of random tokens, and their number without padding."""
    device = hardware.default_device()
    vram = DeviceMemory(device)
    torch.manual_seed(work.seed)
    dtype = work.dtype_on(device)
    let_segments_grow(device)  # the same allocator for every engine
    steps = random_steps(work, device) if steps is None else steps
    tokens = num_tokens(steps) if tokens is None else tokens
    began = time.perf_counter()
    engine = make_engine(work, dtype, device)
    engine.settle()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory used only for building is not part of training
    forget_peak(device)
    row: Row = {"engine_seconds": time.perf_counter() - began, "dtype": dtype, "num_tokens": tokens}
    row |= timed_steps(engine, steps, work, device, vram)
    row["samples_per_second"] = work.rows / row["step_seconds"]
    row["peak_ram_bytes"] = hardware.process_peak_ram_bytes()
    row |= engine.row()
    return row


def why(error: BaseException, limit: int | None) -> Row:
    """Status and reason of an error; for an error in the task's input also `fault`, its type and message."""
    if isinstance(error, errors.DoesNotFitError):
        return {"status": "does not fit", "reason": first_line(error).removeprefix("the plan ")}
    shortage = next((each for each in causes(error) if isinstance(each, torch.OutOfMemoryError)), None)
    if shortage is not None:
        return {"status": "does not fit", "reason": _out_of_vram(shortage, limit)}
    row: Row = {"status": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"[:300]}
    return row | ({"fault": [type(error).__name__, str(error)]} if isinstance(error, _FAULTS) else {})


def _out_of_vram(error: BaseException, limit: int | None) -> str:
    """The least VRAM that the task needs: allocated bytes plus the failed allocation."""
    needs, has = asked_bytes(error), limit or 0
    with contextlib.suppress(Exception):  # the device may fail to answer after an OOM
        device = hardware.default_device()
        needs += torch.cuda.memory_allocated(device) + hardware.vram_context_bytes(device)
        has = has or torch.cuda.get_device_properties(device).total_memory
    return f"does not fit: needs more than {format_bytes(max(needs, has))} of VRAM, has {format_bytes(has)}"


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
