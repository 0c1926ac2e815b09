"""`finetune(packing=True)`: the losses of rows without packing, one order whatever the plan, resumed bit for bit;
streams, plans and refusals."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

import offloadkit
from offloadkit import OffloadConfig, OffloadTrainer
from offloadkit.doors.cli import app
from offloadkit.errors import ConfigError, DataError
from offloadkit.hf.packing import PackedRows, PackedStream, best_fit
from tests.hf.tiny import WORDS, llama_config, t5_config, word_tokenizer
from tests.hf.training import arguments
from tests.runs import losses

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
DRAWN = random.Random(0)
TEXTS = [{"text": " ".join(DRAWN.choices(WORDS, k=DRAWN.randint(2, 24)))} for _ in range(40)]
CHATS = [
    {"messages": [{"role": role, "content": each["text"][:20].rsplit(" ", 1)[0]} for role in ("user", "assistant") * 2]}
    for each in TEXTS
]


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(**changes))


def finetune(output: Path, data: Any = TEXTS, **more: Any) -> offloadkit.FinetuneResult:
    options: dict[str, Any] = {"model": llama(), "tokenizer": word_tokenizer(), "batch_size": 2, "packing": True}
    options |= {"monitor": False, "use_cpu": True, "logging_steps": 1, "learning_rate": 1e-2}
    return offloadkit.finetune(train_dataset=data, output_dir=output, **options | more)


def weights(result: offloadkit.FinetuneResult) -> list[torch.Tensor]:
    return [each.detach().clone() for each in result.model.parameters()]


# -- packs


def test_packs_hold_each_row_once_and_are_full() -> None:
    lengths = [random.Random(1).randint(1, 60) for _ in range(500)]
    order = random.Random(2).sample(range(500), 500)
    packs = best_fit(lengths, 64, order)
    assert sorted(row for pack in packs for row in pack) == list(range(500))
    assert max(sum(lengths[row] for row in pack) for pack in packs) <= 64
    assert len(packs) <= 1.02 * sum(lengths) / 64 + 1
    assert packs == best_fit(lengths, 64, order)
    assert packs != best_fit(lengths, 64, order[::-1])


def test_a_pack_is_its_rows_with_positions_and_labels_of_their_own() -> None:
    rows = Dataset.from_list(
        [{"input_ids": [3, 4, 5], "labels": [3, -100, 5]}, {"input_ids": [6, 7], "labels": [6, 7]}]
    )
    packs = PackedRows(rows, 6, seed=0)
    assert packs[0] == {
        "input_ids": [3, 4, 5, 6, 7],
        "labels": [-100, -100, 5, -100, 7],
        "position_ids": [0, 1, 2, 0, 1],
    }
    assert packs.share_padding == pytest.approx(1 / 6)
    assert packs.planned_length == 3  # (3^2 + 2^2 + 1^2) / 6


# -- training


@pytest.mark.parametrize("rows", [TEXTS, CHATS], ids=["texts", "chats"])
def test_the_update_of_a_pack_is_the_update_of_its_rows(rows: Any, tmp_path: Path, capsys: Any) -> None:
    """All rows in one update, as four packs and without packing."""
    tokenizer = word_tokenizer(chat_template=TEMPLATE)
    count = 8 if rows is TEXTS else 4
    own = finetune(tmp_path / "own", rows[:count], tokenizer=tokenizer, batch_size=1, gradient_accumulation=8)
    assert "rows of 48 tokens" in capsys.readouterr().out
    assert f"{count} rows, packed into " in (own.model_dir / "README.md").read_text()
    theirs = finetune(tmp_path / "theirs", rows[:count], tokenizer=tokenizer, batch_size=count, packing=False)
    assert len(losses(own)) == len(losses(theirs)) == 1
    assert losses(own) == pytest.approx(losses(theirs), abs=1e-6)
    norms = [result.history[0]["grad_norm"] for result in (own, theirs)]
    assert norms[0] == pytest.approx(norms[1], abs=1e-5)
    assert own.steps[-1].num_tokens < theirs.steps[-1].num_tokens or rows is CHATS


def test_packing_follows_from_rows_and_seed_and_not_from_the_plan(tmp_path: Path) -> None:
    one = finetune(tmp_path / "one", eval_dataset=0.1)
    two = finetune(tmp_path / "two", eval_dataset=0.1, gradient_checkpointing=True)
    other = finetune(tmp_path / "other", eval_dataset=0.1, seed=1)
    assert all(map(torch.equal, weights(one), weights(two)))
    assert losses(one) == losses(two)
    assert losses(one) != losses(other)
    assert one.metrics["eval_loss"] == two.metrics["eval_loss"]
    records = [
        json.loads(next(each.output_dir.glob("*/run.json")).read_text())["packing"] for each in (one, two, other)
    ]
    assert records[0] == records[1] != records[2]
    assert records[0].keys() == {"length", "packs", "rows", "crc32"}


def stream() -> Iterator[dict[str, str]]:
    yield from TEXTS


@pytest.mark.slow
@pytest.mark.parametrize("data", [TEXTS, stream], ids=["rows", "stream"])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(data: Any, tmp_path: Path) -> None:
    options = {"max_steps": 6, "save_steps": 3, "save_total_limit": 3, "max_input_length": 48}
    whole = finetune(tmp_path / "whole", data, **options)
    part = finetune(tmp_path / "part", data, **options | {"max_steps": 6})
    for folder in (tmp_path / "part").glob("checkpoint-6"):
        shutil.rmtree(folder)
    resumed = finetune(tmp_path / "part", data, **options, resume=True)
    assert losses(resumed)[-3:] == losses(whole)[-3:]
    assert all(map(torch.equal, weights(resumed), weights(whole)))
    assert losses(part) == losses(whole)


@pytest.mark.slow
def test_other_packs_after_a_checkpoint_are_said(tmp_path: Path, capsys: Any) -> None:
    finetune(tmp_path, max_steps=2, save_steps=2)
    finetune(tmp_path, max_steps=3, save_steps=3, resume=True, seed=5)
    assert "rows are packed differently than before the checkpoint" in capsys.readouterr().out


def test_a_stream_is_packed_in_windows_and_gives_each_row_once() -> None:
    class Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[dict[str, list[int]]]:
            for number in range(1000):
                tokens = [number] * (1 + number * 7 % 40)
                yield {"input_ids": tokens, "labels": tokens}

    rows: Any = Endless()
    packs = list(PackedStream(rows, 48))
    seen = [token for pack in packs for token in pack["input_ids"]]
    assert sorted(seen) == sorted(number for number in range(1000) for _ in range(1 + number * 7 % 40))
    assert max(len(pack["input_ids"]) for pack in packs) <= 48
    assert len(packs) <= 1.05 * len(seen) / 48


def test_adapters_are_trained_on_packs(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    assert len(losses(finetune(tmp_path, lora=2, max_steps=2))) == 2


# -- plans


def test_a_plan_counts_attention_within_rows_and_no_mask() -> None:
    from offloadkit.doors.planning import PlanRequest, _outline, machine_with
    from offloadkit.hf.source import resolve

    config = OffloadConfig(working_dtype="bf16")
    found = {}
    for row in (None, 64, 1024):
        request = PlanRequest(2, 1024, None, None, packing=True, packed_row=row)
        outline = _outline(resolve("llama-3.2-1b", init="random"), config, machine_with("A100", config), request)
        work = outline.work(outline.rows())
        assert work is not None
        found[row] = sum(stage.forward.sdpa_flops for stage in work.stages)
        kept = sum(stage.kept_bytes for stage in work.stages)
    assert found[None] == found[1024] > 14 * found[64] > 0
    plain = _outline(
        resolve("llama-3.2-1b", init="random"), config, machine_with("A100", config), PlanRequest(2, 1024, None, None)
    )
    work = plain.work(plain.rows())
    assert work is not None
    assert kept == pytest.approx(sum(stage.kept_bytes for stage in work.stages), rel=0.01)


def test_plan_and_command_line_take_packing() -> None:
    assert offloadkit.plan("llama-3.2-1b", gpu="A100", packing=True, batch_size=2).fits
    result = CliRunner().invoke(app, ["plan", "llama-3.2-1b", "--gpu", "A100", "--packing", "--batch-size", "2"])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, ["plan", "t5-small", "--packing"])
    assert result.exit_code == 1
    assert "T5ForConditionalGeneration is an encoder-decoder" in " ".join(result.output.split())


# -- refusals


def test_what_cannot_be_packed_is_refused_before_training(tmp_path: Path) -> None:
    pairs = [{"input": "the cat", "target": "sat"}] * 4
    with pytest.raises(ConfigError, match=r"is an encoder-decoder: .* leave packing out"):
        finetune(tmp_path, pairs, model=T5ForConditionalGeneration(t5_config()))
    bert = BertConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(ConfigError, match="packing=True needs a decoder"):
        finetune(tmp_path, [{"text": "the", "label": "a"}] * 2, model=BertForSequenceClassification(bert))
    with pytest.raises(ConfigError, match="packing must be True or False, got 'yes'"):
        finetune(tmp_path, packing="yes")
    with pytest.raises(ConfigError, match="leave baseline or packing out"):
        finetune(tmp_path, baseline="measure")


def test_a_trainer_with_a_flattening_collator_trains_as_on_padded_rows(tmp_path: Path) -> None:
    drawn = random.Random(3)
    rows = [
        {"input_ids": ids, "labels": ids} for n in (9, 4, 12, 1, 7, 2) for ids in [drawn.choices(range(3, 60), k=n)]
    ]
    found = []
    for collate in (DataCollatorWithFlattening(), DataCollatorForSeq2Seq(word_tokenizer())):
        args = arguments(tmp_path, max_steps=2, per_device_train_batch_size=3, logging_steps=1, learning_rate=1e-3)
        model: Any = llama()
        trainer = OffloadTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), data_collator=collate)
        trainer.train()
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        found.append([value for entry in entries for value in (entry["loss"], entry["grad_norm"])])
        trainer.close()
    assert len(found[0]) == 4
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_a_collator_whose_rows_learn_each_others_first_token_is_refused(tmp_path: Path) -> None:
    def flat(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([[token for row in rows for token in row["input_ids"]]])
        places = torch.tensor([[place for row in rows for place in range(len(row["input_ids"]))]])
        return {"input_ids": ids, "labels": ids.clone(), "position_ids": places}

    rows = [{"input_ids": [3 + at, 4, 5]} for at in range(4)]
    args = arguments(tmp_path, max_steps=1)
    trainer = OffloadTrainer(model=llama(), args=args, train_dataset=Dataset.from_list(rows), data_collator=flat)
    with pytest.raises(DataError, match="the first token of a row has a label"):
        trainer.train()
