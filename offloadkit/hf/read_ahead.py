"""Reads a checkpoint's files into the page cache while the plan is made and RAM is pinned.

Files are memory-mapped later, and a page fault then blocks the thread that touches the page. Here a few threads read
the files front to back at the disk's full speed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from offloadkit.facts.hardware import ram_available_bytes
from offloadkit.facts.threads import Thread

BLOCK_BYTES = 16 << 20
_NUM_THREADS = 4
_SHARE_OF_RAM = 0.4
"""Files larger than this fraction of free RAM are not read ahead, since memory pinned later would evict them."""


def read_ahead(files: Sequence[Path]) -> list[Thread]:
    """Read `files` into the page cache on daemon threads that end by themselves and raise nothing; returns the threads.

    Does nothing if the files are too large for RAM. The page cache counts as free RAM.
    """
    sizes = [file.stat().st_size for file in files]
    if sum(sizes) > _SHARE_OF_RAM * ram_available_bytes():
        return []
    blocks = [(file, at) for file, size in zip(files, sizes, strict=True) for at in range(0, size, BLOCK_BYTES)]
    parts = [blocks[number::_NUM_THREADS] for number in range(_NUM_THREADS)]
    threads = [Thread(target=_read, args=(part,), name="offloadkit-read-ahead", daemon=True) for part in parts if part]
    for thread in threads:
        thread.start()
    return threads


def _read(blocks: Sequence[tuple[Path, int]]) -> None:
    """Read blocks that are not cached yet. Errors are ignored: the later reader of the file reports them."""
    with mmap.mmap(-1, BLOCK_BYTES) as buffer, suppress(OSError):
        for file, at in blocks:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                if not _is_cached(descriptor, at):
                    os.preadv(descriptor, [buffer], at)
            finally:
                os.close(descriptor)


def _is_cached(descriptor: int, at: int) -> bool:
    try:
        return hasattr(os, "RWF_NOWAIT") and os.preadv(descriptor, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except OSError:
        return False
