"""The first notebook in a real JupyterLab in Chromium: the monitor moves, and an interrupt keeps the progress."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel")
pytest.importorskip("nbclient")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'")

from tests.notebooks.kernels import NOTEBOOKS, environment, kernel_folder  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LAB = shutil.which("jupyter-lab", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.skipif(LAB is None, reason="needs JupyterLab: pip install -e '.[dev]'"),
]

SHORT, LONG = "STEPS, BATCH_SIZE = (40, 8) if TINY", "STEPS, BATCH_SIZE = (2000, 8) if TINY"
"""Training that lasts until it is interrupted."""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Address of a JupyterLab server, and its folder with the notebook."""
    root = tmp_path / "root"
    root.mkdir()
    source = (NOTEBOOKS / "01_finetune_t5.ipynb").read_text()
    assert SHORT in source
    notebook = json.loads(source.replace(SHORT, LONG))
    for cell in notebook["cells"]:
        cell |= {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
    (root / "notebook.ipynb").write_text(json.dumps(notebook))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(LAB), "--allow-root", "--no-browser", f"--port={port}", f"--ServerApp.root_dir={root}"]
    command += ["--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True"]
    command += ["--LabApp.expose_app_in_browser=True"]
    no_news(tmp_path / "settings")
    own = {"JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"), "JUPYTER_CONFIG_DIR": str(tmp_path / "config")}
    own |= {"JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"), "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces")}
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, env=environment(kernel_folder(tmp_path / "jupyter")) | own, stdout=log, stderr=log
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/api", server, tmp_path / "server.log")
            yield f"http://127.0.0.1:{port}", root
        finally:
            server.terminate()
            server.wait(timeout=30)


def no_news(settings: Path) -> None:
    """Stop JupyterLab from asking about news and updates."""
    folder = settings / "@jupyterlab" / "apputils-extension"
    folder.mkdir(parents=True)
    (folder / "notification.jupyterlab-settings").write_text(
        json.dumps({"fetchNews": "false", "checkForUpdates": False})
    )


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(120):
        try:
            urllib.request.urlopen(address, timeout=5).read()
            return
        except OSError:
            assert server.poll() is None, log.read_text()
            time.sleep(0.5)
    raise TimeoutError(log.read_text())


@pytest.fixture
def page(lab: tuple[str, Path]) -> Iterator[Any]:
    """A browser that shows the notebook, with the kernel ready."""
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 1150, "height": 1400})
        shown.goto(f"{lab[0]}/lab/tree/notebook.ipynb")
        shown.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=40_000)
        shown.wait_for_function(
            """() => { const kernel = window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel;
                       return kernel?.connectionStatus === 'connected' && kernel.status === 'idle' }""",
            timeout=60_000,
        )
        yield shown
        browser.close()


def test_bars_move_the_slowdown_appears_and_an_interrupt_leaves_a_checkpoint(lab: tuple[str, Path], page: Any) -> None:
    page.evaluate("() => void window.jupyterapp.commands.execute('notebook:run-all-cells')")
    monitor = page.locator(".okm").first
    monitor.wait_for(timeout=90_000)
    monitor.get_by_text("evaluation", exact=False).or_(monitor.get_by_text("running mean")).first.wait_for(
        timeout=60_000
    )
    page.get_by_text("phases of a step").first.click()
    seen = [drawing(page) for _ in range(24) if page.wait_for_timeout(250) is None]
    steps = [each["step"] for each in seen]
    assert steps == sorted(steps)
    assert {each["kernel"] for each in seen} == {"busy"}
    assert len(set(steps)) >= 4, "progress moves"
    assert seen[-1]["way"] > seen[0]["way"]
    assert len({each["bars"] for each in seen}) >= 3, "the bars must move too"
    assert sum(width > 20 for width in seen[-1]["bars"]) >= 4, "memory has bars, and unfolded phases stay unfolded"

    page.locator('[data-jp-item-name="interrupt"] >> visible=true').first.click()
    page.locator(".okm-head", has_text="stopped").first.wait_for(timeout=30_000)
    (checkpoint,) = (lab[1] / "offloadkit-output").glob("checkpoint-*")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert checkpoint.name == f"checkpoint-{state['global_step']}"
    assert max(steps) <= state["global_step"] < 2000
    assert "KeyboardInterrupt" not in page.locator(".jp-Notebook").inner_text()
    page.get_by_text("writes the same: True").wait_for(timeout=60_000)  # the cells below ran after the interrupt


DRAWING = """() => {
    const element = document.querySelector(".okm");
    return {
        kernel: window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status,
        head: element.querySelector(".okm-head b").innerText,
        way: element.querySelector(".okm-way").getAttribute("aria-valuenow"),
        bars: [...element.querySelectorAll("svg rect")].map(rect => rect.getBoundingClientRect().width),
    };
}"""
"""One query, because the page may be redrawn between two queries."""


def drawing(page: Any) -> dict[str, Any]:
    """The monitor's current step, progress in per cent, and the widths in pixels of all bars of memory and time."""
    shown = page.evaluate(DRAWING)
    step = int(shown["head"].removeprefix("step ").split(" of ")[0].replace(",", ""))
    return {
        "step": step,
        "kernel": shown["kernel"],
        "way": int(shown["way"]),
        "bars": tuple(round(width, 1) for width in shown["bars"]),
    }
