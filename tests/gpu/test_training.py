"""The Trainer and `finetune` on a GPU equal the CPU up to the GPU's arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offloadkit
from tests.hf.training import assert_close, logged, seq2seq_rows, t5, train


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trainer_learns_on_the_gpu_what_it_learns_on_the_cpu(tmp_path: Path, accumulation: int) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "max_steps": 6, "weight_decay": 0.1}
    cpu = train(tmp_path / "cpu", t5(), seq2seq_rows(), **options)
    gpu = train(tmp_path / "gpu", t5(), seq2seq_rows(), use_cpu=False, **options)
    assert gpu.engine.device.type == "cuda"
    assert all(parameter.is_cuda for parameter in gpu.model.parameters())
    assert logged(gpu, "grad_norm") == pytest.approx(logged(cpu, "grad_norm"), rel=1e-3)
    assert_close(gpu.engine.master_weights(), cpu.engine.master_weights(), 1e-3)


def test_evaluation_generation_saving_and_the_best_model_on_the_gpu(tmp_path: Path) -> None:
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "bf16": True}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    generates = {"predict_with_generate": True, "generation_max_length": 6}
    rows = seq2seq_rows(4, seed=2)
    options = {"use_cpu": False, "learning_rate": 1e-2, **often, **best, **generates}
    trainer = train(tmp_path, t5(), seq2seq_rows(), more={"eval_dataset": rows}, **options)
    assert len(set(logged(trainer, "eval_loss"))) == 3
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(logged(trainer, "eval_loss")), rel=1e-3)
    assert trainer.predict(rows).predictions.shape[0] == 4


def test_finetune_on_the_gpu_hands_back_a_bf16_model(tmp_path: Path) -> None:
    pairs = [{"input": f"{number}+1", "target": str(number + 1)} for number in range(10)]
    model = t5()
    model.resize_token_embeddings(384)
    options: dict[str, Any] = {"tokenizer": "byte", "max_steps": 60, "learning_rate": 1e-2, "batch_size": 10}
    options |= {"save_strategy": "no", "eval_strategy": "no"}
    result = offloadkit.finetune(model, pairs, eval_dataset=pairs, output_dir=tmp_path, **options)
    assert {parameter.dtype for parameter in result.model.parameters()} == {torch.bfloat16}
    assert result.metrics["eval_loss"] < 0.7 * result.history[0]["loss"]
    assert result.steps[-1].bytes["vram"]
