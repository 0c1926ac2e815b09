"""Notebooks run in kernels of a chosen interpreter, with the tiny model and without a network."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbclient
import nbformat

REPOSITORY = Path(__file__).parents[2]
NOTEBOOKS = REPOSITORY / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
LAUNCHER = (sys.executable, "-m", "ipykernel_launcher")
MONITOR = "okm"
"""Class of the monitor's HTML element."""


def kernel_folder(folder: Path, launcher: Sequence[str] = LAUNCHER, **environment: str) -> Path:
    """Write a kernel named python3 that starts `launcher`; returns the value for JUPYTER_PATH."""
    own = {"OFFLOADKIT_TINY": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder / "ipython")}
    spec = {
        "argv": [*launcher, "-f", "{connection_file}"],
        "display_name": "Python 3",
        "language": "python",
        "env": own | {"PYTHONPATH": str(REPOSITORY)} | environment,
    }
    (folder / "kernels" / "python3").mkdir(parents=True)
    (folder / "kernels" / "python3" / "kernel.json").write_text(json.dumps(spec))
    return folder


class Listening(nbclient.NotebookClient):  # type: ignore[misc]
    """Keeps messages to widgets and every drawing of the monitor; like some front ends, it shows no widgets."""

    def __init__(self, notebook: Any, **options: Any) -> None:
        super().__init__(notebook, **options)
        self.states: list[dict[str, Any]] = []
        self.values: list[str] = []

    def handle_comm_msg(self, outs: Any, msg: Any, cell_index: int) -> None:
        super().handle_comm_msg(outs, msg, cell_index)
        self.states.append(msg["content"].get("data", {}).get("state", {}))

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        value = msg["content"].get("data", {}).get("text/html", "") if "display_data" in msg["msg_type"] else ""
        if f'class="{MONITOR}"' in value:
            self.values.append(value)
            self.drawn()
        return super().process_message(msg, cell, cell_index)

    def drawn(self) -> None:
        """Called after each drawing."""


class Watched(Listening):
    def __init__(self, notebook: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        resources = {"metadata": {"path": str(folder)}}
        read = nbformat.read(notebook, as_version=4)
        super().__init__(read, timeout=240, kernel_name="python3", resources=resources)

    def outputs(self, cell: str) -> list[Any]:
        (found,) = (each for each in self.nb.cells if each.get("id") == cell)
        return list(found.outputs)

    def text(self, cell: str) -> str:
        """The printed text of the cell, and its results as plain text."""
        parts = [o["text"] if o["output_type"] == "stream" else plain(o) for o in self.outputs(cell)]
        return "".join(parts)

    def data(self, cell: str, kind: str) -> str:
        """The cell's only output of this MIME type."""
        (found,) = (o["data"][kind] for o in self.outputs(cell) if kind in o.get("data", {}))
        return str(found)


def plain(output: Any) -> str:
    return str(output.get("data", {}).get("text/plain", ""))


def shown_losses(values: list[str]) -> list[float]:
    """The successive values of the monitor's loss tile."""
    found = [re.search(r"<td>loss</td><td>([\d.]+)</td>", value) for value in values]
    return [float(match[1]) for match in found if match]


def environment(folder: Path) -> dict[str, str]:
    """The environment of this process, with the kernels in `folder`."""
    return {**os.environ, "JUPYTER_PATH": str(folder)}
