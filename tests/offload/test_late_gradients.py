"""Gradients that arrive after their layer was sent: torch's own recomputation brings one for each use of a block."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts.config import OffloadConfig, Placement
from tests.models import Twin, tokens
from tests.offload.test_waits import Twice


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("where", ["ram", "vram"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_all_uses_of_a_block_are_added_up(accumulation: int, where: Literal["ram", "vram"]) -> None:
    torch.manual_seed(0)
    config = OffloadConfig(learning_rate=1e-3, gradient_accumulation=accumulation, placement=Placement(gradients=where))
    with OffloadEngine(Twice(1027, 1027, 3), config, device="cpu") as engine:
        twin = Twin(engine, None, lr=1e-3, weight_decay=0.0)
        batches = tokens(6 * accumulation)
        for step in range(6):
            window = batches[step * accumulation : (step + 1) * accumulation]
            twin.step(window, 1.0)
            for batch in window:
                engine.backward(engine(batch))
                engine.step()
            assert engine.grad_norm() == pytest.approx(twin.norm, rel=1e-5)
        assert twin.relative_difference() <= 5e-6
