"""Trainings killed or stopped at random: the newest checkpoint exists, and the end is bit for bit the same.

    python -m benchmarks.kills                                   # 300 kills over all doors and 20 pairs; needs no GPU
    python -m benchmarks.kills --doors loop finetune --kills 40 --pairs 0 --seed 7

A training is started and ended by SIGKILL, SIGTERM, SIGINT or SIGHUP at a random moment (a time, or the n-th step,
evaluation step or change of a file). It is resumed from its folder until it completes. Then its last checkpoint, its
model and its evaluations are compared with an undisturbed run.

- After each kill it resumes from the newest reported checkpoint or a later one.
- After a signal other than SIGKILL no completed update is lost, and the message names the checkpoint.
- No process is left, and no file that an undisturbed run does not leave.

Most trainings are forked from this process, which has imported all libraries (`kill_doors.py`), because imports take
seconds. `fresh` starts the command line as a user does, and `launched` starts it with two ranks; both may be killed
while they import. In a pair, a second training in the folder of the first must be refused by name.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import load_file

from benchmarks import kill_doors, table
from benchmarks.kill_doors import NUM_STEPS, SAVE_STEPS, Work
from benchmarks.killed_ranks import newest_step
from benchmarks.run import ROOT, ended_by_signals, git_commit
from benchmarks.table import Row
from offloadkit.checkpoint.folder import check_readable

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SHARES = {
    "loop": 50, "trainer": 60, "finetune": 60, "cli": 50, "loop on 2 ranks": 30, "trainer on 2 ranks": 30, "fresh": 12,
    "launched": 8,
}  # fmt: skip
"""Number of kills by door; the sum is the default number of kills."""
_MOST_SECONDS = 300.0
"""Time limit of a life."""
_END_SECONDS = 60.0
"""Time from a kill until all processes of a training must have ended."""
LOOP_ON_RANKS, TRAINER_ON_RANKS = "loop on 2 ranks", "trainer on 2 ranks"
PAIRS = (
    *(
        (first, second)
        for second in ("finetune", "trainer", "cli")
        for first in ("finetune", "trainer", "cli", TRAINER_ON_RANKS)
    ),
    *((first, second) for second in ("loop", "trainer") for first in ("loop", LOOP_ON_RANKS)),
    ("trainer", "loop"),
    (TRAINER_ON_RANKS, "loop"),
)
"""The doors of two trainings in one folder."""
_FRESH = ("fresh", "launched")
_SET_SUBREAPER = 36
_MESSAGES = (
    re.compile(r"(\d+) of \d+ steps were done; the newest checkpoint is \S*(checkpoint[-\d]*)"),
    re.compile(r"stopped after step (\d+) of \d+: .* goes on from (checkpoint-\d+)"),
)


@dataclass
class Kill:
    """When and how to end a training.

    Attributes:
        after: seconds after its start; or None.
        at: number of an event (`Work.acts`); or None.
        to_all: whether all its processes get the signal, or only one.
    """

    number: signal.Signals
    after: float | None = None
    at: int | None = None
    to_all: bool = True
    victim: int = 0


@dataclass
class Life:
    """The record of one start of a training.

    Attributes:
        statuses: exit statuses of its processes.
        began, step, saved: the step it resumed from, its last completed step, its last saved step; -1: none.
        hit: whether the signal came before its end, and `where`.
        num_events: see `Work.acts`.
    """

    statuses: list[int] = field(default_factory=list)
    began: int = -1
    step: int = -1
    saved: int = -1
    hit: bool = False
    where: str = ""
    num_events: int = 0
    seconds: float = 0.0
    after_kill: float = 0.0
    text: str = ""

    def on_message(self, line: str) -> None:
        what, _, number = line.partition(" ")
        if what == "hit":
            self.hit, self.where = True, number
        else:
            setattr(self, "num_events" if what == "events" else what, int(number))


class _Process:
    """A forked or fresh process and its reports."""

    def __init__(self, process: int, reports: int | None, log: Path) -> None:
        self.process, self.reports, self.log = process, reports, log
        self.status: int | None = None
        self.rest = b""

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.status is None:
            done, status = os.waitpid(self.process, os.WNOHANG)
            if done:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def read(self) -> list[str]:
        """New lines of its reports."""
        if self.reports is None:
            return []
        data = b""
        while select.select([self.reports], [], [], 0)[0]:
            more = os.read(self.reports, 2**16)
            data += more
            if not more:
                os.close(self.reports)
                self.reports = None
                break
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [line.decode() for line in lines]

    def kill(self, number: int) -> None:
        if not self.poll():
            os.kill(self.process, number)


def _forked(
    train: Callable[[Work], None], work: Work, kill: Kill | None, log: Path, environ: dict[str, str]
) -> _Process:
    """Train in a forked process that ends like a script would."""
    reading, writing = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a signal must not interrupt code outside of the `try`
    process = os.fork()
    if process:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(writing)
        return _Process(process, reading, log)

    def report(text: str) -> None:
        os.write(writing, f"{text}\n".encode())

    status, (acts, count) = 1, _count_events(work.folder, report, kill)
    try:
        os.setsid()
        os.close(reading)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(out, stream)
        os.environ |= environ
        tempfile.tempdir = environ["TMPDIR"]
        torch.set_num_threads(1)
        random.seed(0)  # a fork seeds it
        np.random.seed(0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        train(replace(work, report=report, acts=acts))
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        traceback.print_exc()
        status = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            report(f"events {count()}")
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _count_events(
    folder: Path, report: Callable[[str], None], kill: Kill | None
) -> tuple[Callable[[str], None], Callable[[], int]]:
    """Return a function that counts events and sends the signal at `kill.at`, and one that returns the count.

    Renames, removals, syncs and openings of files in `folder` count too.
    """
    count, within = 0, str(folder)

    def acts(where: str) -> None:
        nonlocal count
        count += 1
        if kill is not None and kill.at == count:
            report(f"hit {where}")
            os.kill(os.getpid(), kill.number)

    def heard(event: str, given: tuple[Any, ...]) -> None:
        changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
        if (changes or (event == "open" and given[1] not in (None, "r", "rb"))) and str(given[0]).startswith(within):
            acts("at files")

    sys.addaudithook(heard)
    sync = os.fsync

    def synced(descriptor: Any) -> None:
        acts("at files")
        sync(descriptor)

    os.fsync = synced
    return acts, lambda: count


def _fresh(work: Work, log: Path, environ: dict[str, str], num_ranks: int) -> _Process:
    """The command line in a fresh process."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "offloadkit", *kill_doors.command(work, num_ranks)], stdin=subprocess.DEVNULL,
            stdout=out, stderr=out, env={**os.environ, **environ, "CUDA_VISIBLE_DEVICES": ""}, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
    process.returncode = 0  # `_Process` waits for the pid itself
    return _Process(process.pid, None, log)


def _start(door: str, work: Work, kill: Kill | None, scratch: Path, num_ranks: int | None = None) -> list[_Process]:
    """The processes of a training: one for each rank, or one launcher."""
    name, _, ranks = door.partition(" on ")
    size = num_ranks or (int(ranks.split()[0]) if ranks else 1)
    (scratch / "tmp").mkdir(exist_ok=True)
    environ = {"TMPDIR": str(scratch / "tmp"), "OMP_NUM_THREADS": "1"}
    log = scratch / "log"
    log.unlink(missing_ok=True)
    if door in _FRESH:
        return [_fresh(work, log, environ, 2 if door == "launched" else 1)]
    if size == 1:
        return [_forked(kill_doors.DOORS[name], work, kill, log, environ)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    made = []
    for rank in range(size):
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        its = kill if kill is not None and kill.at is not None and kill.victim % size == rank else None
        made.append(_forked(kill_doors.DOORS[name], work, its, log, environ | of_rank))
    return made


def live(door: str, work: Work, kill: Kill | None, scratch: Path, num_ranks: int | None = None) -> Life:
    """Start a training, end it as `kill` says, and wait for all its processes.

    Raises:
        AssertionError: it took too long, or a process was left.
    """
    logged, processes = len(_steps(work.folder)), _start(door, work, kill, scratch, num_ranks)
    try:
        life = _see_through(door, processes, kill)
    finally:
        _end_all()
    life.text = _tail(processes)
    if door in _FRESH:
        _read_fresh(life, work.folder, logged)
    return life


def _see_through(door: str, processes: Sequence[_Process], kill: Kill | None) -> Life:
    began, life, killed_at = time.monotonic(), Life(), 0.0
    while True:
        ended = [each.poll() for each in processes]
        for each in processes:
            for line in each.read():
                life.on_message(line)
        now = time.monotonic()
        if all(ended):
            break
        if any(ended) and life.began < 0 and now > killed_at + 1 > 1:  # without a launcher, ranks wait for it
            for each in processes:
                each.kill(signal.SIGKILL)
        if life.hit and not killed_at:
            killed_at = now
        if kill is not None and kill.after is not None and not life.hit and now >= began + kill.after:
            killed_at, life.hit = now, True
            _send(door, processes, kill)
        assert now < began + _MOST_SECONDS, f"{door}: it has not ended after {_MOST_SECONDS:.0f} s\n{_tail(processes)}"
        late = killed_at and now > killed_at + _END_SECONDS
        assert not late, f"{door}: it has not ended {_END_SECONDS:.0f} s after {kill}\n{_tail(processes)}"
        time.sleep(0.002)
    while left := _left():
        late = time.monotonic() > (killed_at or now) + _END_SECONDS
        assert not late, f"{door}: {left} are left after {kill}"
        time.sleep(0.01)
    life.seconds, life.statuses = now - began, [each.status or 0 for each in processes]
    life.after_kill = time.monotonic() - killed_at if killed_at else 0.0
    return life


def _end_all() -> None:
    """Kill remaining processes after an error."""
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            each.kill()


def _send(door: str, processes: Sequence[_Process], kill: Kill) -> None:
    if door == "launched" and not kill.to_all:  # one rank, if ranks exist yet
        ranks = [each for each in psutil.Process(processes[0].process).children() if "_serve" in str(each.cmdline())]
        for each in ranks[kill.victim : kill.victim + 1]:
            each.send_signal(kill.number)
        if ranks:
            return
    for each in processes if kill.to_all else [processes[kill.victim % len(processes)]]:
        each.kill(kill.number)


def _tail(processes: Sequence[_Process]) -> str:
    return processes[0].log.read_text(errors="replace") if processes[0].log.exists() else ""


def _left() -> list[str]:
    """Processes left by a training. Orphans become children of this process."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return [str(each) for each in psutil.Process().children(recursive=True)]


def _steps(folder: Path) -> list[str]:
    """The lines of the training's log of steps."""
    log = folder / "steps.jsonl"
    return log.read_text().splitlines() if log.exists() else []


def _read_fresh(life: Life, folder: Path, logged: int) -> None:
    """Fill in the record of a process without reports from its output and files."""
    went_on = re.search(r"going on from \S*checkpoint-(\d+)", life.text)
    life.began = int(went_on[1]) if went_on else -1
    with suppress(IndexError, ValueError):  # a line may be cut
        life.step = json.loads(_steps(folder)[logged:][-1])["step"]
    life.saved = newest_step(folder) or -1


# -- whole trainings


@dataclass
class Outcome:
    """Tensors of the last checkpoint and the model, random states, and evaluations."""

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]


def _outcome(folder: Path) -> Outcome:
    last = folder / f"checkpoint-{NUM_STEPS}"
    last = last if last.exists() else folder / "checkpoint"
    check_readable(last)
    files = [*last.glob("*.safetensors"), *(folder / "model").glob("*.safetensors")]
    tensors = {
        f"{path.parent.name}/{path.name}/{name}": each for path in files for name, each in load_file(path).items()
    }
    if json.loads((last / "run.json").read_text()).get("evaluation_is_due"):  # it was stopped before the last one
        return Outcome(tensors, {})
    values: dict[str, Any] = {path.name: json.loads(path.read_text()) for path in last.glob("random*.json")}
    for states in values.values():
        del states["origin"]  # differs between runs
    if (last / "trainer_state.json").exists():
        logs = json.loads((last / "trainer_state.json").read_text())["log_history"]
        values["evaluations"] = {log["step"]: log["eval_loss"] for log in logs if "eval_loss" in log}
    return Outcome(tensors, values)


def _check_same(found: Outcome, expected: Outcome, what: str) -> None:
    assert found.tensors.keys() == expected.tensors.keys(), f"{what}: other tensors"
    differing = [name for name, value in expected.tensors.items() if not torch.equal(value, found.tensors[name])]
    assert not differing, f"{what}: {len(differing)} of {len(expected.tensors)} tensors differ, such as {differing[0]}"
    for name, other in found.values.items():
        value = expected.values.get(name)
        assert other == value, f"{what}: {name} differ: {other!r:.400} and {value!r:.400}"


def _names(folder: Path) -> set[str]:
    """Names in an output folder, without checkpoints."""
    return {path.name for path in folder.iterdir() if not path.name.startswith("checkpoint-")}


class Trainings:
    """Kills trainings of one door.

    Attributes:
        counts: counts by event.
        longest: seconds from a kill until all processes had ended.
    """

    def __init__(self, door: str, scratch: Path, inputs: Path, draw: random.Random) -> None:
        self.door, self.scratch, self._inputs, self._draw = door, scratch, inputs, draw
        self.counts, self.longest = Counter[str](), 0.0
        self._whole: dict[bool, tuple[Outcome, Life, set[str]]] = {}
        scratch.mkdir()

    def work(self, name: str, by_epoch: bool) -> Work:
        """Settings of a new training."""
        folder = self.scratch / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return Work(folder, self._inputs, by_epoch, draws=self.door != LOOP_ON_RANKS)

    def undisturbed(self, by_epoch: bool) -> tuple[Outcome, Life, set[str]]:
        """The outcome and record of an undisturbed run, and the names in its folder."""
        if by_epoch not in self._whole:
            work = self.work("undisturbed", by_epoch)
            life = live(self.door, work, None, self.scratch)
            assert set(life.statuses) == {0}, f"{self.door}: an undisturbed run failed\n{life.text}"
            names = _names(work.folder)
            if self.door == LOOP_ON_RANKS:  # any number of ranks must end like one rank
                work = self.work("undisturbed", by_epoch)
                assert live("loop", work, None, self.scratch).statuses == [0]
            self._whole[by_epoch] = self.outcome(work), life, names
        return self._whole[by_epoch]

    def outcome(self, work: Work) -> Outcome:
        if self.door == LOOP_ON_RANKS:
            assert live("rewritten", work, None, self.scratch).statuses == [0], "its last checkpoint cannot be read"
        return _outcome(work.folder)

    def one(self, most: int) -> int:
        """Kill one training at most `most` times and compare its outcome; returns the number of kills.

        Raises:
            AssertionError: a result is lost, differs, or a process or file is left.
        """
        by_epoch = self._draw.random() < 0.4
        expected, whole, names = self.undisturbed(by_epoch)
        work = self.work("killed", by_epoch)
        saved, kills, done = 0, 0, list[str]()
        while True:
            kill = self._drawn(whole, saved) if kills < most and self._draw.random() < 0.8 else None
            others = self._draw.choice([1, 2, 3]) if self.door == LOOP_ON_RANKS and kill is None else None
            life = live(self.door, work, kill, self.scratch, others)
            done.append(f"{kill}: from {life.began} to {life.step}, saved {life.saved}, {life.statuses}")
            what = f"{self.door}{', by epoch' if by_epoch else ''}: {'; '.join(done)}\n{life.text}\n"
            assert life.began < 0 or life.began >= saved, f"{what}: it goes on from another one than {saved}"
            saved = self._saved_after(life, kill, saved, what)
            if kill is not None and life.hit:
                kills += 1
                self.counts[kill.number.name] += 1
                has_begun = life.began >= 0 or life.step >= 0
                self.counts[life.where or ("in training" if has_begun else "while importing or loading")] += 1
                self.longest = max(self.longest, life.after_kill)
            if set(life.statuses) == {0}:
                break
            assert life.hit, f"{what}: it has failed"
        _check_same(self.outcome(work), expected, what)
        found = _names(work.folder)
        assert found == names, f"{what}: it leaves {found}, and an undisturbed run {names}"
        self.counts["trainings"] += 1
        return kills

    def _drawn(self, whole: Life, saved: int) -> Kill:
        left = 1.1 - 0.8 * saved / NUM_STEPS
        kill = Kill(self._draw.choice(SIGNALS), to_all=self._draw.random() < 0.3, victim=self._draw.randrange(2))
        if self._draw.random() < 0.5 or not whole.num_events:
            return replace(kill, after=self._draw.uniform(0, whole.seconds * left))
        return replace(kill, at=self._draw.randint(1, max(1, int(whole.num_events * left))))

    def _saved_after(self, life: Life, kill: Kill | None, saved: int, what: str) -> int:
        """The earliest step that the next life may resume from."""
        saved = max(saved, life.saved, life.began)
        if kill is None or not life.hit or kill.number == signal.SIGKILL:
            return saved
        said = next(filter(None, (message.search(life.text) for message in _MESSAGES)), None)
        if said is not None:
            self.counts["with a message"] += 1
            assert int(said[1]) >= life.step, f"{what}: the message names step {said[1]}, and {life.step} was done"
            assert said[2] in ("checkpoint", f"checkpoint-{said[1]}"), f"{what}: the message names {said[2]}"
            saved = max(saved, int(said[1]))
        assert life.step <= saved, f"{what}: step {life.step} was done, and {saved} was saved"
        if self.door in ("cli", *_FRESH) and kill.to_all and set(life.statuses) != {0}:
            allowed = [128 + kill.number, *([] if said else [-kill.number])]
            assert life.statuses[0] in allowed, f"{what}: its status is not among {allowed}"
        return saved


# -- two trainings in one folder


def pair(of: Trainings, second: str, draw: random.Random) -> None:
    """Start a second training in the folder of a training that is at a random step.

    Raises:
        AssertionError: the second was not refused by name, or the first ended differently than alone.
    """
    loops = "loop" in of.door + second
    by_epoch = draw.random() < 0.4 and (not loops or (of.door, second) == ("loop", "loop"))
    expected, _, names = of.undisturbed(by_epoch)
    first = of.work("pair", by_epoch)
    (scratch := of.scratch / "second").mkdir(exist_ok=True)
    at, life = draw.randrange(SAVE_STEPS + 1 if loops else 1, NUM_STEPS // 2), Life()  # a loop claims what it saves
    processes = _start(of.door, replace(first, pause=0.1), None, of.scratch)
    resumes = draw.random() < 0.5 and (second != "loop" or "loop" in of.door)  # a loop cannot read a Trainer's
    other = replace(first, resumes=resumes, overwrites=not resumes and draw.random() < 0.5)
    began = time.monotonic()
    try:
        while life.step < at:
            assert not any(each.poll() for each in processes), f"{of.door}: the first one ended\n{_tail(processes)}"
            for line in processes[0].read():
                life.on_message(line)
            time.sleep(0.01)
        (refused,) = _start(second, other, None, scratch)
        running = [refused, *processes]
        while running:
            assert time.monotonic() < began + _MOST_SECONDS, f"{of.door}, {second}: one has not ended"
            for each in running:
                each.read()
            running = [each for each in running if not each.poll()]
            time.sleep(0.01)
    finally:
        _end_all()
    what = f"{second} in the folder of {of.door}, {other.resumes=}, {other.overwrites=}, from its step {at}"
    said = _tail([refused])
    named = f"in use by process {processes[0].process} on {socket.gethostname()}, since 20"
    assert named in said, f"{what}: it was not refused by name, but ended with {refused.status}\n{said}"
    assert refused.status != 0, f"{what}: its status is 0\n{said}"
    assert {each.status for each in processes} == {0}, f"{what}: the first one failed\n{_tail(processes)}"
    assert not _left()
    _check_same(of.outcome(first), expected, what)
    assert _names(first.folder) == names, f"{what}: left is {_names(first.folder)}, alone {names}"


# -- the command line


def run(
    times: int = 300,
    pairs: int = 20,
    *,
    doors: Sequence[str] = tuple(SHARES),
    seed: int = 0,
    out: Path | None = None,
    say: Callable[[str], object] = print,
) -> list[Row]:
    """Kill trainings `times` times over `doors`, start `pairs` pairs, and return a row for each door and for the pairs.

    Args:
        out: a table to append the rows to.

    Raises:
        AssertionError: a result is lost, differs, or a process or file is left.
    """
    draw, rows = random.Random(seed), list[Row]()
    commit = git_commit()
    ctypes.CDLL(None).prctl(_SET_SUBREAPER, 1, 0, 0, 0)  # orphans of killed trainings become children of this process
    torch.set_num_threads(1)
    gc.freeze()  # otherwise each engine of a forked process would pass over all imported modules
    with tempfile.TemporaryDirectory() as name, ended_by_signals():
        scratch = Path(name)
        kill_doors.write_inputs(scratch / "inputs")
        of = {
            door: Trainings(door, scratch / door.replace(" ", "-"), scratch / "inputs", draw)
            for door in dict.fromkeys((*doors, *(first for first, _ in PAIRS)))
        }
        for door in doors:
            wanted, kills = round(times * SHARES[door] / sum(SHARES[each] for each in doors)), 0
            began = time.monotonic()
            while kills < wanted:
                kills += of[door].one(min(wanted - kills, 8))
            if wanted:
                figures = {"kills": kills, **of[door].counts, "longest seconds": round(of[door].longest, 2)}
                say(f"{door}: {figures}, {time.monotonic() - began:.0f} s")
                notes = "longest seconds: from a kill to the end of all processes"
                rows.append(table.of_figures("killed trainings", door, figures, commit, notes))
        for number in range(pairs):
            first, second = PAIRS[number % len(PAIRS)]
            pair(of[first], second, draw)
            say(f"{second} in the folder of {first}: refused, and the first one ended as alone")
        if pairs:
            figures = {"refused by name": pairs}
            rows.append(table.of_figures("two trainings in one folder", "all doors", figures, commit))
    if out is not None:
        table.append(rows, out)
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=300, dest="times")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--doors", nargs="+", choices=SHARES, default=tuple(SHARES), metavar="DOOR")
    parser.add_argument("--out", type=Path, help="append rows to this table")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    options = vars(parser.parse_args(arguments))
    run(**options, say=lambda text: print(text, flush=True))


if __name__ == "__main__":
    main()
