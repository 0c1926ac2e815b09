"""What the engine adds to a step for Python to do: a few operations a layer, none a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from offloadkit.config import OffloadConfig, Placement
from offloadkit.engine import OffloadEngine

RESIDENT = Placement(gradients="vram", states="vram", step="gpu")


class Operations(TorchDispatchMode):
    """Counts what torch is asked for while it is open."""

    num = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return function(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(300)) for _ in range(num_parameters)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return torch.tanh(x)


class Model(nn.Module):
    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(num_parameters) for _ in range(5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def num_operations(step: Callable[[], None]) -> int:
    for _ in range(3):
        step()
    with Operations() as found:
        step()
    return found.num


def added(placement: Placement, num_parameters: int) -> int:
    """Operations of an engine's step, less those of forward and backward without it."""
    x, plain = torch.rand(2, 300), Model(num_parameters)

    def plain_step() -> None:
        plain(x).backward()
        plain.zero_grad()

    with OffloadEngine(Model(num_parameters), OffloadConfig(placement=placement), device="cpu") as engine:

        def step() -> None:
            engine.backward(engine(x))
            engine.step()
            engine.synchronize()  # a step's record is written when it is past: each time here, not with a step after it

        return num_operations(step) - num_operations(plain_step)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("placement", [RESIDENT, Placement()], ids=["resident", "states in RAM"])
def test_operations_grow_with_the_layers_and_not_with_their_parameters(placement: Placement) -> None:
    few, many = added(placement, 2), added(placement, 12)
    assert many == few, "a parameter more is an operation more"
    assert few <= (1 if placement is RESIDENT else 20) * 5 + 20  # without a GPU the sums take torch operations
