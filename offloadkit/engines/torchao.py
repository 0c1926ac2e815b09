"""torchao's CPUOffloadOptimizer."""

from __future__ import annotations

from typing import Any

import torch

from offloadkit.device.process_memory import VramCap
from offloadkit.engines.engine import LEARNING_RATE, Engine
from offloadkit.engines.work import Batch, Work, plain_model
from offloadkit.planner import Dtype


class Torchao(Engine):
    """On bf16 parameters: no master weights, bf16 moments, no clipping (it cannot clip)."""

    master_weights = False

    def __init__(self, work: Work, dtype: Dtype, device: torch.device) -> None:
        from torchao.optim import CPUOffloadOptimizer

        VramCap(work.vram, device)
        model: Any = plain_model(work, "fp32" if self.master_weights else dtype, device, device)
        self._model, self._num_micro_batches, self._device = model, work.accumulation, device
        self._num_parameters = model.num_parameters()
        self._optimizer = CPUOffloadOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            offload_gradients=work.accumulation == 1,  # it cannot accumulate with it
            lr=LEARNING_RATE,
            weight_decay=0.0,
            fused=True,
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.master_weights):
            return super().forward(batch)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._num_micro_batches).backward()  # type: ignore[no-untyped-call]

    def step(self, is_boundary: bool) -> None:
        """At a boundary: step on the CPU."""
        if is_boundary:
            self._optimizer.step()
            self._optimizer.zero_grad()


class TorchaoFp32(Torchao):
    """On fp32 parameters under autocast: exact states, twice the weights and gradients on the device."""

    master_weights = True
