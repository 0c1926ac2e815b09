"""What an earlier `finetune` left in an output folder. It is replaced only where the user says so."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from offloadkit.checkpoint.folder import REPLACED, remove_checkpoint, why_not_whole, written_beside, written_to
from offloadkit.checkpoint.one_run import CLAIM, one_run
from offloadkit.errors import ConfigError, OutputError
from offloadkit.files import path_of, why_no_name


@dataclass
class EarlierRun:
    """What an output folder held before a new run, and the new run is to replace."""

    checkpoints: list[Path]
    """Those not removed yet. The earlier model is none of these: it stays until the new one takes its place."""

    def remove_checkpoints(self) -> None:
        """Remove them, once: the new run is ready to write its own, which may have the same names.

        Raises:
            OutputError: one cannot be removed.
        """
        while self.checkpoints:
            folder = self.checkpoints[0].parent
            with written_to(folder):
                remove_checkpoint(self.checkpoints[0])
            del self.checkpoints[0]
            if not self.checkpoints:
                (folder / REPLACED).unlink(missing_ok=True)

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """While it is open, a kill leaves the checkpoints as ones that a new run was to replace: nothing resumes them.

        An error before they are removed leaves them as they were.
        """
        if not self.checkpoints:
            yield
            return
        marker = self.checkpoints[0].parent / REPLACED
        with written_to(marker.parent), written_beside(marker) as file:
            file.write(json.dumps([checkpoint.name for checkpoint in self.checkpoints]).encode())
        try:
            yield
        finally:
            marker.unlink(missing_ok=True)


def earlier_run(
    folder: str | os.PathLike[str], *, resume: bool, overwrite: bool, in_use: Iterable[object] = ()
) -> EarlierRun:
    """What is to be replaced in `folder`, once it is clear that it may be. Nothing is changed here.

    Args:
        folder: need not exist.
        resume: go on with what is there: nothing is to be replaced.
        overwrite: the user allows it.
        in_use: what the new run reads: folders and files, names, and anything else, which is passed over.

    Raises:
        ConfigError: both are wanted, or an earlier run is there and neither is. Also if the new run reads a checkpoint
            that it would remove.
        OutputError: `model` in it is no saved model, so it is not replaced; or it cannot be: a link, a mount point, or
            not writable. Or another run is there.
    """
    if resume and overwrite:
        raise ConfigError("resume=True goes on with the run in output_dir and overwrite=True replaces it: pass one")
    path = path_of(folder, "output_dir")
    if not os.fspath(folder):
        return EarlierRun([])  # `writable` refuses it
    if (path / CLAIM).exists():
        with one_run(path):  # another run there is named before what it has written
            pass
    _check_replaceable(path / "model")
    models = [model for name in ("model", ".model-old") if (model := path / name).exists()]  # see `put_in_place`
    for model in models:
        if not (model / "config.json").is_file() and not (model.is_dir() and not any(model.iterdir())):
            raise OutputError(
                f"{model} is no saved model, and training would replace it: pass another output_dir, such as "
                f"{_free_beside(path)}"
            )
    if resume:
        return EarlierRun([])
    named = [found for found in path.glob("checkpoint-*") if found.name.removeprefix("checkpoint-").isdigit()]
    named += path.glob(".checkpoint-*-old")  # see `set_aside`
    checkpoints = sorted(found for found in named if found.is_dir())
    if (models or checkpoints) and not overwrite:
        there = "a trained model" if models else f"checkpoints ({checkpoints[-1].name})"
        goes_on = "pass resume=True (--resume) to go on with it, overwrite=True (--overwrite) to replace it"
        if not models and all(why_not_whole(each) is not None for each in checkpoints):
            goes_on = (
                "none of them is whole, so no run can go on from them: pass overwrite=True (--overwrite) to begin anew"
            )
        raise ConfigError(
            f"the output folder {path} holds {there} of an earlier run: {goes_on}, or another output_dir (--output), "
            f"such as {_free_beside(path)}"
        )
    for used in in_use:
        name = os.fspath(used) if isinstance(used, str | os.PathLike) else ""
        is_path = bool(name) and why_no_name(name) is None  # others are refused where they are read
        read = Path(os.path.realpath(os.path.expanduser(name))) if is_path else None
        for checkpoint in checkpoints:
            if read is not None and read.is_relative_to(checkpoint.resolve()):
                raise ConfigError(
                    f"this run reads {used}, which overwrite=True would remove: pass another output_dir, such as "
                    f"{_free_beside(path)}, or resume=True to go on from the newest checkpoint"
                )
    return EarlierRun(checkpoints)


def _check_replaceable(model: Path) -> None:
    """Raise `OutputError` where a trained model could not take the place of the folder `model` at the end."""
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
    """A folder of a similar name that is not there."""
    named = folder if folder.name else folder.resolve() / "run"
    return next(path for number in count(2) if not (path := named.with_name(f"{named.name}-{number}")).exists())
