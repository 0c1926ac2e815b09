"""Files that are written piece by piece are those that safetensors writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from offloadkit.checkpoint import tensor_file
from offloadkit.checkpoint.tensor_file import can_write, write_tensors


def test_a_file_is_the_one_that_safetensors_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 64)
    tensors = {
        "matrix": torch.randn(13, 7),
        "half": torch.randn(5, 3).bfloat16(),
        "scalar": torch.tensor(3),
        "nothing": torch.empty(0, 4, dtype=torch.float16),
        "flags": torch.tensor([True, False, True]),
    }
    assert can_write(tensors)
    write_tensors(tensors, tmp_path / "ours", {"format": "pt"})
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    ours, theirs = load_file(tmp_path / "ours"), load_file(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) and ours[name].dtype == tensor.dtype for name, tensor in theirs.items())
    assert (tmp_path / "ours").stat().st_size == (tmp_path / "theirs").stat().st_size
    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_file_that_could_not_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors({"a": torch.ones(3)}, path)

    def full(tensor: torch.Tensor) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(tensor_file, "_pieces", full)
    with pytest.raises(OSError, match="No space"):
        write_tensors({"a": torch.zeros(3)}, path)
    assert load_file(path)["a"].tolist() == [1, 1, 1]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_strided_tensors_are_left_to_others() -> None:
    assert not can_write({"a": torch.ones(3, 2).t()})
