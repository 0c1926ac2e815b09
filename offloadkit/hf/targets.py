"""Targets: the positions that a batch's loss is a mean over, and what each micro-batch's mean counts by."""

from __future__ import annotations

from typing import Any

import torch
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

IGNORED_LABEL = -100


def num_targets(model: Any, batch: Any) -> torch.Tensor | int:
    """Positions that the loss of one batch is a mean over; a scalar on the labels' device, or an int."""
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, torch.Tensor):
        return _batch_size(batch)
    if labels.is_floating_point():
        return labels.numel()
    if "shift_labels" not in batch and _shifts_labels(model):
        labels = labels[..., 1:]
    return (labels != IGNORED_LABEL).sum()


def _shifts_labels(model: Any) -> bool:
    """Whether the model's loss compares position i with label i + 1, as transformers' causal language models do."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    loss_type = getattr(model, "loss_type", None)
    if loss_type in LOSS_MAPPING:
        return LOSS_MAPPING[loss_type] is ForCausalLMLoss
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _batch_size(batch: Any) -> int:
    return next((len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()), 1)


def with_a_target(inputs: Any, count: torch.Tensor | int) -> tuple[Any, torch.Tensor | int]:
    """The inputs with a last label of 0 where all labels are ignored, and the number of targets before.

    Such a micro-batch's share is 0; the target keeps its mean loss from being 0 / 0. Nothing waits for the device.
    """
    labels = inputs.get("labels")
    if not isinstance(count, torch.Tensor) or not isinstance(labels, torch.Tensor) or not labels.numel():
        return inputs, count
    last = torch.zeros(labels.shape, dtype=torch.bool, device=labels.device)
    last.view(-1)[-1].fill_(True)  # assigning would copy a number to the device and wait
    return {**inputs, "labels": labels.masked_fill(last & (count == 0), 0)}, count


def on_device(count: torch.Tensor | int, device: torch.device) -> torch.Tensor:
    """The count as a scalar tensor on `device`."""
    if isinstance(count, torch.Tensor):
        return count.to(device)
    return torch.full((), count, device=device)
