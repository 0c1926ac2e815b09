"""The benchmark of Muon: its figures follow from the plan, a step and an update."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import muon, table
from benchmarks.cases import CASES
from offloadkit.optim.muon import newton_schulz_flops

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_figures_follow_from_the_plan_and_the_seconds_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "_time_matrix", lambda matrix, kind, device: (2e-3, 1e-3))
    row = {"case": "tiny-muon", "engine": muon.MUON, "seconds": 0.5}
    found = muon.time_matrices(CASES["tiny-muon"], [row], "tiny-muon")
    assert found["num_matrices"] == 2 * 6 + 2 * 10
    q, up = newton_schulz_flops(64, 64), newton_schulz_flops(128, 64)
    assert found["flops"] == 2 * (4 * q + 2 * up) + 2 * (8 * q + 2 * up)
    assert (found["step_seconds"], found["newton_schulz_seconds"]) == pytest.approx((32 * 2e-3, 32 * 1e-3))
    assert found["share_of_training_step"] == pytest.approx(32 * 1e-3 / 0.5)
    assert 0 < found["planned_newton_schulz_seconds"] < found["planned_step_seconds"]
    assert muon.time_matrices(CASES["tiny-muon"])["training_step"] == "planned"


def test_an_update_moves_every_matrix_by_about_its_learning_rate() -> None:
    found = muon.updates(tiny=True)["cpu"]
    assert (found["verdict"], found["largest_difference"]) == ("holds", 0.0)
    size = 1e-3 * 0.2 * 128**0.5 * 64**0.5  # learning rate, its factor, the norm of 64 singular values near 1
    assert 0.6 * size < found["norm of 64x128"] < 1.3 * size


@pytest.mark.slow
def test_a_try_without_a_gpu_writes_all_rows(tmp_path: Path) -> None:
    made = muon.main(["--tiny", f"--out={tmp_path / 'rows.csv'}", "--steps=2", "--learning-steps=3", "--commit=none"])
    rows = table.read(tmp_path / "rows.csv")
    assert [(row["case"], row["engine"]) for row in rows] == [(row["case"], row["engine"]) for row in made]
    assert [row["engine"] for row in rows] == ["offloadkit", muon.MUON, "step of matrices", "adamw", "muon", "cpu"]
    assert {row["status"] for row in rows} == {"measured"}
