"""The engine's share in rounded steps: the key of the random bits, and every group's options."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch

from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts.config import OffloadConfig, Precision
from offloadkit.offload import states
from offloadkit.optim.moments import random_key
from tests.models import TinyLM, tokens, train

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
OTHERS: dict[str, Any] = {"lr": 3e-2, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.4}


def test_a_key_is_of_the_seed_the_name_and_the_step() -> None:
    keys = [random_key(seed, name, step) for seed in (0, 1) for name in ("a", "b") for step in (1, 2)]
    assert len(set(keys)) == len(keys)
    assert keys == [random_key(seed, name, step) for seed in (0, 1) for name in ("a", "b") for step in (1, 2)]
    assert all(0 <= key < 1 << 64 for key in keys)


@pytest.mark.parametrize("precision", ["compact", "tiny"])
def test_each_parameter_and_step_has_random_bits_of_its_own(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = states.optimizer_step

    def keys(seed: int) -> list[int]:
        found: list[int] = []

        def step(state: Any, gradient: Any, segments: Any, scale: float) -> None:
            found.extend(segment.random_key for segment in segments)
            real(state, gradient, segments, scale)

        monkeypatch.setattr(states, "optimizer_step", step)
        torch.manual_seed(0)
        with OffloadEngine(TinyLM(depth=2), OffloadConfig(precision=precision, seed=seed), device="cpu") as engine:
            train(engine, tokens(3))
        return found

    first, again, other = keys(0), keys(0), keys(1)
    assert len(set(first)) == len(first) > 3 * 10
    assert first == again
    assert not set(first) & set(other)


def after_a_step(precision: Precision, first: dict[str, Any], second: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Master weights and moments by name; biases and the norm have the second group's options."""
    torch.manual_seed(0)
    model = TinyLM(depth=2)
    named = [(name, p) for name, p in model.named_parameters()]
    groups = [
        {"params": [p for _, p in named if p.dim() > 1], **first},
        {"params": [p for _, p in named if p.dim() == 1], **second},
    ]
    config = OffloadConfig(precision=precision, working_dtype="bf16", max_grad_norm=None)
    with OffloadEngine(model, config, device="cpu", param_groups=groups) as engine:
        train(engine, tokens(1))
        state = engine.state_dict()["optimizer"]
        found = {f"{name} {key}": value.clone() for name, of in state.items() for key, value in of.items()}
        return found | engine.master_weights()


@pytest.mark.parametrize(("precision", "option"), list(zip(cycle(["exact", "compact", "tiny"]), OPTIONS, strict=False)))
def test_each_group_has_options_of_its_own(precision: Precision, option: str) -> None:
    others = OPTIONS | {option: OTHERS[option]}
    mixed, one, other = (
        after_a_step(precision, *options) for options in ((OPTIONS, others), (OPTIONS, OPTIONS), (others, others))
    )
    in_second = [name for name in mixed if name.split()[0].endswith((".bias", "norm.weight"))]
    for name, value in mixed.items():
        assert torch.equal(value, (other if name in in_second else one)[name]), name
    assert any(not torch.equal(mixed[name], one[name]) for name in in_second)
