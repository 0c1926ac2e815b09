"""Rows of several lengths: their widths, HuggingFace's order by length, and the order of a resumed epoch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ByT5Tokenizer, Seq2SeqTrainer

import offloadkit
from offloadkit.hf.data import PreparedData, load_dataset_like, prepare
from offloadkit.hf.ragged import PadToWidths, rounded_up, width_step
from offloadkit.hf.trainer import OffloadSeq2SeqTrainer
from tests.hf import tiny
from tests.hf.training import arguments

pytestmark = pytest.mark.usefixtures("one_thread")

T5 = tiny.t5_config(d_model=16, d_ff=16, num_layers=1, dropout_rate=0.1)


@pytest.mark.parametrize(
    ("mean", "longest", "limit", "step"),
    [
        (320, 512, None, 32),  # 13 widths from 128 to 512
        (255, 512, None, 16),
        (100, 2048, None, 16),  # a few long rows do not make the short ones wide
        (1024, 2048, None, 128),
        (4, 10, None, 1),
        (40, 40, None, 1),  # as packed rows are
        (320, 500, 508, 8),  # 512 would be beyond the model's last position
        (320, 600, 512, 1),  # rows that came as tokens are not cut
    ],
)
def test_a_step_adds_a_sixteenth_of_the_mean_length_at_most(
    mean: float, longest: int, limit: int | None, step: int
) -> None:
    assert width_step(mean, longest, limit) == step
    if limit is not None and longest <= limit:
        assert rounded_up(longest, step) <= limit < rounded_up(longest, 2 * step)


def pairs(number: int = 40) -> list[dict[str, str]]:
    """Inputs of 5 to 200 tokens, targets of 2 to 40."""
    draw = random.Random(0)
    texts = ("".join(draw.choices("abcdefgh", k=draw.randint(4, 199))) for _ in range(number))
    return [{"input": text, "target": text[: draw.randint(1, 39)]} for text in texts]


def prepared(rows: Any, tokenizer: Any, config: Any) -> PreparedData:
    return prepare(load_dataset_like(rows), tokenizer, config)


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches_have_few_widths_and_the_same_tokens(side: str) -> None:
    tokenizer = ByT5Tokenizer(padding_side=side)
    data = prepared(pairs(), tokenizer, T5)
    assert isinstance(data.collator, PadToWidths)
    assert data.longest_input % 16 == data.longest_target % 16 == 0
    for first in range(0, 40, 4):
        rows = [data.dataset[index] for index in range(first, first + 4)]
        batch, plain = data.collator(rows), data.collator.collate(rows)
        for name, padding in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
            wide, narrow = batch[name], plain[name]
            missing = wide.shape[1] - narrow.shape[1]
            assert 0 <= missing < 16
            assert wide.shape[1] % 16 == 0
            assert wide.dtype == narrow.dtype
            added = wide[:, :missing] if side == "left" else wide[:, narrow.shape[1] :]
            assert torch.equal(wide[:, missing:] if side == "left" else wide[:, : narrow.shape[1]], narrow)
            assert (added == padding).all()


def test_a_causal_models_labels_are_as_wide_as_its_inputs() -> None:
    rows = [{"input_ids": [4] * length} for length in (20, 30, 5)]
    data = prepared(rows, tiny.word_tokenizer(), tiny.llama_config())
    batch = data.collator([data.dataset[0], data.dataset[2]])
    assert batch["labels"].shape == batch["input_ids"].shape == (2, 32)
    assert data.longest_input == 32


class Recorded:
    """A collator that notes the first tokens of the rows of each batch."""

    def __init__(self, collate: Any) -> None:
        self.collate, self.rows = collate, list[Any]()

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        self.rows.append([row["input_ids"] for row in rows])
        return self.collate(rows)


def options(**more: Any) -> dict[str, Any]:
    return {"train_sampling_strategy": "group_by_length", "max_steps": -1, "logging_steps": 100, **more}


def trainer(kind: Any, folder: Path, collate: Any, model: Any, rows: Any, **more: Any) -> Any:
    args = arguments(folder, **options(**more))
    return kind(model=model, args=args, train_dataset=rows, data_collator=collate, processing_class=ByT5Tokenizer())


def test_finetune_sees_the_updates_of_huggingfaces_trainer_in_random_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    collate = PadToWidths.__call__

    def noted(self: PadToWidths, rows: list[dict[str, Any]]) -> Any:
        seen.append([row["input_ids"] for row in rows])
        return collate(self, rows)

    monkeypatch.setattr(PadToWidths, "__call__", noted)
    size: dict[str, Any] = {"gradient_accumulation_steps": 2, "num_train_epochs": 2}
    model = tiny.load_model(tiny.save_config(T5, tmp_path / "t5"), init="random")
    data = prepared(pairs(), ByT5Tokenizer(), T5)
    plain = trainer(Seq2SeqTrainer, tmp_path / "plain", data.collator, model, data.dataset, seed=3, **size)
    plain.train()
    theirs = list(seen)
    seen.clear()
    offloadkit.finetune(
        tmp_path / "t5", pairs(), tokenizer="byte", init="random", output_dir=tmp_path / "ours", batch_size=2, seed=3,
        epochs=2, gradient_accumulation=2, use_cpu=True, monitor=False, save_strategy="no",
    )  # fmt: skip
    assert len(seen) == 40
    ours, in_order = ([batches[at : at + 2] for at in range(0, 20, 2)] for batches in (seen, theirs))
    assert sorted(ours) == sorted(in_order)
    assert ours[0] == in_order[0]
    assert ours[1:] != in_order[1:]
    assert max(map(len, ours[0][0])) == max(len(ids) for update in ours for batch in update for ids in batch)


@pytest.mark.slow
def test_a_resumed_epoch_goes_on_in_its_order(tmp_path: Path) -> None:
    data = prepared(pairs(), ByT5Tokenizer(), T5)

    def run(folder: str, **more: Any) -> tuple[Any, list[Any], list[torch.Tensor]]:
        torch.manual_seed(0)
        model = tiny.load_model(tiny.save_config(T5, tmp_path / "t5"), init="random")
        collate = Recorded(data.collator)
        checkpoint = more.pop("resume", None)
        save: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5, "num_train_epochs": 2}
        ours = trainer(
            OffloadSeq2SeqTrainer, tmp_path / folder, collate, model, data.dataset, per_device_train_batch_size=4,
            gradient_accumulation_steps=1, **save,
        )  # fmt: skip
        if checkpoint:
            torch.randn(7)  # the random state of a process that has loaded a model otherwise
        ours.train(resume_from_checkpoint=checkpoint)
        ours.close()
        return ours, collate.rows, [weight.detach().clone() for weight in model.parameters()]

    _, whole, weights = run("whole")
    assert len(whole) == 20
    assert whole[:10] != whole[10:]
    for step in (5, 10, 15):
        _, rows, again = run("again", resume=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert rows == whole[step:]
        assert all(torch.equal(one, other) for one, other in zip(weights, again, strict=True)), step
