"""Plain HuggingFace training with everything on the device."""

from __future__ import annotations

from typing import Any

import torch

from offloadkit.device.process_memory import VramCap
from offloadkit.doors.engines.engine import LEARNING_RATE, MAX_GRAD_NORM, Engine
from offloadkit.doors.engines.work import Work, plain_model
from offloadkit.planner import Dtype

FP16_LOSS_SCALE = 1024.0
"""Static loss scale that keeps fp16 gradients from underflowing."""
ELEMENTS_AT_ONCE = 1 << 26
"""Gradient elements converted to fp32 at a time: 256 MiB instead of 4 bytes per parameter of the model."""


class Baseline(Engine):
    """16-bit working weights with fp32 master weights, or fp32 alone; fused AdamW; clipping.

    Attributes:
        weights: the trained parameters.
        masters: the fp32 tensors that are stepped; identical to `weights` in fp32.
        parts: ranges of `weights` that are stepped one after the other.
    """

    def __init__(self, work: Work, dtype: Dtype, device: torch.device) -> None:
        VramCap(work.vram, device)
        self._model = self.model_of(work, dtype, device)
        self._num_micro_batches, self._device = work.accumulation, device
        self._num_parameters = self._model.num_parameters()
        self._loss_scale = FP16_LOSS_SCALE if dtype == "fp16" else 1.0
        self.weights: list[torch.Tensor] = [weight for weight in self._model.parameters() if weight.requires_grad]
        self.masters = self.weights
        if any(weight.dtype != torch.float32 for weight in self.weights):
            self.masters = [weight.detach().float().requires_grad_() for weight in self.weights]
        self.parts = _parts(self.weights)
        options: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": 0.0, "fused": True}
        self._optimizers = [torch.optim.AdamW(self.masters[part], **options) for part in self.parts]

    def model_of(self, work: Work, dtype: Dtype, device: torch.device) -> Any:
        return plain_model(work, dtype, device, device)

    def backward(self, loss: torch.Tensor) -> None:
        (loss * (self._loss_scale / self._num_micro_batches)).backward()  # type: ignore[no-untyped-call]

    def step(self, is_boundary: bool) -> None:
        """At a boundary: clip, step the master weights part by part, copy them to the working weights."""
        if not is_boundary:
            return
        torch.nn.utils.clip_grad_norm_(self.weights, MAX_GRAD_NORM * self._loss_scale)
        for part, optimizer in zip(self.parts, self._optimizers, strict=True):
            weights, masters = self.weights[part], self.masters[part]
            if masters[0] is not weights[0]:
                for weight, master in zip(weights, masters, strict=True):
                    master.grad = None if weight.grad is None else weight.grad.float().div_(self._loss_scale)
                    weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
            if masters[0] is not weights[0]:
                with torch.no_grad():
                    torch._foreach_copy_(weights, masters)


def _parts(weights: list[torch.Tensor]) -> list[slice]:
    """Group consecutive weights up to `ELEMENTS_AT_ONCE` elements; a larger tensor is a group by itself."""
    parts, first, size = [], 0, 0
    for index, weight in enumerate(weights):
        if index > first and size + weight.numel() > ELEMENTS_AT_ONCE:
            parts.append(slice(first, index))
            first, size = index, 0
        size += weight.numel()
    return [*parts, slice(first, len(weights))]
