"""The bounds of a step on several GPUs: the GPU's time by kind of work, and the processor time of the ranks."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

Span = tuple[float, float]

_STEPS = 2
"""Steps without the profiler, then as many with it."""


def trace(step: Callable[[], None], settle: Callable[[], None], *, on_gpu: bool) -> dict[str, float]:
    """Run some further steps, and return seconds and bytes per step.

    Processor time is measured without the profiler: "main thread", "autograd's thread" and "all threads" of this rank,
    of "step". The profiler then runs on rank 0: see `by_kind`.
    """
    settle()
    _meet()
    began, on_main, on_all = time.perf_counter(), time.thread_time(), time.process_time()
    in_backward = _seconds_of_autograd()
    for _ in range(_STEPS):
        step()
    on_main = time.thread_time() - on_main
    settle()
    on_all, seconds = time.process_time() - on_all, time.perf_counter() - began
    found = {"step": seconds / _STEPS, "main thread": on_main / _STEPS, "all threads": on_all / _STEPS}
    found["autograd's thread"] = (_seconds_of_autograd() - in_backward) / _STEPS
    if on_gpu:
        found |= _profiled(step, settle)
    return found


def _seconds_of_autograd() -> float:
    """CPU seconds of the threads that launch backward on a GPU, to a hundredth. torch names them after the device."""
    ticks = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            if (thread / "comm").read_text().startswith("pt_autograd"):
                times = (thread / "stat").read_text().rpartition(")")[2].split()
                ticks += int(times[11]) + int(times[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _profiled(step: Callable[[], None], settle: Callable[[], None]) -> dict[str, float]:
    from torch.profiler import ProfilerActivity, profile

    def run() -> None:
        _meet()
        for _ in range(_STEPS):
            step()
        settle()

    if dist.is_initialized() and dist.get_rank():
        run()
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(str(path := Path(folder) / "trace.json"))
        return {name: number / _STEPS for name, number in by_kind(json.loads(path.read_text())["traceEvents"]).items()}


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def by_kind(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds of a profiler's events on the GPU, each moment counted once, and copied bytes.

    "computing" is the time of kernels other than NCCL's, "only NCCL" the time of NCCL's kernels alone, "only copies"
    the time of copies without kernels. In "idle" the GPU waits for Python, the CPU step or another rank.
    """
    spans: dict[str, list[Span]] = {"compute": [], "nccl": [], "H2D": [], "D2H": []}
    moved = {"H2D bytes": 0.0, "D2H bytes": 0.0}
    for event in events:
        category, name = str(event.get("cat", "")).lower(), str(event.get("name", ""))
        span = (float(event.get("ts", 0)) / 1e6, (float(event.get("ts", 0)) + float(event.get("dur", 0))) / 1e6)
        if category == "kernel":
            spans["nccl" if name.lower().startswith("nccl") else "compute"].append(span)
        elif category == "gpu_memcpy" and (kind := next((each for each in ("HtoD", "DtoH") if each in name), None)):
            kind = kind.replace("to", "2")
            spans[kind].append(span)
            moved[f"{kind} bytes"] += float(event.get("args", {}).get("bytes", 0))
    everything = [span for of_kind in spans.values() for span in of_kind]
    if not everything:
        return {}
    computing = _covered(spans["compute"])
    kernels = _covered([*spans["compute"], *spans["nccl"]])
    busy = _covered(everything)
    wall = max(end for _, end in everything) - min(start for start, _ in everything)
    found = {"traced step": wall, "computing": computing, "only NCCL": kernels - computing}
    found |= {"only copies": busy - kernels, "idle": wall - busy, "NCCL": _covered(spans["nccl"])}
    return found | {kind: _covered(spans[kind]) for kind in ("H2D", "D2H")} | moved


def _covered(spans: Iterable[Span]) -> float:
    """Length of the union of the spans."""
    total, until = 0.0, float("-inf")
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total
