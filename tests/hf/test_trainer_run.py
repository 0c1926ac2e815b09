"""A whole run of the Trainer mixin: saving and resuming, evaluation, schedules, callbacks, reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    modeling_utils,
)
from transformers.integrations import integration_utils

from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.hf import saving
from offloadkit.hf.trainer import OffloadSeq2SeqTrainer, OffloadTrainer, OffloadTrainerMixin
from tests.hf.training import arguments, assert_close, bert, class_rows, logged, seq2seq_rows, t5, train

pytestmark = pytest.mark.usefixtures("one_thread")


# -- saving and resuming


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


def test_the_saved_model_is_loaded_by_from_pretrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer's own call writes it in pieces."""
    written: list[Path] = []
    write, theirs = saving.write_arrays, modeling_utils.safe_save_file
    monkeypatch.setattr(saving, "write_arrays", lambda *args: (written.append(args[0]), write(*args)))
    trainer = train(tmp_path, t5(), seq2seq_rows(), bf16=True)
    trainer.save_model()
    assert written == [tmp_path / "model.safetensors"]
    assert modeling_utils.safe_save_file is theirs
    loaded = T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    expected = trainer.model.state_dict()
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, expected[name]), name


def test_the_best_model_is_loaded_at_the_end_and_trains_on(tmp_path: Path) -> None:
    """The second evaluation is made the best; the weights of its checkpoint become the master weights too."""
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


def test_training_losses_of_bf16_weights_are_fp32(tmp_path: Path) -> None:
    trainer = train(tmp_path, t5(), seq2seq_rows(), bf16=True, max_steps=4)
    losses = torch.tensor([record.loss for record in trainer.telemetry.records])
    assert not torch.equal(losses, losses.bfloat16().float())
    trainer.close()
    assert not trainer.model.lm_head._forward_hooks


def test_evaluation_losses_of_bf16_weights_are_fp32(tmp_path: Path) -> None:
    """One batch with a loss near 4, where bf16 numbers are 0.03 apart."""
    evaluated = seq2seq_rows(8, seed=2)
    options = {"bf16": True, "per_device_eval_batch_size": 8, "eval_strategy": "steps", "eval_steps": 1}
    trainer = train(tmp_path, t5(), seq2seq_rows(), more={"eval_dataset": evaluated}, **options)
    batch = trainer.data_collator(evaluated)
    with torch.no_grad():
        logits = trainer.model.eval()(**batch).logits
    expected = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten()).item()
    assert logged(trainer, "eval_loss")[-1] == pytest.approx(expected, rel=1e-3)
    assert len(set(logged(trainer, "eval_loss"))) == 3
    trainer.close()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-3)


def test_evaluation_before_training_builds_no_engine(tmp_path: Path) -> None:
    rows = seq2seq_rows()
    ours = OffloadTrainer(model=t5(), args=arguments(tmp_path), eval_dataset=rows)
    stock = Trainer(model=t5(), args=arguments(tmp_path), eval_dataset=rows)
    assert ours.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-6)
    assert ours.engine is None


# -- routes through the engine


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


def test_the_engine_recomputes_in_every_run_not_the_trainer(tmp_path: Path) -> None:
    """Each block runs twice per micro-batch. If the Trainer recomputed too, it would run three times."""
    runs: list[int] = []
    model = t5()
    model.encoder.block[0].layer[0].register_forward_pre_hook(lambda *_: runs.append(1))
    more = {"offload": OffloadConfig(placement=Placement(activations="offload"))}
    trainer = train(tmp_path, model, seq2seq_rows(), more=more, gradient_checkpointing=True, save_strategy="epoch")
    assert trainer.engine.config.activation_checkpointing
    assert trainer.engine.plan.basis.config.activation_checkpointing
    assert len(runs) == 2 * trainer.state.global_step > 0
    trainer.train()
    assert len(runs) == 2 * 2 * trainer.state.global_step
    assert trainer.args.gradient_checkpointing
    args = [json.loads(path.read_text()) for path in tmp_path.rglob("training_args.json")]
    (saved,) = {found.get("activation_checkpointing", found.get("gradient_checkpointing")) for found in args}
    assert saved
    trainer.close()
    assert not trainer.model.is_gradient_checkpointing


class Grouped(Trainer):
    """A user's Trainer that defines parameter groups and a training step."""

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
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    assert not torch.equal(trainer.model.state_dict()[name], before[name])


def test_a_scheduler_of_the_users_sets_the_learning_rates(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=4e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trainer = train(tmp_path, t5(), seq2seq_rows(), more={"optimizers": (None, scheduler)})
    rates = [record.learning_rate for record in trainer.engine.telemetry.records]
    assert rates == pytest.approx([4e-3, 2e-3, 1e-3][: len(rates)])
    assert len(rates) >= 2


def test_a_scheduler_of_the_users_goes_on_where_a_resumed_run_was(tmp_path: Path) -> None:
    def scheduled() -> dict[str, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=4e-3)
        return {"optimizers": (None, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))}

    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = train(tmp_path / "whole", t5(), seq2seq_rows(), more=scheduled(), **options)
    resumed = OffloadSeq2SeqTrainer(
        model=t5(), args=arguments(tmp_path / "resumed", **options), train_dataset=seq2seq_rows(), **scheduled()
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for trainer, num in ((whole, 4), (resumed, 2)):
        trainer.engine.synchronize()
        rates = [record.learning_rate for record in trainer.engine.telemetry.records]
        assert rates == pytest.approx([4e-3, 2e-3, 1e-3, 5e-4][-num:])


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


def test_another_trainer_takes_the_model_over_and_trains_on_from_its_weights(tmp_path: Path) -> None:
    options: dict[str, Any] = {"lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 1}
    whole = train(tmp_path / "whole", t5(), seq2seq_rows(), max_steps=2, **options)
    first = train(tmp_path / "cut", t5(), seq2seq_rows(), max_steps=1, **options)
    args = arguments(tmp_path / "cut", max_steps=2, **options)
    second = OffloadTrainer(first.model, args, train_dataset=seq2seq_rows())
    with pytest.warns(RuntimeWarning, match="another Trainer's engine on this model is closed"):
        second.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-1"))
    assert first.engine is None
    trained = second.model.state_dict()
    assert all(torch.equal(weight, trained[name]) for name, weight in whole.model.state_dict().items())


def test_a_wrapper_around_a_model_that_is_trained_takes_it_over_too(tmp_path: Path) -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **batch: torch.Tensor) -> Any:
            return self.model(**batch)

    first = train(tmp_path, t5(), seq2seq_rows(), more={"offload": OffloadConfig(placement=Placement(weights="ram"))})
    args = arguments(tmp_path, max_steps=1, remove_unused_columns=False)
    second: Any = OffloadTrainer(Wrapper(first.model), args, train_dataset=seq2seq_rows())
    with pytest.warns(RuntimeWarning, match="another Trainer's engine on this model is closed"):
        second.train()
    assert first.engine is None


def test_the_arguments_are_left_as_they_were(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=1)
    before = args.to_dict()
    OffloadTrainer(t5(), args, train_dataset=seq2seq_rows()).train()
    assert args.to_dict() == before


def test_fp16_trains_with_a_loss_scale(tmp_path: Path) -> None:
    trainer = train(tmp_path, t5(), seq2seq_rows(), OffloadTrainer, fp16=True, max_steps=4)
    assert trainer.accelerator.mixed_precision == "no"
    assert trainer.engine is not None
    assert trainer.engine.loss_scale is not None
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float16, torch.float32}
    assert all(loss == loss for loss in logged(trainer, "loss"))


def test_model_init_starts_from_a_new_model_each_time(tmp_path: Path) -> None:
    more = {"model_init": lambda: t5(), "args": arguments(tmp_path), "train_dataset": seq2seq_rows()}
    trainer = OffloadTrainer(**more)
    trainer.train()
    first = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.train()
    assert all(torch.equal(first[name], weight) for name, weight in trainer.model.state_dict().items())


def test_loader_workers_change_no_weight(tmp_path: Path) -> None:
    without, with_two = (
        train(tmp_path / str(number), t5(), seq2seq_rows(), dataloader_num_workers=number).model.state_dict()
        for number in (0, 2)
    )
    assert all(torch.equal(without[name], weight) for name, weight in with_two.items())


def test_what_is_logged_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listening callback in transformers' list stands for TensorBoard and the like."""
    heard: list[dict[str, float]] = []

    class Listener(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            heard.append(dict(logs or {}))

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "listener", Listener)
    trainer = train(tmp_path, t5(), seq2seq_rows(), report_to="listener")
    *steps, summary = heard
    assert [entry["grad_norm"] for entry in steps] == logged(trainer, "grad_norm")
    assert [entry["loss"] for entry in steps] == logged(trainer, "loss")
    assert len(steps) == 3
    assert summary["train_loss"] == pytest.approx(sum(logged(trainer, "loss")) / 3)


def test_an_evaluation_at_the_start_sees_the_first_weights(tmp_path: Path) -> None:
    rows = seq2seq_rows(4, seed=2)
    trainer = train(tmp_path, t5(), seq2seq_rows(), more={"eval_dataset": rows}, eval_on_start=True)
    untrained = Trainer(model=t5(), args=arguments(tmp_path), eval_dataset=rows).evaluate()["eval_loss"]
    assert logged(trainer, "eval_loss") == pytest.approx([untrained], rel=1e-6)
    assert trainer.evaluate()["eval_loss"] < untrained
