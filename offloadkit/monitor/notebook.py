"""The monitor in a notebook: HTML that is redrawn in place, and an ipywidgets button if clicks can arrive.

Every front end shows HTML, even without widgets, and the saved notebook keeps the last view. During a cell, clicks
arrive only with subshells (ipykernel 7, JupyterLab 4.4). Without them no button is shown, and the kernel's interrupt
has the same effect.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from offloadkit.monitor import words
from offloadkit.monitor.figures import Figures
from offloadkit.monitor.page import page, switches

_VIEW = "application/vnd.jupyter.widget-view+json"
_INTERRUPT = "To stop, interrupt the kernel (■): it finishes the step and saves, a second interrupt breaks off."
_MAYBE = "If there is no button, or it does not answer, interrupt the kernel (■): it finishes the step and saves."
_UNHEEDED = "This loop does not ask for stop_requested: an interrupt (■) breaks it off at once."


class NotebookDisplay:
    def __init__(self, shell: Any, stop: Callable[[], None]) -> None:
        self._ident = f"okm{uuid4().hex[:10]}"
        self._button = _button(shell.kernel, stop)
        self._kernel, self._request = shell.kernel, None

    def open(self, figures: Figures) -> None:
        if hasattr(self._kernel, "get_parent"):
            self._request = self._kernel.get_parent("shell")
        if self._button is not None:
            self._button.open()
        self._draw(figures, is_polled=True, update=False)
        _publish({"text/html": switches(self._ident), "text/plain": ""}, f"{self._ident}s")

    def update(self, figures: Figures, *, is_polled: bool) -> None:
        self._draw(figures, is_polled=is_polled, update=True)

    def close(self, figures: Figures) -> None:
        if self._button is not None:
            self._button.close()
        _publish({"text/html": "", "text/plain": ""}, f"{self._ident}s", update=True)
        _publish(last_view(figures, self._ident), self._ident, update=True)

    def _draw(self, figures: Figures, *, is_polled: bool, update: bool) -> None:
        stopping = figures.state == "stopping"
        if self._button is not None:
            self._button.say(stopping=stopping, works=is_polled)
        note = "" if stopping else self._note(is_polled)
        drawn = {"text/html": page(figures, self._ident, note), "text/plain": words.line(figures)}
        _publish(drawn, self._ident, update)
        if self._request is not None:
            # A subshell that has answered the button reports "idle", which front ends show for the whole kernel.
            self._kernel.session.send(
                self._kernel.iopub_socket, "status", {"execution_state": "busy"}, self._request, b"status"
            )

    def _note(self, is_polled: bool) -> str:
        if not is_polled:
            return _UNHEEDED
        if self._button is None:
            return _INTERRUPT
        return "" if self._button.is_heard else _MAYBE


def last_view(figures: Figures, ident: str) -> dict[str, str]:
    """The MIME bundle that stays in a notebook: a page, a PNG (in base64), and a table in plain text."""
    from offloadkit.monitor.picture import png

    return {
        "text/html": page(figures, ident, is_last=True),
        "image/png": b64encode(png(figures)).decode("ascii"),
        "text/plain": words.summary(figures),
    }


class _Button:
    def __init__(self, threads: Any, stop: Callable[[], None]) -> None:
        """Raises `ImportError` if ipywidgets is not installed. `threads`: the kernel's thread that manages
        subshells.
        """
        import ipywidgets

        self._ident = f"okb{uuid4().hex[:10]}"
        self._threads, self._stop = threads, stop
        self._widget = ipywidgets.Button(icon="stop", tooltip="Finishes the current step, then saves")
        self.say(stopping=False, works=True)
        self._widget.on_click(self._clicked)
        if self._widget.comm is not None:
            # ipykernel 7.4 sends a click to the thread that drew the button, which the cell blocks, instead of the
            # subshell chosen by the front end. Other releases ignore this attribute.
            self._widget.comm._reply_subshell_for = lambda data, subshell: subshell

    @property
    def is_heard(self) -> bool:
        return bool(self._threads.manager.list_subshell())

    def open(self) -> None:
        view = {"version_major": 2, "version_minor": 0, "model_id": self._widget.model_id}
        _publish({_VIEW: view, "text/plain": ""}, self._ident)

    def say(self, *, stopping: bool, works: bool) -> None:
        self._widget.description = "Stopping …" if stopping else "Stop and save"
        self._widget.disabled = stopping or not works

    def close(self) -> None:
        _publish({"text/html": "", "text/plain": ""}, self._ident, update=True)
        for part in (self._widget.layout, self._widget.style, self._widget):
            part.close()

    def _clicked(self, _: Any) -> None:
        self._stop()
        self.say(stopping=True, works=True)


def _button(kernel: Any, stop: Callable[[], None]) -> _Button | None:
    """A button, if ipywidgets is installed and clicks can arrive while a cell runs."""
    threads = getattr(kernel, "shell_channel_thread", None)
    try:
        return None if threads is None else _Button(threads, stop)
    except ImportError:
        return None


def _publish(bundle: dict[str, Any], ident: str, update: bool = False) -> None:
    import IPython.display

    display: Any = IPython.display.display
    display(bundle, raw=True, display_id=ident, update=update)
