"""One run per folder: a second run is refused by name, in this process or another. A killed run releases the folder."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadkit.checkpoint import one_run as module
from offloadkit.checkpoint.earlier_run import earlier_run
from offloadkit.checkpoint.one_run import CLAIM, Saves, one_run
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import OutputError
from offloadkit.facts.config import OffloadConfig, Placement

HOLD = """
import sys, time, os
from pathlib import Path
from offloadkit.checkpoint.one_run import one_run
with one_run(Path(sys.argv[1])):
    if len(sys.argv) > 2 and os.fork() == 0:
        time.sleep(60)  # a DataLoader's worker that outlives the run
        os._exit(0)
    print("claimed", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """Another process that has claimed the folder."""
    more = [request.param] if hasattr(request, "param") else []
    command = [sys.executable, "-c", HOLD, str(tmp_path), *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        yield process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_another_process_is_refused_with_host_pid_and_start_until_the_first_is_killed(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    said = rf"in use by process {holder.pid} on \S+, since \d{{4}}-.*Pass another output_dir"
    with pytest.raises(OutputError, match=said), one_run(tmp_path):
        pass
    holder.kill()
    holder.wait()
    with one_run(tmp_path):
        pass


def test_another_run_is_named_before_what_it_has_written(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    with pytest.raises(OutputError, match=f"in use by process {holder.pid} on"):
        earlier_run(tmp_path, resume=False, overwrite=False)


@pytest.mark.parametrize("holder", ["fork"], indirect=True)
def test_a_forked_worker_that_outlives_the_run_does_not_keep_the_folder(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.kill()
    holder.wait()
    with one_run(tmp_path):
        pass


def test_another_thread_is_refused_and_the_same_one_may_claim_again(tmp_path: Path) -> None:
    raised: list[Exception] = []

    def other() -> None:
        try:
            with one_run(tmp_path):
                pass
        except OutputError as error:
            raised.append(error)

    with one_run(tmp_path):
        with one_run(tmp_path / "." / ""):
            pass
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(raised) == 1
    assert "another thread of" in str(raised[0])
    with one_run(tmp_path):
        pass
    assert not (tmp_path / CLAIM).exists()


def as_of_another_process() -> Any:
    """A second copy of the module without the claims of this process."""
    spec = importlib.util.spec_from_file_location("another_one_run", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    vars(copy)["HEARTBEAT_SECONDS"] = module.HEARTBEAT_SECONDS
    return copy


def test_where_there_are_no_locks_a_heartbeat_says_that_a_run_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", without)
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    with one_run(tmp_path):
        assert "no file locks" in capsys.readouterr().err
        with pytest.raises(OutputError, match=f"process {os.getpid()} on"), as_of_another_process().one_run(tmp_path):
            pass
    (tmp_path / CLAIM).write_text("{}")  # left by a killed run
    with one_run(tmp_path):
        time.sleep(0.1)


SAVES = """
import sys, time
from pathlib import Path
from offloadkit.checkpoint.one_run import Saves
saves = Saves()
for name in sys.argv[2:]:
    saves.claim(Path(sys.argv[1], name))
print("claimed", flush=True)
time.sleep(60)
"""


@pytest.fixture
def loop(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A loop in another process that has saved checkpoints with these names."""
    command = [sys.executable, "-c", SAVES, str(tmp_path), *request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        yield process
        process.kill()


@pytest.mark.parametrize("loop", [["checkpoint-1", "checkpoint-2"]], indirect=True)
def test_what_a_loop_saves_is_refused_to_another_process_until_it_is_killed(
    tmp_path: Path, loop: subprocess.Popen[str]
) -> None:
    mine = Saves()
    mine.claim(tmp_path / "checkpoint-3")
    for name in ("checkpoint-1", "checkpoint-2"):
        with pytest.raises(OutputError, match=rf"{name} is in use by process {loop.pid} on \S+, since \d{{4}}-"):
            mine.claim(tmp_path / name)
    with pytest.raises(OutputError, match=f"process {loop.pid} on"), one_run(tmp_path):
        pass
    assert not (tmp_path / CLAIM).exists()
    loop.kill()
    loop.wait()
    mine.claim(tmp_path / "checkpoint-1")
    with one_run(tmp_path):  # in this process
        assert len(list(tmp_path.glob(".offloadkit-saves-*"))) == 1
    mine.end()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("loop", [["mine"]], indirect=True)
def test_a_loop_that_saves_under_other_names_disturbs_nobody(tmp_path: Path, loop: subprocess.Popen[str]) -> None:
    with one_run(tmp_path):
        Saves().claim(tmp_path / "checkpoint-1")


def test_a_trainers_folder_is_refused_to_a_loop(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    Saves().claim(tmp_path / "mine")
    with pytest.raises(OutputError, match=f"in use by process {holder.pid} on"):
        Saves().claim(tmp_path / "checkpoint-1")


@pytest.mark.parametrize("loop", [["checkpoint"]], indirect=True)
def test_an_engine_saves_nothing_where_another_process_does(tmp_path: Path, loop: subprocess.Popen[str]) -> None:
    module = torch.nn.Linear(3, 2)
    with OffloadEngine(module, OffloadConfig(placement=Placement()), device="cpu") as engine:
        with pytest.raises(OutputError, match=f"in use by process {loop.pid} on"):
            engine.save_checkpoint(tmp_path / "checkpoint")
        assert not (tmp_path / "checkpoint").exists()
        engine.save_checkpoint(tmp_path / "other")
        (tmp_path / "other").rename(tmp_path / "checkpoint")
        with pytest.warns(RuntimeWarning, match=f"in use by process {loop.pid} on .* cannot save there"):
            engine.load_checkpoint(tmp_path / "checkpoint")
        with pytest.raises(OutputError, match=f"in use by process {loop.pid} on"):
            engine.save_checkpoint(tmp_path / "checkpoint-9")
    loop.kill()
    loop.wait()
    with OffloadEngine(module, OffloadConfig(placement=Placement()), device="cpu") as engine:
        engine.save_checkpoint(tmp_path / "checkpoint")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint"}
