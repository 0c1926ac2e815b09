"""Optimizer states on disk: a file with read-ahead and write-behind for the step.

Each layer's states are one region of the file, which passes through a few pinned buffers in RAM, with `O_DIRECT` if
supported. Regions are also mapped, for access between steps (checkpoints).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from offloadkit.device import watchdog
from offloadkit.device.host_memory import HostSlab
from offloadkit.errors import OutputError
from offloadkit.facts.threads import ThreadPool
from offloadkit.facts.units import format_bytes
from offloadkit.optim.table import aligned

NETWORK_MOUNTS = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "fuse.sshfs", "lustre", "afs"}
RAM_FILE_SYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}
_PAGE = max(4096, mmap.ALLOCATIONGRANULARITY)
"""`O_DIRECT` needs addresses, offsets and lengths that are multiples of it; mappings start at multiples."""
_CHUNK = 16 * 2**20
"""Bytes per read or write of a thread."""
_NUM_THREADS = 4

Move = Callable[[int, list[memoryview], int], int]
"""`os.preadv` or `os.pwritev`: (file, buffers, offset in bytes) -> bytes moved."""


class _Mapping:
    def __init__(self, file: int, length: int, at: int) -> None:
        self._mapping = mmap.mmap(file, length, offset=at)
        # A view keeps the buffer alive but not the mapping's lock, so this object keeps the lock.
        self.memory: Any = (ctypes.c_ubyte * length).from_buffer(self._mapping)

    def forget_pages(self, start: int, num_bytes: int) -> None:
        self._mapping.flush(start, num_bytes)
        self._mapping.madvise(mmap.MADV_DONTNEED, start, num_bytes)

    def close(self) -> None:
        del self.memory
        with suppress(BufferError):
            self._mapping.close()


class StateFile:
    """Regions of an unnamed file, which disappears with the process.

    Attributes:
        direct: whether I/O bypasses the page cache.
    """

    def __init__(self, folder: str | os.PathLike[str], sizes: Sequence[int]) -> None:
        """`sizes`: bytes of every region.

        Raises:
            OutputError: the folder is on a network mount or in RAM, it cannot be written, or the disk is too small.
        """
        self._folder = Path(folder)
        self._regions: list[tuple[int, int, _Mapping, int]] = []
        """(bytes, offset in the file, mapping, offset in the mapping) of every region."""
        self._file = _file_for_states(self._folder, max(sum(map(_whole_pages, sizes)), _PAGE))
        self._closing = weakref.finalize(self, os.close, self._file)
        self._end = 0
        self._map(sizes)
        self._pool = ThreadPool(_NUM_THREADS, "offloadkit-disk")

    def add(self, sizes: Sequence[int]) -> list[int]:
        total = sum(map(_whole_pages, sizes))
        if (free := shutil.disk_usage(self._folder).free) < total:
            raise _too_small(self._folder, total, free)
        try:
            os.posix_fallocate(self._file, self._end, max(total, _PAGE))
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise _cannot_be_put(self._folder, error) from error
        return self._map(sizes)

    def _map(self, sizes: Sequence[int]) -> list[int]:
        *starts, total = accumulate(map(_whole_pages, sizes), initial=0)
        length, first = max(total, _PAGE), len(self._regions)
        mapping = _Mapping(self._file, length, self._end)
        placed = zip(sizes, starts, strict=True)
        self._regions += [(size, self._end + start, mapping, start) for size, start in placed]
        self._end += length
        return list(range(first, len(self._regions)))

    def mapped(
        self, index: int, offset: int = 0, numel: int | None = None, dtype: torch.dtype = torch.uint8
    ) -> torch.Tensor:
        """A 1-D view of a region, through the page cache. Do not use it during I/O on the region.

        Every view has a separate storage, because torch cannot save a storage that is viewed as several dtypes.
        `offset`: bytes from the start of the region; `numel`: None: up to the region's end.
        """
        size, _, mapping, start = self._regions[index]
        count = size - offset if numel is None else numel
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(mapping.memory, dtype=dtype, count=count, offset=start + offset)

    def forget_pages(self, index: int | None = None) -> None:
        """Flush a mapped region (None: all regions) to disk and drop its pages from RAM."""
        for num_bytes, at, mapping, start in self._regions if index is None else [self._regions[index]]:
            if num_bytes == 0:  # of a rank that owns no part of a layer; it may begin where the mapping ends
                continue
            mapping.forget_pages(start, _whole_pages(num_bytes))
            os.posix_fadvise(self._file, at, _whole_pages(num_bytes), os.POSIX_FADV_DONTNEED)

    def read(self, index: int, slab: HostSlab) -> list[Future[None]]:
        return self._start(os.preadv, index, slab)

    def write(self, index: int, slab: HostSlab) -> list[Future[None]]:
        return self._start(os.pwritev, index, slab)

    def close(self) -> None:
        """Finish I/O and close the file. Its space is freed with the last view of a region."""
        self._pool.shutdown()
        for mapping in {each[2] for each in self._regions}:
            mapping.close()
        self._closing()

    def _start(self, move: Move, index: int, slab: HostSlab) -> list[Future[None]]:
        num_bytes, start, _, _ = self._regions[index]
        size = _whole_pages(num_bytes)
        return [
            self._pool.submit(self._move, move, slab.address + at, start + at, min(_CHUNK, size - at))
            for at in range(0, size, _CHUNK)
        ]

    def _move(self, move: Move, address: int, offset: int, length: int) -> None:
        memory = memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")
        while length:
            moved = move(self._file, [memory], offset)
            if moved == 0:
                raise OSError(f"the file of optimizer states ends {length} bytes early")
            memory, offset, length = memory[moved:], offset + moved, length - moved


class DiskStates:
    """Buffers in RAM for the states on disk during a step, in order of use."""

    def __init__(self, file: StateFile, buffers: Sequence[HostSlab]) -> None:
        self.file = file
        self._free: list[tuple[HostSlab, list[Future[None]]]] = [(slab, []) for slab in buffers]
        self._here: dict[int, tuple[HostSlab, list[Future[None]]]] = {}
        self._written: dict[int, list[Future[None]]] = {}
        """Newest writes by region. A region is not read before its writes are done."""

    def use(self, buffers: Sequence[HostSlab]) -> None:
        self._free = [(slab, []) for slab in buffers]

    def prefetch(self, index: int) -> None:
        if index not in self._here and _done(self._written.get(index, [])):
            if any(_done(jobs) for _, jobs in self._free):
                self._read(index)

    def take(self, index: int) -> HostSlab:
        """Wait for a region's states and return the buffer with them, reserved until `give_back`."""
        if index not in self._here:
            self._read(index)
        slab, jobs = self._here[index]
        _finish(jobs)
        return slab

    def give_back(self, index: int) -> None:
        slab, _ = self._here.pop(index)
        self._written[index] = self.file.write(index, slab)
        self._free.append((slab, self._written[index]))

    def synchronize(self) -> None:
        self._free += self._here.values()
        self._here.clear()
        for _, jobs in self._free:
            _finish(jobs)

    def _read(self, index: int) -> None:
        if not self._free:  # all buffers hold prefetched regions
            self._free.append(self._here.popitem()[1])
        ready = [item for item in self._free if _done(item[1])]
        slab, jobs = ready[0] if ready else self._free[0]
        self._free = [item for item in self._free if item[0] is not slab]
        _finish(jobs)
        _finish(self._written.get(index, []))
        self._here[index] = slab, self.file.read(index, slab)


class Region:
    def __init__(self, states: DiskStates, index: int) -> None:
        self._states, self._index = states, index

    def cutter(self) -> Callable[[int, torch.dtype], torch.Tensor]:
        """A `cut` like `HostSlab.cut` that returns mapped views, for use between steps."""
        end = 0

        def cut(numel: int, dtype: torch.dtype) -> torch.Tensor:
            nonlocal end
            offset, end = end, end + aligned(numel * dtype.itemsize)
            return self._states.file.mapped(self._index, offset, numel, dtype)

        return cut

    def forget_pages(self) -> None:
        self._states.file.forget_pages(self._index)

    def prefetch(self) -> None:
        self._states.prefetch(self._index)

    @contextmanager
    def in_ram(self) -> Iterator[HostSlab]:
        """Provide the states in a slab, to be cut from its start; writing them to disk starts at exit, also after an
        error.
        """
        slab = self._states.take(self._index)
        slab.clear()
        try:
            yield slab
        finally:
            self._states.give_back(self._index)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


def _done(jobs: list[Future[None]]) -> bool:
    return all(job.done() for job in jobs)


def _finish(jobs: list[Future[None]]) -> None:
    if not _done(jobs):
        watchdog.until(lambda seconds: not wait(jobs, seconds).not_done, "the disk that holds the optimizer's states")
    for job in jobs:
        job.result()
    jobs.clear()


def unnamed_file(folder: Path, num_bytes: int) -> tuple[int, bool]:
    """A fully allocated file of `num_bytes` that disappears when closed: descriptor, and whether it bypasses the page
    cache. Raises `OSError`.
    """
    with tempfile.TemporaryFile(prefix="offloadkit-", dir=folder, buffering=0) as unnamed:
        os.posix_fallocate(unnamed.fileno(), 0, num_bytes)
        file = os.dup(unnamed.fileno())
    return file, _without_page_cache(file)


def _file_for_states(folder: Path, num_bytes: int) -> int:
    unfit = unfit_for_states(folder)
    if unfit:
        raise OutputError(
            f"optimizer states cannot be stored in {folder}: {unfit}. Name a folder on a local disk: "
            "OffloadConfig(disk=...)"
        )
    try:
        free = shutil.disk_usage(folder).free
        if free >= num_bytes:
            return unnamed_file(folder, num_bytes)[0]
    except OSError as error:
        raise _cannot_be_put(folder, error) from error
    raise _too_small(folder, num_bytes, free)


def _cannot_be_put(folder: Path, error: OSError) -> OutputError:
    return OutputError(
        f"the optimizer states cannot be put on disk in {folder}: {error}. Free some of that disk or quota, or name "
        "another folder: OffloadConfig(disk=...)"
    )


def _too_small(folder: Path, num_bytes: int, free: int) -> OutputError:
    return OutputError(
        f"the optimizer states need {format_bytes(num_bytes)} of disk and {folder} has "
        f"{format_bytes(free)} free: free some, or name another folder: OffloadConfig(disk=...)"
    )


def unfit_for_states(folder: Path) -> str:
    """Why states cannot be stored in `folder` (network mount or RAM); "" if they can."""
    kind = file_system(folder)
    if kind in NETWORK_MOUNTS:
        return f"it is a network mount ({kind})"
    return f"it is in RAM itself ({kind})" if kind in RAM_FILE_SYSTEMS else ""


def file_system(folder: Path) -> str:
    best, kind = "", ""
    with suppress(OSError):
        real = os.path.realpath(folder)
        for line in Path("/proc/self/mounts").read_text().splitlines():
            point, name = line.split()[1:3]
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, name
    return kind


def _without_page_cache(file: int) -> bool:
    import fcntl

    flag, flags = getattr(os, "O_DIRECT", 0), fcntl.fcntl(file, fcntl.F_GETFL)
    if not flag:
        return False
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | flag)
        with mmap.mmap(-1, _PAGE) as page:
            os.preadv(file, [page], 0)
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return True
