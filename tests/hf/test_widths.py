"""Padded widths of batches: few, chosen from the rows alone, with little padding, without effect on the loss."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import (
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Trainer,
)

from offloadkit.checkpoint.values import read_json
from offloadkit.errors import ConfigError
from offloadkit.hf.longest import longest_batch
from offloadkit.hf.trainer import OffloadTrainer
from offloadkit.hf.widths import Widths, choose_widths, pad_to_few_widths, row_lengths, with_shares
from offloadkit.offload.graphs import MOST_KINDS
from tests.hf import tiny
from tests.hf.training import arguments

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENIZER = ByT5Tokenizer()


def drawn(rows: int, *longest: int) -> np.ndarray:
    return np.stack([np.random.RandomState(0).randint(1, each + 1, rows) for each in longest], axis=1)


@pytest.mark.parametrize("order", ["random", "sequential", "group_by_length"])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("longest", [(500,), (500, 130), (5000, 4000)])
def test_a_few_widths_hold_every_batch(longest: tuple[int, ...], batch_size: int, order: str) -> None:
    lengths = drawn(400, *longest)
    found = choose_widths(lengths, batch_size, order, [1] * len(longest), [16] * len(longest))
    largest = lengths.max(axis=0)
    assert len(found.pairs) == MOST_KINDS
    assert found.pairs[-1] == tuple((largest + 15) // 16 * 16)
    assert all(width % 16 == 0 for pair in found.pairs for width in pair)
    for batch in lengths:
        pair = found.fit(batch)
        assert (np.array(pair) >= batch).all()
        assert pair in found.pairs
    assert 0 < found.share_added < (0.4 if len(longest) == 2 else 0.2)
    assert choose_widths(lengths, batch_size, order, [1] * len(longest), [16] * len(longest)) == found
    assert found.fit(largest + 100) == tuple(largest + 100)


def test_widths_have_nearly_the_least_padding() -> None:
    counts = {length: (13 - length) ** 2 for length in range(1, 13)}
    lengths = np.repeat(list(counts), list(counts.values()))[:, None]

    def padded(pairs: Any) -> int:
        return sum(number * Widths((1,), pairs).fit([length])[0] for length, number in counts.items())

    others = [tuple((width,) for width in (*some, 12)) for some in combinations(range(1, 12), MOST_KINDS - 1)]
    assert padded(choose_widths(lengths, 1, "random", [1], [1]).pairs) < 1.01 * min(map(padded, others))


def test_targets_as_long_as_their_inputs_have_widths_like_them() -> None:
    lengths = np.repeat(drawn(400, 500), 2, axis=1)
    found = choose_widths(lengths, 4, "group_by_length", (1, 1), (16, 16))
    assert all(inputs == targets for inputs, targets in found.pairs)


def test_data_of_few_shapes_keep_them() -> None:
    for longest, steps in (((8,), (1,)), ((4, 2), (1, 1)), ((128,), (16,))):
        assert choose_widths(drawn(99, *longest), 2, "random", steps, steps).pairs == ()


def test_batches_that_are_all_of_one_width_have_that_one() -> None:
    for columns in ((1,), (1, 1)):
        lengths = np.array([range(1, 17)] * len(columns)).T
        assert choose_widths(lengths, 16, "random", columns, columns).pairs == ((16,) * len(columns),)


def test_shares_of_padding_are_counted() -> None:
    lengths = np.array([[5, 2], [3, 4], [7, 1]])
    found = with_shares(Widths((8, 4)), lengths, 2, "sequential")
    assert found.share_added == pytest.approx((3 * (8 + 4)) / (2 * (5 + 4) + 7 + 1) - 1)
    assert found.share_padding == pytest.approx(1 - (15 + 7) / (3 * (8 + 4)))


def rows_of(number: int = 48, *, pairs: bool = True) -> list[dict[str, list[int]]]:
    draw = random.Random(0)

    def tokens(most: int) -> list[int]:
        return [draw.randint(3, 90) for _ in range(draw.randint(1, most))]

    inputs = [tokens(90) for _ in range(number)]
    return [{"input_ids": ids, "labels": tokens(30) if pairs else ids} for ids in inputs]


def t5() -> Any:
    torch.manual_seed(0)
    from transformers import T5ForConditionalGeneration

    return T5ForConditionalGeneration(tiny.t5_config(d_model=16, d_ff=16, num_layers=1, dropout_rate=0.0))


def llama() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(tiny.llama_config())


def trainer(folder: Path, rows: Any, kind: Any = OffloadTrainer, model: Any = None, **options: Any) -> Any:
    collator = options.pop("collator", None) or DataCollatorForSeq2Seq(TOKENIZER)
    args = arguments(folder, **{"max_steps": 4, "gradient_accumulation_steps": 1, **options})
    return kind(model=model or t5(), args=args, train_dataset=rows, eval_dataset=rows, data_collator=collator)


def shapes(loader: Any) -> set[tuple[int, ...]]:
    return {tuple(batch["input_ids"].shape[1:] + batch["labels"].shape[1:]) for batch in loader}


def test_a_trainers_batches_have_few_widths_that_are_planned_for(tmp_path: Path, capsys: Any) -> None:
    rows = rows_of()
    ours = trainer(tmp_path, datasets.Dataset.from_list(rows))
    chosen = shapes(ours.get_train_dataloader())
    assert capsys.readouterr().out.count("batches are padded to 8 widths (") == 1
    assert chosen == shapes(ours.get_eval_dataloader()) | chosen
    assert chosen <= {*ours.widths.chosen.pairs}
    assert ours.telemetry.padding_share == ours.widths.chosen.share_padding > 0
    call, *_ = longest_batch(ours)
    assert (call.kwargs["input_ids"].shape[1], call.kwargs["labels"].shape[1]) == ours.widths.chosen.pairs[-1]
    assert trainer(tmp_path, rows).widths.collator(ours) is not ours.data_collator
    assert isinstance(ours.data_collator, DataCollatorForSeq2Seq)


@pytest.mark.parametrize(
    "kind",
    [
        DataCollatorForSeq2Seq,
        DataCollatorForTokenClassification,
        partial(DataCollatorForLanguageModeling, mlm=False),
    ],
    ids=["seq2seq", "tokens", "language"],
)
def test_the_padding_of_known_collators_goes_on(kind: Any, tmp_path: Path) -> None:
    collator, rows = kind(TOKENIZER), rows_of(pairs=False)
    if isinstance(kind, partial):  # makes the labels itself
        rows = [{"input_ids": row["input_ids"]} for row in rows]
    ours = trainer(tmp_path, rows, model=llama(), collator=collator)
    some = rows[:3]
    plain, padded = collator([dict(row) for row in some]), ours.widths.collator(ours)([dict(row) for row in some])
    longest, width = plain["input_ids"].shape[1], padded["input_ids"].shape[1]
    assert (width,) == ours.widths.chosen.fit([longest])
    for name, value in {"input_ids": 0, "attention_mask": 0, "labels": -100}.items():
        assert torch.equal(padded[name][:, :longest], plain[name])
        assert (padded[name][:, longest:] == value).all()


class Own(DataCollatorForSeq2Seq):
    pass


def masked(rows: Any) -> Any:
    batch = DataCollatorForSeq2Seq(TOKENIZER)(rows)
    return batch | {"global_attention_mask": torch.ones_like(batch["input_ids"])}


def test_other_collators_keep_their_batches(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of()
    monkeypatch.setattr("offloadkit.facts.graphs.device_types", {"cpu"})
    for collator in (Own(TOKENIZER), masked):
        ours = trainer(tmp_path, rows, collator=collator)
        assert ours.widths.collator(ours) is collator
        assert f"batches keep the widths that {type(collator).__name__} pads to" in capsys.readouterr().out
    further = trainer(tmp_path, rows)
    collate = replace(further.widths.collator(further), collate=masked)
    assert collate(rows[:2])["input_ids"].shape == masked(rows[:2])["input_ids"].shape
    capsys.readouterr()
    same = trainer(tmp_path, rows, collator=DataCollatorForSeq2Seq(TOKENIZER, padding="max_length", max_length=99))
    compute_bound = trainer(tmp_path, rows, per_device_train_batch_size=10**9)
    for each in (same, compute_bound):
        assert each.widths.collator(each) is each.data_collator
    assert capsys.readouterr().out == ""


def test_a_bare_loop_has_the_widths_of_a_trainer(tmp_path: Path) -> None:
    rows, collator = rows_of(), DataCollatorForSeq2Seq(TOKENIZER)
    loader = DataLoader(rows, 2, collate_fn=pad_to_few_widths(collator, rows, t5(), 2, "sequential"))
    ours = trainer(tmp_path, rows, per_device_train_batch_size=2, train_sampling_strategy="sequential")
    ours.get_train_dataloader()
    assert shapes(loader) == {*ours.widths.chosen.pairs}
    assert pad_to_few_widths(collator, rows, t5(), 10**9) is collator  # bound by computing
    assert pad_to_few_widths(collator, rows[:2], t5(), 2) is collator  # few widths already


def test_a_bare_loop_cannot_pad_by_unknown_collators_or_unread_rows() -> None:
    with pytest.raises(ConfigError, match=r"unknown collator, Own: .* set pad_to_multiple_of"):
        pad_to_few_widths(Own(TOKENIZER), rows_of(), t5(), 2)
    with pytest.raises(ConfigError, match="the lengths of a generator"):
        pad_to_few_widths(DataCollatorForSeq2Seq(TOKENIZER), (row for row in rows_of()), t5(), 2)


class LossOfLastTokens(OffloadTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).logits[:, -1].sum()


def gpt2(pad_token_id: int | None) -> Any:
    """A classifier that reads the last place if `pad_token_id` is None."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(vocab_size=384, n_embd=16, n_layer=1, n_head=2, pad_token_id=pad_token_id)
    return GPT2ForSequenceClassification(config)


def test_rows_keep_their_length_where_padding_would_be_read(tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"], "labels": 0} for row in rows_of(pairs=False)]
    of_tokens = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows]
    texts = [{"input_ids": row["input_ids"]} for row in rows]
    language, of_rows = DataCollatorForLanguageModeling(TOKENIZER, mlm=False), DataCollatorWithPadding(TOKENIZER)
    left = DataCollatorForLanguageModeling(ByT5Tokenizer(padding_side="left"), mlm=False)

    def is_padded(data: Any, model: Any, collator: Any, kind: Any = OffloadTrainer, size: int = 1) -> bool:
        ours = trainer(tmp_path, data, kind, model, collator=collator, per_device_train_batch_size=size)
        loader = ours.get_train_dataloader()
        return any(batch["input_ids"].shape[1] > batch["attention_mask"].sum(1).max() for batch in loader)

    assert not is_padded(texts, llama(), left)
    assert not is_padded(of_tokens, llama(), of_rows)
    assert not is_padded(rows, gpt2(None), of_rows)
    assert is_padded(rows, gpt2(TOKENIZER.pad_token_id), of_rows)
    assert not is_padded(texts, llama(), language, LossOfLastTokens)
    assert is_padded(texts, llama(), language, LossOfLastTokens, size=2)


@pytest.mark.parametrize("make", [llama, t5])
def test_prompts_that_a_decoder_continues_are_not_padded_further(make: Any, tmp_path: Path) -> None:
    ours = trainer(tmp_path, rows_of(pairs=make is t5), model=make(), predict_with_generate=True)
    for loader in (ours.get_eval_dataloader(), ours.get_test_dataloader(ours.eval_dataset)):
        longest = {int(batch["attention_mask"].sum(1).max()) for batch in loader}
        assert (longest == {batch["input_ids"].shape[1] for batch in loader}) == (make is llama)


def test_lengths_are_read_without_code_of_the_user() -> None:
    rows = rows_of(9)
    expected = [[len(row["input_ids"]), len(row["labels"])] for row in rows]
    data = datasets.Dataset.from_list(rows)
    names = ("input_ids", "labels")
    for known in (rows, data, data.with_format("torch")):
        assert row_lengths(known, names).tolist() == expected
    assert row_lengths(data.select([5, 2]), names).tolist() == [expected[5], expected[2]]
    classes = data.remove_columns("labels").add_column("labels", [0] * 9)
    computed = data.with_transform(lambda row: row)
    for unknown in (None, [], [1], [{"input_ids": 1}], computed, classes, datasets.DatasetDict(one=data), iter(rows)):
        assert row_lengths(unknown, names) is None
    assert row_lengths(classes, names[:1]).tolist() == [[each[0]] for each in expected]


@pytest.mark.slow
def test_losses_are_those_of_transformers_and_other_rows_are_told_of(tmp_path: Path, capsys: Any) -> None:
    rows = rows_of()
    ours, theirs = (trainer(tmp_path / kind.__name__, rows, kind, save_strategy="steps", save_steps=2, seed=1)
                    for kind in (OffloadTrainer, Trainer))  # fmt: skip
    logs = []
    for each in (ours, theirs):
        each.train()
        logs.append([log["loss"] for log in each.state.log_history if "loss" in log])
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)
    checkpoint = tmp_path / "OffloadTrainer" / "checkpoint-2"
    assert read_json(checkpoint / "run.json")["widths"] == [list(pair) for pair in ours.widths.chosen.pairs]
    ours.close()
    said = "padded to other widths than before the checkpoint"
    for data in (rows, rows_of(60)):
        capsys.readouterr()
        again = trainer(tmp_path / "again", data, save_strategy="no", seed=1)
        again.train(resume_from_checkpoint=str(checkpoint))
        again.close()
        assert (said in capsys.readouterr().out) == (data is not rows)
