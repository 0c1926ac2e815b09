"""Results of an earlier `finetune` in an output folder, replaced only with the user's permission."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from offloadkit.checkpoint.folder import (
    REPLACED,
    atomic_write,
    explained_write_errors,
    remove_checkpoint,
    why_not_resumable,
)
from offloadkit.checkpoint.one_run import CLAIM, one_run
from offloadkit.errors import ConfigError, OutputError
from offloadkit.facts.files import matching, path_of, why_no_name


@dataclass
class EarlierRun:
    checkpoints: list[Path]
    """Checkpoints not removed yet. The earlier model stays until the new model replaces it."""

    def remove_checkpoints(self) -> None:
        """Remove the checkpoints; call this before the new run writes checkpoints, which may have the same names."""
        while self.checkpoints:
            folder = self.checkpoints[0].parent
            with explained_write_errors(folder):
                remove_checkpoint(self.checkpoints[0])
            del self.checkpoints[0]
            if not self.checkpoints:
                (folder / REPLACED).unlink(missing_ok=True)

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Mark the checkpoints, so that none is resumed if the process is killed inside the context."""
        if not self.checkpoints:
            yield
            return
        marker = self.checkpoints[0].parent / REPLACED
        with explained_write_errors(marker.parent), atomic_write(marker) as file:
            file.write(json.dumps([checkpoint.name for checkpoint in self.checkpoints]).encode())
        try:
            yield
        finally:
            marker.unlink(missing_ok=True)


def earlier_run(
    folder: str | os.PathLike[str],
    *,
    resume: bool,
    overwrite: bool,
    in_use: Iterable[object] = (),
    data: Iterable[object] = (),
) -> EarlierRun:
    """Check whether `folder`, which may be missing, can be used; returns what the new run will replace. Changes
    nothing.

    Args:
        resume: continue the earlier run, so replace nothing.
        overwrite: permission to replace an earlier run.
        in_use: model and tokenizer of the new run: paths, names and other objects, which are ignored.
        data: training and evaluation data: files, patterns and lists of them, and other objects, which are ignored.

    Raises:
        ConfigError: both flags are set; the folder holds an earlier run and neither is set; or the new run reads a
            checkpoint that it would remove, or data inside the model's folder, which its model replaces.
        OutputError: `model` is no saved model, a link, a mount point or not writable; or another run uses the folder.
    """
    if resume and overwrite:
        raise ConfigError(
            "resume=True continues the run in output_dir and overwrite=True replaces it: pass one of them"
        )
    path = path_of(folder, "output_dir")
    if not os.fspath(folder):
        return EarlierRun([])  # `writable` refuses it
    if (path / CLAIM).exists():
        with one_run(path):  # report a running process before its files
            pass
    _check_replaceable(path / "model")
    models = [model for name in ("model", ".model-old") if (model := path / name).exists()]  # see `replace_folder`
    for model in models:
        is_saved = any((model / name).is_file() for name in ("config.json", "adapter_config.json"))
        if not is_saved and not (model.is_dir() and not any(model.iterdir())):
            raise OutputError(
                f"{model} is not a saved model, and training would replace it: pass another output_dir, such as "
                f"{_free_beside(path)}"
            )
    files = [file for used in data for file in _files(used)]
    for file in files:
        for model in models:
            if file.is_relative_to(model.resolve()):
                raise ConfigError(
                    f"this run reads {file}, and its model would replace {model} with all files: move the data out of "
                    f"output_dir, or pass another output_dir, such as {_free_beside(path)}"
                )
    if resume:
        return EarlierRun([])
    named = [found for found in path.glob("checkpoint-*") if found.name.removeprefix("checkpoint-").isdigit()]
    named += path.glob(".checkpoint-*-old")  # see `set_aside`
    checkpoints = sorted(found for found in named if found.is_dir())
    if (models or checkpoints) and not overwrite:
        there = "a trained model" if models else f"checkpoints ({checkpoints[-1].name})"
        goes_on = "pass resume=True (--resume) to continue it, overwrite=True (--overwrite) to replace it"
        if not models and all(why_not_resumable(each) is not None for each in checkpoints):
            goes_on = (
                "no checkpoint is complete, so the run cannot be resumed: pass overwrite=True (--overwrite) to start "
                "over"
            )
        raise ConfigError(
            f"the output folder {path} contains {there} of an earlier run: {goes_on}, or another output_dir "
            f"(--output), such as {_free_beside(path)}"
        )
    for read in (*files, *(file for used in in_use for file in _files(used))):
        for checkpoint in checkpoints:
            if read.is_relative_to(checkpoint.resolve()):
                raise ConfigError(
                    f"this run reads {read}, which overwrite=True would remove: pass another output_dir, such as "
                    f"{_free_beside(path)}, or resume=True to continue from the newest checkpoint"
                )
    return EarlierRun(checkpoints)


def _files(used: object) -> Iterator[Path]:
    """Real paths of files and folders, also by patterns and in lists. Invalid names are refused where they are read."""
    if isinstance(used, list | tuple):
        for each in used:
            if isinstance(each, str | os.PathLike):
                yield from _files(each)
    elif isinstance(used, str | os.PathLike) and (name := os.fspath(used)) and why_no_name(name) is None:
        yield from (Path(os.path.realpath(each)) for each in matching(Path(name).expanduser()))


def _check_replaceable(model: Path) -> None:
    if model.is_symlink():
        why = f"is a link to {os.readlink(model)}, which a saved model cannot replace"
    elif model.exists() and os.path.ismount(model):
        why = "is a mount point, which a saved model cannot replace"
    elif model.is_dir() and not os.access(model, os.R_OK | os.W_OK | os.X_OK):
        why = "is not writable by this user, so a saved model cannot replace it"
    else:
        return
    raise OutputError(f"{model} {why}: remove it, or pass another output_dir, such as {_free_beside(model.parent)}")


def _free_beside(folder: Path) -> Path:
    named = folder if folder.name else folder.resolve() / "run"
    return next(path for number in count(2) if not (path := named.with_name(f"{named.name}-{number}")).exists())
