"""Device memory as the driver sees it, and a page cache made empty."""

from __future__ import annotations

import os
from pathlib import Path

import torch


class DeviceMemory:
    """Peak device memory of this process in bytes, sampled where `sample` is called. Make it before CUDA starts.

    NVML's figure for this process holds what torch's own counters leave out: the CUDA context, cuBLAS workspaces and
    fragmentation. Where the driver does not tell processes apart, the growth of the whole device is taken instead.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak_bytes, self.source = 0, "none"
        self._nvml_device = None
        if device.type != "cuda":
            return
        self.source = "mem_get_info (whole device)"
        try:
            import pynvml

            pynvml.nvmlInit()
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
            index = int(visible) if visible.isdigit() else 0
            self._nvml, self._nvml_device = pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)
            self._bytes_before = int(pynvml.nvmlDeviceGetMemoryInfo(self._nvml_device).used)
        except Exception as error:
            self.source += f"; no NVML: {error!r}"

    def sample(self) -> None:
        """Take what is in use now into the peak."""
        if self.source != "none":
            self.peak_bytes = max(self.peak_bytes, self._used_bytes())

    def _used_bytes(self) -> int:
        if self._nvml_device is None:
            free, total = torch.cuda.mem_get_info()
            return int(total - free)
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._nvml_device):
            if process.pid == os.getpid() and process.usedGpuMemory:
                self.source = "NVML, this process"
                return int(process.usedGpuMemory)
        self.source = "NVML, growth of the device"
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._nvml_device).used) - self._bytes_before


def evict_page_cache(folder: Path) -> None:
    """Have the files under `folder` read from the disk again, as on the first start after a boot."""
    for path in folder.iterdir():
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
