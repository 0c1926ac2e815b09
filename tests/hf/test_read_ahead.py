"""Files are read ahead into the page cache, where RAM has room for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from offloadkit.hf import read_ahead
from offloadkit.hf.source import resolve
from tests.hf.tiny import t5_config


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.setattr(read_ahead, "_BLOCK_BYTES", 4096)
    found = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    for file, size in zip(found, (10_000, 4096), strict=True):
        file.write_bytes(bytes(size))
    return found


def blocks_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: Any, at: int, flags: int = 0) -> int:
        if not flags:
            found.append(at)
        return preadv(descriptor, buffers, at, flags)

    monkeypatch.setattr(os, "preadv", counted)
    return found


def test_every_block_that_is_not_cached_is_read_once(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    at = blocks_read(monkeypatch)
    monkeypatch.setattr(read_ahead, "_is_cached", lambda descriptor, at: at == 4096)
    for thread in read_ahead.read_ahead(files):
        thread.join()
    assert sorted(at) == [0, 0, 8192]


def test_what_does_not_fit_or_is_gone_is_left_alone(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    at = blocks_read(monkeypatch)
    monkeypatch.setattr(read_ahead, "ram_available_bytes", lambda: 20_000)
    assert read_ahead.read_ahead(files) == []
    read_ahead._read([(files[0].with_name("gone"), 0), (files[1], 0)])
    assert at == []


def test_a_source_reads_ahead_what_it_will_read(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[Path]] = []
    monkeypatch.setattr("offloadkit.hf.source.read_ahead", given.append)
    t5_config().save_pretrained(files[0].parent)
    resolve(files[0].parent).read_ahead()
    resolve(files[0].parent, init="random").read_ahead()
    resolve("t5-3b").read_ahead()
    assert given == [files]
