"""Runs of `finetune`: their losses, and whether a resumed run equals one that was not stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import offloadkit


def losses(result: Any) -> list[float]:
    return [entry["loss"] for entry in result.history if "loss" in entry]


def check_resumed(
    model: Any, rows: Any, folder: Path, weights: Callable[[Path], Mapping[str, torch.Tensor]], options: dict[str, Any]
) -> None:
    """Assert that four steps in two runs have the losses and bits of four steps in one run.

    Args:
        weights: reads the weights from a model's folder.
        options: of `finetune`.
    """
    how: dict[str, Any] = options | {"save_steps": 2, "lr_scheduler_type": "constant"}
    whole = offloadkit.finetune(model, rows, output_dir=folder / "whole", max_steps=4, **how)
    offloadkit.finetune(model, rows, output_dir=folder / "parts", max_steps=2, **how)
    again = offloadkit.finetune(model, rows, output_dir=folder / "parts", max_steps=4, resume=True, **how)
    assert losses(again)[-2:] == losses(whole)[-2:]
    theirs = weights(whole.model_dir)
    assert all(torch.equal(value, theirs[name]) for name, value in weights(again.model_dir).items())
