"""The cost of offloading: step time relative to the same steps with everything on the GPU."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from offloadkit.checkpoint.folder import writable
from offloadkit.doors.comparing import words
from offloadkit.doors.comparing.comparison import progress, summary
from offloadkit.doors.engines import forecast
from offloadkit.doors.engines.baseline import forecasts_of, plain_row
from offloadkit.doors.engines.runner import Row, Runs
from offloadkit.doors.engines.work import Work, config_of, full_work
from offloadkit.errors import DoesNotFitError, OffloadkitError
from offloadkit.facts.config import Precision
from offloadkit.facts.units import rounded


@dataclass(frozen=True)
class Slowdown:
    """Seconds per step with and without offloading.

    Attributes:
        baseline: whether `baseline_seconds` was measured, or predicted by the plan from measured rates.
        reason: why the baseline was predicted; "" if it was measured.
        on_gpu: False without a GPU; the baseline is then plain training on the CPU.
    """

    offloadkit_seconds: float
    baseline_seconds: float
    baseline: Literal["measured", "predicted"]
    reason: str = ""
    on_gpu: bool = True

    @property
    def ratio(self) -> float:
        """Step time with offloading divided by the baseline's."""
        return self.offloadkit_seconds / self.baseline_seconds

    def __str__(self) -> str:
        why = f"; plain training {self.reason}" if self.reason else ""
        against = "a GPU that holds everything" if self.on_gpu else "plain training on the CPU, without a GPU"
        return f"{rounded(self.ratio)}x of {against} ({self.baseline}{why})"


def measure_slowdown(
    model: str,
    *,
    batch_size: int = 8,
    max_input_length: int = 512,
    max_target_length: int = 128,
    gradient_accumulation: int = 1,
    precision: Precision = "exact",
    vram: int | str | None = None,
    ram: int | str | None = None,
    steps: int | None = None,
    timeout: float | None = None,
    output_dir: str | os.PathLike[str] | None = None,
) -> Slowdown:
    """Time a few steps of offloadkit within `vram` and `ram`, and of plain training if it fits on the whole GPU.

    Both have the same attention and norms, and run in fresh processes. Other arguments: see `compare`.

    Args:
        output_dir: keeps measurements for the next call; None keeps nothing.

    Raises:
        ConfigError, ModelNotFoundError, ModelAccessError, ModelError, OutputError: see `compare`.
        DoesNotFitError: the model cannot be trained within the limits.
        OffloadkitError: offloadkit's run failed.
    """
    limited = replace(full_work(model, locals()), our_compute=True)
    config_of(model)
    with tempfile.TemporaryDirectory() as scratch:
        return _slowdown(limited, Runs(Path(scratch) if output_dir is None else writable(output_dir), timeout))


def _slowdown(limited: Work, runs: Runs) -> Slowdown:
    free = replace(limited, vram=None, ram=None)
    within, without = forecasts_of([limited, free], runs)
    if isinstance(within, dict):
        raise OffloadkitError(within["reason"])
    if isinstance(without, dict):
        raise OffloadkitError(without["reason"])
    if within.reason:
        raise DoesNotFitError(within.reason)
    say = progress(f"{limited.model}, offloadkit")
    ours = runs.measured("offloadkit", limited, within.steps_seconds(limited))
    say(summary(ours))
    if ours["status"] != "measured":
        raise (DoesNotFitError if ours["status"] == "does not fit" else OffloadkitError)(ours["reason"])
    say = progress(f"{free.model}, {words.label('baseline', runs.environment)}")
    plain = plain_row(free, without, runs)
    say(summary(plain))
    if plain["status"] == "measured":
        return Slowdown(_seconds(ours, within), _seconds(plain, without), "measured", on_gpu=not within.on_cpu)
    reason = plain["reason"]
    if within.large_gpu_seconds is None:
        raise OffloadkitError(f"plain training cannot be measured ({reason}), nor predicted for this model")
    return Slowdown(_seconds(ours, within), within.large_gpu_seconds, "predicted", reason, not within.on_cpu)


def _seconds(row: Row, made: forecast.Forecast) -> float:
    """Seconds per step: the median, or the minimum on a CPU, where other processes take varying shares of the cores."""
    seconds: float = min(row["all_step_seconds"]) if made.on_cpu else row["step_seconds"]
    return seconds
