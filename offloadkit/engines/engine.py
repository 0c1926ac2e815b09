"""The interface that every engine has, and the optimizer settings that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offloadkit.engines.work import Batch, Work
from offloadkit.planner import Dtype

LEARNING_RATE = 1e-5
MAX_GRAD_NORM = 1.0


class Engine:
    """A model with its optimizer. The timing loop calls forward and backward for each micro-batch, then step.

    A constructor is an `EngineFactory`. The methods here are for a `_model` that counts micro-batches and updates its
    weights by itself.
    """

    _model: Any
    _device: torch.device
    _num_parameters: int

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of one micro-batch, a scalar."""
        loss: torch.Tensor = self._model(**batch).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Add the micro-batch's share of the gradients."""
        self._model.backward(loss)

    def step(self, is_boundary: bool) -> None:
        """Called after each backward; updates the weights where `is_boundary`."""
        self._model.step()

    def settle(self) -> None:
        """Wait for everything that a step left running."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def row(self) -> dict[str, Any]:
        """Figures of the model and the plan: `num_parameters`, and `planned` where there is a plan."""
        return {"num_parameters": self._num_parameters}


EngineFactory = Callable[[Work, Dtype, torch.device], Engine]
"""An engine's class."""
