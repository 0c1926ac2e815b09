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
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from offloadkit import hardware
from offloadkit.compare.memory import tree_ram_bytes
from offloadkit.plan import format_bytes

Row = dict[str, Any]
Task = dict[str, Any]

_PACKAGES = ("torch", "transformers", "deepspeed")
_LOOK_SECONDS = 0.1
_SETTLED = ("measured", "does not fit")
"""What is not tried again; a run that failed otherwise is."""


class Runs:
    """Rows by task in a folder. A row is kept as long as task, machine and versions are the same."""

    def __init__(self, folder: Path, timeout: float) -> None:
        """
        Args:
            folder: where rows/ and logs/ are; it exists.
            timeout: seconds that one task may take.
        """
        self._rows, self._logs, self._timeout = folder / "rows", folder / "logs", timeout
        self._rows.mkdir(exist_ok=True)
        self._logs.mkdir(exist_ok=True)
        self.environment = environment()

    def row(self, task: Task, ram: int | None = None) -> Row:
        """The kept row of `task`, else one from a fresh process; {"status": "measured" | "does not fit" | "failed",
        "reason": ..., figures}.

        Args:
            task: what worker.py takes, in JSON's types.
            ram: bytes of RAM that the process and its children may take together; they are killed beyond.
        """
        settings = {"task": task, "environment": self.environment}
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        path = self._rows / f"{key}.json"
        with contextlib.suppress(OSError, ValueError, KeyError):
            kept: Row = json.loads(path.read_text())["row"]
            if kept["status"] in _SETTLED:
                return kept | {"kept": True}
        row = in_fresh_process(task, timeout=self._timeout, ram=ram, log=self._logs / f"{key}.log")
        written = path.with_suffix(".part")
        written.write_text(json.dumps({**settings, "row": row}, indent=1) + "\n")
        written.replace(path)
        return row


def environment() -> dict[str, str]:
    """The machine's name and the versions of what takes part."""
    from offloadkit import __version__

    found = {
        "offloadkit": __version__,
        "cpu": hardware.cpu_name(),
        "num_cores": str(hardware.num_cores()),
        "gpu": "none",
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def in_fresh_process(
    task: Task, *, timeout: float, ram: int | None, log: Path | None, module: str = "offloadkit.compare.worker"
) -> Row:
    """Do one task; whatever happens to the process, there is a row.

    The limit on RAM is held by looking ten times a second, because making cgroups takes rights that users do not have.

    Args:
        log: the file that takes its output; None: as this process's own.
        module: what is run, with two arguments: the file that holds the task, and the one that the row belongs in.
    """
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as opened:
        output = opened.enter_context(log.open("wb")) if log is not None else None
        task_path, row_path = Path(scratch) / "task.json", Path(scratch) / "row.json"
        task_path.write_text(json.dumps(task))
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(task_path), str(row_path)],
            env=_environment_of_worker(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            start_new_session=True,
        )
        try:
            peak, killed = _watch(process, timeout, ram)
        finally:
            _end(process)
        if killed is not None:
            return killed
        seconds = time.monotonic() - began
        if row_path.exists():
            row: Row = json.loads(row_path.read_text())
            return {"process_seconds": seconds} | _within(row, max(peak, row.get("peak_ram_bytes", 0)), ram)
    status = process.returncode
    reason = f"killed by signal {-status} (out of RAM?)" if status < 0 else f"exit {status}"
    return {"status": "failed", "reason": f"{reason}: {last_line(log)}"}


def _environment_of_worker() -> dict[str, str]:
    """This process's, with the package where it was found here, and nothing that a run would ask on a terminal."""
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    ours = {"PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"}
    return os.environ | {"DS_SKIP_CUDA_CHECK": "1"} | ours


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
            return peak, {"status": "failed", "reason": f"took more than {timeout:g} s"}


def _within(row: Row, peak: int, ram: int | None) -> Row:
    """The row, unless a short peak went past the limit unseen."""
    if ram is not None and peak > ram and row["status"] == "measured":
        return too_much_ram(ram)
    return row


def too_much_ram(ram: int) -> Row:
    """The row of a process that wanted more."""
    return {
        "status": "does not fit",
        "reason": f"does not fit: needs more than {format_bytes(ram)} of RAM",
    }


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
