"""The peers on several GPUs in their usual configuration, offloadkit with hashes of its weights, and the bytes that a
rank receives."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from benchmarks.ours import Ours
from benchmarks.same_numbers import be_deterministic, sha256
from offloadkit.device.process_memory import VramCap
from offloadkit.doors.engines.deepspeed import Zero2, Zero3
from offloadkit.doors.engines.engine import LEARNING_RATE, MAX_GRAD_NORM, Engine, EngineFactory
from offloadkit.doors.engines.work import Batch, Work, plain_model, random_steps
from offloadkit.offload.layers import repeated_blocks
from offloadkit.planner import Dtype

_SPARE_BYTES = 1 << 29
"""VRAM that stays free in the search for DDP's largest batch, because some batches take more."""
_MOST_TIMES = 32
"""Limit of DDP's largest batch, as a multiple of the case's batch."""


class _Stepped(Engine):
    """A model that sums gradients over ranks: at the end of a window they are clipped and a torch optimizer steps."""

    _optimizer: torch.optim.Optimizer
    _num_micro_batches: int

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._num_micro_batches).backward()  # type: ignore[no-untyped-call]

    def step(self, is_boundary: bool) -> None:
        if is_boundary:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
            self._optimizer.step()
            self._optimizer.zero_grad()


class Fsdp2(_Stepped):
    """`fully_shard` of each block and of the rest: all in VRAM, computing and reducing in bf16, fp32 master weights."""

    def __init__(self, work: Work, dtype: Dtype, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        VramCap(work.vram, device)
        self._model = plain_model(replace(work, recomputed=False), "fp32", device, device)
        self._num_parameters = self._model.num_parameters()
        self._num_micro_batches, self._device = work.accumulation, device
        blocks: list[Any] = [block for _, block in repeated_blocks(self._model)]
        if work.recomputed:
            for block in blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        half = torch.bfloat16 if dtype == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for module in (*blocks, self._model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        self._optimizer = _adamw(self._model)


class Ddp(_Stepped):
    """DistributedDataParallel with the weights' dtype for gradients and AdamW's states, and no master weights.

    Attributes:
        batch_size: the largest number of rows in a micro-batch that fits, in place of the work's.
    """

    def __init__(self, work: Work, dtype: Dtype, device: torch.device) -> None:
        VramCap(work.vram, device)
        model: Any = plain_model(work, dtype, device, device)
        self._num_parameters, self._device = model.num_parameters(), device
        self._num_micro_batches, self._num_forwards = work.accumulation, 0
        devices = [device] if device.type == "cuda" else None
        self._model = torch.nn.parallel.DistributedDataParallel(model, devices, gradient_as_bucket_view=True)
        self._optimizer = _adamw(self._model)
        self.batch_size = self._largest(work)

    def forward(self, batch: Batch) -> torch.Tensor:
        self._num_forwards += 1
        self._model.require_backward_grad_sync = self._num_forwards % self._num_micro_batches == 0
        return super().forward(batch)

    def _largest(self, work: Work) -> int:
        """The largest number of rows that fits on every rank, to an eighth. Ranks do not communicate during the trials.

        Raises:
            torch.OutOfMemoryError: a single row does not fit.
        """
        for at in range(work.accumulation):  # allocates gradients and states
            self.backward(self.forward(_one_batch(work, 1, self._device)))
            self.step(at + 1 == work.accumulation)
        spare = torch.empty(_SPARE_BYTES if self._device.type == "cuda" else 0, dtype=torch.uint8, device=self._device)
        most = torch.tensor([largest(_MOST_TIMES * work.batch_size, partial(self._fits, work))], device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MIN)
        del spare
        if int(most) == 0:
            raise torch.OutOfMemoryError("one row beside the weights, gradients and states of DDP")
        return int(most)

    def _fits(self, work: Work, rows: int) -> bool:
        try:
            with self._model.no_sync():
                self._model(**_one_batch(work, rows, self._device)).loss.backward()
        except torch.OutOfMemoryError:
            fits = False
        else:
            fits = True
        self._optimizer.zero_grad()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return fits


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that `fits`, to an eighth; 0 if 1 does not. Small numbers are tried first."""
    low = 0
    while low < most:
        if not fits(following := min(most, max(1, 2 * low))):
            break
        low = following
    else:
        return low
    high = following
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Zero2OnGpu(Zero2):
    """ZeRO-2 with its states in VRAM, stepped by torch's fused AdamW: DeepSpeed's own needs nvcc."""

    offloads = False


class Hashed(Ours):
    """offloadkit with deterministic kernels. Its row adds the sha256 of all trained weights and the last gradient norm,
    and closes the engine."""

    def __init__(self, work: Work, dtype: Dtype, device: torch.device) -> None:
        num_threads = torch.get_num_threads()
        be_deterministic()
        torch.set_num_threads(num_threads)
        super().__init__(work, dtype, device)

    def row(self) -> dict[str, Any]:
        found = super().row() | {"gradient norm": self._model.grad_norm()}
        self._model.close()
        return found | {"weights": sha256(dict(self._model.module.named_parameters()))}


def _one_batch(work: Work, rows: int, device: torch.device) -> Batch:
    return random_steps(replace(work, batch_size=rows, accumulation=1), device)[0][0]


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)


ENGINES: dict[str, EngineFactory] = {
    "offloadkit": Ours,
    "hashed": Hashed,
    "fsdp2": Fsdp2,
    "ddp": Ddp,
    "zero2": Zero2,
    "zero3": Zero3,
    "zero2-on-gpu": Zero2OnGpu,
}


class Received(TorchDispatchMode):
    """While it is active, counts the bytes that this rank receives in torch.distributed, as in ring algorithms.

    With N ranks an all-reduce of B bytes receives 2B (N - 1) / N, a gather to B bytes, or a reduce-scatter from B
    bytes, B (N - 1) / N. A broadcast or reduction counts with its mean over the ranks, B (N - 1) / N.

    Attributes:
        num_bytes: by operation, such as "allreduce".
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func._opname.strip("_")
            times = 2 if "allreduce" in name else 0 if name in ("barrier", "send", "recv", "monitored_barrier") else 1
            largest = max((_bytes_in(each) for each in args), default=0)  # a gather's output, a reduce-scatter's input
            self.num_bytes[name] += times * largest * (self._size - 1) // self._size
        return func(*args, **(kwargs or {}))


def _bytes_in(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_bytes_in, value)) if isinstance(value, list | tuple) else 0
