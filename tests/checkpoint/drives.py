"""Trains into folders that fail like network drives and prints one line per result, for test_drives.py.

python -m tests.checkpoint.drives FOLDER LIBRARY, with LIBRARY (like_drive.c) preloaded
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import random
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from benchmarks import corruption
from offloadkit import finetune
from offloadkit.checkpoint import one_run
from offloadkit.checkpoint.folder import newest_checkpoint
from offloadkit.errors import ConfigError, OffloadkitError

FOLDER_SYNC, LOCKS, FOLDER_RENAME, CLOSE, WRITE, ONCE = 1, 2, 4, 8, 16, 32
MODES = {
    "folder sync EINVAL": (FOLDER_SYNC, errno.EINVAL),
    "folder sync ENOSYS": (FOLDER_SYNC, errno.ENOSYS),
    "locks ENOSYS": (LOCKS, errno.ENOSYS),
    "locks ENOTSUP": (LOCKS, errno.ENOTSUP),
    "folder rename EXDEV": (FOLDER_RENAME, errno.EXDEV),
    "folder rename EPERM": (FOLDER_RENAME, errno.EPERM),
    "close EIO": (CLOSE, errno.EIO),
    "one close EIO": (CLOSE | ONCE, errno.EIO),
    "write EDQUOT": (WRITE, errno.EDQUOT),
}


class Reports(TrainerCallback):
    """Records which steps were reported as saved."""

    def __init__(self, saved: list[int]) -> None:
        self.saved = saved

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.saved.append(state.global_step)


def loop(folder: Path, saved: list[int]) -> None:
    """Two saves of a bare loop, into one folder."""
    with corruption.small_engine(seed=0) as engine:
        for number in (1, 2):
            corruption.step(engine)
            engine.save_checkpoint(folder / "checkpoint", position=number)
            saved.append(number)


def trainer(folder: Path, saved: list[int]) -> None:
    """Two steps of a Trainer that saves after each step."""
    made = corruption.small_trainer(folder / "run", 0, 2)
    made.add_callback(Reports(saved))
    try:
        made.train()
    finally:
        made.close()


def tuned(folder: Path, saved: list[int]) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"vocab_size": 384, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**shape, dropout_rate=0.1, decoder_start_token_id=0))
    rows = [{"input_ids": [5, 6, 7], "labels": [8, 9]} for _ in range(4)]
    options: dict[str, Any] = {"tokenizer": "byte", "use_cpu": True, "monitor": False, "callbacks": [Reports(saved)]}
    finetune(model, rows, output_dir=folder / "run", max_steps=2, batch_size=2, save_steps=1, **options)


DOORS: dict[str, Callable[[Path, list[int]], None]] = {"loop": loop, "trainer": trainer, "finetune": tuned}


def goes_on(door: str, folder: Path) -> int:
    """The step that a run in the folder resumes from; 0 if there is no checkpoint."""
    if door == "loop":
        with corruption.small_engine(seed=1) as engine:
            try:
                return int(engine.load_checkpoint(folder / "checkpoint"))
            except OffloadkitError:
                return 0
    try:
        return int(newest_checkpoint(folder / "run").name.removeprefix("checkpoint-"))
    except ConfigError:
        return 0


def main(scratch: Path, library: Path, seed: int = 0, num_times: int = 12) -> None:
    """Run every door in every failure mode."""
    drive = ctypes.CDLL(str(library))
    drive.like_drive.argtypes = ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_long
    drive.like_drive_done.restype = ctypes.c_long
    one_run.HEARTBEAT_SECONDS = 0.2
    import_module("offloadkit.hf.trainer")
    gc.collect()
    gc.freeze()  # each engine collects garbage, and passing over torch and transformers takes longer than a run
    drawing = random.Random(seed)

    def run(door: str, mode: str, after: int) -> int:
        folder = scratch / f"{door} {mode} {after}"
        folder.mkdir()
        torch.manual_seed(0)
        np.random.seed(0)
        bits, code = MODES[mode]
        saved: list[int] = []
        said: dict[str, Any] = {"door": door, "mode": mode, "after": after, "error": "", "text": "", "saved": saved}
        drive.like_drive(str(folder).encode(), bits, code, after)
        try:
            DOORS[door](folder, saved)
        except Exception as error:
            said |= {"error": type(error).__name__, "text": str(error)}
            if not isinstance(error, OffloadkitError):
                traceback.print_exc()
        finally:
            done: int = drive.like_drive_done()
            drive.like_drive(b"", 0, 0, 0)
        said["goes on"] = goes_on(door, folder)
        print("SAID " + json.dumps(said), flush=True)
        return done

    for door in DOORS:
        counts = {bit: run(door, mode, 10**9) for bit, mode in ((CLOSE, "close EIO"), (WRITE, "write EDQUOT"))}
        for mode, (bits, _) in MODES.items():
            run(door, mode, 0)
            done = counts.get(bits & (CLOSE | WRITE), 0)
            for after in sorted(drawing.sample(range(1, done), min(num_times, max(0, done - 1)))):
                run(door, mode, after)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
