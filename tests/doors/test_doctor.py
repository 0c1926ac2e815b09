"""Every advice of `offloadkit doctor` from made-up facts, the facts read from the system, and the command."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from offloadkit.device import measure as measuring
from offloadkit.doors import doctor
from offloadkit.doors.cli import app
from offloadkit.doors.doctor import Facts, PcieLink
from offloadkit.errors import OutputError
from offloadkit.facts import hardware
from offloadkit.facts.hardware import Hardware
from tests.messages import check_says

GIB = 1 << 30

MACHINE = Hardware(
    device="cuda:0",
    gpu_name="NVIDIA H200",
    compute_capability=(9, 0),
    supports_bf16=True,
    can_pin=True,
    vram_total_bytes=140 * GIB,
    vram_free_bytes=139 * GIB,
    vram_context_bytes=GIB // 2,
    ram_total_bytes=256 * GIB,
    ram_available_bytes=250 * GIB,
    cpu_name="Some CPU",
    num_cores=16,
    h2d_bytes_per_second=55e9,
    d2h_bytes_per_second=54e9,
    both_bytes_per_second=99e9,
    dram_bytes_per_second=179e9,
    cpu_adamw_bytes_per_second=176.8e9,
    cpu_compact_bytes_per_second=171e9,
    cpu_tiny_bytes_per_second=112.5e9,
    cpu_and_bus_bytes_per_second=192e9,
    vram_bytes_per_second=4.1e12,
    launch_seconds=4.2e-6,
    bf16_flops_per_second=720e12,
    fp16_flops_per_second=710e12,
    fp32_flops_per_second=51e12,
    disk_folder="/data",
    disk_free_bytes=900 * GIB,
    disk_read_bytes_per_second=3.1e9,
    disk_write_bytes_per_second=2.2e9,
)
FACTS = Facts(
    hardware=MACHINE,
    kernel_levels=("baseline", "avx2", "avx512"),
    compiler="cc",
    torch_cuda="12.8",
    gpu_in_machine=True,
    gpu_fault=None,
    triton_fault=None,
    disk_fault=None,
    links=(PcieLink("0000:18:00.0", 16, 16, 32.0, 32.0),),
    locked_memory_bytes=8 << 20,
    machine_ram_bytes=256 * GIB,
    swap_used_bytes=0,
)
CPU_ONLY = replace(MACHINE, device="cpu", gpu_name=None, compute_capability=None, can_pin=False)


def machine(**changes: Any) -> Facts:
    return replace(FACTS, hardware=replace(MACHINE, **changes))


def links(*numbers: float, h2d: float = 55e9) -> Facts:
    width, max_width, speed, max_speed = numbers
    link = PcieLink("0000:18:00.0", int(width), int(max_width), speed, max_speed)
    return replace(FACTS, hardware=replace(MACHINE, h2d_bytes_per_second=h2d), links=(link,))


def only(facts: Facts) -> tuple[str, str]:
    (advice,) = doctor.advise(facts)
    return advice.level, advice.text


def test_a_good_machine_gets_no_advice() -> None:
    assert doctor.advise(FACTS) == []
    assert doctor.report(FACTS).endswith("\n\nNothing to improve was found.")


ADVICE: dict[str, tuple[Facts, str, tuple[str, ...]]] = {
    "no kernel, no compiler": (
        replace(FACTS, kernel_levels=(), compiler=None),
        "warn",
        ("install a C compiler", "gcc", "reinstall offloadkit"),
    ),
    "no kernel, but a compiler": (
        replace(FACTS, kernel_levels=(), compiler="gcc"),
        "warn",
        ("gcc", "reinstall offloadkit"),
    ),
    "pinned limit": (machine(can_pin=False), "warn", ("locked memory", "8 MiB")),
    "pinning refused without a limit": (
        replace(machine(can_pin=False), locked_memory_bytes=None),
        "warn",
        ("RAM", "pinned"),
    ),
    "narrow slot": (
        links(4, 16, 16.0, 16.0, h2d=7e9),
        "warn",
        ("PCIe", "0000:18:00.0", "4 of 16 lanes"),
    ),
    "slow link": (
        links(16, 16, 8.0, 32.0, h2d=12e9),
        "warn",
        ("PCIe", "0000:18:00.0", "8 of 32 GT/s"),
    ),
    "swap": (replace(FACTS, swap_used_bytes=3 * GIB), "warn", ("3 GiB of swap",)),
    "emulated bf16": (
        machine(gpu_name="Tesla T4", supports_bf16=False),
        "note",
        ("Tesla T4", "bf16", "working_dtype='auto'", "fp16"),
    ),
    "few cores": (
        machine(num_cores=2, cpu_adamw_bytes_per_second=26e9),
        "note",
        ("2 CPU cores", "1 billion parameters"),
    ),
    "one core": (machine(num_cores=1), "note", ("1 CPU core",)),
    "little disk": (
        machine(disk_free_bytes=24_000_000_000),
        "note",
        ("/data", "22.4 GiB", "12 bytes", "2 billion parameters"),
    ),
    "no disk": (
        replace(machine(disk_folder=None, disk_free_bytes=0), disk_fault="cannot write to /data: Permission denied"),
        "warn",
        ("disk", "/data", "Permission denied"),
    ),
    "cgroup": (
        machine(ram_total_bytes=64 * GIB),
        "note",
        ("64 GiB", "256 GiB of RAM", "cgroup"),
    ),
    "no Triton": (replace(FACTS, triton_fault="is not installed"), "warn", ("Triton is not installed",)),
    "CPU build of torch": (
        replace(FACTS, hardware=CPU_ONLY, torch_cuda=None),
        "warn",
        ("NVIDIA GPU", "torch", "CPU"),
    ),
    "hidden GPU": (
        replace(FACTS, hardware=CPU_ONLY),
        "warn",
        ("NVIDIA GPU", "torch", "CUDA 12.8"),
    ),
    "unusable GPU": (
        replace(FACTS, hardware=CPU_ONLY, gpu_fault="this torch build (sm_80) has no kernels for Tesla K80"),
        "stop",
        ("GPU cannot be used", "this torch build (sm_80) has no kernels for Tesla K80"),
    ),
    "no RAM": (machine(ram_available_bytes=GIB // 2), "stop", ("512 MiB of RAM",)),
}


@pytest.mark.parametrize("case", ADVICE)
def test_advice(case: str) -> None:
    facts, level, told = ADVICE[case]
    found, said = only(facts)
    assert found == level
    check_says(said, *told)
    assert said in doctor.report(facts)


SILENT: dict[str, Facts] = {
    "a card at rest lowers its speed": links(16, 16, 2.5, 32.0),
    "a link that a virtual machine does not show": links(0, 0, 0.0, 0.0),
    "a width that means unknown": links(63, 255, 16.0, 16.0),
    "no GPU anywhere": replace(FACTS, hardware=CPU_ONLY, gpu_in_machine=False, links=(), torch_cuda=None),
    "a little swap": replace(FACTS, swap_used_bytes=1 << 20),
    "firmware takes some RAM": machine(ram_total_bytes=250 * GIB),
}


@pytest.mark.parametrize("case", SILENT)
def test_no_advice(case: str) -> None:
    assert doctor.advise(SILENT[case]) == []


def test_the_gravest_comes_first() -> None:
    facts = replace(machine(num_cores=2, ram_available_bytes=0), kernel_levels=())
    assert [advice.level for advice in doctor.advise(facts)] == ["stop", "warn", "note"]


def test_the_table_shows_what_was_measured() -> None:
    text = doctor.report(FACTS)
    for part in (
        "NVIDIA H200, compute capability 9.0, native bf16",
        "139 GiB free of 140 GiB, 512 MiB for CUDA itself",
        "55 GB/s to VRAM, 54 GB/s back, 99 GB/s both ways at once",
        "4.1 TB/s",
        "bf16 720 TFLOP/s, fp16 710 TFLOP/s, fp32 51 TFLOP/s",
        "4.2 µs",
        "Some CPU, 16 cores",
        "250 GiB available of 256 GiB",
        "179 GB/s",
        "exact 6.8, compact 9.5, tiny 8 billion parameters/s (avx512)",
        "900 GiB free, 3.1 GB/s read, 2.2 GB/s written (/data)",
        "built for CUDA 12.8",
    ):
        assert part in text
    assert "none: RAM takes the role of VRAM" in doctor.report(replace(FACTS, hardware=CPU_ONLY))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int], list[str], int], None]:
    """Sets the GPU's compute capability, the architectures of torch's kernels, and the free bytes of VRAM."""

    def make(capability: tuple[int, int], architectures: list[str], free: int) -> None:
        answers: dict[str, Callable[..., object]] = {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "get_device_name": lambda _: "A10",
            "get_device_capability": lambda _: capability,
            "get_arch_list": lambda: architectures,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(hardware, "vram_bytes", lambda _: (free, 24 * GIB))

    return make


@pytest.mark.parametrize(
    ("capability", "architectures", "fits"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((8, 6), ["sm_80"], True),
        ((7, 5), ["sm_80", "sm_90"], False),
        ((8, 0), ["sm_86"], False),
        ((8, 6), ["sm_90"], False),
        ((12, 0), ["sm_80", "sm_90a"], False),
        ((12, 0), ["sm_80", "compute_90"], True),
        ((9, 4), ["gfx90a", "gfx942"], True),
    ],
)
def test_a_card_needs_kernels_of_its_generation(
    card: Any, capability: tuple[int, int], architectures: list[str], fits: bool
) -> None:
    card(capability, architectures, 8 * GIB)
    fault = doctor.gpu_fault()
    assert (fault is None) is fits
    if fault is not None:
        for fact in ("no kernels", "A10", *architectures):
            assert fact in fault


def test_a_card_needs_free_memory(card: Any) -> None:
    card((8, 6), ["sm_80"], GIB // 4)
    fault = doctor.gpu_fault()
    assert fault is not None
    for fact in ("A10", "256 MiB", "24 GiB", "other processes"):
        assert fact in fault


def test_links_are_read_from_the_bus(tmp_path: Path) -> None:
    cards = {
        "0000:18:00.0": ("0x10de", "0x030200", "8", "16", "16.0 GT/s PCIe", "32.0 GT/s PCIe"),
        "0000:19:00.0": ("0x10de", "0x030000", "16", "16", "Unknown", "8 GT/s"),
        "0000:20:00.0": ("0x10de", "0x040300", "1", "1", "2.5 GT/s", "2.5 GT/s"),
        "0000:21:00.0": ("0x8086", "0x030000", "1", "16", "2.5 GT/s", "8 GT/s"),
    }
    names = ("vendor", "class", "current_link_width", "max_link_width", "current_link_speed", "max_link_speed")
    for address, texts in cards.items():
        (tmp_path / address).mkdir()
        for name, text in zip(names, texts, strict=True):
            (tmp_path / address / name).write_text(f"{text}\n")
    first, second = doctor.pcie_links(tmp_path)
    assert first == PcieLink("0000:18:00.0", 8, 16, 16.0, 32.0)
    assert second == PcieLink("0000:19:00.0", 16, 16, 0.0, 8.0)
    assert doctor.pcie_links(tmp_path / "none") == ()


@pytest.mark.parametrize(("width", "speed", "rate"), [(16, 5.0, 8e9), (16, 16.0, 31.5e9), (16, 32.0, 63e9)])
def test_what_a_link_carries(width: int, speed: float, rate: float) -> None:
    assert PcieLink("", width, width, speed, speed).bytes_per_second() == pytest.approx(rate, rel=0.01)


def run(monkeypatch: pytest.MonkeyPatch, facts: Facts, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "gather", lambda folder: facts)
    done = CliRunner().invoke(app, ["doctor", *arguments])
    return done.exit_code, done.stdout


def test_the_command_exits_with_one_only_where_nothing_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, FACTS)[0] == 0
    assert run(monkeypatch, replace(FACTS, kernel_levels=(), swap_used_bytes=GIB))[0] == 0
    status, text = run(monkeypatch, ADVICE["no RAM"][0])
    assert status == 1
    assert "- STOP: Only 512 MiB" in text


def test_the_command_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = run(monkeypatch, ADVICE["few cores"][0], "--json")
    found = json.loads(text)
    assert status == 0
    assert found["hardware"]["num_cores"] == 2
    assert found["links"][0]["width"] == 16
    assert [advice["level"] for advice in found["advice"]] == ["note"]


def test_this_machine_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "_MATMUL_SIZES", (256,))
    monkeypatch.setattr(measuring, "_COPY_BYTES", 8 << 20)
    done = CliRunner().invoke(app, ["doctor", "--folder", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "billion parameters/s" in done.stdout
    assert str(tmp_path) in done.stdout


def test_a_folder_that_cannot_be_written_is_an_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(device: object, *, folder: Path | None = None, fresh: bool) -> Hardware:
        if folder is not None:
            raise OutputError(f"{folder} is not a folder")
        return replace(MACHINE, disk_folder=None)

    monkeypatch.setattr(doctor, "measure", measure)
    facts = doctor.gather(tmp_path / "missing")
    assert facts.disk_fault is not None
    assert "missing is not a folder" in facts.disk_fault


def test_the_report_alone_says_that_the_kernel_is_missing(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, tmp_path: Path
) -> None:
    def measure(*_: object, **__: object) -> Hardware:
        warnings.warn("the kernels are missing", stacklevel=2)
        return CPU_ONLY

    monkeypatch.setattr(doctor, "measure", measure)
    assert doctor.gather(tmp_path).hardware is CPU_ONLY
    assert list(recwarn) == []
