"""Forecasts and rows of imaginary machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from offloadkit.doors.comparing.comparison import Comparison
from offloadkit.doors.engines.forecast import Forecast

GIB = 1 << 30
ENVIRONMENT = {"gpu": "NVIDIA H200", "cpu": "16 cores"}

T5_3B = Forecast(
    num_parameters=2_851_598_336,
    dtype="bf16",
    on_cpu=False,
    lacking={},
    limits={"vram": 11 * GIB, "ram": 64 * GIB},
    vram_bytes=8 * GIB,
    ram_bytes=37 * GIB,
    num_tokens=640,
    step_seconds=0.5,
    large_gpu_seconds=0.2,
    busy={"GPU": 0.026, "CPU step": 0.42, "H2D": 0.1, "D2H": 0.1, "disk": 0.0, "GPU step": 0.0, "launches": 0.05},
    kept_bytes=3 * GIB,
    recomputed_bytes=GIB // 4,
)


def at_batch(size: int, **changes: Any) -> Forecast:
    """T5-3B with the optimizer on the CPU, 26 ms of computing a row: the knee is at 16."""
    computing = 0.026 * size
    busy = {**T5_3B.busy, "GPU": computing}
    step = max(0.42, computing / 3) + computing * 2 / 3
    return replace(T5_3B, busy=busy, num_tokens=640 * size, step_seconds=step, **changes)


def bar(model: str, engine: str, step_seconds: float, vram: float, ram: float, variant: str = "") -> dict[str, Any]:
    """A measured row of 8 samples a step; sizes in GiB."""
    sizes = {"vram_bytes": int(vram * GIB), "peak_ram_bytes": int(ram * GIB)}
    times = {"step_seconds": step_seconds, "seconds": step_seconds * 125}
    return {"model": model, "engine": engine, "variant": variant, "status": "measured", **sizes, **times}


def no_bar(model: str, engine: str, reason: str, status: str = "does not fit", variant: str = "") -> dict[str, Any]:
    """A row without figures."""
    return {"model": model, "engine": engine, "variant": variant, "status": status, "reason": reason}


def comparison(rows: list[dict[str, Any]]) -> Comparison:
    """Rows measured within 11 GiB of VRAM and 64 GiB of RAM."""
    work = {"batch_size": 8, "max_input_length": 512, "max_target_length": 128, "gradient_accumulation": 1}
    return Comparison(rows, 1000, work, 11 * GIB, 64 * GIB, ENVIRONMENT, Path())
