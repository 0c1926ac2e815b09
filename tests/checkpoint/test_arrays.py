"""Files that are written piece by piece are those that safetensors writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from offloadkit.checkpoint import arrays
from offloadkit.checkpoint.arrays import write_arrays


def test_a_file_is_the_one_that_safetensors_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "PIECE_BYTES", 64)
    tensors = {
        "matrix": torch.randn(13, 7),
        "half": torch.randn(5, 3).bfloat16(),
        "scalar": torch.tensor(3),
        "nothing": torch.empty(0, 4, dtype=torch.float16),
        "flags": torch.tensor([True, False, True]),
    }
    write_arrays(tmp_path / "ours", tensors, {"format": "pt"})
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    ours, theirs = load_file(tmp_path / "ours"), load_file(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) and ours[name].dtype == tensor.dtype for name, tensor in theirs.items())
    assert (tmp_path / "ours").stat().st_size == (tmp_path / "theirs").stat().st_size
    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == {"format": "pt"}
