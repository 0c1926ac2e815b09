"""Ranks notice that another rank has failed, whatever they are doing."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from offloadkit.distributed import watch as watch_module
from offloadkit.distributed import world
from offloadkit.distributed.ranks import Group
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import RankError
from offloadkit.facts.config import OffloadConfig
from tests.distributed.pool import RankPool
from tests.distributed.runs import model
from tests.messages import check_says
from tests.models import tokens


def last_fails(steps: int) -> str:
    """The message on each rank after the last rank fails at step `steps`; on the last rank, the note on its error."""
    fails = dist.get_rank() == dist.get_world_size() - 1
    try:
        with OffloadEngine(model(), OffloadConfig(), device="cpu") as engine:
            for batch in tokens(steps):
                engine.backward(engine(batch))
                engine.step()
            if fails:
                raise ValueError("nothing left")
            assert engine.ranks is not None
            ends = time.monotonic() + 20
            while engine.ranks.lost() is None and time.monotonic() < ends:  # waits outside of any collective operation
                time.sleep(0.01)
            engine.backward(engine(tokens(1)[0]))
    except RankError as error:
        return str(error)
    except ValueError as error:
        return " ".join(getattr(error, "__notes__", ["nothing"]))
    return ""


@pytest.mark.parametrize(("steps", "noted"), [(0, "nothing"), (2, "weights of this process lack")])
def test_all_ranks_learn_which_one_has_failed(ranks: RankPool, steps: int, noted: str) -> None:
    """Also while the other ranks wait outside of the engine."""
    *others, last = ranks.run(3, last_fails, steps=steps)
    check_says(last, noted)
    assert len(others) == 2
    for found in others:
        check_says(found, "rank 2", "resume from a checkpoint")


def trains_after_an_error() -> tuple[dict[str, torch.Tensor], bool]:
    """(weights of a rank that trains inside an `except` block, whether a later error counts as a failure)."""
    made = model()
    try:
        raise ValueError("something else")
    except ValueError:
        engine = OffloadEngine(made, OffloadConfig(), device="cpu")
        engine.backward(engine(tokens(2)[dist.get_rank()]))
        engine.step()
        before = engine.ranks.is_failing
    try:
        raise ValueError("a new one, where the old one was in memory")
    except ValueError:
        is_failing = engine.ranks.is_failing and not before
    engine.close()
    return {name: parameter.detach() for name, parameter in made.named_parameters()}, is_failing


def test_an_error_that_is_handled_already_is_no_failure(ranks: RankPool) -> None:
    (first, is_failing), (second, _) = ranks.run(2, trains_after_an_error)
    assert all(torch.equal(first[name], weights) for name, weights in second.items())
    assert is_failing


def join_watches() -> None:
    for thread in [each for each in threading.enumerate() if each.name == "offloadkit-watch"]:
        thread.join(20)


def first_hangs(file: Path) -> str:
    """The error of the rank that waits in vain. The rank that hangs writes to `file`."""
    world.join(1)
    with pytest.MonkeyPatch.context() as patch, file.open("a") as output:
        patch.setattr(watch_module, "GRACE_SECONDS", 0.1)
        with OffloadEngine(model(), OffloadConfig(), device="cpu") as engine:
            if dist.get_rank() == 0:
                patch.setattr(sys, "stderr", output)
                join_watches()
                return "hung"
            try:
                engine.backward(engine(tokens(1)[0]))
            except RankError as error:
                return str(error)
    return "nothing"


def test_a_stuck_rank_is_an_error_and_shows_its_stacks(ranks: RankPool, tmp_path: Path) -> None:
    file = tmp_path / "stderr"
    hung, waited = ranks.run(2, first_hangs, file=file)
    assert hung == "hung"
    check_says(waited, "exchanging gradients", "1 seconds", "ddp_timeout")
    check_says(file.read_text(), "rank 0", "rank 1")
    assert "in first_hangs" in file.read_text()


def closes_late(file: Path) -> int:
    """A program replaces its process group before its engine is closed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    engine = OffloadEngine(model(), OffloadConfig(), device="cpu")
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    engine.close()
    return dist.get_world_size()


def test_an_engine_that_outlives_its_group_closes(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, closes_late, file=tmp_path / "store") == [2, 2]


def threads_after(engines: int) -> list[int]:
    """Number of threads of the process after each of `engines` engines."""
    found = []
    for _ in range(engines):
        OffloadEngine(model(), OffloadConfig(), device="cpu").close()
        join_watches()
        found.append(len(list(Path("/proc/self/task").iterdir())))
    return found


def test_engines_one_after_the_other_leave_no_threads(ranks: RankPool) -> None:
    for found in ranks.run(2, threads_after, engines=3):
        assert found[1] == found[2], found


class Aborting:
    """A process group of a GPU. NCCL aborts it when no operation of `waiting` keeps the GPU busy."""

    def __init__(self, waiting: Aborting | None = None) -> None:
        self.waiting, self.is_aborted = waiting, threading.Event()

    def _get_backend(self, device: torch.device) -> Aborting:
        return self

    def abort(self) -> None:
        if self.waiting is None or self.waiting.is_aborted.wait(20):
            self.is_aborted.set()


def test_the_default_group_is_aborted_while_the_engines_group_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    default = Aborting()
    own = Aborting(default)
    group = Group.__new__(Group)
    group._device, group._between_devices = torch.device("cuda"), own
    monkeypatch.setattr(dist.distributed_c10d._world, "default_pg", default)  # what dist.group.WORLD returns
    abort = threading.Thread(target=group._abort, daemon=True)
    abort.start()
    assert default.is_aborted.wait(5)
    assert own.is_aborted.wait(5)


EXITS = """
import sys, threading, time
import offloadkit.distributed.watch as watch
closes = sys.argv[1] == "close"


class Group:
    \"\"\"gloo's group of two ranks, of which the other one ends half a second later.\"\"\"

    def send(self, words, rank, tag):
        print("told", int(words[0][0]), flush=True)
        return self

    def wait(self, *timeout):
        pass


class Receiving:
    def wait(self, timeout):
        time.sleep(0.5)
        print("thread ends", flush=True)
        raise RuntimeError("connection closed")


watch.dist.irecv = lambda word, rank, group: Receiving()
watching = watch.Watch(1, 2, Group(), lambda: print("gives up"))
if closes:
    watching.leave()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "told"), [("close", "told -1"), ("leave open", "told 1")])
def test_a_process_that_exits_waits_for_its_watching_thread(how: str, told: str) -> None:
    """Otherwise the thread may return from gloo while the interpreter shuts down, which aborts the process."""
    done = subprocess.run([sys.executable, "-c", EXITS, how], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [told, "thread ends"]
