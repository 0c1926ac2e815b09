"""A made-up NVML: GPUs with processes and their VRAM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from offloadkit.facts import nvml

UUIDS = [f"GPU-{letter}" for letter in "abcd"]


class Library:
    """NVML's functions that offloadkit calls.

    Attributes:
        processes: (process, bytes) by number of the GPU; None as bytes: not counted.
        used: bytes in use by number of the GPU.
    """

    def __init__(self) -> None:
        self.processes: dict[int, list[tuple[int, int | None]]] = {}
        self.used: dict[int, int] = {}
        self.error = 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, card: Any) -> int:  # noqa: N802
        card._obj.value = 100 + index
        return self.error

    def nvmlDeviceGetMemoryInfo(self, card: Any, memory: Any) -> int:  # noqa: N802
        memory._obj.used = self.used.get(card.value - 100, 0)
        return self.error

    def nvmlDeviceGetComputeRunningProcesses_v3(self, card: Any, number: Any, processes: Any) -> int:  # noqa: N802
        found = self.processes.get(card.value - 100, [])
        number._obj.value = len(found)
        for at, (pid, num_bytes) in enumerate(found):
            processes[at].pid, processes[at].num_bytes = pid, (1 << 64) - 1 if num_bytes is None else num_bytes
        return self.error


@contextmanager
def nvml_is(library: Any) -> Iterator[None]:
    """While open, `library` is NVML (None: there is none), and torch sees four GPUs."""
    nvml._card.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvml, "_library", lambda: library)
        patch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: UUIDS)
        patch.setattr(torch.cuda, "_device_count_nvml", lambda: len(UUIDS))
        yield
    nvml._card.cache_clear()
