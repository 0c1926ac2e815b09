"""Every decoder and encoder-decoder of the installed transformers: planned, and trained as by plain AdamW.

A class that is neither is in one of the tables below, with the reason. An entry that is not needed any more fails.
"""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from offloadkit.doors.planning import ASSUMED_CARD, GIB
from offloadkit.engine.engine import OffloadEngine
from offloadkit.engine.outline import outlined, without_memory
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.offload.weight_ring import WeightRing
from tests.hf import families

NEEDS = {"Gemma3nForConditionalGeneration": "timm"}
"""Packages without which transformers cannot build the model."""

UNTRAINABLE = {
    "Gemma4AssistantForCausalLM": ("cannot be None", "it drafts tokens from the keys of the model that it assists"),
    "Gemma4UnifiedAssistantForCausalLM": ("cannot be None", "as Gemma4AssistantForCausalLM"),
    "xLSTMForCausalLM": ("inplace operation", "transformers' own kernels write to tensors that backward needs"),
}
"""Classes that plain torch cannot train on rows of tokens: a part of its error, and why."""

_VALUES = "its operations depend on values of tensors (nonzero, tolist), which the meta device lacks"
_BUFFERS = "a model in fp32 has buffers in fp32, which do not multiply with weights in bf16"
NOT_TRACED = {
    **dict.fromkeys(
        (
            "BltForCausalLM",
            "DbrxForCausalLM",
            "JetMoeForCausalLM",
            "LongcatFlashForCausalLM",
            "Qwen4ExpForCausalLM",
            "SwitchTransformersForConditionalGeneration",
        ),
        _VALUES,
    ),
    **dict.fromkeys(
        (
            "FSMTForConditionalGeneration",
            "MiniMaxForCausalLM",
            "OpenAIGPTLMHeadModel",
            "VoxtralRealtimeForConditionalGeneration",
        ),
        _BUFFERS,
    ),
}
"""Classes whose micro-batch cannot be traced on the meta device, and why: their plans have no activations."""

CARD = replace(
    ASSUMED_CARD,
    vram_total_bytes=24 * GIB,
    vram_free_bytes=24 * GIB,
    ram_total_bytes=64 * GIB,
    ram_available_bytes=64 * GIB,
)
PLACEMENTS = (
    Placement(weights="ram", activations="checkpoint"),
    Placement(gradients="vram", states="vram", step="gpu"),
)
OPTIONS: dict[str, Any] = {"eps": 1e-4, "weight_decay": 0.1}
"""`eps` keeps gradients that are zero but for rounding from moving weights by whole learning rates."""
LEARNING_RATE = 1e-2
MOST = 2e-5
"""Largest difference of a weight: a thousandth of the way that two steps can go."""


@pytest.fixture(autouse=True)
def what_left_a_buffer_is_nan(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(WeightRing, "fill_with_nan", True)


def test_the_tables_name_classes_of_transformers() -> None:
    assert {*NEEDS, *UNTRAINABLE, *NOT_TRACED} <= families.classes().keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", families.classes())
def test_a_class_of_transformers_is_planned_and_trains_as_by_plain_adamw(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    package = NEEDS.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{name} needs {package}")
    torch.manual_seed(0)
    model = getattr(transformers, name)(families.tiny_config(name)).train()
    batches = [families.batch(name, 8, seed) for seed in range(2)]
    if name in UNTRAINABLE:
        with pytest.raises((ValueError, RuntimeError), match=UNTRAINABLE[name][0]):
            by_plain_adamw(model, batches)
        return
    outline = outlined(without_memory(model), OffloadConfig(working_dtype="bf16"), CARD)
    work = outline.work(batches[0])
    assert (work is None) == (name in NOT_TRACED), caplog.text
    made = outline.plan(work)
    assert made.fits
    assert work is None or made.seconds
    expected_losses, expected = by_plain_adamw(copy.deepcopy(model), batches)
    numbers = []
    for placement in PLACEMENTS:
        losses, weights = by_engine(copy.deepcopy(model), placement, batches)
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert max_difference(weights, expected) <= MOST
        numbers.append(weights)
    assert all(torch.equal(numbers[0][key], numbers[1][key]) for key in expected)


def by_plain_adamw(model: nn.Module, batches: list[dict[str, Any]]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and the weights afterwards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **OPTIONS)
    losses = []
    torch.manual_seed(1)
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {key: weight.detach() for key, weight in model.named_parameters()}


def by_engine(
    model: nn.Module, placement: Placement, batches: list[dict[str, Any]]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = OffloadConfig(
        learning_rate=LEARNING_RATE, working_dtype="fp32", max_grad_norm=None, placement=placement, **OPTIONS
    )
    losses = []
    with OffloadEngine(model, config, device="cpu") as engine:
        torch.manual_seed(1)
        for batch in batches:
            loss = engine(**batch).loss
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
        engine.synchronize()
        return losses, {key: weight.detach().clone() for key, weight in model.named_parameters()}


def max_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((weight - expected[key]).abs().max()) for key, weight in found.items())
