"""offloadkit, the baselines and the peers behind one small interface, each set up as its users are told to."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from benchmarks.workloads import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    Batch,
    Workload,
    build_lazily,
    checkpoint_activations,
    use_our_compute,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Engine(Protocol):
    """What the measuring loop calls. `seconds` holds parts of the construction that are worth a column of their own."""

    seconds: dict[str, float]

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of one micro-batch."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add the micro-batch's share of the gradients."""

    def step(self, is_boundary: bool) -> None:
        """After each backward; updates the weights where `is_boundary`."""

    def settle(self) -> None:
        """Wait for everything that a step left running."""


class _EngineLoop:
    """DeepSpeed's loop, which offloadkit shares."""

    engine: Any

    def forward(self, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = self.engine(**batch).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self, is_boundary: bool) -> None:
        self.engine.step()


class _OffloadkitLoop(_EngineLoop):
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
        )
        self.plan = plan(
            self.model,
            batch_size=work.batch_size,
            max_input_length=work.tokens,
            max_target_length=work.target_tokens or None,
            offload=config,
        )
        check_fits(self.plan)
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


class OnGpu:
    """Plain HuggingFace: everything on the device, bf16 weights, fp32 master weights, fused AdamW, clipping."""

    our_compute = False

    def __init__(self, model: PreTrainedModel, work: Workload, device: torch.device) -> None:
        checkpoint_activations(model, work)
        if self.our_compute:
            use_our_compute(model, work)
        self.model, self.num_micro_batches = model.to(device), work.accumulation
        self.weights = list(model.parameters())
        self.masters = [weight.detach().float().requires_grad_() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        self.seconds: dict[str, float] = {}

    def forward(self, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.num_micro_batches).backward()

    def step(self, is_boundary: bool) -> None:
        if not is_boundary:
            return
        torch.nn.utils.clip_grad_norm_(self.weights, MAX_GRAD_NORM)
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)

    def settle(self) -> None:
        _synchronize()


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
        _synchronize()


class TorchaoOffloadFp32(TorchaoOffload):
    """The same on fp32 parameters under autocast: exact states, twice the weights and gradients on the device."""

    master_weights = True


class DeepSpeedOffload(_EngineLoop):
    """DeepSpeed ZeRO with the optimizer (stage 3: the weights too) in pinned RAM, overlapped copies, clipping."""

    stage = 2

    def __init__(self, model: PreTrainedModel, work: Workload, device: torch.device) -> None:
        checkpoint_activations(model, work)
        join_group_of_one()
        self.seconds = {"compile": build_deepspeed_adam()}
        import deepspeed

        on_cpu = {"device": "cpu", "pin_memory": True}
        zero: dict[str, Any] = {
            "stage": self.stage,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "offload_optimizer": on_cpu,
        }
        if self.stage == 3:
            zero["offload_param"] = on_cpu
        config = {
            "train_micro_batch_size_per_gpu": work.batch_size,
            "gradient_accumulation_steps": work.accumulation,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
            "gradient_clipping": MAX_GRAD_NORM,
            "steps_per_print": 10**9,
        }
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def settle(self) -> None:
        _synchronize()


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


def join_group_of_one() -> None:
    """Set the variables that torch.distributed reads, for a world of this one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def build_deepspeed_adam() -> float:
    """Have DeepSpeed compile its CPU Adam now, once a machine, so that no timing holds it. Seconds it took."""
    started = time.perf_counter()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja lies beside python
    from deepspeed.ops.op_builder import CPUAdamBuilder

    CPUAdamBuilder().load(verbose=False)
    return time.perf_counter() - started


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
