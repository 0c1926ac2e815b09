"""Gated activations, rotary embeddings and Gemma's norms by offloadkit's kernels on the GPU: the bits of torch's eager
operations, for GeGLU up to the last bit, and norms as good as torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import offloadkit
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.hf.patches import fuse
from offloadkit.kernels import decoder
from tests.gpu.test_fused_attention import PLACEMENTS
from tests.hf.test_fused_decoders import FAMILIES, tiny
from tests.hf.tiny import llama_config
from tests.kernels.decoder_reference import (
    HEADS,
    SIZES,
    check_gated,
    check_norm,
    check_rotary,
    gated,
    gates,
    same,
    with_gradients,
)

LARGE = (4, 28, 4, 129, 128, 128)
LAST_BIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}
"""Largest error of GeGLU, as a share of the largest number."""


@pytest.mark.parametrize("dtype", decoder.DTYPES)
@pytest.mark.parametrize("shape", [*HEADS, LARGE, (3, 32, 32, 33, 96, 72)])
def test_rotary_has_the_bits_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_rotary(shape, dtype, "cuda")


@pytest.mark.parametrize("activation", decoder.ACTIVATIONS)
@pytest.mark.parametrize("dtype", decoder.DTYPES)
@pytest.mark.parametrize("shape", [*SIZES, (33, 8, 18944), (7, 11008)])
def test_gated_activations_have_the_bits_of_torch(shape: tuple[int, ...], dtype: torch.dtype, activation: str) -> None:
    check_gated(*gates(shape, dtype, "cuda"), activation, 0.0 if activation == "silu" else LAST_BIT[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_swiglu_of_every_number_of_two_bytes_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    """Infinities and NaN too."""
    every = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
    up = torch.linspace(-3, 3, 64, device="cuda").to(dtype).requires_grad_()
    gate = every[:, None].expand(-1, 64).clone().requires_grad_()
    check_gated(gate, up.expand(2**16, -1).clone().detach().requires_grad_(), "silu")


@pytest.mark.parametrize("activation", decoder.ACTIVATIONS)
def test_a_broadcast_gradient_and_a_second_derivative(activation: str) -> None:
    gate, up = gates((5, 70), torch.float32, "cuda")

    def derivatives(function: Any) -> list[torch.Tensor]:
        first = torch.autograd.grad(function(gate, up, activation).sum(), (gate, up), create_graph=True)
        second = torch.autograd.grad(first[0].square().sum() + first[1].sum(), (gate, up))
        return [*first, *second]

    for mine, theirs in zip(derivatives(decoder.gated), derivatives(gated), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", decoder.DTYPES)
@pytest.mark.parametrize("shape", [(3, 7, 24), (2, 5, 4100), (4, 300, 3584), (5000, 256), (1, 16384)])
def test_norms_are_as_good_as_torchs(shape: tuple[int, ...], dtype: torch.dtype, offset: float) -> None:
    check_norm(shape, dtype, offset, "cuda")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_of_each_family_computes_the_same_with_equal_bits_each_time(model_type: str) -> None:
    torch.manual_seed(0)
    options = {"attn_implementation": "eager", "num_hidden_layers": 2, "intermediate_size": 77}
    model = tiny(model_type, "cuda", **options)
    ids = torch.randint(1, 64, (3, 17), device="cuda")

    def run() -> list[torch.Tensor]:
        return with_gradients(model(input_ids=ids).logits, list(model.parameters()))

    own, undo = run(), fuse(model)
    found, again = run(), run()
    undo()
    assert all(map(same, found, again))
    for mine, theirs in zip(found, own, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def trained(placement: Placement, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    config = llama_config(num_hidden_layers=3, intermediate_size=77, attn_implementation="eager")
    model: Any = LlamaForCausalLM(config).bfloat16().train()
    draw = torch.Generator().manual_seed(1)
    settings = OffloadConfig(learning_rate=1e-3, placement=placement, **options)
    with offloadkit.OffloadEngine(model, settings, device="cuda") as engine:
        losses = []
        for length in (40, 33, 40, 7, 16, 40):
            ids = torch.randint(3, 64, (4, length), generator=draw).cuda()
            loss = engine(input_ids=ids, labels=ids).loss
            losses.append(loss.detach())
            engine.backward(loss)
            engine.step()
        engine.synchronize()
        return [torch.stack(losses), *(parameter.detach().cpu() for parameter in model.parameters())]


def test_no_placement_changes_a_number() -> None:
    first = trained(Placement())
    for name, placement in PLACEMENTS.items():
        found = trained(placement)
        assert all(torch.equal(one, other) for one, other in zip(first, found, strict=True)), name


def test_training_has_the_bits_of_the_models_own_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = trained(Placement())
    monkeypatch.setattr(decoder, "available", lambda: False)
    assert all(map(torch.equal, fused, trained(Placement())))
