"""Measure this machine and advise what would speed up training on it."""

from __future__ import annotations

import resource
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from offloadkit.device.measure import measure, step_traffic_bytes
from offloadkit.errors import OutputError
from offloadkit.facts import hardware
from offloadkit.facts.files import path_of
from offloadkit.facts.hardware import CPU_STEP_RATES, PCI_DEVICES, Hardware, text_of
from offloadkit.facts.units import format_bytes, format_rate, rounded
from offloadkit.kernels import cpu, gpu
from offloadkit.planner.words import of_others

_NVIDIA, _DISPLAY = "0x10de", "0x03"
_DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidia0"), Path("/dev/dxg"))

_MIN_RAM_BYTES = 1 << 30
_MIN_VRAM_BYTES = 512 << 20
_LITTLE_DISK_BYTES = 50 << 30
_LITTLE_SWAP_BYTES = 64 << 20
_FEW_CORES = 4
_CHECKPOINT_BYTES = 12
"""Bytes per parameter: bf16 weight and `exact` optimizer states."""


@dataclass(frozen=True)
class PcieLink:
    """PCIe link of a graphics card; 0 for values that the system does not report."""

    address: str
    width: int
    max_width: int
    speed: float
    """GT/s per lane."""
    max_speed: float

    def bytes_per_second(self) -> float:
        """Peak bytes per second in one direction. A byte is 10 bits on the wire below 8 GT/s, else 8 x 130 / 128."""
        return self.width * self.speed * 1e9 / (8 * 130 / 128 if self.speed >= 8 else 10)


@dataclass(frozen=True)
class Facts:
    """Measurements that the advice is based on."""

    hardware: Hardware
    kernel_levels: tuple[str, ...]
    """Instruction sets of the C kernel that this CPU supports, slowest first; empty without the kernel."""
    compiler: str | None
    torch_cuda: str | None
    gpu_in_machine: bool
    """Whether an NVIDIA card or driver is present, even if torch does not see it."""
    gpu_fault: str | None
    triton_fault: str | None
    disk_fault: str | None
    links: tuple[PcieLink, ...]
    locked_memory_bytes: int | None
    """Limit on locked memory; None if unlimited."""
    machine_ram_bytes: int
    swap_used_bytes: int


@dataclass(frozen=True)
class Advice:
    level: Literal["stop", "warn", "note"]
    """"stop": training does not work until this is fixed."""
    text: str


def gather(folder: Path) -> Facts:
    """Measure this machine and the disk of `folder`. Raises `ConfigError` for an invalid folder name."""
    folder = path_of(folder, "folder")
    fault = gpu_fault()
    device, disk_fault = "cpu" if fault else None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report says it
        try:
            measured = measure(device, folder=folder, fresh=True)
        except OutputError as error:
            disk_fault = str(error)
            measured = measure(device, fresh=True)
    limit, links = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], pcie_links()
    return Facts(
        hardware=measured,
        kernel_levels=tuple(cpu.cpu_levels()),
        compiler=next(filter(shutil.which, ("cc", "gcc", "clang")), None),
        torch_cuda=torch.version.cuda or torch.version.hip,
        gpu_in_machine=bool(links) or any(path.exists() for path in _DRIVER_FILES),
        gpu_fault=fault,
        triton_fault=_triton_fault() if measured.gpu_name else None,
        disk_fault=disk_fault,
        links=links,
        locked_memory_bytes=None if limit == resource.RLIM_INFINITY else limit,
        machine_ram_bytes=int(psutil.virtual_memory().total),
        swap_used_bytes=int(psutil.swap_memory().used),
    )


def gpu_fault() -> str | None:
    """Why the GPU that torch sees is unusable; None if it is usable or torch sees none."""
    if not torch.cuda.is_available():
        return None
    device = hardware.default_device()
    name = torch.cuda.get_device_name(device)
    if not _built_for(torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()):
        return f"this torch build ({' '.join(torch.cuda.get_arch_list())}) has no kernels for {name}"
    free, total = hardware.vram_bytes(device)
    if free < _MIN_VRAM_BYTES:
        return f"{format_bytes(free)} of {format_bytes(total)} of VRAM are free on {name}: other processes use it"
    return None


def _built_for(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether a device can run one of these builds: "sm_80" on 8.0 to 8.9, "compute_80" on 8.0 and newer."""
    cuda = [arch.rsplit("_", 1) for arch in architectures if arch.startswith(("sm_", "compute_"))]
    numbers = [(kind, int(number.rstrip("af"))) for kind, number in cuda]
    own = 10 * capability[0] + capability[1]
    fits = [number <= own and (kind == "compute" or number // 10 == capability[0]) for kind, number in numbers]
    return any(fits) or not numbers


def _triton_fault() -> str | None:
    if find_spec("triton") is None:
        return "is not installed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return None if gpu.available() else "cannot build its kernels here (it needs a C compiler)"


def pcie_links(devices: Path = PCI_DEVICES) -> tuple[PcieLink, ...]:
    """PCIe links of NVIDIA cards. `devices`: sysfs folder of PCI devices."""
    found = []
    for folder in sorted(devices.glob("*")):
        if text_of(folder / "vendor") == _NVIDIA and text_of(folder / "class").startswith(_DISPLAY):
            names = ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed")
            width, max_width, speed, max_speed = (_number(text_of(folder / name)) for name in names)
            found.append(PcieLink(folder.name, int(width), int(max_width), speed, max_speed))
    return tuple(found)


def _number(text: str) -> float:
    try:
        return float(text.split(" ")[0])
    except ValueError:
        return 0.0


def _stops(facts: Facts) -> Iterator[str]:
    if facts.gpu_fault:
        yield f"The GPU cannot be used: {facts.gpu_fault}."
    available = facts.hardware.ram_available_bytes
    if available < _MIN_RAM_BYTES:
        yield f"Only {format_bytes(available)} of RAM are available: end other programs first."


def _warnings(facts: Facts) -> Iterator[str]:
    machine = facts.hardware
    if facts.gpu_in_machine and not machine.gpu_name and not facts.gpu_fault:
        if facts.torch_cuda is None:
            yield (
                "There is an NVIDIA GPU, but torch is built without CUDA, so training runs on the CPU. Install torch "
                "with CUDA: see https://pytorch.org/get-started/locally."
            )
        else:
            yield (
                f"There is an NVIDIA GPU, but torch (built for CUDA {facts.torch_cuda}) does not see it, so training "
                "runs on the CPU. Update the driver if nvidia-smi shows an older CUDA version; check that "
                "CUDA_VISIBLE_DEVICES does not hide it."
            )
    if not facts.kernel_levels:
        compiler = facts.compiler
        first = f"there is a compiler now ({compiler})" if compiler else "install a C compiler (gcc or clang)"
        yield (
            "The C kernel is missing, so the CPU step is 5 to 20 times slower (precision compact or tiny: 50 to 200 "
            f"times), with the same result: {first}, then reinstall offloadkit: pip install --force-reinstall "
            "--no-deps offloadkit."
        )
    if facts.triton_fault:
        yield (
            f"Triton {facts.triton_fault}, so the step and the gradient norm on the GPU use slower torch operations, "
            "with the same result: pip install triton, and a C compiler (gcc)."
        )
    if machine.gpu_name and not machine.can_pin:
        limit = facts.locked_memory_bytes
        cause = f": the limit on locked memory is {format_bytes(limit)}" if limit is not None else ""
        yield (
            f"RAM could not be pinned{cause}. Copies to and from the GPU are several times slower: raise the limit "
            "(ulimit -l unlimited; docker run --ulimit memlock=-1)."
        )
    narrow = [link for link in facts.links if 0 < link.width < link.max_width <= 32]
    if narrow:
        slots = ", ".join(f"{link.address} has {link.width} of {link.max_width} lanes" for link in narrow)
        yield f"The PCIe slot is narrower than the card ({slots}): a wider slot copies faster in proportion."
    rate = machine.h2d_bytes_per_second  # idle cards lower their link speed, so a faster copy means the card was idle
    slow = [link for link in facts.links if 0 < link.speed < link.max_speed and rate < link.bytes_per_second()]
    if machine.gpu_name and slow:
        slots = ", ".join(f"{link.address} at {rounded(link.speed)} of {rounded(link.max_speed)} GT/s" for link in slow)
        yield f"PCIe runs slower than the card can ({slots}): check the slot and the BIOS's link speed."
    if facts.swap_used_bytes >= _LITTLE_SWAP_BYTES:
        yield (
            f"{format_bytes(facts.swap_used_bytes)} of swap are in use: RAM was short, and a step that waits for "
            "swapped pages takes many times longer. End other programs."
        )
    if facts.disk_fault:
        yield f"The disk could not be measured: {facts.disk_fault}."


def _notes(facts: Facts) -> Iterator[str]:
    machine = facts.hardware
    free, cores, limit = machine.disk_free_bytes, machine.num_cores, machine.ram_total_bytes
    if machine.disk_folder is not None and free < _LITTLE_DISK_BYTES:
        yield (
            f"{machine.disk_folder} has {format_bytes(free)} free: a checkpoint takes about {_CHECKPOINT_BYTES} bytes "
            f"per parameter, so one of up to {rounded(free / _CHECKPOINT_BYTES / 1e9, 2)} billion parameters can be "
            "saved."
        )
    if machine.gpu_name and not machine.supports_bf16:
        yield (
            f"{machine.gpu_name} has no native bf16 (torch emulates it slowly): working_dtype='auto' uses fp16 with "
            "loss scaling."
        )
    if cores < _FEW_CORES:
        rate = machine.cpu_adamw_bytes_per_second / step_traffic_bytes("exact") / 1e9
        yield (
            f"{cores} CPU core{'s' * (cores != 1)}, which step {rounded(rate, 2)} billion parameters per second: "
            "layers stepped on the CPU wait for them, and DataLoader workers use some of them."
        )
    if limit <= 0.95 * facts.machine_ram_bytes:
        yield (
            f"This process may use {format_bytes(limit)} of the machine's {format_bytes(facts.machine_ram_bytes)} of "
            "RAM: its cgroup limit (docker run --memory, or the cluster's job) decides which models fit."
        )


def advise(facts: Facts) -> list[Advice]:
    return [
        *(Advice("stop", text) for text in _stops(facts)),
        *(Advice("warn", text) for text in _warnings(facts)),
        *(Advice("note", text) for text in _notes(facts)),
    ]


def report(facts: Facts) -> str:
    rows = _rows(facts)
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    advice = [f"- {'STOP: ' if one.level == 'stop' else ''}{one.text}" for one in advise(facts)]
    return "\n".join([*lines, "", *(advice or ["Nothing to improve was found."])])


def _rows(facts: Facts) -> list[tuple[str, str]]:
    machine = facts.hardware
    rows = []
    if machine.gpu_name and machine.compute_capability:
        major, minor = machine.compute_capability
        bf16 = "native bf16" if machine.supports_bf16 else "no native bf16"
        vram = f"{format_bytes(machine.vram_free_bytes)} free of {format_bytes(machine.vram_total_bytes)}"
        vram += of_others(machine.vram_of_others_bytes)
        rows += [
            ("GPU", f"{machine.gpu_name}, compute capability {major}.{minor}, {bf16}"),
            ("VRAM", f"{vram}, {format_bytes(machine.vram_context_bytes)} for CUDA itself"),
        ]
    else:
        rows += [("GPU", "none: RAM takes the role of VRAM")]
    to, back, both = machine.h2d_bytes_per_second, machine.d2h_bytes_per_second, machine.both_bytes_per_second
    rates = {precision: getattr(machine, name) for precision, name in CPU_STEP_RATES.items()}
    steps = ", ".join(f"{kept} {rounded(rate / step_traffic_bytes(kept) / 1e9, 2)}" for kept, rate in rates.items())
    flops = ((name, getattr(machine, f"{name}_flops_per_second")) for name in ("bf16", "fp16", "fp32"))
    kernel = facts.kernel_levels[-1] if facts.kernel_levels else "no C kernel"
    rows += [
        ("copies", f"{format_rate(to)} to VRAM, {format_rate(back)} back, {format_rate(both)} both ways at once"),
        ("memory of the GPU" if machine.gpu_name else "memory", format_rate(machine.vram_bytes_per_second)),
        ("matrix multiplication", ", ".join(f"{name} {format_rate(rate, 'FLOP/s')}" for name, rate in flops)),
        ("operation launch", f"{rounded(machine.launch_seconds * 1e6)} µs"),
        ("CPU", f"{machine.cpu_name}, {machine.num_cores} cores"),
        ("RAM", f"{format_bytes(machine.ram_available_bytes)} available of {format_bytes(machine.ram_total_bytes)}"),
        ("DRAM triad", format_rate(machine.dram_bytes_per_second)),
        ("AdamW on the CPU", f"{steps} billion parameters/s ({kernel})"),
        ("AdamW beside copies", f"{format_rate(machine.cpu_and_bus_bytes_per_second)}, its own and theirs"),
    ]
    if machine.disk_folder:
        read, write = machine.disk_read_bytes_per_second, machine.disk_write_bytes_per_second
        free = format_bytes(machine.disk_free_bytes)
        rows += [
            ("disk", f"{free} free, {format_rate(read)} read, {format_rate(write)} written ({machine.disk_folder})")
        ]
    build = f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "built for the CPU"
    return [*rows, ("torch", f"{torch.__version__}, {build}")]


def as_json(facts: Facts) -> dict[str, Any]:
    return {**asdict(facts), "advice": [asdict(one) for one in advise(facts)]}
