"""One run a folder: whoever writes checkpoints into a folder claims it first, and another run there is refused by name.

A claim is a record lock on a file in the folder. The system gives it up when its process ends, however it ends, and a
forked process (a DataLoader's worker) has no part in it. Within a process claims are counted by thread. Where the file
system has no locks, the file is written again every few seconds, and a file that changes is a claim.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offloadkit.checkpoint.folder import written_beside
from offloadkit.errors import OutputError
from offloadkit.threads import Thread

CLAIM = ".offloadkit-run.json"
HEARTBEAT_SECONDS = 5.0
"""Between two beats, where there are no locks. A claim whose file changes within three of them is alive."""

_claims: dict[Path, tuple[int, int, str]] = {}
"""By folder: the thread that claims it, how often, and since when."""
_claiming = threading.Lock()


@contextmanager
def one_run(folder: Path) -> Iterator[None]:
    """While it is open, `folder` is this run's. A thread may claim a folder again within its own claim.

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
        with _claim_of_process(where / CLAIM, now):
            yield
    finally:
        with _claiming:
            _claims[where] = me, count, since
            if not count:
                del _claims[where]


def _claimed(folder: Path, holder: dict[str, Any], of: str = "") -> OutputError:
    who = f"process {holder.get('pid')} on {holder.get('host')}, since {holder.get('started')}"
    return OutputError(
        f"{folder} is in use by {of + ' ' if of else ''}{who}: a second run there would replace its checkpoints "
        "and its model. Pass another output_dir, or wait until that run has ended"
    )


@contextmanager
def _claim_of_process(path: Path, now: str) -> Iterator[None]:
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": now}
    descriptor, locks = _locked(path)
    try:
        if not locks:
            with _heartbeat(path, holder):
                yield
            return
        # By this descriptor: closing another one of the file would give up the lock.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _locked(path: Path) -> tuple[int, bool]:
    """A descriptor of the file, and whether it is locked; it is not where the file system has no locks.

    Raises:
        OutputError: another process has it.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor, True
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                return descriptor, False
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _claimed(path.parent, _read(path)) from error
            raise
        os.close(descriptor)  # the run before removed the file meanwhile


@contextmanager
def _heartbeat(path: Path, holder: dict[str, Any]) -> Iterator[None]:
    """A claim without locks: the file changes while it is open."""
    before = path.read_bytes()
    if before:
        print(
            f"{path.parent} has no file locks: waiting to see whether another run is there", file=sys.stderr, flush=True
        )
        for _ in range(3):
            time.sleep(HEARTBEAT_SECONDS)
            if path.read_bytes() != before:
                raise _claimed(path.parent, _read(path))
    else:
        print(f"{path.parent} has no file locks: a file in it says that this run is alive", file=sys.stderr, flush=True)
    _write(path, holder | {"beat": 0})
    ended = threading.Event()

    def beat() -> None:
        number = 0
        while not ended.wait(HEARTBEAT_SECONDS):
            number += 1
            _write(path, holder | {"beat": number})

    thread = Thread(target=beat, name="offloadkit-claim", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, holder: dict[str, Any]) -> None:
    with written_beside(path) as file:  # nobody reads half of it
        file.write(json.dumps(holder).encode())
