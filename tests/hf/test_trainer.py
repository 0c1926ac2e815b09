"""The Trainer mixin's loss and updates, compared with the stock Trainer and its mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, Seq2SeqTrainer, TrainerCallback

from offloadkit.errors import DataError, NonFiniteGradientError, OutOfVramError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.hf.trainer import OffloadSeq2SeqTrainer, OffloadTrainer
from tests.hf.training import (
    Row,
    arguments,
    assert_close,
    bert,
    causal_rows,
    class_rows,
    gpt2,
    llama,
    logged,
    seq2seq_rows,
    t5,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class MeanLoss(OffloadTrainer):
    """A user's compute_loss that ignores `num_items_in_batch`."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs, decoder_input_ids=labels.clamp(min=0)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return (loss, logits) if return_outputs else loss


class SumOverAll(OffloadTrainer):
    """A user's compute_loss that divides by the targets of the whole accumulated batch, and declares it."""

    loss_is_scaled_for_ga = True

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs, decoder_input_ids=labels.clamp(min=0)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss / num_items_in_batch


def divided_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    loss = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / num_items_in_batch


def mean_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def with_decoder_inputs(rows: list[Row]) -> list[Row]:
    return [{**row, "decoder_input_ids": row["labels"].clamp(min=0)} for row in rows]


CASES: dict[str, tuple[Callable[[], PreTrainedModel], list[Row], type[Any], dict[str, Any], dict[str, Any]]] = {
    "t5": (t5, seq2seq_rows(), OffloadSeq2SeqTrainer, {}, {}),
    "llama": (llama, causal_rows(), OffloadTrainer, {}, {}),
    "gpt2": (gpt2, causal_rows(), OffloadTrainer, {}, {}),
    "bert": (bert, class_rows(), OffloadTrainer, {}, {}),
    "smoothing": (t5, with_decoder_inputs(seq2seq_rows()), OffloadSeq2SeqTrainer, {}, {"label_smoothing_factor": 0.1}),
    "compute_loss": (t5, seq2seq_rows(), MeanLoss, {}, {}),
    "scaled compute_loss": (t5, seq2seq_rows(), SumOverAll, {}, {}),
    "loss_func": (t5, with_decoder_inputs(seq2seq_rows()), OffloadTrainer, {"compute_loss_func": divided_loss}, {}),
    "mean loss_func": (t5, with_decoder_inputs(seq2seq_rows()), OffloadTrainer, {"compute_loss_func": mean_loss}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_same_samples_give_the_same_norm_and_weights_however_they_are_accumulated(
    tmp_path: Path, case: str
) -> None:
    make, rows, trainer_class, more, options = CASES[case]
    runs = []
    for batch_size in (8, 2, 1):
        split = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": 8 // batch_size}
        trainer = train(tmp_path, make(), rows, trainer_class, more, **split, **options)
        runs.append((logged(trainer, "grad_norm"), logged(trainer, "loss"), trainer.engine.master_weights()))
    whole, *splits = runs
    assert len(whole[0]) == 3
    assert whole[0][0] > 0.1
    for norms, losses, weights in splits:
        assert norms == pytest.approx(whole[0], rel=1e-5)
        assert losses == pytest.approx(whole[1], rel=1e-5)
        assert_close(weights, whole[2])


@pytest.mark.parametrize(("make", "rows"), [(t5, seq2seq_rows()), (llama, causal_rows()), (bert, class_rows())])
def test_training_equals_the_stock_trainer(tmp_path: Path, make: Callable[[], PreTrainedModel], rows: Any) -> None:
    options = {"max_steps": 8, "weight_decay": 0.1, "warmup_steps": 3, "max_grad_norm": 0.5, "adam_beta2": 0.95}
    ours = train(tmp_path, make(), rows, **options)
    stock = train(tmp_path, make(), rows, Seq2SeqTrainer, **options)
    assert_close(ours.engine.master_weights(), dict(stock.model.named_parameters()))
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged(ours, key) == pytest.approx(logged(stock, key), rel=1e-4)


def test_the_last_window_of_an_epoch_may_be_short(tmp_path: Path) -> None:
    """10 rows in batches of 2 with accumulation 4: updates from 8 and 2 rows, each equal to one batch."""
    rows = seq2seq_rows(10)
    options = {"max_steps": -1, "num_train_epochs": 2, "train_sampling_strategy": "sequential"}
    split = train(tmp_path, t5(), rows, gradient_accumulation_steps=4, **options)
    whole = train(tmp_path, t5(), rows, per_device_train_batch_size=8, **options)
    assert split.state.global_step == 4
    assert logged(split, "grad_norm") == pytest.approx(logged(whole, "grad_norm"), rel=1e-5)
    assert_close(split.engine.master_weights(), whole.engine.master_weights())


def test_gradients_of_a_window_that_the_data_ended_are_not_mixed_into_the_next(tmp_path: Path) -> None:
    class Rows(IterableDataset[Row]):
        def __iter__(self) -> Iterator[Row]:
            return iter(seq2seq_rows(10))

    endless = train(tmp_path, t5(), Rows(), gradient_accumulation_steps=4, lr_scheduler_type="constant")
    fitting = train(tmp_path, t5(), seq2seq_rows(8), per_device_train_batch_size=8, lr_scheduler_type="constant")
    assert logged(endless, "grad_norm") == pytest.approx(logged(fitting, "grad_norm"), rel=1e-5)


def test_a_micro_batch_without_targets_counts_for_nothing(tmp_path: Path) -> None:
    rows = seq2seq_rows(2)
    rows[1]["labels"][:] = -100
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 1}
    with_empty = train(tmp_path, t5(), rows, **split)
    alone = train(tmp_path, t5(), rows[:1], per_device_train_batch_size=1, max_steps=1)
    assert logged(with_empty, "grad_norm") == pytest.approx(logged(alone, "grad_norm"), rel=1e-6)
    assert logged(with_empty, "loss") == pytest.approx(logged(alone, "loss"), rel=1e-6)


def test_a_batch_without_any_target_is_an_error_that_says_so(tmp_path: Path) -> None:
    rows = seq2seq_rows(2)
    for row in rows:
        row["labels"][:] = -100
    with pytest.raises(DataError, match="no target"):
        train(tmp_path, t5(), rows)


class StopAfterOne(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True


class NanAtStepTwo(OffloadTrainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss * float("nan") if self.state.global_step == 1 else loss


def test_nan_gradients_stop_training_and_are_not_applied(tmp_path: Path) -> None:
    model = t5()
    with pytest.raises(NonFiniteGradientError, match="step 2"):
        train(tmp_path, model, seq2seq_rows(), NanAtStepTwo)
    after_one_step = train(tmp_path, t5(), seq2seq_rows(), OffloadTrainer, {"callbacks": [StopAfterOne()]}).model
    for ours, theirs in zip(model.parameters(), after_one_step.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_error_of_nan_names_the_newest_checkpoint(tmp_path: Path) -> None:
    steps = {"save_strategy": "steps", "save_steps": 1}
    with pytest.raises(NonFiniteGradientError, match=r"step 2 .*The last checkpoint is .*checkpoint-1'"):
        train(tmp_path, t5(), seq2seq_rows(), NanAtStepTwo, **steps)
    resumed = OffloadTrainer(t5(), arguments(tmp_path, max_steps=1, **steps), train_dataset=seq2seq_rows())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.engine is not None
    assert resumed.engine.last_checkpoint == tmp_path / "checkpoint-1"
    resumed.close()


def test_nan_gradients_in_the_last_step_are_raised_too(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteGradientError, match="step 2"):
        train(tmp_path, t5(), seq2seq_rows(), NanAtStepTwo, max_steps=2)


def test_skipped_steps_leave_a_nan_in_the_log(tmp_path: Path) -> None:
    offload = OffloadConfig(on_nonfinite="skip")
    with pytest.warns(RuntimeWarning, match="not applied"):
        trainer = train(tmp_path, t5(), seq2seq_rows(), NanAtStepTwo, {"offload": offload})
    losses = logged(trainer, "loss")
    assert [loss == loss for loss in losses] == [True, False, True]


def test_a_step_that_fp16_overflowed_in_is_no_fault_of_the_labels(tmp_path: Path) -> None:
    trainer = train(tmp_path, t5(), seq2seq_rows(), NanAtStepTwo, fp16=True)
    assert [loss == loss for loss in logged(trainer, "loss")] == [True, False, True]
    assert [record.skipped for record in trainer.telemetry.records] == [False, True, False]


def test_a_batch_without_any_target_is_an_error_in_fp16_too(tmp_path: Path) -> None:
    rows = seq2seq_rows(2)
    for row in rows:
        row["labels"][:] = -100
    with pytest.raises(DataError, match="no target"):
        train(tmp_path, t5(), rows, fp16=True)


class OutOfMemoryInTheLoss(OffloadTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        super().compute_loss(*args, **kwargs)
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_full_gpu_is_explained_where_the_users_loss_finds_it_too(tmp_path: Path) -> None:
    with pytest.raises(OutOfVramError, match="Planned were"):
        train(tmp_path, t5(), seq2seq_rows(), OutOfMemoryInTheLoss, {"offload": OffloadConfig(placement=Placement())})


def test_lion_32bit_trains_with_lion_as_the_config_does(tmp_path: Path) -> None:
    config = {"offload": OffloadConfig(optimizer="lion")}
    by_name = train(tmp_path, llama(), causal_rows(), OffloadTrainer, optim="lion_32bit", adam_beta2=0.95)
    by_config = train(tmp_path, llama(), causal_rows(), OffloadTrainer, config, adam_beta2=0.95)
    adamw = train(tmp_path, llama(), causal_rows(), OffloadTrainer, adam_beta2=0.95)
    weights, same, other = (trainer.model.state_dict() for trainer in (by_name, by_config, adamw))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert not torch.equal(weights["lm_head.weight"], other["lm_head.weight"])
