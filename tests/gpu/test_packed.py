"""Packed rows on the GPU: `varlen_attn` gets them, keeps them apart, and runs in CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offloadkit
from offloadkit import OffloadConfig
from offloadkit.errors import DataError
from offloadkit.facts import graphs as facts_graphs
from offloadkit.facts.config import Placement
from offloadkit.hf import packed
from offloadkit.hf.patches import patched
from tests.graphs import PLACEMENTS, assert_equals_eager, llama, train
from tests.hf.test_packed import model_of, packs, padded, rows_of
from tests.hf.tiny import WORDS, word_tokenizer
from tests.synchronisations import synchronisations

WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
LENGTHS = (37, 130, 1, 60, 90)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Shapes of the queries that `varlen_attn` gets."""
    found: list[Any] = []
    own = packed._by_varlen

    def noted(query: torch.Tensor, *given: Any) -> torch.Tensor:
        found.append(tuple(query.shape))
        return own(query, *given)

    monkeypatch.setattr(packed, "_by_varlen", noted)
    return found


def on_gpu(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cuda() for name, value in batch.items()}


def test_positions_are_compared_with_a_mask_without_waiting() -> None:
    model = model_of("Llama", max_position_embeddings=512).cuda()
    undo = patched(model, OffloadConfig(), kernels=True)
    batch, apart = on_gpu(packs(rows_of(LENGTHS))), on_gpu(padded(rows_of(LENGTHS)))
    positions = torch.arange(apart["input_ids"].shape[1], device="cuda").expand_as(apart["input_ids"])
    model(**apart, position_ids=positions)
    with synchronisations() as found:
        model(**apart, position_ids=positions)
    assert not [each for each in found if ", in ask\n" in each.stack or ", in read\n" in each.stack]

    def crossed() -> None:
        model(**batch, attention_mask=torch.ones_like(batch["input_ids"]))
        torch.cuda.synchronize()
        model(**apart)

    with pytest.raises(DataError, match="let the collator leave attention_mask out"):
        crossed()
    undo()


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "Gemma3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_rows_are_the_rows_alone(family: str, dtype: torch.dtype, calls: list[Any]) -> None:
    """bf16 within its rounding, fp32 under a block-diagonal mask within 1e-4; another first row changes no bit."""
    model = model_of(family, max_position_embeddings=512, **WIDE).to("cuda", dtype)
    undo = patched(model, OffloadConfig(), kernels=True)
    rows = rows_of(LENGTHS)
    batch = on_gpu(packs(rows[:3], rows[3:]))
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits.float()
        assert bool(calls) == (dtype == torch.bfloat16)
        alone = [model(row[None].cuda(), use_cache=False).logits.float()[0] for row in rows]
        places = [(0, 0), (0, 37), (0, 167), (1, 0), (1, 60)]
        for (line, begin), own in zip(places, alone, strict=True):
            found = logits[line, begin : begin + len(own)]
            assert (found - own).abs().max() <= (0.02 if dtype == torch.bfloat16 else 1e-4)
        other = on_gpu(packs([rows_of(LENGTHS, seed=2)[0], *rows[1:3]], rows[3:]))
        changed = model(**other, use_cache=False).logits.float()
    assert torch.equal(changed[0, 37:], logits[0, 37:])
    assert torch.equal(changed[1], logits[1])
    undo()


@pytest.mark.parametrize("window", [None, 16])
def test_gradients_are_those_of_a_block_diagonal_mask(window: int | None, deterministic: None) -> None:
    lines = packed.boundaries(packs(rows_of((37, 130, 1)), rows_of((60, 90, 18)))["position_ids"].cuda())
    assert lines is not None
    leaves = [
        torch.randn(2, heads, 168, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)
    ]
    into = torch.randn(2, 168, 4, 64, device="cuda", dtype=torch.bfloat16)
    own = torch.autograd.grad(packed._by_varlen(*leaves, lines, window, 0.125), leaves, into)
    mask = packed._block_diagonal(lines, leaves[0], window)
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    output = torch.nn.functional.scaled_dot_product_attention(*exact, attn_mask=mask, scale=0.125, enable_gqa=True)
    theirs = torch.autograd.grad(output.transpose(1, 2), exact, into.float())
    for one, two in zip(own, theirs, strict=True):
        assert (one.float() - two).norm() <= 0.02 * two.norm()


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_packed_batches_run_as_cuda_graphs(
    placement: Placement, deterministic: None, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts_graphs, "device_types", {"cuda"})
    data = [on_gpu(packs(rows_of((20 + at, 60, 16 - at), seed=at), rows_of((50, 46), seed=9))) for at in range(8)]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 3}
    options: dict[str, Any] = {"device": "cuda", "gradient_accumulation": 2, "working_dtype": "bf16"}

    def run() -> Any:
        return train(llama(max_position_embeddings=128, **sizes), data, placement, **options)

    found = run()
    assert calls
    assert found[2] >= 2 * 3  # forward and backward of three blocks, all batches alike
    assert_equals_eager(found, run, monkeypatch)


def test_finetune_packs_on_the_gpu(tmp_path: Path, calls: list[Any]) -> None:
    texts = [{"text": " ".join(WORDS[: 2 + at % 12])} for at in range(64)]
    result = offloadkit.finetune(
        llama(hidden_size=64, num_attention_heads=2, max_position_embeddings=128), texts, tokenizer=word_tokenizer(),
        output_dir=tmp_path, packing=True, max_input_length=64, batch_size=2, epochs=4, learning_rate=1e-2,
        logging_steps=1, monitor=False,
    )  # fmt: skip
    losses = [entry["loss"] for entry in result.history if "loss" in entry]
    assert calls
    assert losses[-1] < losses[0] - 0.5
