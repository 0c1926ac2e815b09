"""`device.measure.measure` on a GPU: quick, plausible for the GPU, and without leftovers."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import offloadkit
from offloadkit.device.measure import measure
from offloadkit.engine import python_time
from offloadkit.facts import hardware


@pytest.mark.usefixtures("alone")
def test_everything_is_measured_in_under_two_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.zeros(1, device="cuda")
    reserved = torch.cuda.memory_reserved()
    started = time.perf_counter()
    machine = measure(fresh=True)
    took = time.perf_counter() - started
    print(f"{took:.2f} s", *(f"{name} = {value}" for name, value in asdict(machine).items()), sep="\n  ")
    assert took < 2
    assert torch.cuda.memory_reserved() - reserved <= 64 << 20, "more than cuBLAS's workspace is left"
    assert machine.can_pin
    assert 1e9 < machine.h2d_bytes_per_second < 1e12
    assert 1e9 < machine.d2h_bytes_per_second < 1e12
    assert 0.8 * machine.h2d_bytes_per_second < machine.both_bytes_per_second < 2.2 * machine.h2d_bytes_per_second
    assert 1e11 < machine.vram_bytes_per_second < 2e13
    assert 1e12 < machine.fp16_flops_per_second < 5e15
    assert 1e8 < machine.cpu_adamw_bytes_per_second < 1e13
    alone = machine.cpu_adamw_bytes_per_second, machine.both_bytes_per_second
    assert max(alone) <= machine.cpu_and_bus_bytes_per_second <= 1.1 * sum(alone)
    assert 1e-7 < machine.launch_seconds < 1e-4
    assert 50 << 20 < machine.vram_context_bytes <= 1 << 30
    assert 0 < machine.vram_free_bytes < machine.vram_total_bytes


def test_the_second_time_takes_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = measure()
    started = time.perf_counter()
    second = measure()
    assert time.perf_counter() - started < 0.05
    assert first.h2d_bytes_per_second == second.h2d_bytes_per_second


def test_python_is_timed_with_a_models_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation takes longer than a bare launch, by a factor in the range observed on hosts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        python_time, "kept", lambda device, what, names, measured: timed.append(measured()) or timed[-1]
    )
    timed: list[dict[str, float]] = []
    size: dict[str, Any] = {"batch_size": 8, "max_input_length": 512, "max_target_length": 128}
    offloadkit.plan("t5-small", **size)  # compiles kernels and measures the machine
    timed.clear()
    torch.cuda.synchronize()
    reserved, states = torch.cuda.memory_reserved(), (torch.get_rng_state(), torch.cuda.get_rng_state())
    made = offloadkit.plan("t5-small", **size)
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], torch.cuda.get_rng_state())
    assert torch.cuda.memory_reserved() - reserved <= 64 << 20
    assert len(timed) == 2, "the encoder's blocks and the decoder's"
    work, machine = made.basis.work, made.basis.hardware
    assert work is not None
    assert machine is not None
    assert work.operation_launches is not None
    print(timed, "bare launches of an operation in forward and backward:", work.operation_launches)
    assert all(1 < number < 30 for number in work.operation_launches)


def test_the_memory_fraction_limits_what_is_free() -> None:
    device = hardware.default_device()
    _, total = hardware.vram_bytes(device)
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        free, half = hardware.vram_bytes(device)
        assert half == pytest.approx(total / 2, rel=0.01)
        assert free <= half
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
