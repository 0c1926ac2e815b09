"""Rows of several lengths: padded widths, HuggingFace's order by length, and the order of a resumed epoch."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ByT5Tokenizer, T5ForConditionalGeneration
from transformers.trainer_pt_utils import LengthGroupedSampler

import offloadkit
from offloadkit.hf.data import PreparedData, load_dataset_like, prepare
from offloadkit.hf.ragged import OrderOfSeed
from offloadkit.hf.trainer import OffloadSeq2SeqTrainer
from offloadkit.hf.widths import PadToWidths, rounded_up, width_step
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
        (40, 40, None, 1),  # like packed rows
        (320, 500, 508, 8),  # 512 would exceed the model's last position
        (320, 600, 512, 1),  # tokenised rows are not cut
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
    """A collator that records the first tokens of every batch's rows."""

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


def test_what_else_a_users_rows_call_lengths_orders_nothing(tmp_path: Path) -> None:
    class Clips(list[Any]):
        lengths = (0.5,)

    rows = Clips({"input_ids": [4] * length, "labels": [4]} for length in range(1, 9))
    made = trainer(OffloadSeq2SeqTrainer, tmp_path, None, T5ForConditionalGeneration(T5), rows)
    for sampler in (made._get_train_sampler(), made._get_eval_sampler(rows)):
        assert sorted(sampler) == list(range(8))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rows of each collated batch, as tokens."""
    found: list[Any] = []
    collate = PadToWidths.__call__

    def noted(self: PadToWidths, rows: list[dict[str, Any]]) -> Any:
        found.append([row["input_ids"] for row in rows])
        return collate(self, rows)

    monkeypatch.setattr(PadToWidths, "__call__", noted)
    return found


def finetuned(tmp_path: Path, **options: Any) -> Any:
    given: dict[str, Any] = {"batch_size": 2, "seed": 3, "epochs": 2, "save_strategy": "no", "overwrite": True}
    folder = tiny.save_config(T5, tmp_path / "t5")
    how: dict[str, Any] = {"tokenizer": "byte", "init": "random", "use_cpu": True, "monitor": False}
    return offloadkit.finetune(folder, pairs(), output_dir=tmp_path / "ours", **how, **given | options)


def test_finetune_sees_the_updates_of_huggingfaces_sampler_in_random_order(tmp_path: Path, seen: list[Any]) -> None:
    data = prepared(pairs(), ByT5Tokenizer(), T5)
    lengths = [len(row["input_ids"]) for row in data.dataset]
    finetuned(tmp_path, gradient_accumulation=2)
    assert len(seen) == 40
    for epoch in range(2):
        sampler = LengthGroupedSampler(4, lengths=lengths)
        order = OrderOfSeed(sampler, SimpleNamespace(seed=3, data_seed=None))
        order.set_epoch(epoch)
        sampler.generator = torch.Generator().manual_seed(order.seed_of_epoch())
        theirs = [data.dataset[at]["input_ids"] for at in sampler]
        in_order = [[theirs[at : at + 2], theirs[at + 2 : at + 4]] for at in range(0, 40, 4)]
        ours = [seen[at : at + 2] for at in range(20 * epoch, 20 * epoch + 20, 2)]
        assert sorted(ours) == sorted(in_order)
        assert ours[0] == in_order[0]
        assert ours[1:] != in_order[1:]
        assert max(map(len, ours[0][0])) == max(len(ids) for update in ours for batch in update for ids in batch)


@pytest.mark.slow
def test_finetunes_order_follows_from_the_seed_alone(tmp_path: Path, seen: list[Any]) -> None:
    def rows_of(**options: Any) -> list[Any]:
        seen.clear()
        finetuned(tmp_path, batch_size=4, **options)
        return [batch for batch in seen if all(len(ids) > 4 for ids in batch)]  # evaluation rows are shorter

    held_out = [{"input": "abc", "target": "a"}] * 3
    alone = rows_of()
    assert len(alone) == 20
    assert alone[:10] != alone[10:]
    assert rows_of(eval_dataset=held_out, eval_steps=3, eval_on_start=True) == alone
    assert rows_of(seed=4) != alone
    assert rows_of(data_seed=4) != alone


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    """torch's generator takes 32 bits of a seed, and numpy integers are valid seeds."""
    seen = set()
    for seed in (0, 1, 256, 65536, 2**32, 2**40, -1, np.int64(7)):
        for epoch in range(20):
            order = OrderOfSeed(LengthGroupedSampler(1, lengths=[1]), SimpleNamespace(seed=0, data_seed=seed))
            order.set_epoch(epoch)
            seen.add(order.seed_of_epoch())
            assert list(order) == [0]
    assert len(seen) == 8 * 20


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
            torch.randn(7)  # another random state, as after loading a model differently
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
