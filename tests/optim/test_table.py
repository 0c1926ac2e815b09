"""The declared table: a three-array optimizer is planned, placed, streamed and saved from its entry alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from offloadkit import OffloadConfig, OffloadEngine, Placement
from offloadkit.optim.table import OPTIMIZERS, LayerKind, Moment, Optimizer, state_table
from offloadkit.planner.layout import LayerShape

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
PLACEMENTS = {
    "ram": Placement(),
    "vram": Placement(states="vram", gradients="vram", step="gpu"),
    "streamed": Placement(states="ram", step="gpu"),
    "disk": Placement(states="disk"),
    "weights in ram": Placement(weights="ram"),
}


def scalars(*, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int) -> tuple[float, ...]:
    return (*betas, eps, 1 - lr * weight_decay, lr / (1 - betas[0] ** step), math.sqrt(1 - betas[1] ** step))


def update(weights: Tensor, gradient: Tensor, moments: Sequence[Tensor], numbers: Sequence[float]) -> None:
    """AMSGrad, as in torch.optim.AdamW(amsgrad=True)."""
    (m, v, largest), (beta1, beta2, eps, decay, step_size, root) = moments, numbers
    m.mul_(beta1).add_(gradient * (1 - beta1))
    v.mul_(beta2).add_(gradient * gradient * (1 - beta2))
    largest.copy_(torch.maximum(largest, v))
    weights.mul_(decay).sub_(m / (largest.sqrt() / root + eps) * step_size)


@pytest.fixture(autouse=True)
def amsgrad() -> Iterator[None]:
    moments = (Moment("exp_avg"), Moment("exp_avg_sq", is_signed=False), Moment("max_exp_avg_sq", is_signed=False))
    OPTIMIZERS["amsgrad"] = Optimizer("amsgrad", moments, ("exact",), scalars, update)
    yield
    del OPTIMIZERS["amsgrad"]
    state_table.cache_clear()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def trained(engine: OffloadEngine, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        engine.backward(
            engine(x.to(engine.module.blocks[0].weight.dtype)).float().square().mean() * 10.0 ** (-step % 3)
        )
        engine.step()


def config(placement: Placement | None, tmp_path: Path, dtype: str) -> OffloadConfig:
    return OffloadConfig(
        optimizer="amsgrad",
        learning_rate=OPTIONS["lr"],
        betas=OPTIONS["betas"],
        weight_decay=OPTIONS["weight_decay"],
        max_grad_norm=None,
        placement=placement,
        working_dtype=dtype,
        disk=str(tmp_path),
    )


def test_it_is_planned_with_its_three_arrays() -> None:
    layer = LayerShape("layer", 1000, 1024, LayerKind("bf16", "amsgrad"), 1, shared=False)
    assert layer.state_bytes() == {"master weights": 2 * 1024, "moments": 3 * 4 * 1024}
    assert layer.step_bytes(1) == 2 * 1024 + 2 * (2 + 2 + 12) * 1024


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_every_placement_gives_the_same_bits_and_holds_the_bytes_planned(tmp_path: Path, dtype: str) -> None:
    found = {}
    for name, placement in PLACEMENTS.items():
        with OffloadEngine(Blocks(), config(placement, tmp_path, dtype), device="cpu") as engine:
            trained(engine, 4)
            state = engine.state_dict()["optimizer"]["blocks.1.weight"]
            assert {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"} <= state.keys()
            tier = placement.states
            assert engine.plan.tiers[tier]["moments"] == sum(3 * 4 * layer.numel for layer in engine.plan.layers)
            found[name] = engine.master_weights() | {key: array.clone() for key, array in state.items()}
    for name, arrays in found.items():
        for key, array in arrays.items():
            assert torch.equal(array, found["ram"][key]), (name, key)


def test_it_follows_torch(tmp_path: Path) -> None:
    ours, theirs = Blocks(), Blocks()
    optimizer = torch.optim.AdamW(theirs.parameters(), **OPTIONS, amsgrad=True)
    for step in range(4):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        (theirs(x).square().mean() * 10.0 ** (-step % 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with OffloadEngine(ours, config(None, tmp_path, "fp32"), device="cpu") as engine:
        trained(engine, 4)
        for name, parameter in theirs.named_parameters():
            assert torch.allclose(engine.master_weights()[name], parameter, atol=1e-6)


def test_it_goes_on_from_a_checkpoint_of_another_placement(tmp_path: Path) -> None:
    with OffloadEngine(Blocks(), config(PLACEMENTS["streamed"], tmp_path, "bf16"), device="cpu") as engine:
        trained(engine, 2)
        torch.save(engine.state_dict(), tmp_path / "saved.pt")
        trained(engine, 2, first=2)
        expected = engine.master_weights()
    with OffloadEngine(Blocks(), config(PLACEMENTS["disk"], tmp_path, "bf16"), device="cpu") as engine:
        engine.load_state_dict(torch.load(tmp_path / "saved.pt"))
        trained(engine, 2, first=2)
        assert all(torch.equal(weights, expected[name]) for name, weights in engine.master_weights().items())


def test_a_saved_step_may_be_a_plain_number(tmp_path: Path) -> None:
    with OffloadEngine(Blocks(), config(None, tmp_path, "fp32"), device="cpu") as engine:
        trained(engine, 1)
        saved = engine.optimizer.state_dict()
        saved["state"] = {index: state | {"step": 7} for index, state in saved["state"].items()}
        engine.optimizer.load_state_dict(saved)
        assert all(state["step"] == 7 for state in engine.optimizer.state.values())
