"""One training script, with DeepSpeed's import or with ours, on one GPU or several.

    python -m benchmarks.same_script deepspeed                                 # one GPU
    torchrun --nproc-per-node=2 -m benchmarks.same_script deepspeed            # two
    torchrun --nproc-per-node=2 -m benchmarks.same_script offloadkit --vram 24GiB

T5-3B, 8 x (512+128) tokens a GPU and step, random weights and tokens. Rank 0 prints a JSON line. For DeepSpeed the
ranks are bound to cores, as its launcher would do it; its budget is what is free.
"""

from __future__ import annotations

import argparse
import json
import os
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from offloadkit import hardware
from offloadkit.device.process_memory import DeviceMemory, let_segments_grow
from offloadkit.distributed import world
from offloadkit.engines.deepspeed_process import prepare
from offloadkit.engines.timing import Clock
from offloadkit.engines.work import Work, plain_model, random_steps


def config(work: Work, vram: str | None, stage: int) -> dict[str, Any]:
    """The ds_config.json that both read. DeepSpeed overlooks the section "offloadkit"."""
    in_ram = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": work.batch_size,
        "gradient_accumulation_steps": work.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.0}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": torch.cuda.is_available()},
        "zero_optimization": {"stage": stage, "offload_optimizer": in_ram, "overlap_comm": True},
        "offloadkit": {"vram": vram},
    }


def main() -> None:
    """Train some steps and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=("deepspeed", "offloadkit"))
    parser.add_argument("--model", default="t5-3b")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--vram", help="offloadkit's budget a GPU; default: what is free")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=4, help="steps before those that are timed, from 1")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    world.join()
    device = hardware.default_device()
    let_segments_grow(device)
    memory = DeviceMemory(device)
    work = Work(options.model, 8, 512, 128, accumulation=options.accumulation, seed=world.rank())
    (batches,) = random_steps(work, device)
    model = plain_model(Work(options.model, 8, 512, 128), work.dtype_on(device), device, device)
    if options.package == "deepspeed":
        prepare(on_cpu_steps=True)
        import deepspeed as package
    else:
        import offloadkit as package  # type: ignore[no-redef]
    settings = config(work, options.vram, options.stage)
    engine, *_ = package.initialize(model=model, model_parameters=model.parameters(), config=settings)
    clock = Clock(device.type == "cuda")
    for _ in range(options.warmup + options.steps):
        for batch in batches:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
        memory.sample()
        clock.mark("step")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = median(each for _, each in clock.phases()[options.warmup - 1 :])
    tokens = work.rows * (512 + 128) * world.size()
    row = {"package": options.package, "model": options.model, "ranks": world.size(), "seconds": seconds}
    row |= {"tokens_per_second": tokens / seconds, "loss": float(loss), "vram_gib": memory.peak_bytes / 2**30}
    row |= {"rank_0_peak_ram_gib": hardware.process_peak_ram_bytes() / 2**30, "vram_budget": options.vram}
    if world.rank() == 0:
        print(json.dumps(row), flush=True)
    if hasattr(engine, "destroy"):
        engine.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)  # a peer's threads may hang an orderly exit


if __name__ == "__main__":
    main()
