"""Streamed states leave gaps on the bus for other copies."""

from __future__ import annotations

import pytest
import torch

from offloadkit.device.streams import CopyStream
from offloadkit.offload import state_ring
from offloadkit.offload.state_ring import StateRing, StreamedStates
from offloadkit.optim.adamw import adamw_scalars
from offloadkit.optim.table import FlatState, Segment, state_table

pytestmark = pytest.mark.gpu

CHUNK, NUM_CHUNKS = 1 << 22, 64


def test_another_copy_to_vram_goes_between_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes of states are queued; a copy queued later starts before they all have arrived."""
    device = torch.device("cuda")
    numel = CHUNK * NUM_CHUNKS
    monkeypatch.setattr(state_ring, "chunk_numel", lambda total: CHUNK)
    monkeypatch.setattr(state_ring, "MOST_UNDER_WAY", 2 * NUM_CHUNKS)
    remainder = torch.zeros(numel, dtype=torch.int16, pin_memory=True)
    moments = [torch.zeros(numel, pin_memory=True) for _ in range(2)]
    weights = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    names, table = ("remainder", "exp_avg", "exp_avg_sq"), state_table("adamw", "exact", torch.bfloat16)
    state = FlatState(table, weights, dict(zip(names, [remainder, *moments], strict=True)))
    layer = StreamedStates("layer", state, weights, None)
    segments = [Segment(0, numel, adamw_scalars(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, step=1), 0, 0)]
    gradient = torch.zeros_like(weights)
    ring, kernels = StateRing(device, 10 * CHUNK + 4096, 3), CopyStream(device, "step on the GPU", urgent=True)
    other, source = CopyStream(device, "H2D"), torch.zeros(10 * CHUNK, dtype=torch.uint8, pin_memory=True)
    into = torch.empty_like(source, device=device)
    ring.step(layer, gradient, segments, 1.0, kernels)  # compiles the step
    torch.cuda.synchronize()

    began = other.record(timing=True)
    ring.step(layer, gradient, segments, 1.0, kernels)
    other.copy(into, source)
    arrived = other.record(timing=True)
    torch.cuda.synchronize()
    ended = kernels.record(timing=True)
    ended.synchronize()
    assert arrived.seconds_since(began) < 0.6 * ended.seconds_since(began)
