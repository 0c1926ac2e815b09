"""Predictions for the rows that are shown after training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import T5ForConditionalGeneration

from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import OutOfVramError
from offloadkit.facts.config import OffloadConfig
from offloadkit.hf.data import load_dataset_like, prepare
from offloadkit.hf.evaluate import Sample, predict
from tests.distributed.doors import model_named, pairs

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Sample], list[int]]]:
    """Predictions for seven rows, three at a time, on a GPU that is full with more than a number of rows; and the
    numbers of rows that were tried."""
    generate = T5ForConditionalGeneration.generate

    def run(room: int, *, by_engine: bool = False) -> tuple[list[Sample], list[int]]:
        tried: list[int] = []

        def fails(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
            tried.append(len(input_ids))
            if len(input_ids) > room:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return generate(self, input_ids=input_ids, **options)

        monkeypatch.setattr(T5ForConditionalGeneration, "generate", fails)
        model, tokenizer = model_named("t5")
        rows = prepare(load_dataset_like(pairs(7)), tokenizer, model.config, max_input_length=32, max_target_length=8)
        if not by_engine:
            return predict(model, tokenizer, rows, num_rows=7, batch_size=3), tried
        with OffloadEngine(model, OffloadConfig(), device="cpu") as engine:
            samples = predict(model, tokenizer, rows, num_rows=7, batch_size=3, run_eval=engine.run_eval)
            assert not engine.telemetry.moves
        return samples, tried

    return run


def test_a_full_gpu_predicts_fewer_rows_at_a_time(predicted: Any) -> None:
    expected, tried = predicted(3)
    assert tried == [3, 3, 1]
    assert predicted(2) == (expected, [3, 1, 1, 1, 1, 1, 1, 1])
    with pytest.raises(torch.OutOfMemoryError):
        predicted(0)


def test_fewer_rows_are_tried_before_the_plan_moves(predicted: Any) -> None:
    assert predicted(2, by_engine=True) == (predicted(3)[0], [3, 1, 1, 1, 1, 1, 1, 1])
    with pytest.warns(RuntimeWarning, match="was full in an evaluation"), pytest.raises(OutOfVramError):
        predicted(0, by_engine=True)
