"""Seconds in which nothing is seen, while libraries load or plans are made: print progress, avoid unnecessary work."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from offloadkit.facts.shell import running_shell


def say(doing: str) -> None:
    """Print to stderr, because stdout may be JSON; to stdout in a notebook, which shows stderr as an error."""
    stream = sys.stderr if running_shell() is None else sys.stdout
    print(f"offloadkit: {doing} ...", file=stream, flush=True)


LONG_SECONDS = 2.0


@contextmanager
def said_if_long(doing: str) -> Iterator[None]:
    """`say` it if it takes more than `LONG_SECONDS`."""
    timer = threading.Timer(LONG_SECONDS, say, [doing])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_loaded(library: str) -> bool:
    return library in sys.modules


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable Python's garbage collector.

    Imports create hundreds of thousands of permanent objects; scanning them repeatedly takes a fifth of the time that
    transformers needs to load.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
