"""Saves a HuggingFace model's weights piece by piece, with no second copy of them in RAM."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offloadkit.checkpoint.arrays import can_hold, write_arrays


@contextmanager
def saved_in_pieces() -> Iterator[None]:
    """A context in which `save_pretrained` writes its files of safetensors piece by piece, and renames each when whole.

    safetensors' own function first copies all weights that are in VRAM to RAM, and cuts an old file while it may be
    mapped. A release of transformers that calls another function saves as it always does.
    """
    from transformers import modeling_utils

    module: Any = modeling_utils
    before = getattr(module, "safe_save_file", None)
    if before is not None:
        module.safe_save_file = partial(_write, otherwise=before)
    try:
        yield
    finally:
        if before is not None:
            module.safe_save_file = before


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
