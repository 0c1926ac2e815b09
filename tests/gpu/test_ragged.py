"""Rows of several lengths on the GPU: after the first steps nothing is compiled, and memory does not grow."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DataCollatorForSeq2Seq, LlamaForCausalLM, T5ForConditionalGeneration, TrainerCallback

from offloadkit import OffloadConfig
from offloadkit.hf.data import load_dataset_like, prepare
from offloadkit.hf.patches import patched
from offloadkit.hf.tokenize import IGNORED
from offloadkit.hf.trainer import OffloadSeq2SeqTrainer
from offloadkit.kernels import attention
from tests.hf.tiny import llama_config, t5_config, word_tokenizer
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


class Unknown(DataCollatorForSeq2Seq):
    """A collator whose batches keep their widths."""


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
        data_collator=data.collator if sorts else Unknown(tokenizer),
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


def test_a_mask_of_unread_padding_costs_no_memory_and_losses_and_gradients_stay_but_for_rounding() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    model = LlamaForCausalLM(llama_config(**sizes, max_position_embeddings=512)).cuda()
    seen = torch.arange(512, device="cuda") < torch.tensor([[512], [130], [300], [1]], device="cuda")
    ids = torch.randint(3, 64, (4, 512), device="cuda")
    batch = {"input_ids": ids, "attention_mask": seen.long(), "labels": ids.where(seen, IGNORED)}

    def results(trained: Any) -> tuple[list[torch.Tensor], int]:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = trained(**batch).loss
        found = [loss.detach(), *torch.autograd.grad(loss, list(trained.parameters()))]
        return [each.double() for each in found], torch.cuda.max_memory_allocated() - before

    exact, _ = results(copy.deepcopy(model).double())
    model.bfloat16()
    results(model)  # the first call allocates workspaces
    theirs, most = results(model)
    undo = patched(model, OffloadConfig(), kernels=False)
    mine, less = results(model)
    undo()
    assert less < most - 2 * 4 * 512 * 512  # the bias of a block
    for true, my, their in zip(exact, mine, theirs, strict=True):
        assert (my - true).norm() <= 1.1 * (their - true).norm() + 1e-3 * true.norm()
