"""Steps of two commits in alternating turns on one machine, and optionally their saves and resumes.

    git worktree add /tmp/old COMMIT && (cd /tmp/old && python setup.py build_ext --inplace)
    python -m benchmarks.turns w1 /tmp/old .              # seven turns; a minute and a half on an H100
    python -m benchmarks.turns t5-3b-2x24 /tmp/old .      # a case of `rank_cases`, on its number of GPUs
    python -m benchmarks.turns w1 /tmp/old . --saves 3    # a save into an empty folder and a resume for each turn

Both commits train in processes of their own, which wait for their turns with their models in memory, so a host's speed
is the same for both. VRAM of both must fit on the GPU. Printed: seconds a step, the median of the ratios NEW / OLD with
its bootstrap interval of 90 %, CPU seconds of the main thread, and kernel launches of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

SETTLING_STEPS = 6
CONTEXT_BYTES = 700 << 20
"""CUDA context of a process, given to both engines: VRAM of the other process would count as context."""
DRAWS = 4000


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("case", help="a case of `cases` or `rank_cases`")
    parser.add_argument("old", type=Path, help="checkout with its kernels built")
    parser.add_argument("new", type=Path)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--saves", type=int, default=0, help="turns of save and resume, instead of steps")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for all")
    options = parser.parse_args(arguments)
    from benchmarks.rank_cases import RANK_CASES

    num_ranks = RANK_CASES[options.case].num_gpus if options.case in RANK_CASES else 1
    until = time.monotonic() + options.timeout
    with contextlib.ExitStack() as stack:
        both: list[Commit] = []
        for tree in (options.old, options.new):
            commit = Commit(tree.resolve(), options.case, num_ranks, until)
            stack.callback(commit.end)
            print(tree, commit.answer("ready"), flush=True)
            both.append(commit)
        if options.saves:
            compare_saves(both, options.saves)
        else:
            compare_steps(both, options.turns)


def compare_steps(both: Sequence[Commit], turns: int) -> None:
    slowest = max(each.ask("steps", 3)["seconds"] for each in both)
    number = max(3, min(30, round(1.5 / slowest)))
    found: list[list[dict[str, float]]] = []
    for turn in range(turns):
        order = both if turn % 2 == 0 else both[::-1]
        by_commit = {id(each): each.ask("steps", number) for each in order}
        found.append([by_commit[id(each)] for each in both])
    ratios = [new["seconds"] / old["seconds"] for old, new in found]
    low, high = interval(ratios)
    for at, name in enumerate(("old", "new")):
        seconds, of_thread = (median(turn[at][key] for turn in found) for key in ("seconds", "thread_seconds"))
        launches = both[at].ask("launches")
        print(f"{name}: {seconds:.4f} s a step, main thread {1000 * of_thread:.0f} ms, launches {launches}")
    print(f"new / old: {median(ratios):.3f} ({low:.3f} to {high:.3f}), {turns} turns of {number} steps", flush=True)


def compare_saves(both: Sequence[Commit], turns: int) -> None:
    for turn in range(turns):
        for each in both if turn % 2 == 0 else both[::-1]:
            print(each.tree, f"disk {each.disk_rate():.2f} GB/s", flush=True)
            for what in ("save", "load"):
                print(f"  {what}: {each.ask(what)}", flush=True)
            each.ask("clean")


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The 90 % interval of the ratios' median, by resampling them."""
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return medians[DRAWS // 20], medians[-DRAWS // 20]


class Commit:
    """The ranks of one commit. Commands and answers are files of a folder, numbered in order."""

    def __init__(self, tree: Path, case: str, num_ranks: int, until: float) -> None:
        self.tree, self._until, self._number = tree, until, 0
        self._folder = Path(tempfile.mkdtemp())
        command = [sys.executable]
        if num_ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        threads = {"OMP_NUM_THREADS": str((os.cpu_count() or 1) // num_ranks)} if num_ranks > 1 else {}
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))}
        own = paths | threads | {"XDG_CACHE_HOME": str(self._folder)}  # each commit measures its own rates
        with (self._folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                [*command, __file__, "--train", case, str(self._folder)],
                cwd=tree,
                env=os.environ | own,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ask(self, what: str, number: int = 0) -> dict[str, Any]:
        write(self._folder / f"command{self._number}", [what, number])
        self._number += 1
        return self.answer(f"answer{self._number - 1}")

    def answer(self, name: str) -> dict[str, Any]:
        while not (self._folder / name).exists():
            if self._process.poll() is not None or time.monotonic() > self._until:
                raise SystemExit(f"{self.tree} ended or took too long:\n{(self._folder / 'log').read_text()[-3000:]}")
            time.sleep(0.005)
        found: dict[str, Any] = json.loads((self._folder / name).read_text())
        return found

    def disk_rate(self) -> float:
        """GB/s of writing 1 GiB where the checkpoint goes."""
        path, block = self._folder / "probe", bytes(16 << 20)
        began = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(64):
                file.write(block)
            os.fsync(file.fileno())
        rate = 64 * len(block) / (time.perf_counter() - began) / 1e9
        path.unlink()
        return rate

    def end(self) -> None:
        write(self._folder / f"command{self._number}", ["end", 0])  # torchrun's ranks outlive it, if it is killed
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def write(path: Path, value: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(path)


# ---- in a rank of one commit, whose checkout is the current folder ---------------------------------------------------


def train(case_name: str, folder: Path) -> None:
    """Build the case's engine and obey commands until the last one."""
    import torch

    from benchmarks.cases import CASES, ENGINES, config_of
    from benchmarks.rank_cases import RANK_CASES
    from offloadkit.distributed import world

    ours, works, hardware = (_module(name) for name in ("doors.engines.ours", "doors.engines.work", "facts.hardware"))
    try:
        steps_of = import_module("benchmarks.ragged").steps_of
    except ImportError:  # an older commit
        steps_of = works.random_steps
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    hardware._MAX_CONTEXT_BYTES = CONTEXT_BYTES
    case: Any = RANK_CASES[case_name] if size > 1 else CASES[case_name]
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    model_folder = folder / f"model{rank}"
    config_of(case.model).save_pretrained(model_folder)
    if size > 1:
        world.join()
    torch.manual_seed(0)
    work = case.work(ENGINES["offloadkit"], str(model_folder), str(folder))
    engine = ours.Offloadkit(work, work.dtype_on(device), device)
    engine.settle()
    batches = steps_of(work, device)[0]
    losses: list[torch.Tensor] = []

    def step() -> None:
        for at, batch in enumerate(batches, start=1):
            loss = engine.forward(batch)
            engine.backward(loss)
            losses.append(loss.detach())
            engine.step(at == len(batches))

    def answer(name: str, value: Any) -> None:
        if rank == 0:
            write(folder / name, value)

    for _ in range(SETTLING_STEPS):
        step()
    engine.settle()
    planned = engine._model.plan.seconds
    answer("ready", {"planned": planned and planned.step, "losses": [float(each) for each in losses]})
    number = 0
    while True:
        command = folder / f"command{number}"
        while not command.exists():
            time.sleep(0.002)
        what, times = json.loads(command.read_text())
        if what == "end":
            os._exit(0)  # threads and process groups may hang an orderly exit
        answer(f"answer{number}", _obey(what, times, engine, step, folder / "checkpoint", on_gpu))
        number += 1


def _module(name: str) -> Any:
    """A module of offloadkit, which commits before part 11 of the project have a folder higher."""
    path = Path("offloadkit", *name.split(".")).with_suffix(".py")
    return import_module(f"offloadkit.{name if path.exists() else name.partition('.')[2]}")


def _obey(what: str, times: int, engine: Any, step: Callable[[], None], where: Path, on_gpu: bool) -> dict[str, Any]:
    import torch

    def wait() -> None:
        if on_gpu:
            torch.cuda.current_stream().synchronize()

    if what == "steps":
        step()
        wait()
        of_thread, began = time.thread_time(), time.perf_counter()
        for _ in range(times):
            step()
        of_thread = time.thread_time() - of_thread  # before a wait, which spins and would count as Python's time
        wait()
        seconds = {"seconds": time.perf_counter() - began, "thread_seconds": of_thread}
        engine.settle()
        return {name: number / times for name, number in seconds.items()}
    engine.settle()
    if what == "launches":
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiled:
            step()
            engine.settle()
        return {each.key: each.count for each in profiled.key_averages() if "Launch" in each.key}
    if what == "clean":
        shutil.rmtree(where)
        return {}
    with _peak_ram() as peak:
        began = time.perf_counter()
        (engine._model.save_checkpoint if what == "save" else engine._model.load_checkpoint)(where)
        seconds = time.perf_counter() - began
    num_bytes = sum(file.stat().st_size for file in where.rglob("*") if file.is_file())
    return {"seconds": round(seconds, 3), "GB": round(num_bytes / 1e9, 3), "extra_ram_gib": round(peak[0] / 2**30, 3)}


@contextlib.contextmanager
def _peak_ram() -> Any:
    """Yields a list whose only item becomes the largest growth of this process's RAM in bytes."""
    import psutil

    process, ended = psutil.Process(), threading.Event()
    before, peak = process.memory_info().rss, [0]

    def watch() -> None:
        while not ended.wait(0.05):
            peak[0] = max(peak[0], process.memory_info().rss - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
