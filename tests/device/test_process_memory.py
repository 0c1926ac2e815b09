"""Peaks of memory by phase."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch

from offloadkit import hardware
from offloadkit.device import process_memory
from offloadkit.device.process_memory import forget_peak, peak_reserved_bytes, phase, sample_ram
from offloadkit.telemetry import Peaks

MIB = 1 << 20
CPU = torch.device("cpu")


def _take(num_bytes: int) -> None:
    """Fill memory that comes from the system and goes back to it."""
    with mmap.mmap(-1, num_bytes) as memory:
        for at in range(0, num_bytes, mmap.PAGESIZE):
            memory[at] = 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
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
    assert peaks["outer"]["ram"] > before + 60 * MIB  # opened again, it keeps its highest


def test_where_the_system_has_no_peak_that_starts_anew_it_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter([5, 9, 7])
    monkeypatch.setattr(hardware, "restart_peak_ram", lambda: None)
    monkeypatch.setattr(hardware, "process_ram_bytes", lambda: next(used))
    peaks: Peaks = {}
    sample_ram()  # no phase is open: nothing to note
    with phase("outer", peaks, CPU):
        with phase("inner", peaks, CPU):  # 5: the outer one so far
            sample_ram()  # 9
        # 7, as the inner one ends
        monkeypatch.setattr(hardware, "process_ram_bytes", lambda: 3)
    assert peaks == {"outer": {"ram": 5}, "inner": {"ram": 9}}


def test_a_peak_that_is_forgotten_counts_in_its_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    device, counter = torch.device("cuda", 0), [3]  # torch's
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: counter[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: counter.__setitem__(0, 3))
    monkeypatch.setattr(hardware, "vram_context_bytes", lambda _: 100)
    monkeypatch.setattr(process_memory, "_highest_reserved", {})
    peaks: Peaks = {}
    with phase("training", peaks, device):
        counter[0] = 9
        assert peak_reserved_bytes(device) == 9
        forget_peak(device)
        assert peak_reserved_bytes(device) == 3
    assert peaks["training"]["vram"] == 109


@pytest.mark.gpu
def test_a_phase_on_the_gpu_has_what_torch_reserved_in_it() -> None:
    peaks: Peaks = {}
    device = hardware.default_device()
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
