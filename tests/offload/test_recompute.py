"""A function that backward runs again: the numbers of a plain run, freed memory, restored surroundings."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ModelError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.offload import kept_results
from offloadkit.offload.recompute import OffloadedInputs, cheaply_recomputed_in_backward, recomputed_in_backward
from tests.models import TinyLM

Function = Callable[..., Any]
BOTH = pytest.mark.parametrize("again", [recomputed_in_backward, cheaply_recomputed_in_backward])


@pytest.fixture(autouse=True)
def every_matmul_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_results, "MIN_PRODUCTS", 1)


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


class Block(nn.Module):
    """Uses a shared input twice, like T5's decoder the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.down = (nn.Linear(16, 16) for _ in range(4))
        self.runs = 0

    def forward(self, x: torch.Tensor, shared: torch.Tensor, scale: float, *, mask: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        scores = self.query(x) @ self.key(shared).mT + mask
        weights = nn.functional.dropout(scores.softmax(-1), 0.3)
        return x + self.down(torch.tanh(weights @ self.value(shared))) * scale


def call_plain(device: torch.device, function: Function, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def gradients(device: torch.device, call: Function, num_backwards: int = 1) -> list[torch.Tensor]:
    """Gradients of the weights and the shared input, then the random state."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    shared = torch.randn(2, 5, 16).to(device, torch.bfloat16).requires_grad_()
    x, mask = torch.randn(2, 4, 16).to(device, torch.bfloat16), torch.randn(4, 5).to(device, torch.bfloat16)
    for block in blocks:
        block.to(device, torch.bfloat16)
        x = call(device, block, x, shared, 0.5, mask=mask)
    loss = x.float().pow(2).mean()
    for index in range(num_backwards):
        loss.backward(retain_graph=index + 1 < num_backwards)  # type: ignore[no-untyped-call]
    random = [torch.rand(1), torch.rand(1, device=device)]
    return [*(weight.grad for block in blocks for weight in block.parameters()), shared.grad, *random]  # type: ignore[list-item]


@BOTH
@pytest.mark.parametrize("num_backwards", [1, 2])
def test_gradients_and_random_numbers_are_those_of_a_plain_run(
    device: torch.device, num_backwards: int, again: Function
) -> None:
    plain, found = (gradients(device, call, num_backwards) for call in (call_plain, again))
    assert all(torch.equal(*pair) for pair in zip(plain, found, strict=True))


@BOTH
def test_a_gradient_that_the_function_takes_of_its_own(device: torch.device, again: Function) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        inner = (x.sin().outer(x) @ x).cos()
        (slope,) = torch.autograd.grad(inner.sum(), x)
        return x.tanh() * slope * x.exp()

    found = []
    for call in (call_plain, again):
        x = torch.linspace(-2, 2, 7, device=device).requires_grad_()
        call(device, function, x).sum().backward()
        found.append(x.grad)
    assert torch.equal(found[0], found[1])  # type: ignore[arg-type]


def test_the_second_run_ends_with_the_last_activation() -> None:
    late = []

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.exp()
        late.append(x + 1)
        return late[-1]

    recomputed_in_backward(torch.device("cpu"), function, torch.ones(3, requires_grad=True)).sum().backward()
    assert len(late) == 1


def test_without_gradients_nothing_is_kept() -> None:
    block, x = Block(), torch.randn(1, 2, 16)
    with torch.no_grad():
        output = recomputed_in_backward(torch.device("cpu"), block, x, x, 1.0, mask=torch.zeros(2, 2))
    assert not output.requires_grad
    assert block.runs == 1


@BOTH
@pytest.mark.parametrize("backward", [True, False], ids=["backward", "the graph is dropped"])
def test_activations_are_gone_before_backward_and_after(backward: bool, again: Function) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        first = torch.exp(x * weight)
        second = torch.softmax(first, -1)
        made.extend(map(weakref.ref, (first, second)))
        return second * weight

    def alive() -> list[bool]:
        return [tensor() is not None for tensor in made]

    gc.disable()  # nothing may depend on a garbage collection
    try:
        weight = torch.rand(4, requires_grad=True)
        output = again(torch.device("cpu"), function, torch.rand(3, 4), weight)
        assert alive() == [False] * 2
        if backward:
            output.sum().backward()
            assert len(made) == 4
        del output
        assert alive() == [False] * len(made)
    finally:
        gc.enable()


@BOTH
@pytest.mark.parametrize("in_forward", [True, False])
def test_autocast_is_that_of_the_first_run(device: torch.device, in_forward: bool, again: Function) -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        product = x @ x
        seen.append(product.dtype)
        return product.sin()

    def autocast(on: bool) -> Any:
        return torch.autocast(device.type, torch.bfloat16) if on else nullcontext()

    with autocast(in_forward):
        loss = again(device, function, torch.ones(2, 2, device=device).requires_grad_()).sum()
    with autocast(not in_forward):
        loss.backward()
    assert seen[1:] == seen[:1]


def test_the_default_device_is_that_of_the_first_run() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.empty(0).device.type)
        return x.exp()

    with torch.device("meta"):
        output = recomputed_in_backward(torch.device("cpu"), function, torch.ones(1, device="cpu", requires_grad=True))
    output.sum().backward()
    assert seen == ["meta", "meta"]


@BOTH
def test_an_input_that_is_changed_in_place_is_an_error(again: Function) -> None:
    x = torch.ones(3, requires_grad=True) * 1
    output = again(torch.device("cpu"), torch.exp, x)
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda x: x.exp() + 1, r"saved 1 tensors, but in its forward 2"),
        (lambda x: x.exp()[:2].sin(), r"saved tensor 1 \[2\] float32, but in its forward \[3\] float32"),
        (lambda x: x.exp().double().sin(), r"saved tensor 1 \[3\] float64, but in its forward \[3\] float32"),
    ],
)
def test_a_second_run_that_differs_is_an_error(second: Function, message: str) -> None:
    runs = iter([lambda x: x.exp().sin(), second])
    output = recomputed_in_backward(torch.device("cpu"), lambda x: next(runs)(x), torch.ones(3, requires_grad=True))
    with pytest.raises(ModelError, match=message):
        output.sum().backward()


def test_an_error_in_the_second_run_is_shown_and_leaves_the_random_state() -> None:
    runs = iter([torch.exp, lambda x: torch.rand(3) / 0 + [][0]])
    output = recomputed_in_backward(torch.device("cpu"), lambda x: next(runs)(x), torch.ones(3, requires_grad=True))
    before = torch.get_rng_state()
    with pytest.raises(IndexError):
        output.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_inputs_of_longer_rows_take_the_ram_of_shorter_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[OffloadedInputs] = []
    own = OffloadedInputs.__init__
    monkeypatch.setattr(OffloadedInputs, "__init__", lambda self, *args: (made.append(self), own(self, *args))[1])
    with OffloadEngine(TinyLM(), OffloadConfig(placement=Placement(activations="offload")), device="cpu") as engine:
        for length in (9, 3, 12, 5, 15):
            engine.backward(engine(torch.zeros(8, length, dtype=torch.int64)))
            engine.step()
            engine.synchronize()
        (inputs,) = made
        sizes = [view.slab.num_bytes for view in inputs.free]
        assert sizes == [8 * 15 * 65 * 4] * 4  # the longest rows, one tensor per block
        small, large = inputs.take(5000), inputs.take(2 * sizes[0])
        inputs.free = [large, small]
        assert inputs.take(6000) is small
