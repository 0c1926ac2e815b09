"""The benchmark of LoRA."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import lora, table
from benchmarks.cases import LORA


@pytest.mark.slow
def test_a_try_without_a_gpu_writes_all_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    made = lora.main(["--tiny", f"--out={tmp_path / 'rows.csv'}", "--steps=2", "--commit=none"])
    rows = table.read(tmp_path / "rows.csv")
    assert [(row["case"], row["engine"]) for row in rows] == [("tiny-lora", engine) for engine in LORA]
    assert {row["status"] for row in rows} == {"measured"}, [row["reason"] for row in rows]
    assert len(made) == len(rows)
    assert rows[0]["planned_ram_bytes"]
    assert len({row["num_parameters"] for row in rows}) == 1
    printed = capsys.readouterr().out
    assert printed.count("tokens/s") == len(rows)
    assert printed.count("x of PEFT alone") == 1


def test_a_line_says_what_was_measured_and_planned() -> None:
    row = dict.fromkeys(table.COLUMNS) | {"case": "lora-llama-8b-6", "engine": "offloadkit-lora", "status": "measured"}
    row |= {"tokens": 4096, "seconds": 0.5, "planned_seconds": 0.25}
    sizes = {"vram_bytes": 6 << 30, "planned_vram_bytes": 5 << 30, "ram_peak_bytes": 3 << 30, "planned_ram_bytes": None}
    found = lora.line_of(row | sizes)
    assert found.endswith("8,192 tokens/s, 0.5000 s a step (planned 0.2500), VRAM 6 GiB (planned 5 GiB), RAM 3 GiB")
    failed = lora.line_of(row | {"status": "does not fit", "reason": "too large"})
    assert failed.endswith(": does not fit, too large")


def test_tokens_a_second_are_compared_with_the_same_rows_of_peft() -> None:
    shape = {"model": "llama", "batch_size": 8, "input_length": 1024, "status": "measured"}
    ours, peft = shape | {"engine": "offloadkit-lora", "seconds": 0.8}, shape | {"engine": "peft", "seconds": 0.6}
    assert lora.beside_peft(ours, [ours, peft]) == ", 0.75x of PEFT alone"
    assert lora.beside_peft(peft, [ours, peft]) == ""
    assert lora.beside_peft(ours, [ours, peft | {"batch_size": 4}]) == ""
    assert lora.beside_peft(ours, [ours, peft | {"status": "does not fit", "seconds": None}]) == ""
