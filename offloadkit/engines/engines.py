"""offloadkit, plain HuggingFace and DeepSpeed behind one small interface, each set up as its users are told to."""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from offloadkit.config import OffloadConfig
from offloadkit.device.process_memory import cap_vram
from offloadkit.engine import OffloadEngine
from offloadkit.engines.work import LEARNING_RATE, MAX_GRAD_NORM, Batch, Work, lazy_model, plain_model
from offloadkit.hf.loss import compute_loss_in_chunks
from offloadkit.hf.patches import fuse
from offloadkit.planning import check_fits, plan

FP16_LOSS_SCALE = 1024.0
"""Of the baseline, whose fp16 gradients would underflow otherwise."""


class Offloadkit:
    """`OffloadEngine` as `finetune` builds it: by a plan within the limits, weights drawn layer by layer into their
    places, the loss in chunks."""

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
        )
        lengths: dict[str, Any] = {"max_input_length": work.input_length, "max_target_length": work.target_length}
        self._plan = plan(model, batch_size=work.batch_size, **lengths, offload=config, device=device)
        check_fits(self._plan)
        cap_vram(work.vram, device)
        compute_loss_in_chunks(model)
        fuse(model)
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
        """What was planned, and which placements were chosen."""
        seconds = self._plan.seconds
        return {
            "num_parameters": self._plan.num_parameters,
            "planned": {
                "vram_bytes": self._plan.total_bytes("vram"),
                "ram_bytes": self._plan.total_bytes("ram"),
                "step_seconds": None if seconds is None else seconds.step,
                "placements": {str(where): number for where, number in Counter(self._plan.placements).items()},
            },
        }


class AllOnDevice:
    """A model on the device as plain HuggingFace trains it: fp32 master weights beside those of 16 bits, AdamW,
    clipping."""

    def __init__(self, model: Any, accumulation: int, device: torch.device) -> None:
        self._model, self._num_micro_batches, self._device = model, accumulation, device
        self._weights: list[torch.Tensor] = [weight for weight in model.parameters() if weight.requires_grad]
        dtypes = {weight.dtype for weight in self._weights}
        self._loss_scale = FP16_LOSS_SCALE if torch.float16 in dtypes else 1.0
        self._masters = self._weights
        if dtypes != {torch.float32}:
            self._masters = [weight.detach().float().requires_grad_() for weight in self._weights]
        self._optimizer = torch.optim.AdamW(self._masters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of one micro-batch."""
        loss: torch.Tensor = self._model(**batch).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Add the micro-batch's share of the gradients."""
        (loss * (self._loss_scale / self._num_micro_batches)).backward()  # type: ignore[no-untyped-call]

    def step(self, is_boundary: bool) -> None:
        """At a boundary: clip, step the masters, round them to the working weights."""
        if not is_boundary:
            return
        torch.nn.utils.clip_grad_norm_(self._weights, MAX_GRAD_NORM * self._loss_scale)
        if self._masters is self._weights:
            self._optimizer.step()
            self._optimizer.zero_grad()
            return
        for weight, master in zip(self._weights, self._masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float().div_(self._loss_scale)
            weight.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self._weights, self._masters)

    def settle(self) -> None:
        """Wait for the device."""
        synchronize(self._device)

    def row(self) -> dict[str, Any]:
        """How large the model is."""
        return {"num_parameters": sum(weight.numel() for weight in self._model.parameters())}


class Baseline(AllOnDevice):
    """The same within the work's limits."""

    def __init__(self, work: Work, dtype: str, device: torch.device) -> None:
        cap_vram(work.vram, device)
        super().__init__(plain_model(work, dtype, device, device), work.accumulation, device)


class DeepSpeedZero:
    """A model under DeepSpeed ZeRO with the optimizer (stage 3: the weights too) in pinned RAM, overlapped copies,
    clipping."""

    stage = 2

    def __init__(self, model: Any, dtype: str, batch_size: int, accumulation: int, device: torch.device) -> None:
        import deepspeed

        self._num_parameters = sum(weight.numel() for weight in model.parameters())
        join_group_of_one()
        on_cpu = {"device": "cpu", "pin_memory": True}
        zero: dict[str, Any] = {"stage": self.stage, "contiguous_gradients": True, "overlap_comm": True}
        zero |= {"offload_optimizer": on_cpu} | ({"offload_param": on_cpu} if self.stage == 3 else {})
        config = {
            "train_micro_batch_size_per_gpu": batch_size,
            "gradient_accumulation_steps": accumulation,
            "bf16": {"enabled": dtype == "bf16"},
            "fp16": {"enabled": dtype == "fp16"},
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
            "gradient_clipping": MAX_GRAD_NORM,
            "steps_per_print": 10**9,
        }
        self._device = device
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of one micro-batch."""
        loss: torch.Tensor = self._engine(**batch).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Add the micro-batch's share of the gradients."""
        self._engine.backward(loss)

    def step(self, is_boundary: bool) -> None:
        """After each backward; DeepSpeed counts micro-batches itself."""
        self._engine.step()

    def settle(self) -> None:
        """Wait for the device."""
        synchronize(self._device)

    def row(self) -> dict[str, Any]:
        """How large the model is."""
        return {"num_parameters": self._num_parameters}


class DeepSpeedOffload(DeepSpeedZero):
    """The same within the work's limits."""

    def __init__(self, work: Work, dtype: str, device: torch.device) -> None:
        cap_vram(work.vram, device)
        model = plain_model(work, dtype, torch.device("cpu") if self.stage == 3 else device, device)
        super().__init__(model, dtype, work.batch_size, work.accumulation, device)


class DeepSpeedStage3(DeepSpeedOffload):
    """Stage 3: the weights are streamed as well."""

    stage = 3


ENGINES: dict[str, type[Offloadkit] | type[Baseline] | type[DeepSpeedOffload]] = {
    "offloadkit": Offloadkit,
    "baseline": Baseline,
    "zero2": DeepSpeedOffload,
    "zero3": DeepSpeedStage3,
}


def join_group_of_one() -> None:
    """Set the variables that torch.distributed reads, for a world of this one process, and find ninja beside Python."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def synchronize(device: torch.device) -> None:
    """Wait for everything that was started on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
