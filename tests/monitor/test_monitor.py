"""The monitor next to a training run: its input, requests to stop, and that it never harms the run."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ConfigError
from offloadkit.facts import hardware
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.telemetry import Telemetry
from offloadkit.monitor import monitor as monitor_module
from offloadkit.monitor import terminal, words
from offloadkit.monitor.figures import Figures, Machine
from offloadkit.monitor.monitor import Monitor
from offloadkit.monitor.notebook import NotebookDisplay
from offloadkit.monitor.terminal import TerminalDisplay
from offloadkit.planner import make_plan, placed
from tests.models import TinyLM, tokens
from tests.monitor.records import GIB, record
from tests.planner.machines import H200, shape


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "offloadkit-monitor"]


class Watched:
    """A display that keeps the figures it receives."""

    def __init__(self, fails: bool = False) -> None:
        self.shown: list[tuple[str, Figures]] = []
        self.is_polled: list[bool] = []
        self.fails = fails

    def open(self, figures: Figures) -> None:
        self.shown.append(("open", figures))

    def update(self, figures: Figures, *, is_polled: bool) -> None:
        self.shown.append(("update", figures))
        self.is_polled.append(is_polled)
        if self.fails:
            raise ZeroDivisionError("a display that breaks")

    def close(self, figures: Figures) -> None:
        self.shown.append(("close", figures))


def show_on(display: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make monitors outside of a notebook use `display`."""
    for kind in ("LogLines", "TerminalDisplay"):
        monkeypatch.setattr(terminal, kind, lambda: display)


@pytest.fixture
def draws_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten to twenty drawings a second instead of two to four."""
    for name in ("_SHORTEST", "_LONGEST"):
        monkeypatch.setattr(monitor_module, name, getattr(monitor_module, name) / 5)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, draws_often: None) -> Watched:
    display = Watched()
    show_on(display, monkeypatch)
    monkeypatch.setattr(hardware, "busiest_device", lambda: torch.device("cpu"))  # though other tests used the GPU
    return display


def wait_for(true: Any) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_a_real_run_is_watched_from_its_first_step_to_its_last(watched: Watched) -> None:
    with OffloadEngine(TinyLM(), OffloadConfig(learning_rate=1e-3), device="cpu") as engine:
        with Monitor(engine.plan, engine.telemetry, total_steps=8, baseline_seconds=1e-3) as monitor:
            for batch in tokens(8):
                engine.backward(engine(batch))
                engine.step()
            engine.synchronize()
        newest = engine.telemetry.records[-1]
    kind, last = watched.shown[-1]
    assert (kind, last.state, last.steps_done) == ("close", "finished", 8)
    assert watched.shown[0][1].state == "waiting"
    assert last.loss_curve[-1] == (8, newest.loss)
    assert last.memory[0].used == newest.bytes["ram"]["process"]
    assert last.slowdown is not None
    assert last.slowdown.factor == pytest.approx((last.step_seconds or 0) / 1e-3)
    assert monitor.figures() == last
    assert not threads()


def test_the_plan_that_counts_is_the_one_that_the_engine_has_moved_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a run that begins with every block recomputed would be compared with too short a step."""
    seen: list[Any] = []
    monkeypatch.setattr(monitor_module, "compute_figures", lambda history, plan, **_: seen.append(plan))
    with OffloadEngine(TinyLM(), OffloadConfig(), device="cpu") as engine:
        monitor = Monitor(engine.plan, engine.telemetry)
        monitor.figures()
        engine.move(placed(engine.plan, [Placement(activations="checkpoint")] * len(engine.plan.layers)))
        monitor.figures()
        assert seen == [monitor.plan, engine.plan]
    assert seen[0] != seen[1]


def test_it_draws_while_the_run_goes_on_and_only_when_there_is_news(watched: Watched) -> None:
    with Monitor(total_steps=10) as monitor:
        assert threads() == ["offloadkit-monitor"]
        time.sleep(0.15)
        assert len(watched.shown) == 1, "nothing new was drawn"
        monitor.telemetry.add(record(1))
        wait_for(lambda: len(watched.shown) == 2)
        assert watched.shown[-1][1].steps_done == 1
    assert not threads()


def test_two_to_four_drawings_a_second(watched: Watched) -> None:
    """The fixture makes it ten to twenty."""
    with Monitor() as monitor:
        for step in range(1, 161):
            monitor.telemetry.add(record(step))
            time.sleep(0.0025)
        number = len(watched.shown) - 1
    assert 3 <= number <= 9, number


def test_the_training_thread_only_keeps_the_record(watched: Watched) -> None:
    with Monitor() as monitor:
        seconds = []
        for _ in range(20):
            began = time.thread_time()
            for step in range(1, 101):
                monitor.telemetry.add(record(step))
            seconds.append((time.thread_time() - began) / 100)
        assert min(seconds) < 5e-5


def test_a_display_that_breaks_is_named_once_and_the_training_goes_on(
    watched: Watched, capsys: pytest.CaptureFixture[str]
) -> None:
    watched.fails = True
    with Monitor() as monitor:
        monitor.telemetry.add(record(1))
        wait_for(lambda: len(watched.shown) == 2)
        monitor.telemetry.add(record(2))
        time.sleep(0.15)
    assert [kind for kind, _ in watched.shown] == ["open", "update"]
    said = capsys.readouterr().err
    assert said.count("drawing has stopped, because of ZeroDivisionError: a display that breaks") == 1
    assert "Training continues" in said
    assert monitor.figures().steps_done == 2


@pytest.mark.parametrize("moment", ["open", "close"])
def test_a_display_that_breaks_at_either_end_harms_nobody(
    moment: str, watched: Watched, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(figures: Figures) -> None:
        raise OSError("no display")

    monkeypatch.setattr(watched, moment, breaks)
    with Monitor() as monitor:
        monitor.telemetry.add(record(1))
    assert "because of OSError: no display" in capsys.readouterr().err
    assert not threads()


def test_a_monitor_closed_in_mid_run_hears_no_more(watched: Watched) -> None:
    monitor = Monitor().start()
    monitor.telemetry.add(record(1))
    monitor.close()
    monitor.close()
    monitor.telemetry.add(record(2))
    assert monitor.figures().steps_done == 1
    assert monitor.start() is monitor
    assert not threads()
    assert [kind for kind, _ in watched.shown].count("close") == 1


def test_a_loop_of_ones_own_has_a_predicted_slowdown_and_a_budget(watched: Watched) -> None:
    config = OffloadConfig(learning_rate=1e-3, ram="900GiB")
    with (
        OffloadEngine(TinyLM(), config, device="cpu") as engine,
        Monitor(engine.plan, engine.telemetry, total_steps=8),
    ):
        for batch in tokens(8):
            engine.backward(engine(batch))
            engine.step()
        engine.synchronize()
    first, last = watched.shown[0][1], watched.shown[-1][1]
    assert [tier.name for tier in first.memory] == ["RAM"]
    assert first.memory[0].budget == last.memory[0].budget == 900 * GIB
    assert not first.memory[0].planned_whole
    assert last.memory[0].planned_whole  # since the first window
    assert last.slowdown is not None
    assert (last.slowdown.baseline, last.slowdown.is_planned) == ("predicted", False)
    assert words.slowdown(last) == "", "without a GPU nothing is offloaded"


def test_without_a_wish_the_budget_is_what_the_process_has_and_what_is_free(watched: Watched) -> None:
    with Monitor() as monitor:
        monitor.telemetry.add(record(1, bytes={"ram": {"process": GIB}}))
        free = hardware.process_ram_bytes() + hardware.ram_available_bytes()
        (ram,) = monitor.figures().memory
    assert ram.budget == pytest.approx(free, rel=0.1)


def test_a_plan_with_a_machine_is_not_measured_for(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "here", lambda: pytest.fail("the plan knows its machine"))
    made = make_plan([shape("block.0", 1 << 20)], OffloadConfig(), hardware=H200)
    with Monitor(made):
        pass


def test_a_machine_that_will_not_be_looked_at_is_done_without(
    watched: Watched, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks() -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Machine, "here", breaks)
    with Monitor() as monitor:
        monitor.telemetry.add(record(1))
    assert "predicted slowdown are missing, because of RuntimeError: CUDA error" in capsys.readouterr().err
    assert monitor.figures().steps_done == 1


def test_a_monitor_that_is_closed_before_the_end_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with Monitor(total_steps=30) as monitor:
        for step in range(1, 16):
            monitor.telemetry.add(record(step))
    assert monitor.figures().state == "closed"
    assert capsys.readouterr().out.startswith("closed at step 15 of 30\n")


def test_two_monitors_of_one_run(watched: Watched) -> None:
    with Monitor() as first, Monitor(telemetry=first.telemetry) as second:
        first.telemetry.add(record(1))
        assert len(threads()) == 2
    assert first.figures().steps_done == second.figures().steps_done == 1
    assert not threads()


def test_a_failing_run_is_shown_as_failed(watched: Watched) -> None:
    with pytest.raises(KeyError), Monitor():
        raise KeyError("the data")
    assert watched.shown[-1][1].state == "failed"
    assert not threads()


def test_ten_runs_leave_no_thread_and_no_subscriber(watched: Watched) -> None:
    telemetry, monitors = Telemetry(), list[Monitor]()
    for step in range(10):
        with Monitor(telemetry=telemetry) as monitor:
            telemetry.add(record(step + 1))
        monitors.append(monitor)
    assert not threads()
    assert [monitor.figures().steps_done for monitor in monitors] == [*range(1, 11)]


def test_stopping_is_asked_for_and_shown(watched: Watched) -> None:
    with Monitor() as monitor:
        assert not monitor.stop_requested
        monitor.telemetry.add(record(1))
        monitor.request_stop()
        assert monitor.stop_requested
        wait_for(lambda: watched.shown[-1][1].state == "stopping")
    assert watched.shown[-1][1].state == "stopped"


def test_a_loop_that_never_asks_is_told_apart(watched: Watched) -> None:
    with Monitor() as monitor:
        for step in range(1, 5):
            monitor.telemetry.add(record(step))
        wait_for(lambda: watched.is_polled == [False])
        assert not monitor.stop_requested
        monitor.telemetry.add(record(5))
        wait_for(lambda: watched.is_polled == [False, True])


@pytest.fixture
def interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.05)


@pytest.mark.usefixtures("interrupts", "watched")
def test_an_interrupt_finishes_the_step_and_a_second_one_breaks_off() -> None:
    monitor = Monitor(display="none")

    def run() -> None:
        with monitor:
            assert not monitor.stop_requested
            interrupt()
            assert monitor.stop_requested
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        run()
    assert monitor.figures().state == "stopped"


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_of_a_loop_that_never_asks_breaks_it_off() -> None:
    def run() -> None:
        with Monitor(display="none"):
            interrupt()

    with pytest.raises(KeyboardInterrupt):
        run()


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_reaches_both_of_two_monitors() -> None:
    with Monitor(display="none") as first, Monitor(display="none") as second:
        assert not first.stop_requested
        assert not second.stop_requested
        interrupt()
        assert first.stop_requested
        assert second.stop_requested


@pytest.mark.usefixtures("interrupts")
def test_on_another_thread_interrupts_are_left_alone() -> None:
    def run() -> None:
        with Monitor(display="none") as monitor:
            assert not monitor.stop_requested
            found.append(signal.getsignal(signal.SIGINT))

    found: list[Any] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"plan": TinyLM()}, "plan must be a Plan, as engine.plan is, or None; got a TinyLM: Monitor\\(engine.plan"),
        ({"telemetry": "log"}, "telemetry must be a Telemetry, as engine.telemetry is, or None; got a str"),
        ({"total_steps": True}, "total_steps must be a whole number >= 1"),
        ({"baseline_seconds": "x"}, "baseline_seconds must be a positive number, or None: 'x'"),
        ({"baseline_seconds": True}, "baseline_seconds must be a positive number"),
        ({"display": "browser"}, "display must be one of 'auto', 'notebook', 'terminal', 'none', got 'browser'"),
        ({"total_steps": 0}, "total_steps must be a whole number >= 1"),
        ({"total_steps": 2.5}, "total_steps must be a whole number >= 1"),
        ({"baseline_seconds": -1.0}, "baseline_seconds must be a positive number"),
        ({"baseline_seconds": float("nan")}, "baseline_seconds must be a positive number"),
    ],
)
def test_arguments_without_a_meaning_are_refused(arguments: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Monitor(**arguments)


@pytest.mark.usefixtures("draws_often")
def test_without_a_terminal_there_are_lines_and_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    with Monitor(total_steps=4, baseline_seconds=0.5) as monitor:
        monitor.telemetry.padding_share = 0.25
        for step in range(1, 5):
            monitor.telemetry.add(record(step))
        time.sleep(0.15)
    lines = capsys.readouterr().out.splitlines()
    begin = "step 4 of 4  loss 1  1 s a step  640 tokens/s (25% is padding)  slowdown 2.00× (measured baseline)"
    assert lines[0].startswith(begin)
    assert lines[1].startswith("finished: step 4 of 4")
    assert "\x1b" not in "".join(lines)


def test_a_notebook_display_outside_of_a_notebook_says_so_and_prints_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Monitor(display="notebook") as monitor:
        monitor.telemetry.add(record(1))
    said = capsys.readouterr()
    assert said.err.count("this is not a notebook; lines are printed at intervals instead") == 1
    assert "finished: step 1" in said.out


@pytest.mark.parametrize("kernel", [SimpleNamespace(), SimpleNamespace(shell_channel_thread=object())])
def test_without_ipywidgets_html_is_redrawn_in_place_and_says_how_to_stop(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, str, bool]] = []

    def publish(bundle: dict[str, str], *, raw: bool, display_id: str, update: bool = False) -> None:
        if display_id != switches:
            shown.append((bundle["text/html"], display_id, update))

    monkeypatch.setattr("IPython.display.display", publish)
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    monitor = Monitor(total_steps=2)
    display = NotebookDisplay(SimpleNamespace(kernel=kernel), monitor.request_stop)
    switches = f"{display._ident}s"
    display.open(monitor.figures())
    display.update(monitor.figures(), is_polled=True)
    display.update(monitor.figures(), is_polled=False)
    display.close(monitor.figures())
    assert [update for _, _, update in shown] == [False, True, True, True]
    assert len({ident for _, ident, _ in shown}) == 1
    said = [html for html, *_ in shown]
    assert all("interrupt the kernel" in html for html in said[:2])
    assert "does not ask for stop_requested" in said[2]
    assert "interrupt" not in said[3]


def test_a_logger_writes_above_the_view_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line written past the view would move the cursor, and leave a part of the last view above the next."""
    console = Console(record=True, width=90, force_terminal=True, file=io.StringIO())
    log = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(logging.root, "handlers", [*logging.root.handlers, log])
    before = log.stream
    show_on(TerminalDisplay(console), monkeypatch)
    with Monitor():
        assert log.stream is sys.stderr is not before
        logging.getLogger("some.library").warning("a warning of a library")
    assert log.stream is before
    assert "a warning of a library" in console.export_text()


@pytest.mark.usefixtures("draws_often")
def test_a_terminal_is_redrawn_and_keeps_the_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(record=True, width=90, force_terminal=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show_on(TerminalDisplay(console), monkeypatch)
    with Monitor(total_steps=3) as monitor:
        for step in range(1, 4):
            monitor.telemetry.add(record(step))
        time.sleep(0.15)
    text = console.export_text()
    assert "step 3 of 3  finished" in text
    assert "VRAM" in text
