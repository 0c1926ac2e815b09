"""Saves and loads a HuggingFace model's weights in pieces, without a second copy in RAM; saves Trainer arguments."""

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

from offloadkit.checkpoint.arrays import ArrayFile, can_hold, write_arrays
from offloadkit.checkpoint.folder import atomic_write, replace_folder
from offloadkit.checkpoint.weights import load_weights
from offloadkit.facts.changes import claim, unclaimed
from offloadkit.offload.unread import become, leave_unread, sources


@contextmanager
def saved_in_pieces() -> Iterator[None]:
    """Let `save_pretrained` write safetensors files in pieces and rename complete files.

    safetensors' own function first copies all weights in VRAM to RAM, and truncates an old file that may still be
    mapped.
    """
    from transformers import modeling_utils

    module: Any = modeling_utils
    with ExitStack() as undo:
        if hasattr(module, "safe_save_file"):
            theirs = unclaimed(module, "safe_save_file")  # another thread may be saving too
            undo.callback(claim(module, "safe_save_file", partial(_write, otherwise=theirs)))
        yield


def save_whole(model: Any, tokenizer: Any, folder: Path, **options: Any) -> None:
    """Replace `folder` by the model and its tokenizer, for `from_pretrained`. `options`: of `save_pretrained`. Raises
    `OutputError` if the folder cannot be written.
    """

    def write(new: Path) -> None:
        with saved_in_pieces():
            model.save_pretrained(new, **options)
        tokenizer.save_pretrained(new)

    replace_folder(folder, write)


@contextmanager
def arguments_as_data(folder: Path, trainer: Any) -> Iterator[None]:
    """While it is open, the Trainer writes its arguments to `folder` as JSON, not pickled as `training_args.bin`.

    The modules of the Trainer's classes are patched, because each may have imported the file name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "training_args.json") as file:
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
    else:  # a newer safetensors dtype
        otherwise(tensors, filename, metadata=metadata)


def load_in_pieces(model: nn.Module, folder: Path) -> bool:
    """Read the weights that `save_pretrained` wrote to `folder` into `model`, in place.

    Returns:
        False, without reading, if copying is not enough: names or shapes differ, a tied weight has several values, or
            the files are not safetensors.

    Raises:
        ModelError: a file is truncated.
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
    """Like `load_in_pieces`, but the unread weights of `model` are read on demand.

    Other tensors (buffers, a head that another checkpoint lacked) are read now.
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
