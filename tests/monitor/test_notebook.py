"""The monitor in a real kernel: drawings while a cell trains, and the output that stays in the notebook."""

from __future__ import annotations

import asyncio
import signal
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

from tests.notebooks.kernels import Listening, kernel_folder  # noqa: E402

pytestmark = pytest.mark.slow  # a kernel takes seconds to start

SETUP = f"""
import runpy, sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from offloadkit.facts.config import OffloadConfig
from offloadkit.engine.engine import OffloadEngine
from offloadkit.monitor.monitor import Monitor
models = runpy.run_path({str(Path(__file__).parents[1] / "models.py")!r})  # some package may be called tests
TinyLM, tokens = models["TinyLM"], models["tokens"]

def train(num_steps, pause=0.0, asks=True, **arguments):
    with OffloadEngine(TinyLM(), OffloadConfig(learning_rate=1e-3), device="cpu") as engine:
        with Monitor(engine.plan, engine.telemetry, total_steps=num_steps, **arguments) as monitor:
            for batch in tokens(num_steps):
                engine.backward(engine(batch))
                engine.step()
                time.sleep(pause)
                if asks and monitor.stop_requested:
                    break
            engine.synchronize()
    return monitor
"""


class Client(Listening):
    """Runs one cell; interrupts the kernel after a number of drawings."""

    def __init__(self, kernel: Any, cell: str, interrupt_after: int | None = None) -> None:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
        super().__init__(notebook, km=kernel, timeout=120)
        self._interrupt_after = interrupt_after
        self.num_busy = 0
        self._button = ""

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        self.num_busy += msg["content"].get("execution_state") == "busy"
        return super().process_message(msg, cell, cell_index)

    def drawn(self) -> None:
        if len(self.values) == self._interrupt_after:
            asyncio.ensure_future(self.km.signal_kernel(signal.SIGINT))  # noqa: RUF006

    def run(self) -> list[Any]:
        """The outputs of the cell."""
        self.execute(cleanup_kc=False)
        self.kc.stop_channels()
        return list(self.nb.cells[0].outputs)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One kernel with the interpreter of the tests and no other packages; SETUP has run."""
    folder = tmp_path_factory.mktemp("jupyter")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JUPYTER_PATH", str(kernel_folder(folder)))
        first = Client(None, SETUP)
        first.run()
        yield first.km
        first._cleanup_kernel()


def test_bars_move_while_the_cell_runs_and_a_summary_stays(kernel: Any) -> None:
    client = Client(kernel, "train(60, pause=0.03, baseline_seconds=0.01); None")
    button, output, switches = client.run()
    assert len(set(client.values)) >= 5
    assert client.num_busy >= 5, "the kernel says with every drawing that it is busy"
    assert "waiting for the first step" in client.values[0]
    assert "training" in client.values[-2]
    assert "measured baseline" in client.values[-2]
    for gone in (button, switches):
        assert gone["data"] == {"text/html": "", "text/plain": ""}
    assert output["data"]["text/html"] == client.values[-1]
    assert "step 60 of 60" in output["data"]["text/html"]
    assert "<svg" in client.values[-2]
    assert output["data"]["text/plain"].startswith("finished: step 60 of 60")
    assert b64decode(output["data"]["image/png"]).startswith(b"\x89PNG")


def test_an_interrupt_finishes_the_step_and_the_cell_ends_without_an_error(kernel: Any) -> None:
    client = Client(
        kernel, "m = train(2000, pause=0.03)\nprint(m.figures().state, m.figures().steps_done)", interrupt_after=3
    )
    outputs = client.run()
    text = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    state, steps = text.split()
    assert state == "stopped"
    assert 1 <= int(steps) < 1000
    assert any("stopping" in value for value in client.values) or "stopped" in str(outputs)


def test_a_loop_that_never_asks_is_told_how_to_break_it_off(kernel: Any) -> None:
    client = Client(kernel, "train(40, pause=0.03, asks=False); None")
    client.run()
    assert any("does not ask for stop_requested" in value for value in client.values)
    assert any(state.get("disabled") is True for state in client.states)


def test_there_is_no_button_where_it_could_not_work(kernel: Any) -> None:
    """A kernel without subshells handles clicks only after the cell has ended."""
    old = """
from types import SimpleNamespace
from offloadkit.monitor import monitor
found, monitor.running_shell = monitor.running_shell, lambda: SimpleNamespace(kernel=object())
train(20, pause=0.03)
monitor.running_shell = found
"""
    client = Client(kernel, old)
    output, _ = client.run()
    assert "To stop, interrupt the kernel" in client.values[0]
    assert output["data"]["text/html"] == client.values[-1]
    assert not client.states


class Clicking(Client):
    """Presses the button on a subshell, like JupyterLab, after some drawings."""

    def handle_comm_msg(self, outs: Any, msg: Any, cell_index: int) -> None:
        super().handle_comm_msg(outs, msg, cell_index)
        if msg["content"].get("data", {}).get("state", {}).get("_model_name") == "ButtonModel":
            self._button = msg["content"]["comm_id"]

    def drawn(self) -> None:
        if len(self.values) == 3:
            asyncio.ensure_future(self._click())  # noqa: RUF006

    async def _click(self) -> None:
        session = self.kc.session
        self.kc.control_channel.send(session.msg("create_subshell_request"))
        reply = await self.kc.control_channel.get_msg(timeout=10)
        content = {"comm_id": self._button, "data": {"method": "custom", "content": {"event": "click"}}}
        message = session.msg("comm_msg", content)
        message["header"]["subshell_id"] = reply["content"]["subshell_id"]
        self.kc.shell_channel.send(message)


def test_the_button_is_heard_where_the_front_end_sends_it_past_the_running_cell(kernel: Any) -> None:
    pytest.importorskip("ipykernel.subshell_manager")
    client = Clicking(kernel, "m = train(4000, pause=0.02)\nprint(m.figures().state, m.figures().steps_done)")
    outputs = client.run()
    state, steps = "".join(output["text"] for output in outputs if output["output_type"] == "stream").split()
    assert state == "stopped"
    assert int(steps) < 2000


def test_bars_leave_nothing_and_progress_is_no_error(kernel: Any) -> None:
    cell = """
from tqdm.auto import tqdm
from offloadkit.facts.starting import say
from offloadkit.hf.quiet import bars_where_live
with bars_where_live():
    say("loading")
    for _ in tqdm(range(3), desc="Tokenizing"):
        pass
"""
    outputs = Client(kernel, cell).run()
    streams = [(output["name"], output["text"]) for output in outputs if output["output_type"] == "stream"]
    assert streams == [("stdout", "offloadkit: loading ...\n")], "a notebook shows stderr as an error"
    bars = [output["data"] for output in outputs if output["output_type"] == "display_data"]
    assert bars == [{"text/html": "", "text/plain": ""}]


def test_ten_runs_leave_no_widgets_behind(kernel: Any) -> None:
    count = """
from ipywidgets.widgets import widget
def number():
    return len(widget._instances) if hasattr(widget, "_instances") else len(widget.Widget.widgets)
before = number()
for _ in range(10):
    train(2)
print(number() - before)
"""
    outputs = Client(kernel, count).run()
    assert outputs[-1]["text"].strip() == "0"
    assert sum("finished" in output.get("data", {}).get("text/html", "") for output in outputs) == 10
