"""The Trainer mixin: what the stock Trainer does, and what it gets wrong, with the engine underneath."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from offloadkit.config import OffloadConfig
from offloadkit.errors import ConfigError, DataError, ModelError, NonFiniteGradientError
from offloadkit.hf.trainer import OffloadSeq2SeqTrainer, OffloadTrainer, OffloadTrainerMixin

VOCAB = 40
Row = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices are faster on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def t5(dropout: float = 0.0) -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=dropout,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=32, **shape))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **shape))


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(vocab_size=VOCAB, hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=3, **shape)
    )


def seq2seq_rows(num_rows: int = 8, seed: int = 1) -> list[Row]:
    """Inputs of 6 ids and 2 to 8 targets, padded to 10 with -100."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(num_rows):
        labels = torch.randint(3, VOCAB, (10,), generator=generator)
        labels[2 + index * 5 % 7 :] = -100
        inputs = torch.randint(3, VOCAB, (6,), generator=generator)
        rows.append({"input_ids": inputs, "attention_mask": torch.ones_like(inputs), "labels": labels})
    return rows


def causal_rows(num_rows: int = 8) -> list[Row]:
    rows = seq2seq_rows(num_rows)
    for row in rows:
        row["input_ids"] = row["labels"].clamp(min=0)
        row["attention_mask"] = torch.ones_like(row["input_ids"])
    return rows


def class_rows(num_rows: int = 8) -> list[Row]:
    return [{**row, "labels": torch.tensor(index % 3)} for index, row in enumerate(seq2seq_rows(num_rows))]


def arguments(folder: Path, **options: Any) -> Seq2SeqTrainingArguments:
    defaults = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    # With AdamW's usual eps a weight whose gradient is nearly 0 moves by its rounding error's sign.
    defaults |= {"max_steps": 3, "learning_rate": 1e-3, "per_device_train_batch_size": 2, "adam_epsilon": 1e-4}
    return Seq2SeqTrainingArguments(str(folder), **(defaults | options))


def logged(trainer: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def train(
    folder: Path,
    model: PreTrainedModel,
    rows: Any,
    trainer_class: type[Any] = OffloadSeq2SeqTrainer,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A trainer that has trained."""
    trainer = trainer_class(model=model, args=arguments(folder, **options), train_dataset=rows, **(more or {}))
    trainer.train()
    return trainer


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 2e-5) -> None:
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name].float(), rtol=tolerance, atol=tolerance * 0.1, msg=name)


class MeanLoss(OffloadTrainer):
    """A user's compute_loss that knows nothing of `num_items_in_batch`."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs, decoder_input_ids=labels.clamp(min=0)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return (loss, logits) if return_outputs else loss


class SumOverAll(OffloadTrainer):
    """A user's compute_loss that divides by the whole accumulated batch, and says so."""

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
    """10 rows in batches of 2 with accumulation 4: updates from 8 rows and from 2, as from one batch each."""
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


def test_nan_gradients_in_the_last_step_are_raised_too(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteGradientError, match="step 2"):
        train(tmp_path, t5(), seq2seq_rows(), NanAtStepTwo, max_steps=2)


def test_skipped_steps_leave_a_nan_in_the_log(tmp_path: Path) -> None:
    offload = OffloadConfig(on_nonfinite="skip")
    with pytest.warns(RuntimeWarning, match="not applied"):
        trainer = train(tmp_path, t5(), seq2seq_rows(), NanAtStepTwo, {"offload": offload})
    losses = logged(trainer, "loss")
    assert [loss == loss for loss in losses] == [True, False, True]


# -- saving and continuing


def run_state(trainer: Any) -> dict[str, torch.Tensor]:
    """Every number of a run, by name."""
    state = trainer.engine.state_dict()
    numbers = {f"weight {name}": tensor.clone() for name, tensor in state["module"].items()}
    for parameter, states in state["optimizer"].items():
        numbers |= {f"{name} {parameter}": torch.as_tensor(tensor).clone() for name, tensor in states.items()}
    return numbers


@pytest.mark.parametrize("saved_at", [2, 3], ids=["inside an epoch", "at an epoch's end"])
def test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit(tmp_path: Path, saved_at: int) -> None:
    """bf16 weights with fp32 remainders, dropout, accumulation, warm-up: 3 updates an epoch, 6 in all."""
    options = {"gradient_accumulation_steps": 2, "max_steps": 6, "bf16": True, "warmup_steps": 2, "weight_decay": 0.1}
    options |= {"save_strategy": "steps", "save_steps": saved_at}
    rows = seq2seq_rows(12)
    whole = train(tmp_path / "whole", t5(dropout=0.1), rows, **options)
    resumed = OffloadSeq2SeqTrainer(
        model=t5(dropout=0.1), args=arguments(tmp_path / "resumed", **options), train_dataset=rows
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{saved_at}"))
    assert resumed.state.global_step == 6
    expected, numbers = run_state(whole), run_state(resumed)
    assert any(name.startswith("remainder") and tensor.any() for name, tensor in expected.items())
    assert [name for name in expected if not torch.equal(expected[name], numbers[name])] == []
    assert logged(resumed, "grad_norm")[-2:] == logged(whole, "grad_norm")[-2:]


def test_the_saved_model_is_loaded_by_from_pretrained(tmp_path: Path) -> None:
    trainer = train(tmp_path, t5(), seq2seq_rows(), bf16=True)
    trainer.save_model()
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    expected = trainer.model.state_dict()
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, expected[name]), name


def test_the_best_model_is_loaded_at_the_end_and_trains_on(tmp_path: Path) -> None:
    """The second evaluation is made the best one; its checkpoint's weights become the master weights too."""
    scores = iter([3.0, 1.0, 2.0])
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "bf16": True}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": False}
    more = {"eval_dataset": seq2seq_rows(2), "compute_metrics": lambda _: {"score": next(scores)}}
    trainer = train(tmp_path, t5(), seq2seq_rows(), OffloadTrainer, more, **options)
    assert trainer.state.best_global_step == 2
    best = T5ForConditionalGeneration.from_pretrained(tmp_path / "checkpoint-2").state_dict()
    last = T5ForConditionalGeneration.from_pretrained(tmp_path / "checkpoint-3").state_dict()
    masters = trainer.engine.master_weights()
    assert all(torch.equal(masters[name], best[name].float()) for name in masters)
    assert any(not torch.equal(masters[name], last[name].float()) for name in masters)


# -- evaluation


def test_evaluation_and_generation_see_the_newest_weights(tmp_path: Path) -> None:
    evaluated = seq2seq_rows(4, seed=2)
    options = {"predict_with_generate": True, "generation_max_length": 6, "eval_strategy": "steps", "eval_steps": 1}
    trainer = train(tmp_path, t5(), seq2seq_rows(), more={"eval_dataset": evaluated}, **options)
    predicted = trainer.predict(evaluated)
    plain = t5()
    plain.load_state_dict(trainer.model.state_dict())
    stock = Seq2SeqTrainer(model=plain, args=arguments(tmp_path, **options), eval_dataset=evaluated)
    assert logged(trainer, "eval_loss")[-1] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-6)
    assert predicted.predictions.tolist() == stock.predict(evaluated).predictions.tolist()
    assert len(set(logged(trainer, "eval_loss"))) == 3


def test_evaluation_before_training_builds_no_engine(tmp_path: Path) -> None:
    rows = seq2seq_rows()
    ours = OffloadTrainer(model=t5(), args=arguments(tmp_path), eval_dataset=rows)
    stock = Trainer(model=t5(), args=arguments(tmp_path), eval_dataset=rows)
    assert ours.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-6)
    assert ours.engine is None


# -- what goes through the engine


def test_accelerate_neither_wraps_the_model_nor_copies_the_states(tmp_path: Path) -> None:
    model = t5()
    trainer = train(tmp_path, model, seq2seq_rows(), bf16=True)
    assert trainer.accelerator._models == []
    assert trainer.optimizer is trainer.engine.optimizer
    assert trainer.model is trainer.engine.module is model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_weights_without_decay_are_those_of_the_trainer(tmp_path: Path) -> None:
    trainer = train(tmp_path, bert(), class_rows(), OffloadTrainer, weight_decay=0.25)
    decayed, free = trainer.engine.optimizer.param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.25, 0.0)
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    assert all("bias" in names[p] or "LayerNorm" in names[p] for p in free["params"])
    assert not any("bias" in names[p] or "LayerNorm" in names[p] for p in decayed["params"])


def test_training_arguments_become_the_config_of_the_engine(tmp_path: Path) -> None:
    options = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-3, "max_grad_norm": 0.0, "bf16": True}
    trainer = train(tmp_path, t5(), seq2seq_rows(), gradient_accumulation_steps=2, **options)
    config = trainer.engine.config
    assert (config.betas, config.eps, config.max_grad_norm) == ((0.8, 0.9), 1e-3, None)
    assert (config.gradient_accumulation, config.working_dtype, config.learning_rate) == (2, "bf16", 1e-3)


def test_activation_checkpointing_changes_no_weight(tmp_path: Path) -> None:
    kept = train(tmp_path, t5(dropout=0.1), seq2seq_rows())
    by_arguments = train(tmp_path, t5(dropout=0.1), seq2seq_rows(), gradient_checkpointing=True)
    by_config = train(
        tmp_path, t5(dropout=0.1), seq2seq_rows(), more={"offload": OffloadConfig(activation_checkpointing=True)}
    )
    for other in (by_arguments, by_config):
        assert_close(other.engine.master_weights(), kept.engine.master_weights(), 1e-6)


class Grouped(Trainer):
    """A user's Trainer with groups and a training step of its own."""

    steps = 0

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        cls, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        head, rest = [], []
        for name, parameter in self.model.named_parameters():
            (head if name.startswith("shared") else rest).append(parameter)
        self.optimizer = cls([{"params": head, "lr": 0.0}, {"params": rest}], **options)
        return self.optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.steps += 1
        return super().training_step(*args, **kwargs)


def test_the_mixin_keeps_a_trainers_own_groups_and_step(tmp_path: Path) -> None:
    class OffloadGrouped(OffloadTrainerMixin, Grouped):
        pass

    trainer = train(tmp_path, t5(), seq2seq_rows(), OffloadGrouped, lr_scheduler_type="constant")
    before = t5().state_dict()
    assert trainer.steps == 3
    assert torch.equal(trainer.model.shared.weight, before["shared.weight"])
    assert not torch.equal(trainer.model.lm_head.weight, trainer.model.encoder.final_layer_norm.weight)
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    assert not torch.equal(trainer.model.state_dict()[name], before[name])


def test_a_scheduler_of_the_users_sets_the_learning_rates(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=4e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trainer = train(tmp_path, t5(), seq2seq_rows(), more={"optimizers": (None, scheduler)})
    rates = [record.learning_rate for record in trainer.engine.telemetry.records]
    assert rates == pytest.approx([4e-3, 2e-3, 1e-3][: len(rates)])
    assert len(rates) >= 2


def test_the_scheduler_of_the_arguments_sets_the_learning_rates(tmp_path: Path) -> None:
    trainer = train(tmp_path, t5(), seq2seq_rows(), lr_scheduler_type="linear", warmup_steps=1, max_steps=4)
    trainer.engine.synchronize()
    assert logged(trainer, "learning_rate") == pytest.approx([0.0, 1e-3, 2e-3 / 3, 1e-3 / 3])


def test_logs_and_state_hold_plain_numbers(tmp_path: Path) -> None:
    trainer = train(tmp_path, t5(), seq2seq_rows())
    assert json.loads(json.dumps(trainer.state.log_history)) == trainer.state.log_history
    assert all(isinstance(norm, float) for norm in logged(trainer, "grad_norm"))


def test_callbacks_stop_training(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 5}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}
    more = {
        "eval_dataset": seq2seq_rows(2),
        "compute_metrics": lambda _: {"score": 0.0},
        "callbacks": [EarlyStoppingCallback(early_stopping_patience=1)],
    }
    assert train(tmp_path, t5(), seq2seq_rows(), OffloadTrainer, more, **options).state.global_step == 2


def test_training_goes_on_with_the_same_engine_and_after_close_with_a_new_one(tmp_path: Path) -> None:
    trainer = train(tmp_path, t5(), seq2seq_rows())
    engine = trainer.engine
    trainer.train()
    assert trainer.engine is engine
    trainer.close()
    weights = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    assert trainer.evaluate(seq2seq_rows())["eval_loss"] > 0
    trainer.train()
    assert trainer.engine is not engine
    assert any(not torch.equal(weights[name], weight) for name, weight in trainer.model.state_dict().items())


def test_model_init_starts_from_a_new_model_each_time(tmp_path: Path) -> None:
    more = {"model_init": lambda: t5(), "args": arguments(tmp_path), "train_dataset": seq2seq_rows()}
    trainer = OffloadTrainer(**more)
    trainer.train()
    first = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.train()
    assert all(torch.equal(first[name], weight) for name, weight in trainer.model.state_dict().items())


def test_the_engine_is_told_of_loader_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr("offloadkit.engine.OffloadEngine.set_loader_workers", lambda _, number: told.append(number))
    train(tmp_path, t5(), seq2seq_rows(), dataloader_num_workers=2)
    assert told == [2]


# -- what cannot be done says so


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"optim": "adafactor"}, "adamw_torch"),
        ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
        ({"torch_compile": True}, "leave it out"),
        ({"fp16_full_eval": True}, "fp16_full_eval"),
        ({"bf16_full_eval": True}, "bf16=True"),
    ],
)
def test_arguments_that_the_engine_cannot_follow_are_refused(
    tmp_path: Path, options: dict[str, Any], advice: str
) -> None:
    with pytest.raises(ConfigError, match=advice):
        OffloadTrainer(model=t5(), args=arguments(tmp_path, **options))


@pytest.mark.parametrize(("name", "value"), [("fp16", True), ("deepspeed", {"zero": 2}), ("fsdp", ["full_shard"])])
def test_other_engines_and_fp16_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    args = arguments(tmp_path)
    setattr(args, name, value)
    with pytest.raises(ConfigError, match=name):
        OffloadTrainer(model=t5(), args=args)


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(ConfigError, match="2 processes"):
        OffloadTrainer(model=t5(), args=arguments(tmp_path))


def test_an_optimizer_of_the_users_is_refused(tmp_path: Path) -> None:
    model = t5()
    with pytest.raises(ConfigError, match="takes no optimizer"):
        OffloadTrainer(model=model, args=arguments(tmp_path), optimizers=(torch.optim.AdamW(model.parameters()), None))


def test_a_trainer_that_makes_another_optimizer_is_refused(tmp_path: Path) -> None:
    class WithSgd(Trainer):
        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.model.parameters())

    class OffloadWithSgd(OffloadTrainerMixin, WithSgd):
        pass

    with pytest.raises(ConfigError, match="SGD"):
        train(tmp_path, t5(), seq2seq_rows(), OffloadWithSgd)


def test_a_config_that_contradicts_the_arguments_names_every_clash(tmp_path: Path) -> None:
    offload = OffloadConfig(learning_rate=5e-4, max_grad_norm=2.0, working_dtype="fp32")
    with pytest.raises(ConfigError) as raised:
        OffloadTrainer(model=t5(), args=arguments(tmp_path, bf16=True), offload=offload)
    assert all(name in str(raised.value) for name in ("learning_rate", "max_grad_norm", "working_dtype"))
    assert "eps" not in str(raised.value)


def test_a_model_without_trainable_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no trainable parameters"):
        train(tmp_path, t5().requires_grad_(False), seq2seq_rows())
