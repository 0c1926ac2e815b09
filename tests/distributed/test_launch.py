"""Ranks in fresh processes: arguments, results, and how all ranks end when one fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from offloadkit.checkpoint.folder import newest_checkpoint
from offloadkit.distributed.launch import launch, send_to_parent
from offloadkit.distributed.ranks import Group
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ConfigError, RankError, TrainingStoppedError
from offloadkit.facts.config import OffloadConfig
from tests.distributed.pool import RankPool
from tests.distributed.runs import model
from tests.models import tokens

CELL = """
import os, sys, threading

FACTOR = 3

class Times:
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def __call__(self, number):
        return self.factor * number

times = Times(FACTOR)

def work(tensor, times):
    import torch.distributed as dist
    from offloadkit.distributed.launch import send_to_parent

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print("printed by", rank)
    dist.all_reduce(tensor)
    try:
        send_to_parent((rank, os.getpid()))  # the other may have sent before, and the request to stop comes at once
        if rank == 0:
            threading.Event().wait(50)
    except KeyboardInterrupt:
        print("asked to stop", file=sys.stderr)
    return rank, times(FACTOR), tensor
"""
"""A function as a notebook cell defines it, in a `__main__` that the ranks do not have."""


def are_gone(processes: list[int]) -> bool:
    return not any(psutil.pid_exists(each) for each in processes)


@pytest.mark.slow
def test_a_cells_function_runs_on_all_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(CELL, cell)
    heard: dict[int, tuple[int, int]] = {}
    found = launch(
        cell["work"],
        {"tensor": torch.tensor([1.5]), "times": cell["times"]},
        2,
        folder=tmp_path,
        on_message=heard.__setitem__,
        stops=lambda: len(heard) == 2,
    )
    assert found == [(0, 9, torch.tensor([3.0])), (1, 9, torch.tensor([3.0]))]
    assert [heard[rank][0] for rank in (0, 1)] == [0, 1]
    assert capsys.readouterr() == ("printed by 0\n", "asked to stop\n")
    assert are_gone([process for _, process in heard.values()])
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metric cannot be sent to the processes .*cannot pickle 'generator' object"):
        launch(train, {"folder": tmp_path, "metric": (each for each in "ab")}, 2, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def train(folder: Path, num_steps: int, dies: tuple[int, Callable[[], Any]] | None = None) -> dict[str, torch.Tensor]:
    """Train to `num_steps`, resuming from the newest checkpoint, and return the weights.

    A step has six micro-batches over all ranks and saves a checkpoint.

    Args:
        dies: (number of the collective operation, function that the last rank calls in its place).
    """
    if "RANK" in os.environ and not dist.is_initialized():
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    send_to_parent(os.getpid())
    options: dict[str, Any] = {"exchange": "micro_batch", "gradient_accumulation": 6 // size}
    config = OffloadConfig(learning_rate=1e-2, working_dtype="bf16", **options)
    made = model(rank, hidden=1100)
    with pytest.MonkeyPatch.context() as patch, OffloadEngine(made, config, device="cpu") as engine:
        if dies is not None and rank == size - 1:
            number, act = dies
            left = list(range(number))
            for name in ("exchange", "gather", "agree", "sum"):
                patch.setattr(Group, name, dying(getattr(Group, name), left, act))
        checkpoint = newest_checkpoint(folder) if any(folder.glob("checkpoint-*")) else None
        done = 0 if checkpoint is None else engine.load_checkpoint(checkpoint)
        batches = tokens(6 * num_steps)
        for step in range(done, num_steps):
            for at in range(6 * step + rank, 6 * step + 6, size):
                engine.backward(engine(batches[at]))
                engine.step()
            engine.save_checkpoint(folder / f"checkpoint-{step + 1}", position=step + 1)
    return {name: parameter.detach().clone() for name, parameter in made.named_parameters()}


def dying(operation: Callable[..., Any], left: list[int], act: Callable[[], Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        if not left:
            act()
        del left[-1:]
        return operation(*args)

    return run


def fail() -> None:
    raise ValueError("nothing left")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def meet(ends: Callable[[], Any]) -> None:
    """The last rank ends while the other ranks wait for it."""
    dist.init_process_group("gloo")
    send_to_parent(os.getpid())
    dist.barrier()  # all ranks have sent their process ids
    if dist.get_rank() == dist.get_world_size() - 1:
        ends()
    dist.barrier()


@pytest.mark.slow
def test_the_first_error_ends_all_ranks(tmp_path: Path) -> None:
    processes: list[int] = []
    with pytest.raises(ValueError, match="nothing left") as caught:
        launch(meet, {"ends": fail}, 2, folder=tmp_path, on_message=lambda rank, process: processes.append(process))
    assert "It was raised on rank 1 of 2" in caught.value.__notes__[0]
    assert "in fail" in caught.value.__notes__[0]
    assert len(processes) == 2
    assert are_gone(processes)


@pytest.mark.slow(20)
def test_killed_ranks_lose_nothing_that_was_saved(ranks: RankPool, one_thread: None, tmp_path: Path) -> None:
    """Ranks are killed and resumed on other numbers of ranks: the weights equal an undisturbed run."""
    num_steps = 5
    arguments = {"folder": tmp_path, "num_steps": num_steps, "dies": (30, kill)}
    with pytest.raises(RankError, match=r"rank 1 of 2 has ended: it was killed by SIGKILL"):
        launch(train, arguments, 2, folder=tmp_path)
    assert all(path.name.startswith("checkpoint-") for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert any(tmp_path.glob("checkpoint-*"))
    (other := tmp_path / "other").mkdir()
    expected = train(other, num_steps)
    shutil.copytree(tmp_path, three := tmp_path.with_name("three"))
    for found in (*ranks.run(3, train, folder=three, num_steps=num_steps), train(tmp_path, num_steps)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weights) for name, weights in expected.items())


def wait_for_the_end() -> None:
    send_to_parent(os.getpid())
    threading.Event().wait()


@pytest.mark.slow
def test_a_signal_before_the_ranks_train_ends_them_and_is_named(tmp_path: Path) -> None:
    processes: list[int] = []

    def hear(rank: int, process: int) -> None:
        processes.append(process)
        if len(processes) == 2:
            os.kill(os.getpid(), signal.SIGHUP)

    with pytest.raises(TrainingStoppedError, match="SIGHUP has ended training") as caught:
        launch(wait_for_the_end, {}, 2, folder=tmp_path, on_message=hear)
    assert caught.value.signal == signal.SIGHUP
    assert are_gone(processes)


PROGRAM = """
import os, signal, sys, threading
from pathlib import Path
from offloadkit.distributed.launch import launch, send_to_parent

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it

def hang():
    send_to_parent(os.getpid())
    threading.Event().wait()

launch(hang, {}, 2, folder=Path(sys.argv[1]), on_message=lambda rank, process: print(process, flush=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_the_program_that_started_them(tmp_path: Path, number: signal.Signals) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert program.stdout is not None
    try:
        processes = [int(program.stdout.readline()) for _ in range(2)]
        program.send_signal(number)
        program.wait(30)
        psutil.wait_procs([psutil.Process(each) for each in processes if psutil.pid_exists(each)], timeout=30)
        assert are_gone(processes)
    finally:
        program.kill()
        program.wait()
        program.stdout.close()
    assert not list(tmp_path.glob(".ranks-*"))
