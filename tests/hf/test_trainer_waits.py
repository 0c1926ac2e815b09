"""The Trainer's loop does not wait for the device in the steady state, neither for a batch nor for a loss."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import accelerate.data_loader
import pytest
import torch
from transformers import LlamaForCausalLM, T5ForConditionalGeneration, TrainerCallback

from offloadkit.facts.config import OffloadConfig
from offloadkit.hf.data import load_dataset_like, prepare
from offloadkit.hf.trainer import OffloadSeq2SeqTrainer
from tests.hf.tiny import llama_config, t5_config, word_tokenizer
from tests.hf.training import arguments, seq2seq_rows, t5, train
from tests.synchronisations import Synchronisation, of_the_callers, synchronisations

pytestmark = pytest.mark.usefixtures("one_thread")

MASKS = "masking_utils.py"
"""transformers asks the device here whether an attention mask masks anything, and (5.17) sends it a number."""


@pytest.mark.parametrize(
    ("pinned", "said", "non_blocking"),
    [(True, False, True), (False, False, False), (False, True, True)],
    ids=["pinned", "not pinned", "not pinned, and the user says so"],
)
def test_batches_are_copied_without_waiting_where_they_are_pinned(
    pinned: bool, said: bool, non_blocking: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    send = accelerate.data_loader.send_to_device

    def record(batch: Any, device: Any, non_blocking: bool = False, **options: Any) -> Any:
        asked.append(non_blocking)
        return send(batch, device, non_blocking=non_blocking, **options)

    monkeypatch.setattr(accelerate.data_loader, "send_to_device", record)
    args = arguments(tmp_path, accelerator_config={"non_blocking": said})
    args.dataloader_pin_memory = pinned  # `use_cpu` had turned it off
    trainer = OffloadSeq2SeqTrainer(model=t5(), args=args, train_dataset=seq2seq_rows())
    assert trainer.accelerator.non_blocking is non_blocking
    trainer.train()
    trainer.close()
    assert len(asked) >= 3
    assert set(asked) == {non_blocking}
    assert args.accelerator_config.non_blocking is said


class Counts(TrainerCallback):
    """Records synchronisations from the end of one step to the end of another."""

    def __init__(self, after: int, until: int) -> None:
        self._after, self._until = after, until
        self._open = ExitStack()
        self.found: list[Synchronisation] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._after:
            self.found = self._open.enter_context(synchronisations())
        if state.global_step == self._until:
            self._open.close()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert state.global_step > self._until


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("attention", "accumulation"), [("sdpa", 1), ("eager", 2)])
def test_the_trainers_loop_synchronises_nothing(attention: str, accumulation: int, device: str, tmp_path: Path) -> None:
    """Except in transformers' attention masks, which `sdpa` without padding does not need."""
    rows = seq2seq_rows(12 * 2 * accumulation)
    for row in rows:
        if attention == "sdpa":
            del row["attention_mask"]
        else:
            row["attention_mask"][-1] = 0
    options: dict[str, Any] = {"max_steps": 12, "logging_steps": 1000, "use_cpu": device == "cpu", "bf16": True}
    options |= {"gradient_accumulation_steps": accumulation}
    model = T5ForConditionalGeneration(t5_config(attn_implementation=attention))
    counts = Counts(after=4, until=10)
    trainer = OffloadSeq2SeqTrainer(
        model=model,
        args=arguments(tmp_path, **options),
        train_dataset=rows,
        callbacks=[counts],
        offload=OffloadConfig(attention="keep"),
    )
    trainer.train()
    assert trainer.engine is not None
    assert trainer.engine.device.type == device
    trainer.close()
    waits = [each for each in of_the_callers(counts.found) if MASKS not in each.stack or attention == "sdpa"]
    assert not waits, f"{len(waits)} waits, as {waits[0]}"
    assert counts.found, "the stepping thread's wait for gradients was not recorded"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["t5", "llama", "llama with positions"])
def test_rows_of_several_lengths_are_waited_for_nowhere(family: str, device: str, tmp_path: Path) -> None:
    """Not even in attention masks: T5's attention is offloadkit's on a GPU, and the Llama's masks were computed before.

    Without a GPU, T5 has transformers' own attention, whose questions are noticed on a GPU only.
    """
    draw, rows = random.Random(0), []
    for _ in range(12 * 4):
        ids = draw.choices(range(3, 60), k=draw.randint(4, 40))
        rows.append({"input_ids": ids, "labels": ids[: len(ids) // 2] if family == "t5" else ids})
    made: Any = T5ForConditionalGeneration(t5_config(d_kv=16)) if family == "t5" else LlamaForCausalLM(llama_config())
    data = prepare(load_dataset_like(rows), word_tokenizer(), made.config)

    def with_positions(given: Any) -> Any:
        batch = data.collator(given)
        rows, length = batch["input_ids"].shape
        return batch | {"position_ids": torch.arange(length).repeat(rows, 1)}

    options: dict[str, Any] = {"max_steps": 12, "logging_steps": 1000, "use_cpu": device == "cpu", "bf16": True}
    counts = Counts(after=4, until=10)
    trainer = OffloadSeq2SeqTrainer(
        model=made,
        args=arguments(tmp_path, train_sampling_strategy="group_by_length", per_device_train_batch_size=4, **options),
        train_dataset=data.dataset,
        data_collator=with_positions if family == "llama with positions" else data.collator,
        processing_class=word_tokenizer(),
        callbacks=[counts],
    )
    trainer.train()
    trainer.close()
    waits = of_the_callers(counts.found)
    assert not waits, f"{len(waits)} waits, as {waits[0]}"


@pytest.mark.gpu
def test_a_batch_that_is_waited_for_is_seen(tmp_path: Path) -> None:
    """Without pinned memory the copy waits for the GPU's queue."""
    counts = Counts(after=4, until=6)
    options: dict[str, Any] = {"max_steps": 8, "logging_steps": 1000, "use_cpu": False, "dataloader_pin_memory": False}
    train(tmp_path, t5(), seq2seq_rows(16), more={"callbacks": [counts]}, **options)
    assert any("send_to_device" in each.stack for each in of_the_callers(counts.found))
    assert torch.cuda.get_sync_debug_mode() == 0
