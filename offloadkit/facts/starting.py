"""The first seconds of a run, while libraries load: print progress, and avoid unnecessary work."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def say(doing: str) -> None:
    print(f"offloadkit: {doing} ...", file=sys.stderr, flush=True)


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
