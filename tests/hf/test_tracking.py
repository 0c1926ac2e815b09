"""Trackers get memory, speed and slowdown beside the loss."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offloadkit import OffloadSeq2SeqTrainer
from offloadkit.facts.telemetry import StepRecord, Telemetry
from offloadkit.hf import tracking
from offloadkit.hf.tracking import memory_and_speed
from tests.hf.training import arguments, seq2seq_rows, t5

GIB = 1 << 30


def logged(folder: Path, report_to: list[str]) -> list[set[str]]:
    """The names in each log entry with a loss."""
    args = arguments(folder, max_steps=3, logging_steps=1)
    trainer = OffloadSeq2SeqTrainer(model=t5(), args=args, train_dataset=seq2seq_rows())
    trainer.args.report_to = report_to  # as its constructor would, if the package were installed
    trainer.train()
    return [set(entry) for entry in trainer.state.log_history if "loss" in entry]


def test_a_tracker_gets_memory_and_speed_and_the_log_without_one_does_not(tmp_path: Path) -> None:
    ours = {"ram_gib", "step_seconds", "tokens_per_second"}
    assert ours <= logged(tmp_path / "tracked", ["trackio"])[-1]
    assert not any(ours & names for names in logged(tmp_path / "plain", []))


def test_the_slowdown_is_the_monitors(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry = Telemetry()
    assert memory_and_speed(telemetry) == {}
    memory = {"vram": {"process": 3 * GIB}, "ram": {"process": 2 * GIB}}
    telemetry.add(StepRecord(1, 1.0, 100, 1.0, 1e-4, False, {"step": 0.5}, memory))
    assert memory_and_speed(telemetry) == {"vram_gib": 3, "ram_gib": 2, "step_seconds": 0.5, "tokens_per_second": 200}
    telemetry.plan = SimpleNamespace(on_cpu=False, basis=SimpleNamespace(hardware=None))

    def told(seconds: Any, *_: Any) -> Any:
        return SimpleNamespace(factor=seconds["step"] * 3), ""

    monkeypatch.setattr(tracking, "slowdown", told)
    assert memory_and_speed(telemetry)["slowdown"] == 1.5
