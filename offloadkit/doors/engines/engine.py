"""The interface of engines, and their common optimizer settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offloadkit.doors.engines.work import Batch, Work
from offloadkit.planner import Dtype

LEARNING_RATE = 1e-5
MAX_GRAD_NORM = 1.0


class Engine:
    """A model with its optimizer. The timing loop calls forward and backward for each micro-batch, then step.

    Constructors are `EngineFactory`s. The default methods suit a `_model` that counts micro-batches and updates its
    weights by itself.
    """

    _model: Any
    _device: torch.device
    _num_parameters: int

    def forward(self, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = self._model(**batch).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        self._model.backward(loss)

    def step(self, is_boundary: bool) -> None:
        """Update the weights if `is_boundary`. Called after each backward."""
        self._model.step()

    def settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def row(self) -> dict[str, Any]:
        """Figures of the model and any plan: `num_parameters` and `planned`."""
        return {"num_parameters": self._num_parameters}


EngineFactory = Callable[[Work, Dtype, torch.device], Engine]
