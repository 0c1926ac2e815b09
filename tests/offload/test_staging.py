"""Sums of gradients in RAM: the staging ring is shared by gradients of all sizes, and changes no bits."""

from __future__ import annotations

import random
import threading
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloadkit.device import watchdog
from offloadkit.device.streams import CopyStream, Waits
from offloadkit.errors import HangError
from offloadkit.offload.gradient_buffers import RamSums, Staging
from tests.simulated_streams import Simulation

CPU = torch.device("cpu")


def ring(num_bytes: int) -> Staging:
    return Staging(torch.arange(num_bytes, dtype=torch.uint8), Waits(CPU))


def test_small_gradients_do_not_take_the_room_of_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "LIMIT_SECONDS", 0.05)
    staging, events = ring(200), [threading.Event() for _ in range(6)]
    taken = [staging.take(size, event) for size, event in zip((10, 90, 10, 80), events, strict=False)]
    assert [[part.numel() for part in parts] for parts in taken] == [[10], [90], [10], [80]]
    assert torch.equal(torch.cat([part for parts in taken for part in parts]), torch.arange(190, dtype=torch.uint8))
    events[1].set()
    with pytest.raises(HangError, match="gradients to be added in RAM"):
        staging.take(90, events[4])  # the oldest gradient is still in the ring
    events[0].set()
    parts = staging.take(90, events[4])
    assert [part.tolist() for part in parts] == [list(range(190, 200)), list(range(80))]
    assert staging.take(0, events[5]) == []
    assert [part.tolist() for part in staging.take(20, events[5])] == [list(range(80, 100))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_equal_those_without_a_ring(dtype: torch.dtype) -> None:
    """Layers of several ranks: each rank's part is added in order, also where a gradient crosses the ring's end."""
    draw, jobs = random.Random(0), SimpleQueue[Any]()
    sizes, num_ranks = [draw.choice((1, 3, 40, 64)) * 16 for _ in range(6)], 3

    def work() -> None:
        while (job := jobs.get()) is not None:
            job()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    layers: Any = [SimpleNamespace(window_in_ram=torch.zeros(size), layer=SimpleNamespace(name="")) for size in sizes]
    expected = [torch.zeros(size) for size in sizes]
    with Simulation(seed=0, longest=1e-3).running():
        memory = torch.empty(2 * num_ranks * max(sizes) * dtype.itemsize, dtype=torch.uint8)
        sums = RamSums(CopyStream(CPU, "D2H"), Waits(CPU), jobs.put, memory)
        for number in range(12):
            for layer, sum_, size in zip(layers, expected, sizes, strict=True):
                gradient = torch.randn(num_ranks * size).to(dtype)
                ranges = [(rank * size, 0, size, number + rank > 0) for rank in range(num_ranks)]
                sums.add(layer, gradient, ranges)
                for part in gradient.split(size):
                    sum_ += part
        jobs.put(None)
        thread.join(60)
    assert all(torch.equal(layer.window_in_ram, sum_) for layer, sum_ in zip(layers, expected, strict=True))
