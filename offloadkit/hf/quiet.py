"""Switches off, for a while, what transformers, datasets and the hub's client print and fetch beside their work.

Progress bars are for terminals and notebooks. Elsewhere each update of a bar would be a line of its own.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from offloadkit.distributed import world


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Show or hide the progress bars of transformers and of the hub's client inside this context."""
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
    """Keep the loaders of datasets from logging an error that they raise as well."""
    import datasets

    before = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(before)


@contextmanager
def no_tying_advice() -> Iterator[None]:
    """Drop transformers' advice to correct the config of a checkpoint with an untied head: the loader corrects it."""
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
    """Keep transformers from asking a web service, on a thread, to convert a `.bin` checkpoint that it has read."""
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
    """Whether a printed line can be redrawn: on a terminal and in a notebook's cell, by rank 0."""
    if world.rank() > 0:
        return False
    ipython = sys.modules.get("IPython")  # ipykernel may be imported outside of a kernel, as nbclient's users do
    shell = ipython.get_ipython() if ipython is not None else None
    return sys.stderr.isatty() or getattr(shell, "kernel", None) is not None


@contextmanager
def bars_where_live() -> Iterator[None]:
    """Show the progress bars of datasets, transformers and the hub's client only if `is_live`, inside this context."""
    import datasets

    with progress_bars(is_live()), ExitStack() as undo:
        if not is_live() and not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            undo.callback(datasets.enable_progress_bars)
        yield
