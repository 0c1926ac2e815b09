"""Weights are loaded back into the tensors they were saved from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offloadkit.checkpoint import arrays
from offloadkit.checkpoint.arrays import ArrayFile
from offloadkit.checkpoint.origin import Origin
from offloadkit.checkpoint.weights import WEIGHT_FILE, load_weights, write_weights


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(7, 5),
        lambda: torch.randn(5, 7).t(),
        lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
        lambda: torch.randn(7, 10)[:, ::2],
        lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        lambda: torch.randn(()),
    ],
    ids=["contiguous", "transposed", "permuted", "strided", "channels last", "scalar"],
)
def test_tensors_of_any_strides_are_written_in_place(
    make: Callable[[], torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "PIECE_BYTES", 16)  # several pieces
    target = make()
    saved, strides, address = target.clone(), target.stride(), target.data_ptr()
    write_weights(tmp_path, {"weight": target}, Origin.of_new_run())
    target.fill_(torch.nan)
    load_weights(ArrayFile(tmp_path / WEIGHT_FILE), {"weight": target})
    assert torch.equal(target, saved)
    assert (target.stride(), target.data_ptr()) == (strides, address)
