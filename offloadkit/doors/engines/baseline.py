"""Measures a step of plain training with everything on the device, in a fresh process."""

from __future__ import annotations

import copy
import hashlib
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from offloadkit.checkpoint.folder import explained_write_errors
from offloadkit.doors.engines import forecast
from offloadkit.doors.engines.forecast import Forecast
from offloadkit.doors.engines.runner import Row, Runs
from offloadkit.doors.engines.work import Work, config_of
from offloadkit.errors import OffloadkitError
from offloadkit.facts.units import format_seconds
from offloadkit.hf.data import PreparedData
from offloadkit.hf.source import resolve

if TYPE_CHECKING:
    from transformers import TrainingArguments

_NUM_ROWS = 1024


def measured_baseline(model: Any, data: PreparedData, args: TrainingArguments, folder: Path) -> float | None:
    """Seconds per step of plain training, with micro-batches of `data`'s mean padded lengths.

    Prints the reason and returns None if it cannot be measured. `folder` keeps measurements for the next call.
    """
    print("measuring a step without offloading ...", flush=True)
    try:
        seconds = _measured(model, data, args, folder)
    except OffloadkitError as error:
        print(f" not measured, but predicted: {error}", flush=True)
        return None
    print(f"  {format_seconds(seconds)}", flush=True)
    return seconds


def _measured(model: Any, data: PreparedData, args: TrainingArguments, folder: Path) -> float:
    """Raises `OffloadkitError` if it cannot be measured, for example because the model cannot be rebuilt from its
    config.
    """
    by_name = isinstance(model, str | os.PathLike)
    if not by_name and not type(model).__module__.startswith("transformers."):
        name = type(model).__name__
        raise OffloadkitError(f"{name} is not a transformers class, and its config does not describe its forward")
    if not by_name and not all(weight.requires_grad for weight in model.parameters()):
        raise OffloadkitError("parts of the model are frozen")
    folder.mkdir(exist_ok=True)
    batch_size, by_length = args.per_device_train_batch_size, args.train_sampling_strategy == "group_by_length"
    input_length, target_length = padded_lengths(data, batch_size, by_length=by_length)
    work = Work(
        model=config_folder(model, folder),
        batch_size=batch_size,
        input_length=input_length,
        target_length=target_length,
        accumulation=args.gradient_accumulation_steps,
        dtype="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        our_compute=True,
    )
    runs = Runs(folder, None)
    (made,) = forecasts_of([work], runs)
    row = made if isinstance(made, dict) else plain_row(work, made, runs)
    if row["status"] != "measured":
        raise OffloadkitError(str(row["reason"]).removesuffix(" (--timeout)"))  # `finetune` has no such option
    return float(row["step_seconds"])


def forecasts_of(works: Sequence[Work], runs: Runs) -> list[Forecast | Row]:
    planned = runs.row({"mode": "plan", "works": [work.to_dict() for work in works]})
    if planned["status"] != "measured":
        return [{"status": "failed", "reason": f"the plan failed: {planned['reason']}"} for _ in works]
    return [
        {"status": "failed", "reason": made["failed"]} if "failed" in made else forecast.from_row(made)
        for made in planned["forecasts"]
    ]


def plain_row(work: Work, made: Forecast, runs: Runs) -> Row:
    """The row of plain training, without running it if arithmetic shows that it cannot fit."""
    reason = forecast.why_cannot_fit("baseline", made, recomputed=False)
    if reason is not None:
        return {"status": "does not fit", "reason": reason}
    return runs.measured("baseline", work, made.steps_seconds(work))


def padded_lengths(data: PreparedData, batch_size: int, *, by_length: bool) -> tuple[int, int]:
    """Mean input and target tokens per row of a micro-batch, padding included.

    `by_length`: micro-batches hold rows of nearly equal length, as with HuggingFace's `group_by_length`.
    """
    size = len(data.dataset)
    rows = data.dataset.select(range(0, size, -(-size // _NUM_ROWS))).to_list()
    random.Random(0).shuffle(rows)
    if by_length:
        rows.sort(key=lambda row: len(row["input_ids"]))
    batches = [data.collator(rows[first : first + batch_size]) for first in range(0, len(rows), batch_size)]

    def padded(column: str) -> int:
        return round(mean(batch[column].shape[1] if batch[column].dim() > 1 else 1 for batch in batches))

    return padded("input_ids"), padded("labels")


def config_folder(model: Any, folder: Path) -> str:
    """A model name unchanged, or a folder with the model's config."""
    source = resolve(model)
    if isinstance(model, str | os.PathLike):
        config_of(str(model))
        return str(model)
    config = copy.deepcopy(source.config)
    config.architectures = [type(model).__name__]
    return str(kept_folder(folder, "config", config.save_pretrained))


def kept_folder(folder: Path, name: str, write: Callable[[Path], Any]) -> Path:
    """Let `write` fill a folder, and keep it in `folder` under a name with its hash."""
    with explained_write_errors(folder / name), tempfile.TemporaryDirectory(dir=folder) as scratch:
        new = Path(scratch) / name
        write(new)
        digest = hashlib.sha256()
        for path in sorted(new.iterdir()):
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        kept = folder / f"{name}-{digest.hexdigest()[:12]}"
        if not kept.exists():
            new.rename(kept)
    return kept.resolve()
