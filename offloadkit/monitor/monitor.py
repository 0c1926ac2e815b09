"""Collects step records, and draws them on a separate thread a few times per second."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, Protocol, Self

from offloadkit.errors import ConfigError
from offloadkit.facts.shell import running_shell
from offloadkit.facts.stopping import Stop
from offloadkit.facts.telemetry import StepRecord, Telemetry
from offloadkit.facts.threads import Thread
from offloadkit.facts.units import kind_of
from offloadkit.monitor.figures import Figures, History, Machine, State
from offloadkit.monitor.figures import figures as compute_figures
from offloadkit.monitor.notebook import NotebookDisplay
from offloadkit.planner import Plan

DISPLAYS = ("auto", "notebook", "terminal", "none")
_SHORTEST, _LONGEST = 0.25, 0.5
"""Limits of the seconds between two drawings."""
_SHARE = 0.003
"""Fraction of a core's time for drawing, within these limits."""


class Display(Protocol):
    def open(self, figures: Figures) -> None: ...

    def update(self, figures: Figures, *, is_polled: bool) -> None:
        """`is_polled`: whether the training loop reads `stop_requested`."""

    def close(self, figures: Figures) -> None: ...


class Monitor:
    """Shows memory, time, slowdown and loss of a training run live, in a notebook or on a terminal.

    with Monitor(engine.plan, engine.telemetry, total_steps=1000) as monitor:
        for batch in batches:
            engine.backward(engine(**batch).loss)
            engine.step()
            if monitor.stop_requested:
                break
        engine.synchronize()

    A separate thread draws; the training thread only stores each record. Errors in drawing never reach the training
    loop: the reason is printed once.

    Attributes:
        telemetry: the source of the records.
        plan, total_steps, baseline_seconds: may be set during the run; None if unknown.
        steps_before: steps of the run before this attempt.
        machine: facts about the machine if the plan has none. `start` measures them unless they are set before.
        ranks: the newest record of each rank, with several ranks.
        stop: the request to stop, and the signal that made it.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        telemetry: Telemetry | None = None,
        *,
        total_steps: int | None = None,
        baseline_seconds: float | None = None,
        display: Literal["auto", "notebook", "terminal", "none"] = "auto",
    ) -> None:
        """
        Args:
            plan: the engine's plan, followed when the engine changes it. If it has no machine, the free memory is the
                budget, and VRAM's rate, measured if necessary, predicts the step without offloading.
            telemetry: the engine's telemetry; None creates one to pass to the engine.
            total_steps: number of steps, to predict the remaining time.
            baseline_seconds: a measured step with everything in VRAM; None predicts it from measurements of this run.
            display: "auto" uses the current notebook or terminal, and otherwise prints a line at intervals. "none"
                shows nothing.

        Raises:
            ConfigError: an argument is invalid.
        """
        _check(plan, telemetry, total_steps, baseline_seconds, display)
        self.plan, self.telemetry = plan, telemetry or Telemetry()
        self.total_steps, self.baseline_seconds = total_steps, baseline_seconds
        self.steps_before = 0
        self.ranks: dict[int, StepRecord] = {}
        self._evaluations: list[tuple[int, float]] = []
        self._epoch: tuple[float | None, int | None] = None, None
        self._wanted = display
        self._display: Display | None = None
        self.stop = Stop()
        self._new: deque[StepRecord] = deque()
        self._history = History()
        self.machine: Machine | None = None
        self._lock = threading.Lock()
        self._state: State = "waiting"
        self._ended = threading.Event()
        self._thread: Thread | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    # ---- for the training loop -----------------------------------------------------------------------------------

    @property
    def stop_requested(self) -> bool:
        """Whether the button, an interrupt, SIGTERM or SIGHUP requested a stop: finish, save and end.

        If a loop reads this after each step, the first signal only requests a stop; a second one stops at once.
        """
        return self.stop.requested

    @property
    def is_drawn(self) -> bool:
        """Whether the monitor shows anything."""
        return self._wanted != "none"

    def request_stop(self) -> None:
        """Request a stop, as the button does. Thread-safe."""
        self.stop.request()

    def evaluated(self, step: int, loss: float) -> None:
        """Show the evaluation loss after this step beside the training loss."""
        self._evaluations.append((step, loss))

    def reached(self, epoch: float, num_epochs: int | None = None) -> None:
        """Show that this many epochs are done, of `num_epochs`."""
        self._epoch = epoch, num_epochs

    def start(self) -> Self:
        """Start showing the run. Call this on the training thread."""
        if self._thread is None and not self._ended.is_set():
            self._unsubscribe = self.telemetry.subscribe(self._new.append)  # the only work on the training thread
            self.stop.catch_signals()
            if self.machine is None and Machine.of(self.plan) is None:
                try:
                    self.machine = Machine.here()
                except (OSError, RuntimeError) as error:
                    _say(f"budgets and the predicted slowdown are missing, because of {type(error).__name__}: {error}")
            self._try(self._open_display)
            self._thread = Thread(target=self._refresh, name="offloadkit-monitor", daemon=True)
            self._thread.start()
        return self

    def close(self, state: Literal["finished", "stopped", "failed"] | None = None) -> None:
        """Show the final state and a summary. Later calls do nothing.

        Args:
            state: how training ended. None: "stopped" if a stop was requested, "closed" after fewer steps than
                `total_steps`, else "finished".
        """
        if self._ended.is_set():
            return
        self._ended.set()
        self._unsubscribe()
        self.stop.let_signals_go()
        if self._thread is not None:
            self._thread.join(timeout=5)
        self._state = "finished" if state is None else state
        if state is None and self.stop.is_requested:
            self._state = "stopped"
        elif state is None and self.figures().steps_done < (self.total_steps or 0):
            self._state = "closed"
        display, self._display = self._display, None
        if display is not None:
            self._try(lambda: display.close(self.figures()))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.close("stopped" if interrupted else "failed" if kind is not None else None)

    # ---- drawing -------------------------------------------------------------------------------------------------

    def figures(self) -> Figures:
        """The current figures."""
        plan: Plan | None = self.telemetry.plan if self.telemetry.moves else self.plan
        with self._lock:
            while self._new:
                self._history.add(self._new.popleft())
            return compute_figures(
                self._history,
                plan,
                total_steps=self.total_steps,
                machine=self.machine,
                baseline_seconds=self.baseline_seconds,
                state=self._present_state(),
                ranks=dict(self.ranks),
                padding_share=self.telemetry.padding_share,
                evaluations=[each for each in self._evaluations if math.isfinite(each[1])],
                epoch=self._epoch[0],
                num_epochs=self._epoch[1],
            )

    def _present_state(self) -> State:
        if self._ended.is_set():
            return self._state
        if self.stop.is_requested:
            return "stopping"
        return "running" if self._history.num_steps else "waiting"

    def _open_display(self) -> None:
        self._display = self._chosen_display()
        if self._display is not None:
            self._display.open(self.figures())

    def _chosen_display(self) -> Display | None:
        if self._wanted == "none":
            return None
        from offloadkit.monitor.terminal import LogLines, TerminalDisplay

        shell = running_shell()
        if shell is not None and self._wanted in ("auto", "notebook"):
            return NotebookDisplay(shell, self.stop.request)
        if self._wanted == "notebook":
            _say("this is not a notebook; lines are printed at intervals instead")
            return LogLines()
        return TerminalDisplay() if sys.stdout.isatty() else LogLines()

    def _refresh(self) -> None:
        pause, shown = _SHORTEST, self._present_state()
        while not self._ended.wait(pause):
            if not self._new and self._present_state() == shown:
                continue
            began = time.thread_time()
            self._try(self._draw)
            shown = self._present_state()
            pause = min(_LONGEST, max(_SHORTEST, (time.thread_time() - began) / _SHARE))

    def _draw(self) -> None:
        drawn, display = self.figures(), self._display
        if display is not None:
            display.update(drawn, is_polled=self.stop.is_polled or self._history.num_steps < 3)

    def _try(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except Exception as error:
            self._display = None
            _say(f"drawing has stopped, because of {type(error).__name__}: {error}")


def _check(plan: Any, telemetry: Any, total_steps: Any, baseline_seconds: Any, display: Any) -> None:
    for name, value, kind in (("plan", plan, Plan), ("telemetry", telemetry, Telemetry)):
        if value is not None and not isinstance(value, kind):
            raise ConfigError(
                f"{name} must be a {kind.__name__}, as engine.{name} is, or None; got {kind_of(value)}: "
                "Monitor(engine.plan, engine.telemetry)"
            )
    if display not in DISPLAYS:
        raise ConfigError(f"display must be one of {', '.join(map(repr, DISPLAYS))}, got {display!r}")
    if total_steps is not None and (type(total_steps) is not int or total_steps < 1):
        raise ConfigError(f"total_steps must be a whole number >= 1, or None if unknown: {total_steps!r}")
    is_number = isinstance(baseline_seconds, int | float) and not isinstance(baseline_seconds, bool)
    if baseline_seconds is not None and not (is_number and 0 < baseline_seconds < float("inf")):
        raise ConfigError(f"baseline_seconds must be a positive number, or None: {baseline_seconds!r}")


def can_be_drawn() -> bool:
    return running_shell() is not None or sys.stdout.isatty()


def _say(reason: str) -> None:
    """Print to stderr: a filter can turn a warning into an error, which would stop training."""
    print(f"offloadkit.Monitor: {reason}. Training continues.", file=sys.stderr, flush=True)
