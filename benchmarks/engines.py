"""offloadkit, the baselines and the peers behind one small interface, each set up as its users are told to."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from benchmarks.workloads import (
    Workload,
    build_lazily,
    checkpoint_activations,
    is_t5,
    use_our_compute,
)
from offloadkit.device.process_memory import cap_vram
from offloadkit.engines.engines import AllOnDevice, DeepSpeedZero, synchronize
from offloadkit.engines.timing import Engine as MeasuredEngine
from offloadkit.engines.work import LEARNING_RATE, MAX_GRAD_NORM, Batch

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
        from offloadkit.hf.loss import compute_loss_in_chunks
        from offloadkit.hf.patches import fuse
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
        fuse(self.model, compiled=work.compile_blocks)
        self.engine = OffloadEngine(self.model, config, device=device, plan=self.plan, materialise=draw)
        self.seconds = {"pin": self.engine.pinning_seconds}
        self._states = self.engine._placed.states
        self.may_move = any(state.switchable for state in self._states)
        self._num_on_gpu: list[int] = []

    def step(self, is_boundary: bool) -> None:
        if is_boundary:  # forward has waited for the last update, and layers move when the next one starts
            self._num_on_gpu.append(self._count_on_gpu())
        super().step(is_boundary)

    def _count_on_gpu(self) -> int:
        return sum(state.on_gpu for state in self._states)

    def each_step(self) -> dict[str, list[float]]:
        """Of all settled steps in order, the first one too: seconds of AdamW on the CPU and on the GPU, and how many of
        the layers the GPU stepped."""
        seconds = [record.seconds for record in self.engine.telemetry.records]
        found: dict[str, list[float]] = {
            name: [round(step.get(name, 0.0), 4) for step in seconds] for name in ("cpu_step", "gpu_step")
        }
        return found | {"layers_on_gpu": [*self._num_on_gpu[1:], self._count_on_gpu()]}

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


class RoundPipe:
    """RoundPipe on a Llama: weights, gradients and fp32 states in pinned RAM, layers streamed through VRAM and
    recomputed, an Adam on the CPU beside the next step, which therefore computes with weights one step old; no
    clipping."""

    def __init__(self, model: PreTrainedModel, work: Workload, device: torch.device) -> None:
        self.seconds = {"compile": build_roundpipe_adam()}
        from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
        from roundpipe.models import llama
        from roundpipe.optim import Adam

        llama.create_causal_mask = _by_todays_names(llama.create_causal_mask)
        self._num_micro_batches, self._device = work.accumulation, device
        self._num_parts = 2 if work.batch_size % 2 == 0 else 1  # it computes on one while the other one moves
        self._model: Any = wrap_model_to_roundpipe(
            model,
            use_sequential_preset=True,
            optim_dtype=torch.float32,
            model_run_config=RoundPipeRunConfig(num_microbatch=self._num_parts, recompute_grain="layer"),
        )
        self._optimizer = Adam(self._model.optim_parameters(), lr=LEARNING_RATE, weight_decay=0.0)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Forward and backward: it has no call for either alone that streams as well."""
        share = 1 / (self._num_parts * self._num_micro_batches)
        inputs = {**batch, "attention_mask": torch.ones_like(batch["input_ids"]), "return_logits": False}
        loss: torch.Tensor = self._model.forward_backward(
            input_kwargs=inputs, loss_fn=lambda output, _: output.loss * share
        )
        return loss * self._num_micro_batches

    def backward(self, loss: torch.Tensor) -> None:
        pass

    def step(self, is_boundary: bool) -> None:
        if is_boundary:
            self._model.step(self._update)

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def settle(self) -> None:
        from roundpipe.optim_stream import synchronize_optim

        synchronize_optim()
        synchronize(self._device)


def _by_todays_names(create_causal_mask: Callable[..., Any]) -> Callable[..., Any]:
    """RoundPipe 0.1.1 calls it with arguments as transformers named them before 5.x."""

    def created(*, input_embeds: torch.Tensor, cache_position: Any = None, **others: Any) -> Any:
        return create_causal_mask(inputs_embeds=input_embeds, **others)

    return created


ENGINES: dict[str, Callable[[PreTrainedModel, Workload, torch.device], Engine]] = {
    "offloadkit": Offloadkit,
    "gpu": OnGpu,
    "gpu-ours": OnGpuOurCompute,
    "zero2": DeepSpeedOffload,
    "zero3": DeepSpeedStage3,
    "ao": TorchaoOffload,
    "ao-amp": TorchaoOffloadFp32,
    "roundpipe": RoundPipe,
}
PACKAGES = {
    "zero2": "deepspeed",
    "zero3": "deepspeed",
    "ao": "torchao",
    "ao-amp": "torchao",
    "roundpipe": "roundpipe",
}
"""What the peers are imported from."""


def check_runs(engine: str, work: Workload, device: torch.device) -> None:
    """
    Raises:
        ValueError: the engine cannot do the work, or not on the device.
        ModuleNotFoundError: its package is missing.
    """
    if engine == "roundpipe" and is_t5(work.model):
        raise ValueError(
            f"RoundPipe has presets for Llama, Qwen3 and gpt-oss, none for T5, got {work.model}: "
            "take --model llama-3.2-3b or leave roundpipe out"
        )
    _check_installed(engine)
    if engine == "roundpipe" and device.type != "cuda":
        raise ValueError("RoundPipe needs a CUDA GPU, there is none here: leave roundpipe out")


def _check_installed(engine: str) -> None:
    package = PACKAGES.get(engine)
    if package and importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"engine {engine} needs the package {package}, which is not installed: pip install {package}"
        )


def weights_start_on(engine: str, work: Workload, device: torch.device) -> torch.device:
    """Where the model is built: in RAM for engines that stream weights and under a VRAM cap, else on the device."""
    return torch.device("cpu") if engine in ("zero3", "roundpipe") or work.vram_cap_gib else device


def batches_start_on(engine: str, device: torch.device) -> torch.device:
    """Where the batches lie: RoundPipe sends them itself."""
    return torch.device("cpu") if engine == "roundpipe" else device


def build_deepspeed_adam() -> float:
    """Have DeepSpeed compile its CPU Adam now, once a machine, so that no timing holds it. Seconds it took."""
    started = time.perf_counter()
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    from deepspeed.ops.op_builder import CPUAdamBuilder

    with _building("cpu_adam"):
        CPUAdamBuilder().load(verbose=False)
    return time.perf_counter() - started


def build_roundpipe_adam() -> float:
    """The same for RoundPipe's."""
    started = time.perf_counter()
    from roundpipe.optim.optim_builder import get_cpu_flags_hash, load_optim_function

    with _building(f"roundpipe_optim_adam_{get_cpu_flags_hash()}"):
        load_optim_function("adam")
    return time.perf_counter() - started


@contextmanager
def _building(extension: str) -> Iterator[None]:
    """While a torch extension is built: ninja is found beside python, and no other benchmark builds the same one.

    torch's own lock is a file, which a build that was killed leaves behind, and whoever comes next would wait for ever;
    this one ends with its process.
    """
    from torch.utils.cpp_extension import _get_build_directory

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    folder = Path(_get_build_directory(extension, verbose=False))
    with (folder / "benchmarks.lock").open("w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield


BUILDS = {"zero2": build_deepspeed_adam, "zero3": build_deepspeed_adam, "roundpipe": build_roundpipe_adam}


def build_ahead(names: Sequence[str]) -> None:
    """Compile what engines compile at their first use: `python -m benchmarks.engines zero2 roundpipe`.

    Raises:
        SystemExit: an engine compiles nothing, or its package is missing.
    """
    for name in names:
        if name not in BUILDS:
            raise SystemExit(f"engines that compile something are {', '.join(BUILDS)}, got {name}")
        try:
            _check_installed(name)
        except ModuleNotFoundError as error:
            raise SystemExit(str(error)) from error
        print(f"{name}: built in {BUILDS[name]():.1f} s", flush=True)


if __name__ == "__main__":
    build_ahead(sys.argv[1:])
