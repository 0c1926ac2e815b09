"""The benchmark of packed rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import packing, table


@pytest.mark.slow
def test_a_try_without_a_gpu_writes_rows_of_padded_and_packed(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    packing.main(["--tiny", f"--out={out}", "--engines", "padded", "packed", "--commit=none"])
    rows = table.read(out)
    assert [row["engine"] for row in rows] == ["padded", "packed"]
    for row in rows:
        assert row["status"] == "measured", row["reason"]
        assert 0 < row["min_seconds"] <= row["seconds"] <= row["max_seconds"]
        assert row["figures"]["tokens_per_second"] > 0
