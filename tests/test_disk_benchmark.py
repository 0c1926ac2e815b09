"""The benchmark of states on disk: both ways carry every byte there and back, in little RAM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import disk

MIB = 1 << 20


def test_both_ways_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ["--gib", "0.02", "--region", "4", "--steps", "2"]
    rows = disk.main([*sizes, "--folder", str(tmp_path), "--out", str(out), "--commit", "abc"])
    assert [row["way"] for row in rows] == ["O_DIRECT", "mmap"]
    for row in rows:
        assert row["num_regions"] * row["region_bytes"] == 20 * MIB
        assert row["seconds"] == min(row["all_seconds"]) > 0
        assert row["bytes_per_second_each_way"] == pytest.approx(20 * MIB / row["seconds"])
    written = json.loads(out.read_text())
    assert (written["commit"], written["mode"], len(written["rows"])) == ("abc", "disk", 2)
    assert list(tmp_path.iterdir()) == [out], "the files have no names"


@pytest.mark.parametrize("name", disk.WAYS)
def test_a_byte_that_changes_on_the_way_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = disk.WAYS[name].take

    def flip(way: disk.Direct, index: int) -> torch.Tensor:
        states = take(way, index)
        states[77] ^= index == 2
        return states

    monkeypatch.setattr(disk.WAYS[name], "take", flip)
    with pytest.raises(RuntimeError, match=f"{name}: region 2 is not what was written"):
        disk.measure(name, tmp_path, 4, MIB, 2)


def test_no_more_than_three_mapped_regions_are_in_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    start = disk.Mapped._start

    def count(way: disk.Mapped, move: Any, index: int) -> Any:
        nonlocal most
        jobs = start(way, move, index)
        most = max(most, len({*way._reading, *way._writing, index}))
        return jobs

    monkeypatch.setattr(disk.Mapped, "_start", count)
    disk.measure("mmap", tmp_path, 8, MIB, 1)
    assert most == disk.NUM_BUFFERS
