"""What tests on a GPU ask for by name."""

from __future__ import annotations

import os
from typing import Any

import pytest


def card() -> tuple[Any, Any]:
    """NVML, and its handle of the card."""
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    return pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(visible) if visible.isdigit() else 0)


@pytest.fixture
def alone() -> None:
    """The test is skipped where others take the card's time, or memory that comes and goes."""
    pynvml, handle = card()
    if {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)} - {os.getpid()}:
        pytest.skip("another process uses this GPU: run this test alone")
