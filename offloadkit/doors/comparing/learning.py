"""Trains on the user's rows in fresh processes, to measure how batch size and learning rate affect the held-out
loss.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from offloadkit.checkpoint.folder import explained_write_errors
from offloadkit.doors.engines.baseline import kept_folder
from offloadkit.doors.engines.work import TINY, config_of
from offloadkit.doors.finetuning import finetune
from offloadkit.errors import ConfigError
from offloadkit.hf.data import load_dataset_like
from offloadkit.hf.options import LEARNING_RATES
from offloadkit.hf.source import resolve

SCALINGS: dict[str, Callable[[float], float]] = {"none": lambda ratio: 1.0, "sqrt": math.sqrt, "linear": float}
"""Factor of the learning rate, given the ratio of rows per step to the smallest step's."""

EVAL_BATCH_SIZE = 16
"""The same for every run, so that mean losses average over the same batches."""


def weights_folder(model: Any, folder: Path, init: str) -> str:
    """A model name unchanged, or the folder a model was saved to. `TINY` is created and saved here."""
    if model == TINY:
        from transformers import T5ForConditionalGeneration, set_seed

        set_seed(0)
        config = config_of(TINY)
        config._attn_implementation = "eager"
        model = T5ForConditionalGeneration(config)  # type: ignore[arg-type]
    source = resolve(model, init=init)
    if source.model is not None:
        return str(kept_folder(folder, "model", source.model.save_pretrained))
    _ = source.config  # raises if the name is unknown
    return str(model)


def tokenizer_folder(tokenizer: Any, folder: Path) -> str | None:
    """A tokenizer name or None unchanged, or the folder a tokenizer was saved to."""
    if tokenizer is None or isinstance(tokenizer, str | os.PathLike):
        return None if tokenizer is None else str(tokenizer)
    return str(kept_folder(folder, "tokenizer", tokenizer.save_pretrained))


def rows_file(dataset: Any, folder: Path, name: str, split: str, columns: Collection[str]) -> tuple[str, int]:
    """Write the rows to a .parquet file named by their hash. Returns the path and the number of rows. Raises
    `DataError` as `finetune`, and `OutputError`.
    """
    rows = load_dataset_like(dataset, split=split, columns=columns)
    with explained_write_errors(folder / f"{name}.parquet"), tempfile.TemporaryDirectory(dir=folder) as scratch:
        waiting = Path(scratch) / name
        rows.to_parquet(str(waiting))
        path = folder / f"{name}-{hashlib.sha256(waiting.read_bytes()).hexdigest()[:12]}.parquet"
        waiting.replace(path)
    return str(path.resolve()), len(rows)


def learning_rates(base: float, rows: list[int], scalings: list[str]) -> list[tuple[int, str, float]]:
    """(rows per step, scaling, learning rate) tuples. The smallest step runs once, with rate `base`."""
    least = min(rows)
    found: list[tuple[int, str, float]] = []
    for number in rows:
        own = ["none"] if number == least else scalings
        found += [(number, scaling, base * SCALINGS[scaling](number / least)) for scaling in own]
    return found


def check_arguments(arguments: dict[str, Any], of_sweep: Iterable[str]) -> None:
    """Raise `ConfigError` for arguments that `finetune` lacks or that cannot be sent to another process.

    `of_sweep`: argument names of `sweep`, for spelling suggestions.
    """
    from offloadkit.hf.arguments import argument_meant, argument_names

    own = {"output_dir", "max_steps", "epochs", "batch_size", "resume", "overwrite"}
    known = {*of_sweep, *inspect.signature(finetune).parameters, *argument_names()}
    for name, value in arguments.items():
        if name not in known:
            raise ConfigError(f"sweep has no argument {name!r}{argument_meant(name, known - own)}")
        if name in own:
            raise ConfigError(f"sweep sets {name} of finetune by itself: leave it out")
        try:
            json.dumps(value)
        except TypeError as error:
            raise ConfigError(
                f"{name}={value!r} goes to another process, so it must consist of numbers, strings, lists and dicts"
            ) from error


def base_rate(learning_rate: float | None, init: str) -> float:
    """The learning rate that `finetune` would use. Raises `ConfigError` if it is not a positive number."""
    if learning_rate is None:
        return LEARNING_RATES.get(init, LEARNING_RATES["pretrained"])
    if not isinstance(learning_rate, int | float) or isinstance(learning_rate, bool) or not 0 < learning_rate < 1e3:
        raise ConfigError(f"learning_rate must be a positive number, got {learning_rate!r}")
    return float(learning_rate)


def finetuned(task: dict[str, Any]) -> dict[str, Any]:
    from offloadkit.facts import hardware

    with tempfile.TemporaryDirectory(dir=task["scratch"]) as folder:
        result = finetune(
            **task["finetune"],
            output_dir=folder,
            save_strategy="no",
            eval_strategy="no",
            per_device_eval_batch_size=EVAL_BATCH_SIZE,
        )
    tokens = [step.num_tokens for step in result.steps if step.num_tokens]
    vram = [step.bytes.get("vram", {}).get("process reserved", 0) for step in result.steps]
    settled = result.steps[len(result.steps) // 10 :]  # the first tenth warms up
    seconds = median(step.seconds["step"] for step in settled)
    context = hardware.vram_context_bytes(hardware.default_device())
    return {
        "step_seconds": seconds,
        "tokens_per_second": sum(tokens) / len(tokens) / seconds if tokens else None,
        "vram_bytes": max(vram) + context if any(vram) else 0,
        "peak_ram_bytes": hardware.process_peak_ram_bytes(),
        "num_steps": len(result.steps),
        "metrics": result.metrics,
        "losses": [step.loss for step in result.steps],
    }
