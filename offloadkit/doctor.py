"""What this machine has, how fast it is, and what would improve training on it, in plain sentences."""

from __future__ import annotations

import resource
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from offloadkit import hardware
from offloadkit.config import Precision
from offloadkit.device.measure import measure, step_traffic_bytes
from offloadkit.errors import OutputError
from offloadkit.hardware import Hardware
from offloadkit.kernels import cpu, gpu
from offloadkit.units import format_bytes

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidia0"), Path("/dev/dxg"))

_MIN_RAM_BYTES = 1 << 30
_MIN_VRAM_BYTES = 512 << 20
_LITTLE_DISK_BYTES = 50 << 30
_LITTLE_SWAP_BYTES = 64 << 20
_FEW_CORES = 4
_CHECKPOINT_BYTES = 12
"""Bytes of a parameter's bf16 weight and its states in `exact`."""


@dataclass(frozen=True)
class PcieLink:
    """How a graphics card is connected. Numbers that the system does not report are 0."""

    address: str
    width: int
    max_width: int
    """Lanes of the card."""
    speed: float
    """GT/s of a lane."""
    max_speed: float

    def bytes_per_second(self) -> float:
        """Highest rate in one direction. A byte is 10 bits on the wire below 8 GT/s, else 8 x 130 / 128."""
        return self.width * self.speed * 1e9 / (8 * 130 / 128 if self.speed >= 8 else 10)


@dataclass(frozen=True)
class Facts:
    """What the advice is based on."""

    hardware: Hardware
    kernel_levels: tuple[str, ...]
    """Instruction sets that the C kernel can use, slowest first; empty if it is missing."""
    compiler: str | None
    torch_cuda: str | None
    """CUDA (or ROCm) version that torch was built for."""
    gpu_in_machine: bool
    """Whether an NVIDIA card or its driver is there, even if torch does not see it."""
    gpu_fault: str | None
    """Why the GPU that torch sees cannot be used."""
    triton_fault: str | None
    disk_fault: str | None
    links: tuple[PcieLink, ...]
    locked_memory_bytes: int | None
    """The limit on locked memory; None if there is none."""
    machine_ram_bytes: int
    swap_used_bytes: int


@dataclass(frozen=True)
class Advice:
    """One or two sentences, and how important they are."""

    level: Literal["stop", "warn", "note"]
    """"stop": training does not work before this is changed."""
    text: str


def gather(folder: Path) -> Facts:
    """Measure this machine, and the disk of `folder`."""
    fault = _gpu_fault()
    device = "cpu" if fault else None
    disk_fault = None
    try:
        measured = measure(device, folder=folder, fresh=True)
    except OutputError as error:
        disk_fault = str(error)
        measured = measure(device, fresh=True)
    cuda: str | None = torch.version.cuda or torch.version.hip
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Facts(
        hardware=measured,
        kernel_levels=tuple(cpu.cpu_levels()),
        compiler=next(filter(shutil.which, ("cc", "gcc", "clang")), None),
        torch_cuda=cuda,
        gpu_in_machine=bool(_links()) or any(path.exists() for path in _DRIVER_FILES),
        gpu_fault=fault,
        triton_fault=_triton_fault() if measured.gpu_name else None,
        disk_fault=disk_fault,
        links=_links(),
        locked_memory_bytes=None if limit == resource.RLIM_INFINITY else limit,
        machine_ram_bytes=int(psutil.virtual_memory().total),
        swap_used_bytes=int(psutil.swap_memory().used),
    )


def _gpu_fault() -> str | None:
    if not torch.cuda.is_available():
        return None
    device = hardware.default_device()
    name = torch.cuda.get_device_name(device)
    if not _built_for(torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()):
        return f"this torch build ({' '.join(torch.cuda.get_arch_list())}) has no kernels for {name}"
    free, total = hardware.vram_bytes(device)
    if free < _MIN_VRAM_BYTES:
        return f"{format_bytes(free)} of {format_bytes(total)} of VRAM are free on {name}: other processes hold it"
    return None


def _built_for(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Whether a CUDA device runs one of these: "sm_80" on 8.0 to 8.9, "compute_80" on all that are newer."""
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


def _links() -> tuple[PcieLink, ...]:
    """NVIDIA's cards on the bus."""
    found = []
    for folder in sorted(_PCI_DEVICES.glob("*")):
        if _text(folder / "vendor") == _NVIDIA and _text(folder / "class").startswith(_DISPLAY):
            names = ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed")
            width, max_width, speed, max_speed = (_number(_text(folder / name)) for name in names)
            found.append(PcieLink(folder.name, int(width), int(max_width), speed, max_speed))
    return tuple(found)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(text: str) -> float:
    """Of "16", "16.0 GT/s PCIe", "Unknown" and ""."""
    try:
        return float(text.split(" ")[0])
    except ValueError:
        return 0.0


def _gpu(facts: Facts) -> Advice | None:
    return Advice("stop", f"The GPU cannot be used: {facts.gpu_fault}.") if facts.gpu_fault else None


def _torch_without_gpu(facts: Facts) -> Advice | None:
    if facts.hardware.gpu_name or facts.gpu_fault or not facts.gpu_in_machine:
        return None
    if facts.torch_cuda is None:
        return Advice(
            "warn",
            "There is an NVIDIA GPU, but torch is built for the CPU alone, so training runs on the CPU. Install torch "
            "with CUDA: see https://pytorch.org/get-started/locally.",
        )
    return Advice(
        "warn",
        f"There is an NVIDIA GPU, but torch (built for CUDA {facts.torch_cuda}) sees none, so training runs on the "
        "CPU. Update the driver if nvidia-smi shows an older CUDA version; see that CUDA_VISIBLE_DEVICES hides none.",
    )


def _ram(facts: Facts) -> Advice | None:
    available = facts.hardware.ram_available_bytes
    if available >= _MIN_RAM_BYTES:
        return None
    return Advice("stop", f"Only {format_bytes(available)} of RAM are available: end other programs first.")


def _kernel(facts: Facts) -> Advice | None:
    if facts.kernel_levels:
        return None
    first = f"there is a compiler now ({facts.compiler})" if facts.compiler else "install a C compiler (gcc or clang)"
    return Advice(
        "warn",
        "The C kernel is missing, so the CPU step is 5 to 20 times slower, with the same result: "
        f"{first}, then reinstall offloadkit: pip install --force-reinstall --no-deps offloadkit.",
    )


def _triton(facts: Facts) -> Advice | None:
    if facts.triton_fault is None:
        return None
    return Advice(
        "warn",
        f"Triton {facts.triton_fault}, so the step and the gradient norm on the GPU use slower torch operations, with "
        "the same result: pip install triton, and a C compiler (gcc).",
    )


def _pinned(facts: Facts) -> Advice | None:
    if facts.hardware.gpu_name is None or facts.hardware.can_pin:
        return None
    limit = facts.locked_memory_bytes
    cause = f": the limit on locked memory is {format_bytes(limit)}" if limit is not None else ""
    return Advice(
        "warn",
        f"RAM could not be pinned{cause}. Copies to and from the GPU are several times slower: raise the limit "
        "(ulimit -l unlimited; docker run --ulimit memlock=-1).",
    )


def _narrow(facts: Facts) -> Advice | None:
    narrow = [link for link in facts.links if 0 < link.width < link.max_width <= 32]
    if not narrow:
        return None
    slots = ", ".join(f"{link.address} has {link.width} of {link.max_width} lanes" for link in narrow)
    return Advice(
        "warn", f"The PCIe slot is narrower than the card ({slots}): a wider slot copies faster, lane for lane."
    )


def _slow_link(facts: Facts) -> Advice | None:
    """Idle cards lower their link speed: if measured copies are faster than the link says, the card was idle."""
    measured = facts.hardware.h2d_bytes_per_second
    slow = [link for link in facts.links if 0 < link.speed < link.max_speed and measured < link.bytes_per_second()]
    if facts.hardware.gpu_name is None or not slow:
        return None
    slots = ", ".join(f"{link.address} at {link.speed:g} of {link.max_speed:g} GT/s" for link in slow)
    return Advice("warn", f"PCIe runs slower than the card can ({slots}): see the slot and the BIOS's link speed.")


def _bf16(facts: Facts) -> Advice | None:
    if facts.hardware.gpu_name is None or facts.hardware.supports_bf16:
        return None
    return Advice(
        "note",
        f"{facts.hardware.gpu_name} has no native bf16 (torch emulates it, slowly): working_dtype='auto' takes fp16 "
        "with loss scaling.",
    )


def _cores(facts: Facts) -> Advice | None:
    cores = facts.hardware.num_cores
    if cores >= _FEW_CORES:
        return None
    rate = facts.hardware.cpu_adamw_bytes_per_second / step_traffic_bytes("exact") / 1e9
    return Advice(
        "note",
        f"{cores} CPU core{'s' * (cores != 1)}, which step {rate:.2g} billion parameters a second: what is stepped on "
        "the CPU waits for them, and DataLoader workers take their share.",
    )


def _cgroup(facts: Facts) -> Advice | None:
    limit = facts.hardware.ram_total_bytes
    if limit > 0.95 * facts.machine_ram_bytes:
        return None
    return Advice(
        "note",
        f"This process may use {format_bytes(limit)} of the machine's {format_bytes(facts.machine_ram_bytes)} of RAM: "
        "its cgroup's limit (docker run --memory, or the cluster's job) decides what fits.",
    )


def _swap(facts: Facts) -> Advice | None:
    if facts.swap_used_bytes < _LITTLE_SWAP_BYTES:
        return None
    return Advice(
        "warn",
        f"{format_bytes(facts.swap_used_bytes)} of swap are in use: RAM was short, and a step that waits for swapped "
        "pages takes many times longer. End other programs.",
    )


def _disk(facts: Facts) -> Advice | None:
    if facts.disk_fault:
        return Advice("warn", f"The disk could not be measured: {facts.disk_fault}.")
    free = facts.hardware.disk_free_bytes
    if facts.hardware.disk_folder is None or free >= _LITTLE_DISK_BYTES:
        return None
    return Advice(
        "note",
        f"{facts.hardware.disk_folder} has {format_bytes(free)} free: a checkpoint takes about {_CHECKPOINT_BYTES} "
        f"bytes a parameter, so up to {free / _CHECKPOINT_BYTES / 1e9:.2g} billion parameters can be saved once.",
    )


_RULES: tuple[Callable[[Facts], Advice | None], ...] = (
    *(_gpu, _ram),
    *(_torch_without_gpu, _kernel, _triton, _pinned, _narrow, _slow_link, _swap, _disk),
    *(_bf16, _cores, _cgroup),
)


def advise(facts: Facts) -> list[Advice]:
    """What to change, the most important first; empty if nothing needs to change."""
    return [advice for rule in _RULES if (advice := rule(facts)) is not None]


def report(facts: Facts) -> str:
    """The measurements as a table, and the advice."""
    rows = _rows(facts)
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    words = {"stop": "STOP: ", "warn": "", "note": ""}
    advice = [f"- {words[one.level]}{one.text}" for one in advise(facts)]
    return "\n".join([*lines, "", *(advice or ["Nothing to improve was found."])])


def _rows(facts: Facts) -> list[tuple[str, str]]:
    machine = facts.hardware
    rows = []
    if machine.gpu_name and machine.compute_capability:
        major, minor = machine.compute_capability
        bf16 = "native bf16" if machine.supports_bf16 else "no native bf16"
        vram = f"{format_bytes(machine.vram_free_bytes)} free of {format_bytes(machine.vram_total_bytes)}"
        rows += [
            ("GPU", f"{machine.gpu_name}, compute capability {major}.{minor}, {bf16}"),
            ("VRAM", f"{vram}, {format_bytes(machine.vram_context_bytes)} for CUDA itself"),
        ]
    else:
        rows += [("GPU", "none: RAM stands in for VRAM")]
    to, back, both = machine.h2d_bytes_per_second, machine.d2h_bytes_per_second, machine.both_bytes_per_second
    traffic: dict[Precision, float] = {
        "exact": machine.cpu_adamw_bytes_per_second,
        "compact": machine.cpu_compact_bytes_per_second,
        "tiny": machine.cpu_tiny_bytes_per_second,
    }
    steps = ", ".join(f"{kept} {rate / step_traffic_bytes(kept) / 1e9:.2g}" for kept, rate in traffic.items())
    flops = ((name, getattr(machine, f"{name}_flops_per_second")) for name in ("bf16", "fp16", "fp32"))
    kernel = facts.kernel_levels[-1] if facts.kernel_levels else "no C kernel"
    rows += [
        ("copies", f"{_giga(to)}B/s to VRAM, {_giga(back)}B/s back, {_giga(both)}B/s both ways at once"),
        ("memory of the GPU" if machine.gpu_name else "memory", f"{_giga(machine.vram_bytes_per_second)}B/s"),
        ("matrix multiplication", ", ".join(f"{name} {_giga(rate)}FLOP/s" for name, rate in flops)),
        ("operation launch", f"{machine.launch_seconds * 1e6:.1f} µs"),
        ("CPU", f"{machine.cpu_name}, {machine.num_cores} cores"),
        ("RAM", f"{format_bytes(machine.ram_available_bytes)} available of {format_bytes(machine.ram_total_bytes)}"),
        ("DRAM triad", f"{_giga(machine.dram_bytes_per_second)}B/s"),
        ("AdamW on the CPU", f"{steps} billion parameters/s ({kernel})"),
        ("AdamW beside copies", f"{_giga(machine.cpu_and_bus_bytes_per_second)}B/s, its own and theirs"),
    ]
    if machine.disk_folder:
        read, write = machine.disk_read_bytes_per_second, machine.disk_write_bytes_per_second
        free = format_bytes(machine.disk_free_bytes)
        rows += [("disk", f"{free} free, {_giga(read)}B/s read, {_giga(write)}B/s written ({machine.disk_folder})")]
    build = f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "built for the CPU"
    return [*rows, ("torch", f"{torch.__version__}, {build}")]


def _giga(rate: float) -> str:
    """ "55 G", "1.2 T"."""
    return f"{rate / 1e12:.3g} T" if rate >= 1e12 else f"{rate / 1e9:.3g} G"


def as_json(facts: Facts) -> dict[str, Any]:
    """Measurements and advice as plain values, for JSON."""
    return {**asdict(facts), "advice": [asdict(one) for one in advise(facts)]}
