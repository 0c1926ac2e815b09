"""`launch`: run a function in new processes of this machine, one per rank, that end with this process.

Ranks get torchrun's environment variables. This process hosts the TCPStore. torch and dill write the function and its
arguments to a file; dill includes definitions of `__main__`, from a notebook or script, without running it again. A
socket to every rank carries messages, errors and stop requests. When this process ends for any reason, the sockets
close, and every rank kills itself and its children.
"""

from __future__ import annotations

import codecs
import gc
import io
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe, connection
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import dill  # type: ignore[import-untyped, unused-ignore]
import torch
import torch.distributed as dist

from offloadkit.errors import ConfigError, RankError, TrainingStoppedError
from offloadkit.facts.hardware import num_cores
from offloadkit.facts.stopping import forwarded
from offloadkit.facts.threads import Thread

Link = connection.Connection

_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 10.0
_END_SECONDS = 10.0
_TAIL_LINES = 60
_START = "import gc, sys; gc.disable(); from offloadkit.distributed.launch import _serve; _serve(*sys.argv[1:])"

_T = TypeVar("_T")


# ---- in the process that launches ------------------------------------------------------------------------------------


def launch(
    function: Callable[..., _T],
    arguments: dict[str, Any],
    num_ranks: int,
    *,
    folder: Path,
    on_message: Callable[[int, Any], None] = lambda rank, message: None,
    stops: Callable[[], bool] = lambda: False,
) -> list[_T]:
    """Run `function(**arguments)` on every rank and return the results in rank order.

    Rank 0's output is printed here; output of the other ranks only if they fail.

    Args:
        folder: folder for a temporary folder, on a disk with room for tensors in arguments and results.
        on_message: called in this process with the rank and message of every `send_to_parent`.
        stops: polled; once true, rank 0 gets an interrupt.

    Raises:
        ConfigError: an argument cannot be pickled.
        BaseException: the error of the first failing rank, with its traceback as a note. All ranks have ended.
        RankError: a rank was killed, or its error cannot be pickled.
        TrainingStoppedError: SIGTERM or SIGHUP reached this process before the ranks trained.
    """
    with ExitStack() as opened:
        scratch = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix=".ranks-", dir=folder)))
        _write_work(function, arguments, scratch / "work")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        ranks: list[_Rank] = []
        opened.callback(_kill, ranks)
        for number in range(num_ranks):
            environment = _environment(number, num_ranks, store.port)
            ranks.append(_Rank(number, environment, scratch))
        _see_through(ranks, on_message, stops)
        values = [torch.load(scratch / f"result-{each.number}", **_HOW_TO_READ) for each in ranks]
        for each in ranks:
            each.end()
    return values


def _kill(ranks: Sequence[_Rank]) -> None:
    for each in ranks:
        each.kill()


def _see_through(ranks: Sequence[_Rank], on_message: Callable[[int, Any], None], stops: Callable[[], bool]) -> None:
    forwarded_ones: list[int] = []

    def tell(number: int) -> None:
        forwarded_ones.append(number)
        for each in ranks:
            each.say(f"signal {number}")

    try:
        with forwarded(tell):
            _wait_for(ranks, on_message, stops)
    except RankError as error:
        if not forwarded_ones:
            raise
        # The signal came before training, so it killed the ranks.
        stopped = TrainingStoppedError(f"{signal.Signals(forwarded_ones[0]).name} has ended training. {error}")
        stopped.signal = forwarded_ones[0]
        raise stopped from error


def _wait_for(ranks: Sequence[_Rank], on_message: Callable[[int, Any], None], stops: Callable[[], bool]) -> None:
    asked_to_stop, until = False, float("inf")
    while not all(each.has_returned for each in ranks):
        if not asked_to_stop and stops():
            asked_to_stop = True
            ranks[0].say("stop")
        open_links = [each.link for each in ranks if each.is_heard]
        ready = connection.wait(open_links, _LOOK_SECONDS)
        if not open_links:
            time.sleep(_LOOK_SECONDS)
        for each in ranks:
            if each.link in ready:
                each.take(on_message)
            each.look()
        if until == float("inf") and any(each.failure for each in ranks):
            until = time.monotonic() + _GRACE_SECONDS
        if until < float("inf") and (
            all(each.failure or each.has_returned for each in ranks) or time.monotonic() > until
        ):
            _kill(ranks)  # also reads the rest of their output
            raise _first_error(ranks)


@dataclass(frozen=True)
class _Failure:
    """Failure of a rank. `error` is None if the rank sent none; `is_consequence` marks effects of another failure."""

    error: BaseException | None
    text: str
    is_consequence: bool = False


def _first_error(ranks: Sequence[_Rank]) -> BaseException:
    failed = [(each.failure.is_consequence, each.failed_at, each) for each in ranks if each.failure is not None]
    first = min(failed, key=lambda one: one[:2])[2]
    assert first.failure is not None
    error, text = first.failure.error, first.failure.text
    name = f"rank {first.number} of {len(ranks)}"
    if error is None or isinstance(error, SystemExit):
        what = f"it called sys.exit({error.code!r})" if isinstance(error, SystemExit) else text.rstrip(".\n")
        error = RankError(
            f"{name} has ended: {what}. The other ranks were ended too. The checkpoints in the output folder are "
            "complete: resume from the newest (finetune: resume=True)"
        )
    else:
        error.add_note(f"It was raised on {name}:\n{text}")
    for each in ranks:
        if each.number and each.tail.strip():
            error.add_note(f"The last output of rank {each.number}:\n{each.tail}")
    return error


class _Rank:
    """A rank's process, seen from the launching process.

    Attributes:
        has_returned: whether the result is written.
        failure: how the rank failed, at time `failed_at`; None if it has not.
        is_heard: whether the link may deliver further messages.
    """

    def __init__(self, number: int, environment: dict[str, str], scratch: Path) -> None:
        self.number = number
        self.has_returned, self.is_heard = False, True
        self.failure: _Failure | None = None
        self.failed_at = 0.0
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)
        self.link, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), str(scratch)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if number else subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in a terminal reaches only this process
                pass_fds=(theirs.fileno(),),
            )
        pipes = (("stdout", self._process.stdout), ("stderr", self._process.stderr))
        self._readers = [
            Thread(target=self._read, args=(pipe, None if number else name), daemon=True)
            for name, pipe in pipes
            if pipe is not None
        ]
        for reader in self._readers:
            reader.start()

    @property
    def tail(self) -> str:
        return "".join(self._lines)

    def say(self, word: str) -> None:
        with suppress(OSError):  # the rank has ended
            self.link.send(word)

    def take(self, on_message: Callable[[int, Any], None]) -> None:
        try:
            kind, *what = self.link.recv()
        except (EOFError, OSError):
            self.is_heard = False
            return
        if kind == "told":
            on_message(self.number, what[0])
        elif kind == "returned":
            self.has_returned = True
        else:
            self._fail(_Failure(_unpacked(what[0]), *what[1:]))

    def look(self) -> None:
        status = self._process.poll()
        if status is None or self.has_returned or self.failure is not None:
            return
        if self.is_heard and self.link.poll():
            return  # read the remaining messages first
        if status < 0:
            why = " (out of RAM?)" if -status == signal.SIGKILL else ""
            self._fail(_Failure(None, f"it was killed by {signal.Signals(-status).name}{why}"))
        else:
            self._fail(_Failure(None, f"its process ended with status {status}"))

    def _fail(self, failure: _Failure) -> None:
        if self.has_returned:
            return  # a late interrupt
        self.failure, self.failed_at = failure, time.monotonic()

    def end(self) -> None:
        self.say("end")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.link.close()
        self.is_heard = False
        for reader in self._readers:
            reader.join(timeout=5)

    def _read(self, pipe: IO[bytes], name: str | None) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        line = ""
        with pipe:
            while data := os.read(pipe.fileno(), 2**16):
                text = decoder.decode(data)
                if name is None:
                    *whole, line = (line + text).split("\n")
                    self._lines.extend(f"{each}\n" for each in whole)
                    continue
                with suppress(OSError, ValueError):  # the stream is closed
                    shown = getattr(sys, name)  # looked up now, because live displays replace it
                    shown.write(text)
                    shown.flush()
        self._lines.append(line)


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    count = str(num_ranks)
    found = {"OMP_NUM_THREADS": str(max(1, num_cores() // num_ranks))}
    if "lo" in (name for _, name in socket.if_nameindex()):
        found["GLOO_SOCKET_IFNAME"] = "lo"  # gloo would look up the host name, unknown in some containers
    found |= os.environ
    found |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return found | {"PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)}


# ---- serialization ---------------------------------------------------------------------------------------------------

_HOW_TO_READ: dict[str, Any] = {"pickle_module": dill, "weights_only": False, "map_location": "cpu"}


def _write(what: Any, path: Path) -> None:
    """dill's "recurse" limits a function's globals to the globals that it uses."""
    with _recursing():
        torch.save(what, path, pickle_module=dill, pickle_protocol=pickle.HIGHEST_PROTOCOL)


@contextmanager
def _recursing() -> Iterator[None]:
    before, dill.settings["recurse"] = dill.settings["recurse"], True
    try:
        yield
    finally:
        dill.settings["recurse"] = before


def _write_work(function: Callable[..., Any], arguments: dict[str, Any], path: Path) -> None:
    """Raises a `ConfigError` that names the argument that cannot be pickled."""
    try:
        _write((function, arguments), path)
    except OSError:
        raise
    except Exception:
        for name, value in arguments.items():
            try:
                _write(value, path)
            except Exception as error:
                raise ConfigError(
                    f"{name} cannot be sent to the processes of the other GPUs ({type(error).__name__}: {error}); got "
                    f"{value!r:.200}. Pass rows, names and functions without open files, locks or generators, or "
                    "define it in an importable module"
                ) from error
        raise


def _packed(error: BaseException) -> bytes | None:
    try:
        with _recursing():
            data = dill.dumps(error.with_traceback(None))
        dill.loads(data)
    except Exception:
        return None
    return bytes(data)


def _unpacked(data: bytes | None) -> BaseException | None:
    error: Any = None if data is None else dill.loads(data)
    return error if isinstance(error, BaseException) else None


def _is_consequence(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, RankError | dist.DistError) or "gloo/transport" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


# ---- in a rank -------------------------------------------------------------------------------------------------------


@dataclass
class _Parent:
    link: Link
    scratch: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    ends: threading.Event = field(default_factory=threading.Event)

    def send(self, *message: Any) -> None:
        with self.lock:
            self.link.send(message)

    def obey(self) -> None:
        """Carry out the launching process's messages, and die with that process."""
        try:
            while True:
                word = self.link.recv()
                if word == "stop" or word.startswith("signal "):
                    number = signal.SIGINT if word == "stop" else int(word.removeprefix("signal "))
                    signal.pthread_kill(threading.main_thread().ident or 0, number)
                else:
                    self.ends.set()
        except (EOFError, OSError):
            shutil.rmtree(self.scratch, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)


_parent: _Parent | None = None


def is_launched() -> bool:
    return _parent is not None


def send_to_parent(message: Any) -> None:
    """Send `message` to `on_message` of the launching process; a no-op without one."""
    if _parent is not None:
        _parent.send("told", message)


def _serve(handle: str, scratch: str) -> NoReturn:
    global _parent
    _parent = parent = _Parent(Link(int(handle)), scratch)
    os.set_inheritable(int(handle), False)
    Thread(target=parent.obey, name="offloadkit-parent", daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    folder, rank, status = Path(scratch), int(os.environ["RANK"]), 1
    try:
        function, arguments = torch.load(folder / "work", mmap=True, **_HOW_TO_READ)
        gc.enable()  # a fifth of the seconds of the imports would be collections
        _write(function(**arguments), folder / f"result-{rank}")
        sys.stdout.flush()
        parent.send("returned")
        parent.ends.wait()  # other ranks may still be working
        status = 0
    except BaseException as error:
        text = traceback.format_exc()
        with suppress(OSError):
            sys.stdout.flush()
            parent.send("failed", _packed(error), text, _is_consequence(error))
    os._exit(status)  # an orderly exit may hang on threads or process groups that wait for other ranks
