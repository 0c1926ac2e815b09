"""The output folder: checked before any work, its checkpoints checked before resuming, the model saved in one move."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

from safetensors import SafetensorError, safe_open

from offloadkit.errors import ConfigError, ModelError, OffloadkitError, OutputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def writable(folder: str | os.PathLike[str], *, resume: bool = False) -> Path:
    """The folder, created if it is missing, and checked to be writable.

    Args:
        resume: whether it must have a complete checkpoint. If it has none, the folder is not created.

    Raises:
        ConfigError: its name is empty, or `resume` finds no complete checkpoint.
        OutputError: it cannot be created, or nothing can be written into it.
    """
    if not os.fspath(folder):
        raise ConfigError("output_dir is empty: pass the name of a folder ('.' is the current one)")
    path = Path(folder).expanduser()
    if path.exists() and not path.is_dir():
        raise OutputError(f"the output folder {path} is a file: pass another output_dir")
    if resume:
        newest_checkpoint(path)
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
    """The newest complete checkpoint of the Trainer.

    It is the one written last, not the one with the highest step: an earlier, longer run may have left such a one.

    Raises:
        ConfigError: there is no complete checkpoint.
    """
    whole = _complete_checkpoints(folder)
    if not whole:
        raise ConfigError(
            f"there is no complete checkpoint to resume from in {folder}: leave resume out to begin anew; a run writes "
            "checkpoints with save_strategy='epoch' (the default) or 'steps'"
        )
    return whole[-1]


def _complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that were written completely, the newest last."""
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    # The Trainer writes trainer_state.json last: where it is, the rest is.
    whole = [path for path in found if (path / "trainer_state.json").is_file() and (path / "optimizer.pt").is_file()]

    def age(path: Path) -> tuple[int, int]:
        return (path / "trainer_state.json").stat().st_mtime_ns, int(path.name.removeprefix("checkpoint-"))

    return sorted(whole, key=age)


def check_readable(checkpoint: Path) -> None:
    """Check that no file of the checkpoint is truncated or damaged. Of large files only the directory is read.

    Raises:
        ModelError: a file cannot be opened.
    """
    for path in sorted(checkpoint.iterdir()):
        why = why_broken(path)
        if why is None:
            continue
        others = [other.name for other in _complete_checkpoints(checkpoint.parent) if other != checkpoint]
        then = f"resume=True (--resume) then goes on from {others[-1]}" if others else "there is none before it"
        raise ModelError(
            f"{path.name} of the checkpoint {checkpoint} cannot be read ({why}): it is cut or broken. Delete the "
            f"folder {checkpoint}; {then}"
        )


def why_broken(path: Path) -> str | None:
    """Why a file of JSON, of safetensors or of `torch.save` cannot be opened. None if it can."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                pass
        elif path.suffix in (".pt", ".pth", ".bin"):
            with ZipFile(path):
                pass
    except (OSError, ValueError, SafetensorError, BadZipFile) as error:
        return str(error)
    return None


_SIZES = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "d_kv"]
_SIZES += ["head_dim", "intermediate_size", "d_ff"]


def check_same_model(checkpoint: Path, config: PreTrainedConfig) -> None:
    """Check that the checkpoint's model has the type and sizes of `config`.

    Raises:
        ConfigError: it has not.
    """
    saved = json.loads((checkpoint / "config.json").read_text())
    sizes: dict[str, tuple[Any, Any]] = {"model_type": (saved.get("model_type"), config.model_type)}
    if saved.get("model_type") == config.model_type:
        before = type(config).from_dict(saved)
        for name in _SIZES:
            sizes[name] = getattr(before, name, None), getattr(config, name, None)
    for name, (value, own) in sizes.items():
        if value != own:
            raise ConfigError(
                f"{checkpoint} is of another model, with {name} {value}, and this one has {own}: resume with the "
                "model of that run, or pass another output_dir"
            )


def other_rows(checkpoint: Path, batch_size: int) -> str | None:
    """A warning if the checkpoint was made with another batch size, else None.

    The Trainer derives the position in the dataset from the number of steps, so it continues at another row.
    """
    before = json.loads((checkpoint / "trainer_state.json").read_text()).get("train_batch_size")
    if before in (None, batch_size):
        return None
    return (
        f"batch_size is {batch_size} now and was {before}: steps are counted on, at {batch_size} rows each, so some "
        f"rows are {'seen again' if batch_size < before else 'left out'}, and the weights not those of one run; "
        f"batch_size={before} goes on exactly"
    )


@contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """A context that turns the error of a full disk into an `OutputError`: each library raises its own.

    Raises:
        OutputError: something could not be written.
    """
    try:
        yield
    except OffloadkitError:
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):  # torch's zip writer
            raise
        free = shutil.disk_usage(folder if folder.is_dir() else folder.parent).free
        raise OutputError(
            f"{folder} could not be written, {free / 2**30:.2f} GiB are free there ({error}): make room, or pass "
            "another output_dir"
        ) from error


def put_in_place(folder: Path, save: Callable[[Path], None]) -> None:
    """Have `save` fill a new folder beside `folder`, and rename it to `folder` when it is complete.

    Raises:
        OutputError: it could not be written (a full disk). The old `folder` is still there.
    """
    new, old = (folder.with_name(f".{folder.name}-{kind}") for kind in ("new", "old"))
    try:
        with written_to(folder):
            if old.exists() and not folder.exists():  # a process was killed between the renames below
                old.rename(folder)
            for leftover in (new, old):
                shutil.rmtree(leftover, ignore_errors=True)
            new.mkdir(parents=True)
            save(new)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    with written_to(folder):
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
