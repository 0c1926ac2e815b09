"""Read and write rates of the disk under a folder, past the page cache."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from offloadkit.errors import OutputError
from offloadkit.offload.disk import unnamed_file

_PIECE_BYTES = 4 << 20
_NUM_PIECES = 16
_NUM_THREADS = 4
_MAX_SECONDS = 0.15
"""Of each of the three passes."""


def disk_rates(folder: Path) -> dict[str, float]:
    """Bytes/s of writing over a file of at most 64 MiB and of reading it back, four pieces of 4 MiB at a time.

    With O_DIRECT where the file system takes it, else flushed with fsync and dropped from the page cache.

    Raises:
        OutputError: the folder cannot be written, or has no room.
    """
    free = shutil.disk_usage(folder).free
    num_pieces = min(_NUM_PIECES, free // 2 // _PIECE_BYTES)
    if num_pieces == 0:
        raise OutputError(f"{folder} has {free >> 20} MiB free: at least {_PIECE_BYTES >> 19} are needed to measure it")
    try:
        file, direct = unnamed_file(folder, num_pieces * _PIECE_BYTES)
    except OSError as error:
        raise OutputError(f"cannot write to {folder}: {error.strerror}; name a folder that can be written") from error
    buffer = mmap.mmap(-1, _PIECE_BYTES)  # page-aligned, as O_DIRECT wants it
    buffer.write(os.urandom(_PIECE_BYTES))  # nothing to compress
    targets = [mmap.mmap(-1, _PIECE_BYTES) for _ in range(_NUM_THREADS)]

    def write(piece: int) -> None:
        os.pwrite(file, buffer, piece * _PIECE_BYTES)
        if not direct:
            os.fsync(file)

    def read(piece: int) -> None:
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, piece * _PIECE_BYTES, _PIECE_BYTES, os.POSIX_FADV_DONTNEED)
        os.preadv(file, [targets[piece % _NUM_THREADS]], piece * _PIECE_BYTES)

    try:
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            num_written, _ = _pass(pool, write, num_pieces)  # a new file's first writing is not the rate
            return {
                "disk_write_bytes_per_second": _pass(pool, write, num_written)[1],
                "disk_read_bytes_per_second": _pass(pool, read, num_written)[1],
            }
    except OSError as error:
        raise OutputError(f"measuring the disk in {folder} failed: {error.strerror}") from error
    finally:
        os.close(file)
        buffer.close()


def _pass(pool: ThreadPoolExecutor, work: Callable[[int], None], num_pieces: int) -> tuple[int, float]:
    """(pieces done, bytes/s) of `work` over the pieces, a few at a time, until they or the time are spent."""
    started, done = time.perf_counter(), 0
    while done < num_pieces and (done == 0 or time.perf_counter() - started < _MAX_SECONDS):
        some = range(done, min(done + _NUM_THREADS, num_pieces))
        list(pool.map(work, some))
        done = some.stop
    return done, done * _PIECE_BYTES / (time.perf_counter() - started)
