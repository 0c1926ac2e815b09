"""The output folder: found writable before any work, checkpoints found whole, the model put in place in one move."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from offloadkit.errors import ConfigError, OutputError


def writable(folder: str | os.PathLike[str]) -> Path:
    """The folder, made where it was missing.

    Raises:
        OutputError: it cannot be made, or nothing can be written into it.
    """
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"\0")
            probe.flush()
    except OSError as error:
        raise OutputError(
            f"the output folder {path} cannot be written ({error.strerror or error}): pass another output_dir, or make "
            "this one writable"
        ) from error
    return path


def newest_checkpoint(folder: Path) -> Path:
    """The Trainer's checkpoint of the highest step that was written to its end.

    Raises:
        ConfigError: there is none.
    """
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    # The Trainer writes trainer_state.json last.
    whole = [path for path in found if (path / "trainer_state.json").is_file() and (path / "optimizer.pt").is_file()]
    if not whole:
        raise ConfigError(
            f"there is no complete checkpoint to resume from in {folder}: leave resume out to begin anew; a run writes "
            "checkpoints with save_strategy='epoch' (the default) or 'steps'"
        )
    return max(whole, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def put_in_place(folder: Path, save: Callable[[Path], None]) -> None:
    """Have `save` fill a new folder beside `folder`, then let it take that place: never a half-written one.

    Raises:
        OutputError: it could not be written (a full disk); what was at `folder` is still there.
    """
    new, old = (folder.with_name(f".{folder.name}-{kind}") for kind in ("new", "old"))
    try:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        new.mkdir(parents=True)
        save(new)
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    except OSError as error:
        raise OutputError(f"the model could not be written to {folder}: {error}; make room there") from error
    finally:
        for leftover in (new, old):
            if folder.exists():
                shutil.rmtree(leftover, ignore_errors=True)
