"""Tasks in fresh processes, one after the other, within limits of RAM and time; what was done once is kept."""

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

from offloadkit import hardware
from offloadkit.checkpoint.folder import writable, written_to
from offloadkit.device.process_memory import tree_ram_bytes
from offloadkit.engines.work import Work
from offloadkit.errors import ConfigError, shown
from offloadkit.units import format_bytes
from offloadkit.version import __version__

Row = dict[str, Any]
Task = dict[str, Any]

_PACKAGES = ("torch", "transformers", "deepspeed")
_LOOK_SECONDS = 0.1
_SETTLED = ("measured", "does not fit")
"""Rows that are kept. A run that failed otherwise is tried again."""

_STARTING_SECONDS = 600.0
_TIMES_PLANNED = 10.0
"""Without a timeout a process may take `_STARTING_SECONDS` and this many times its steps' planned seconds."""

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
"""Runs a module as `python -m` does, bound to its first `cores` cores before any library counts them (0: not bound).

A parent that is killed cannot end what it started. That would go on using the GPU and falsify what is measured next."""


class Runs:
    """Rows by task in a folder. A row is kept as long as task, machine and versions are the same."""

    def __init__(self, folder: Path, timeout: float | None) -> None:
        """
        Args:
            folder: where rows/ and logs/ are; it exists.
            timeout: seconds that one task may take; None: by what is planned.

        Raises:
            ConfigError: `timeout` is no positive number.
            OutputError: nothing can be written into `folder`.
        """
        number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (number and timeout > 0):
            raise ConfigError(f"timeout must be a positive number of seconds, or None; got {shown(timeout)}")
        self.folder, self._timeout = folder, timeout
        self._rows, self._logs = writable(folder / "rows"), writable(folder / "logs")
        self.environment = environment()

    def row(self, task: Task, ram: int | None = None, planned_seconds: float = 0.0) -> Row:
        """The kept row of `task`, else one from a fresh process; {"status": "measured" | "does not fit" | "failed",
        "reason": ..., figures}.

        Args:
            task: what worker.py takes, in JSON's types. Its `function` is no part of what is kept.
            ram: bytes of RAM that the process and its children may take together; they are killed beyond.
            planned_seconds: of its steps, for the time it is given where the user gave none.

        Raises:
            OutputError: the row cannot be written.
        """
        named = {name: value for name, value in task.items() if name != "function"}
        settings = {"task": named, "environment": self.environment}
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        path = self._rows / f"{key}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no file, or not one of ours
            kept: Row = json.loads(path.read_text())["row"]
            if kept["status"] in _SETTLED:
                return kept | {"kept": True}
        timeout = self._timeout or _STARTING_SECONDS + _TIMES_PLANNED * planned_seconds
        row = in_fresh_process(task, timeout=timeout, ram=ram, log=self._logs / f"{key}.log")
        write_whole(path, lambda new: new.write_text(json.dumps({**settings, "row": row}, indent=1) + "\n"))
        return row

    def measured(self, engine: str, work: Work, planned_seconds: float) -> Row:
        """The row of `work` by an engine of worker.py, within the RAM that the work may take."""
        task = {"mode": "measure", "engine": engine, "work": work.to_dict()}
        return self.row(task, work.ram, planned_seconds)


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Have `write` fill a file beside `path`, then let it take that place: never a half-written one.

    Raises:
        OutputError: it could not be written (a full disk, a folder in its place); what was at `path` is still there.
    """
    new = path.with_name(f".{path.name}.part")
    with written_to(path):
        try:
            write(new)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


def environment() -> dict[str, str]:
    """The machine's name and the versions of what takes part."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    found = {"offloadkit": __version__, "cpu": hardware.cpu_name(), "num_cores": str(hardware.num_cores()), "gpu": gpu}
    return found | {package: version(package) for package in _PACKAGES}


def version(package: str) -> str:
    """The installed version, or "absent"."""
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
    module: str = "offloadkit.engines.worker",
    cores: int = 0,
) -> Row:
    """Do one task; whatever happens to the process, there is a row. It ends when this process does.

    The limit on RAM is held by looking ten times a second, because making cgroups takes rights that users do not have.

    Args:
        log: the file that takes its output; None: as this process's own.
        module: what is run, with two arguments: the file that holds the task, and the one that the row belongs in.
        cores: bind the process to the first of the cores that this one may use; 0 binds nothing.
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
            peak = max(peak, row.get("peak_ram_bytes", 0))  # a short one may have gone past the limit unseen
            if ram is not None and peak > ram and row["status"] == "measured":
                row = too_much_ram(ram)
            return {"process_seconds": seconds} | row
    status = process.returncode
    reason = f"killed by signal {-status} (out of RAM?)" if status < 0 else f"exit {status}"
    return {"status": "failed", "reason": f"{reason}: {last_line(log)}"}


def _started(
    module: str, task_path: Path, row_path: Path, output: IO[bytes] | None, opened: contextlib.ExitStack, cores: int
) -> subprocess.Popen[bytes]:
    """The process, in a session of its own; `opened` holds the end of the pipe whose closing ends it."""
    # The package is taken from where it was found here, and nothing asks on a terminal.
    paths = filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")])
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
    """Wait for the process. Its peak RAM in bytes as far as it was seen, and the row of one that had to be killed."""
    end, peak = time.monotonic() + timeout, 0
    while True:
        try:
            process.wait(_LOOK_SECONDS)
            return peak, None
        except subprocess.TimeoutExpired:
            if ram is not None:
                peak = max(peak, tree_ram_bytes(process.pid))
        if ram is not None and peak > ram:
            return peak, too_much_ram(ram)
        if time.monotonic() > end:
            return peak, {"status": "failed", "reason": f"took more than {timeout:g} s (--timeout)"}


def too_much_ram(ram: int) -> Row:
    """The row of a process that wanted more."""
    return {"status": "does not fit", "reason": f"does not fit: needs more than {format_bytes(ram)} of RAM"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process and of what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(log: Path | None) -> str:
    """The last line that a process printed, if any."""
    if log is None:
        return "see what it printed"
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "it printed nothing"
