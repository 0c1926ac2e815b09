"""The monitor in a notebook: one HTML widget and a button, both of ipywidgets' core (7.7 and 8).

At the end plain HTML replaces the widgets and stays in the saved notebook. ipykernel handles messages of widgets
between cells. While a cell runs, a click arrives only with subshells (JupyterLab 4.4, ipykernel 7). Elsewhere the
button says so, and the kernel's interrupt does the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from offloadkit.monitor import words
from offloadkit.monitor.figures import Figures
from offloadkit.monitor.page import page

_VIEW = "application/vnd.jupyter.widget-view+json"
_NO_WIDGETS = "offloadkit.Monitor: no widget is shown here; the training goes on, and its summary follows at the end."
_BLOCKED = (
    "The button cannot work here: the running cell blocks the kernel. Interrupt the kernel (■) instead: it finishes "
    "the step and saves, a second interrupt breaks off."
)
_MAYBE = "If the button does not answer, interrupt the kernel (■): it finishes the step and saves."
_UNHEEDED = "This loop does not ask for stop_requested: an interrupt (■) breaks it off at once."


def running_shell() -> Any:
    """The IPython shell of the notebook that this code runs in; None elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


class NotebookDisplay:
    """Shows figures in the running cell's output."""

    def __init__(self, shell: Any, stop: Callable[[], None]) -> None:
        """
        Args:
            stop: what the button does.

        Raises:
            ImportError: no ipywidgets.
        """
        import ipywidgets

        self._ident = f"okm{uuid4().hex[:10]}"
        self._kernel, self._stop = shell.kernel, stop
        self._html = ipywidgets.HTML()
        self._button = ipywidgets.Button(
            description="Stop and save", icon="stop", tooltip="Finishes the step under way, then saves"
        )
        self._button.on_click(self._clicked)
        if self._button.comm is not None:
            # ipykernel 7.4 takes a click to the thread that drew the button, which the cell blocks, and not to the
            # subshell that the front end sent it to; other releases do not look at this.
            self._button.comm._reply_subshell_for = lambda data, subshell: subshell
        self._box = ipywidgets.VBox([self._button, self._html])

    def open(self, figures: Figures) -> None:
        """Publish the widgets, on the thread of the cell."""
        self.update(figures, heeded=True)
        view = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
        _publish({_VIEW: view, "text/plain": _NO_WIDGETS}, self._ident)

    def update(self, figures: Figures, *, heeded: bool) -> None:
        """Draw; on any thread."""
        note, works = self._button_works(heeded)
        stopping = figures.state == "stopping"
        self._html.value = page(figures, self._ident, "" if stopping else note)
        self._say("Stopping …" if stopping else "Stop and save", works=works and not stopping)

    def close(self, figures: Figures) -> None:
        """Replace the widgets by the static summary, and release them."""
        summary = {"text/html": page(figures, self._ident), "text/plain": words.summary(figures)}
        _publish(summary, self._ident, update=True)
        for widget in (self._box, self._html, self._button):
            for part in (widget.layout, getattr(widget, "style", None), widget):
                if part is not None:
                    part.close()

    def _say(self, description: str, *, works: bool) -> None:
        self._button.description, self._button.disabled = description, not works

    def _button_works(self, heeded: bool) -> tuple[str, bool]:
        """The button's text, and whether it may be pressed."""
        if not heeded:
            return _UNHEEDED, False
        threads = getattr(self._kernel, "shell_channel_thread", None)
        if threads is None:
            return _BLOCKED, False
        return ("" if threads.manager.list_subshell() else _MAYBE), True

    def _clicked(self, _: Any) -> None:
        self._stop()
        self._say("Stopping …", works=False)


def _publish(bundle: dict[str, Any], ident: str, *, update: bool = False) -> None:
    """Publish an output of the running cell, by MIME type, or new content for the output published as `ident`."""
    import IPython.display

    display: Any = IPython.display.display
    display(bundle, raw=True, display_id=ident, update=update)
