"""Unsupported arguments of the Trainer mixin are refused before any work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from offloadkit.errors import ConfigError, ModelError
from offloadkit.facts.config import OffloadConfig
from offloadkit.hf.arguments import arguments_of_finetune, engine_config
from offloadkit.hf.options import FinetuneOptions
from offloadkit.hf.trainer import OffloadTrainer, OffloadTrainerMixin
from tests.deepspeed.test_deepspeed_config import FULL, HF_ZERO3
from tests.hf.training import arguments, seq2seq_rows, t5, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"optim": "adafactor"}, "adamw_torch"),
        ({"auto_find_batch_size": True}, "per_device_train_batch_size"),
        ({"torch_compile": True}, "leave it out"),
        ({"fp16_full_eval": True}, "fp16_full_eval"),
        ({"bf16_full_eval": True}, "bf16=True"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant=True: leave it out"),
        ({"gradient_checkpointing_kwargs": {"every_n_layers": 2}}, "every_n_layers=2: leave it out"),
        ({"gradient_checkpointing_kwargs": {"offload": True}}, "offload=True: leave it out"),
    ],
)
def test_arguments_that_the_engine_cannot_follow_are_refused(
    tmp_path: Path, options: dict[str, Any], advice: str
) -> None:
    with pytest.raises(ConfigError, match=advice):
        OffloadTrainer(model=t5(), args=arguments(tmp_path, **options))


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("deepspeed", {"zero": 2}, r"deepspeed: leave it out: pass offload=OffloadConfig.from_deepspeed\("),
        ("fsdp", ["full_shard"], "fsdp: leave it out"),
    ],
)
def test_other_engines_are_refused(tmp_path: Path, name: str, value: Any, advice: str) -> None:
    args = arguments(tmp_path)
    setattr(args, name, value)
    with pytest.raises(ConfigError, match=advice):
        OffloadTrainer(model=t5(), args=args)


def test_finetune_refuses_deepspeed_before_transformers_asks_for_it() -> None:
    with pytest.raises(ConfigError, match=r"deepspeed='ds.json': leave it out, and pass offload=OffloadConfig"):
        arguments_of_finetune(FinetuneOptions("t5-small", [], training_arguments={"deepspeed": "ds.json"}))


def test_a_config_of_deepspeeds_with_autos_takes_the_arguments(tmp_path: Path) -> None:
    """HuggingFace's own config: "auto" values come from the arguments."""
    args = arguments(tmp_path, learning_rate=3e-4, gradient_accumulation_steps=2, adam_beta2=0.95)
    config = engine_config(OffloadConfig.from_deepspeed(HF_ZERO3), args)
    assert (config.learning_rate, config.gradient_accumulation, config.betas) == (3e-4, 2, (0.9, 0.95))


SAME_AS_FULL: dict[str, Any] = {
    "learning_rate": 1e-4,
    "weight_decay": 0.01,
    "gradient_accumulation_steps": 8,
    "per_device_train_batch_size": 4,
}


def test_a_config_of_deepspeeds_and_the_arguments_must_say_the_same(tmp_path: Path) -> None:
    """A value in the file counts even if it is OffloadConfig's default; a missing value comes from the arguments."""
    full = OffloadConfig.from_deepspeed(FULL)
    usual: dict[str, Any] = {"max_steps": 1, "adam_beta2": 0.95}
    config = train(tmp_path, t5(), seq2seq_rows(), more={"offload": full}, **SAME_AS_FULL, **usual).engine.config
    assert engine_config(config, arguments(tmp_path, **SAME_AS_FULL, **usual)) == config
    assert (config.learning_rate, config.weight_decay, config.gradient_accumulation) == (1e-4, 0.01, 8)
    assert (config.max_grad_norm, config.working_dtype, config.betas) == (1.0, "fp16", (0.9, 0.95))
    others: dict[str, Any] = {"learning_rate": 5e-5, "weight_decay": 0.1, "max_grad_norm": 5.0, "bf16": True}
    others |= {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "optim": "lion_32bit"}
    with pytest.raises(ConfigError) as raised:
        OffloadTrainer(
            model=t5(),
            args=arguments(tmp_path, **SAME_AS_FULL | others),
            offload=full,
        )
    assert set(str(raised.value).splitlines()[1:]) == {
        "  optimizer: 'adamw' in OffloadConfig (optimizer.type), 'lion' by TrainingArguments",
        "  learning_rate: 0.0001 in OffloadConfig (optimizer.params.lr), 5e-05 by TrainingArguments",
        "  weight_decay: 0.01 in OffloadConfig (optimizer.params.weight_decay), 0.1 by TrainingArguments",
        "  max_grad_norm: 1.0 in OffloadConfig (gradient_clipping), 5.0 by TrainingArguments",
        "  gradient_accumulation: 8 in OffloadConfig (gradient_accumulation_steps), 4 by TrainingArguments",
        "  working_dtype: 'fp16' in OffloadConfig, 'bf16' by TrainingArguments",
        "  train_micro_batch_size_per_gpu: 4 in the DeepSpeed config, 2 by TrainingArguments",
        "  train_batch_size: 32 in the DeepSpeed config, 8 by TrainingArguments",
    }


def test_one_batch_size_leaves_its_parts_to_the_arguments(tmp_path: Path) -> None:
    config = {"train_batch_size": 6, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": False}}
    offload = OffloadConfig.from_deepspeed(config)
    sizes = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    found = engine_config(offload, arguments(tmp_path, learning_rate=3e-4, **sizes))
    assert (found.gradient_accumulation, found.learning_rate) == (2, 3e-4)
    with pytest.raises(ConfigError, match=r"bf16.enabled: False in the DeepSpeed config, True by"):
        engine_config(offload, arguments(tmp_path, **sizes, bf16=True))
    with pytest.raises(ConfigError, match=r"learning_rate: 0.2 in OffloadConfig, 0.0003 by"):
        engine_config(replace(offload, learning_rate=0.2), arguments(tmp_path, learning_rate=3e-4, **sizes))


def test_a_decay_of_the_arguments_is_not_coupled_either(tmp_path: Path) -> None:
    adam = {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": "auto"}}
    offload = OffloadConfig.from_deepspeed({"optimizer": adam})
    assert engine_config(offload, arguments(tmp_path, weight_decay=0.0)).weight_decay == 0
    with pytest.raises(ConfigError, match=r"adam_w_mode is false with weight_decay 0.1 by TrainingArguments"):
        engine_config(offload, arguments(tmp_path, weight_decay=0.1))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_USE_FSDP", "true"),
        ("ACCELERATE_USE_DEEPSPEED", "true"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR"),
        ("ACCELERATE_MIXED_PRECISION", "bf16"),
    ],
)
def test_what_accelerates_config_asks_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    args = arguments(tmp_path)
    for other in ("USE_FSDP", "USE_DEEPSPEED"):
        monkeypatch.setenv(f"ACCELERATE_{other}", "false")
    for other in ("DYNAMO_BACKEND", "MIXED_PRECISION"):
        monkeypatch.setenv(f"ACCELERATE_{other}", "no")
    OffloadTrainer(model=t5(), args=args)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}='{value}'"):
        OffloadTrainer(model=t5(), args=args)
    with pytest.raises(ConfigError, match=f"{name}='{value}'"):
        arguments_of_finetune(FinetuneOptions("t5-small", [], batch_size=2))


def test_arguments_that_know_other_ranks_than_torch_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(ConfigError, match="world_size=2, and torch"):
        OffloadTrainer(model=t5(), args=arguments(tmp_path))


def test_an_optimizer_of_the_users_is_refused(tmp_path: Path) -> None:
    model = t5()
    with pytest.raises(ConfigError, match="takes no optimizer"):
        OffloadTrainer(model=model, args=arguments(tmp_path), optimizers=(torch.optim.AdamW(model.parameters()), None))


def test_asked_for_an_optimizer_that_the_engine_has_not_the_class_refuses_it(tmp_path: Path) -> None:
    trainer = OffloadTrainer(model=t5(), args=arguments(tmp_path))
    with pytest.raises(ConfigError, match="optim='adafactor': use one of adamw_torch"):
        trainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, optim="adafactor"))


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


def test_a_quantised_model_is_refused_by_name_before_transformers_does(tmp_path: Path) -> None:
    model: Any = t5()
    model.is_quantized = True  # as set by a quantiser
    with pytest.raises(ModelError, match="is quantised, and quantised weights cannot be trained"):
        OffloadTrainer(model, arguments(tmp_path))
    with pytest.raises(ModelError, match="is quantised, and quantised weights cannot be trained"):
        OffloadTrainer(model=model, args=arguments(tmp_path))
