"""A plan for Colab's free machine: 12 GiB of RAM and a T4, which emulates bf16."""

from __future__ import annotations

import pytest
import torch

import offloadkit
from offloadkit.doors import planning
from offloadkit.errors import DoesNotFitError
from offloadkit.planner import Plan
from tests.planner.machines import GIB, T4

D_MODEL, D_FF, NUM_BLOCKS = 768, 3072, 24
"""T5-base."""


@pytest.fixture(autouse=True)
def on_a_t4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "measure", lambda *_, **__: T4)


def plan(name: str) -> Plan:
    device = torch.device("cuda", 0)
    return offloadkit.plan(name, batch_size=1, max_input_length=128, max_target_length=32, device=device)


def test_t5_is_trained_in_fp16_but_for_the_matrices_that_overflow_in_it() -> None:
    made = plan("t5-base")
    assert made.fits
    sizes = {
        dtype: sum(layer.num_parameters for layer in made.layers if layer.dtype == dtype) for dtype in ("fp16", "fp32")
    }
    assert sizes["fp32"] == NUM_BLOCKS * D_MODEL * D_FF  # `wo`
    assert sum(sizes.values()) == made.num_parameters
    assert made.total_bytes("vram") <= T4.vram_total_bytes
    assert made.total_bytes("ram") <= T4.ram_available_bytes


@pytest.mark.slow
def test_t5_3b_is_refused_and_the_ram_that_it_lacks_is_named() -> None:
    made = plan("t5-3b")
    assert made.lacking() == {"ram": made.total_bytes("ram") - T4.ram_available_bytes}
    assert made.total_bytes("vram") <= T4.vram_total_bytes
    needs = made.total_bytes("ram") / GIB
    with pytest.raises(DoesNotFitError, match=rf"needs {needs:.1f} GiB of RAM, has 12 GiB"):
        planning.check_fits(made)
