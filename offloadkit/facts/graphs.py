"""Whether repeated blocks may run as CUDA graphs. The engine and the plan read the same function."""

from __future__ import annotations

device_types: set[str] = set()
"""Device types on which blocks are captured; tests add "cpu"."""


def may_capture(device: str, num_ranks: int, *, compiled: bool) -> bool:
    """Whether a run captures its blocks, if its plan has the VRAM.

    Args:
        device: a device or its type.
        compiled: `OffloadConfig.compile_blocks`.
    """
    return device.partition(":")[0] in device_types and num_ranks == 1 and not compiled
