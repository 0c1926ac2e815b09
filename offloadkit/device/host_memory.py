"""Pinned host memory in exact sizes.

torch's pinned allocator rounds sizes up to powers of two, and pins with one thread. A `HostSlab` is an anonymous
mapping of exactly the requested bytes. It uses huge pages if the kernel gives them, is populated by all cores and is
registered with CUDA. Forked DataLoader workers do not inherit it. It is freed with the last tensor cut from it, or
becomes ordinary memory before (`make_ordinary`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from offloadkit.errors import OffloadkitError
from offloadkit.hardware import ram_available_bytes
from offloadkit.kernels import cpu
from offloadkit.optim.table import aligned

_cuda: Any = torch.cuda  # whose signatures are typed in some releases of torch only
_NUM_PINNING_THREADS = 8


class HostSlab:
    """A mapping of `num_bytes` of host memory, from which tensors are cut one after the other."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = max(num_bytes, mmap.PAGESIZE)
        self._mapping = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._advise("MADV_HUGEPAGE")
        self._advise("MADV_DONTFORK")
        self._buffer = (ctypes.c_ubyte * self.num_bytes).from_buffer(self._mapping)
        self.address = ctypes.addressof(self._buffer)
        self._used = 0
        self.pinned = False

    def _advise(self, advice: str) -> None:
        if hasattr(mmap, advice):
            with suppress(OSError):  # older kernels refuse it: that costs time or memory only
                self._mapping.madvise(getattr(mmap, advice))

    def populate(self) -> None:
        """Back every page with RAM now, filled with zeros."""
        cpu.populate(self.address, self.num_bytes)

    def pin(self) -> bool:
        """Register the slab with CUDA. Returns False if the system refuses (the limit of locked memory)."""
        if int(_cuda.cudart().cudaHostRegister(self.address, self.num_bytes, 0)) == 0:
            self.pinned = True
            self._unpin = weakref.finalize(self._buffer, _unpin, self.address, os.getpid())
            self._unpin.atexit = False
        return self.pinned

    def make_ordinary(self) -> None:
        """Unpin the slab and have forked processes inherit it. Nothing moves; no copy to or from it may be under way.

        It then outlives the engine as the memory of its tensors.
        """
        if self.pinned:
            self._unpin()
            self.pinned = False
        self._advise("MADV_DOFORK")

    def clear(self) -> None:
        """Start cutting from the beginning again."""
        self._used = 0

    def cut(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next `numel` elements of the slab, as a 1-D tensor with its own storage.

        Raises:
            ValueError: the slab is full.
        """
        offset = self._used
        self._used += aligned(numel * dtype.itemsize)
        if self._used > aligned(self.num_bytes):
            raise ValueError(f"slab of {self.num_bytes} bytes is full: {numel} x {dtype} do not fit at {offset}")
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._buffer, dtype=dtype, count=numel, offset=offset)


def _unpin(address: int, owner: int) -> None:
    if os.getpid() == owner and _cuda.is_initialized():
        _cuda.cudart().cudaHostUnregister(address)


def allocate(sizes: Sequence[int], device: torch.device, what: str) -> list[HostSlab]:
    """Slabs of `sizes` bytes, populated, and pinned if `device` is a GPU. `what`: what they are for, in the plural.

    Raises:
        OffloadkitError: the slabs need more RAM than is available. Nothing is allocated then.
    """
    needed, available = sum(sizes), ram_available_bytes()
    if needed > available:
        raise OffloadkitError(
            f"{what} need {needed / 2**30:.2f} GiB of RAM, {available / 2**30:.2f} GiB are available: "
            "free RAM, train a smaller model, or freeze part of this one"
        )
    slabs = [HostSlab(size) for size in sizes]
    if device.type != "cuda":
        for slab in slabs:
            slab.populate()
        return slabs
    _cuda.init()

    def pin(slab: HostSlab) -> bool:
        torch.cuda.set_device(device)
        return slab.pin()

    with ThreadPoolExecutor(_NUM_PINNING_THREADS, "offloadkit-pin") as pool:
        pins = []
        for slab in slabs:
            slab.populate()
            pins.append(pool.submit(pin, slab))
        num_refused = sum(not pinned.result() for pinned in pins)
    if num_refused:
        warnings.warn(
            f"{num_refused} of {len(slabs)} blocks of RAM could not be pinned (see `ulimit -l`): "
            "copies to and from the GPU will be several times slower",
            stacklevel=2,
        )
    return slabs
