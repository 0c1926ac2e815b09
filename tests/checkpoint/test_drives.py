"""Output folders on network drives: some lack locks, cannot rename folders, or report errors only on close."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from offloadkit.checkpoint import folder as folders
from offloadkit.checkpoint import one_run as module
from offloadkit.checkpoint.folder import check_room, explained_write_errors, replace_folder, sync_folder, writable
from offloadkit.checkpoint.one_run import CLAIM, Saves, one_run
from offloadkit.errors import OutputError
from offloadkit.facts.telemetry import StepRecord, Telemetry


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_every_door_works_on_such_a_drive_or_names_it_and_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    library, scratch = tmp_path / "like_drive.so", tmp_path / "drive"
    source = Path(__file__).with_name("like_drive.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    scratch.mkdir()
    command = [sys.executable, "-m", "tests.checkpoint.drives", scratch, library, "1", "1"]
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line.removeprefix("SAID ")) for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert len(lines) == 3 * (2 + 6 + 3 * 2)
    for said in lines:
        assert said["error"] in ("", "OutputError"), said
        assert said["goes on"] >= max(said["saved"], default=0), said
        assert said["error"] or said["saved"] == [1, 2], said
    for said in lines:  # failures that show before training does
        if "sync" in said["mode"] or "locks" in said["mode"]:
            assert not said["error"], said
        elif "rename" in said["mode"]:
            assert "does not support renaming folders" in said["text"], said
            assert not said["saved"]
        elif said["after"] == 0:
            assert "cannot be written (" in said["text"], said
            assert not said["saved"]
        elif "EDQUOT" in said["mode"] and said["error"]:
            assert "quota" in said["text"], said


def failing(code: int) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM])
def test_a_folder_that_renames_no_folders_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(Path, "rename", failing(code))
    with pytest.raises(OutputError, match=r"run does not support renaming folders \(.*local disk"):
        writable(tmp_path / "run")
    with pytest.raises(OutputError, match="does not support renaming folders"):
        Saves().claim(tmp_path / "run" / "mine")
    assert not any((tmp_path / "run").iterdir())


def test_what_a_killed_process_left_of_its_probe_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / f".offloadkit-probe-{ended.pid}-x" / "new").mkdir(parents=True)
    (mine := tmp_path / f".offloadkit-probe-{os.getpid()}-x").mkdir()
    writable(tmp_path)
    assert list(tmp_path.iterdir()) == [mine]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS])
def test_folders_need_not_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(folders.os, "fsync", failing(code))
    sync_folder(tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("Error while serializing: I/O error: Disk quota exceeded (os error 122)"),
    ],
    ids=["open", "safetensors"],
)
def test_a_quota_is_named_in_the_place_of_what_is_free(tmp_path: Path, error: Exception) -> None:
    with (
        pytest.raises(OutputError, match=r"a quota there is used up .*: make room within it, or pass") as raised,
        explained_write_errors(tmp_path),
    ):
        raise error
    assert "are free" not in str(raised.value)


@pytest.mark.parametrize("says", [lambda _: SimpleNamespace(free=0, total=0), failing(errno.ENOTCONN)])
def test_a_drive_that_does_not_say_what_is_free_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Any
) -> None:
    monkeypatch.setattr(folders.shutil, "disk_usage", says)
    check_room(tmp_path, 2**40, "a checkpoint")
    with pytest.raises(OutputError, match=r"could not be written \(.*endpoint"), explained_write_errors(tmp_path):
        failing(errno.ENOTCONN)()


def test_a_folder_that_could_not_be_exchanged_leaves_no_second_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_folder(tmp_path / "model", lambda new: (new / "weights").write_text("old") and None)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing(errno.EXDEV))
        with pytest.raises(OutputError, match="cross-device"):
            replace_folder(tmp_path / "model", lambda new: (new / "weights").write_text("new") and None)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "weights").read_text() == "old"


def test_where_no_file_keeps_its_inode_a_lock_says_nothing_and_a_heartbeat_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def another_inode(file: int) -> os.stat_result:
        mode, _, *more = fstat(file)
        return os.stat_result((mode, -1, *more))

    fstat = os.fstat
    monkeypatch.setattr(os, "fstat", another_inode)
    with one_run(tmp_path):
        assert "no file locks" in capsys.readouterr().err
        assert json.loads((tmp_path / CLAIM).read_text())["beat"] == 0
    assert not (tmp_path / CLAIM).exists()


def test_a_claim_that_cannot_be_closed_or_removed_does_not_end_what_has_ended_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = Saves()
    with one_run(tmp_path), monkeypatch.context() as patch:
        saves.claim(tmp_path / "mine")
        patch.setattr(Path, "unlink", failing(errno.EIO))
        saves.end()
    (tmp_path / "other").mkdir()
    with monkeypatch.context() as patch, one_run(tmp_path / "other"):
        patch.setattr(Path, "unlink", failing(errno.EIO))


def test_a_claim_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "pwrite", failing(errno.EDQUOT))
    with pytest.raises(OutputError, match="a quota there is used up"), one_run(tmp_path):
        pass


def test_a_heartbeat_goes_on_after_one_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.fcntl, "lockf", failing(errno.ENOSYS))
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.01)
    written_beside, beats, third = module.atomic_write, list[int](), threading.Event()

    @contextmanager
    def written(path: Path) -> Iterator[Any]:
        beats.append(len(beats))
        if beats[-1] == 1:
            failing(errno.EIO)()
        with written_beside(path) as file:
            yield file
        if beats[-1] == 3:
            third.set()

    monkeypatch.setattr(module, "atomic_write", written)
    with one_run(tmp_path):
        assert third.wait(10), beats
        assert json.loads((tmp_path / CLAIM).read_text())["beat"] >= 3


def test_a_log_that_cannot_be_closed_is_warned_of_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "steps.jsonl").open("a") as file, monkeypatch.context() as patch:
        fails = SimpleNamespace(write=file.write, flush=file.flush, close=failing(errno.EIO))
        patch.setattr(Path, "open", lambda *_, **__: fails)
        telemetry = Telemetry(log_path=tmp_path / "steps.jsonl")
        telemetry.add(StepRecord(1, 1.0, 100, 1.0, 1e-3, False, {}))
        with pytest.warns(RuntimeWarning, match="could not be closed .*Input/output error"):
            telemetry.close()
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 1
