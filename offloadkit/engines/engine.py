"""The interface that every engine has, and the optimizer settings that all of them share."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from offloadkit.engines.work import Batch

LEARNING_RATE = 1e-5
MAX_GRAD_NORM = 1.0


class Engine(Protocol):
    """A model with its optimizer. The timing loop calls forward and backward for each micro-batch, then step.

    An engine's constructor takes (work: Work, dtype: str, device: torch.device).
    """

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of one micro-batch, a scalar."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the micro-batch's share of the gradients."""

    def step(self, is_boundary: bool) -> None:
        """Called after each backward; updates the weights where `is_boundary`."""

    def settle(self) -> None:
        """Wait for everything that a step left running."""

    def row(self) -> dict[str, Any]:
        """Figures of the model and the plan: `num_parameters`, and `planned` where there is a plan."""


def synchronize(device: torch.device) -> None:
    """Wait for everything that was started on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
