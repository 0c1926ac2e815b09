"""Limits and figures of `compare` on a GPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from offloadkit.device.process_memory import DeviceMemory
from offloadkit.doors.comparing.comparison import compare
from offloadkit.doors.engines.runner import in_fresh_process
from offloadkit.doors.engines.work import Work

GIB = 1 << 30


def test_a_baseline_past_its_limit_says_what_it_needs(tmp_path: Path) -> None:
    work = Work("t5-base", batch_size=8, input_length=512, target_length=128, vram=2 * GIB)
    task = {"mode": "measure", "engine": "baseline", "work": asdict(work)}
    row = in_fresh_process(task, timeout=200, ram=None, log=tmp_path / "log")
    assert row["status"] == "does not fit"
    assert row["reason"].startswith("does not fit: needs more than 2")
    assert row["reason"].endswith("GiB of VRAM, has 2 GiB")


def test_both_keep_to_a_limit_and_are_measured(tmp_path: Path) -> None:
    result = compare(("t5-small",), ("baseline", "offloadkit"), vram="4GiB", ram="16GiB", steps=3, output_dir=tmp_path)
    for row in result.rows:
        assert row["status"] == "measured", row
        assert 0.5 * GIB < row["vram_bytes"] < 4.4 * GIB
        assert row["max_reserved_bytes"] <= row["vram_bytes"]
        assert row["dtype"] == ("bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16")
    assert result.rows[0]["last_loss"] == pytest.approx(result.rows[1]["last_loss"], rel=0.05)


def test_the_drivers_figure_sees_what_torch_allocates() -> None:
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    memory = DeviceMemory(device)
    torch.zeros(1, device=device)
    memory.sample()
    before = memory.peak_bytes
    kept = torch.zeros(GIB, dtype=torch.uint8, device=device)
    memory.sample()
    assert memory.peak_bytes - before == pytest.approx(kept.numel(), rel=0.05)
