"""DeepSpeed's ZeRO stages 2 and 3 with the optimizer in pinned RAM."""

from __future__ import annotations

from typing import Any, Literal

import torch

from offloadkit.config import OffloadConfig
from offloadkit.device.process_memory import VramCap
from offloadkit.engines.deepspeed_process import prepare
from offloadkit.engines.engine import LEARNING_RATE, MAX_GRAD_NORM, Engine
from offloadkit.engines.work import Work, plain_model
from offloadkit.engines.zero import Zero, ds_config
from offloadkit.planner import Dtype


class Zero2(Engine):
    """Gradients and AdamW's states are offloaded; copies overlap; clipping."""

    stage: Literal[2, 3] = 2

    def __init__(self, work: Work, dtype: Dtype, device: torch.device) -> None:
        VramCap(work.vram, device)
        model = plain_model(work, dtype, torch.device("cpu") if self.stage == 3 else device, device)
        prepare(on_cpu_steps=True)
        import deepspeed

        self._num_parameters, self._device = model.num_parameters(), device
        zero = Zero(self.stage, weights="ram" if self.stage == 3 else "vram", recomputed=work.recomputed)
        options = OffloadConfig(max_grad_norm=MAX_GRAD_NORM, gradient_accumulation=work.accumulation)
        sizes: dict[str, Any] = {"batch_size": work.batch_size, "bucket_elements": work.bucket_elements}
        config = ds_config(zero, options, dtype, **sizes, pinned=True)
        config["optimizer"] = {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.0}}
        self._model, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)


class Zero3(Zero2):
    """Stage 3: the weights are in RAM too, and streamed."""

    stage = 3
