"""What transformers and the hub's client do beside loading, switched off for a while."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Bars of transformers and of the hub's client on or off, and afterwards as they were."""
    import huggingface_hub.utils
    import transformers.utils.logging

    hub, loading = cast(Any, huggingface_hub.utils), cast(Any, transformers.utils.logging)
    hub_was_shown, loading_was_shown = not hub.are_progress_bars_disabled(), loading.is_progress_bar_enabled()
    if not shown:
        loading.disable_progress_bar()
        hub.disable_progress_bars()
    try:
        yield
    finally:
        if not shown and loading_was_shown:
            loading.enable_progress_bar()
        if not shown and hub_was_shown:
            hub.enable_progress_bars()


@contextmanager
def no_loader_messages() -> Iterator[None]:
    """Keep the loaders of datasets from logging the fault of a file that they raise as an error too."""
    import datasets

    before = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(before)


@contextmanager
def no_tying_advice() -> Iterator[None]:
    """Drop transformers' advice to correct the config of a checkpoint with a head of its own: the loader does."""
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
    """Keep transformers from asking a web service, in a thread, to convert a `.bin` checkpoint it has just read."""
    name = "DISABLE_SAFETENSORS_CONVERSION"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
