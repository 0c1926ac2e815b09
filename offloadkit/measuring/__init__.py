"""The measuring behind `hardware.measure`: rates are taken once and kept, sizes are read anew each time.

Kept in `$XDG_CACHE_HOME/offloadkit/hardware.json` (else under ~/.cache), by host name, processor, cores, GPU, driver
and versions: a machine that changes is measured again. What was measured while others kept the machine busy holds for
this process alone.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import torch

from offloadkit import hardware
from offloadkit.errors import OutputError
from offloadkit.hardware import Hardware
from offloadkit.measuring.disk import disk_rates
from offloadkit.measuring.rates import machine_rates, quick_vram_rate
from offloadkit.optim import cpu

_VERSION = 3
"""Raised when what is measured changes: kept rates of another version are not read."""
_DISK_RATES = {"disk_read_bytes_per_second", "disk_write_bytes_per_second"}
_RATES = {
    field.name
    for field in fields(Hardware)
    if field.name.endswith("_per_second") or field.name in ("can_pin", "launch_seconds", "vram_context_bytes")
} - _DISK_RATES
_of_this_process: dict[str, Any] = {}
"""Rates that were measured on a busy machine: better than measuring again and again."""
_BUSY, _COUNTING_SECONDS = 0.1, 0.05
_DRIVER = Path("/sys/module/nvidia/version")


def measure(device: torch.device | None, *, folder: str | Path | None, fresh: bool) -> Hardware:
    """See `hardware.measure`."""
    device = hardware.default_device() if device is None else hardware.indexed(device)
    where = None if folder is None else _existing(Path(folder))
    kept = {} if fresh else _of_this_process | _read_kept()
    key = _machine_key(device)
    rates = kept.get(key, {})
    if rates.keys() != _RATES:
        began = time.perf_counter(), _seconds_of_others()
        rates = machine_rates(device)
        if _disturbed(*began):
            _of_this_process[key] = rates
        else:
            _keep(key, rates)
    disk: dict[str, Any] = {}
    if where is not None:
        disk_key = f"{key} | {where}"
        disk = kept.get(disk_key, {})
        if disk.keys() != _DISK_RATES:
            disk = disk_rates(where)
            _keep(disk_key, disk)
        disk |= {"disk_folder": str(where), "disk_free_bytes": shutil.disk_usage(where).free}
    return Hardware(**_sizes(device), **rates, **disk)


def vram_rate(device: torch.device) -> float | None:
    """See `hardware.vram_rate`."""
    device = hardware.indexed(device)
    kept = (_of_this_process | _read_kept()).get(_machine_key(device), {})
    rate: float | None = kept.get("vram_bytes_per_second") or quick_vram_rate(device)
    return rate


def _own_cores() -> list[Any]:
    """The system's count of seconds, by use, of each core that this process may run on."""
    cores = psutil.cpu_times(percpu=True)
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(cores))
    return [times for core, times in enumerate(cores) if core in own]


def _seconds_of_others() -> float:
    """Seconds that other processes and machines have had of these cores."""
    uses = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(getattr(core, use, 0.0) for core in _own_cores() for use in uses) - time.process_time()


def _disturbed(started: float, others: float) -> bool:
    """Whether others have taken more than a tenth of the cores since then; the system counts hundredths of seconds."""
    share = _BUSY * len(_own_cores()) * (time.perf_counter() - started)
    return _seconds_of_others() - others > share + _COUNTING_SECONDS


def _existing(folder: Path) -> Path:
    folder = folder.expanduser().resolve()
    if not folder.is_dir():
        raise OutputError(f"{folder} is no folder: the disk's rate is measured in one that exists")
    return folder


def _sizes(device: torch.device) -> dict[str, Any]:
    """The fields of `Hardware` that are never kept."""
    ram_total, ram_available = hardware.ram_limit_bytes(), hardware.ram_available_bytes()
    on_gpu = device.type == "cuda"
    vram_free, vram_total = hardware.vram_bytes(device) if on_gpu else (ram_available, ram_total)
    return {
        "device": str(device),
        "gpu_name": torch.cuda.get_device_name(device) if on_gpu else None,
        "compute_capability": torch.cuda.get_device_capability(device) if on_gpu else None,
        "supports_bf16": hardware.supports_bf16(device),
        "vram_total_bytes": vram_total,
        "vram_free_bytes": vram_free,
        "ram_total_bytes": ram_total,
        "ram_available_bytes": ram_available,
        "cpu_name": hardware.cpu_name(),
        "num_cores": hardware.num_cores(),
    }


def _machine_key(device: torch.device) -> str:
    gpu = "no GPU"
    if device.type == "cuda":
        driver = _DRIVER.read_text().strip() if _DRIVER.exists() else "unknown"
        gpu = f"{device} {torch.cuda.get_device_name(device)}, driver {driver}"
    kernel = ",".join(cpu.cpu_levels()) or "no C kernel"
    processor = f"{hardware.cpu_name()}, {hardware.num_cores()} cores, {kernel}"
    return f"{platform.node()} | {processor} | {gpu} | torch {torch.__version__} | {_VERSION}"


def cache_file() -> Path:
    """Where measured rates are kept."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "offloadkit" / "hardware.json"


def _read_kept() -> dict[str, Any]:
    """What is kept, by machine and disk; nothing where the file is missing or damaged."""
    try:
        kept = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    entries = kept.items() if isinstance(kept, dict) else ()
    return {key: rates for key, rates in entries if isinstance(rates, dict)}


def _keep(key: str, rates: dict[str, Any]) -> None:
    """Add to what is kept, in one move of a whole file; where it cannot be written, the next process measures again."""
    path = cache_file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as file:
            json.dump(_read_kept() | {key: rates}, file, indent=1)
        os.replace(file.name, path)
