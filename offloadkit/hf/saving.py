"""Saves a HuggingFace model's weights piece by piece, with no second copy of them in RAM, and its arguments as data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offloadkit.changes import claim, unclaimed
from offloadkit.checkpoint.arrays import can_hold, write_arrays
from offloadkit.checkpoint.folder import written_beside


@contextmanager
def saved_in_pieces() -> Iterator[None]:
    """A context in which `save_pretrained` writes its files of safetensors piece by piece, and renames each when whole.

    safetensors' own function first copies all weights that are in VRAM to RAM, and cuts an old file while it may be
    mapped. A release of transformers that calls another function saves as it always does.
    """
    from transformers import modeling_utils

    module: Any = modeling_utils
    with ExitStack() as undo:
        if hasattr(module, "safe_save_file"):
            theirs = unclaimed(module, "safe_save_file")  # another thread may save too
            undo.callback(claim(module, "safe_save_file", partial(_write, otherwise=theirs)))
        yield


@contextmanager
def arguments_as_data(folder: Path, args: Any) -> Iterator[None]:
    """A context in which the Trainer writes its arguments to `folder` as JSON; its `training_args.bin` is a pickle.

    Args:
        args: the Trainer's `TrainingArguments`.
    """
    from transformers import trainer

    folder.mkdir(parents=True, exist_ok=True)
    with written_beside(folder / "training_args.json") as file:
        file.write(json.dumps(args.to_dict(), indent=2, default=str).encode())
    undo = claim(trainer, "TRAINING_ARGS_NAME", os.devnull)  # os.path.join(folder, os.devnull) is os.devnull
    try:
        yield
    finally:
        undo()


def _write(
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    otherwise: Callable[..., None],
) -> None:
    if all(can_hold(tensor.dtype) for tensor in tensors.values()):
        write_arrays(Path(filename), tensors, metadata)
    else:  # a dtype of a newer safetensors
        otherwise(tensors, filename, metadata=metadata)
