"""fp16 working weights: a loss scale that follows overflows, and skipped steps that change nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ConfigError, EngineStateError, NonFiniteGradientError
from offloadkit.facts.config import DynamicLossScale, OffloadConfig, Placement
from offloadkit.optim.loss_scale import LossScale
from tests.hf.tiny import t5_config, t5_v1_1_config
from tests.models import TinyLM, numbers, tokens, train

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, one_thread: None) -> str:
    return str(request.param)


START, WINDOW = DynamicLossScale().start, DynamicLossScale().window


def fp16(**options: Any) -> OffloadConfig:
    return OffloadConfig(**({"learning_rate": 1e-2, "working_dtype": "fp16"} | options))


def test_the_dynamic_scale_follows_the_overflows() -> None:
    scale = LossScale("dynamic")
    assert scale.scale == 65536
    scale.update(overflow=True)
    assert scale.scale == 65536, "the first overflow must not lower the scale"
    scale.update(overflow=True)
    scale.update(overflow=True)
    assert scale.scale == 16384
    for _ in range(WINDOW + 1):
        assert scale.scale == 16384
        scale.update(overflow=False)
    assert scale.scale == 32768
    for _ in range(40):
        scale.update(overflow=True)
    assert scale.scale == 1
    assert not scale.can_fall


def test_overflows_are_borne_again_only_after_the_scale_rose() -> None:
    scale = LossScale("dynamic")
    for overflow in (True, *[False] * WINDOW, True):
        scale.update(overflow=overflow)
    assert scale.scale == START / 2, "good steps alone must not reset the hysteresis"
    for overflow in (*[False] * (WINDOW + 1), True):
        scale.update(overflow=overflow)
    assert scale.scale == START, "the first overflow after a rise must not lower the scale"
    scale.update(overflow=True)
    assert scale.scale == START / 2


@pytest.mark.parametrize("before", [[True], [False] * WINDOW], ids=["impatient", "about to rise"])
def test_a_loaded_scale_goes_on_as_the_saved_one(before: list[bool]) -> None:
    saved, loaded = LossScale("dynamic"), LossScale("dynamic")
    for overflow in before:
        saved.update(overflow=overflow)
    loaded.load_state_dict(saved.state_dict())
    for scale in (saved, loaded):
        scale.update(overflow=before[0])
        assert scale.scale == START * (0.5 if before[0] else 2)


def test_a_scale_with_numbers_of_its_own() -> None:
    """Equal to DeepSpeed's `DynamicLossScaler`, whose rule `expected` writes out."""
    how = DynamicLossScale(start=64.0, window=3, hysteresis=3, minimum=16.0)
    pattern = [False] * 5 + [True] * 4 + [False] * 9 + [True] * 3 + [False, True] * 3
    for consecutive in (False, True):
        scale = LossScale(replace(how, consecutive_hysteresis=consecutive))
        current, patience, last = 64.0, 3, -1
        for at, overflow in enumerate(pattern):
            assert scale.can_fall == (current > 16 or patience > 1)
            scale.update(overflow=overflow)
            if overflow:
                if patience == 1:
                    current = max(current / 2, 16.0)
                else:
                    patience -= 1
                last = at
            else:
                if consecutive:
                    patience = 3
                good = at - last - 1
                if good > 0 and good % 3 == 0:
                    current, patience = current * 2, 3
            assert scale.scale == current, at


@pytest.mark.parametrize("option", [{"start": 0.0}, {"window": 0}, {"hysteresis": 1.5}, {"minimum": -1}])
def test_a_dynamic_scale_without_a_meaning(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(option))} of the loss scale must be"):
        DynamicLossScale(**option)


def test_a_fixed_scale_stays() -> None:
    scale = LossScale(128.0)
    scale.update(overflow=True)
    assert (scale.scale, scale.can_fall) == (128.0, False)


@pytest.mark.parametrize("value", ["often", 0, -1.0, float("inf"), True])
def test_a_scale_without_a_meaning(value: Any) -> None:
    with pytest.raises(ConfigError, match='loss_scale must be "dynamic" or a positive number'):
        OffloadConfig(loss_scale=value)


@pytest.mark.parametrize(
    "placement", [None, Placement(weights="ram"), Placement("vram", "vram", "vram", "keep", "gpu")]
)
def test_an_overflow_leaves_everything_equal_and_lowers_the_scale(device: str, placement: Placement | None) -> None:
    torch.manual_seed(0)
    with OffloadEngine(
        TinyLM(), fp16(placement=placement, loss_scale=DynamicLossScale(256.0)), device=device
    ) as engine:
        batches = tokens(8, device)
        train(engine, batches[:4])
        before = numbers(engine)
        assert engine.loss_scale is not None
        scale = engine.loss_scale.scale
        for batch in batches[4:6]:
            engine.backward(engine(batch) * 1e6)
            engine.step()
        after = numbers(engine)
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        train(engine, batches[6:7])
        assert engine.loss_scale.scale == scale / 2
        assert [record.skipped for record in engine.telemetry.records] == [False] * 4 + [True] * 2 + [False]
        assert not torch.equal(numbers(engine)["blocks.0.up.weight.step"], before["blocks.0.up.weight.step"])


def test_no_scale_changes_a_gradient_that_fits(device: str) -> None:
    """Powers of two change only the exponent, so the weights have the same bits with and without clipping."""

    def weights(scale: float) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        with OffloadEngine(TinyLM(), fp16(loss_scale=scale, eps=1e-6), device=device) as engine:
            train(engine, tokens(1, device))
            return numbers(engine) | {"norm": torch.tensor(engine.grad_norm())}

    small, large = weights(1024.0), weights(4096.0)
    assert torch.equal(small["norm"], large["norm"]) or abs(small["norm"] / large["norm"] - 1) < 1e-3
    assert abs(small["blocks.0.up.weight.remainder"] - large["blocks.0.up.weight.remainder"]).max() < 1e-4


def test_overflow_under_a_fixed_scale_is_an_error(device: str) -> None:
    with OffloadEngine(TinyLM(), fp16(loss_scale=64.0), device=device) as engine:
        batch = tokens(1, device)[0]
        engine.backward(engine(batch) * 1e30)
        engine.step()
        with pytest.raises(NonFiniteGradientError, match="the step was not applied"):
            engine.synchronize()


@pytest.mark.slow
@pytest.mark.parametrize("config", [t5_config, t5_v1_1_config])
def test_t5_learns_as_in_fp32(device: str, config: Any) -> None:
    """150 steps without NaN; the last losses are within 5 % of fp32's, and `wo` stays fp32."""
    from transformers import T5ForConditionalGeneration

    def losses(dtype: Any) -> list[float]:
        torch.manual_seed(0)
        model: Any = T5ForConditionalGeneration(config(dropout_rate=0.0, attn_implementation="eager"))
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, 60, (4, 6), generator=generator).to(device)
        found = []
        with OffloadEngine(model, OffloadConfig(learning_rate=3e-3, working_dtype=dtype), device=device) as engine:
            engine.train()
            assert model.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
            for _ in range(150):
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                engine.step()
                found.append(loss.detach())
        return [float(loss) for loss in found]

    half, full = losses("fp16"), losses("fp32")
    assert all(loss == loss for loss in half)
    assert sum(half[-20:]) / 20 == pytest.approx(sum(full[-20:]) / 20, rel=0.05, abs=0.02)
    assert half[-1] < 0.5 * half[0]


def test_the_scale_is_saved_and_loaded(device: str) -> None:
    torch.manual_seed(0)
    with OffloadEngine(TinyLM(), fp16(), device=device) as engine:
        for batch in tokens(3, device):
            engine.backward(engine(batch) * 1e6)
            engine.step()
        train(engine, tokens(1, device))
        assert engine.loss_scale is not None
        assert engine.loss_scale.scale < 65536
        saved = engine.optimizer.state_dict()
        expected = engine.loss_scale.state_dict()
        with OffloadEngine(TinyLM(), fp16(), device=device) as other:
            other.optimizer.load_state_dict(saved)
            assert other.loss_scale is not None
            assert other.loss_scale.state_dict() == expected


def test_a_parameter_outside_of_the_model_is_refused_in_fp16_and_trains_beside_a_scale_of_one() -> None:
    torch.manual_seed(0)
    base, head, x = nn.Linear(4, 4).half(), nn.Linear(4, 2), torch.randn(2, 4).half()
    head(base(x).float()).sum().backward()
    expected = head.weight.grad
    head.weight.grad = None
    with OffloadEngine(base, device="cpu") as engine, pytest.raises(EngineStateError, match=r"shape \(2, 4\) outside"):
        engine.backward(head(engine(x).float()).sum())
    with OffloadEngine(base, OffloadConfig(loss_scale=1.0), device="cpu") as engine:
        engine.backward(head(engine(x).float()).sum())
        torch.testing.assert_close(head.weight.grad, expected)
    head.requires_grad_(False)
    with OffloadEngine(base, device="cpu") as engine:
        engine.backward(head(engine(x).float()).sum())
        assert engine.step()
