"""Python work that the engine adds to a step: a few operations a layer and none per parameter. With recomputed blocks
or weights in RAM, each tensor saved or read by autograd adds one call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts.config import OffloadConfig, Placement

RESIDENT = Placement(gradients="vram", states="vram", step="gpu")


class Operations(TorchDispatchMode):
    """Counts torch operations while it is open."""

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
    """Operations of a step with the engine, minus operations of forward and backward without it."""
    x, plain = torch.rand(2, 300), Model(num_parameters)

    def plain_step() -> None:
        plain(x).backward()
        plain.zero_grad()

    with OffloadEngine(Model(num_parameters), OffloadConfig(placement=placement), device="cpu") as engine:

        def step() -> None:
            engine.backward(engine(x))
            engine.step()
            engine.synchronize()  # a step's record is written after its update: here in the same step

        return num_operations(step) - num_operations(plain_step)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("placement", [RESIDENT, Placement()], ids=["resident", "states in RAM"])
def test_operations_grow_with_the_layers_and_not_with_their_parameters(placement: Placement) -> None:
    few, many = added(placement, 2), added(placement, 12)
    assert many == few, "an additional parameter adds operations"
    assert few <= (1 if placement is RESIDENT else 20) * 5 + 20  # without a GPU the sums take torch operations


BLOCKS, SAVED, MORE = 5, 2, 10
"""Number of blocks; tensors saved by autograd for a product; additional products a block in the larger model."""


def num_calls(step: Callable[[], object]) -> int:
    """Python functions called by a step on this thread."""
    num = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num
        num += event == "call"

    for _ in range(3):
        step()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return num


def calls_of_a_product(placement: Placement | None) -> float:
    """Calls per product of a block with its parameter; None: in the model's forward alone."""

    def calls(num_parameters: int) -> int:
        x, model = torch.rand(2, 300), Model(num_parameters)
        if placement is None:
            return num_calls(lambda: model(x))
        with OffloadEngine(model, OffloadConfig(placement=placement), device="cpu") as engine:

            def step() -> None:
                engine.synchronize()
                engine.backward(engine(x))
                engine.step()

            return num_calls(step)

    return (calls(2 + MORE) - calls(2)) / (BLOCKS * MORE)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("activations", ["keep", "checkpoint", "offload"])
@pytest.mark.parametrize("weights", ["vram", "ram"])
def test_a_saved_tensor_is_one_call_each_time_that_autograd_has_it(weights: Any, activations: Any) -> None:
    plain = calls_of_a_product(Placement())
    again = calls_of_a_product(None) + 3 * SAVED  # saved in forward and in recomputation, and read
    hooks = again if activations != "keep" else 2 * SAVED if weights == "ram" else 0
    ring = 2 if weights == "ram" else 0  # a weight's lookup in its buffer, or a gradient's check of the weight
    assert calls_of_a_product(Placement(weights, activations=activations)) <= plain + hooks + ring


@pytest.mark.usefixtures("one_thread")
def test_a_weight_that_is_read_from_the_ring_is_one_operation() -> None:
    """Three more operations detach the input from its graph on saving, and the hook's result on reading."""
    few, many = (added(Placement("ram"), num) for num in (2, 2 + MORE))
    assert many - few <= (1 + 3) * BLOCKS * MORE
