"""The output folder and its checkpoints: check the folder, verify checkpoints, save folders atomically.

`manifest.json` lists a checkpoint's files with sizes and checksums, the run that wrote them, and the contents ("all",
"compact" or "weights"). It is written last, so a folder with a manifest is complete. Checkpoints of transformers'
Trainer have none: they are recognized by `optimizer.pt` and sort before all of ours.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, get_args
from zipfile import BadZipFile, ZipFile

import psutil
import xxhash
from safetensors import SafetensorError, safe_open

from offloadkit.checkpoint.origin import Origin, parse_origin, recorded_origin
from offloadkit.errors import ConfigError, ModelError, OffloadkitError, OutputError, cut, shown
from offloadkit.facts.config import Contents
from offloadkit.facts.files import path_of, read_json, why_no_model_name, why_not_plain
from offloadkit.facts.threads import ThreadPool
from offloadkit.facts.units import format_bytes

MANIFEST = "manifest.json"
REPLACED = ".offloadkit-replaced.json"
"""Lists the checkpoints that a run will replace once its first step is done."""
_PROBE = ".offloadkit-probe-"
_VERSION = 4
PIECE_BYTES = 64 << 20
_READ_BYTES = 1 << 20
"""Bytes per read, small enough for the core's cache."""
_CHECKSUM_THREADS = 8
_NAMES_READ = re.compile(
    r"(states-.*|random.*|order|run|config|trainer_state|weights|(model|adapter_model|pytorch_model).*)"
    r"\.(json|safetensors|bin)"
)
"""Files that resuming reads. Users may add files with other names."""
_NAMES_OF_OURS = re.compile(r"(run|random.*|order)\.json|(states-.*|weights|losses)\.safetensors")


def writable(folder: str | os.PathLike[str], *, resume: bool = False) -> Path:
    """Create the folder if it is missing and check that it is writable.

    Args:
        resume: require a complete checkpoint; without one the folder is not created.

    Raises:
        ConfigError: the name is empty, or `resume` finds no complete checkpoint.
        OutputError: the folder cannot be created, or `check_saving` fails.
    """
    path = path_of(folder, "output_dir")
    if not os.fspath(folder):
        raise ConfigError("output_dir is empty: pass the name of a folder ('.' is the current one)")
    if path.exists() and not path.is_dir():
        raise OutputError(f"the output folder {path} is a file: pass another output_dir")
    if resume:
        newest_checkpoint(path, verify=False)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(path, error) from error
    check_saving(path)
    return path


def check_saving(folder: Path) -> None:
    """Try every operation that saving needs: create, replace and rename files and folders. Raises `OutputError`."""
    is_written, probe = False, None
    if (why := why_no_model_name(str(folder))) is not None:
        raise OutputError(f"the output folder {str(folder)!r} cannot be used: {why}. Pass another output_dir")
    try:
        for left in folder.glob(f"{_PROBE}*"):
            process = left.name.removeprefix(_PROBE).partition("-")[0]
            if process.isdecimal() and not psutil.pid_exists(int(process)):  # killed during this check
                shutil.rmtree(left, ignore_errors=True)
        probe = Path(tempfile.mkdtemp(prefix=f"{_PROBE}{os.getpid()}-", dir=folder))
        (new := probe / "new").mkdir()
        for _ in range(2):
            with atomic_write(new / "file") as file:
                file.write(b"\0")
                file.flush()
                os.fsync(file.fileno())
        sync_folder(new)
        is_written = True
        new.rename(probe / "old")
    except OSError as error:
        if not is_written:
            raise _not_writable(folder, error) from error
        raise OutputError(
            f"the output folder {folder} does not support renaming folders ({error.strerror or error}), so a kill "
            "while saving would lose checkpoints: pass another output_dir, on a local disk, and copy the results from "
            "there"
        ) from error
    finally:
        if probe is not None:
            shutil.rmtree(probe, ignore_errors=True)


def _not_writable(folder: Path, error: OSError) -> OutputError:
    return OutputError(
        f"the output folder {folder} cannot be written ({error.strerror or error}): pass another output_dir, or make "
        "this one writable"
    )


def newest_checkpoint(folder: Path, *, verify: bool = True, recut: bool = False) -> Path:
    """The Trainer's newest complete checkpoint by time of writing; prints a line for each newer broken one.

    Args:
        verify: read all files and compare checksums; False checks only that all files exist.
        recut: see `check_readable`.

    Raises:
        ConfigError: no checkpoint is complete.
        ModelError: all are broken, or the newest one's weights were split into different files since.
    """
    whole = _complete_checkpoints(folder)
    if whole and not verify:
        return whole[-1]
    if whole:
        then = "start over in another output_dir, or with overwrite=True (--overwrite). save_total_limit=2 keeps two"
        return _first_readable(whole[::-1], then, recut=recut)
    skipped = "".join(f"; {path.name} {why}" for path, why in skipped_checkpoints(folder))
    anew = "Pass overwrite=True (--overwrite) instead of resume" if skipped else "Leave resume out"
    raise ConfigError(
        f"No valid checkpoint found in output directory {folder}: there is no complete checkpoint to resume from. "
        f"{anew} to start over; a run writes checkpoints with save_strategy='epoch' (the default) or 'steps'{skipped}"
    )


def readable_or_before(checkpoint: Path) -> Path:
    """`checkpoint`, or the newest readable earlier one next to it; prints a line for each broken one.

    Raises:
        ModelError: no checkpoint is readable.
    """
    recover_folder(checkpoint)
    others = [path.parent for path in checkpoint.parent.glob("*/" + MANIFEST) if path.parent != checkpoint]
    last = _sequence(checkpoint)
    before = [path for path in others if path.name[0] != "." and (not last or _sequence(path) < last)]
    found = [
        checkpoint,
        *sorted((path for path in before if why_not_resumable(path) is None), key=_sequence, reverse=True),
    ]
    return _first_readable(found, "load a checkpoint from another folder, or start over")


def _first_readable(checkpoints: Sequence[Path], then: str, *, recut: bool = False) -> Path:
    broken: list[str] = []
    others: list[str] = []
    run = _run_of(checkpoints[0])
    for checkpoint in checkpoints:
        if run is not None and _run_of(checkpoint) not in (run, None):
            others.append(checkpoint.name)
            continue
        why = _why_unreadable(checkpoint, recut=recut)
        if why is None:
            for newer in broken:
                print(f"resuming from {checkpoint.name}, because a newer checkpoint is broken: {newer}", flush=True)
            return checkpoint
        broken.append(why)
    of_others = f" ({others[0]} belongs to another run)" if others else ""
    raise ModelError(f"{broken[0]}. No earlier checkpoint can be read{of_others}: {then}")


def _run_of(checkpoint: Path) -> str | None:
    manifest = _manifest(checkpoint)
    if not isinstance(manifest, str):
        return manifest.origin.run
    said = recorded_origin(checkpoint / "run.json")
    return None if said is None else said[0].run


def _checkpoints(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=lambda path: (_sequence(path), int(path.name.removeprefix("checkpoint-"))))


def _sequence(checkpoint: Path) -> int:
    """Counted from 1; 0 without a manifest."""
    manifest = _manifest(checkpoint)
    return 0 if isinstance(manifest, str) else manifest.sequence


def _complete_checkpoints(folder: Path) -> list[Path]:
    _put_back(folder)
    return [path for path in _checkpoints(folder) if why_not_resumable(path) is None]


def skipped_checkpoints(folder: Path) -> list[tuple[Path, str]]:
    """Checkpoints that cannot be resumed, with reasons. File contents are not read."""
    return [(path, why) for path in _checkpoints(folder) if (why := why_not_resumable(path)) is not None]


def rotate_checkpoints(folder: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints beyond `limit` (None or 0: no limit), but never the newest or the best one.

    Incomplete checkpoints, and those this process found broken, are not counted and are removed as well. Raises
    `OutputError` if a checkpoint cannot be removed.
    """
    if limit is None or limit <= 0:
        return
    found = _checkpoints(folder)
    usable = [path for path in found if _is_usable(path)]
    kept = {*usable[-1:], *(path for path in found if best is not None and path.resolve() == Path(best).resolve())}
    for path in reversed(usable):
        if len(kept) < limit:
            kept.add(path)
    for path in found:
        if path not in kept:
            with explained_write_errors(folder):
                remove_checkpoint(path)


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint, its manifest first, so that a kill cannot leave a folder that looks complete."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    (checkpoint / "trainer_state.json").unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def _is_usable(checkpoint: Path) -> bool:
    """Whether rotation counts the checkpoint. Weights-only and transformers' checkpoints count too."""
    if not (checkpoint / MANIFEST).is_file():
        return (checkpoint / "trainer_state.json").is_file() and not (checkpoint / "run.json").is_file()
    _, why = _verdicts.get(checkpoint.absolute(), (None, None))
    return why is None and _why_incomplete(checkpoint) is None


def why_not_resumable(checkpoint: Path) -> str | None:
    """Why the checkpoint cannot be resumed, or None if it is complete.

    One without optimizer states is complete if its manifest says "weights".
    """
    if checkpoint.name in _replaced(checkpoint.parent):
        return "was to be replaced (overwrite=True) by a run that was killed before its first step"
    if (checkpoint / MANIFEST).is_file():
        if (why := _why_incomplete(checkpoint)) is not None:
            return why
        is_whole = contents_of(checkpoint) == "weights" or any(checkpoint.glob("states-*"))
        return None if is_whole else "has only weights, no optimizer states"
    # transformers' Trainer writes trainer_state.json last.
    if (checkpoint / "trainer_state.json").is_file() and (checkpoint / "optimizer.pt").is_file():
        return None
    return f"has no {MANIFEST}, so its writing was interrupted"


def _replaced(folder: Path) -> list[str]:
    try:
        found = read_json(folder / REPLACED)
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []


def _why_incomplete(checkpoint: Path) -> str | None:
    manifest = _manifest(checkpoint)
    if isinstance(manifest, str):
        return manifest
    names = _names(checkpoint)
    lacking = sorted(manifest.files.keys() - names)
    if _weights_cut_anew(checkpoint, names - manifest.files.keys()):
        lacking = [name for name in lacking if not name.startswith("model")]
    return f"lacks {lacking[0]}, so a part of it was removed" if lacking else None


def _names(checkpoint: Path) -> set[str]:
    return {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()} - {MANIFEST}


def write_manifest(checkpoint: Path, origin: Origin, contents: Contents = "all") -> None:
    """Write the manifest, which marks the checkpoint as complete."""
    _verdicts.pop(checkpoint.absolute(), None)
    files = {}
    with ThreadPool(1, "offloadkit-sync") as beside_us:
        for name in sorted(_names(checkpoint)):
            with (path := checkpoint / name).open("rb") as file:
                on_disk = beside_us.submit(os.fsync, file.fileno())  # must finish before the manifest names the file
                files[name] = {"size": path.stat().st_size, "xxh3": checksums(path, name)}
                on_disk.result()
    beside = [path.parent for path in checkpoint.parent.glob("*/" + MANIFEST)]
    manifest: dict[str, Any] = {"format": "offloadkit checkpoint", "version": _VERSION}
    manifest |= origin._asdict()
    manifest |= {"contents": contents, "sequence": 1 + max(map(_sequence, beside), default=0), "files": files}
    manifest["xxh3"] = _checksum_of(manifest)
    with atomic_write(checkpoint / MANIFEST) as file:
        file.write(json.dumps(manifest, indent=1).encode())
        file.flush()
        os.fsync(file.fileno())
    for folder in {path.parent for path in checkpoint.rglob("*")}:
        sync_folder(folder)
    sync_name(checkpoint)


def checksums(path: Path, name: str) -> list[str]:
    """One 64-bit xxh3 per 64 MiB piece of a file, seeded with `name` (path in the checkpoint) and the piece's
    offset.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size

        def of_piece(start: int) -> str:
            found = xxhash.xxh3_64(f"{name} {start}".encode())
            end, memory = min(start + PIECE_BYTES, size), memoryview(bytearray(min(_READ_BYTES, size)))
            while start < end and (num_read := os.preadv(file.fileno(), [memory[: end - start]], start)):
                found.update(memory[:num_read])  # releases the GIL, as preadv does
                start += num_read
            return found.hexdigest()

        starts = range(0, max(size, 1), PIECE_BYTES)
        if len(starts) == 1:
            return [of_piece(0)]
        with checksum_threads() as pool:
            return list(pool.map(of_piece, starts))


def checksum_threads() -> ThreadPool:
    return ThreadPool(min(_CHECKSUM_THREADS, os.cpu_count() or 1), "offloadkit-checksums")


def _checksum_of(manifest: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps({**manifest, "xxh3": ""}, sort_keys=True).encode())


def sync_folder(folder: Path) -> None:
    """Fsync a folder's entries, if the file system supports it; some network drives do not."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def sync_name(path: Path) -> None:
    """Fsync the folders above `path`, because any of them may be new."""
    for folder in path.absolute().parents:
        with suppress(PermissionError):  # folders of another user are not new
            sync_folder(folder)


class _Saved(NamedTuple):
    size: int
    checksums: list[str]


class _Manifest(NamedTuple):
    origin: Origin
    sequence: int
    files: dict[str, _Saved]
    contents: Contents


def _manifest(checkpoint: Path) -> _Manifest | str:
    try:
        found = read_json(checkpoint / MANIFEST)
        if found["xxh3"] == _checksum_of(found):
            if found["version"] != _VERSION:
                return (
                    f"was written by another version of offloadkit (format {found['version']}, and this one reads "
                    f"{_VERSION})"
                )
            files = {str(name): _Saved(int(each["size"]), list(each["xxh3"])) for name, each in found["files"].items()}
            if (contents := found.get("contents", "all")) in get_args(Contents):
                return _Manifest(parse_origin(found), int(found["sequence"]), files, contents)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        pass
    return f"has a {MANIFEST} that is missing, truncated or corrupt"


def origin_of(checkpoint: Path) -> Origin:
    """The run, attempt and update that wrote the checkpoint. Raises `ModelError` if the manifest cannot be read."""
    return _read_manifest(checkpoint).origin


def contents_of(checkpoint: Path) -> Contents:
    """The contents that the manifest names. Raises `ModelError` if the manifest cannot be read."""
    return _read_manifest(checkpoint).contents


def _read_manifest(checkpoint: Path) -> _Manifest:
    manifest = _manifest(checkpoint)
    if isinstance(manifest, str):
        raise ModelError(f"the checkpoint {checkpoint} {manifest}")
    return manifest


def origin_from(checkpoint: Path) -> Origin:
    """The origin of a run that resumes from `checkpoint`: same run id, one attempt later than any in the folder."""
    own = origin_of(checkpoint)
    beside = [_manifest(path.parent) for path in checkpoint.parent.glob("*/" + MANIFEST)]
    attempts = [each.origin.attempt for each in beside if not isinstance(each, str) and each.origin.run == own.run]
    return own._replace(attempt=1 + max(own.attempt, *attempts))


_verdicts: dict[Path, tuple[object, str | None]] = {}
"""Cache by checkpoint: its files' times and sizes when read, and why it is unreadable or None."""


def check_readable(checkpoint: Path, *, recut: bool = False, weights_alone: bool = False) -> None:
    """Check that the checkpoint is complete and every file has the bytes that were written; raises `ModelError`.

    Unchanged files are read only once per process. Files of transformers' checkpoints have no checksums and are only
    opened.

    Args:
        recut: accept weights that were split into different files since; their bytes cannot be verified then.
        weights_alone: accept a checkpoint without optimizer states.
    """
    why = _why_unreadable(checkpoint, recut=recut)
    if why is None and not weights_alone and (lacks := why_not_resumable(checkpoint)) is not None:
        why = f"training cannot resume from {checkpoint}: it {lacks}"
    if why is not None:
        raise ModelError(f"{why}. {_what_then(checkpoint)}")


def _why_unreadable(checkpoint: Path, *, recut: bool) -> str | None:
    """Why the checkpoint is unreadable, or None. Raises `ModelError` if the user must decide."""
    if not checkpoint.is_dir():
        raise ModelError(f"Can't find a valid checkpoint at {checkpoint}: it is not a folder")
    has_manifest = (checkpoint / MANIFEST).is_file()
    if not has_manifest and (why := why_not_resumable(checkpoint)) is not None:  # do not list an unrelated folder
        return f"training cannot resume from {checkpoint}: it {why}"
    names, saved, origin = _names(checkpoint), {}, None
    if has_manifest:
        manifest = _manifest(checkpoint)
        if isinstance(manifest, str):
            return f"{MANIFEST} of the checkpoint {checkpoint} cannot be used: the checkpoint {manifest}"
        saved, origin = manifest.files, manifest.origin
    if (cut_anew := bool(saved) and _weights_cut_anew(checkpoint, names - saved.keys())) and not recut:
        raise ModelError(
            f"the weights in {checkpoint} were split into other files after it was written, so they may not match its "
            "optimizer states: restore the run's files, or pass offload=OffloadConfig(resume_incomplete=True) to "
            "resume with these weights"
        )
    seen = [(name, os.stat(checkpoint / name)) for name in sorted({*names, *([MANIFEST] if saved else [])})]
    times = [(name, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for name, each in seen]
    before, why = _verdicts.get(checkpoint.absolute(), (None, None))
    if before != (times, recut):
        why = None if origin is None else _first_of_another(checkpoint, names, origin)
        why = why or _first_broken(checkpoint, names, saved, cut_anew=cut_anew)
        _verdicts[checkpoint.absolute()] = (times, recut), why
    return why


def _first_of_another(checkpoint: Path, names: set[str], origin: Origin) -> str | None:
    for name in sorted(filter(_NAMES_OF_OURS.fullmatch, names)):
        said, file = recorded_origin(checkpoint / name) or (origin, name)
        if file != name:
            named = f"{cut(str(file))} ({cut(str(said))})"
            return (
                f"{name} of the checkpoint {checkpoint} was written as {named}: files of ranks were swapped, or copied "
                "under other names"
            )
        if said != origin:
            return (
                f"{name} of the checkpoint {checkpoint} was written by {said}, but {MANIFEST} by {origin}: files of "
                "two checkpoints were mixed"
            )
    return None


def _first_broken(checkpoint: Path, names: set[str], saved: dict[str, _Saved], *, cut_anew: bool) -> str | None:
    """A sentence about the first missing, changed or added file, or None.

    `names`: files in the folder. `saved`: files in the manifest; empty for a checkpoint of transformers' Trainer.
    `cut_anew`: the weights were split into different files.
    """
    for name in (*sorted(saved.keys() - names), *sorted(names)):
        is_cut_anew = cut_anew and name.startswith("model")
        why: str | None
        if name not in names:
            why = None if is_cut_anew else "it is missing"
        elif name in saved:
            why = _why_changed(checkpoint, name, saved[name]) or why_broken(checkpoint / name)
        elif saved and not is_cut_anew:
            why = "it was added later" if _NAMES_READ.fullmatch(name) else None
        else:
            why = why_broken(checkpoint / name)
        if why is not None:
            return (
                f"{name} of the checkpoint {checkpoint} cannot be read ({why}): it is truncated, corrupt or from "
                "another run"
            )
    return None


def _why_changed(checkpoint: Path, name: str, saved: _Saved) -> str | None:
    path = checkpoint / name
    try:
        if (size := path.stat().st_size) != saved.size:
            return f"it has {size} bytes, but {saved.size} were written"
        found = checksums(path, name)
    except OSError as error:
        return error.strerror or str(error)
    differing = [at for at, (one, other) in enumerate(zip(found, saved.checksums, strict=False)) if one != other]
    if not differing and len(found) == len(saved.checksums):
        return None
    at = differing[0] if differing else 0
    return f"its bytes from {at * PIECE_BYTES:,} on differ from those written"


def _weights_cut_anew(checkpoint: Path, later: set[str]) -> bool:
    if "model.safetensors" in later:
        return True
    index = checkpoint / "model.safetensors.index.json"
    try:
        parts = read_json(index)["weight_map"].values()
        return later.issuperset({index.name, *parts})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _what_then(checkpoint: Path) -> str:
    others = [other.name for other in _complete_checkpoints(checkpoint.parent) if other != checkpoint]
    if not others:
        return "There is no other checkpoint in its folder"
    return f"Delete the folder {checkpoint}; resume=True (--resume) then continues from {others[-1]}"


def why_broken(path: Path) -> str | None:
    """Why a JSON, safetensors or `torch.save` file cannot be opened, or None."""
    if (other := why_not_plain(path)) is not None:
        return f"it is {other}, not a file"
    try:
        if path.suffix == ".json":
            read_json(path)
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                pass
        elif path.suffix in (".pt", ".pth", ".bin"):
            with ZipFile(path):
                pass
    except (OSError, ValueError, SafetensorError, BadZipFile) as error:
        return str(error)
    return None


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `ModelError`."""
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}): it is truncated or corrupt") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} contains {shown(found)}, but an object is needed: it is corrupt")
    return found


def free_bytes(folder: Path) -> int:
    """Bytes this user may write to the file system of `folder`; `sys.maxsize` if unknown."""
    try:
        found = shutil.disk_usage(next(each for each in (folder, *folder.absolute().parents) if os.path.isdir(each)))
    except OSError:
        return sys.maxsize
    return found.free if found.total else sys.maxsize  # FUSE file systems may report 0


def check_room(
    folder: Path, num_bytes: int, what: str, other_remedy: str = "", smaller: Mapping[str, int] | None = None
) -> None:
    """Check that `folder`'s file system has `num_bytes` free; raises `OutputError` about `what`.

    Args:
        smaller: bytes that would be taken with an option, by option. The message names those that fit.

    `statvfs` includes project quotas and quotas of many network drives, but often not user quotas. A write beyond a
    user quota fails in `explained_write_errors`.
    """
    if (free := free_bytes(folder)) < num_bytes:
        remedies = ["make room", "or pass another output_dir", *([f"or {other_remedy}"] if other_remedy else [])]
        for option, taken in (smaller or {}).items():
            if taken <= free:
                remedies.append(f"or pass {option}, which takes {format_bytes(taken)}")
        raise OutputError(
            f"{what} in {folder} would take {format_bytes(num_bytes)}, but only {format_bytes(free)} are free there: "
            + ", ".join(remedies)
        )


def colab_disk_warning(folder: Path) -> str | None:
    """A warning if `folder` is lost when its Colab runtime ends, else None."""
    path = Path(os.path.realpath(folder))
    mount = next(each for each in (path, *path.parents) if os.path.ismount(each))
    if "COLAB_RELEASE_TAG" not in os.environ or str(mount) not in ("/", "/content"):  # Drive is mounted below /content
        return None
    return (
        f"{folder} is on the disk of this Colab runtime and is lost with it: to keep it, run "
        "google.colab.drive.mount('/content/drive') in a cell, and write to a folder of Drive, such as "
        f"/content/drive/MyDrive/{path.name}"
    )


@contextmanager
def explained_write_errors(folder: Path) -> Iterator[None]:
    """Turn errors of a full disk or quota, which differ by library, into `OutputError`."""
    try:
        yield
    except OffloadkitError:
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):  # torch's zip writer
            raise
        free, room = free_bytes(folder), "make room"
        there = "" if free == sys.maxsize else f", {format_bytes(free)} are free there"
        if getattr(error, "errno", None) == errno.EDQUOT or f"os error {errno.EDQUOT}" in str(error):  # Rust's words
            there, room = ", a quota there is used up", "make room within it"
        raise OutputError(
            f"{folder} could not be written{there} ({error}): {room}, or pass another output_dir"
        ) from error


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that is renamed to `path` at the end, so mappings of the old file stay valid.

    On error the temporary file is removed and `path` is unchanged.
    """
    new = path.with_name(f".{path.name}-new")
    try:
        with new.open("wb") as file:
            yield file
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@contextmanager
def set_aside(folder: Path) -> Iterator[None]:
    """Move `folder` aside while a new one is written. On error the old folder is restored."""
    old = _aside(folder)
    recover_folder(folder)  # otherwise the only complete checkpoint might be removed below
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _new(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}-new")


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}-old")


def _put_back(folder: Path) -> None:
    for old in folder.glob(".checkpoint-*-old"):
        recover_folder(old.with_name(old.name.removeprefix(".").removesuffix("-old")))


def recover_folder(checkpoint: Path) -> None:
    """After a kill during saving: rename the new folder, if complete, or else the old one back to `checkpoint`."""
    if (checkpoint / MANIFEST).is_file() or not checkpoint.name:
        return
    for beside in (_new(checkpoint), _aside(checkpoint)):
        if beside.is_dir() and why_not_resumable(beside) is None:
            with explained_write_errors(checkpoint):
                if checkpoint.is_dir():
                    shutil.rmtree(checkpoint)
                beside.rename(checkpoint)
                sync_folder(checkpoint.parent)
            return


def replace_folder(folder: Path, save: Callable[[Path], None], marker: str = "") -> None:
    """Let `save` fill a temporary folder, then rename it to `folder`.

    A non-empty `folder` is replaced only if it contains the file `marker` ("": always). Raises `OutputError`, and
    leaves `folder` unchanged, if it is not such a folder or the disk is full.
    """
    if os.path.lexists(folder) and not folder.is_dir():  # root could rename /dev/null
        raise OutputError(f"{folder} exists and is not a folder: pass the name of a new folder")
    if marker and folder.is_dir() and any(folder.iterdir()) and not (folder / marker).is_file():
        raise OutputError(
            f"{folder} contains other files and no {marker}, so it is not a checkpoint: pass the name of a new folder"
        )
    new, old = _new(folder), _aside(folder)
    try:
        with explained_write_errors(folder):
            recover_folder(folder)
            if old.exists() and not folder.exists():  # killed between the two renames below
                old.rename(folder)
            for leftover in (new, old):
                shutil.rmtree(leftover, ignore_errors=True)
            new.mkdir(parents=True)
            sync_name(new)
            save(new)
            for path in (*new.rglob("*"), new):
                if path.is_dir():
                    sync_folder(path)
                else:
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    with explained_write_errors(folder):
        try:
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            if folder.exists():
                shutil.rmtree(new, ignore_errors=True)
            raise
        sync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
