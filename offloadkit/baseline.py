"""`finetune(..., baseline="measure")`: a step with everything on the GPU, timed before anything is loaded."""

from __future__ import annotations

import os
import random
from pathlib import Path
from statistics import mean
from typing import Any

from offloadkit.errors import OffloadkitError
from offloadkit.hf.data import PreparedData
from offloadkit.planner import Dtype
from offloadkit.units import format_seconds

_NUM_ROWS = 1024
"""That typical lengths are taken from."""


def measured_baseline(
    model: Any, data: PreparedData, *, batch_size: int, accumulation: int, dtype: Dtype, folder: Path
) -> float | None:
    """Seconds of a step of plain training, in a fresh process and with micro-batches as long as `data`'s are on
    average; None, and the reason is printed, where it cannot be measured.

    Args:
        model: what `finetune` takes.
        dtype: of the working weights.
        folder: keeps what was measured for the next time.
    """
    print("measuring a step without offloading ...", flush=True)
    try:
        seconds, reason = _measured(model, data, batch_size, accumulation, dtype, folder)
    except OffloadkitError as error:  # the model cannot be made again from its config
        seconds, reason = None, str(error)
    if seconds is None:
        print(f"  not measured, and predicted instead: {reason}", flush=True)
    else:
        print(f"  {format_seconds(seconds)}", flush=True)
    return seconds


def _measured(
    model: Any, data: PreparedData, batch_size: int, accumulation: int, dtype: Dtype, folder: Path
) -> tuple[float | None, str]:
    from offloadkit.comparing.learning import config_folder
    from offloadkit.comparing.slowdown import measure_baseline

    by_name = isinstance(model, str | os.PathLike)
    if not by_name and not type(model).__module__.startswith("transformers."):
        return None, f"{type(model).__name__} is no class of transformers', and its config says nothing of its forward"
    if not by_name and not all(weight.requires_grad for weight in model.parameters()):
        return None, "parts of the model are frozen"
    folder.mkdir(exist_ok=True)
    input_length, target_length = padded_lengths(data, batch_size)
    return measure_baseline(
        config_folder(model, folder),
        batch_size=batch_size,
        max_input_length=input_length,
        max_target_length=target_length,
        gradient_accumulation=accumulation,
        dtype=dtype,
        output_dir=folder,
    )


def padded_lengths(data: PreparedData, batch_size: int) -> tuple[int, int]:
    """Tokens of input and of target that a row of a micro-batch has on average, padding included."""
    size = len(data.dataset)
    rows = data.dataset.select(range(0, size, -(-size // _NUM_ROWS)))
    order = random.Random(0).sample(range(len(rows)), len(rows))
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]

    def padded(column: str) -> int:
        lengths = [len(tokens) if isinstance(tokens, list) else 1 for tokens in rows[column]]
        return round(mean(max(lengths[index] for index in batch) for batch in batches))

    return padded("input_ids"), padded("labels")
