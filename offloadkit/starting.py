"""The first seconds of a run, while libraries load: a sign of life, and nothing that takes longer than it must."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def say(doing: str) -> None:
    """Print a line on stderr that says what takes the next seconds."""
    print(f"offloadkit: {doing} ...", file=sys.stderr, flush=True)


def is_loaded(library: str) -> bool:
    """Whether this process has imported it."""
    return library in sys.modules


@contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python's garbage collector from running inside this context.

    Imports make hundreds of thousands of objects that stay. The collector goes over them again and again, which takes
    a fifth of the time that transformers needs to load.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
