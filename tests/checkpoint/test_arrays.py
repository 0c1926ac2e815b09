"""Files written piece by piece are byte for byte the files that safetensors writes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from offloadkit.checkpoint import arrays
from offloadkit.checkpoint.arrays import ArrayFile, write_arrays
from offloadkit.errors import ModelError


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


def test_parts_that_threads_read_make_the_array_and_a_file_that_ends_early_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "PIECE_BYTES", 64)
    monkeypatch.setattr(arrays, "PART_BYTES", 24)
    saved = torch.randn(91)
    write_arrays(path := tmp_path / "file", {"array": saved})
    for first, numel in ((0, 91), (7, 50), (90, 1)):
        with ArrayFile(path) as file:
            file.read("array", into := torch.zeros(numel), first=first)
            assert into.equal(saved[first : first + numel])
            file.read("array", into := torch.zeros(numel, dtype=torch.float64), first=first)  # read in pieces
            assert into.equal(saved[first : first + numel].double())
    threads = threading.active_count()
    with ArrayFile(path) as file:
        os.truncate(path, path.stat().st_size - 30)
        with pytest.raises(ModelError, match=r"file cannot be read: it ends \d+ bytes early"):
            file.read("array", torch.zeros(91))
    assert threading.active_count() == threads
