"""Peak memory by phase."""

from __future__ import annotations

import mmap
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloadkit.device import process_memory
from offloadkit.device.process_memory import (
    DeviceMemory,
    VramCap,
    forget_peak,
    peak_reserved_bytes,
    phase,
    sample_ram,
)
from offloadkit.facts import hardware, nvml
from offloadkit.facts.fitted import LOADED_LATER_BYTES
from offloadkit.facts.telemetry import Peaks
from tests.nvml import Library, nvml_is

MIB, GIB = 1 << 20, 1 << 30
CPU = torch.device("cpu")


def _take(num_bytes: int) -> None:
    """Allocate memory directly from the system and release it."""
    with mmap.mmap(-1, num_bytes) as memory:
        for at in range(0, num_bytes, mmap.PAGESIZE):
            memory[at] = 1


def test_each_phase_has_its_own_peak_and_the_process_keeps_the_highest() -> None:
    peaks: Peaks = {}
    before = hardware.process_ram_bytes()
    with phase("outer", peaks, CPU):
        _take(64 * MIB)
        with phase("inner", peaks, CPU):
            _take(16 * MIB)
    assert peaks["outer"]["ram"] > before + 60 * MIB
    assert before + 12 * MIB < peaks["inner"]["ram"] < before + 32 * MIB
    assert hardware.process_peak_ram_bytes() >= peaks["outer"]["ram"]
    with phase("outer", peaks, CPU):
        pass
    assert peaks["outer"]["ram"] > before + 60 * MIB  # opened again, the phase keeps its peak


def test_where_the_system_has_no_peak_that_starts_anew_it_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([5, 9, 7])
    monkeypatch.setattr(hardware, "restart_peak_ram", lambda: None)
    monkeypatch.setattr(hardware, "process_ram_bytes", lambda: next(used))
    peaks: Peaks = {}
    sample_ram()  # no phase is open: nothing is recorded
    with phase("outer", peaks, CPU):
        with phase("inner", peaks, CPU):  # 5: the outer phase so far
            sample_ram()  # 9
        # 7, as the inner phase ends
        monkeypatch.setattr(hardware, "process_ram_bytes", lambda: 3)
    assert peaks == {"outer": {"ram": 5}, "inner": {"ram": 9}}


def test_a_peak_that_is_forgotten_counts_in_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    device, counter = torch.device("cuda", 0), [3]  # of torch
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: counter[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: counter.__setitem__(0, 3))
    monkeypatch.setattr(hardware, "vram_context_bytes", lambda _: 100)
    forget_peak(device)
    peaks: Peaks = {}
    with phase("training", peaks, device):
        counter[0] = 9
        assert peak_reserved_bytes(device) == 9
        forget_peak(device)
        assert peak_reserved_bytes(device) == 3
    assert peaks["training"]["vram"] == 109


class Card:
    """A GPU of 64 GiB: torch's reserved bytes and a CUDA context take part of it."""

    total = 64 << 30

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.others = 0
        self.context, self.reserved, self.allowed, self.num_readings, self.num_emptied = 512 * MIB, 0, 0, 0, 0
        self.share(1.0)
        patch.setattr(torch.cuda, "mem_get_info", self.info)
        patch.setattr(torch.cuda, "memory_reserved", lambda _: self.reserved)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=self.total))
        patch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: self.allowed / self.total)
        patch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: self.share(share))
        patch.setattr(torch.cuda, "empty_cache", self.empty)
        patch.setattr(nvml, "process_bytes", lambda _: None)
        patch.setattr(hardware, "_loaded_bytes", {})
        patch.setattr(process_memory, "load_libraries", lambda _: None)

    def info(self, _: Any) -> tuple[int, int]:
        self.num_readings += 1
        return self.total - self.context - self.reserved - self.others, self.total

    def share(self, share: float) -> None:
        self.allowed = round(share * self.total)

    def empty(self) -> None:
        self.num_emptied += 1
        self.reserved = min(self.reserved, self.allowed)


def test_a_cap_on_vram_follows_the_context_until_it_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    card, limit = Card(monkeypatch), 24 << 30
    cap = VramCap(limit, torch.device("cuda", 0))
    assert card.allowed < limit - card.context  # a part is held back for kernels that load later
    card.reserved = card.allowed
    for context in (600 * MIB, 700 * MIB):
        card.context = context  # the context may grow by 100 MiB between readings
        assert card.allowed + card.context <= limit
        cap.renew("training")
    assert card.num_emptied == 2  # torch's cache beyond the new limit was released
    assert card.reserved + card.context < limit
    cap.renew("training")
    assert card.allowed + card.context == limit
    card.context, before = 800 * MIB, card.num_readings
    cap.renew("training")
    assert card.num_readings == before  # settled: no more readings
    cap.renew("evaluation")
    assert card.allowed + card.context == limit
    card.context = 900 * MIB
    cap.watch()
    cap.renew("training")
    assert card.allowed + card.context < limit
    cap.remove()
    assert card.allowed == card.total


def test_a_neighbour_takes_nothing_of_a_small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVML. The plan has counted on the context's present size and `LOADED_LATER_BYTES`."""
    card, limit, device = Card(monkeypatch), 3 << 29, torch.device("cuda", 0)
    monkeypatch.setattr(process_memory, "load_libraries", hardware.note_loaded_libraries)
    cap = VramCap(limit, device)
    planned = limit - card.context - LOADED_LATER_BYTES
    assert card.allowed == planned
    for others in (GIB, 2 * GIB, 2 * GIB):
        card.others = others
        cap.renew("training")
        assert card.allowed == planned
    card.others = 0
    cap.watch()
    for _ in range(2):
        cap.renew("training")
    assert card.allowed == limit - card.context
    cap.remove()


@pytest.mark.parametrize("ends_first", [0, 1])
def test_of_two_caps_the_lowest_holds_whichever_ends_first(ends_first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines are open, and each limits torch's allocator."""
    card, device = Card(monkeypatch), torch.device("cuda", 0)
    limits = (24 << 30, 16 << 30)
    caps = [VramCap(limit, device) for limit in limits]
    for _ in range(2):
        caps[0].renew("training")
    assert card.allowed + card.context < limits[1]
    caps[ends_first].remove()
    last = caps[1 - ends_first]
    for work in ("training", "evaluation"):
        last.renew(work)
        last.renew(work)
    assert card.allowed + card.context == limits[1 - ends_first]
    last.remove()
    last.remove()
    assert card.allowed == card.total


def test_without_a_limit_nothing_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    for cap in (VramCap(None, torch.device("cuda", 0)), VramCap(1 << 30, CPU)):
        cap.renew("training")
        cap.remove()
    assert (card.num_readings, card.allowed) == (0, card.total)


@pytest.mark.parametrize(
    ("visible", "number"), [("", 1), ("3,2", 2), ("GPU-c,GPU-b", 1)], ids=["all", "by number", "by UUID"]
)
def test_the_memory_that_is_read_is_that_of_the_device_itself(
    visible: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    library.used = dict.fromkeys(range(4), 100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible) if visible else monkeypatch.delenv(
        "CUDA_VISIBLE_DEVICES", raising=False
    )
    with nvml_is(library):
        memory = DeviceMemory(torch.device("cuda", 1))
        library.used = {each: 100 + each for each in library.used}
        memory.sample()
        assert (memory.source, memory.peak_bytes) == ("NVML, growth of the device", number)
        library.processes[number] = [(os.getpid(), 7), (1, 50)]
        memory.sample()
        assert (memory.source, memory.peak_bytes) == ("NVML, this process", 7)


@pytest.mark.gpu
def test_a_phase_on_the_gpu_has_what_torch_reserved_in_it() -> None:
    peaks: Peaks = {}
    device = hardware.default_device()
    torch.zeros(1, device=device)  # loads its kernel, which takes VRAM too
    torch.cuda.empty_cache()
    forget_peak(device)
    with phase("outer", peaks, device):
        taken = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
        del taken
        torch.cuda.empty_cache()
        with phase("inner", peaks, device):
            torch.zeros(1, device=device)
    assert peaks["outer"]["vram"] > peaks["inner"]["vram"] + 200 * MIB
    assert peak_reserved_bytes(device) >= 256 * MIB
    forget_peak(device)
    assert peak_reserved_bytes(device) < 256 * MIB
