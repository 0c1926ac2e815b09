"""The CPU AdamW step against the DRAM bandwidth, torch.optim.AdamW(fused=True) and DeepSpeedCPUAdam, in one run.

    python benchmarks/cpu_adamw.py --threads 2 16 --precision exact compact tiny --output cpu_adamw.json

All contestants work on anonymous mappings with huge pages, each array at least four times the last-level cache. They
take turns, round after round, and the best round counts, so that a busy machine is unkind to all alike. The bandwidth
is the best in-place triad a[i] += s * b[i] of three: the library's own C loop, torch's `add_`, and torch's `add` with
`out`. Bytes are those that must cross the bus: arrays that are read and written count twice.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offloadkit.config import Precision
from offloadkit.kernels import cpu
from offloadkit.optim.adamw import FlatState, Segment, adamw_scalars, split_master
from offloadkit.optim.moments import BLOCK, MOMENT_DTYPES, random_key

TRIAD_BYTES = 12
FP32_BYTES = 28
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


class Contestant(NamedTuple):
    """One way to do the work: `run` does it once over all elements."""

    name: str
    bytes_per_element: int
    run: Callable[[], object]


def last_level_cache_bytes() -> int:
    """Size of the largest CPU cache, 32 MiB where the system does not say."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * {"K": 1 << 10, "M": 1 << 20}[size[-1]] for size in sizes), default=32 << 20)


def array(num_elements: int, dtype: torch.dtype, scale: float = 0.0) -> Tensor:
    """An array on huge pages, filled with scale * (0 .. 1): values matter to no contestant's speed, page sizes do."""
    num_bytes = num_elements * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    result = torch.frombuffer(memory, dtype=dtype)
    if cpu.available():
        cpu.populate(result.data_ptr(), num_bytes)
    period = torch.linspace(0, scale, 1 << 16).to(dtype)
    for start in range(0, num_elements, 1 << 16):
        piece = result[start : start + (1 << 16)]
        piece.copy_(period[: piece.numel()])
    return result


def triads(a: Tensor, b: Tensor) -> list[Contestant]:
    return [
        Contestant("triad, C", TRIAD_BYTES, lambda: cpu.triad(a, b, 0.5)),
        Contestant("triad, torch add_", TRIAD_BYTES, lambda: a.add_(b, alpha=0.5)),
        Contestant("triad, torch add out", TRIAD_BYTES, lambda: torch.add(a, b, alpha=0.5, out=a)),
    ]


def rounded_steps(arrays: dict[str, Tensor], precisions: list[Precision]) -> list[Contestant]:
    """The kernel over bf16 split masters with bf16 gradients and moments that are not fp32."""
    num_elements = arrays["exp_avg"].numel() // BLOCK * BLOCK
    scalars = adamw_scalars(step=10, **OPTIONS)  # type: ignore[arg-type]
    segments = [Segment(0, num_elements, scalars, random_key(0, "weight", 10))]
    weights, gradient = (arrays["high"][:num_elements], arrays["low"][:num_elements]), arrays["gradient_bf16"]
    contestants = []
    for kept in precisions:
        moments = [array(num_elements, MOMENT_DTYPES[kept], 1e-3) for _ in range(2)]
        tiny = kept == "tiny"
        scales = [array(num_elements // BLOCK, torch.float32, 1e-3) if tiny else None for _ in range(2)]
        step = partial(cpu.adamw_step, FlatState(*weights, *moments, *scales), gradient[:num_elements], segments, 0.9)
        name = f"offloadkit, bf16 split, bf16 gradient, {kept}"
        contestants.append(Contestant(name, 10 + 4 * MOMENT_DTYPES[kept].itemsize, step))
    return contestants


def offloadkit_steps(arrays: dict[str, Tensor]) -> list[Contestant]:
    """The kernel over bf16 split masters with bf16 and fp32 gradients, and over fp32 weights."""
    num_elements = arrays["exp_avg"].numel()
    segments = [Segment(0, num_elements, adamw_scalars(step=10, **OPTIONS))]  # type: ignore[arg-type]
    moments = arrays["exp_avg"], arrays["exp_avg_sq"]
    split = FlatState(arrays["high"], arrays["low"], *moments)
    full = FlatState(arrays["weights"], None, *moments)
    bf16, fp32 = arrays["gradient_bf16"], arrays["gradient"]
    return [
        Contestant("offloadkit, bf16 split, bf16 gradient", 26, lambda: cpu.adamw_step(split, bf16, segments, 0.9)),
        Contestant("offloadkit, bf16 split, fp32 gradient", 28, lambda: cpu.adamw_step(split, fp32, segments, 0.9)),
        Contestant("offloadkit, fp32, fp32 gradient", FP32_BYTES, lambda: cpu.adamw_step(full, fp32, segments, 0.9)),
    ]


def torch_step(arrays: dict[str, Tensor]) -> Contestant:
    parameter = torch.nn.Parameter(arrays["weights"])
    parameter.grad = arrays["gradient"]
    optimizer = torch.optim.AdamW([parameter], fused=True, **OPTIONS)  # type: ignore[arg-type]
    optimizer.state[parameter] = {
        "step": torch.tensor(9.0),
        "exp_avg": arrays["exp_avg"],
        "exp_avg_sq": arrays["exp_avg_sq"],
    }
    return Contestant("torch.optim.AdamW(fused=True), fp32", FP32_BYTES, optimizer.step)


def deepspeed_step(arrays: dict[str, Tensor]) -> Contestant:
    """Raises whatever keeps DeepSpeed from being imported or built."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(arrays["weights"])
    parameter.grad = arrays["gradient"]
    optimizer: Any = DeepSpeedCPUAdam([parameter], adamw_mode=True, **OPTIONS)
    optimizer.state[parameter] = {
        "step": 9,
        "exp_avg": arrays["exp_avg"],
        "exp_avg_sq": arrays["exp_avg_sq"],
    }
    return Contestant("DeepSpeedCPUAdam, fp32", FP32_BYTES, optimizer.step)


def make_arrays(num_elements: int) -> dict[str, Tensor]:
    arrays = {
        "weights": array(num_elements, torch.float32, 0.02),
        "exp_avg": array(num_elements, torch.float32, 1e-3),
        "exp_avg_sq": array(num_elements, torch.float32, 1e-6),
        "gradient": array(num_elements, torch.float32, 1e-3),
        "gradient_bf16": array(num_elements, torch.bfloat16, 1e-3),
        "high": array(num_elements, torch.bfloat16),
        "low": array(num_elements, torch.int16),
    }
    for start in range(0, num_elements, 1 << 22):
        at = slice(start, start + (1 << 22))
        high, low = split_master(arrays["weights"][at])
        arrays["high"][at], arrays["low"][at] = high, low
    return arrays


def measure(contestants: list[Contestant], num_elements: int, num_rounds: int) -> list[dict[str, Any]]:
    best = dict.fromkeys((contestant.name for contestant in contestants), float("inf"))
    for round_number in range(num_rounds + 1):
        for contestant in contestants:
            start = time.perf_counter()
            contestant.run()
            seconds = time.perf_counter() - start
            if round_number > 0:
                best[contestant.name] = min(best[contestant.name], seconds)
    return [
        {
            "name": contestant.name,
            "seconds": best[contestant.name],
            "bytes_per_element": contestant.bytes_per_element,
            "gigaelements_per_second": num_elements / best[contestant.name] / 1e9,
            "gigabytes_per_second": num_elements * contestant.bytes_per_element / best[contestant.name] / 1e9,
        }
        for contestant in contestants
    ]


def print_table(num_threads: int, rows: list[dict[str, Any]]) -> None:
    triad = max(row["gigabytes_per_second"] for row in rows if row["name"].startswith("triad"))
    print(f"\n{num_threads} threads")
    print(f"{'':46} {'Gelement/s':>10} {'bytes':>6} {'GB/s':>8} {'of triad':>9}")
    for row in rows:
        print(
            f"{row['name']:46} {row['gigaelements_per_second']:10.2f} {row['bytes_per_element']:6d} "
            f"{row['gigabytes_per_second']:8.1f} {row['gigabytes_per_second'] / triad:9.1%}"
        )


def run(thread_counts: list[int], num_elements: int, num_rounds: int, precisions: list[Precision]) -> dict[str, Any]:
    arrays = make_arrays(num_elements)
    contestants = [
        *(triads(arrays["weights"], arrays["gradient"])),
        *offloadkit_steps(arrays),
        *rounded_steps(arrays, [kept for kept in precisions if kept != "exact"]),
        torch_step(arrays),
    ]
    skipped = {}
    try:
        contestants.append(deepspeed_step(arrays))
    except Exception as error:  # not installed, or its C++ extension does not build here
        skipped["DeepSpeedCPUAdam"] = f"{type(error).__name__}: {error}".splitlines()[0]
        print("DeepSpeedCPUAdam is left out:", skipped["DeepSpeedCPUAdam"])
    results = {}
    for num_threads in thread_counts:
        cpu.set_num_threads(num_threads)
        torch.set_num_threads(num_threads)
        results[str(num_threads)] = measure(contestants, num_elements, num_rounds)
        print_table(num_threads, results[str(num_threads)])
    return {"results": results, "skipped": skipped}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[cpu.default_num_threads()])
    parser.add_argument("--elements", type=int, help="default: bf16 arrays of four times the last-level cache")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--precision", nargs="+", default=["exact"], choices=list(MOMENT_DTYPES))
    parser.add_argument("--output", type=Path, default=Path("cpu_adamw.json"))
    arguments = parser.parse_args()
    cache_bytes = last_level_cache_bytes()
    num_elements = arguments.elements or 4 * cache_bytes // 2
    if not cpu.available():
        parser.error("the C kernel is not built: python setup.py build_ext --inplace")
    about = {
        "machine": platform.processor() or platform.machine(),
        "num_cores": os.cpu_count(),
        "last_level_cache_bytes": cache_bytes,
        "num_elements": num_elements,
        "cpu_level": cpu.cpu_levels()[-1],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print(json.dumps(about))
    about |= run(arguments.threads, num_elements, arguments.rounds, arguments.precision)
    arguments.output.write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
