"""The benchmark of decoder blocks."""

from __future__ import annotations

from pathlib import Path

from benchmarks import blocks, table


def test_a_try_without_a_gpu_writes_all_rows(tmp_path: Path) -> None:
    blocks.main(["--tiny", f"--out={tmp_path / 'rows.csv'}", "--turns=2", "--commit=none"])
    rows = table.read(tmp_path / "rows.csv")
    of_block = [row for row in rows if row["case"] == "block, tiny, 2 x 16"]
    assert [row["engine"] for row in of_block] == ["own", "norms", "fused", "compiled", "matmuls"]
    assert all(0 < row["min_seconds"] <= row["seconds"] <= row["max_seconds"] for row in rows)
    assert "torch's choice" in [row["engine"] for row in rows if row["case"] == "attention, causal, tiny"]
