"""Silence progress bars, log messages and background downloads of transformers, datasets and the hub client.

Progress bars appear only on terminals and in notebooks; elsewhere every update would print a line.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from offloadkit.distributed import world
from offloadkit.facts.shell import running_shell


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    import huggingface_hub.utils
    import transformers.utils.logging

    hub, loading = cast(Any, huggingface_hub.utils), cast(Any, transformers.utils.logging)
    with ExitStack() as undo:
        if not shown and loading.is_progress_bar_enabled():
            loading.disable_progress_bar()
            undo.callback(loading.enable_progress_bar)
        if not shown and not hub.are_progress_bars_disabled():
            hub.disable_progress_bars()
            undo.callback(hub.enable_progress_bars)
        yield


@contextmanager
def no_loader_messages() -> Iterator[None]:
    """Suppress datasets' log messages about errors that it also raises."""
    import datasets

    before = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(before)


@contextmanager
def no_tying_advice() -> Iterator[None]:
    """Suppress transformers' advice about the config of a checkpoint with an untied head; the loader corrects it."""
    logger = logging.getLogger("transformers.modeling_utils")

    def other_messages(record: logging.LogRecord) -> bool:
        return "we will NOT tie them" not in record.getMessage()

    logger.addFilter(other_messages)
    try:
        yield
    finally:
        logger.removeFilter(other_messages)


@contextmanager
def no_conversion_service() -> Iterator[None]:
    """Keep transformers from asking a web service to convert a `.bin` checkpoint."""
    name = "DISABLE_SAFETENSORS_CONVERSION"
    before = os.environ.pop(name, None)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def is_live() -> bool:
    """Whether rank 0 can redraw a printed line (terminal or notebook cell)."""
    if world.rank() > 0:
        return False
    return sys.stderr.isatty() or running_shell() is not None


@contextmanager
def bars_where_live() -> Iterator[None]:
    import datasets

    with progress_bars(is_live()), _bars_vanish(), ExitStack() as undo:
        if not is_live() and not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            undo.callback(datasets.enable_progress_bars)
        yield


@contextmanager
def _bars_vanish() -> Iterator[None]:
    """Remove the bars of a notebook at the end: a saved notebook would show each as it began, at 0%."""
    if running_shell() is None:
        yield
        return
    import IPython.display
    import tqdm.notebook  # type: ignore[import-untyped, unused-ignore]

    bars, display = cast(Any, tqdm.notebook), cast(Any, IPython.display.display)
    shown: list[Any] = []
    before = getattr(bars, "display", None)  # None without ipywidgets
    bars.display = lambda bar: shown.append(display(bar, display_id=True))
    try:
        yield
    finally:
        bars.display = before
        for handle in shown:
            handle.update({"text/html": "", "text/plain": ""}, raw=True)
