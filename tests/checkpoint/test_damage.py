"""Damaged or mixed checkpoints are refused by name, and a killed save leaves a complete checkpoint."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from offloadkit import OffloadConfig, OffloadEngine
from offloadkit.checkpoint import folder as folders
from offloadkit.checkpoint.arrays import write_arrays
from offloadkit.checkpoint.run import write_random
from offloadkit.errors import ModelError


def engine() -> OffloadEngine:
    torch.manual_seed(0)
    return OffloadEngine(
        nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]), OffloadConfig(learning_rate=0.1), device="cpu"
    )


def step(run: OffloadEngine) -> None:
    run.backward(run(torch.ones(2, 8)).square().sum())
    run.step()


def numbers(run: OffloadEngine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.master_weights().items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoints after one step and after two."""
    folder = tmp_path_factory.mktemp("saved")
    with engine() as run:
        for name in ("one", "two"):
            step(run)
            run.save_checkpoint(folder / name)
    return folder / "one", folder / "two"


def refused(checkpoint: Path) -> str:
    with engine() as run:
        before = numbers(run)
        with pytest.raises(ModelError) as raised:
            run.load_checkpoint(checkpoint)
        assert all(torch.equal(value, before[name]) for name, value in numbers(run).items()), "nothing has changed"
    return str(raised.value)


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit_anywhere_is_refused_by_the_files_name(
    saved: tuple[Path, Path], tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    copy = shutil.copytree(saved[1], tmp_path / "copy")
    path = draw.choice(sorted(copy.iterdir()))
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    said = refused(copy)
    assert path.name in said or "format" in said  # the version in the manifest


@pytest.mark.parametrize(
    "name", ["run.json", "random.json", "weights.safetensors", "states-00000-of-00001.safetensors"]
)
def test_a_file_of_another_step_is_refused_by_its_name(saved: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(saved[1], tmp_path / "copy")
    shutil.copy(saved[0] / name, copy / name)
    said = refused(copy)
    assert said.startswith(f"{name} of the checkpoint {copy} was written by run ")
    assert "attempt 1, after 1 updates, but manifest.json by run" in said
    assert "attempt 1, after 2 updates: files of two checkpoints were mixed" in said


@pytest.mark.parametrize(
    "name", ["run.json", "random.json", "weights.safetensors", "states-00000-of-00001.safetensors", "manifest.json"]
)
def test_a_file_of_another_run_from_the_same_seed_is_refused_by_the_names_of_both(
    saved: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    with engine() as run:
        for _ in range(2):
            step(run)
        run.save_checkpoint(tmp_path / "other")
    both = folders.origin_of(saved[1]).run, folders.origin_of(tmp_path / "other").run
    assert both[0] != both[1]
    copy = shutil.copytree(saved[1], tmp_path / "copy")
    shutil.copy(tmp_path / "other" / name, copy / name)
    said = refused(copy)
    assert name in said
    assert all(f"run {each}, attempt 1, after 2 updates" in said for each in both)


def test_a_file_of_another_attempt_at_the_same_update_is_refused_by_both(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    """A run fell back and reached the same update again."""
    for each in saved:
        shutil.copytree(each, tmp_path / each.name)
    with engine() as run:
        for attempt in (2, 3):
            run.load_checkpoint(tmp_path / "one")
            step(run)
            run.save_checkpoint(tmp_path / f"attempt {attempt}")
    assert folders.origin_of(tmp_path / "attempt 3") == (folders.origin_of(saved[0]).run, 3, 2)
    for other in (saved[1], tmp_path / "attempt 2"):
        copy = shutil.copytree(tmp_path / "attempt 3", tmp_path / "copy")
        shutil.copy(other / "run.json", copy / "run.json")
        said = refused(copy)
        assert said.startswith(
            f"run.json of the checkpoint {copy} was written by {folders.origin_of(other)}, but manifest.json by "
        )
        shutil.rmtree(copy)


@pytest.mark.parametrize("names", ["states-0000{}-of-00002.safetensors", "random{}.json"])
def test_files_of_ranks_that_were_exchanged_are_refused_by_both_names(
    saved: tuple[Path, Path], tmp_path: Path, names: str
) -> None:
    copy, origin = shutil.copytree(saved[1], tmp_path / "copy"), folders.origin_of(saved[1])
    own, other = (names.format(rank) for rank in ((0, 1) if "states" in names else ("", "-00001")))
    for name in (own, other):
        if name.endswith(".json"):
            write_random(copy, origin, int(name == other))
        else:
            write_arrays(copy / name, {name: torch.ones(2)}, origin.of_arrays(name))
    folders.write_manifest(copy, origin)
    (copy / own).rename(copy / "kept")
    (copy / other).rename(copy / own)
    (copy / "kept").rename(copy / other)
    first, second = sorted((own, other))
    said = refused(copy)
    assert said.startswith(f"{first} of the checkpoint {copy} was written as {second} ({origin}): files of ranks were")


def test_a_broken_checkpoint_falls_back_within_its_run(saved: tuple[Path, Path], tmp_path: Path) -> None:
    """In a folder with checkpoints of several runs, the previous checkpoint may be another run's."""
    for each in saved:
        shutil.copytree(each, tmp_path / each.name)
    with engine() as run:
        step(run)
        run.save_checkpoint(tmp_path / "three")
        (tmp_path / "three" / "weights.safetensors").write_bytes(b"")
        with pytest.raises(ModelError, match=r"No earlier checkpoint can be read \(two belongs to another run\)"):
            folders.readable_or_before(tmp_path / "three")
        (tmp_path / "three" / "manifest.json").write_bytes(b"")
        with pytest.raises(ModelError, match=r"No earlier checkpoint can be read \(two belongs to another run\)"):
            folders.readable_or_before(tmp_path / "three")
        (tmp_path / "two" / "weights.safetensors").write_bytes(b"")
        assert folders.readable_or_before(tmp_path / "two") == tmp_path / "one"


def test_pieces_that_changed_places_are_seen(
    saved: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "PIECE_BYTES", 64)
    (tmp_path / "a").write_bytes(bytes(64) + b"1" * 64)
    one = folders.checksums(tmp_path / "a", "a")
    (tmp_path / "a").write_bytes(b"1" * 64 + bytes(64))
    assert not set(one) & set(folders.checksums(tmp_path / "a", "a"))
    (tmp_path / "a").write_bytes(bytes(64) + bytes(64))
    first, second = folders.checksums(tmp_path / "a", "a")
    assert first != second
    assert first != folders.checksums(tmp_path / "a", "b")[0]


def test_a_change_is_in_its_own_piece_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "PIECE_BYTES", 64)
    content = bytearray(150)
    (tmp_path / "a").write_bytes(content)
    before = folders.checksums(tmp_path / "a", "a")
    content[100] = 1
    (tmp_path / "a").write_bytes(content)
    changed = [one != other for one, other in zip(before, folders.checksums(tmp_path / "a", "a"), strict=True)]
    assert changed == [False, True, False]


def test_a_file_that_the_disk_does_not_give_back_is_named(
    saved: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = folders.checksums

    def fails(path: Path, name: str) -> list[str]:
        if name == "weights.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path, name)

    monkeypatch.setattr(folders, "checksums", fails)
    assert "weights.safetensors of the checkpoint" in (said := refused(shutil.copytree(saved[1], tmp_path / "copy")))
    assert "(Input/output error)" in said


class _KilledError(BaseException):
    """Simulates a kill: no code catches it, and no cleanup runs."""


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every rename, removal and sync decrements [0]. At 0 the process counts as killed: later calls do nothing."""
    left = [10**9]

    def counted(real: object) -> object:
        def call(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise _KilledError
            return real(*args, **kwargs)  # type: ignore[operator]

        return call

    for name in ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    for name in ("rename", "replace", "unlink", "mkdir"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr(shutil, "rmtree", counted(shutil.rmtree))
    yield left
    left[0] = 10**9


@pytest.mark.slow
def test_a_save_killed_at_each_of_its_renames_syncs_and_removals_leaves_the_newest_or_the_one_before(
    tmp_path: Path, killed_at: list[int]
) -> None:
    checkpoint = tmp_path / "checkpoint"
    with engine() as run:
        step(run)
        run.save_checkpoint(checkpoint)
        before = numbers(run)
        step(run)
        after, seen, kill = numbers(run), set(), 0
        while True:
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
            with engine() as other:
                step(other)
                other.save_checkpoint(checkpoint)
            killed_at[0] = kill
            try:
                run.save_checkpoint(checkpoint)
            except _KilledError:
                done = False
            else:
                done = True
            killed_at[0] = 10**9
            with engine() as other:
                other.load_checkpoint(checkpoint)
                found = numbers(other)
                newest = all(torch.equal(value, after[name]) for name, value in found.items())
                assert newest or all(torch.equal(value, before[name]) for name, value in found.items())
                other.save_checkpoint(checkpoint)
            seen.add(newest)
            if done:
                break
            kill += 1
    assert seen == {True, False}
    assert kill > 8
