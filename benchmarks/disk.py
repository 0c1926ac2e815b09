"""Optimizer states on disk, past the page cache (`O_DIRECT`) or through a mapping: seconds of a step's traffic.

    python -m benchmarks.disk --gib 8 --folder /mnt/nvme

Regions are read ahead, changed and written behind, as a step does with its layers' states: once by `offload/disk.py`,
once in a mapping of the file, read ahead and written back by as many threads in pieces of the same size. Neither way
holds more than three regions in RAM: what was written leaves the page cache, else RAM would be measured.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import describe_machine, versions
from benchmarks.run import Row, write_results
from offloadkit.device.host_memory import HostSlab
from offloadkit.device.measure import disk_rates
from offloadkit.device.state_file import DiskStates, StateFile, unnamed_file

NUM_BUFFERS = 3
NUM_THREADS = 4
PIECE_BYTES = 16 << 20
_WRITE_AND_WAIT = 7
"""`sync_file_range`: wait for what is under way, write what is dirty, wait for it. No flush of the disk's own cache, as
`O_DIRECT` asks for none."""
_libc: Any = ctypes.CDLL(None, use_errno=True)  # Python's own mmap methods keep the interpreter to themselves


class Direct:
    """The states' own way."""

    def __init__(self, folder: Path, num_regions: int, region_bytes: int) -> None:
        slabs = [HostSlab(region_bytes) for _ in range(NUM_BUFFERS)]
        for slab in slabs:
            slab.populate()
        self._file, self._size = StateFile(folder, [region_bytes] * num_regions), region_bytes
        self._states = DiskStates(self._file, slabs)
        self.prefetch, self.give_back = self._states.prefetch, self._states.give_back
        self.synchronize, self.close = self._states.synchronize, self._file.close
        self.past_page_cache = self._file.direct

    def take(self, index: int) -> torch.Tensor:
        """A region in RAM: uint8 [region_bytes]."""
        slab = self._states.take(index)
        slab.clear()
        return slab.cut(self._size, torch.uint8)


class Mapped:
    """The same file, mapped."""

    past_page_cache = False

    def __init__(self, folder: Path, num_regions: int, region_bytes: int) -> None:
        self._file, _ = unnamed_file(folder, num_regions * region_bytes)
        self._size = region_bytes
        mapping = mmap.mmap(self._file, num_regions * region_bytes)
        self._all = torch.frombuffer(mapping, dtype=torch.uint8)
        self._pool = ThreadPoolExecutor(NUM_THREADS)
        self._reading: dict[int, list[Future[None]]] = {}
        self._writing: dict[int, list[Future[None]]] = {}

    def prefetch(self, index: int) -> None:
        """Start reading a region into the page cache, if fewer than three are there; `take` alone waits."""
        self._writing = {
            written: jobs for written, jobs in self._writing.items() if not all(job.done() for job in jobs)
        }
        if index not in self._reading and len(self._reading) + len(self._writing) < NUM_BUFFERS:
            self._reading[index] = self._start(self._read, index)

    def take(self, index: int) -> torch.Tensor:
        """A region: uint8 [region_bytes]."""
        self.prefetch(index)
        while index not in self._reading:  # full: what is being written goes first, else what was read ahead
            if self._writing:
                _finish(self._writing[next(iter(self._writing))])
            else:
                self.give_back(next(reversed(self._reading)))
            self.prefetch(index)
        _finish(self._reading[index])
        return self._all[index * self._size :][: self._size]

    def give_back(self, index: int) -> None:
        """Write the region, and let its pages go."""
        del self._reading[index]
        self._writing[index] = self._start(self._write, index)

    def synchronize(self) -> None:
        """Wait until everything is written."""
        for jobs in (*self._reading.values(), *self._writing.values()):
            _finish(jobs)
        self._reading.clear()
        self._writing.clear()

    def close(self) -> None:
        """Give the disk space back."""
        self._pool.shutdown()
        os.close(self._file)

    def _start(self, move: Callable[[int, int], None], index: int) -> list[Future[None]]:
        begin, end = index * self._size, (index + 1) * self._size
        return [self._pool.submit(move, at, min(PIECE_BYTES, end - at)) for at in range(begin, end, PIECE_BYTES)]

    def _read(self, at: int, length: int) -> None:
        self._advise(mmap.MADV_WILLNEED, at, length)

    def _write(self, at: int, length: int) -> None:
        _check(_libc.sync_file_range(self._file, ctypes.c_int64(at), ctypes.c_int64(length), _WRITE_AND_WAIT))
        self._advise(mmap.MADV_DONTNEED, at, length)
        os.posix_fadvise(self._file, at, length, os.POSIX_FADV_DONTNEED)

    def _advise(self, advice: int, at: int, length: int) -> None:
        _check(_libc.madvise(ctypes.c_void_p(self._all.data_ptr() + at), ctypes.c_size_t(length), advice))


WAYS: dict[str, type[Direct | Mapped]] = {"O_DIRECT": Direct, "mmap": Mapped}


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure both ways; print them, write the result file, return the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.disk", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--gib", type=float, default=8.0, help="of states; several times the RAM of a disk's own cache")
    parser.add_argument("--region", type=int, default=256, help="MiB of a layer's states")
    parser.add_argument("--steps", type=int, default=3, help="timed passes over all regions")
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to be measured")
    parser.add_argument("--out", type=Path, help="result file (default: a new one in benchmarks/results)")
    parser.add_argument("--commit", help="commit to write down where git is missing")
    options = parser.parse_args(arguments)
    options.mode, options.model = "disk", f"{options.gib:g}gib"
    num_regions = max(1, round(options.gib * 1024 / options.region))
    rates = disk_rates(options.folder)
    rows = []
    for name in WAYS:
        row = measure(name, options.folder, num_regions, options.region << 20, options.steps)
        rows.append({**row, **rates, "machine": describe_machine(torch.device("cpu")), "versions": versions()})
        each_way = row["bytes_per_second_each_way"] / 1e9
        print(f"{name:10}{row['seconds']:8.2f} s a step{each_way:8.2f} GB/s each way at once", flush=True)
    write_results(options, rows)
    return rows


def measure(name: str, folder: Path, num_regions: int, region_bytes: int, num_steps: int) -> Row:
    """The row of one way: seconds of a step's traffic, the least of `num_steps`, and bytes/s read, and written, in it.

    Raises:
        RuntimeError: what was read is not what was written.
    """
    way = WAYS[name](folder, num_regions, region_bytes)
    noise = torch.randint(256, (region_bytes,), dtype=torch.uint8)  # nothing to compress
    step(way, num_regions, lambda states: states.copy_(noise))
    seconds = [step(way, num_regions, lambda states: states.add_(1)) for _ in range(num_steps)]
    for index in range(num_regions):
        if not torch.equal(way.take(index), noise + num_steps):
            raise RuntimeError(f"{name}: region {index} is not what was written")
        way.give_back(index)
    way.synchronize()
    row = {"way": name, "past_page_cache": way.past_page_cache, "num_regions": num_regions}
    way.close()
    rate = num_regions * region_bytes / min(seconds)
    return {
        **row,
        "region_bytes": region_bytes,
        "seconds": min(seconds),
        "all_seconds": seconds,
        "bytes_per_second_each_way": rate,
    }


def step(way: Direct | Mapped, num_regions: int, change: Callable[[torch.Tensor], object]) -> float:
    """Seconds of one step's traffic: each region read ahead, changed, written behind."""
    started = time.perf_counter()
    for index in range(num_regions):
        for coming in range(index + 1, min(index + 1 + NUM_BUFFERS, num_regions)):
            way.prefetch(coming)
        change(way.take(index))
        way.give_back(index)
    way.synchronize()
    return time.perf_counter() - started


def _finish(jobs: list[Future[None]]) -> None:
    for job in jobs:
        job.result()


def _check(status: int) -> None:
    if status:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


if __name__ == "__main__":
    main()
