"""T5's attention by offloadkit's kernels on the GPU: accurate, deterministic, and the same under every placement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import T5ForConditionalGeneration

import offloadkit
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.kernels import attention as attention_op
from tests.hf.tiny import t5_config
from tests.kernels.attention_reference import check, fused, inputs

MASKS = [("none", 0.0), ("keys", 0.1), ("pairs", 0.0), ("a whole row", 0.3), ("the first half, -inf", 0.6)]
SHAPES = [(2, 4, 512, 512, 64), (2, 2, 128, 512, 128), (3, 4, 77, 130, 32), (2, 2, 16, 200, 16)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", attention_op.DTYPES)
@pytest.mark.parametrize(("masked", "dropout"), MASKS)
def test_it_is_nearer_to_fp64_than_torch(shape: Any, dtype: torch.dtype, masked: str, dropout: float) -> None:
    check(shape, dtype, masked, dropout, "cuda")


@pytest.mark.parametrize("shape", SHAPES)
def test_its_bits_are_always_the_same(shape: Any) -> None:
    leaves, mask, into = inputs(shape, torch.bfloat16, "pairs", "cuda")
    torch.cuda.manual_seed(7)
    first, _ = fused(leaves, mask, 0.1, into)
    for _ in range(20):
        torch.cuda.manual_seed(7)
        again, _ = fused(leaves, mask, 0.1, into)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def trained(placement: Placement, *, dropout: float, fused: bool = True, compiled: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    config = t5_config(num_layers=3, d_kv=16, dropout_rate=dropout, attn_implementation="eager")
    model: Any = T5ForConditionalGeneration(config).bfloat16().train()
    draw = torch.Generator().manual_seed(1)
    attention: Any = "ours" if fused else "keep"
    settings = OffloadConfig(learning_rate=1e-3, placement=placement, compile_blocks=compiled, attention=attention)
    with offloadkit.OffloadEngine(model, settings, device="cuda") as engine:
        losses = []
        torch.cuda.manual_seed(2)
        for _ in range(10):
            ids = torch.randint(3, 64, (4, 40), generator=draw).cuda()
            attended = (torch.arange(40) < torch.tensor([[40], [33], [20], [40]])).long().cuda()
            loss = engine(input_ids=ids, attention_mask=attended, labels=ids[:, :24].clone()).loss
            losses.append(loss.detach())
            engine.backward(loss)
            engine.step()
        engine.synchronize()
        return [torch.stack(losses), *(parameter.detach().cpu() for parameter in model.parameters())]


PLACEMENTS = {
    "recomputed": Placement(activations="checkpoint"),
    "inputs in RAM": Placement(activations="offload"),
    "streamed": Placement(weights="ram"),
    "streamed and recomputed": Placement(weights="ram", activations="checkpoint"),
    "all on the GPU": Placement(states="vram", gradients="vram", step="gpu"),
}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("compiled", [False, True])
def test_no_placement_changes_a_number(dropout: float, compiled: bool) -> None:
    first = trained(Placement(), dropout=dropout, compiled=compiled)
    for name, placement in PLACEMENTS.items():
        found = trained(placement, dropout=dropout, compiled=compiled)
        assert all(torch.equal(one, other) for one, other in zip(first, found, strict=True)), name


def test_it_learns_as_the_models_own_attention_does() -> None:
    mine, own = trained(Placement(), dropout=0.0), trained(Placement(), dropout=0.0, fused=False)
    assert not all(torch.equal(one, other) for one, other in zip(mine, own, strict=True))
    torch.testing.assert_close(mine[0], own[0], rtol=0.02, atol=0.02)


def test_trying_the_kernels_draws_no_random_number() -> None:
    torch.manual_seed(0)
    before = torch.cuda.get_rng_state()
    attention_op.available.cache_clear()
    assert attention_op.available(64)
    assert torch.equal(torch.cuda.get_rng_state(), before)
