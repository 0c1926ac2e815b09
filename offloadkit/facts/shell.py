"""The IPython shell of a notebook, without importing IPython, and warnings in it."""

from __future__ import annotations

import logging
import sys
from typing import Any


def running_shell() -> Any:
    """The IPython shell of the current notebook; None outside notebooks."""
    ipython = sys.modules.get("IPython")  # ipykernel may be imported outside a kernel, for example by nbclient
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


class _Printed(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if not logging.root.handlers:  # which shows the record too
            print(self.format(record), file=sys.stdout, flush=True)


def print_warnings_in_notebooks(logger: str) -> None:
    """Print warnings to stdout in a notebook, which shows stderr as an error; handlers of the user replace this."""
    if running_shell() is not None:
        logging.getLogger(logger).addHandler(_Printed(logging.WARNING))
