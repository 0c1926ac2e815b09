"""Saved states that an optimizer accepts."""

from __future__ import annotations

import copy

import pytest
import torch

from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ConfigError
from offloadkit.facts.config import OffloadConfig
from offloadkit.optim.torch_optimizer import check_states
from tests.models import TinyLM, tokens, train


@pytest.mark.parametrize(
    ("own", "saved", "fits"),
    [
        (torch.float32, torch.float32, True),
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, False),
        (torch.float32, torch.int8, False),
        (torch.int8, torch.int8, True),
        (torch.int16, torch.float32, False),
    ],
)
def test_moments_of_another_dtype_are_taken_only_where_fp32_holds_them(
    own: torch.dtype, saved: torch.dtype, fits: bool
) -> None:
    states, others = ({"exp_avg": torch.zeros(3, dtype=dtype)} for dtype in (own, saved))
    if fits:
        check_states(states, others)
        return
    with pytest.raises(ConfigError, match=f"saved exp_avg is {saved}, but this run's is {own}: resume with"):
        check_states(states, others)


def test_a_loss_scale_is_taken_where_there_is_one_on_both_sides() -> None:
    model, fp16 = TinyLM(depth=1), OffloadConfig(working_dtype="fp16")
    with OffloadEngine(copy.deepcopy(model), fp16, device="cpu") as engine:
        train(engine, tokens(1))
        state = engine.optimizer.state_dict()
        assert engine.loss_scale is not None
        engine.optimizer.load_state_dict(state | {"loss_scale": state["loss_scale"] | {"scale": 128.0}})
        assert engine.loss_scale.scale == 128
        engine.optimizer.load_state_dict({key: value for key, value in state.items() if key != "loss_scale"})
        assert engine.loss_scale.scale == 128
    with OffloadEngine(copy.deepcopy(model), OffloadConfig(), device="cpu") as engine:
        train(engine, tokens(1))
        engine.optimizer.load_state_dict(engine.optimizer.state_dict() | {"loss_scale": state["loss_scale"]})
        assert engine.loss_scale is None
