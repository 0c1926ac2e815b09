"""notebooks/execute.py: the notebook after runs that end in different ways."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

from tests.notebooks.kernels import NOTEBOOKS, environment, kernel_folder  # noqa: E402

pytestmark = pytest.mark.slow


def notebook(path: Path, *sources: str) -> Path:
    """A notebook whose cells hold an earlier run's output."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    for cell in cells:
        cell.outputs = [nbformat.v4.new_output("stream", text="earlier\n")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def texts(path: Path) -> list[str]:
    """The printed text of each cell."""
    read: Any = nbformat.read(path, as_version=4)
    return ["".join(output.get("text", output.get("ename", "")) for output in cell.outputs) for cell in read.cells]


def started(path: Path) -> subprocess.Popen[str]:
    """execute.py on a notebook at any path."""
    module = f"runpy.run_path({str(NOTEBOOKS / 'execute.py')!r})"
    code = f"import pathlib, runpy; {module}['execute'](pathlib.Path({str(path)!r}))"
    jupyter = environment(kernel_folder(path.parent / "jupyter"))
    return subprocess.Popen([sys.executable, "-c", code], env=jupyter, stderr=subprocess.PIPE, text=True)


def test_a_cell_that_fails_leaves_what_ran_before_it(tmp_path: Path) -> None:
    path = notebook(tmp_path / "some.ipynb", "print('one')", "print('two'); 1 / 0", "print('three')")
    with started(path) as run:
        assert run.stderr is not None
        assert "ZeroDivisionError" in run.stderr.read()
    assert run.returncode != 0
    assert texts(path) == ["one\n", "two\nZeroDivisionError", ""]
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["some.ipynb"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_cut_leaves_what_ran(how: signal.Signals, tmp_path: Path) -> None:
    waits = f"open({str(tmp_path / 'waits')!r}, 'w').close(); print('two', flush=True); import time; time.sleep(60)"
    path = notebook(tmp_path / "some.ipynb", "print('one')", waits, "print('three')")
    with started(path) as run:
        end = time.monotonic() + 60
        while not (tmp_path / "waits").exists() and run.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(0.5)  # until its output has arrived
        run.send_signal(how)
        run.wait(30)
    assert run.returncode != 0
    first, second, third = texts(path)
    assert first == "one\n"
    assert second == ("" if how == signal.SIGKILL else "two\nKeyboardInterrupt")
    assert third == ""
