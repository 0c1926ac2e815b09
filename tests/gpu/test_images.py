"""Decoders that see images, trained on a GPU by `finetune`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import offloadkit
from offloadkit import OffloadConfig, Placement
from tests.images import FAMILIES, rows
from tests.runs import losses

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {
    "batch_size": 2, "learning_rate": 2e-3, "adam_epsilon": 1e-4, "logging_steps": 1, "monitor": False, "max_steps": 6,
}  # fmt: skip


def run(name: str, folder: Path, **options: Any) -> offloadkit.FinetuneResult:
    model, processor = FAMILIES[name]()
    return offloadkit.finetune(model, rows(), tokenizer=processor, output_dir=folder, **(OPTIONS | options))


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    exact = OffloadConfig(working_dtype="fp32")
    ours = run(name, tmp_path / "gpu", offload=exact)
    assert next(ours.model.parameters()).dtype == torch.float32
    assert losses(ours) == pytest.approx(losses(run(name, tmp_path / "cpu", offload=exact, use_cpu=True)), rel=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_that_stream_and_a_frozen_tower_train_as_with_everything_on_the_gpu(name: str, tmp_path: Path) -> None:
    """Convolutions and scatters of images add in any order on a GPU."""
    away = Placement(weights="ram", gradients="ram", states="ram", activations="checkpoint", step="cpu")
    part = {"gemma": "vision_tower", "qwen": "visual", "idefics": "vision_model"}[name]
    found = [
        losses(run(name, tmp_path / str(number), freeze=part, offload=OffloadConfig(placement=placement)))
        for number, placement in enumerate((Placement(), away))
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-2)
    assert found[0][-1] < found[0][0]
