"""One training script on one or several GPUs, with DeepSpeed's import or offloadkit's.

    python -m benchmarks.same_script both --ranks 1 2 --turns 2 --out table.csv   # each by both, in turn; appends rows
    python -m benchmarks.same_script both --model t5-tiny --steps 2 --device cpu --out table.csv        # a try
    torchrun --nproc-per-node=2 -m benchmarks.same_script offloadkit --vram 24GiB                       # one of them

T5-3B, 8 x (512+128) tokens a GPU and step, random weights and tokens. Rank 0 prints a JSON line, which "both" turns
into a row: case same-script-MODEL, or same-script-MODEL-N for N ranks. For DeepSpeed the ranks are bound to cores, as
by its launcher; it may use all free memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import table
from benchmarks.cases import config_of
from benchmarks.run import git_commit
from offloadkit import __version__
from offloadkit.deepspeed.process import prepare
from offloadkit.device.process_memory import DeviceMemory, let_segments_grow
from offloadkit.distributed import world
from offloadkit.doors.engines.runner import version
from offloadkit.doors.engines.timing import Clock
from offloadkit.doors.engines.work import Work, plain_model, random_steps
from offloadkit.facts import hardware
from offloadkit.facts.units import parse_bytes

PACKAGES = ("deepspeed", "offloadkit")
ROWS, INPUTS, TARGETS = 8, 512, 128
"""Sizes of a micro-batch."""


def config(work: Work, vram: str | None, stage: int) -> dict[str, Any]:
    """The ds_config.json for both packages. DeepSpeed ignores the section "offloadkit"."""
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


def measured(package: str, num_ranks: int, options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """The output of rank 0 in fresh processes, or {"reason": ...} if it has none."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += ["-m", "benchmarks.same_script", package, "--model", str(model), "--vram", options.vram or ""]
    for name in ("stage", "accumulation", "warmup", "steps"):
        command += [f"--{name}", str(getattr(options, name))]
    environment = os.environ | {"NCCL_NVLS_ENABLE": "0", "DS_SKIP_CUDA_CHECK": "1"}
    if options.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    rows = [line for line in done.stdout.splitlines() if line.startswith('{"package"')]
    if not rows:
        return {"reason": f"exit status {done.returncode}"}
    found: dict[str, Any] = json.loads(rows[-1])
    return found


def row_of(package: str, num_ranks: int, options: argparse.Namespace, turns: list[dict[str, Any]]) -> table.Row:
    """The row of several turns: seconds over all turns, the rest of the last turn."""
    last = turns[-1]
    case = f"same-script-{options.model}" + (f"-{num_ranks}" if num_ranks > 1 else "")
    row: table.Row = {"case": case, "engine": package, "model": options.model, "date": table.now()}
    row |= {"commit": options.commit, "batch_size": ROWS, "input_length": INPUTS, "target_length": TARGETS}
    row |= {"accumulation": options.accumulation, "mask": "full", "warmup_steps": options.warmup}
    if failed := next((turn["reason"] for turn in turns if "reason" in turn), None):
        return row | {"status": "failed", "reason": failed}
    seconds = [turn["seconds"] for turn in turns]
    row |= {"seconds": median(seconds), "min_seconds": min(seconds), "max_seconds": max(seconds)}
    row |= {"status": "measured", "turns": len(turns), "steps": options.steps, "dtype": last["dtype"]}
    row |= {"num_parameters": last["num_parameters"], "tokens": last["tokens"], "vram_bytes": last["vram_bytes"]}
    row |= table.of_machine(last["machine"]) | last["versions"] | {"vram_budget_bytes": last["vram_budget"]}
    figures = {"GPUs": num_ranks, "tokens/s": round(last["tokens"] / row["seconds"]), "loss": last["loss"]}
    return row | {"figures": figures | {"peak RAM of rank 0": last["ram_bytes"]}}


def both(options: argparse.Namespace) -> None:
    """Each number of ranks by both packages in turn; rows are appended at the end."""
    turns: dict[tuple[int, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config_of(options.model).save_pretrained(folder)
        for _ in range(options.turns):
            for num_ranks in options.ranks:
                for package in options.engines:
                    found = measured(package, num_ranks, options, Path(folder))
                    turns.setdefault((num_ranks, package), []).append(found)
                    print(f"{package}, {num_ranks} ranks: {found.get('seconds') or found['reason']}", flush=True)
    made = [row_of(package, number, options, each) for (number, package), each in turns.items()]
    table.write([*table.read(options.out), *made], options.out)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=("deepspeed", "offloadkit", "both"))
    parser.add_argument("--model", default="t5-3b")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--vram", help="offloadkit's budget a GPU; default: what is free")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=4, help="steps before those that are timed, from 1")
    parser.add_argument("--steps", type=int, default=6)
    many = parser.add_argument_group("of both")
    many.add_argument("--ranks", type=int, nargs="+", default=(1,), help="numbers of GPUs")
    many.add_argument("--engines", nargs="+", choices=PACKAGES, default=PACKAGES)
    many.add_argument("--turns", type=int, default=1, help="fresh processes for each")
    many.add_argument("--device", choices=("cpu",), help="cpu hides the GPUs")
    many.add_argument("--commit", help="commit to write down where git is missing")
    many.add_argument("--out", type=Path, default=table.PATH, help="the table (default: benchmarks/results.csv)")
    options = parser.parse_args(arguments)
    if options.package == "both":
        options.commit = options.commit or git_commit()
        both(options)
    else:
        train(options)


def train(options: argparse.Namespace) -> None:
    """Train some steps in this process, one of the ranks, and print the measurements. The process ends."""
    world.join()
    device = hardware.default_device()
    let_segments_grow(device)
    memory = DeviceMemory(device)
    work = Work(options.model, ROWS, INPUTS, TARGETS, accumulation=options.accumulation, seed=world.rank())
    (batches,) = random_steps(work, device)
    model = plain_model(Work(options.model, ROWS, INPUTS, TARGETS), work.dtype_on(device), device, device)
    size = sum(each.numel() for each in model.parameters())
    if options.package == "deepspeed":
        prepare(on_cpu_steps=True)
        import deepspeed as package
    else:
        import offloadkit as package  # type: ignore[no-redef]
    settings = config(work, options.vram or None, options.stage)
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
    tokens = work.rows * (INPUTS + TARGETS) * world.size()
    row = {"package": options.package, "model": options.model, "ranks": world.size(), "seconds": seconds}
    row |= {"tokens": tokens, "tokens_per_second": tokens / seconds, "loss": loss.item(), "num_parameters": size}
    row |= {"vram_bytes": memory.peak_bytes, "ram_bytes": hardware.process_peak_ram_bytes()}
    row |= {"vram_budget": parse_bytes(options.vram) if options.vram else None, "dtype": work.dtype_on(device)}
    row["machine"] = dict(hardware.describe_machine(device))
    row["versions"] = {name: version(name) for name in ("torch", "transformers")} | {"offloadkit": __version__}
    if options.package == "deepspeed":
        row["versions"]["peer"] = f"deepspeed {version('deepspeed')}"
    if world.rank() == 0:
        print(json.dumps(row), flush=True)
    if hasattr(engine, "destroy"):
        engine.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)  # a peer's threads may hang an orderly exit


if __name__ == "__main__":
    main()
