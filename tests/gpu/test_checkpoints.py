"""Checkpoints on a GPU: arrays in VRAM pass through pinned pieces, and the GPU's random state is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offloadkit.checkpoint import arrays
from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts.config import OffloadConfig, Placement
from tests.models import TinyLM, tokens, train


@pytest.mark.parametrize("precision", ["exact", "tiny"])
def test_a_run_goes_on_under_another_placement(tmp_path: Path, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "PIECE_BYTES", 4096)
    placements = [Placement(step="gpu", gradients="vram", states="vram"), Placement(weights="ram")]
    batches = tokens(4, "cuda")
    for first, then in (placements, placements[::-1]):
        found = []
        for placement in (first, then):
            torch.manual_seed(len(found))
            config = OffloadConfig(learning_rate=1e-2, working_dtype="bf16", precision=precision, placement=placement)
            with OffloadEngine(TinyLM(dropout=0.2), config, device="cuda") as engine:
                if not found:
                    train(engine, batches[:2])
                    engine.save_checkpoint(tmp_path / "saved")
                else:
                    engine.load_checkpoint(tmp_path / "saved")
                train(engine, batches[2:])
                found.append(engine.master_weights())
        assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())
