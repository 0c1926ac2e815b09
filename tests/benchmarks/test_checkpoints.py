"""The benchmark of checkpoints saves in one process and resumes in another."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from benchmarks import checkpoints


@pytest.mark.slow(60)
def test_both_processes_have_the_same_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(vocab_size=2000, architectures=["LlamaForCausalLM"], **shape).save_pretrained(tmp_path / "model")
    given = [str(tmp_path / "model"), "--contents=compact", "--tokens=16", f"--folder={tmp_path}"]
    saved, resumed = checkpoints.main(given)
    assert saved["xxh3"] == resumed["xxh3"]
    assert saved["bytes"] == resumed["bytes"] > 8 * 256_000
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "the checkpoint is removed"
    said = capsys.readouterr().out
    assert "weights have equal bits after resuming" in said
    assert "RAM" in checkpoints.line_of(saved)
