"""The power is cut during saves: every reported save is whole on the disk, and training resumes from it bit for bit.

    python -m benchmarks.power_cut                                    # 200 cuts, in ten minutes; needs cc, and no GPU

The preloaded `power_cut.c` keeps a copy of synced data, and ends the process at a chosen rename, removal, new folder or
sync. Everything that was not synced is lost then: bytes of files, and names in folders. No disk may do worse.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from benchmarks import corruption, table
from benchmarks.run import git_commit
from offloadkit.checkpoint.folder import MANIFEST, newest_checkpoint, replace_folder
from offloadkit.checkpoint.origin import Origin

_DISK = "POWER_CUT_DISK"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.power_cut", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append a row to this table")
    given = parser.parse_args(arguments)
    if _DISK in os.environ:
        run(given.times, given.seed)
        return
    commit = git_commit()
    start(given.times, given.seed)
    if given.out is not None:
        figures = {"cuts": given.times, "saves lost": 0}
        table.append([table.of_figures("power cuts in saves", "a loop, and the Trainer", figures, commit)], given.out)


def start(times: int, seed: int) -> None:
    """Compile the library and run `times` cuts in a process that preloads it.

    Raises:
        CalledProcessError: a reported save was lost; or cc failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch, "power_cut.so")
        source = Path(__file__).with_suffix(".c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        environment = {**os.environ, "LD_PRELOAD": str(library), _DISK: str(Path(scratch, "disk"))}
        command = [sys.executable, "-m", "benchmarks.power_cut", f"--times={times}", f"--seed={seed}"]
        subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parent.parent)


def restored(folder: Path, identity: str, disk: Path) -> None:
    """Create `folder` with the contents that the disk holds for the folder `identity` after the cut."""
    folder.mkdir()
    names = disk / "folders" / identity
    for line in names.read_text().splitlines() if names.is_file() else []:
        name, kind, of = line.rsplit("\t", 2)
        if kind == "d":
            restored(folder / name, of, disk)
        elif (disk / "objects" / of).is_file():
            shutil.copyfile(disk / "objects" / of, folder / name)
        else:
            (folder / name).touch()


def _in_fork(do: Callable[[Callable[[str], None]], object]) -> tuple[list[str], int]:
    """(reports of `do`, exit status) from a forked process, because autograd and engines have threads."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        status = 1
        try:
            torch.set_num_threads(1)
            random.seed(0)  # a fork seeds it
            np.random.seed(0)
            do(lambda text: (os.write(writing, f"{text}\n".encode()), None)[1])
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read().splitlines()
    return said, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _digest(files: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def save_in_loop(folder: Path, report: Callable[[str], None]) -> None:
    """Four saves of a bare loop into one new folder, each reported after its return."""
    with corruption.small_engine(seed=0) as engine:
        torch.manual_seed(0)
        for _ in range(4):
            corruption.step(engine)
            engine.save_checkpoint(folder / "mine" / "checkpoint")
            report("checkpoint " + _digest(_manifest(folder / "mine" / "checkpoint")))


def find_of_loop(folder: Path, report: Callable[[str], None]) -> None:
    """Resume a loop, and report its checkpoint."""
    with corruption.small_engine(seed=7) as engine:
        engine.load_checkpoint(folder / "mine" / "checkpoint")
    report("checkpoint " + _digest(_manifest(folder / "mine" / "checkpoint")))


def save_by_trainer(folder: Path, report: Callable[[str], None]) -> None:
    """Four saves of a Trainer that keeps one checkpoint, then two saves of the trained model."""

    class Reports(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            report("checkpoint " + _digest(_manifest(Path(args.output_dir, f"checkpoint-{state.global_step}"))))

    trainer = corruption.small_trainer(folder / "mine" / "run", 0, 4)
    trainer.args.save_total_limit = 1
    trainer.add_callback(Reports())
    trainer.train()
    for _ in range(2):
        replace_folder(folder / "mine" / "model", trainer.model.save_pretrained)
        report("model " + _digest(_files(folder / "mine" / "model")))


def find_of_trainer(folder: Path, report: Callable[[str], None]) -> None:
    """Report the checkpoint that a Trainer would resume from, and the model."""
    report("checkpoint " + _digest(_manifest(newest_checkpoint(folder / "mine" / "run"))))
    model = folder / "mine" / "model"
    beside = model.with_name(".model-old")
    if model.is_dir() or beside.is_dir():
        report("model " + _digest(_files(model if model.is_dir() else beside)))


def _manifest(checkpoint: Path) -> dict[str, Any]:
    """The checksums of a checkpoint's files, which loading has verified."""
    files: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text())["files"]
    return files


def _files(folder: Path) -> dict[str, Any]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


DOORS = {"loop": (save_in_loop, find_of_loop), "trainer": (save_by_trainer, find_of_trainer)}


def run(times: int, seed: int) -> None:
    """Cut the power `times` times, in processes forked from this one, which has the library preloaded.

    Raises:
        AssertionError: a reported save is lost or changed.
    """
    library, disk = ctypes.CDLL(None), Path(os.environ[_DISK])
    draw, counts = random.Random(seed), Counter[str]()
    gc.freeze()  # otherwise each engine of a forked process would pass over all imported modules
    Origin.of_new_run = lambda: Origin("of all processes", 1, 0)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as scratch:
        folder, found_in = Path(scratch, "run"), Path(scratch, "restored")
        for name, (save, find) in DOORS.items():

            def cut_after(number: int, save: Any = save) -> tuple[list[str], int]:
                for old in (folder, found_in, disk):
                    shutil.rmtree(old, ignore_errors=True)
                for new in (folder, disk / "objects", disk / "folders"):
                    new.mkdir(parents=True)

                def saves(report: Callable[[str], None]) -> None:
                    library.power_cut_in(ctypes.c_long(number))
                    save(folder, report)
                    report(str(library.power_cut_done()))

                return _in_fork(saves)

            expected, status = cut_after(10**9)
            assert status == 0
            num_operations = int(expected.pop())
            for _ in range(times // len(DOORS)):
                at = draw.randrange(num_operations)
                said, status = cut_after(at)
                assert status == 9, f"{name}: the power was not cut at operation {at}: {status}"
                assert said == expected[: len(said)], f"{name}: another run"
                identity = ctypes.create_string_buffer(80)
                library.power_cut_identity(str(folder).encode(), identity, ctypes.c_size_t(80))
                restored(found_in, identity.value.decode(), disk)
                _check(f"{name}, cut at operation {at} after {len(said)} saves", find, found_in, said, expected)
                counts[f"{name}: after {len(said)} of {len(expected)} saves"] += 1
    for what, count in sorted(counts.items()):
        print(f"{what}: {count} cuts")
    print(f"{counts.total()} cuts, nothing that was reported saved was lost", flush=True)


def _check(what: str, find: Any, folder: Path, said: list[str], expected: list[str]) -> None:
    """For each reported kind, the last reported save or the one after it exists."""
    there, status = _in_fork(lambda report: find(folder, report)) if said else ([], 0)
    assert status == 0, f"{what}: what was reported is lost or cannot be read"
    for kind in ("checkpoint", "model"):
        reported = [text for text in said if text.startswith(kind)]
        of_kind = [text for text in expected if text.startswith(kind)]
        if reported:
            allowed = of_kind[len(reported) - 1 : len(reported) + 1]
            assert any(text in allowed for text in there), f"{what}: {kind} is another one"


if __name__ == "__main__":
    main()
