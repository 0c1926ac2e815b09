"""Every error that offloadkit raises by itself; a message says what was given, what was expected and what to do."""

from __future__ import annotations

import gc
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

warned: set[str] = set()
"""The warnings of `warn_once` that this process has given."""
_LONG_WORD = re.compile(r"(\S{300})\S{300,}(\S{100})")


class OffloadkitError(Exception):
    """Base of all errors raised by offloadkit."""

    def __str__(self) -> str:
        """The message. Every terminal prints it: half characters are escaped, and words without an end are cut."""
        return _LONG_WORD.sub(r"\1...\2", super().__str__()).encode("utf-8", "backslashreplace").decode()


class ConfigError(OffloadkitError, ValueError):
    """An option has a value that offloadkit cannot use."""


class ModelError(OffloadkitError, ValueError):
    """The model cannot be trained as it is (no trainable parameters, integer parameters, ...)."""


class ModelNotFoundError(ModelError):
    """No model of that name: neither a folder, nor a preset, nor on the hub."""


class ModelAccessError(ModelError):
    """The hub knows the model but denies access (401, 403): a token or a licence is missing."""


class DownloadError(OffloadkitError, OSError):
    """A transfer from the hub broke off, or the hub answered with an error of its own. Running again continues."""


class DoesNotFitError(OffloadkitError, MemoryError):
    """A plan needs more VRAM, RAM or disk than there is. It is refused before anything is loaded."""


class DataError(OffloadkitError, ValueError):
    """The dataset does not fit: unknown columns, no rows, nothing to learn from."""


class EngineStateError(OffloadkitError, RuntimeError):
    """The engine was called in a wrong order (step before backward, use after close)."""


class NonFiniteGradientError(OffloadkitError, ArithmeticError):
    """A gradient held NaN or Inf; the step was not applied."""


class RolledBackError(NonFiniteGradientError):
    """A gradient held NaN or Inf, and the engine is where the last checkpoint was saved: go on from `position`.

    Attributes:
        step: the number of the update that held NaN or Inf, and was not applied.
        num_updates: updates that the checkpoint holds.
        checkpoint: its folder.
        position: what `save_checkpoint` was given, as `load_checkpoint` returns it.
    """

    step = num_updates = 0
    checkpoint = Path()
    position: Any = None


class TrainingStoppedError(OffloadkitError, RuntimeError):
    """SIGTERM or SIGHUP has ended training: the machine is taken back, or its user's connection has ended.

    Attributes:
        signal: its number.
    """

    signal = 15


class OutOfRamError(OffloadkitError, MemoryError):
    """Free RAM fell below a minimum. Training stopped before the system would have killed it."""


class OutOfVramError(OffloadkitError, MemoryError):
    """The GPU's memory is full. The message compares what was planned with what is used.

    Attributes:
        is_final: whether the engine has looked for a leaner plan already, and could not move to one.
    """

    is_final = False


class RepeatWindowError(OutOfVramError):
    """The GPU's memory was full, and the engine has moved to a leaner plan. The gradients since the last update were
    dropped: repeat the window from its first micro-batch."""


class ThreadLimitError(OffloadkitError, RuntimeError):
    """The system starts no more threads (`ulimit -u`, a container's limit)."""


class WorkerError(OffloadkitError, RuntimeError):
    """A process that prepares batches (`dataloader_num_workers`) was killed, or has ended."""


class HangError(OffloadkitError, TimeoutError):
    """A thread, stream or disk that does the engine's work hangs or has ended. The message has the stacks of all
    threads. The process cannot train on: start it anew, and go on from the last checkpoint."""


class OutputError(OffloadkitError, OSError):
    """The output folder cannot be written."""


class RankError(OffloadkitError, RuntimeError):
    """Another process that trains the model with this one has ended, has failed, or does something else."""


def cut(text: str, most: int = 600) -> str:
    """A text of another library, for a message: it may repeat all that was given."""
    return text if len(text) <= most else f"{text[: most * 3 // 4]}... ({len(text):,} letters)"


def shown(value: object) -> str:
    """What was given, for a message: its `repr`, cut to 200 letters."""
    try:
        text = repr(value)
    except Exception:  # of anybody's object; and Python writes no deep lists, nor numbers of 4,300 digits
        return f"a {type(value).__name__} that cannot be written out"
    return cut(text, 200)


def warn_once(message: str, stacklevel: int = 2) -> None:
    """Give a warning that this process has not given yet. `stacklevel` is that of `warnings.warn`."""
    if message not in warned:
        warned.add(message)
        warnings.warn(message, stacklevel=stacklevel + 1)


@contextmanager
def errors_hold_nothing() -> Iterator[None]:
    """Clear the local variables that an error holds through its traceback, and those of the errors behind it.

    A notebook remembers its last error, and with its frames the weights and activations in them. A debugger finds no
    local variables there afterwards.
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
    """Clear the local variables that the error holds which a prompt or a notebook remembers."""
    _clear_frames(getattr(sys, "last_value", None), None)
    gc.collect()


def _clear_frames(error: BaseException | None, outside: BaseException | None) -> None:
    """Clear the frames of `error` and of those behind it, up to `outside`."""
    behind, seen = [error], [None, outside]
    while behind:
        each = behind.pop()
        if each not in seen and each is not None:
            seen.append(each)
            traceback.clear_frames(each.__traceback__)
            behind += [each.__cause__, each.__context__]
