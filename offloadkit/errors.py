"""Errors that offloadkit raises. A message says what was given, what was expected and what to do."""

from __future__ import annotations

import gc
import linecache
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

warned: set[str] = set()
_OWN = str(Path(__file__).parent)
_LIBRARIES = ("site-packages", "dist-packages", "ipykernel_launcher.py")
_MOST_LINES = 7
"""Lines of a message in a notebook."""
_LONG_WORD = re.compile(r"(\S{300})\S{300,}(\S{100})")


class OffloadkitError(Exception):
    """Base of all errors raised by offloadkit."""

    def __str__(self) -> str:
        """The message for any terminal: lone surrogates are escaped and very long words shortened."""
        return _LONG_WORD.sub(r"\1...\2", super().__str__()).encode("utf-8", "backslashreplace").decode()

    def _render_traceback_(self) -> list[str]:
        """At most ten lines that IPython shows in place of the traceback: the message and the user's line."""
        first, *more = str(self).splitlines() or [""]
        lines = [f"\x1b[1;31m{type(self).__name__}\x1b[0m: {first}", *more[: _MOST_LINES - 1]]
        if len(more) >= _MOST_LINES:
            lines.append(f"... ({len(more) - _MOST_LINES + 1:,} more lines)")
        hint = "whole traceback: import traceback; traceback.print_last()"
        return [*lines, *_place_of_user(self), f"\x1b[2m({hint})\x1b[0m"]


class ConfigError(OffloadkitError, ValueError):
    """An option has an invalid value.

    Attributes:
        option: the option's name, if the message is that name followed by `problem`; else None.
    """

    def __init__(self, problem: str, *, option: str | None = None) -> None:
        super().__init__(problem if option is None else f"{option} {problem}")
        self.problem, self.option = problem, option


class ModelError(OffloadkitError, ValueError):
    """The model cannot be trained (no trainable parameters, integer parameters, ...)."""


class ModelNotFoundError(ModelError):
    """No folder, preset or hub model has this name."""


class ModelAccessError(ModelError):
    """The hub denies access to the model (401, 403): a token or a licence is missing."""


class DownloadError(OffloadkitError, OSError):
    """A download from the hub failed. Running again continues it."""


class DoesNotFitError(OffloadkitError, MemoryError):
    """A plan needs more VRAM, RAM or disk than available. Raised before anything is loaded."""


class DataError(OffloadkitError, ValueError):
    """The dataset is unusable: unknown columns, no rows, no targets."""


class DataNotFoundError(DataError):
    """No file has this name, or none matches this pattern."""


class EngineStateError(OffloadkitError, RuntimeError):
    """Engine methods were called in the wrong order (step before backward, use after close)."""


class NonFiniteGradientError(OffloadkitError, ArithmeticError):
    """A gradient held NaN or Inf; the step was not applied."""


class RolledBackError(NonFiniteGradientError):
    """A gradient held NaN or Inf, and the engine has restored the last checkpoint: continue from `position`.

    Attributes:
        step: number of the update that was not applied.
        num_updates: number of updates in the checkpoint.
        checkpoint: its folder.
        position: the value passed to `save_checkpoint`, as `load_checkpoint` returns it.
    """

    step = num_updates = 0
    checkpoint = Path()
    position: Any = None


class TrainingStoppedError(OffloadkitError, RuntimeError):
    """SIGTERM or SIGHUP ended training: the machine is preempted, or the user's connection is closed.

    Attributes:
        signal: its number.
    """

    signal = 15


class OutOfRamError(OffloadkitError, MemoryError):
    """Free RAM fell below a minimum. Training stopped before the system would kill it."""


class OutOfVramError(OffloadkitError, MemoryError):
    """VRAM ran out. The message compares planned and used memory.

    Attributes:
        is_final: whether the engine already tried, and failed, to switch to a plan with less VRAM.
    """

    is_final = False


class RepeatWindowError(OutOfVramError):
    """VRAM ran out, and the engine has switched to a plan with less VRAM. Gradients since the last update are dropped:
    repeat the accumulation window from its first micro-batch."""


class ThreadLimitError(OffloadkitError, RuntimeError):
    """The system refuses to start a thread (`ulimit -u`, a container's limit)."""


class WorkerError(OffloadkitError, RuntimeError):
    """A DataLoader worker (`dataloader_num_workers`) was killed or exited."""


class HangError(OffloadkitError, TimeoutError):
    """A thread, stream or disk operation of the engine hangs or has ended. The message has the stacks of all threads.
    Training cannot continue in this process: restart it from the last checkpoint."""


class OutputError(OffloadkitError, OSError):
    """The output folder cannot be written."""


class RankError(OffloadkitError, RuntimeError):
    """Another rank has ended, has failed, or runs a different operation."""


def _place_of_user(error: BaseException) -> list[str]:
    """The innermost line of the user's own code in the traceback; empty if there is none."""
    standard = sysconfig.get_path("stdlib")
    for frame, number in reversed([*traceback.walk_tb(error.__traceback__)]):
        file = frame.f_code.co_filename
        line = linecache.getline(file, number).strip()  # "" in generated code
        if not line or file.startswith((_OWN, standard)) or any(part in file for part in _LIBRARIES):
            continue
        where = f"{Path(file).name}, line {number}" if Path(file).exists() else f"line {number} of the cell"
        return [f"\x1b[2m{where}:\x1b[0m {cut(line, 200)}"]
    return []


def cut(text: str, most: int = 600) -> str:
    """Shorten another library's text for a message, because it may repeat its whole input."""
    return text if len(text) <= most else f"{text[: most * 3 // 4]}... ({len(text):,} letters)"


def shown(value: object) -> str:
    """`repr(value)` for a message, cut to 200 characters."""
    try:
        text = repr(value)
    except Exception:  # repr of a user's object, a deeply nested list or an integer of 4,300 digits may fail
        return f"a {type(value).__name__} that cannot be written out"
    return cut(text, 200)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """End of a message about `name`: the known name that is spelled most like it; "" if none is.

    `cutoff`: least likeness, from 0 to 1.
    """
    import difflib

    near = difflib.get_close_matches(name, list(known), 1, cutoff)
    return f"; did you mean {shown(near[0])}?" if near else ""


def warn_once(message: str, stacklevel: int = 2) -> None:
    """Issue a warning once per process."""
    if message not in warned:
        warned.add(message)
        warnings.warn(message, stacklevel=stacklevel + 1)


@contextmanager
def errors_hold_nothing() -> Iterator[None]:
    """Clear the local variables of a traceback's frames, and of its causes' and contexts' frames.

    A notebook keeps its last error and thereby the frames' weights and activations. A debugger will find no local
    variables.
    """
    outside = sys.exception()
    try:
        yield
    except BaseException as error:
        _clear_frames(error, outside)
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise


def forget_last_error() -> None:
    """Clear the local variables of the last error that an interactive session keeps."""
    _clear_frames(getattr(sys, "last_value", None), None)
    gc.collect()


def _clear_frames(error: BaseException | None, outside: BaseException | None) -> None:
    """Clear the frames of `error` and its causes and contexts, up to `outside`."""
    behind, seen = [error], [None, outside]
    while behind:
        each = behind.pop()
        if each not in seen and each is not None:
            seen.append(each)
            traceback.clear_frames(each.__traceback__)
            behind += [each.__cause__, each.__context__]
