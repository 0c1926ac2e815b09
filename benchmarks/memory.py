"""Device memory as the driver sees it, and a page cache made empty."""

from __future__ import annotations

import os
from pathlib import Path

from offloadkit.device.process_memory import DeviceMemory

__all__ = ["DeviceMemory", "evict_page_cache"]


def evict_page_cache(folder: Path) -> None:
    """Have the files under `folder` read from the disk again, as on the first start after a boot."""
    for path in folder.iterdir():
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
