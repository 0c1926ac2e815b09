"""`ForwardCode` finds each change of the code that a forward runs, and no other."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import cache, partial
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import nn
from transformers import T5ForConditionalGeneration
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.t5 import modeling_t5

from offloadkit.offload import dict_versions
from offloadkit.offload.dict_versions import COUNTED
from offloadkit.offload.forward_code import ForwardCode
from offloadkit.offload.layers import forward_of
from tests.hf.tiny import t5_config

FACTOR = 1.0
"""Read by a function that a forward calls."""
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"tanh": torch.tanh}
loss = 0.0


def scaled(x: torch.Tensor, factor: float = 1.0, *, bias: float = 0.0) -> torch.Tensor:
    return x * (factor * FACTOR) + bias


def halved(x: torch.Tensor, factor: float = 1.0, *, bias: float = 0.0) -> torch.Tensor:
    return x / 2


def with_a_closure() -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[float], None]]:
    factor = 1.0

    def multiply(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    def set_factor(value: float) -> None:
        nonlocal factor
        factor = value

    return multiply, set_factor


multiplied, set_multiplier = with_a_closure()


@torch.no_grad()
def offset(x: torch.Tensor) -> torch.Tensor:
    return x * (OFFSET * OPTIONS.offset)


OFFSET = 1.0
OPTIONS = Namespace(offset=1.0, step=0, losses=[])


@cache
def width() -> int:
    return WIDTH


WIDTH = 1
LAST = 1.0


class Registry:
    """As transformers' `ALL_ATTENTION_FUNCTIONS`."""

    common: ClassVar[dict[str, Any]] = {"scaled": scaled}

    def __init__(self) -> None:
        self.own: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self.own.get(name) or self.common[name]


REGISTRY = Registry()


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return -x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return -FACTOR * gradients[0]


class Tanh(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activate(x)

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS["tanh"](x)

    def unused(self) -> float:
        return loss


class Calls(nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.tanh, self.loss = nn.Linear(8, 8), nn.Dropout(0.5), Tanh(), 1.0
        self.calls = [multiplied, lambda x: x * LAST]
        self.last, self.partial = multiplied, partial(scaled, bias=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tanh(self.drop(self.up(x))) * (self.gain + self.loss)
        y = torch.nn.functional.softsign(y) + offset(y) + self.calls[1](y)
        return x + scaled(self.last(y)) + REGISTRY["scaled"](y) * width() - self.partial(y) + Negated.apply(y)


HERE = sys.modules[__name__]
CODE: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (lambda patch: patch.setattr(Calls, "forward", lambda self, x: self.up(x)), "Calls.forward"),
    (lambda patch: patch.setattr(Tanh, "forward", lambda self, x: x / 2), "Tanh.forward"),
    (lambda patch: patch.setattr(Tanh, "activate", lambda self, x: x / 4), "Tanh.activate"),
    (lambda patch: patch.setattr(nn.Dropout, "forward", lambda self, x: x / 2), "Dropout.forward"),
    (lambda patch: patch.setattr(nn.Linear, "__call__", lambda self, x: x @ self.weight.T), "the attributes of Linear"),
    (lambda patch: patch.setattr(Calls, "gain", 2.0), "Calls.gain"),
    (lambda patch: patch.setattr(HERE, "scaled", halved), f"{__name__}.scaled"),
    (lambda patch: patch.setattr(HERE, "FACTOR", 2.0), f"{__name__}.FACTOR"),
    (lambda patch: patch.setattr(scaled, "__code__", halved.__code__), "a variable of scaled"),
    (lambda patch: patch.setattr(scaled, "__defaults__", (2.0,)), "a variable of scaled"),
    (lambda patch: patch.setattr(scaled, "__kwdefaults__", {"bias": 2.0}), "a variable of scaled"),
    (lambda patch: patch.setitem(cast(Any, scaled.__kwdefaults__), "bias", 2.0), "the defaults of scaled"),
    (
        lambda patch: patch.setattr(torch.nn.functional, "linear", lambda x, weight, _: x @ weight.T),
        "functional.linear",
    ),
    (lambda patch: patch.setitem(ACTIVATIONS, "tanh", torch.relu), f"the contents of {__name__}.ACTIVATIONS"),
    (lambda patch: patch.setitem(Registry.common, "scaled", halved), "the contents of Registry.common"),
    (lambda patch: patch.setitem(REGISTRY.own, "scaled", halved), f"the contents of {__name__}.REGISTRY"),
]
QUICK = ("Calls.forward", f"{__name__}.FACTOR", "functional.linear")
"""Changes that the quick suite trains with."""
OTHERS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (lambda patch: patch.setattr(nn.Module, "_call_impl", halved), "Module._call_impl"),
    (lambda patch: patch.setattr(Registry, "__getitem__", halved), "Registry.__getitem__"),
    (lambda patch: set_multiplier(2.0), "a variable of with_a_closure.<locals>.multiply"),
    (lambda patch: patch.setattr(Negated, "backward", staticmethod(lambda ctx, x: x)), "Negated.backward"),
    (lambda patch: patch.setattr(HERE, "WIDTH", 2), f"{__name__}.WIDTH"),
    (lambda patch: patch.setattr(HERE, "OFFSET", 2.0), f"{__name__}.OFFSET"),
    (lambda patch: patch.setattr(OPTIONS, "offset", 2.0), f"{__name__}.OPTIONS.offset"),
    (lambda patch: patch.setattr(HERE, "LAST", 2.0), f"{__name__}.LAST"),
    (lambda patch: patch.setattr(torch.nn.functional, "softsign", halved), "functional.softsign"),
    (lambda patch: patch.delattr(HERE, "FACTOR"), f"{__name__}.FACTOR"),
    (lambda patch: patch.setattr(modeling_t5.T5Attention, "forward", halved), "T5Attention.forward"),
    (lambda patch: patch.setattr(modeling_t5.T5LayerNorm, "eps", 1.0, raising=False), "the attributes of T5LayerNorm"),
    (
        lambda patch: patch.setattr(modeling_t5, "eager_attention_forward", halved),
        "modeling_t5.eager_attention_forward",
    ),
    (lambda patch: patch.setattr(modeling_t5, "ALL_ATTENTION_FUNCTIONS", {}), "modeling_t5.ALL_ATTENTION_FUNCTIONS"),
    (lambda patch: patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", halved), "ALL_ATTENTION_FUNCTIONS"),
    (lambda patch: patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", halved), "_global_mapping"),
]


@cache
def modules() -> list[nn.Module]:
    t5 = T5ForConditionalGeneration(t5_config())
    return [*Calls().modules(), *t5.encoder.block.modules(), *t5.decoder.block.modules()]


def code() -> ForwardCode:
    return ForwardCode(modules(), [forward_of(modules()[0])])


@pytest.mark.parametrize("is_counted", [COUNTED, False])
@pytest.mark.parametrize(("change", "said"), [*CODE, *OTHERS], ids=[said for _, said in (*CODE, *OTHERS)])
def test_a_change_is_found_in_each_later_call(
    change: Callable[[pytest.MonkeyPatch], None], said: str, is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dict_versions, "COUNTED", is_counted)
    found = code()
    assert found.changed() is None
    with monkeypatch.context() as patch:
        change(patch)
        for _ in range(2):
            assert str(found.changed()).endswith(said)
    set_multiplier(1.0)


def test_what_no_forward_reads_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's loop writes its `loss` in every step. It is the name of an attribute that the forward reads, and a
    global of a method that no forward calls. It counts steps in an object of which the forward reads another attribute.
    """
    found = code()
    monkeypatch.setattr(HERE, "loss", 1.0)
    monkeypatch.setattr(HERE, "another", 1.0, raising=False)
    monkeypatch.setattr(OPTIONS, "step", 1)
    OPTIONS.losses.append(1.0)
    assert found.changed() is None
