"""Exclusive claims on output folders: a second run in the same folder is refused.

A claim is a record lock on a file in the folder. The system releases it when the process ends, and forked processes
(DataLoader workers) do not inherit it. On file systems without locks, the file is rewritten every few seconds, and a
changing file counts as a claim. A custom training loop claims its checkpoints (`Saves`) by a file next to them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from offloadkit.checkpoint.folder import atomic_write, check_saving, colab_disk_warning, explained_write_errors
from offloadkit.errors import OutputError
from offloadkit.facts.threads import Thread

CLAIM = ".offloadkit-run.json"
_SAVES = ".offloadkit-saves-{}.json"
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_TRIES = 20
HEARTBEAT_SECONDS = 5.0
"""Seconds between rewrites without locks. A claim is alive if its file changes within three of them."""

_claims: dict[Path, tuple[int, int, str]] = {}
"""Thread, nesting depth and start time by folder, for this process."""
_claiming = threading.Lock()


@contextmanager
def one_run(folder: Path) -> Iterator[None]:
    """Claim `folder` for this run. A thread may nest claims of one folder.

    Raises:
        OutputError: another run has claimed the folder, in this process or another one.
    """
    where, me = folder.resolve(), threading.get_ident()
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    with _claiming:
        thread, count, since = _claims.get(where, (me, 0, now))
        if thread != me:
            raise _claimed(folder, {"host": "this machine", "pid": os.getpid(), "started": since}, "another thread of")
        _claims[where] = me, count + 1, since
    try:
        if count:
            yield
            return
        with _claim_of_process(where / CLAIM):
            if (loop := _writer_of(where, _CHECKPOINT.fullmatch)) is not None:
                raise _claimed(folder, loop)
            yield
    finally:
        with _claiming:
            _claims[where] = me, count, since
            if not count:
                del _claims[where]


def has_claimed(folder: Path) -> bool:
    with _claiming:
        thread, _, _ = _claims.get(folder.resolve(), (None, 0, ""))
        return thread == threading.get_ident()


class Saves:
    """Claims of a training loop on its checkpoints, held until the loop ends."""

    def __init__(self) -> None:
        self._held: dict[Path, tuple[int, Path, list[str]]] = {}
        self._gone_on_from: set[tuple[Path, str]] = set()
        self._holder = _this_process()

    def go_on_from(self, checkpoint: Path) -> None:
        """Record the checkpoint this loop resumed from. If another process writes it, `claim` refuses its folder,
        because both loops would use the same names.
        """
        self._gone_on_from.add((checkpoint.parent.resolve(), checkpoint.name))

    def claim(self, checkpoint: Path) -> None:
        """Claim a checkpoint before writing it, in an existing parent folder.

        Raises:
            OutputError: another process writes this checkpoint, or the checkpoint that this loop resumed from.
        """
        folder, name = checkpoint.parent.resolve(), checkpoint.name
        if folder in self._held and name in self._held[folder][2]:
            return
        then = "Save to another folder, or wait until that run has ended"
        other = _writer_of(folder, lambda each: each == name or (folder, each) in self._gone_on_from)
        if other is not None:
            raise _claimed(checkpoint, other, then=then)
        if _CHECKPOINT.fullmatch(name) and (folder / CLAIM).exists():  # a Trainer's folder
            with one_run(folder):
                pass
        if folder not in self._held:
            check_saving(folder)
            path = folder / _SAVES.format(secrets.token_hex(4))
            new = path.with_name(f"{path.name}-new")
            descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._held[folder] = descriptor, path, []
            if (lost := colab_disk_warning(checkpoint)) is not None:
                print(lost, flush=True)
            _own_saves.add(path)
            with suppress(OSError):  # without locks no process is refused
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(path)
        descriptor, _, names = self._held[folder]
        names.append(name)
        os.pwrite(descriptor, json.dumps(self._holder | {"names": names}).encode(), 0)  # the text only grows

    def end(self) -> None:
        for descriptor, path, _ in self._held.values():
            _remove(path)
            _close(descriptor)
            _own_saves.discard(path)
        self._held.clear()


_own_saves: set[Path] = set()
"""Claim files of this process. Closing any descriptor of such a file would release its lock."""


def another_writer(checkpoint: Path) -> str | None:
    holder = _writer_of(checkpoint.parent.resolve(), lambda name: name == checkpoint.name)
    return None if holder is None else f"{checkpoint} is in use by {_who(holder)}: this run cannot save there"


def _writer_of(folder: Path, wanted: Callable[[str], object]) -> dict[str, Any] | None:
    """Another process whose loop writes a `wanted` name. Removes files of loops that have ended."""
    for path in folder.glob(_SAVES.format("*")):
        if path in _own_saves:
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # the loop just ended, or belongs to another user
            continue
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)  # unlocked, so its process was killed
        except OSError as error:
            holder = _read(path)
            if error.errno not in _NO_LOCKS and any(wanted(str(name)) for name in holder.get("names", ())):
                return holder
        finally:
            os.close(descriptor)
    return None


def _this_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}


def _claimed(
    folder: Path,
    holder: dict[str, Any],
    of: str = "",
    then: str = "Pass another output_dir, or wait until that run has ended",
) -> OutputError:
    return OutputError(
        f"{folder} is in use by {of + ' ' if of else ''}{_who(holder)}: a second run there would replace what it has "
        f"saved. {then}"
    )


def _who(holder: dict[str, Any]) -> str:
    return f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('started')}"


@contextmanager
def _claim_of_process(path: Path) -> Iterator[None]:
    holder = _this_process()
    with explained_write_errors(path.parent):
        descriptor, locks = _locked(path)
    try:
        if not locks:
            with _heartbeat(path, holder):
                yield
            return
        with explained_write_errors(path.parent):
            # closing another descriptor of the file would release the lock
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        try:
            yield
        finally:
            _remove(path)
    finally:
        _close(descriptor)


def _remove(path: Path) -> None:
    """Ignores errors, because a file without a lock claims nothing."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _close(descriptor: int) -> None:
    with suppress(OSError):  # network drives write on close, but nobody reads this file any more
        os.close(descriptor)


def _locked(path: Path) -> tuple[int, bool]:
    """Open and lock the file; returns the descriptor, and False if the file system has no locks.

    Raises `OutputError` if another process holds the lock.
    """
    for _ in range(_TRIES):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(descriptor, path):
                return descriptor, True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return descriptor, False
            _close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _claimed(path.parent, _read(path)) from error
            raise
        _close(descriptor)  # the previous run removed the file in the meantime
    # the inode differs every time, so a lock has no meaning here
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), False


def _is_there(descriptor: int, path: Path) -> bool:
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


@contextmanager
def _heartbeat(path: Path, holder: dict[str, Any]) -> Iterator[None]:
    if before := _content(path):
        print(f"{path.parent} has no file locks: checking whether another run uses it", file=sys.stderr, flush=True)
        for _ in range(3):
            time.sleep(HEARTBEAT_SECONDS)
            if _content(path) not in (before, b""):
                raise _claimed(path.parent, _read(path))
    else:
        print(
            f"{path.parent} has no file locks: a file in it shows that this run is alive", file=sys.stderr, flush=True
        )
    with explained_write_errors(path.parent):
        _write(path, holder | {"beat": 0})
    ended = threading.Event()

    def beat() -> None:
        number = 0
        while not ended.wait(HEARTBEAT_SECONDS):
            number += 1
            with suppress(OSError):  # the next write may succeed
                _write(path, holder | {"beat": number})

    thread = Thread(target=beat, name="offloadkit-claim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _remove(path)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, holder: dict[str, Any]) -> None:
    with atomic_write(path) as file:  # readers never see a partial file
        file.write(json.dumps(holder).encode())
