"""DeepSpeed's ZeRO stages 2 and 3 with the optimizer in pinned RAM, on one rank or several."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from offloadkit.device.process_memory import VramCap
from offloadkit.engines.engine import LEARNING_RATE, MAX_GRAD_NORM, Engine
from offloadkit.engines.work import Work, plain_model
from offloadkit.planner import Dtype


class Zero2(Engine):
    """Gradients and AdamW's states are offloaded; copies overlap; clipping."""

    stage = 2
    offloads = True
    """Whether states are in RAM, and stepped by DeepSpeed's AdamW for CPUs; else torch's fused AdamW steps them."""

    def __init__(self, work: Work, dtype: Dtype, device: torch.device) -> None:
        VramCap(work.vram, device)
        model = plain_model(work, dtype, torch.device("cpu") if self.stage == 3 else device, device)
        import deepspeed
        from deepspeed.ops.op_builder import CPUAdamBuilder

        self._num_parameters, self._device = model.num_parameters(), device
        if self.offloads:
            with building("cpu_adam"):
                CPUAdamBuilder().load(verbose=False)
        if "RANK" not in os.environ:
            _join_group_of_one()
        on_cpu = {"device": "cpu", "pin_memory": True}
        zero: dict[str, Any] = {"stage": self.stage, "contiguous_gradients": True, "overlap_comm": True}
        if self.offloads:
            zero |= {"offload_optimizer": on_cpu} | ({"offload_param": on_cpu} if self.stage == 3 else {})
        if work.bucket_elements is not None:
            gathered = "stage3_prefetch_bucket_size" if self.stage == 3 else "allgather_bucket_size"
            zero |= {"reduce_bucket_size": work.bucket_elements, gathered: work.bucket_elements}
        adamw: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": 0.0}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": work.batch_size,
            "gradient_accumulation_steps": work.accumulation,
            "bf16": {"enabled": dtype == "bf16"},
            "fp16": {"enabled": dtype == "fp16"},
            "zero_optimization": zero,
            "gradient_clipping": MAX_GRAD_NORM,
            "steps_per_print": 10**9,
        }
        given: dict[str, Any] = {"model_parameters": model.parameters()}
        if self.offloads:
            config["optimizer"] = {"type": "AdamW", "params": adamw}
        else:
            given["optimizer"] = torch.optim.AdamW(model.parameters(), **adamw, fused=True)
        self._model, *_ = deepspeed.initialize(model=model, config=config, **given)


class Zero3(Zero2):
    """Stage 3: the weights are in RAM too, and streamed."""

    stage = 3


def _join_group_of_one() -> None:
    """Set the variables that torch.distributed reads, for a world of this one process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


@contextmanager
def building(extension: str) -> Iterator[None]:
    """While a torch extension is built: ninja is found beside Python, and no other process builds the same one.

    torch's own lock is a file that a killed build leaves behind; the next build would wait for ever. This lock ends
    with its process.
    """
    from torch.utils.cpp_extension import _get_build_directory

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    folder = Path(_get_build_directory(extension, verbose=False))
    with (folder / "offloadkit.lock").open("w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield
