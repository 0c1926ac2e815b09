"""Weights and buffers of a module in one safetensors file, by their names in `state_dict()`.

Tied weights are stored once, under their first name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offloadkit.checkpoint.arrays import ArrayFile, write_arrays
from offloadkit.checkpoint.origin import Origin
from offloadkit.errors import ConfigError, ModelError
from offloadkit.facts.units import kind_of

WEIGHT_FILE = "weights.safetensors"


def write_weights(folder: Path, weights: Mapping[str, Any], origin: Origin) -> None:
    """Write a `state_dict()`. Raises `ModelError` if an entry is not a tensor."""
    write_arrays(folder / WEIGHT_FILE, _distinct(weights), origin.of_arrays(WEIGHT_FILE))


def check_weights(file: ArrayFile, weights: Mapping[str, Any]) -> None:
    """Check that names, shapes and dtypes match a `state_dict()`.

    Raises:
        ModelError: names or shapes differ.
        ConfigError: a dtype differs.
    """
    own = _distinct(weights)
    differing = sorted(own.keys() ^ file.arrays.keys())
    if differing:
        only = "this model" if differing[0] in own else "the checkpoint"
        raise ModelError(
            f"{file.path} is from another model: {len(differing)} names of weights differ; {differing[0]!r} is in "
            f"{only} only. Resume with the model of that run"
        )
    for name, tensor in own.items():
        saved = file.arrays[name]
        if saved.shape != tuple(tensor.shape):
            raise ModelError(
                f"{file.path}: saved {name!r} has shape {saved.shape}, but this model's has {tuple(tensor.shape)}. "
                "Resume with the model of that run"
            )
        if saved.dtype != tensor.dtype:
            raise ConfigError(
                f"{file.path}: saved {name!r} is {saved.dtype}, but this model's is {tensor.dtype}: resume with the "
                "working dtype that the run was saved with"
            )


@torch.no_grad()
def load_weights(file: ArrayFile, weights: Mapping[str, Any]) -> None:
    """Load the saved weights into a `state_dict()`'s tensors in place. Call `check_weights` first."""
    for name, tensor in _distinct(weights).items():
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.new_empty(tensor.numel())
        for start, piece in file.pieces(name, pinned=tensor.is_cuda):
            flat[start : start + piece.numel()].copy_(piece)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))


def num_bytes_of(weights: Mapping[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in _distinct(weights).values())


def _distinct(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    seen, found = set(), {}
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            raise ModelError(
                f"{name!r} in the module's state_dict() is {kind_of(tensor)}: a checkpoint can store only "
                "tensors. Keep it in a buffer, or save it yourself"
            )
        place = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
        if tensor.numel() == 0 or place not in seen:
            seen.add(place)
            found[name] = tensor
    return found
