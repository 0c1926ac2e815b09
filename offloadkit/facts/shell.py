"""The IPython shell of a notebook, without importing IPython."""

from __future__ import annotations

import sys
from typing import Any


def running_shell() -> Any:
    """The IPython shell of the current notebook; None outside notebooks."""
    ipython = sys.modules.get("IPython")  # ipykernel may be imported outside a kernel, for example by nbclient
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None
