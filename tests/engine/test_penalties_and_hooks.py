"""Penalties on weights and hooks on gradients train as under torch's AdamW, under every placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from offloadkit import OffloadConfig, OffloadEngine, Placement

PLACEMENTS = {
    "vram": Placement(),
    "ram": Placement(weights="ram"),
    "ram, recomputed": Placement(weights="ram", activations="checkpoint"),
}
placements = pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

PENALTIES: dict[str, Callable[[Any], torch.Tensor]] = {
    "abs": lambda p: p.abs().sum(),
    "norm 1": lambda p: p.norm(p=1),
    "norm 2": lambda p: p.norm(),
    "square": lambda p: (p * p).sum(),
    "pow": lambda p: p.pow(3).sum(),
    "clamp": lambda p: p.clamp(min=0.01).sum(),
    "max": lambda p: p.max(),
    "mse": lambda p: F.mse_loss(p, torch.full_like(p, 0.1)),
    "matmul": lambda p: (p.reshape(-1, 8) @ p.reshape(-1, 8).T).sum(),
    "view": lambda p: p.view(-1).exp().sum(),
    "item": lambda p: p[0].sum() ** 2,
    "foreach": lambda p: torch.stack(torch._foreach_norm([p, p])).sum(),
    "stack": lambda p: torch.stack([p, p]).square().sum(),
    "einsum": lambda p: torch.einsum("...i,...i->...", p, p).sum(),
}


def trained(
    penalty: Callable[[Any], torch.Tensor],
    placement: Placement | None,
    when: str,
    accumulation: int = 1,
    device: str = "cpu",
) -> list[torch.Tensor]:
    """The weights after three steps; without a placement, torch's AdamW trains."""
    model, x = blocks(), X.to(device)
    if placement is None:
        model.to(device)

    def loss_of(run: Callable[..., torch.Tensor]) -> torch.Tensor:
        if when == "before":
            extra = sum(penalty(p) for p in model.parameters())
            return run(x).square().mean() + 0.1 * extra
        if when == "between":
            first = run(x).square().mean()
            extra = sum(penalty(p) for p in model.parameters())
            return first + 0.1 * extra + run(x + 1).square().mean()
        first = run(x).square().mean()
        return first + 0.1 * sum(penalty(p) for p in model.parameters())

    if placement is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
        for _ in range(3):
            for _ in range(accumulation):
                (loss_of(model) / accumulation).backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        config = OffloadConfig(
            learning_rate=0.01, max_grad_norm=None, placement=placement, gradient_accumulation=accumulation
        )
        with OffloadEngine(model, config, device=device) as engine:
            for _ in range(3 * accumulation):
                engine.backward(loss_of(engine))
                engine.step()
    return [p.detach().cpu().clone() for p in model.parameters()]


@placements
@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_taken_before_the_forward_counts_as_in_torch(name: str, placement: Placement) -> None:
    torch.testing.assert_close(trained(PENALTIES[name], placement, "before"), trained(PENALTIES[name], None, "before"))


@placements
@pytest.mark.parametrize("when", ["between", "after"])
@pytest.mark.parametrize("name", ["abs", "square", "norm 2"])
def test_a_penalty_taken_between_two_forwards_or_after_one_counts_as_in_torch(
    name: str, when: str, placement: Placement
) -> None:
    torch.testing.assert_close(trained(PENALTIES[name], placement, when), trained(PENALTIES[name], None, when))


@placements
def test_a_penalty_in_each_micro_batch_of_a_window_counts_as_in_torch(placement: Placement) -> None:
    torch.testing.assert_close(
        trained(PENALTIES["abs"], placement, "before", 2), trained(PENALTIES["abs"], None, "before", 2)
    )


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.tensor(0.5)), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


@placements
def test_parameters_without_dimensions_train_in_blocks_and_move(placement: Placement) -> None:
    results = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*[Scaled() for _ in range(4)])
        if ours:
            config = OffloadConfig(learning_rate=0.01, max_grad_norm=None, placement=placement)
            with OffloadEngine(model, config, device="cpu") as engine:
                for _ in range(3):
                    engine.backward(engine(X).square().mean())
                    engine.step()
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
            for _ in range(3):
                optimizer.zero_grad()
                model(X).square().mean().backward()
                optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*results)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def _mask(gradient: torch.Tensor) -> torch.Tensor:
    kept = torch.ones_like(gradient)
    kept[:5] = 0
    return gradient * kept


def _mask_grad(parameter: Any) -> None:
    parameter.grad = _mask(parameter.grad)


def _double(parameter: Any) -> None:
    parameter.grad.mul_(2)


KINDS: dict[str, Callable[[Tied], Any]] = {
    "tensor, tied": lambda m: m.head.weight.register_hook(_mask),
    "post-accumulate, tied": lambda m: m.head.weight.register_post_accumulate_grad_hook(_mask_grad),
    "tensor, in a block": lambda m: m.blocks[1].weight.register_hook(_mask),
    "post-accumulate, in a block": lambda m: m.blocks[1].weight.register_post_accumulate_grad_hook(_double),
    "post-accumulate, all": lambda m: [p.register_post_accumulate_grad_hook(_double) for p in m.parameters()],
    "watching": lambda m: [p.register_hook(lambda g: g.norm() and None) for p in m.parameters()],
}


@placements
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("early", [True, False], ids=["before the engine", "after it"])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_see_gradients_and_what_they_return_counts(
    kind: str, early: bool, accumulation: int, placement: Placement
) -> None:
    tokens, results = torch.arange(10), []
    for ours in (True, False):
        model = Tied()
        if early or not ours:
            KINDS[kind](model)
        if ours:
            config = OffloadConfig(
                learning_rate=0.01, max_grad_norm=None, placement=placement, gradient_accumulation=accumulation
            )
            with OffloadEngine(model, config, device="cpu") as engine:
                if not early:
                    KINDS[kind](model)
                for _ in range(3 * accumulation):
                    engine.backward(F.cross_entropy(engine(tokens), tokens))
                    engine.step()
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
            for _ in range(3):
                optimizer.zero_grad()
                # A micro-batch's gradient is hooked alone, as the engine gathers it.
                whole = [torch.zeros_like(p) for p in model.parameters()]
                for _ in range(accumulation):
                    optimizer.zero_grad()
                    (F.cross_entropy(model(tokens), tokens) / accumulation).backward()
                    for total, p in zip(whole, model.parameters(), strict=True):
                        total += p.grad
                for total, p in zip(whole, model.parameters(), strict=True):
                    p.grad = total
                optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*results)


@placements
def test_a_hook_registered_after_the_forward_sees_the_sum_of_a_tied_weights_uses(placement: Placement) -> None:
    torch.manual_seed(0)
    embed, head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
    head.weight = embed.weight
    model, x = nn.Sequential(embed, blocks(), head), torch.arange(10)
    F.cross_entropy(model(x), x).backward()
    expected, seen = embed.weight.grad, list[torch.Tensor]()
    with OffloadEngine(model, OffloadConfig(placement=placement), device="cpu") as engine:
        for times in (1, 2):
            loss = F.cross_entropy(engine(x), x)
            handle = embed.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
            engine.backward(loss)
            engine.drop_gradients()
            handle.remove()
            engine.backward(F.cross_entropy(engine(x), x))  # a removed hook is not called
            engine.drop_gradients()
            assert len(seen) == times
            torch.testing.assert_close(seen[-1], expected)


@placements
@pytest.mark.parametrize("when", ["before the engine", "after it"])
def test_a_post_accumulate_hook_may_drop_the_gradient(placement: Placement, when: str) -> None:
    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    model = blocks()
    weight: Any = model[2].weight
    old, other = weight.detach().clone(), model[2].bias.detach().clone()
    if when == "before the engine":
        weight.register_post_accumulate_grad_hook(drop)
    with OffloadEngine(model, OffloadConfig(learning_rate=0.1, placement=placement), device="cpu") as engine:
        if when == "after it":
            weight.register_post_accumulate_grad_hook(drop)
        engine.backward(engine(X).square().mean())
        engine.step()
    assert torch.equal(weight, old)
    assert not torch.equal(model[2].bias, other)
