"""On GPUs: `finetune` by DeepSpeed equals `finetune` by offloadkit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offloadkit
from offloadkit import OffloadConfig, Placement
from tests.doors.test_finetune import PAIRS, t5
from tests.gpu.test_doors import GIB
from tests.test_recipes import losses_of_two_ranks

pytest.importorskip("deepspeed", reason="deepspeed is not installed")


def trained(folder: Path, **options: Any) -> tuple[dict[str, torch.Tensor], offloadkit.FinetuneResult]:
    """Weights on the CPU after a few small steps in fp32, which differ little between the engines."""
    usual: dict[str, Any] = {"eval_dataset": PAIRS[:2], "tokenizer": "byte", "batch_size": 2, "max_steps": 4}
    usual |= {"max_grad_norm": 0.0, "adam_epsilon": 1e-3, "learning_rate": 1e-2, "bf16": False}
    usual |= {"train_sampling_strategy": "sequential", "overwrite": True}
    result = offloadkit.finetune(t5(64, dropout=0.0, num_layers=2), PAIRS, output_dir=folder, **(usual | options))
    return {name: each.detach().float().cpu() for name, each in result.model.named_parameters()}, result


def test_stages_train_what_offloadkit_trains(tmp_path: Path) -> None:
    expected, _ = trained(tmp_path / "own", gradient_accumulation=2)
    in_vram = Placement("vram", "vram", "vram", "keep", "gpu")
    for placement in (in_vram, Placement(), Placement(weights="ram", activations="checkpoint")):
        weights, result = trained(
            tmp_path / "theirs", gradient_accumulation=2, engine="deepspeed", offload=OffloadConfig(placement=placement)
        )
        for name, each in weights.items():
            assert torch.allclose(each, expected[name], rtol=0, atol=1e-4), (placement, name)
        assert result.samples


def test_bf16_within_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, result = trained(
        tmp_path, engine="deepspeed", bf16=True, vram="6GiB", max_steps=40, logging_steps=1, batch_size=8
    )
    assert "DeepSpeed ZeRO-2" in capsys.readouterr().out
    losses = [log["loss"] for log in result.history if "loss" in log]
    assert losses[-1] < losses[0]
    assert result.peaks["training by DeepSpeed"]["vram"] <= 6 * GIB
    assert {each.dtype for each in result.model.parameters()} == {torch.bfloat16}


def test_two_gpus_train_what_one_trains(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    options: dict[str, Any] = {"engine": "deepspeed", "max_steps": 2, "eval_dataset": None}
    for placement in (Placement(), Placement(weights="ram")):
        options["offload"] = OffloadConfig(placement=placement)
        one, _ = trained(tmp_path / "one", gradient_accumulation=2, **options)
        two, _ = trained(tmp_path / "two", num_gpus=2, **options)
        for name, each in two.items():
            assert torch.allclose(each, one[name], rtol=0, atol=1e-4), (placement, name)


def test_the_recipes_of_two_ranks_in_bf16() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = losses_of_two_ranks("one", "pipeline", "tensor", "--updates", "10", "--dtype", "bf16")
    for how in ("pipeline", "tensor"):
        assert found[how] == pytest.approx(found["one"], rel=0.03), how
