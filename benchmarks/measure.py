"""One engine on one workload in this process: `python -m benchmarks.measure TASK.json ROW.json`, called by run.py."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offloadkit.engines.timing import Clock

Row = dict[str, Any]
GIB = 1 << 30
WARMUP_WHILE_LAYERS_MOVE = 6
"""Least number of steps before those that are timed where the plan's split between GPU and CPU corrects itself."""


def bind_cores(num_cores: int) -> None:
    """Run on the first `num_cores` cores this process may use (0: all), before any library counts them."""
    cores = sorted(os.sched_getaffinity(0))
    cores = cores[: num_cores or len(cores)]
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))


def main(task_path: str, row_path: str) -> None:
    """Read the task, measure, and leave a row: the figures, or `failed` with the reason."""
    task = json.loads(Path(task_path).read_text())
    bind_cores(task["work"]["cores"])
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    row: Row = {}
    try:
        row.update(measure(task))
    except BaseException as error:  # a peer may call sys.exit
        traceback.print_exc()
        text = str(error).strip().splitlines()
        row["failed"] = f"{type(error).__name__}: {text[0] if text else ''}"[:300]
    Path(row_path).write_text(json.dumps(row))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a peer's threads or process group may hang an orderly exit


def measure(task: dict[str, Any]) -> Row:
    """The row of one task; see `run.py` for what a task holds."""
    import psutil
    import torch

    from benchmarks import engines, memory, workloads
    from offloadkit import hardware

    work = workloads.Workload(**task["work"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vram = memory.DeviceMemory(device)
    if work.vram_cap_gib and device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(work.vram_cap_gib * GIB / total_bytes)
    torch.manual_seed(work.seed)
    name, mode = task["engine"], task["mode"]
    if mode == "save":
        workloads.build_model(work, device, device).save_pretrained(task["folder"])
        return {}

    engines.check_runs(name, work, device)
    row: Row = {"machine": describe_machine(device), "versions": versions()}
    if mode == "startup":
        row["import_seconds"] = import_libraries(name)
        if task["cold"]:
            memory.evict_page_cache(Path(task["folder"]))
    started = time.perf_counter()
    if name == "planned":
        return row | measure_planned(work, device, vram)
    if mode == "startup":
        model = load_from_disk(name, task["folder"], work, device)
    else:
        model = workloads.build_model(work, device, engines.weights_start_on(name, work, device))
    built = time.perf_counter()
    row["num_parameters"] = sum(parameter.numel() for parameter in model.parameters())
    engine = engines.ENGINES[name](model, work, device)
    engine.settle()
    compile_seconds = engine.seconds.pop("compile", 0.0)
    row["load_seconds"] = built - started
    row["engine_seconds"] = time.perf_counter() - built - compile_seconds
    row["compile_seconds"] = compile_seconds
    row["part_seconds"] = engine.seconds

    place = engines.batches_start_on(name, device)
    if mode == "loader":
        num_workers = task["num_workers"]
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        steps = workloads.loaded_batches(work, place, num_workers, 1 + work.warmup + 1 + work.steps)
    else:
        steps = itertools.repeat(workloads.fixed_batches(work, place))
    row.update(run_steps(engine, steps, work, device, vram))
    row["process_seconds"] = row.pop("first_step_at") - psutil.Process().create_time()
    row["peak_ram_bytes"] = hardware.process_peak_ram_bytes()
    if mode == "loader":
        row["weights_sha256"] = sha256_of(model)
    return row


def measure_planned(work: Any, device: Any, vram: Any) -> Row:
    """The row of a step by a plan: planned and measured; then, all else being known, what bounds the step."""
    from benchmarks import engines, workloads
    from offloadkit import hardware

    started = time.perf_counter()
    engine = engines.Planned(work, device)
    row = engine.row() | {"num_parameters": engine.plan.num_parameters, "part_seconds": engine.seconds}
    row["engine_seconds"] = time.perf_counter() - started
    row["load_peak_ram_bytes"] = hardware.process_peak_ram_bytes()
    batches = workloads.fixed_batches(work, device)
    if engine.may_move:
        work = replace(work, warmup=max(work.warmup, WARMUP_WHILE_LAYERS_MOVE))
    row.update(run_steps(engine, itertools.repeat(batches), work, device, vram))
    row["each_step"] = engine.each_step()
    row["telemetry_seconds"] = list(engine.engine.telemetry.records)[-1].seconds
    row["peak_ram_bytes"] = hardware.process_peak_ram_bytes()
    return row | trace_steps(engine, batches)


def trace_steps(engine: Any, batches: list[Any], num_steps: int = 3) -> Row:
    """What `num_steps` more steps take at least, which resource bounds each phase of them, and what they took; why not,
    where they fail: what was timed before stays."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            profile = engine.engine.profile(steps=num_steps, path=Path(folder) / "trace.json")
            for _ in range(1 + num_steps):  # one goes untraced
                for index, batch in enumerate(batches, start=1):
                    engine.backward(engine.forward(batch))
                    engine.step(index == len(batches))
    except Exception as error:
        return {"trace_failed": f"{type(error).__name__}: {error}"[:300]}
    found = profile.bound
    return {
        "bound_seconds": found.seconds,
        "bound_by": {phase: asdict(found.limiting(phase)) for phase in found.shares},
        "traced_step_seconds": found.step_seconds,
    }


def sha256_of(model: Any) -> str:
    """A digest of all weights, bit for bit."""
    import torch

    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def import_libraries(name: str) -> float:
    """Import what engine `name` needs beside torch; the seconds it took."""
    started = time.perf_counter()
    libraries = {"offloadkit": "offloadkit.hf.models", "zero2": "deepspeed", "zero3": "deepspeed"}
    libraries |= {"ao": "torchao.optim", "ao-amp": "torchao.optim", "roundpipe": "roundpipe"}
    importlib.import_module("transformers.models.auto.modeling_auto")
    if name in libraries:
        importlib.import_module(libraries[name])
    return time.perf_counter() - started


def load_from_disk(name: str, folder: str, work: Any, device: Any) -> Any:
    """The model of `folder` in bf16, as users of engine `name` load it."""
    import torch
    import transformers

    from benchmarks import engines, workloads

    is_t5 = workloads.is_t5(work.model)
    place = engines.weights_start_on(name, work, device)
    if name == "offloadkit":
        from offloadkit.hf.models import load_model

        task = "seq2seq" if is_t5 else "causal"
        model: Any = load_model(folder, task=task, dtype=torch.bfloat16, device=place, progress=False)
    else:
        auto = transformers.AutoModelForSeq2SeqLM if is_t5 else transformers.AutoModelForCausalLM
        model = auto.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": place})
    return model.train()


def run_steps(engine: Any, steps: Iterator[list[Any]], work: Any, device: Any, vram: Any) -> Row:
    """Train for one first step, `work.warmup` more, and `work.steps` that are timed.

    A step's time is that from its end to the end of the one before, on the device's time line: nothing is synchronised
    in between, so what an engine hides under the next forward stays hidden, and what it does not is counted.
    `settled_seconds` is the mean with everything waited for at the end.
    """
    import torch

    from offloadkit.engines.timing import Clock

    on_cuda = device.type == "cuda"
    losses: list[list[torch.Tensor]] = []

    def train_step(clock: Clock) -> None:
        batches = next(steps)
        clock.mark("data")
        losses.append([])
        for index, batch in enumerate(batches, start=1):
            loss = engine.forward(batch)
            clock.mark("forward")
            engine.backward(loss)
            clock.mark("backward")
            losses[-1].append(loss.detach())
            del loss
            engine.step(index == len(batches))
            clock.mark("step")
        vram.sample()

    started = time.perf_counter()
    train_step(Clock(on_cuda))
    engine.settle()
    first_step_seconds, first_step_at = time.perf_counter() - started, time.time()
    for _ in range(work.warmup):
        train_step(Clock(on_cuda))
    engine.settle()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(on_cuda)
    clock.mark("start")
    started = time.perf_counter()
    for _ in range(1 + work.steps):  # the first fills the pipeline
        train_step(clock)
    engine.settle()
    settled_seconds = (time.perf_counter() - started) / (1 + work.steps)
    per_step = split_steps(clock.phases(), 1 + 3 * work.accumulation)[1:]
    totals = [sum(step.values()) for step in per_step]
    return {
        "step_seconds": median(totals),
        "min_step_seconds": min(totals),
        "settled_seconds": settled_seconds,
        "first_step_seconds": first_step_seconds,
        "first_step_at": first_step_at,
        "phase_seconds": {name: median(step[name] for step in per_step) for name in per_step[0]},
        "all_step_seconds": totals,
        "losses": [float(torch.stack(step).float().mean()) for step in losses],
        "vram_bytes": vram.peak_bytes,
        "vram_source": vram.source,
        "max_allocated_bytes": torch.cuda.max_memory_allocated() if on_cuda else 0,
        "max_reserved_bytes": torch.cuda.max_memory_reserved() if on_cuda else 0,
    }


def split_steps(phases: list[tuple[str, float]], marks_per_step: int) -> list[dict[str, float]]:
    """Seconds by phase of each step, micro-batches added up."""
    steps = []
    for first in range(0, len(phases), marks_per_step):
        seconds: dict[str, float] = defaultdict(float)
        for name, phase_seconds in phases[first : first + marks_per_step]:
            seconds[name] += phase_seconds
        steps.append(dict(seconds))
    return steps


def describe_machine(device: Any) -> dict[str, str | int]:
    """Processor, RAM and GPU of this machine, and the cores this process is bound to."""
    import torch

    from offloadkit import hardware

    machine = dict(hardware.describe_machine(device))
    if device.type == "cuda":
        try:
            import pynvml

            pynvml.nvmlInit()
            machine["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        except Exception as error:
            machine["driver"] = f"unknown ({type(error).__name__})"
        machine["cuda"] = str(torch.version.cuda)
    machine["system"] = platform.platform()
    return machine


def versions() -> dict[str, str]:
    """Versions of the libraries that take part."""
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "deepspeed", "torchao", "roundpipe", "accelerate", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
