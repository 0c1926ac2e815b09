"""What this machine has: cores, RAM and VRAM, as far as this process may use them."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from functools import cache
from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def num_cores() -> int:
    """CPU cores this process may use: its affinity, cut to the cgroup's CPU quota (v1 and v2); at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cpu_quota()
    return max(1, min(cores, round(quota) if quota else cores))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _cgroup_dirs(controller: str) -> list[Path]:
    """Folders of this process's cgroup, innermost first: v2's unified tree, or v1's tree of one controller."""
    dirs: list[Path] = []
    for line in _read(_OWN_CGROUPS).splitlines():
        number, controllers, name = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            joint = _CGROUP / controllers  # "cpu,cpuacct"; most systems link "cpu" to it
            root = joint if number == "0" or joint.is_dir() else _CGROUP / controller
            inner = root / name.lstrip("/")
            dirs += [path for path in (inner, *inner.parents) if path == root or root in path.parents]
    return dirs


def _cgroup_cpu_quota() -> float | None:
    quotas: list[float] = []
    for folder in _cgroup_dirs("cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cgroup_ram() -> list[tuple[int, int]]:
    """(limit, usage without page cache) in bytes of each memory cgroup above this process that has a limit."""
    found: list[tuple[int, int]] = []
    for folder in _cgroup_dirs("memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        usage = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if limit.isdigit() and usage.isdigit() and int(limit) < 1 << 60:
            stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines())
            kinds = ("active_file", "inactive_file")  # v1 counts children under total_ alone, v2 under the plain name
            cache = sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in kinds)
            found.append((int(limit), int(usage) - cache))
    return found


def ram_limit_bytes() -> int:
    """RAM this process may use in all, in bytes: the machine's, or its cgroups' where that is less."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _cgroup_ram())])


def ram_available_bytes() -> int:
    """RAM still to be had, in bytes, page cache counted as free."""
    available = int(psutil.virtual_memory().available)
    return max(0, min([available, *(limit - used for limit, used in _cgroup_ram())]))


def process_ram_bytes() -> int:
    """Resident RAM of this process now, in bytes; pinned pages count."""
    return int(psutil.Process().memory_info().rss)


def process_peak_ram_bytes() -> int:
    """Highest resident RAM of this process so far, in bytes; pinned pages count.

    VmHWM belongs to this program alone; ru_maxrss may start at the size of the program that forked it.
    """
    for line in _read(Path("/proc/self/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def vram_bytes(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of `device`; (0, 0) for the CPU."""
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return int(free), int(total)


def supports_bf16(device: torch.device) -> bool:
    """Whether `device` computes bf16 natively (an emulation does not count); True for the CPU."""
    if device.type != "cuda":
        return True
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def default_device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def indexed(device: torch.device) -> torch.device:
    """`device` with an index: "cuda" is the current CUDA device."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@cache
def cpu_name() -> str:
    """The processor's model name."""
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def describe_machine(device: torch.device) -> dict[str, str | int]:
    """Machine and versions, for logs and result files."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {
        "cpu": cpu_name(),
        "num_cores": num_cores(),
        "ram_bytes": ram_limit_bytes(),
        "gpu": gpu,
        "vram_bytes": vram_bytes(device)[1],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def trim_heap() -> None:
    """Give freed heap pages back to the system, where the C library can (glibc)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
