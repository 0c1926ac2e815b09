"""A full GPU under a Trainer: the window is repeated with a leaner plan, and the numbers do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.hf.trainer import OffloadTrainer
from offloadkit.offload.update import StepThread
from tests.hf.training import logged, train
from tests.models import assert_equal, numbers
from tests.offload.test_making_room import Hungry, fail, rows, seeded
from tests.offload.test_move import IN_VRAM, planned

pytestmark = pytest.mark.usefixtures("one_thread")


LEAN = Placement("ram", activations="offload")


def trained(folder: Path, model: Hungry, placement: Placement | None = None) -> Any:
    """Three windows of two micro-batches; the last window of an epoch has one."""
    given = [{"x": x, "labels": torch.zeros(1)} for batch in rows(3) for x in batch][:10]
    config = OffloadConfig(gradient_accumulation=2)
    more = {} if placement is None else {"plan": planned(model, config, placement)}
    seeded()
    return train(folder, model, given, OffloadTrainer, more, gradient_accumulation_steps=2, learning_rate=1e-2)


@pytest.fixture(scope="module")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(tmp_path_factory.mktemp("lean"), Hungry(), LEAN)


@pytest.mark.parametrize(("full_at", "in_backward"), [((1,), False), ((4, 6), True)])
def test_a_window_is_repeated_as_often_as_it_must(
    full_at: tuple[int, ...], in_backward: bool, lean: Any, tmp_path: Path
) -> None:
    """Dropout, BatchNorm, accumulation, and random numbers drawn by Python and numpy."""
    with pytest.warns(RuntimeWarning, match="the GPU's memory was full after step"):
        found = trained(tmp_path, model := Hungry(*full_at, in_backward=in_backward))
    assert len(found.telemetry.moves) == len(full_at)
    assert model.num_calls > lean.model.num_calls
    assert_equal(numbers(lean.engine), numbers(found.engine), full_at)
    for key in ("loss", "grad_norm"):
        assert logged(found, key) == logged(lean, key)


def test_a_window_is_repeated_where_its_step_finds_the_gpu_full(
    lean: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice in the second window: the step after the repetition fails too."""
    start, calls = StepThread.start, []

    def fails(self: StepThread, update: Any) -> None:
        calls.append(update.number)
        if len(calls) in (2, 3):
            raise torch.OutOfMemoryError("CUDA out of memory")
        start(self, update)

    monkeypatch.setattr(StepThread, "start", fails)
    with pytest.warns(RuntimeWarning, match="the GPU's memory was full after step 1"):
        found = trained(tmp_path, Hungry())
    assert calls == [1, 2, 2, 2, 3]
    assert len(found.telemetry.moves) == 2
    assert_equal(numbers(lean.engine), numbers(found.engine), "step")
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged(found, key) == logged(lean, key)


def test_an_evaluation_that_finds_the_gpu_full_is_repeated_on_a_leaner_plan(lean: Any, tmp_path: Path) -> None:
    """The model's forward fails, or the Trainer's own work does."""
    found, failed = trained(tmp_path, Hungry(), IN_VRAM), list[int]()
    evaluated = [{"x": x, "labels": torch.zeros(1)} for x in rows(1)[0]]
    compute_loss = found.compute_loss

    def fails_once(*args: Any, **kwargs: Any) -> Any:
        result = compute_loss(*args, **kwargs)
        if not failed:
            failed.append(1)
            fail(result)
        return result

    found.compute_loss = fails_once
    seeded()
    with pytest.warns(RuntimeWarning, match="full in an evaluation after step 3"):
        loss = found.evaluate(evaluated)["eval_loss"]
    seeded()
    assert loss == lean.evaluate(evaluated)["eval_loss"]
    assert [move.why for move in found.telemetry.moves] == ["the GPU's memory was full in an evaluation"]
