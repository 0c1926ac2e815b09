"""Ranks of a loop that are killed at random: all processes end, and training resumes to the same weights.

python -m benchmarks.killed_ranks --ranks 8 --kills 5           # on GPUs; resumed on 8, 3 and 1 rank
python -m benchmarks.killed_ranks --device cpu --kills 2        # without a GPU

`kills.py` kills trainings through every door, without a GPU. Ranks share the GPUs where there are fewer GPUs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import nn

from benchmarks import table
from benchmarks.ranks import take_gpu
from benchmarks.run import ended_by_signals, git_commit
from benchmarks.table import Row
from offloadkit import OffloadConfig, OffloadEngine
from offloadkit.checkpoint.folder import newest_checkpoint
from offloadkit.distributed import world
from offloadkit.distributed.launch import launch, send_to_parent
from offloadkit.errors import ConfigError, RankError
from offloadkit.facts.config import Placement

MICRO_BATCHES = 24
"""Per step, of all ranks together. The numbers of ranks divide it: 1, 2, 3, 4, 6, 8, 12, 24."""
_WIDTH, _HIDDEN = 128, 1024
_MORE_STEPS = 3
"""Steps after the last checkpoint of the killed training."""
_END_SECONDS = 60.0
"""Time from a kill until all ranks must have ended."""
_START_SECONDS = 120.0
"""Time until the first step."""
_KILLED_WITHIN = 1.0
"""A rank is killed within this time after the first step."""


class _Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, hidden), nn.Linear(hidden, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.up.weight.dtype)
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class _Model(nn.Module):
    """A model with deterministic kernels."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block(hidden) for _ in range(3)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = rows
        for block in self.blocks:
            x = block(x)
        return (x.float() - rows.flip(-1)).square().mean()


def engine_for(num_ranks: int, micro_batches: int, hidden: int, device: torch.device) -> OffloadEngine:
    """An engine over a model with random weights, the same on every rank, that gives equal bits on any number of ranks.

    Args:
        micro_batches: per step, of all ranks together.
        hidden: width of the hidden layers.
    """
    config = OffloadConfig(
        learning_rate=1e-3,
        gradient_accumulation=micro_batches // num_ranks,
        exchange="micro_batch",  # adds gradients in the order of a single rank
        working_dtype="bf16",
        placement=Placement(),  # nothing is measured or planned
    )
    torch.manual_seed(0)
    return OffloadEngine(_Model(hidden), config, device=device)


def micro_batch(number: int) -> torch.Tensor:
    """The micro-batch of this number: fp32 [4, _WIDTH]."""
    return torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(number))


def train(folder: Path, last_step: int | None) -> tuple[str, str]:
    """Resume from the newest checkpoint in `folder`, and save one after each step until `last_step`.

    Args:
        last_step: None trains until the process is killed.

    Returns:
        The GPU's name and a hash of the weights.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", take_gpu(int(os.environ["RANK"])))
    else:
        torch.set_num_threads(1)  # the number of threads decides the order of sums
    world.join()
    rank, size = world.rank(), world.size()
    with engine_for(size, MICRO_BATCHES, _HIDDEN, device) as engine:
        step = newest_step(folder)
        if step:
            engine.load_checkpoint(folder / f"checkpoint-{step}")
        while last_step is None or step < last_step:
            for at in range(rank, MICRO_BATCHES, size):
                engine.backward(engine(micro_batch(MICRO_BATCHES * step + at).to(device)))
                engine.step()
            step += 1
            engine.save_checkpoint(folder / f"checkpoint-{step}", position=step)
            if rank == 0:
                shutil.rmtree(folder / f"checkpoint-{step - 3}", ignore_errors=True)
            send_to_parent((os.getpid(), step))
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "none"
    weights = hashlib.sha256()
    for parameter in engine.module.parameters():
        weights.update(parameter.detach().cpu().view(torch.uint8).numpy().tobytes())
    return gpu, weights.hexdigest()


def newest_step(folder: Path) -> int:
    """The step of the newest whole checkpoint; 0 without a checkpoint."""
    try:
        return int(newest_checkpoint(folder, verify=False).name.removeprefix("checkpoint-"))
    except ConfigError:
        return 0


def run(
    *,
    kills: int = 5,
    ranks: int = 4,
    seed: int = 0,
    device: str | None = None,
    out: Path = table.PATH,
    commit: str | None = None,
    say: Callable[[str], object] = print,
) -> Row:
    """Kill a random rank at a random moment `kills` times and resume each time. Then resume on `ranks`, on three and on
    one rank, and compare the weights with a training on one rank that nobody killed. Appends a row to `out`.

    Args:
        device: "cpu" hides the GPUs.

    Raises:
        ValueError: `ranks` cannot share the micro-batches of a step evenly.
        AssertionError: a process was left, ranks took too long to end, or weights differ.
    """
    if ranks < 1 or MICRO_BATCHES % ranks:
        raise ValueError(f"{ranks} ranks cannot share {MICRO_BATCHES} micro-batches a step: give a divisor of it")
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        with tempfile.TemporaryDirectory() as name, ended_by_signals():
            figures = _killed_and_compared(Path(name), kills, ranks, random.Random(seed), say)
    finally:
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
        else:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    gpu = {"gpu": figures.pop("gpu")}
    notes = "longest seconds: from a kill to the end of all processes"
    row = table.of_figures("killed ranks", f"a loop on {ranks} ranks", figures, commit or git_commit(), notes) | gpu
    table.append([row], out)
    return row


def _killed_and_compared(
    scratch: Path, kills: int, ranks: int, draw: random.Random, say: Callable[[str], object]
) -> dict[str, Any]:
    (folder := scratch / "run").mkdir()
    took: list[float] = []
    for _ in range(kills):
        began = time.monotonic()
        victim, seconds = _one_life(folder, scratch, ranks, draw)
        took.append(seconds)
        life = time.monotonic() - began
        say(f"killed rank {victim} after step {newest_step(folder)}; all ended {seconds:.2f} s later ({life:.0f} s)")
    last = newest_step(folder) + _MORE_STEPS
    sizes = sorted({1, min(3, ranks), ranks})
    copies = {size: shutil.copytree(folder, scratch / f"on-{size}") for size in sizes}
    (whole := scratch / "undisturbed").mkdir()
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:  # this process has not initialized CUDA
        expected = pool.submit(_finished, whole, scratch, 1, last)
        resumed = {size: pool.submit(_finished, copies[size], scratch, size, last) for size in sizes}
    for size in sizes:
        same = resumed[size].result() == expected.result()
        assert same, f"resumed on {size} ranks, the weights after step {last} differ from an undisturbed training"
        say(f"resumed on {size} ranks: after step {last} all weights are equal")
    return {
        "gpu": expected.result()[0],
        "kills": kills,
        "median seconds": round(median(took), 2),
        "longest seconds": round(max(took), 2),
        "steps": last,
        "resumed on ranks": sizes,
    }


def _one_life(folder: Path, scratch: Path, ranks: int, draw: random.Random) -> tuple[int, float]:
    """Start the ranks and kill one. Returns the killed rank and the seconds until all processes had ended."""
    processes: dict[int, int] = {}
    victim, moment, killed_at = draw.randrange(ranks), float("inf"), 0.0
    limit = time.monotonic() + _START_SECONDS

    def hear(rank: int, message: tuple[int, int]) -> None:
        nonlocal moment
        processes[rank] = message[0]
        if len(processes) == ranks and moment == float("inf"):
            moment = time.monotonic() + draw.uniform(0, _KILLED_WITHIN)

    def stops() -> bool:
        nonlocal killed_at
        now = time.monotonic()
        assert killed_at or now < limit, f"ranks made no step within {_START_SECONDS:.0f} s"
        assert not killed_at or now < killed_at + _END_SECONDS, f"ranks did not end within {_END_SECONDS:.0f} s"
        if now >= moment and not killed_at:
            os.kill(processes[victim], signal.SIGKILL)
            killed_at = time.monotonic()
        return False

    try:
        launch(train, {"folder": folder, "last_step": None}, ranks, folder=scratch, on_message=hear, stops=stops)
    except RankError:
        if not killed_at:
            raise
    ended_at = time.monotonic()
    left = [process for process in processes.values() if psutil.pid_exists(process)]
    assert not left, f"processes {left} are left"
    return victim, ended_at - killed_at


def _finished(folder: Path, scratch: Path, ranks: int, last_step: int) -> tuple[str, str]:
    limit = time.monotonic() + _START_SECONDS + last_step

    def stops() -> bool:
        assert time.monotonic() < limit, f"{ranks} ranks did not reach step {last_step} in time"
        return False

    return launch(train, {"folder": folder, "last_step": last_step}, ranks, folder=scratch, stops=stops)[0]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.killed_ranks", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu",), help="cpu hides the GPUs")
    parser.add_argument("--out", type=Path, default=table.PATH, help="append a row to this table")
    parser.add_argument("--commit", help="commit to write down where git is missing")
    run(**vars(parser.parse_args(arguments)), say=lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
