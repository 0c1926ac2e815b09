"""Reads a checkpoint's files into the page cache while the plan is made and RAM is pinned.

The files are memory-mapped later, and each page fault would block a thread.
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
    """Read `files` into the page cache on daemon threads that raise nothing; returns the threads.

    Does nothing if the files are too large for free RAM, which includes the page cache.
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
    """Errors are ignored: the later reader of the file reports them."""
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
