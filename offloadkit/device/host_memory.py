"""Pinned host memory in exact sizes: torch's pinned allocator rounds up to powers of two and pins with one thread.

A `HostSlab` is an anonymous mapping of exactly the requested bytes, populated by all cores and registered with CUDA.
Forked DataLoader workers do not inherit it. It is freed with the last tensor cut from it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from offloadkit.errors import OffloadkitError, OutOfRamError
from offloadkit.facts.hardware import ram_available_bytes
from offloadkit.facts.threads import ThreadPool
from offloadkit.facts.units import format_bytes
from offloadkit.kernels import cpu
from offloadkit.optim.table import aligned

_cuda: Any = torch.cuda  # typed only in some releases of torch
_NUM_PINNING_THREADS = 8
_MAP_FIXED = 0x10


class HostSlab:
    """A mapping of `num_bytes` of host memory that is cut into consecutive tensors."""

    def __init__(self, num_bytes: int) -> None:
        """Raises `OutOfRamError` if the system refuses the allocation."""
        self.num_bytes = max(num_bytes, mmap.PAGESIZE)
        try:
            self._mapping = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfRamError(
                f"the system refuses {format_bytes(self.num_bytes)} of RAM ({error.strerror}): give the plan less "
                "(ram=...), end other programs, or raise the limit of this process (ulimit -v)"
            ) from error
        self._advise(mmap.MADV_HUGEPAGE)
        self._advise(mmap.MADV_DONTFORK)
        self.buffer = (ctypes.c_ubyte * self.num_bytes).from_buffer(self._mapping)
        self.address = ctypes.addressof(self.buffer)
        self._used = 0
        self.pinned = False

    def _advise(self, advice: int) -> None:
        with suppress(OSError):  # old kernels refuse; that only costs time or memory
            self._mapping.madvise(advice)

    def populate(self, part: int = 0, num_parts: int = 1) -> None:
        """Back all pages, or one of `num_parts` equal parts, with RAM. Contents are kept."""
        first, end = (self.num_bytes * at // num_parts for at in (part, part + 1))
        cpu.populate(self.address + first, end - first)

    def pin(self) -> bool:
        """Register the slab with CUDA. Returns False if this exceeds the system's limit on locked memory."""
        if int(_cuda.cudart().cudaHostRegister(self.address, self.num_bytes, 0)) == 0:
            self.pinned = True
            self._unpin = weakref.finalize(self.buffer, _unpin, self.address, os.getpid())
            self._unpin.atexit = False
        return self.pinned

    def make_ordinary(self) -> None:
        """Unpin the slab and let forked processes inherit it. No copy of the slab may be in flight.

        Tensors stay at their addresses; the memory may outlive the engine.
        """
        if self.pinned:
            self._unpin()
            self.pinned = False
        self._advise(mmap.MADV_DOFORK)

    def clear(self) -> None:
        self._used = 0

    def cut(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next `numel` elements of the slab as a 1-D tensor with its own storage. Raises `ValueError` if the slab
        is full.
        """
        offset = self._used
        self._used += aligned(numel * dtype.itemsize)
        if self._used > aligned(self.num_bytes):
            raise ValueError(f"slab of {self.num_bytes} bytes is full: {numel} x {dtype} do not fit at {offset}")
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.buffer, dtype=dtype, count=numel, offset=offset)


class SharedSlab(HostSlab):
    """A slab that several processes map and write.

    Attributes:
        is_private: whether this process now has a copy-on-write mapping at the same address, which is not pinned and
            takes RAM for pages that it writes.
    """

    def __init__(self, file: int, num_bytes: int) -> None:
        """`file`: descriptor of a `file_in_ram` of this size; the slab closes it."""
        super().__init__(num_bytes)
        self.is_private, self._pins_again = False, False
        self._file, self._closing = file, weakref.finalize(self.buffer, os.close, file)
        self._closing.atexit = False
        self._map(mmap.MAP_SHARED)

    def _map(self, kind: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.mmap.restype = ctypes.c_void_p
        access = mmap.PROT_READ | mmap.PROT_WRITE
        found = libc.mmap(self.address, self.num_bytes, access, kind | _MAP_FIXED, self._file, 0)
        if found != self.address:
            number = ctypes.get_errno()
            raise OSError(number, f"{self.num_bytes} bytes of shared memory could not be mapped: {os.strerror(number)}")
        self._advise(mmap.MADV_HUGEPAGE)
        self._advise(mmap.MADV_DONTFORK)

    def part(self) -> None:
        """Switch to a copy-on-write mapping, so other processes no longer see this process's writes. No copy of the
        slab may be in flight.
        """
        if not self.is_private:
            self._pins_again = self.pinned
            self._let_go()

    def publish(self, part: torch.Tensor) -> None:
        """Write `part`, a contiguous tensor in this `is_private` slab, to the file that other processes see."""
        at, end = part.data_ptr() - self.address, part.data_ptr() - self.address + part.nbytes
        memory = memoryview(self.buffer).cast("B")
        while at < end:
            at += os.pwrite(self._file, memory[at:end], at)

    def rejoin(self) -> None:
        if self.is_private:
            self._map(mmap.MAP_SHARED)
            self.is_private = False
            if self._pins_again:
                self.pin()

    def make_ordinary(self) -> None:
        """Like `HostSlab`'s; the memory becomes private to this process."""
        if not self.is_private:
            self._let_go()
        self._advise(mmap.MADV_DOFORK)
        self._closing()

    def _let_go(self) -> None:
        if self.pinned:
            self._unpin()
            self.pinned = False
        self._map(mmap.MAP_PRIVATE)
        self.is_private = True


class _Mapped:
    """Presents pinned host memory as the device's, with which it shares one address space."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": (host.nbytes,), "typestr": "|u1", "data": (host.data_ptr(), False), "version": 3,
        }  # fmt: skip


def on_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on `device` over the same RAM as `host`, 1-D and pinned: kernels read and write it across the bus.

    Raises:
        OffloadkitError: the RAM could not be pinned.
    """
    if device.type != "cuda":
        return host
    try:
        return torch.as_tensor(_Mapped(host), device=device).view(host.dtype)
    except ValueError as error:
        raise OffloadkitError(
            f"the GPU cannot read {format_bytes(host.nbytes)} of RAM that could not be pinned (see `ulimit -l`): raise "
            "the limit, or keep weights in VRAM"
        ) from error


def file_in_ram(num_bytes: int) -> int:
    """Create an unnamed file for a `SharedSlab` of `num_bytes`. Writing to it takes RAM."""
    file = os.memfd_create("offloadkit")
    os.truncate(file, -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE)
    return file


def _unpin(address: int, owner: int) -> None:
    if os.getpid() == owner and _cuda.is_initialized():
        _cuda.cudart().cudaHostUnregister(address)


def allocate(sizes: Sequence[int], device: torch.device, what: str) -> list[HostSlab]:
    """Allocate populated slabs of `sizes` bytes, pinned if `device` is a GPU. `what`: their purpose, in the plural.

    Raises `OffloadkitError`, and allocates nothing, if too little RAM is available.
    """
    _check_available(sum(sizes), what)
    slabs = [HostSlab(size) for size in sizes]
    _back_with_ram(slabs, device, (0, 1))
    return slabs


def allocate_shared(
    files: Sequence[int], sizes: Sequence[int], device: torch.device, what: str, part: tuple[int, int]
) -> list[SharedSlab]:
    """Like `allocate`, in `files` that other processes map too; the slabs close the files.

    `part`: (index, number of parts): the part of every slab that this process populates, near its cores if possible.
    """
    slabs = [SharedSlab(file, size) for file, size in zip(files, sizes, strict=True)]
    _check_available(sum(sizes) // part[1], what)
    _back_with_ram(slabs, device, part)
    return slabs


def _check_available(needed: int, what: str) -> None:
    available = ram_available_bytes()
    if needed > available:
        raise OffloadkitError(
            f"{what} need {format_bytes(needed)} of RAM, {format_bytes(available)} are available: "
            "free RAM, train a smaller model, or freeze part of this one"
        )


def _back_with_ram(slabs: Sequence[HostSlab], device: torch.device, part: tuple[int, int]) -> None:
    if device.type != "cuda":
        for slab in slabs:
            slab.populate(*part)
        return
    _cuda.init()

    def pin(slab: HostSlab) -> bool:
        torch.cuda.set_device(device)
        return slab.pin()

    with ThreadPool(_NUM_PINNING_THREADS, "offloadkit-pin") as pool:
        pins = []
        for slab in slabs:
            slab.populate(*part)
            pins.append(pool.submit(pin, slab))
        num_refused = sum(not pinned.result() for pinned in pins)
    if num_refused:
        warnings.warn(
            f"{num_refused} of {len(slabs)} blocks of RAM could not be pinned (see `ulimit -l`): "
            "copies to and from the GPU will be several times slower",
            stacklevel=3,
        )
