"""torch's allocator with expandable segments."""

from __future__ import annotations

import os

import pytest
import torch

from offloadkit.device import process_memory as allocator
from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts.config import OffloadConfig
from tests.models import TinyLM


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append, raising=False)
    for name in allocator.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return found


def test_segments_grow_on_a_gpu(settings: list[str]) -> None:
    allocator.let_segments_grow(torch.device("cuda", 0))
    allocator.let_segments_grow(torch.device("cpu"))
    assert settings == ["expandable_segments:True"]


@pytest.mark.parametrize("name", allocator.ALLOCATOR_VARIABLES)
def test_the_users_own_settings_stay(settings: list[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    allocator.let_segments_grow(torch.device("cuda", 0))
    assert settings == []


@pytest.mark.gpu
@pytest.mark.skipif(
    any(name in os.environ for name in allocator.ALLOCATOR_VARIABLES), reason="the allocator is configured"
)
def test_an_engine_has_segments_that_grow() -> None:
    engine = OffloadEngine(TinyLM(width=512, hidden=2048).cuda(), OffloadConfig(), device="cuda")
    engine.backward(engine(torch.randint(1, 60, (8, 128), device="cuda")))
    engine.step()
    engine.synchronize()
    kinds = [segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()]
    engine.close()
    assert any(kinds)
