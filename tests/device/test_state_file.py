"""Optimizer states on disk: written after the step and read ahead of it; unsuitable disks are refused."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloadkit.device import state_file as disk
from offloadkit.device.host_memory import HostSlab
from offloadkit.device.state_file import DiskStates, StateFile
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import EngineStateError, OutputError
from offloadkit.facts.config import OffloadConfig, Placement
from tests.models import TinyLM, tokens, train

ON_DISK = Placement(states="disk")


def engine_on(folder: Path, **options: Any) -> OffloadEngine:
    config = OffloadConfig(working_dtype="bf16", placement=ON_DISK, disk=str(folder), **options)
    return OffloadEngine(TinyLM(), config, device="cpu")


def fill(slab: HostSlab, value: int, size: int) -> None:
    slab.clear()
    slab.cut(size, torch.uint8).fill_(value)


def first_byte(slab: HostSlab) -> int:
    slab.clear()
    return int(slab.cut(1, torch.uint8))


def test_pages_of_an_empty_region_behind_all_others_are_forgotten(tmp_path: Path) -> None:
    file = StateFile(tmp_path, [4096, 0])
    file.mapped(0).fill_(7)
    file.forget_pages(1)
    file.forget_pages()
    assert bool((file.mapped(0) == 7).all())
    assert file.mapped(1).numel() == 0
    file.close()


@pytest.mark.parametrize("direct", [True, False])
def test_regions_keep_what_was_written(tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")
    sizes = [5_000, 40 * 2**20, 4096, 1]
    file = StateFile(tmp_path, sizes)
    slabs = [HostSlab(max(sizes)) for _ in range(3)]
    states = DiskStates(file, slabs)
    for times in range(1, 4):
        for index, size in enumerate(sizes):
            states.prefetch(min(index + 1, len(sizes) - 1))
            slab = states.take(index)
            assert first_byte(slab) == (0 if times == 1 else 10 * index + times - 1)
            fill(slab, 10 * index + times, size)
            states.give_back(index)
    states.synchronize()
    for index, size in enumerate(sizes):
        seen = file.mapped(index)
        assert seen.numel() == size
        assert bool((seen == 10 * index + 3).all())
        seen.fill_(99)  # like load_state_dict
    for index in range(len(sizes)):
        assert first_byte(states.take(index)) == 99
        states.give_back(index)
    del seen
    file.close()


def test_a_view_outlives_its_file(tmp_path: Path) -> None:
    file = StateFile(tmp_path, [4096])
    view = file.mapped(0, 8, 3, torch.int16).fill_(7)
    file.close()
    assert view.tolist() == [7, 7, 7]


def test_a_file_grows_by_further_regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StateFile(tmp_path, [5_000])
    states = DiskStates(file, [HostSlab(20_000)])
    fill(states.take(0), 3, 5_000)
    states.give_back(0)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
        with pytest.raises(OutputError, match=r"need .* of disk"):
            file.add([7_000])
    assert file.add([7_000, 20_000]) == [1, 2]
    fill(states.take(2), 5, 20_000)
    states.give_back(2)
    states.synchronize()
    states.use([HostSlab(20_000)])
    assert first_byte(states.take(0)) == 3
    assert [int(file.mapped(index).max()) for index in range(3)] == [3, 0, 5]
    states.synchronize()
    file.close()


def test_what_was_read_ahead_and_not_stepped_is_read_again(tmp_path: Path) -> None:
    file = StateFile(tmp_path, [4096])
    states = DiskStates(file, [HostSlab(4096)])
    states.prefetch(0)
    states.synchronize()
    file.mapped(0).fill_(7)
    assert first_byte(states.take(0)) == 7


def test_a_region_that_was_not_read_ahead_takes_the_place_of_one_that_was(tmp_path: Path) -> None:
    file = StateFile(tmp_path, [4096] * 5)
    states = DiskStates(file, [HostSlab(4096) for _ in range(3)])
    for index in range(5):
        fill(states.take(index), index + 1, 4096)
        states.give_back(index)
    states.synchronize()
    for index in (1, 2, 3):
        states.prefetch(index)
    for index in range(5):
        assert first_byte(states.take(index)) == index + 1
        states.give_back(index)


def pages_of_files() -> int:
    """Bytes of mapped files that count towards this process's RAM."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) * 1024


def test_master_weights_on_disk_take_no_ram_once_written(tmp_path: Path) -> None:
    config = OffloadConfig(working_dtype="fp16", placement=ON_DISK, disk=str(tmp_path))
    model = TinyLM(width=256, hidden=8192)
    before = pages_of_files()
    engine = OffloadEngine(model, config, device="cpu")
    masters = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert masters > 60 * 2**20
    assert pages_of_files() - before < masters / 4
    state = engine.state_dict()["optimizer"]["blocks.0.up.weight"]["remainder"]
    assert torch.count_nonzero(state) > 0.9 * state.numel()
    engine.close()


def test_nothing_is_left_on_disk(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with engine_on(tmp_path) as engine:
            train(engine, tokens(2))
            assert not list(tmp_path.iterdir()), "the file has no name"
    assert len(os.listdir("/proc/self/fd")) <= before + 1


@pytest.mark.parametrize("precision", ["exact", "compact", "tiny"])
def test_states_on_disk_are_saved_by_torch_and_go_on(tmp_path: Path, precision: Any) -> None:
    batches = tokens(4)
    with engine_on(tmp_path, precision=precision) as engine:
        train(engine, batches[:2])
        torch.save(engine.state_dict(), tmp_path / "saved.pt")
        train(engine, batches[2:])
        expected = engine.master_weights()
    with engine_on(tmp_path, precision=precision) as engine:
        engine.load_state_dict(torch.load(tmp_path / "saved.pt"))
        train(engine, batches[2:])
        weights = engine.master_weights()
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(OutputError, match=r"need .* of disk and .* has 0.977 KiB free: free some, or name another"):
        engine_on(tmp_path)


def test_a_quota_that_is_used_up_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    file = StateFile(tmp_path, [5_000])
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutputError, match=r"quota exceeded\. Free some of that disk or quota, or name another folder"):
        file.add([7_000])
    file.close()
    with pytest.raises(OutputError, match=r"quota exceeded\. Free some of that disk or quota, or name another folder"):
        engine_on(tmp_path)


def test_a_folder_in_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "file_system", lambda folder: "tmpfs")
    monkeypatch.setattr(disk, "RAM_FILE_SYSTEMS", {"tmpfs"})
    with pytest.raises(OutputError, match=r"it is in RAM itself \(tmpfs\). Name a folder on a local disk"):
        engine_on(tmp_path)


def test_a_network_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "file_system", lambda folder: "nfs4")
    with pytest.raises(OutputError, match=r"is a network mount \(nfs4\). Name a folder on a local disk"):
        engine_on(tmp_path)


def test_the_file_system_of_a_folder_is_found() -> None:
    assert disk.file_system(Path("/proc/self")) == "proc"
    assert disk.file_system(Path("/")) not in {"", "proc"}


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be put on disk in"):
        engine_on(tmp_path / "missing")


def test_a_disk_that_fails_in_mid_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(tmp_path)
    train(engine, tokens(2))

    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    engine.backward(engine(tokens(1)[0]))
    engine.step()
    with pytest.raises(EngineStateError, match="the optimizer step failed"):
        engine.synchronize()
    with pytest.raises(EngineStateError):
        engine.close()
