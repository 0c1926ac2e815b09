"""Habits of transformers' Trainer that offloadkit keeps: evaluations with NaN, batches as lists, left-over rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from offloadkit import OffloadTrainer
from offloadkit.errors import DataError
from offloadkit.facts.telemetry import Telemetry
from tests.hf.training import arguments, causal_rows, llama


def run(cls: type[Trainer], folder: Path, rows: Any, *, collator: Any = None, **options: Any) -> Trainer:
    args = arguments(folder, **{"logging_steps": 1, "save_strategy": "no", "per_device_train_batch_size": 1} | options)
    trained = cls(model=llama(), args=args, train_dataset=rows, data_collator=collator)
    trained.train()
    return trained


@pytest.mark.parametrize("filters", [True, False])
def test_an_evaluation_row_without_a_target_counts_as_the_users_filter_says(tmp_path: Path, filters: bool) -> None:
    rows = causal_rows(4)
    rows[1] = {**rows[1], "labels": torch.full_like(rows[1]["labels"], -100)}
    logs = []
    for cls in (OffloadTrainer, Trainer):
        args = arguments(
            tmp_path / cls.__name__, max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="steps",
            save_steps=1, per_device_eval_batch_size=1, load_best_model_at_end=True, metric_for_best_model="loss",
            logging_nan_inf_filter=filters,
        )  # fmt: skip
        trained = cls(model=llama(), args=args, train_dataset=causal_rows(4), eval_dataset=rows)
        trained.train()
        assert args.logging_nan_inf_filter is filters
        found = torch.tensor([log["eval_loss"] for log in trained.state.log_history if "eval_loss" in log])
        logs.append((found, bool(trained.state.best_model_checkpoint)))
    torch.testing.assert_close(logs[0][0], logs[1][0], rtol=1e-3, atol=1e-3, equal_nan=True)
    assert logs[0][1] == logs[1][1]
    assert filters or not logs[0][0].isfinite().any()


class OfLists(OffloadTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        return sum(model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss for row in inputs) / len(
            inputs
        )


class OfListsByTheirs(Trainer):
    compute_loss = OfLists.compute_loss


@pytest.mark.parametrize(("kind", "accumulation"), [(list, 1), (tuple, 2)])
def test_batches_that_are_lists_or_tuples_train_as_transformers_does(
    tmp_path: Path, kind: Any, accumulation: int
) -> None:
    rows, weights = causal_rows(8), []
    for cls in (OfLists, OfListsByTheirs):
        trained = run(
            cls, tmp_path, rows, collator=kind, max_steps=2, remove_unused_columns=False,
            per_device_train_batch_size=2, gradient_accumulation_steps=accumulation,
        )  # fmt: skip
        weights.append([parameter.detach().clone() for parameter in trained.model.parameters()])
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)


class _Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(causal_rows(5))


def test_rows_that_are_left_over_at_a_streams_end_count_in_no_logged_loss(tmp_path: Path) -> None:
    trained = run(OffloadTrainer, tmp_path, _Stream(), max_steps=3, gradient_accumulation_steps=3, learning_rate=0.0)
    losses = [log["loss"] for log in trained.state.log_history if "loss" in log]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)


def test_a_stream_shorter_than_an_update_ends_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ends after 5 micro-batches, and an update needs 6"):
        run(OffloadTrainer, tmp_path, _Stream(), max_steps=2, gradient_accumulation_steps=6)


class _Once(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __init__(self, count: int) -> None:
        self.rows = iter(causal_rows(count))

    def __iter__(self) -> Any:
        return self.rows


@pytest.mark.parametrize("count", [0, 2])
def test_a_pass_over_a_stream_without_a_row_is_an_error(count: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gave no row: it is empty, or can be read only once\."):
        run(OffloadTrainer, tmp_path, _Once(count), max_steps=5, per_device_train_batch_size=1)


def test_a_stream_goes_on_from_a_checkpoint_whose_pass_has_rows_left_over(tmp_path: Path) -> None:
    losses = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        args = arguments(
            tmp_path, max_steps=4, gradient_accumulation_steps=2, save_strategy="steps", save_steps=1, logging_steps=1,
            per_device_train_batch_size=1,
        )  # fmt: skip
        trained = OffloadTrainer(model=llama(), args=args, train_dataset=_Stream())
        trained.train(resume_from_checkpoint=resume)
        losses.append([log["loss"] for log in trained.state.log_history if "loss" in log])
        trained.close()
    assert losses[1] == losses[0]


class _OwnLoader(OffloadTrainer):
    def get_train_dataloader(self) -> Any:
        return list(super().get_train_dataloader())


def test_a_loader_of_the_user_may_be_a_list(tmp_path: Path) -> None:
    assert run(_OwnLoader, tmp_path, causal_rows(4), max_steps=2).state.global_step == 2


def test_each_step_is_on_a_line_of_a_file_beside_the_run(tmp_path: Path) -> None:
    for more in (2, 4):
        args = arguments(tmp_path, max_steps=more, save_strategy="steps", save_steps=1)
        trained = OffloadTrainer(model=llama(), args=args, train_dataset=causal_rows(8))
        trained.train(resume_from_checkpoint=more > 2)
        trained.close()
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert Telemetry().records.maxlen == 1_000
