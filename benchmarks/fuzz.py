"""Meaningless inputs at every door of the package are refused with a named error, or are harmless.

    python -m benchmarks.fuzz --show 50            # 20,000 inputs on two processes; needs no GPU and no network
    python -m benchmarks.fuzz --rooms units names  # some of the rooms
    python -m benchmarks.fuzz --one datasets 17    # one input again, with its traceback

An error counts as named if it is one of offloadkit's types (or a TypeError or ValueError), is raised by a line of the
package, and its message contains the name of the faulty file, option or key in printable letters. Every input runs in
a forked process with a limited address space. An input that takes longer than `SECONDS`, or ends its process, counts
as unnamed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import io
import json
import linecache
import os
import random
import resource
import selectors
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

import offloadkit
from benchmarks import fuzz_rooms
from offloadkit.errors import OffloadkitError

SECONDS = 10.0
"""Time limit of an input."""
GRACE = 5.0
"""Additional seconds before the process is killed."""
ROOM_FOR_MEMORY = 6 * 2**30
"""Bytes of address space for an input, in addition to the process's own."""
LONGEST_MESSAGE = 4_000
"""In letters. A longer message repeats the input."""
_PER_PROCESS = 200
_PACKAGE = str(Path(offloadkit.__file__).parent)


@dataclass
class Found:
    """The result of an input."""

    room: str
    number: int
    what: str
    """The input, in words."""
    verdict: str = "died"
    """"accepted", "refused", or for an unnamed error "unnamed", "slow" or "died"."""
    said: str = ""
    where: str = ""
    """Type and innermost line of an unnamed error."""
    seconds: float = 0.0

    def in_words(self) -> str:
        """The input and the fault of its result."""
        return f"{self.room} {self.number} {self.verdict}: {self.where}\n   {self.what}\n   {self.said[:300]!r}"

    @property
    def is_good(self) -> bool:
        return self.verdict in ("accepted", "refused")


def why_unnamed(error: BaseException, words: Sequence[str]) -> str | None:
    """The reason why an error counts as unnamed; None for a named error.

    Args:
        words: the message must contain one of these.
    """
    if isinstance(error, fuzz_rooms.CommandLineError):
        return error.why_unnamed(words)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    ours = frame.filename.startswith(_PACKAGE)
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    documented = isinstance(error, OffloadkitError) or type(error) in (TypeError, ValueError)
    if not documented or (not ours and not isinstance(error, OffloadkitError)):
        return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno} {line}"
    if not ours or not _raises(frame):
        return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno} {line}"
    return why_unclear(str(error), words)


def _raises(frame: traceback.FrameSummary) -> bool:
    lines = linecache.getlines(frame.filename)[frame.lineno - 1 : frame.end_lineno] if frame.lineno else []
    return any("raise" in line for line in lines)


def why_unclear(message: str, words: Sequence[str]) -> str | None:
    """The reason why a message does not name the fault; None if it does."""
    if not any(word.lower() in message.lower() for word in words):
        return f"none of {', '.join(words)[:200]} is in the message"
    if len(message) > LONGEST_MESSAGE:
        return f"a message of {len(message):,} letters"
    try:
        message.encode()
    except UnicodeEncodeError:
        return "a message that no terminal can print (a lone surrogate)"
    return None


def try_one(room: str, number: int, seed: int, stock: Path, trace: bool = False) -> Found:
    """Make the input and pass it to its door, in this process."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as name:
        draw = random.Random(f"{seed} {room} {number}")
        try:
            made = fuzz_rooms.ROOMS[room].make(draw, Path(name), stock)
        except Exception as error:  # an error of this script
            return Found(room, number, "it could not be made", said=str(error), where=f"{type(error).__name__}")
        found = Found(room, number, made.what)
        os.chdir(name)
        begin = time.perf_counter()
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made.call()
            found.verdict = "accepted"
        except fuzz_rooms.BeganError:
            found.verdict = "accepted"
        except BaseException as error:  # any error is judged
            if trace:
                traceback.print_exc()
            found.said = str(error)[: 2 * LONGEST_MESSAGE]
            why = why_unnamed(error, made.words)
            found.verdict, found.where = ("refused", "") if why is None else ("unnamed", why)
        found.seconds = time.perf_counter() - begin
        if found.seconds > made.seconds:
            found.verdict, found.where = "slow", f"{found.seconds:.1f} s, {made.seconds} are allowed"
        os.chdir("/")
    return found


def _serve(inputs: Sequence[tuple[str, int]], seed: int, stock: Path, pipe: int) -> NoReturn:
    """Run in a forked process: try the inputs, and write a line before and after each."""
    status = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_FOR_MEMORY, -1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for room, number in inputs:
            os.write(pipe, b"begin\n")
            found = try_one(room, number, seed, stock)
            os.write(pipe, json.dumps(vars(found)).encode() + b"\n")
        status = 0
    finally:
        os._exit(status)


@dataclass
class _Process:
    """A forked process with its remaining inputs and the time of its last line."""

    inputs: deque[tuple[str, int]]
    process: int
    pipe: int
    since: float = field(default_factory=time.monotonic)
    heard: bytes = b""


def _start(inputs: deque[tuple[str, int]], seed: int, stock: Path) -> _Process:
    ours, theirs = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(ours)
        _serve(list(inputs), seed, stock, theirs)
    os.close(theirs)
    return _Process(inputs, process, ours)


def _end(each: _Process) -> str:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(each.process, signal.SIGKILL)
    _, status = os.waitpid(each.process, 0)
    os.close(each.pipe)
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def run(
    rooms: Sequence[str] = tuple(fuzz_rooms.ROOMS),
    *,
    share: float = 1.0,
    seed: int = 0,
    jobs: int = 2,
    say: Callable[[str], object] = print,
) -> list[Found]:
    """Try a fraction `share` of the inputs of each room, on `jobs` processes."""
    num_inputs = {room: max(1, round(fuzz_rooms.ROOMS[room].num_inputs * share)) for room in rooms}
    every = [(room, number) for room in rooms for number in range(num_inputs[room])]
    random.Random(seed).shuffle(every)
    waiting = deque(every)
    found: list[Found] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-stock-", ignore_cleanup_errors=True) as name:
        stock = Path(name)
        _stocked(stock)
        gc.collect()
        gc.freeze()  # otherwise each forked process would copy the pages that garbage collection writes
        running: list[_Process] = []
        selector = selectors.DefaultSelector()
        said = time.monotonic()
        while waiting or running:
            while waiting and len(running) < jobs:
                some = deque(waiting.popleft() for _ in range(min(_PER_PROCESS, len(waiting))))
                running.append(_start(some, seed, stock))
                selector.register(running[-1].pipe, selectors.EVENT_READ, running[-1])
            for key, _ in selector.select(timeout=0.5):
                each: _Process = key.data
                news = os.read(each.pipe, 1 << 20)
                if not news:
                    _lose(each, found, waiting, selector, running, "", say)
                    continue
                *lines, each.heard = (each.heard + news).split(b"\n")
                for line in lines:
                    each.since = time.monotonic()
                    if line != b"begin":
                        found.append(Found(**json.loads(line)))
                        each.inputs.popleft()
                        if not found[-1].is_good:
                            say(found[-1].in_words())
            for each in running:
                if each.inputs and time.monotonic() - each.since > SECONDS + GRACE:
                    _lose(each, found, waiting, selector, running, "hangs", say)
            if time.monotonic() - said > 30:
                said = time.monotonic()
                say(f"{len(found):,} of {len(every):,}; {sum(not each.is_good for each in found)} unnamed")
    return found


def _lose(
    each: _Process,
    found: list[Found],
    waiting: deque[tuple[str, int]],
    selector: selectors.BaseSelector,
    running: list[_Process],
    why: str,
    say: Callable[[str], object],
) -> None:
    """End a process. Its present input counts; later inputs wait for the next process."""
    selector.unregister(each.pipe)
    how = _end(each)
    running.remove(each)
    if each.inputs:
        room, number = each.inputs.popleft()
        seconds = time.monotonic() - each.since
        found.append(Found(room, number, "", "slow" if why else "died", where=why or how, seconds=seconds))
        say(found[-1].in_words())
        waiting.extendleft(reversed(each.inputs))


def _stocked(stock: Path) -> None:
    """Fill the folder of models and files in a forked process, because this process must run no thread and no
    engine."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
                fuzz_rooms.stock(stock)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(process, 0)
    if status:
        raise RuntimeError("the models and checkpoints that inputs are made of could not be written")


def report(found: Sequence[Found], seconds: float, seed: int, show: int, say: Callable[[str], object] = print) -> None:
    """Print counts by room, unnamed errors by kind, and `show` random messages."""
    rooms = dict.fromkeys(each.room for each in found)
    for room in sorted(rooms):
        counts = Counter(each.verdict for each in found if each.room == room)
        slowest = max(each.seconds for each in found if each.room == room)
        say(f"{room:14} {counts.total():6,}  {', '.join(f'{n:,} {v}' for v, n in counts.items())}; {slowest:.1f} s")
    kinds: dict[tuple[str, str], list[Found]] = {}
    for each in found:
        if not each.is_good:
            kinds.setdefault((each.room, each.where), []).append(each)
    for (room, where), some in sorted(kinds.items(), key=lambda item: -len(item[1])):
        first = some[0]
        numbers = ", ".join(str(each.number) for each in some[:5])
        say(f"\n{len(some)} x {room} ({numbers}) {first.verdict}: {where}\n   {first.what}\n   {first.said[:300]!r}")
    refused = sorted((each for each in found if each.verdict == "refused"), key=lambda each: (each.room, each.number))
    for each in random.Random(seed).sample(refused, min(show, len(refused))):
        say(f"\n[{each.room} {each.number}] {each.what}\n   {each.said}")
    counts = Counter(each.verdict for each in found)
    unnamed = sum(not each.is_good for each in found)
    slowest = max(found, key=lambda each: each.seconds)
    say(
        f"\n{len(found):,} inputs with seed {seed} in {seconds:.0f} s: {counts['accepted']:,} accepted, "
        f"{counts['refused']:,} refused by name, {unnamed:,} unnamed; the slowest took {slowest.seconds:.1f} s "
        f"({slowest.room} {slowest.number})"
    )


def main(arguments: list[str] | None = None) -> None:
    """Exit with 1 if an error was unnamed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rooms", nargs="+", default=list(fuzz_rooms.ROOMS), choices=list(fuzz_rooms.ROOMS))
    parser.add_argument("--share", type=float, default=1.0, help="of the inputs of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--show", type=int, default=0, help="print so many messages drawn at random")
    parser.add_argument("--one", nargs=2, metavar=("ROOM", "NUMBER"), help="try one input, and show its traceback")
    given = parser.parse_args(arguments)
    fuzz_rooms.import_all()
    for path in Path(_PACKAGE).rglob("*.py"):
        linecache.getlines(str(path))  # the present text, even if the files are edited meanwhile
    if given.one:
        with tempfile.TemporaryDirectory() as name:
            _stocked(Path(name))
            print(try_one(given.one[0], int(given.one[1]), given.seed, Path(name), trace=True))
        return
    say = functools.partial(print, flush=True)
    begin = time.monotonic()
    found = run(given.rooms, share=given.share, seed=given.seed, jobs=given.jobs, say=say)
    report(found, time.monotonic() - begin, given.seed, given.show, say)
    if not all(each.is_good for each in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
