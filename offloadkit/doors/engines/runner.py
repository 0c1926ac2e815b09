"""Run tasks in fresh processes one at a time, within RAM and time limits, and keep their results."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch

from offloadkit.checkpoint.folder import explained_write_errors, writable
from offloadkit.device.process_memory import tree_ram_bytes
from offloadkit.doors.engines.work import Work
from offloadkit.errors import ConfigError, shown
from offloadkit.facts import hardware
from offloadkit.facts.units import format_bytes, rounded
from offloadkit.facts.version import __version__

Row = dict[str, Any]
Task = dict[str, Any]

_PACKAGES = ("torch", "transformers", "deepspeed")
_LOOK_SECONDS = 0.1
_SETTLED = ("measured", "does not fit")
"""Statuses of rows that are kept; other rows are run again."""

_STARTING_SECONDS = 600.0
_TIMES_PLANNED = 10.0
"""Default timeout: `_STARTING_SECONDS` plus this multiple of the planned seconds."""

_TIED_TO_ITS_PARENT = """
import os, runpy, signal, sys, threading

def end_with_parent(pipe):
    os.read(pipe, 1)  # until the other end closes, which happens when the parent ends, however it does
    os.killpg(0, signal.SIGKILL)

_, pipe, cores, module, *sys.argv[1:] = sys.argv
if int(cores):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])
    os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
threading.Thread(target=end_with_parent, args=(int(pipe),), daemon=True).start()
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""Runs a module like `python -m`, bound to the first `cores` cores before any library counts cores (0: not bound), and
ends with its parent: a child of a killed parent would keep using the GPU and distort the next measurement.
"""


class Runs:
    """Rows by task in a folder. A row is reused as long as the task, machine and versions are the same."""

    def __init__(self, folder: Path, timeout: float | None) -> None:
        """
        Args:
            folder: existing folder for rows/ and logs/.
            timeout: seconds per task; None: derived from planned seconds.

        Raises:
            ConfigError: `timeout` is not a positive number.
            OutputError: `folder` is not writable.
        """
        number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (number and timeout > 0):
            raise ConfigError(f"timeout must be a positive number of seconds, or None; got {shown(timeout)}")
        self.folder, self._timeout = folder, timeout
        self._rows, self._logs = writable(folder / "rows"), writable(folder / "logs")
        self.environment = environment()

    def row(self, task: Task, ram: int | None = None, planned_seconds: float = 0.0) -> Row:
        """The kept row of `task`, or the result of running it in a fresh process.

        A row is {"status": "measured" | "does not fit" | "failed", "reason": ..., figures}.

        Args:
            task: argument of worker.py in JSON types. `function` is not part of the row's key.
            ram: bytes of RAM for the process and its children; they are killed above it.
            planned_seconds: of the steps, for the default timeout.
        """
        named = {name: value for name, value in task.items() if name != "function"}
        settings = {"task": named, "environment": self.environment}
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        path = self._rows / f"{key}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # missing or unknown file
            kept: Row = json.loads(path.read_text())["row"]
            if kept["status"] in _SETTLED:
                return kept | {"kept": True}
        timeout = self._timeout or _STARTING_SECONDS + _TIMES_PLANNED * planned_seconds
        row = in_fresh_process(task, timeout=timeout, ram=ram, log=self._logs / f"{key}.log")
        write_whole(path, lambda new: new.write_text(json.dumps({**settings, "row": row}, indent=1) + "\n"))
        return row

    def measured(self, engine: str, work: Work, planned_seconds: float) -> Row:
        task = {"mode": "measure", "engine": engine, "work": work.to_dict()}
        return self.row(task, work.ram, planned_seconds)


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file, then rename it to `path`. Raises `OutputError`; `path` is unchanged then."""
    new = path.with_name(f".{path.name}.part")
    with explained_write_errors(path):
        try:
            write(new)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


def environment() -> dict[str, str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found = {"offloadkit": __version__, "cpu": hardware.cpu_name(), "num_cores": str(hardware.num_cores()), "gpu": gpu}
    return found | {package: version(package) for package in _PACKAGES}


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def in_fresh_process(
    task: Task,
    *,
    timeout: float,
    ram: int | None,
    log: Path | None,
    module: str = "offloadkit.doors.engines.worker",
    cores: int = 0,
) -> Row:
    """Run one task; returns a row whatever happens to the process. The process ends when this one does.

    RAM is polled ten times per second, because users lack the rights to create cgroups.

    Args:
        log: file for the process's output; None: inherit this process's output.
        module: module to run with two arguments: the task's file and the row's file.
        cores: bind the process to this many of the first available cores; 0 does not bind.
    """
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as opened:
        output = opened.enter_context(log.open("wb")) if log is not None else None
        task_path, row_path = Path(scratch) / "task.json", Path(scratch) / "row.json"
        task_path.write_text(json.dumps(task))
        began = time.monotonic()
        process = _started(module, task_path, row_path, output, opened, cores)
        try:
            peak, killed = _watch(process, timeout, ram)
        finally:
            _end(process)
        if killed is not None:
            return killed
        seconds = time.monotonic() - began
        if row_path.exists():
            row: Row = json.loads(row_path.read_text())
            peak = max(peak, row.get("peak_ram_bytes", 0))  # polling may miss a short peak
            if ram is not None and peak > ram and row["status"] == "measured":
                row = too_much_ram(ram)
            return {"process_seconds": seconds} | row
    status = process.returncode
    reason = f"killed by signal {-status} (out of RAM?)" if status < 0 else f"exit {status}"
    return {"status": "failed", "reason": f"{reason}: {last_line(log)}"}


def _started(
    module: str, task_path: Path, row_path: Path, output: IO[bytes] | None, opened: contextlib.ExitStack, cores: int
) -> subprocess.Popen[bytes]:
    # Use the package of this process, and never prompt on a terminal.
    paths = filter(None, [str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH")])
    variables = {"PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false", "DS_SKIP_CUDA_CHECK": "1"}
    watched, held = os.pipe()
    opened.callback(os.close, held)
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _TIED_TO_ITS_PARENT, str(watched), str(cores), module, task_path, row_path],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            start_new_session=True,
            pass_fds=(watched,),
        )
    finally:
        os.close(watched)


def _watch(process: subprocess.Popen[bytes], timeout: float, ram: int | None) -> tuple[int, Row | None]:
    """Wait for the process. Returns its observed peak RAM in bytes, and a row if it had to be killed.

    RAM counts that two looks in a row have found: the memory of a child that is about to start a compiler counts twice.
    """
    end, peak, before = time.monotonic() + timeout, 0, 0
    while True:
        try:
            process.wait(_LOOK_SECONDS)
            return peak, None
        except subprocess.TimeoutExpired:
            if ram is not None:
                now = tree_ram_bytes(process.pid)
                peak, before = max(peak, min(before, now)), now
        if ram is not None and peak > ram:
            return peak, too_much_ram(ram)
        if time.monotonic() > end:
            return peak, {"status": "failed", "reason": f"took more than {rounded(timeout)} s (--timeout)"}


def too_much_ram(ram: int) -> Row:
    return {"status": "does not fit", "reason": f"does not fit: needs more than {format_bytes(ram)} of RAM"}


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path | None) -> str:
    if log is None:
        return "see what it printed"
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "it printed nothing"
