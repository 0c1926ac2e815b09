"""The cores, RAM and VRAM that this process may use. `device.measure` measures their rates."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

from offloadkit.errors import ConfigError, OutputError, shown
from offloadkit.facts import nvml
from offloadkit.facts.config import Precision
from offloadkit.facts.fitted import LOADED_LATER_BYTES

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_CPU_CACHES = Path("/sys/devices/system/cpu")
PCI_DEVICES = Path("/sys/bus/pci/devices")
_MIN_CONTEXT_BYTES, _MAX_CONTEXT_BYTES = 64 << 20, 3 << 29
_highest_ram = 0
"""Peak RAM from before the system's counter was last reset."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The sizes of a machine now, and its rates as measured by `device.measure`.

    Without a GPU, "VRAM" is the same RAM, a copy is a memmove, and the CPU computes matmuls.
    """

    device: str
    gpu_name: str | None
    compute_capability: tuple[int, int] | None
    supports_bf16: bool
    """Whether bf16 is native. Emulation does not count."""
    can_pin: bool
    """If not, the copy rates are for pageable memory."""

    vram_total_bytes: int
    """Limited by torch's per-process memory fraction."""
    vram_free_bytes: int
    """VRAM that can still be allocated, including unused memory of torch's allocator."""
    vram_context_bytes: int
    """VRAM of this process outside torch's allocator: the CUDA context, kernels and libraries."""
    ram_total_bytes: int
    """The machine's RAM, or the cgroup's limit if that is less."""
    ram_available_bytes: int
    """Page cache counts as free."""
    cpu_name: str
    num_cores: int

    h2d_bytes_per_second: float
    """Copies from RAM to VRAM, with nothing else on the bus."""
    d2h_bytes_per_second: float
    both_bytes_per_second: float
    """Sum of the rates of both directions at once."""
    dram_bytes_per_second: float
    """The triad a += s * b on the C kernel's threads: 12 bytes per element."""
    cpu_adamw_bytes_per_second: float
    """The CPU step, `exact`, with bf16 weights and gradients: 26 bytes per parameter. Arrays exceed the caches."""
    cpu_compact_bytes_per_second: float
    """The CPU step, `compact`: 18 bytes per parameter. With few cores it is bound by arithmetic, not by DRAM."""
    cpu_tiny_bytes_per_second: float
    """The CPU step, `tiny`: 14 1/16 bytes per parameter. Bound by arithmetic like `compact`."""
    cpu_and_bus_bytes_per_second: float
    """The CPU step (`exact`) and copies both ways at once, which share DRAM: the sum of their rates. If they cannot run
    at once (no GPU, no pinned memory), the higher of the two rates.
    """
    vram_bytes_per_second: float
    """An in-place addition over a large array. Bytes read and bytes written both count."""
    launch_seconds: float
    """Seconds from the launch of one small torch operation to the next."""
    bf16_flops_per_second: float
    """A matmul of a transformer layer's size. A multiply-add is two FLOPs."""
    fp16_flops_per_second: float
    fp32_flops_per_second: float

    num_ranks: int = 1
    """Concurrent ranks on this host. `num_cores` and the rates of processor, RAM and bus are one rank's share; RAM in
    bytes is the whole host's.
    """
    link_bytes_per_second: float = 0.0
    """Bytes per second that a rank receives while all ranks exchange. 0: one rank, or unknown."""
    most_ctas: int = 0
    """Most NCCL thread blocks at once when the link was measured. 0: NCCL's own choice."""
    few_ctas_link_bytes_per_second: float = 0.0
    """The link's rate with few thread blocks, which leave more of the GPU to compute. 0: unknown, or already chosen."""
    link_is_bus: bool = False
    """Whether GPUs of one host exchange over the bus that also carries copies to and from RAM."""
    network_bytes_per_second: float = 0.0
    """Bytes per second that a rank receives from other hosts in an exchange, if the link is for one host's ranks; else
    0.
    """

    disk_folder: str | None = None
    """None: not measured, and the next three fields are zero."""
    disk_free_bytes: int = 0
    disk_read_bytes_per_second: float = 0.0
    disk_write_bytes_per_second: float = 0.0

    vram_of_others_bytes: int = 0
    """VRAM that other processes hold."""

    assumed: str = ""
    """Sentence that names the assumed values; "" if everything except the link was measured."""
    assumed_card: str = ""
    """Stand-in for an unnamed GPU, such as "assumed card of 8 GiB"; "" if the GPU is known."""
    link_assumed: str = ""
    """Sentence that names the assumed link between ranks; "" if measured, or one rank."""

    @property
    def has_few_ctas(self) -> bool:
        """Whether NCCL runs few thread blocks: the plan has chosen so, or the buses alone link the GPUs."""
        return self.most_ctas > 0 or (self.link_is_bus and not self.network_bytes_per_second)


CPU_STEP_RATES: dict[Precision, str] = {
    "exact": "cpu_adamw_bytes_per_second",
    "compact": "cpu_compact_bytes_per_second",
    "tiny": "cpu_tiny_bytes_per_second",
}
ASSUMED_DISK = 1.5e9
"""Bytes per second of reading and of writing a disk that was not measured."""


def with_disk(machine: Hardware, folder: str) -> Hardware:
    """Add the disk of `folder`, at assumed rates that the ranks of the host share. Raises `OutputError` if it is no
    folder.
    """
    if not os.path.isdir(folder):
        raise OutputError(f"{folder} is not a folder: name one on a local disk, for optimizer states")
    rate = ASSUMED_DISK / machine.num_ranks
    return replace(
        machine,
        disk_folder=folder,
        disk_free_bytes=shutil.disk_usage(folder).free,
        disk_read_bytes_per_second=rate,
        disk_write_bytes_per_second=rate,
    )


def is_bus(link: float, machine: Hardware) -> bool:
    """Whether a link with this rate is the GPUs' own bus. Every NVLink is faster than the bus with NCCL's own number of
    thread blocks.
    """
    return machine.device != "cpu" and link <= machine.h2d_bytes_per_second


def busiest_device() -> torch.device:
    """The CUDA device with most of this process's torch memory, or the CPU if CUDA is not used yet."""
    cuda: Any = torch.cuda  # typed only in some releases of torch
    if not cuda.is_initialized():
        return torch.device("cpu")
    return torch.device("cuda", max(range(cuda.device_count()), key=cuda.memory_reserved))


def cores_near(device: torch.device) -> set[int]:
    """The CPU cores of the GPU's NUMA node; empty if unknown."""
    if device.type != "cuda":
        return set()
    found: Any = torch.cuda.get_device_properties(device)
    with suppress(AttributeError, OSError, ValueError):  # releases of torch, other systems, containers without /sys
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        return _core_numbers((PCI_DEVICES / address / "local_cpulist").read_text())
    return set()


def _core_numbers(text: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def own_cores() -> set[int]:
    """The CPU cores that this thread may run on."""
    return os.sched_getaffinity(0)


def num_cores() -> int:
    """CPU cores that this process may use: its affinity, limited by the cgroup's CPU quota (v1 and v2). At least 1."""
    cores, quota = len(own_cores()), cpu_quota()
    return max(1, min(cores, round(quota) if quota else cores))


def last_level_cache_bytes(cores: Path = _CPU_CACHES) -> int:
    """Total bytes of the last-level caches of the cores that this process may use; 0 if unknown."""
    caches: dict[tuple[str, str], int] = {}
    for core in own_cores():
        folder = cores / f"cpu{core}" / "cache" / "index3"
        shared, size = text_of(folder / "shared_cpu_list"), text_of(folder / "size")
        if shared and size.endswith("K") and size[:-1].isdigit():
            caches[shared, size] = int(size[:-1]) << 10
    return sum(caches.values())


def text_of(path: Path) -> str:
    """The stripped content of a system file; "" if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:  # three times as fast as text mode
            return file.read().decode().strip()
    except OSError:
        return ""


def cgroup_dirs(controller: str) -> tuple[Path, ...]:
    """This process's cgroup folder and its parents, innermost first (v2's tree, or one controller's of v1)."""
    return _dirs_of(text_of(OWN_CGROUPS), controller, CGROUP)


@cache
def _dirs_of(own_cgroups: str, controller: str, mount: Path) -> tuple[Path, ...]:
    dirs: list[Path] = []
    for line in own_cgroups.splitlines():
        number, controllers, name = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            joint = mount / controllers  # such as "cpu,cpuacct"; "cpu" is a link to it on most systems
            root = joint if number == "0" or joint.is_dir() else mount / controller
            inner = root / name.lstrip("/")
            dirs += [path for path in (inner, *inner.parents) if path == root or root in path.parents]
    return tuple(dirs)


def cpu_quota() -> float | None:
    """Cores' worth of CPU time that all processes of this cgroup may take together; None: unlimited."""
    quotas: list[float] = []
    for folder in cgroup_dirs("cpu"):
        quota, _, period = text_of(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = text_of(folder / "cpu.cfs_quota_us"), text_of(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cgroup_ram() -> list[tuple[int, int]]:
    """(limit, usage without page cache), in bytes, of each memory cgroup of this process that has a limit."""
    found: list[tuple[int, int]] = []
    for folder in cgroup_dirs("memory"):
        names = ("memory.max", "memory.high", "memory.limit_in_bytes")  # above `high` the kernel slows a process down
        limits = [int(limit) for limit in (text_of(folder / name) for name in names) if limit.isdigit()]
        limit = min(limits, default=1 << 60)
        if limit >= 1 << 60:
            continue
        usage = text_of(folder / "memory.current") or text_of(folder / "memory.usage_in_bytes")
        if usage.isdigit():
            stat = dict(line.split(" ", 1) for line in text_of(folder / "memory.stat").splitlines())
            kinds = ("active_file", "inactive_file")  # v1 includes children only in total_*, v2 in the plain name
            cache = sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in kinds)
            found.append((limit, int(usage) - cache))
    return found


def ram_limit_bytes() -> int:
    """RAM that this process may use, in bytes: the machine's, or its cgroups' limit if that is less."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _cgroup_ram())])


def ram_available_bytes() -> int:
    """RAM that can still be used, in bytes. Page cache counts as free."""
    available = int(psutil.virtual_memory().available)
    return max(0, min([available, *(limit - used for limit, used in _cgroup_ram())]))


def process_ram_bytes() -> int:
    """Resident RAM of this process now, in bytes. Pinned pages count."""
    return int(_process(os.getpid()).memory_info().rss)


@cache
def _process(pid: int) -> psutil.Process:
    """Making the object takes several times as long as asking it."""
    return psutil.Process(pid)


def process_peak_ram_bytes() -> int:
    """Highest resident RAM of this process so far, in bytes, pinned pages included.

    Read from VmHWM if possible, because ru_maxrss may start at the size of the program that forked this one.
    """
    high_water = _high_water_bytes()
    if high_water is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(high_water, _highest_ram)


def restart_peak_ram() -> int | None:
    """Reset the peak counter and return the highest resident RAM since the last call, in bytes; None if the system
    cannot.
    """
    global _highest_ram
    high_water = _high_water_bytes()
    if high_water is None:
        return None
    try:
        _CLEAR_REFS.write_text("5")  # sets VmHWM to the present resident RAM
    except OSError:
        return None
    _highest_ram = max(_highest_ram, high_water)
    return high_water


def _high_water_bytes() -> int | None:
    for line in text_of(Path("/proc/self/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def vram_bytes(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of `device` that this process may use, within torch's per-process memory fraction; (0, 0) for
    the CPU. Unused memory of torch's allocator counts as free.
    """
    if device.type != "cuda":
        return 0, 0
    device = indexed(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # missing in torch 2.6
    allowed = int(total * fraction(device)) if fraction else int(total)
    spare = reserved - torch.cuda.memory_allocated(device)
    return max(0, min(int(free), allowed - reserved)) + spare, min(int(total), allowed)


library_bytes: Counter[int] = Counter()
"""VRAM that communication libraries hold in this process, by GPU index."""


def vram_outside_bytes(device: torch.device) -> int:
    """VRAM in use outside torch's allocator, in bytes, including other processes; 0 for the CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total) - int(free) - torch.cuda.memory_reserved(device)


_loaded_bytes: dict[int, int] = {}
"""Least VRAM outside torch's allocator and `library_bytes` since CUDA's libraries were loaded, by GPU index: an upper
bound of this process's context then.
"""


def vram_context_bytes(device: torch.device, *, growth_bytes: int = 0) -> int:
    """VRAM of this process outside torch's allocator, in bytes: its CUDA context and libraries; 0 for the CPU.

    This is NVML's figure, if NVML has a plausible one. Otherwise another process's VRAM cannot be told apart from a
    context that grows: of the VRAM in use it is as much as this process may have, `LOADED_LATER_BYTES` more than when
    CUDA's libraries were loaded. Before that it is at most 1.5 GiB beside `library_bytes`.

    Args:
        growth_bytes: add these for kernels that are loaded later, within that bound.
    """
    if device.type != "cuda":
        return 0
    index = device.index or 0
    outside = vram_outside_bytes(device)
    if (own := _context_by_nvml(device, outside, library_bytes[index])) is not None:
        return own + growth_bytes
    known = library_bytes[index]
    rest = max(0, outside - known)
    if index not in _loaded_bytes:
        return min(rest, _MAX_CONTEXT_BYTES) + growth_bytes + known
    least = _loaded_bytes[index] = min(_loaded_bytes[index], rest)
    return min(rest + growth_bytes, least + LOADED_LATER_BYTES) + known


def own_vram_outside_bytes(device: torch.device) -> int:
    """`vram_outside_bytes` without other processes, if NVML has a plausible figure."""
    outside = vram_outside_bytes(device)
    own = _context_by_nvml(device, outside, 0)
    return outside if own is None else own


def _context_by_nvml(device: torch.device, outside: int, known: int) -> int | None:
    """`known`: VRAM of communication libraries, which is part of it."""
    own = nvml.process_bytes(device)
    if own is None:
        return None
    context = own - torch.cuda.memory_reserved(device)
    return context if known + _MIN_CONTEXT_BYTES <= context <= outside else None


def note_loaded_libraries(device: torch.device) -> None:
    """Bound this process's context by its present size. Call it when CUDA's libraries are loaded."""
    if device.type == "cuda":
        index = device.index or 0
        now = vram_context_bytes(device) - library_bytes[index]
        _loaded_bytes[index] = min(_loaded_bytes.get(index, now), now)


def context_of_another_time(device: torch.device, num_bytes: int) -> int:
    """`num_bytes`, the context that an earlier process measured, or less if another process's VRAM was part of it."""
    index = device.index or 0
    if (
        index not in _loaded_bytes
        or _context_by_nvml(device, vram_outside_bytes(device), library_bytes[index]) is not None
    ):
        return num_bytes
    _loaded_bytes[index] = min(_loaded_bytes[index], num_bytes)
    return min(num_bytes, _loaded_bytes[index] + LOADED_LATER_BYTES)


def vram_of_others_bytes(device: torch.device) -> int:
    """VRAM of other processes, in bytes, as far as `vram_context_bytes` tells them apart; 0 for the CPU."""
    return max(0, vram_outside_bytes(device) - vram_context_bytes(device))


def is_gpu_shared(device: torch.device) -> bool:
    """Whether other processes hold much VRAM of this GPU, more than a CUDA context. False for the CPU."""
    return vram_outside_bytes(device) - library_bytes[device.index or 0] >= _MAX_CONTEXT_BYTES


def supports_bf16(device: torch.device) -> bool:
    """Whether `device` has native bf16; emulation does not count. True for the CPU."""
    return device.type != "cuda" or bool(torch.cuda.is_bf16_supported(including_emulation=False))


def default_device() -> torch.device:
    return indexed(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def device_of(given: object) -> torch.device:
    """The device that a user has given, with its index; None: `default_device`.

    Raises:
        ConfigError: `given` names no device, or a CUDA device without a GPU.
    """
    if given is None:
        return default_device()
    if not isinstance(given, torch.device | str):
        raise ConfigError(f"device must be a torch.device, or a name such as 'cuda' or 'cpu', got {shown(given)}")
    try:
        found = torch.device(given)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"device must be a name such as 'cuda', 'cuda:1' or 'cpu', got {shown(given)}") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={str(found)!r}: torch sees no GPU here. Leave device out, or pass 'cpu'")
    return indexed(found)


def indexed(device: torch.device) -> torch.device:
    """`device` as its tensors name it: "cuda" becomes the current CUDA device, "cpu:0" becomes "cpu"."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


@cache
def cpu_name() -> str:
    for line in text_of(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def describe_machine(device: torch.device) -> dict[str, str | int]:
    return {
        "cpu": cpu_name(),
        "num_cores": num_cores(),
        "ram_bytes": ram_limit_bytes(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "none",
        "vram_bytes": vram_bytes(device)[1],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def trim_heap() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
