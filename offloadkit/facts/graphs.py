"""Whether repeated blocks may run as CUDA graphs. The engine and the plan read the same function."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

device_types: set[str] = {"cuda"}
"""Device types on which blocks are captured; tests change them."""
FIRST_TORCH = (2, 11)
"""The oldest release of torch that captures blocks right."""


def may_capture(device: str, *, compiled: bool) -> bool:
    """Whether a run captures its blocks, if its plan has the VRAM.

    Args:
        device: a device or its type.
        compiled: `OffloadConfig.compile_blocks`.
    """
    return has_graphs(device) and not compiled and not torch_is_too_old()


def has_graphs(device: str) -> bool:
    return device.partition(":")[0] in device_types


@cache
def torch_is_too_old() -> bool:
    return tuple(map(int, version("torch").split(".")[:2])) < FIRST_TORCH
