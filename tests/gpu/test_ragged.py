"""Rows of several lengths on the GPU: after the first steps nothing is compiled, and memory does not grow."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DataCollatorForSeq2Seq, T5ForConditionalGeneration, TrainerCallback

from offloadkit import OffloadConfig
from offloadkit.hf.data import load_dataset_like, prepare
from offloadkit.hf.trainer import OffloadSeq2SeqTrainer
from offloadkit.kernels import attention
from tests.hf.tiny import t5_config, word_tokenizer
from tests.hf.training import arguments

NUM_WARM, NUM_STEPS = 10, 60


class Compilations(TrainerCallback):
    """After each step, records the kernels compiled so far by Triton and torch, and the bytes reserved by torch."""

    def __init__(self, by_triton: list[str]) -> None:
        self._by_triton = by_triton
        self.seen: list[tuple[list[str], int]] = []
        self.reserved: list[int] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seen.append((list(self._by_triton), counters["stats"]["unique_graphs"]))
        self.reserved.append(torch.cuda.memory_reserved())


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernel variants made by Triton, including those found on disk."""
    import triton

    found: list[str] = []

    def note(*_: Any, **said: Any) -> None:
        found.append(str(said.get("repr")))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    for name in ("forward", "of_queries", "of_keys_and_values"):
        getattr(attention.KERNELS, name).device_caches.clear()  # compiled in earlier tests
    attention.available.cache_clear()
    attention.compiled_kinds.clear()
    return found


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("widths", ["of finetune", "any"])
def test_nothing_is_compiled_after_the_first_steps(
    widths: str, compiled: bool, by_triton: list[str], tmp_path: Path
) -> None:
    """Widths that are multiples of 16, and any widths."""
    torch.compiler.reset()
    counters.clear()
    draw, rows = random.Random(0), []
    for _ in range(NUM_STEPS * 4):
        ids = draw.choices(range(3, 60), k=draw.randint(20, 200))
        rows.append({"input_ids": ids, "labels": ids[: draw.randint(16, 100)]})
    torch.manual_seed(0)
    model: Any = T5ForConditionalGeneration(t5_config(d_model=64, d_kv=16, num_layers=3, num_heads=4))
    tokenizer = word_tokenizer()
    data = prepare(load_dataset_like(rows), tokenizer, model.config)
    options: dict[str, Any] = {"max_steps": NUM_STEPS, "logging_steps": 1000, "use_cpu": False, "bf16": True}
    sorts = widths == "of finetune"
    options["train_sampling_strategy"] = "group_by_length" if sorts else "random"
    noted = Compilations(by_triton)
    trainer = OffloadSeq2SeqTrainer(
        model=model,
        args=arguments(tmp_path, per_device_train_batch_size=4, **options),
        train_dataset=data.dataset,
        data_collator=data.collator if sorts else DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
        callbacks=[noted],
        offload=OffloadConfig(compile_blocks=compiled),
    )
    trainer.train()
    assert trainer.model.encoder.config._attn_implementation == "offloadkit"
    trainer.close()
    assert by_triton, "Triton's hook was not called"
    warm, last = noted.seen[NUM_WARM - 1], noted.seen[-1]
    assert last[0] == warm[0], last[0][len(warm[0]) :]
    assert last[1] == warm[1]
    assert (last[1] > 0) == compiled
    if sorts:
        assert max(noted.reserved) <= 1.1 * max(noted.reserved[:NUM_WARM]), noted.reserved
