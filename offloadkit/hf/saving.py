"""Saves and loads a HuggingFace model's weights in pieces, with no second copy of them in RAM. Saves its arguments."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offloadkit.changes import claim, unclaimed
from offloadkit.checkpoint.arrays import ArrayFile, can_hold, write_arrays
from offloadkit.checkpoint.folder import written_beside
from offloadkit.checkpoint.weights import load_weights
from offloadkit.offload.unread import become, leave_unread, sources


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
def arguments_as_data(folder: Path, trainer: Any) -> Iterator[None]:
    """A context in which the Trainer writes its arguments to `folder` as JSON; its `training_args.bin` is a pickle.

    Args:
        trainer: the Trainer. A module that defines a class of it may know the file's name by itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with written_beside(folder / "training_args.json") as file:
        file.write(json.dumps(trainer.args.to_dict(), indent=2, default=str).encode())
    with ExitStack() as undo:
        for module in {sys.modules[each.__module__] for each in type(trainer).__mro__}:
            if hasattr(module, "TRAINING_ARGS_NAME"):  # os.path.join(folder, os.devnull) is os.devnull
                undo.callback(claim(module, "TRAINING_ARGS_NAME", os.devnull))
        yield


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


def load_in_pieces(model: nn.Module, folder: Path) -> bool:
    """Read the weights that `save_pretrained` wrote into `folder` into those of `model`, in place.

    Returns:
        Whether it did. Nothing is read where that takes more than copying: the names or shapes are not just those of
        the model, a weight that is tied in the model has several values, or the files are not of safetensors.

    Raises:
        ModelError: a file is cut.
    """
    weights = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    with ExitStack() as opened:
        files = [opened.enter_context(ArrayFile(path)) for path in sorted(folder.glob("model*.safetensors"))]
        saved = {name: array for file in files for name, array in file.arrays.items()}
        if not files or not saved.keys() <= weights.keys():
            return False
        places = [weights[name].data_ptr() for name in saved]
        fits = all(array.shape == tuple(weights[name].shape) for name, array in saved.items())
        if not fits or len(set(places)) < len(places) or {each.data_ptr() for each in weights.values()} > set(places):
            return False
        for file in files:
            load_weights(file, {name: weights[name] for name in file.arrays})
    return True


def read_later(model: nn.Module, folder: Path) -> bool:
    """Have the unread weights of `model` read from what `save_pretrained` wrote into `folder`, when they are asked for.

    What is not unread (buffers, a head that another checkpoint lacked) is read now.

    Returns:
        Whether it did; as for `load_in_pieces`.

    Raises:
        ModelError: a file is cut.
    """
    if {source and os.path.abspath(source) for source in sources(model)} == {os.path.abspath(folder)}:
        return True
    tensors = {name: each for name, each in model.state_dict(keep_vars=True).items() if isinstance(each, torch.Tensor)}
    paths: dict[torch.Tensor, tuple[Path, str]] = {}
    num_saved = 0
    for path in sorted(folder.glob("model*.safetensors")):
        with ArrayFile(path) as file:
            for name, array in file.arrays.items():
                num_saved += 1
                if name in tensors and array.shape == tuple(tensors[name].shape):
                    paths[tensors[name]] = path, name
    if not num_saved == len(paths) == len(set(tensors.values())):
        return False

    def read(waiting: Sequence[torch.Tensor]) -> None:
        for tensor in waiting:
            path, name = paths[tensor]
            value = torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.detach()
            with ArrayFile(path) as file:
                load_weights(file, {name: value})
            if isinstance(tensor, nn.Parameter) and tensor.is_meta:
                become(tensor, value)

    read([tensor for tensor in paths if not tensor.is_meta])
    leave_unread([tensor for tensor in paths if isinstance(tensor, nn.Parameter) and tensor.is_meta], read, str(folder))
    return True
