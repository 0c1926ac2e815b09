"""Ranks that are killed at random: no process hangs or stays, and the numbers are those of a run that nobody killed.

python -m benchmarks killing                                      # 20 times, then on with two, one and three ranks
python -m benchmarks killing --device cpu                         # without a GPU

Ranks share the GPUs where there are fewer of them.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
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
from offloadkit.checkpoint.folder import newest_checkpoint
from offloadkit.distributed.launch import launch, told
from offloadkit.errors import ConfigError, RankError

MICRO_BATCHES = 6
"""Of all ranks in a step."""
_WIDTH, _HIDDEN = 128, 1024
_MORE_STEPS = 3
"""That the survivors do beyond the last checkpoint."""
_END_SECONDS = 60.0
"""So long after a kill all ranks must have ended."""
_START_SECONDS = 120.0
"""So long ranks may take to their first step."""
_KILLED_WITHIN = 1.0
"""Seconds after the first step of a life in which a rank is killed."""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, _HIDDEN), nn.Linear(_HIDDEN, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.up.weight.dtype)
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class _Model(nn.Module):
    """Its kernels are deterministic: an embedding's are not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Block() for _ in range(3)])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = rows
        for block in self.blocks:
            x = block(x)
        return (x.float() - rows.flip(-1)).square().mean()


def train(folder: Path, last_step: int | None) -> dict[str, torch.Tensor]:
    """Go on from the newest checkpoint of `folder` until `last_step`, or until killed. Each step leaves a checkpoint.

    Returns:
        The weights, in RAM.
    """
    from offloadkit.config import OffloadConfig, Placement
    from offloadkit.distributed import world
    from offloadkit.engine import OffloadEngine

    if torch.cuda.is_available():
        take_gpu(int(os.environ["RANK"]))
    world.join()
    rank, size = world.rank(), world.size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # sums are cut by threads
    config = OffloadConfig(
        learning_rate=1e-3,
        gradient_accumulation=MICRO_BATCHES // size,
        exchange="micro_batch",  # the order in which one rank adds
        working_dtype="bf16",
        placement=Placement(),  # nothing is measured or planned
    )
    torch.manual_seed(0)
    model = _Model()
    with OffloadEngine(model, config, device=device) as engine:
        step = newest_step(folder)
        if step:
            engine.load_checkpoint(folder / f"checkpoint-{step}")
        while last_step is None or step < last_step:
            for at in range(rank, MICRO_BATCHES, size):
                engine.backward(engine(_rows(MICRO_BATCHES * step + at).to(device)))
                engine.step()
            step += 1
            engine.save_checkpoint(folder / f"checkpoint-{step}", position=step)
            if rank == 0:
                shutil.rmtree(folder / f"checkpoint-{step - 3}", ignore_errors=True)
            told((os.getpid(), step))
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def _rows(number: int) -> torch.Tensor:
    """A micro-batch: fp32 [4, _WIDTH]."""
    return torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(number))


def newest_step(folder: Path) -> int:
    """Of the newest whole checkpoint; 0 without one."""
    try:
        return int(newest_checkpoint(folder, verify=False).name.removeprefix("checkpoint-"))
    except ConfigError:
        return 0


def run(
    *,
    times: int = 20,
    num_ranks: int = 2,
    seconds: float = float("inf"),
    seed: int = 0,
    out: Path = table.PATH,
    commit: str | None = None,
    device: str | None = None,
) -> Row:
    """Kill a random rank of `num_ranks` at a random moment, `times` times, each time going on from the newest
    checkpoint. Then go on with `num_ranks`, with one and with three ranks, and compare with a run on one rank that
    nobody killed. Appends a row to `out` and returns it.

    Args:
        seconds: after so many nobody else is killed, and what follows begins.

    Raises:
        AssertionError: a process stayed, ranks took too long to end, or weights differ.
    """
    commit, end, draw = commit or git_commit(), time.monotonic() + seconds, random.Random(seed)
    before, hidden = table.read(out), os.environ.get("CUDA_VISIBLE_DEVICES")
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        with tempfile.TemporaryDirectory() as scratch, ended_by_signals():
            figures = _killed_and_compared(Path(scratch), times, num_ranks, end, draw, device == "cpu")
    finally:
        if device == "cpu":
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            os.environ.update({} if hidden is None else {"CUDA_VISIBLE_DEVICES": hidden})
    row: Row = {
        "case": "killed ranks",
        "engine": f"offloadkit on {num_ranks} ranks",
        "status": "measured",
        "commit": commit,
        "date": table.now(),
        "gpu": figures.pop("gpu"),
        "seconds": figures.pop("median seconds to the end of all"),
        "figures": figures,
        "notes": "seconds from the kill to the end of all ranks",
    }
    table.write([*before, row], out)
    return row


def _killed_and_compared(
    scratch: Path, times: int, num_ranks: int, end: float, draw: random.Random, on_cpu: bool
) -> dict[str, Any]:
    folder = scratch / "run"
    folder.mkdir()
    took: list[float] = []
    while len(took) < times and (not took or time.monotonic() < end):
        killed, seconds = _one_life(folder, scratch, num_ranks, draw)
        took.append(seconds)
        print(f"killed rank {killed} after step {newest_step(folder)}; all were gone {seconds:.2f} s later", flush=True)
    last = newest_step(folder) + _MORE_STEPS
    expected = _finished(scratch / "undisturbed", scratch, 1, last)
    sizes = [*dict.fromkeys((num_ranks, 1, 3))]
    for size in sizes:
        shutil.copytree(folder, again := scratch / f"on-{size}")
        found = _finished(again, scratch, size, last)
        same = all(torch.equal(found[name], weights) for name, weights in expected.items())
        assert same, f"resumed on {size} ranks the weights after step {last} are not those of a run that nobody killed"
        print(f"resumed on {size} ranks: after step {last} all weights are equal", flush=True)
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() and not on_cpu else "none",
        "median seconds to the end of all": median(took),
        "killed": len(took),
        "longest seconds": round(max(took), 2),
        "steps": last,
        "resumed on ranks": sizes,
    }


def _one_life(folder: Path, scratch: Path, num_ranks: int, draw: random.Random) -> tuple[int, float]:
    """Start ranks, kill one; which one, and the seconds until all were gone."""
    processes: dict[int, int] = {}
    victim, moment, at = draw.randrange(num_ranks), float("inf"), 0.0
    limit = time.monotonic() + _START_SECONDS

    def hear(rank: int, message: tuple[int, int]) -> None:
        nonlocal moment
        processes[rank] = message[0]
        if len(processes) == num_ranks and moment == float("inf"):
            moment = time.monotonic() + draw.uniform(0, _KILLED_WITHIN)

    def stops() -> bool:
        nonlocal at
        now = time.monotonic()
        assert at or now < limit, f"ranks made no step within {_START_SECONDS:.0f} s"
        assert not at or now < at + _END_SECONDS, f"ranks did not end within {_END_SECONDS:.0f} s of a kill"
        if now >= moment and not at:
            os.kill(processes[victim], signal.SIGKILL)
            at = time.monotonic()
        return False

    try:
        launch(train, {"folder": folder, "last_step": None}, num_ranks, folder=scratch, hear=hear, stops=stops)
    except RankError:
        if not at:
            raise
    gone = time.monotonic()
    left = [process for process in processes.values() if psutil.pid_exists(process)]
    assert not left, f"processes {left} are left"
    return victim, gone - at


def _finished(folder: Path, scratch: Path, num_ranks: int, last_step: int) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    limit = time.monotonic() + _START_SECONDS + last_step

    def stops() -> bool:
        assert time.monotonic() < limit, f"{num_ranks} ranks did not come to step {last_step} in time"
        return False

    return launch(train, {"folder": folder, "last_step": last_step}, num_ranks, folder=scratch, stops=stops)[0]
