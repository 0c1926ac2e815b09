"""Rows without a length in `finetune`: the numbers of a list, resumed bit for bit, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, LlamaForCausalLM

import offloadkit
from offloadkit.errors import ConfigError, DataError
from offloadkit.hf import streams
from offloadkit.hf.streams import TokenizedStream
from tests.hf.tiny import llama_config
from tests.runs import losses

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = [{"input": f"say {number}", "target": "word " * (1 + number % 5)} for number in range(24)]


def rows() -> Iterator[dict[str, str]]:
    yield from ROWS


class Torch(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[dict[str, str]]:
        return rows()


class Indexed(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, str]:
        return ROWS[index]


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = llama_config()
    config.vocab_size = 384
    return LlamaForCausalLM(config)


def finetune(data: Any, output: Path, **more: Any) -> offloadkit.FinetuneResult:
    options: dict[str, Any] = {"model": model(), "tokenizer": "byte", "max_steps": 4, "batch_size": 4}
    options |= {"max_input_length": 64, "monitor": False, "use_cpu": True, "logging_steps": 1, "learning_rate": 1e-2}
    return offloadkit.finetune(train_dataset=data, output_dir=output, **options | more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [rows, Torch(), datasets.Dataset.from_list(ROWS).to_iterable_dataset(), Indexed()],
    ids=["function", "torch", "datasets", "indexed"],
)
def test_a_stream_trains_as_its_rows_in_a_list(data: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradient_accumulation": 2, "train_sampling_strategy": "sequential"}
    result = finetune(data, tmp_path / "stream", **options)
    listed = finetune(ROWS, tmp_path / "list", **options)
    assert len(losses(listed)) == 4
    assert losses(result) == pytest.approx(losses(listed), abs=1e-5)
    if not isinstance(data, Indexed):
        assert result.plan.rows is not None
        assert result.plan.rows.input_length == 64
        assert "a stream of rows" in (result.model_dir / "README.md").read_text()


@pytest.mark.slow
def test_a_resumed_stream_goes_on_bit_for_bit_past_its_end(tmp_path: Path) -> None:
    whole = finetune(rows, tmp_path / "whole", max_steps=9, lr_scheduler_type="constant")
    finetune(rows, tmp_path / "cut", max_steps=7, lr_scheduler_type="constant")
    resumed = finetune(rows, tmp_path / "cut", max_steps=9, lr_scheduler_type="constant", resume=True)
    assert losses(resumed)[-2:] == losses(whole)[-2:]
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_steps": None}, "max_steps"),
        ({"eval_dataset": 0.1}, "eval_dataset"),
        ({"baseline": "measure"}, "baseline"),
        ({"engine": "deepspeed"}, "engine"),
    ],
    ids=str,
)
def test_options_that_need_a_length_are_refused(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        finetune(rows, tmp_path, **options)


def test_a_generator_is_refused_for_its_function(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="function"):
        finetune(rows(), tmp_path)


def test_a_stream_to_evaluate_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="eval_dataset: a stream"):
        finetune(rows, tmp_path, eval_dataset=Torch())


def test_labels_must_be_known_before_the_stream_ends(tmp_path: Path) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    classifier = BertForSequenceClassification(BertConfig(vocab_size=384, **shape))

    def labelled() -> Iterator[dict[str, Any]]:
        yield from ({"text": "a text", "label": name} for name in ("good", "bad"))

    with pytest.raises(DataError, match="ClassLabel"):
        finetune(labelled, tmp_path, model=classifier)


@pytest.mark.parametrize(
    ("data", "named"), [(lambda: iter(()), "empty"), (lambda: 3, "yield"), (lambda: [3], "row 0 is an int")]
)
def test_what_yields_no_rows_is_refused(data: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=named):
        finetune(data, tmp_path)


def test_labels_of_a_class_label_feature_are_known(tmp_path: Path) -> None:
    names = datasets.ClassLabel(names=["bad", "good"])
    features = datasets.Features({"text": datasets.Value("string"), "label": names})
    listed = datasets.Dataset.from_list([{"text": "a text", "label": 1}] * 4, features=features)
    stream = tokenized(listed.to_iterable_dataset(), BertConfig(vocab_size=384))
    assert next(iter(stream))["labels"] == 1


def tokenized(data: Any, config: Any = None) -> TokenizedStream:
    from transformers import ByT5Tokenizer

    from offloadkit.hf.data import prepare_both

    lengths = {"max_input_length": 8, "max_target_length": None}
    prepared, _ = prepare_both(data, None, ByT5Tokenizer(), config or model().config, **lengths)
    assert isinstance(prepared.dataset, TokenizedStream)
    return prepared.dataset


def test_a_stream_that_cannot_be_read_again_says_so() -> None:
    once = iter([{"text": "abc"}] * 70)
    stream = iter(tokenized(lambda: once))
    assert [len(next(stream)["input_ids"]) for _ in range(6)] == [4] * 6
    with pytest.raises(DataError, match="again"):
        next(stream)


def test_a_stream_whose_rows_teach_nothing_any_more_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_MOST_SILENT", 100)

    def fading() -> Iterator[dict[str, str]]:
        yield from [{"text": "abc"}] * 70
        while True:
            yield {"text": ""}

    stream = iter(tokenized(fading))
    for _ in range(70):
        next(stream)
    with pytest.raises(DataError, match=r"the last 112 rows of the stream have nothing to learn, as far as row 191"):
        next(stream)


def test_a_tokenized_row_longer_than_planned_is_refused() -> None:
    stream = iter(tokenized(lambda: [{"input_ids": torch.arange(3, 9)}] * 64 + [{"input_ids": torch.arange(3, 12)}]))
    for _ in range(64):
        next(stream)
    with pytest.raises(DataError, match="max_input_length"):
        next(stream)
