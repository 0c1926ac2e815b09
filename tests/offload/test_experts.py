"""Experts without tokens, beside `torch.optim.AdamW`.

An unused expert of a stacked parameter has a gradient of zeros: its moments decay and its weights move. An expert of a
ModuleList that no token reaches has no gradient and is skipped.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts.config import OffloadConfig, Placement

EXPERTS, WIDTH = 4, 24
PLACEMENTS = [
    Placement(gradients="vram", states="vram", step="gpu"),
    Placement(weights="ram", activations="checkpoint"),
    Placement(weights="ram", gradients="vram", step="gpu", activations="cheap"),
    Placement(weights="ram", states="disk", activations="offload"),
]
OPTIONS: dict[str, Any] = {"weight_decay": 0.1, "eps": 1e-6}
USED = [range(EXPERTS), (0, 2), (1, 2), (2,), range(EXPERTS), (0,)]
"""Experts that the tokens of each micro-batch reach: all at first, so that moments are not zero later."""


class Stacked(nn.Module):
    """Experts in one parameter, as in transformers' Mixtral."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 40) / 5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 40, WIDTH) / 5)

    def forward(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(x)
        for expert in experts.unique().tolist():
            rows = (experts == expert).nonzero()[:, 0]
            found = found.index_add(0, rows, torch.tanh(x[rows] @ self.up[expert]) @ self.down[expert])
        return x + found


class Listed(nn.Module):
    """Experts in a ModuleList, as in transformers' Switch Transformers."""

    def __init__(self) -> None:
        super().__init__()
        made = (nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, WIDTH)) for _ in range(EXPERTS))
        self.experts = nn.ModuleList(made)

    def forward(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(x)
        for expert in experts.unique().tolist():
            rows = (experts == expert).nonzero()[:, 0]
            found = found.index_add(0, rows, self.experts[expert](x[rows]))
        return x + found


class Model(nn.Module):
    """The loss of blocks with experts, for a given expert of each token."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([kind() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, experts)
        return nn.functional.cross_entropy(self.head(x), tokens.roll(1))


pytestmark = pytest.mark.usefixtures("one_thread", "what_left_a_buffer_is_nan")


def made(kind: type[nn.Module]) -> Model:
    torch.manual_seed(0)
    return Model(kind)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 11, (12,), generator=generator) for _ in USED]
    return [
        (each, torch.tensor([used[i % len(used)] for i in range(12)])) for each, used in zip(tokens, USED, strict=True)
    ]


def by_plain_adamw(kind: type[nn.Module], accumulation: int) -> dict[str, torch.Tensor]:
    model = made(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **OPTIONS)
    for number, batch in enumerate(batches(), 1):
        (model(*batch) / accumulation).backward()
        if number % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return numbers_of(model, {name: optimizer.state[weight] for name, weight in model.named_parameters()})


def by_engine(kind: type[nn.Module], accumulation: int, placement: Placement) -> dict[str, torch.Tensor]:
    config = OffloadConfig(
        learning_rate=1e-2,
        working_dtype="fp32",
        max_grad_norm=None,
        gradient_accumulation=accumulation,
        placement=placement,
        **OPTIONS,
    )
    with OffloadEngine(made(kind), config, device="cpu") as engine:
        for batch in batches():
            engine.backward(engine(*batch))
            engine.step()
        return numbers_of(engine.module, engine.state_dict()["optimizer"])


def numbers_of(model: nn.Module, states: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of the weights, moments and numbers of steps."""
    numbers = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for name, state in states.items():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            numbers[f"{name}.{key}"] = torch.as_tensor(state[key]).clone().float()
    return numbers


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", [Stacked, Listed])
def test_an_expert_without_tokens_is_stepped_as_by_torch(kind: type[nn.Module], accumulation: int) -> None:
    expected = by_plain_adamw(kind, accumulation)
    steps = {int(expected[name]) for name in expected if name.endswith(".step")}
    assert (len(steps) > 1) == (kind is Listed)
    found = [by_engine(kind, accumulation, placement) for placement in PLACEMENTS]
    assert found[0].keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[0][name], value, rtol=1e-4, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}"
        )
        assert all(torch.equal(found[0][name], other[name]) for other in found[1:]), name
