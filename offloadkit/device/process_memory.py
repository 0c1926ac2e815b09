"""Memory use of the process, and settings of torch's VRAM allocator."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import psutil
import torch

from offloadkit.facts import hardware, nvml
from offloadkit.facts.fitted import LOADED_LATER_BYTES
from offloadkit.facts.telemetry import Peaks

_cuda: Any = torch.cuda  # typed only in some releases of torch
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def let_segments_grow(device: torch.device) -> None:
    """Turn on `expandable_segments` of torch's allocator, unless the user configures it.

    On an H200 torch then reserves 0.02 to 0.37 GiB beyond the allocated bytes, otherwise up to 0.67 GiB.
    """
    if device.type != "cuda" or any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return
    settings: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if settings is None:  # torch 2.8 and older
        settings = torch.cuda.memory._set_allocator_settings
    settings("expandable_segments:True")


class DeviceMemory:
    """Peak device memory of this process in bytes, over the calls of `sample`. Create it before CUDA is initialized.

    NVML's figure includes the CUDA context and cuBLAS workspaces, which torch does not count. If the driver reports no
    memory per process, the growth of the whole device is used. `source`: origin of the figure.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak_bytes, self.source = 0, "none"
        self._device, self._bytes_before = device, None
        if device.type == "cuda":
            self._bytes_before = nvml.used_bytes(device)
            self.source = "mem_get_info (whole device)"

    def sample(self) -> None:
        if self.source != "none":
            self.peak_bytes = max(self.peak_bytes, self._used_bytes())

    def _used_bytes(self) -> int:
        if (own := nvml.process_bytes(self._device)) is not None:
            self.source = "NVML, this process"
            return own
        if self._bytes_before is not None and (used := nvml.used_bytes(self._device)) is not None:
            self.source = "NVML, growth of the device"
            return used - self._bytes_before
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)


class VramCap:
    """Keeps this process within a limit of VRAM, CUDA context included, by limiting torch's allocator.

    The context grows while kernels are loaded at their first launch; `renew` follows it, and some room is held back
    until the context is stable. If several caps are active, the lowest one applies.
    Does nothing on the CPU.
    """

    _shares: ClassVar[dict[torch.device, dict[VramCap | None, float]]] = {}
    """Allowed fraction of memory by device and cap; the key None holds the fraction before the first cap."""

    def __init__(self, limit_bytes: int | None, device: torch.device) -> None:
        """`limit_bytes`: None is no limit."""
        self._limit = limit_bytes if device.type == "cuda" else None
        self._seen: dict[str, int] = {}
        """Context bytes at the last `renew` of every kind of work."""
        self._settled: set[str] = set()
        if self._limit is None:
            return
        self._device = hardware.indexed(device)
        load_libraries(self._device)
        get_fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)  # missing in torch 2.6
        if self._device not in self._shares:
            self._shares[self._device] = {None: get_fraction(self._device)}
        self._limit_torch()

    def renew(self, work: str) -> None:
        """Adjust the cap to the context's present size. Call it after every piece of `work`.

        After two calls for one kind of work that find the same size, later calls do nothing.
        """
        if self._limit is None or work in self._settled:
            return
        context = hardware.vram_context_bytes(self._device)
        if self._seen.get(work) == context:
            self._settled.add(work)
        self._seen[work] = context
        self._limit_torch()

    def watch(self) -> None:
        self._seen.clear()
        self._settled.clear()

    def remove(self) -> None:
        """Remove this cap; the lowest remaining cap applies, or the fraction before the first cap."""
        if self._limit is None or self not in (shares := self._shares.get(self._device, {})):
            return
        del shares[self]
        torch.cuda.set_per_process_memory_fraction(min(shares.values()), self._device)
        if len(shares) == 1:
            del self._shares[self._device]

    def _limit_torch(self) -> None:
        assert self._limit is not None
        growth = 0 if self._settled else LOADED_LATER_BYTES
        allowed = max(0, self._limit - hardware.vram_context_bytes(self._device, growth_bytes=growth))
        shares = self._shares[self._device]
        shares[self] = allowed / torch.cuda.get_device_properties(self._device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(shares.values()), self._device)
        if torch.cuda.memory_reserved(self._device) > allowed:
            torch.cuda.empty_cache()


def load_libraries(device: torch.device) -> None:
    square = torch.zeros(16, 16, device=device)
    torch.mm(square, square)
    del square
    torch.cuda.empty_cache()
    hardware.note_loaded_libraries(device)


def asked_bytes(error: BaseException) -> int:
    """Bytes of the allocation that raised a `torch.OutOfMemoryError`; 0 if the message does not name them."""
    asked = re.search(r"Tried to allocate ([\d.]+) (\w+)", str(error))
    unit = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}.get(asked[2], 1) if asked else 1
    return int(float(asked[1]) * unit) if asked else 0


def tree_ram_bytes(pid: int) -> int:
    """Resident bytes of a process and its descendants, with pinned pages. Shared pages count once per process."""
    try:
        root = psutil.Process(pid)
        members = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0
    total = 0
    for member in members:
        with suppress(psutil.Error):  # the process has ended
            total += int(member.memory_info().rss)
    return total


# ---- peaks by phase ------------------------------------------------------------------------------


@dataclass(eq=False)
class _Phase:
    name: str
    peaks: Peaks
    device: torch.device


open_phases: list[_Phase] = []
"""Outermost first. Global, because torch's and the system's counters are per process."""
_highest_reserved: dict[int, int] = {}
"""Highest reserved bytes of torch in closed phases, by GPU index."""


@contextmanager
def phase(name: str, peaks: Peaks, device: torch.device) -> Iterator[None]:
    """Record the peaks of RAM and VRAM of the body in `peaks[name]`: "ram" and, on a GPU, "vram".

    RAM is resident memory, pinned pages included. VRAM is torch's reserved memory on `device` plus the context. A
    reopened phase keeps its highest values; an inner phase does not count in the outer phase. Resets torch's peak
    statistics at both ends.
    """
    here = _Phase(name, peaks, device)
    restart_peaks(device)
    open_phases.append(here)
    try:
        yield
    finally:
        restart_peaks(device)
        open_phases.remove(here)


def sample_ram() -> None:
    """Sample RAM for the innermost phase. Call it regularly, because not every system reports the peak."""
    if phases := open_phases[-1:]:
        _raise(phases[0], "ram", hardware.process_ram_bytes())


def peak_reserved_bytes(device: torch.device) -> int:
    """Highest bytes that torch reserved on a GPU since `forget_peak`, across phases."""
    return max(torch.cuda.max_memory_reserved(device), _highest_reserved.get(device.index or 0, 0))


def forget_peak(device: torch.device) -> None:
    """Reset `peak_reserved_bytes` and torch's peak statistics, after recording them in the open phase."""
    if device.type == "cuda":
        restart_peaks(device)
        _highest_reserved.pop(device.index or 0, None)


def restart_peaks(device: torch.device) -> None:
    """Reset the system's and torch's peak statistics, after recording them in the open phase."""
    inner = open_phases[-1] if open_phases else None
    peak = hardware.restart_peak_ram()
    if inner is not None:
        _raise(inner, "ram", hardware.process_ram_bytes() if peak is None else peak)
    if device.type == "cuda" and _cuda.is_initialized():
        reserved = torch.cuda.max_memory_reserved(device)
        _highest_reserved[device.index or 0] = peak_reserved_bytes(device)
        torch.cuda.reset_peak_memory_stats(device)
        if inner is not None and inner.device == device:
            _raise(inner, "vram", reserved + hardware.vram_context_bytes(device))


def _raise(here: _Phase, tier: str, num_bytes: int) -> None:
    found = here.peaks.setdefault(here.name, {})
    found[tier] = max(found.get(tier, 0), num_bytes)
