"""offloadkit itself, set up as `finetune` sets it up."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import torch

from offloadkit.config import OffloadConfig
from offloadkit.device.process_memory import cap_vram
from offloadkit.engine import OffloadEngine
from offloadkit.engines.engine import LEARNING_RATE, MAX_GRAD_NORM
from offloadkit.engines.work import Batch, Work, lazy_model
from offloadkit.hf.loss import compute_loss_in_chunks
from offloadkit.hf.patches import fuse
from offloadkit.planning import check_fits, plan


class Offloadkit:
    """`OffloadEngine` by a plan within the limits: weights drawn layer by layer into their places, loss in chunks."""

    def __init__(self, work: Work, dtype: str, device: torch.device) -> None:
        """
        Raises:
            DoesNotFitError: by the plan.
        """
        model, draw = lazy_model(work, dtype, device)
        config = OffloadConfig(
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
            gradient_accumulation=work.accumulation,
            precision=work.precision,
            working_dtype=dtype,  # type: ignore[arg-type]
            vram=work.vram_on(device),
            ram=work.ram,
            disk=work.disk,
            compile_blocks=work.compiled,
        )
        lengths: dict[str, Any] = {
            "max_input_length": work.input_length,
            "max_target_length": work.target_length or None,
        }
        self._plan = plan(model, batch_size=work.batch_size, **lengths, offload=config, device=device)
        check_fits(self._plan)
        cap_vram(work.vram, device)
        compute_loss_in_chunks(model)
        fuse(model, compiled=work.compiled)
        self._engine = OffloadEngine(model, config, device=device, plan=self._plan, materialise=draw)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of one micro-batch."""
        loss: torch.Tensor = self._engine(**batch).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Add the micro-batch's share of the gradients."""
        self._engine.backward(loss)

    def step(self, is_boundary: bool) -> None:
        """After each backward; the engine counts micro-batches itself."""
        self._engine.step()

    def settle(self) -> None:
        """Wait for everything that a step left running."""
        self._engine.synchronize()

    def row(self) -> dict[str, Any]:
        """What was planned, by which rates of the machine, and where the last step's time went."""
        made = self._plan
        seconds, machine = made.seconds, made.basis and made.basis.hardware
        records = list(self._engine.telemetry.records)
        return {
            "num_parameters": made.num_parameters,
            "planned": {
                "vram_bytes": made.total_bytes("vram"),
                "ram_bytes": made.total_bytes("ram"),
                "disk_bytes": made.total_bytes("disk"),
                "step_seconds": None if seconds is None else seconds.step,
                "placements": {str(where): number for where, number in Counter(made.placements).items()},
                "hardware": None if machine is None else asdict(machine),
            },
            "telemetry_seconds": dict(records[-1].seconds) if records else {},
        }
