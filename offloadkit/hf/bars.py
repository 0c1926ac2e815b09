"""Progress bars are for terminals and notebooks: elsewhere each redrawing would be a line of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from offloadkit.hf.quiet import progress_bars


def is_live() -> bool:
    """Whether what is printed over is seen printed over: a terminal, or a notebook's cell."""
    ipython = sys.modules.get("IPython")  # ipykernel may be imported outside of a kernel, as nbclient's users do
    shell = ipython.get_ipython() if ipython is not None else None
    return sys.stderr.isatty() or getattr(shell, "kernel", None) is not None


@contextmanager
def bars_where_live() -> Iterator[None]:
    """Bars of datasets, transformers and the hub's client as `is_live` says, and afterwards as they were."""
    import datasets

    were_shown = not datasets.are_progress_bars_disabled()
    if not is_live():
        datasets.disable_progress_bars()
    try:
        with progress_bars(is_live()):
            yield
    finally:
        if were_shown:
            datasets.enable_progress_bars()
