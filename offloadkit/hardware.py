"""What this machine has: cores, RAM and VRAM, as far as this process may use them. How fast it is: `device.measure`."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_MAX_CONTEXT_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a plan needs to know of a machine: sizes now, and rates as `device.measure` took them.

    Without a GPU the fields of one describe what stands in for it: "VRAM" is RAM (the same bytes, not more of them),
    a copy is a memmove, and the CPU multiplies.
    """

    device: str
    """"cuda:0", or "cpu"."""
    gpu_name: str | None
    """None without a GPU, and then only."""
    compute_capability: tuple[int, int] | None
    supports_bf16: bool
    """Natively: an emulation does not count."""
    can_pin: bool
    """Whether host memory was registered with the GPU; the rates of copies are pageable memory's otherwise."""

    vram_total_bytes: int
    """What this process may have: torch's per-process memory fraction counts."""
    vram_free_bytes: int
    """What can still be allocated: what torch's allocator holds free counts."""
    vram_context_bytes: int
    """VRAM of this process that is not torch's: the CUDA context, kernels and libraries."""
    ram_total_bytes: int
    """The machine's, or the cgroup's where that is less."""
    ram_available_bytes: int
    """Page cache counts as free."""
    cpu_name: str
    num_cores: int

    h2d_bytes_per_second: float
    """From RAM to VRAM, nothing else on the bus."""
    d2h_bytes_per_second: float
    both_bytes_per_second: float
    """Both directions at once, added."""
    dram_bytes_per_second: float
    """The triad a += s * b on the C kernel's threads: 12 bytes an element."""
    cpu_adamw_bytes_per_second: float
    """The CPU step, `exact`, bf16 weights and gradients: 26 bytes a parameter, arrays larger than the caches."""
    cpu_compact_bytes_per_second: float
    """`compact`: 18 bytes a parameter. Where cores are few, arithmetic and not DRAM is what bounds it."""
    cpu_tiny_bytes_per_second: float
    """`tiny`: 14 1/16 bytes a parameter; so too."""
    cpu_and_bus_bytes_per_second: float
    """The CPU step, `exact`, beside copies both ways, what all of them move: DRAM serves them together. Where they do
    not go on at once (without a GPU, without pinned memory) the higher of both."""
    vram_bytes_per_second: float
    """An addition in place over a large array, read and written."""
    launch_seconds: float
    """From one small operation to the next, as torch starts them."""
    bf16_flops_per_second: float
    """Of a matrix product of a transformer layer's size; a multiplication and an addition are two."""
    fp16_flops_per_second: float
    fp32_flops_per_second: float

    disk_folder: str | None = None
    """Where the disk was measured; None: it was not, and the next three are zero."""
    disk_free_bytes: int = 0
    disk_read_bytes_per_second: float = 0.0
    disk_write_bytes_per_second: float = 0.0


def busiest_device() -> torch.device:
    """The CUDA device of which torch holds most here; the CPU where this process has not begun to use CUDA."""
    cuda: Any = torch.cuda  # whose signatures are typed in some releases of torch only
    if not cuda.is_initialized():
        return torch.device("cpu")
    return torch.device("cuda", max(range(cuda.device_count()), key=cuda.memory_reserved))


def num_cores() -> int:
    """CPU cores this process may use: its affinity, cut to the cgroup's CPU quota (v1 and v2); at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cpu_quota()
    return max(1, min(cores, round(quota) if quota else cores))


def _read(path: Path) -> str:
    try:
        with open(path, "rb", buffering=0) as file:  # a third of the time that text takes
            return file.read().decode().strip()
    except OSError:
        return ""


def _cgroup_dirs(controller: str) -> tuple[Path, ...]:
    """Folders of this process's cgroup, innermost first: v2's unified tree, or v1's tree of one controller."""
    return _dirs_of(_read(_OWN_CGROUPS), controller, _CGROUP)


@cache
def _dirs_of(own_cgroups: str, controller: str, mount: Path) -> tuple[Path, ...]:
    dirs: list[Path] = []
    for line in own_cgroups.splitlines():
        number, controllers, name = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            joint = mount / controllers  # "cpu,cpuacct"; most systems link "cpu" to it
            root = joint if number == "0" or joint.is_dir() else mount / controller
            inner = root / name.lstrip("/")
            dirs += [path for path in (inner, *inner.parents) if path == root or root in path.parents]
    return tuple(dirs)


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
        if not limit.isdigit() or int(limit) >= 1 << 60:
            continue
        usage = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if usage.isdigit():
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
    """(free, total) bytes of `device` that this process may have; (0, 0) for the CPU.

    What torch's allocator holds without using it is free; its per-process memory fraction is a limit.
    """
    if device.type != "cuda":
        return 0, 0
    device = indexed(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # not in torch 2.6
    allowed = int(total * fraction(device)) if fraction else int(total)
    spare = reserved - torch.cuda.memory_allocated(device)
    return max(0, min(int(free), allowed - reserved)) + spare, min(int(total), allowed)


def vram_context_bytes(device: torch.device) -> int:
    """VRAM in use that is not torch's allocator's: this process's CUDA context and libraries; 0 for the CPU.

    Another process's use cannot be told from it everywhere, so it is at most 1 GiB, which no context reaches.
    """
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return min(int(total) - int(free) - torch.cuda.memory_reserved(device), _MAX_CONTEXT_BYTES)


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
