"""Tensors of a model that share memory: refused by name if a trained parameter would be separated from the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from offloadkit import OffloadConfig, OffloadEngine, Placement
from offloadkit.errors import ModelError


def two() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def by_data(model: nn.Sequential) -> None:
    model[1].weight.data = model[0].weight.data


def by_parameter(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(model[0].weight.data)


def by_view(model: nn.Sequential) -> None:
    model[1].bias = nn.Parameter(model[0].weight.data[3])


def by_transpose(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(model[0].weight.data.t())


def by_buffer(model: nn.Sequential) -> None:
    model[1].register_buffer("weight_of_0", model[0].weight.data)


def by_frozen(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[1].weight.data, requires_grad=False)


def by_other_dtype(model: nn.Sequential) -> None:
    model[1].register_buffer("bits", model[0].weight.data.view(torch.int16))


@pytest.mark.parametrize("placement", [None, Placement(weights="ram")])
@pytest.mark.parametrize("share", [by_data, by_parameter, by_view, by_transpose, by_buffer, by_frozen, by_other_dtype])
def test_two_tensors_over_one_memory_are_refused_by_name(
    share: Callable[[nn.Sequential], None], placement: Placement | None
) -> None:
    model = two()
    share(model)
    with pytest.raises(ModelError, match=r"'[01]\.\w+' and '1\.\w+' are two tensors in the same memory.*nn\.Parameter"):
        OffloadEngine(model, OffloadConfig(placement=placement), device="cpu")


def columns(model: nn.Sequential) -> None:
    """Interleaved columns: their ranges overlap without a common element."""
    whole = torch.randn(8, 16)
    model[0].weight, model[1].weight = nn.Parameter(whole[:, ::2]), nn.Parameter(whole[:, 1::2])


def halves(model: nn.Sequential) -> None:
    whole = torch.randn(16, 8)
    model[0].weight, model[1].weight = nn.Parameter(whole[:8]), nn.Parameter(whole[8:])


def frozen_twice(model: nn.Sequential) -> None:
    model[0].register_buffer("one", torch.ones(4))
    model[1].register_buffer("two", model[0].one)


@pytest.mark.parametrize("share", [columns, halves, frozen_twice])
def test_one_storage_without_overlap_trains_as_torch_does(share: Callable[[nn.Sequential], None]) -> None:
    trained = []
    for ours in (True, False):
        model, x = two(), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(2)
        share(model)
        if ours:
            with OffloadEngine(model, OffloadConfig(learning_rate=0.1, max_grad_norm=None), device="cpu") as engine:
                engine.backward(engine(x).square().sum())
                engine.step()
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
            model(x).square().sum().backward()
            optimizer.step()
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    torch.testing.assert_close(*trained)
