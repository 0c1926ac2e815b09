"""A ds_config.json is read without loss of meaning, or refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from offloadkit.deepspeed.config import KEYS, read_deepspeed
from offloadkit.errors import ConfigError
from offloadkit.facts.config import DynamicLossScale, OffloadConfig, Placement

PAGE = Path(__file__).parents[2] / "docs" / "from-deepspeed.md"
ON_CPU = {"device": "cpu", "pin_memory": True}
FULL: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 1000},
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": ON_CPU,
        "offload_param": ON_CPU,
        "overlap_comm": True,
        "reduce_scatter": True,
        "contiguous_gradients": True,
    },
    "gradient_clipping": 1.0,
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "wall_clock_breakdown": False,
}
"""The config that most scripts copy."""
HF_ZERO3: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": ON_CPU,
        "offload_param": ON_CPU,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
"""HuggingFace's documented config of ZeRO-3 with offload."""
TUTORIAL: dict[str, Any] = {
    "train_batch_size": 16,
    "steps_per_print": 2000,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1000}},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "bf16": {"enabled": True},
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 0,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "cpu_offload": False,
    },
}
"""DeepSpeed's CIFAR-10 tutorial."""


ONE_BIT: dict[str, Any] = {
    "type": "OneBitAdam",
    "params": {"lr": 2e-4, "freeze_step": 400, "cuda_aware": False, "comm_backend_name": "nccl"},
}
"""DeepSpeed's 1-bit Adam tutorial."""


def adamw(**more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}} | more


def test_the_config_that_people_copy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(FULL))
    assert OffloadConfig.from_deepspeed(file) == OffloadConfig(
        learning_rate=1e-4,
        weight_decay=0.01,
        gradient_accumulation=8,
        max_grad_norm=1.0,
        working_dtype="fp16",
        loss_scale=DynamicLossScale(2.0**16, window=1000, hysteresis=2, minimum=1),
    )
    read = read_deepspeed(str(file))
    assert (read.train_batch_size, read.micro_batch_size, read.stage) == (32, 4, 2)
    assert read.schedule == ("WarmupLR", FULL["scheduler"]["params"])
    assert {name.rpartition(".")[2] for name in read.ignored} == {
        *("stage", "overlap_comm", "reduce_scatter", "contiguous_gradients", "pin_memory")
    }
    caplog.clear()
    with monkeypatch.context() as on_rank_1:
        on_rank_1.setenv("RANK", "1")
        read_deepspeed(FULL)
    assert not caplog.messages
    read_deepspeed(FULL)
    ignored, weights = caplog.messages
    assert "these have no effect here" in ignored
    assert "zero_optimization.overlap_comm, zero_optimization.reduce_scatter" in ignored
    assert "DeepSpeed ignores offload_param below stage 3, and the stage is 2" in weights


def test_huggingfaces_config_leaves_its_autos_to_the_trainer(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert OffloadConfig.from_deepspeed(HF_ZERO3) == OffloadConfig()
    assert "optimizer.params.betas" in caplog.text
    assert "the schedule WarmupLR is not part of OffloadConfig" in caplog.text
    assert "scheduler.params.warmup_max_lr" in read_deepspeed(HF_ZERO3).auto


def test_deepspeeds_tutorial() -> None:
    config = OffloadConfig.from_deepspeed(TUTORIAL, num_gpus=2)
    assert config == OffloadConfig(
        learning_rate=1e-3, betas=(0.8, 0.999), weight_decay=3e-7, working_dtype="bf16", on_nonfinite="skip"
    )
    assert read_deepspeed(TUTORIAL, num_gpus=2).micro_batch_size == 8


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"gradient_clipping": 0}, {"max_grad_norm": None}),
        ({"optimizer": {"type": "AdamW"}}, {"learning_rate": 1e-3, "weight_decay": 0.0}),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, {"loss_scale": 128.0, "on_nonfinite": "skip"}),
        ({"fp16": {"enabled": True, "initial_scale_power": 8}}, {"loss_scale": DynamicLossScale(256.0)}),
        ({"bfloat16": {"enabled": True, "check_grad_overflow": False}}, {"working_dtype": "bf16"}),
        ({"bf16": {"enabled": True}, "offloadkit": {"on_nonfinite": "rollback"}}, {"on_nonfinite": "rollback"}),
        (
            {"optimizer": {"type": "Lion", "params": {"betas": [0.9, 0.98]}}},
            {"optimizer": "lion", "betas": (0.9, 0.98)},
        ),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, {"weight_decay": 0.0}),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/local"}}},
            {"disk": "/local"},
        ),
        ({"offloadkit": {"vram": "8GiB", "placement": {"weights": "ram"}}}, {"placement": Placement(weights="ram")}),
        ({"optimizer": {"type": "Lion"}}, {"betas": (0.9, 0.999)}),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "foreach": False}}}, {"weight_decay": 0.01}),
        (
            {"optimizer": {"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}},
            {"weight_decay": 0.0},
        ),
        ({"zero_optimization": True}, {}),
        ({"zero_optimization": {"prefetch_bucket_size": 5e7}}, {}),
        (
            {
                "amp": {"enabled": False},
                "sequence_parallel_size": 1,
                "tensor_parallel": {"autotp_size": 0},
                "tensorboard": {"enabled": True},
            },
            {},
        ),
    ],
)
def test_what_a_key_becomes(given: dict[str, Any], expected: dict[str, Any]) -> None:
    config = OffloadConfig.from_deepspeed(adamw(**given))
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ({"train_batch_size": 24}, (24, 12, 1)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3}, (24, 3, 4)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 2}, (24, 6, 2)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, (12, 3, 2)),
        ({"train_micro_batch_size_per_gpu": 3}, (6, 3, 1)),
        ({"gradient_accumulation_steps": 5}, (None, None, 5)),
    ],
)
def test_batch_sizes_of_two_gpus(sizes: dict[str, int], found: tuple[int | None, ...]) -> None:
    read = read_deepspeed(sizes, num_gpus=2)
    assert (read.train_batch_size, read.micro_batch_size, read.accumulation) == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_batch_size": 7}, "7 is not 2 x 3 x 1 = 6"),
        (
            {"bf16": {"enabled": True, "check_grad_overflow": True}, "offloadkit": {"on_nonfinite": "rollback"}},
            "repeats on_nonfinite",
        ),
        ({"gradient_accumulation_steps": 0}, "whole number >= 1"),
        ({"optimizer": ONE_BIT}, "'OneBitAdam' cannot be offloaded: 'AdamW'"),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}, "'SGD' cannot be offloaded"),
        ({"optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9}}}, "'Muon' cannot be offloaded"),
        ({"optimizer": {"params": {"lr": 1}}}, "no optimizer.type"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}}, "decoupled"),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "without amsgrad"),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, "no key 'optimizer.params.learning_rate'"),
        ({"gradient_cliping": 1.0}, "did you mean 'gradient_clipping'"),
        ({"zero_optimization": {"stgae": 2}}, "did you mean 'zero_optimization.stage'"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "write the folder too"),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, "'none', 'cpu' or 'nvme'"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "offload_param.device must be 'none', 'cpu'"),
        ({"steps_per_print": float("nan")}, "steps_per_print must be a whole number >= 1, got nan"),
        ({"train_batch_size": float("inf")}, "whole number >= 1, got inf"),
        ({"zero_optimization": 2}, "a section"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "enable one of them"),
        ({"fp16": {"enabled": "yes"}}, "true or false"),
        ({"gradient_clipping": -1}, "must be a number >= 0"),
        ({"gradient_allreduce_op": "sum"}, "the mean over GPUs"),
        ({"tensor_parallel": {"autotp_size": 2}}, "use DeepSpeed"),
        ({"torch_autocast": {"enabled": True}}, "leave it out"),
        ({"offloadkit": {"vrm": "8GiB"}}, "fields of OffloadConfig"),
        ({"offloadkit": {"learning_rate": 1}}, "repeats learning_rate"),
    ],
)
def test_what_has_no_meaning_is_refused(given: dict[str, Any], message: str) -> None:
    config = adamw(**given)
    if message.startswith("7"):
        config["gradient_accumulation_steps"] = 3
    with pytest.raises(ConfigError, match=message):
        OffloadConfig.from_deepspeed(config)


def test_printing_every_infinity_of_steps_is_never(tmp_path: Path) -> None:
    """accelerate writes infinity into its configs."""
    (tmp_path / "ds.json").write_text('{"train_batch_size": 2, "steps_per_print": Infinity}')
    assert read_deepspeed(tmp_path / "ds.json").steps_per_print is None


def test_parameters_on_a_disk_and_a_folder_that_is_not_there_are_named(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    on_disk = {"device": "nvme", "nvme_path": str(tmp_path / "none")}
    read_deepspeed(adamw(zero_optimization={"stage": 3, "offload_param": on_disk, "offload_optimizer": on_disk}))
    assert "weights are never on disk here: RAM must hold" in caplog.text
    assert f"is not a folder on this machine: {tmp_path / 'none'}. Create it" in caplog.text
    assert "below stage 3" not in caplog.text
    caplog.clear()
    here = {"device": "nvme", "nvme_path": str(tmp_path)}
    read_deepspeed(adamw(zero_optimization={"stage": 3, "offload_param": ON_CPU, "offload_optimizer": here}))
    assert [each for each in caplog.messages if "have no effect" not in each] == []


def test_a_key_of_your_own_is_overlooked_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    OffloadConfig.from_deepspeed(adamw(_comment="mine"))
    assert "'_comment' is not a key of DeepSpeed" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [("{'a': 1}", "is not JSON"), ("[]", "one JSON object"), ('{"a": 1, "a": 2}', "'a' is there twice")],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_deepspeed(tmp_path / "ds.json")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_deepspeed(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="a dict or the path"):
        read_deepspeed(3)  # type: ignore[arg-type]


def test_the_page_has_every_key() -> None:
    """docs/from-deepspeed.md shows `KEYS`, in order."""
    kinds = {"read": "", "ignored": "ignored: ", "refused": "refused: "}
    rows = [f"| `{name}` | {kinds[key.kind]}{key.what.replace('|', '/')} |" for name, key in KEYS.items()]
    page = PAGE.read_text()
    assert [row for row in page.splitlines() if row.startswith("| `")] == rows, "write this table:\n" + "\n".join(rows)


@pytest.mark.slow
def test_deepspeed_has_no_key_that_is_missing_here() -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    sections: dict[str, Any] = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
    }
    for section, model in sections.items():
        for name, described in model.model_fields.items():
            full = f"{section}.{described.alias or name}"
            assert full in KEYS or any(key.startswith(f"{full}.") for key in KEYS), full
