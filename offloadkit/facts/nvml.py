"""VRAM as NVML counts it, the driver's own library: of the whole GPU, and of this process."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import torch

_MOST_PROCESSES = 1024
_UNKNOWN = (1 << 64) - 1
"""NVML's figure where the driver counts no memory by process, such as on WSL."""


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("num_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def used_bytes(device: torch.device) -> int | None:
    """VRAM in use on a GPU, in bytes; None if unknown. Needs no CUDA context."""
    memory = _Memory()
    return int(memory.used) if _asked("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory)) else None


def process_bytes(device: torch.device) -> int | None:
    """This process's VRAM on a GPU, in bytes, with its CUDA context; None if unknown.

    In a container, another process's figure may be returned, because NVML may know processes by the host's numbers:
    check that the figure is plausible.
    """
    number, processes = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
    if not _asked("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(number), processes):
        return None
    own = [int(each.num_bytes) for each in processes[: number.value] if each.pid == os.getpid()]
    return sum(own) if own and _UNKNOWN not in own else None


def _asked(function: str, device: torch.device, *arguments: Any) -> bool:
    card, library = _card(device), _library()
    return card is not None and hasattr(library, function) and getattr(library, function)(card, *arguments) == 0


@cache
def _library() -> Any:
    """The library, initialized; None without it."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


@cache
def _card(device: torch.device) -> ctypes.c_void_p | None:
    library, card = _library(), ctypes.c_void_p()
    if library is None:
        return None
    untyped: Any = torch.cuda
    try:
        index = untyped._get_nvml_device_index(device.index or 0)  # by CUDA_VISIBLE_DEVICES: numbers or UUIDs
    except (RuntimeError, ValueError, AttributeError, IndexError, TypeError):  # such as a part of a GPU (MIG)
        return None
    return card if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(card)) == 0 else None
