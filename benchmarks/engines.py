"""offloadkit, the baselines and the peers behind one small interface, each set up as its users are told to."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from benchmarks.workloads import (
    Workload,
    build_lazily,
    checkpoint_activations,
    use_our_compute,
)
from offloadkit.compare.engines import AllOnDevice, DeepSpeedZero, synchronize
from offloadkit.compare.memory import cap_vram
from offloadkit.compare.steps import Engine as MeasuredEngine
from offloadkit.compare.work import LEARNING_RATE, MAX_GRAD_NORM, Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Engine(MeasuredEngine, Protocol):
    """What the measuring loop calls. `seconds` holds parts of the construction that are worth a column of their own."""

    seconds: dict[str, float]


class _OffloadkitLoop:
    engine: Any

    def forward(self, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = self.engine(**batch).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self, is_boundary: bool) -> None:
        self.engine.step()

    def settle(self) -> None:
        self.engine.synchronize()


class Offloadkit(_OffloadkitLoop):
    """`offloadkit.OffloadEngine`: fp32 states in pinned RAM, clipping, an update hidden under the next forward."""

    def __init__(self, model: PreTrainedModel, work: Workload, device: torch.device) -> None:
        from offloadkit.config import OffloadConfig
        from offloadkit.engine import OffloadEngine

        use_our_compute(model, work)
        config = OffloadConfig(
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
            gradient_accumulation=work.accumulation,
            activation_checkpointing=work.checkpointing,
        )
        self.engine = OffloadEngine(model, config, device=device)
        self.seconds = {"pin": self.engine.pinning_seconds}


class Planned(_OffloadkitLoop):
    """`offloadkit.OffloadEngine` as `finetune` builds it: by a plan within a budget of VRAM, its weights read, here
    drawn, layer by layer, the loss in chunks."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        """
        Raises:
            DoesNotFitError: the budget is too small.
        """
        from offloadkit.config import OffloadConfig
        from offloadkit.engine import OffloadEngine
        from offloadkit.hf.chunked_loss import compute_loss_in_chunks
        from offloadkit.planning import check_fits, plan

        self.model, draw = build_lazily(work, device)
        config = OffloadConfig(
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
            gradient_accumulation=work.accumulation,
            precision=work.precision,  # type: ignore[arg-type]
            working_dtype=work.dtype,  # type: ignore[arg-type]
            vram=f"{work.vram_budget_gib}GiB",
            ram=f"{work.ram_budget_gib}GiB" if work.ram_budget_gib else None,
            disk=work.disk or None,
            compile_blocks=work.compile_blocks,
        )
        self.plan = plan(
            self.model,
            batch_size=work.batch_size,
            max_input_length=work.tokens,
            max_target_length=work.target_tokens or None,
            offload=config,
        )
        check_fits(self.plan)
        cap_vram(self.plan.budgets["vram"], device)
        compute_loss_in_chunks(self.model)
        self.engine = OffloadEngine(self.model, config, device=device, plan=self.plan, materialise=draw)
        self.seconds = {"pin": self.engine.pinning_seconds}

    def row(self) -> dict[str, Any]:
        """What was planned, and which placements were chosen."""
        from collections import Counter

        seconds, basis = self.plan.seconds, self.plan.basis
        assert seconds is not None
        assert basis is not None
        assert basis.hardware is not None
        return {
            "planned": {
                "vram_bytes": self.plan.total_bytes("vram"),
                "ram_bytes": self.plan.total_bytes("ram"),
                "disk_bytes": self.plan.total_bytes("disk"),
                "step_seconds": seconds.step,
                "update_seconds": seconds.update_phase,
                "backward_seconds": seconds.backward_phase,
                "busy_seconds": dict(seconds.busy),
                "large_gpu_seconds": self.plan.large_gpu_seconds,
                "tiers": self.plan.tiers,
                "placements": {str(where): num for where, num in Counter(self.plan.placements).items()},
                "hardware": asdict(basis.hardware),
            }
        }


class OnGpu(AllOnDevice):
    """Plain HuggingFace: everything on the device, bf16 weights, fp32 master weights, fused AdamW, clipping."""

    our_compute = False

    def __init__(self, model: PreTrainedModel, work: Workload, device: torch.device) -> None:
        checkpoint_activations(model, work)
        if self.our_compute:
            use_our_compute(model, work)
        super().__init__(model.to(device), work.accumulation, device)  # type: ignore[arg-type]
        self.seconds: dict[str, float] = {}


class OnGpuOurCompute(OnGpu):
    """The same with offloadkit's compute path: what remains between this and offloadkit is the price of offloading."""

    our_compute = True


class TorchaoOffload:
    """torchao's CPUOffloadOptimizer on the bf16 parameters: no master weights, and no clipping (it cannot)."""

    master_weights = False

    def __init__(self, model: PreTrainedModel, work: Workload, device: torch.device) -> None:
        from torchao.optim import CPUOffloadOptimizer

        checkpoint_activations(model, work)
        model = model.float() if self.master_weights else model
        self.model, self.num_micro_batches, self.device = model.to(device), work.accumulation, device
        self.optimizer = CPUOffloadOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            offload_gradients=work.accumulation == 1,  # with it, torchao cannot accumulate
            lr=LEARNING_RATE,
            weight_decay=0.0,
            fused=True,
        )
        self.seconds: dict[str, float] = {}

    def forward(self, batch: Batch) -> torch.Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.master_weights):
            loss: torch.Tensor = self.model(**batch).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.num_micro_batches).backward()

    def step(self, is_boundary: bool) -> None:
        if is_boundary:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def settle(self) -> None:
        synchronize(self.device)


class TorchaoOffloadFp32(TorchaoOffload):
    """The same on fp32 parameters under autocast: exact states, twice the weights and gradients on the device."""

    master_weights = True


class DeepSpeedOffload(DeepSpeedZero):
    """DeepSpeed ZeRO with the optimizer (stage 3: the weights too) in pinned RAM, overlapped copies, clipping."""

    def __init__(self, model: PreTrainedModel, work: Workload, device: torch.device) -> None:
        checkpoint_activations(model, work)
        self.seconds = {"compile": build_deepspeed_adam()}
        super().__init__(model, "bf16", work.batch_size, work.accumulation, device)


class DeepSpeedStage3(DeepSpeedOffload):
    """Stage 3: the weights are streamed as well."""

    stage = 3


ENGINES: dict[str, Callable[[PreTrainedModel, Workload, torch.device], Engine]] = {
    "offloadkit": Offloadkit,
    "gpu": OnGpu,
    "gpu-ours": OnGpuOurCompute,
    "zero2": DeepSpeedOffload,
    "zero3": DeepSpeedStage3,
    "ao": TorchaoOffload,
    "ao-amp": TorchaoOffloadFp32,
}


def weights_start_on(engine: str, work: Workload, device: torch.device) -> torch.device:
    """Where the model is built: in RAM for engines that stream weights and under a VRAM cap, else on the device."""
    return torch.device("cpu") if engine == "zero3" or work.vram_cap_gib else device


def build_deepspeed_adam() -> float:
    """Have DeepSpeed compile its CPU Adam now, once a machine, so that no timing holds it. Seconds it took."""
    started = time.perf_counter()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja lies beside python
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load(verbose=False)
    return time.perf_counter() - started
