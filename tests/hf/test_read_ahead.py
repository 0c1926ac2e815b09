"""Files are read into the page cache ahead of use, as far as RAM has room."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from offloadkit.hf import read_ahead
from offloadkit.hf.source import resolve
from tests.hf.tiny import t5_config


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(read_ahead, "BLOCK_BYTES", 4096)
    found = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    for file, size in zip(found, (10_000, 4096), strict=True):
        file.write_bytes(bytes(size))
    return found


def blocks_read(monkeypatch: pytest.MonkeyPatch, cached: int | None = None) -> list[int]:
    """The blocks that are read; the system reports only the block at `cached` as cached."""
    found: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: Any, at: int, flags: int = 0) -> int:
        if flags == os.RWF_NOWAIT:
            if at != cached:
                raise BlockingIOError
            return 1
        found.append(at)
        return preadv(descriptor, buffers, at, flags)

    monkeypatch.setattr(os, "preadv", counted)
    return found


def test_every_block_that_is_not_cached_is_read_once(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    at = blocks_read(monkeypatch, cached=4096)
    for thread in read_ahead.read_ahead(files):
        thread.join()
    assert sorted(at) == [0, 0, 8192]


def test_what_does_not_fit_or_is_gone_is_left_alone(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    at = blocks_read(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(read_ahead, "ram_available_bytes", lambda: 20_000)
        assert read_ahead.read_ahead(files) == []

    def gone(path: Any, flags: int) -> int:
        raise FileNotFoundError(path)

    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(os, "open", gone)
    threads = read_ahead.read_ahead(files)
    for thread in threads:
        thread.join()
    assert threads
    assert failed == []
    assert at == []


def test_a_source_reads_ahead_what_it_will_read(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[Path]] = []
    monkeypatch.setattr("offloadkit.hf.source.read_ahead", given.append)
    t5_config().save_pretrained(files[0].parent)
    resolve(files[0].parent).read_ahead()
    resolve(files[0].parent, init="random").read_ahead()
    resolve("t5-3b").read_ahead()
    assert given == [files]
