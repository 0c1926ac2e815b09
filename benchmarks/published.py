"""What the plan says of cards that are not here, beside figures that others have published of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from offloadkit.config import OffloadConfig
from offloadkit.optim.table import DTYPES, Dtype
from offloadkit.planner.cards import CARDS, card_named
from offloadkit.planner.seconds import IN_VRAM, StepModel
from offloadkit.planning import ASSUMED_CARD
from offloadkit.tracing import trace_micro_batch

TOKENS = 1024
"""In a row."""
PUBLISHED = {
    "1.5B": {"RTX 4090": (4, 14e3), "RTX 5090": (8, 17e3), "H100": (16, 58e3)},
    "3B": {"RTX 4090": (4, 6.2e3), "RTX 5090": (8, 8.6e3), "H100": (8, 30e3)},
}
"""Rows in a micro-batch, and tokens a second of Qwen2.5 in bf16 on one GPU, by LLM.Q's README
(github.com/IST-DASLab/llmq, commit 00ea1be). It computes in CUDA of its own, with part of the blocks recomputed."""
OTHERS, ROWS = "1.5B", 4
"""Model, and rows in a micro-batch, of the cards without published figures."""
QWEN = {"1.5B": (1536, 8960, 28, 12), "3B": (2048, 11008, 36, 16)}
"""Hidden size, feed-forward size, layers and heads. Keys and values have 2 heads."""


def planned(size: str, card: str, rows: int) -> float:
    """Tokens a second of forward and backward of a Qwen2.5 by the plan, on a card that holds everything, in bf16, or in
    fp16 where the card lacks it.

    The host is an assumed one: the figure does not depend on where this runs.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from offloadkit.hf.loss import compute_loss_in_chunks
    from offloadkit.offload.layers import flat_layers

    hidden, feed_forward, num_layers, heads = QWEN[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        vocab_size=151_936,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        use_cache=False,
    )
    sheet = card_named(card)
    dtype: Dtype = "bf16" if sheet.supports_bf16 else "fp16"
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(DTYPES[dtype]).train()
    compute_loss_in_chunks(model)
    ids = torch.empty(rows, TOKENS, dtype=torch.int64, device="meta")
    work = trace_micro_batch(model, {"input_ids": ids, "labels": ids})
    layers = [layer.shape() for layer in flat_layers(model, OffloadConfig(working_dtype=dtype))]
    machine = replace(ASSUMED_CARD, gpu_name=sheet.name, compute_capability=sheet.capability, **sheet.rates())
    steps = StepModel(layers, work, machine, 1)
    return rows * TOKENS / (steps.on_large_gpu() - steps.seconds([IN_VRAM] * len(layers)).busy["GPU step"])


def lines() -> Iterator[str]:
    """A table of all, and where the figures are from."""
    yield "| model | card | rows | planned tokens/s | published tokens/s | published / planned |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for size, by_card in PUBLISHED.items():
        others = [card.name for card in CARDS if card.name not in by_card] if size == OTHERS else []
        for card in [*by_card, *others]:
            rows, published = by_card.get(card, (ROWS, None))
            told = planned(size, card, rows)
            beside = [f"{published:,.0f}", f"{published / told:.2f}"] if published else ["-", "-"]
            cells = [f"Qwen2.5-{size}", card, f"{rows} x {TOKENS}", f"{told:,.0f}", *beside]
            yield f"| {' | '.join(cells)} |"
    yield "\nPublished: LLM.Q's README (github.com/IST-DASLab/llmq, commit 00ea1be), one GPU, bf16. It computes in CUDA"
    yield "of its own, with part of the blocks recomputed. Planned: forward and backward of transformers' blocks on a"
    yield "card that holds everything. They take longer than such kernels, on each card about as much; so cards compare"
    yield 'alike. "-": nobody has published it. Each card\'s data sheet is named in `offloadkit/planner/cards.py`.'
