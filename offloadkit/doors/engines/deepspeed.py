"""DeepSpeed's ZeRO stages 2 and 3 with the optimizer in pinned RAM, on one or several ranks."""

from __future__ import annotations

from typing import Any, Literal

import torch

from offloadkit.deepspeed.process import prepare
from offloadkit.deepspeed.zero import Zero, ds_config
from offloadkit.device.process_memory import VramCap
from offloadkit.doors.engines.engine import LEARNING_RATE, MAX_GRAD_NORM, Engine
from offloadkit.doors.engines.work import Work, plain_model
from offloadkit.facts.config import OffloadConfig
from offloadkit.planner import Dtype


class Zero2(Engine):
    """ZeRO-2 with offloaded gradients and AdamW states, overlapping copies, and clipping."""

    stage: Literal[2, 3] = 2
    offloads = True
    """Whether states are in RAM and stepped by DeepSpeed's CPU AdamW; False: torch's fused AdamW steps them in VRAM."""

    def __init__(self, work: Work, dtype: Dtype, device: torch.device) -> None:
        VramCap(work.vram, device)
        model = plain_model(work, dtype, torch.device("cpu") if self.stage == 3 else device, device)
        prepare(on_cpu_steps=self.offloads)
        import deepspeed

        self._num_parameters, self._device = model.num_parameters(), device
        weights: Literal["vram", "ram"] = "ram" if self.offloads and self.stage == 3 else "vram"
        states: Literal["vram", "ram"] = "ram" if self.offloads else "vram"
        zero = Zero(self.stage, states=states, weights=weights, recomputed=work.recomputed)
        options = OffloadConfig(max_grad_norm=MAX_GRAD_NORM, gradient_accumulation=work.accumulation)
        sizes: dict[str, Any] = {"batch_size": work.batch_size, "bucket_elements": work.bucket_elements}
        config = ds_config(zero, options, dtype, **sizes, pinned=True)
        adamw: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": 0.0}
        given: dict[str, Any] = {"model_parameters": model.parameters()}
        if self.offloads:
            config["optimizer"] = {"type": "AdamW", "params": adamw}
        else:
            given["optimizer"] = torch.optim.AdamW(model.parameters(), **adamw, fused=True)
        self._model, *_ = deepspeed.initialize(model=model, config=config, **given)


class Zero3(Zero2):
    """ZeRO-3, which also streams weights from RAM."""

    stage = 3
