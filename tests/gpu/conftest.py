"""Fixtures of GPU tests."""

from __future__ import annotations

import os
from typing import Any

import pytest


def card() -> tuple[Any, Any]:
    """pynvml, and its handle of the GPU."""
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    return pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(visible) if visible.isdigit() else 0)


@pytest.fixture
def alone() -> None:
    """Skip the test if another process uses the GPU."""
    pynvml, handle = card()
    if {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)} - {os.getpid()}:
        pytest.skip("another process uses this GPU: run this test alone")
