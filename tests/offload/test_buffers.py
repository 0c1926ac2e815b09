"""Saving and restoring a module's buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offloadkit.errors import EngineStateError
from offloadkit.offload.buffers import Buffers


class Counting(nn.Module):
    """A constant table, a count written in place, a replaced buffer, and running means."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        for name in ("table", "count", "replaced", "mean"):
            self.register_buffer(name, torch.zeros(3))
        self.count: torch.Tensor
        self.replaced: torch.Tensor
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> None:
        self.count += 1
        self.replaced = self.replaced + 1
        nn.functional.batch_norm(self.norm(x) + 1, self.mean, torch.ones(3), training=True)  # not by a module of torch


def values(model: nn.Module) -> dict[str, list[Any]]:
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


def test_what_changed_is_brought_back_and_constants_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, buffers, copied, clone = Counting(), Buffers(), list[int](), torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: (copied.append(tensor.data_ptr()), clone(tensor))[1])
    for window in range(4):
        copied.clear()
        buffers.keep(model)
        constant = {name for name, buffer in model.named_buffers() if buffer.data_ptr() not in copied}
        assert constant == ({"table"} if window else set())
        before = values(model)
        for _ in range(2):  # repeated twice
            model(torch.randn(4, 3))
            buffers.restore()
            assert values(model) == before
        model(torch.randn(4, 3))
        assert all(value != before[name] for name, value in values(model).items() if name != "table")


def test_a_constant_that_is_written_late_is_not_brought_back_silently() -> None:
    model, buffers = Counting(), Buffers()
    for _ in range(2):
        buffers.keep(model)
    table: Any = model.table
    table.add_(1)
    before = values(model)
    with pytest.raises(EngineStateError, match=r"the buffer 'table' of a Counting was written for the first time"):
        buffers.restore()
    assert values(model) == before
    buffers.keep(model)
    table.add_(1)
    buffers.restore()
    assert values(model) == before
