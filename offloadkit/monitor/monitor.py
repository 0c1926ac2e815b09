"""`Monitor`: receives the record of each step, and draws on a thread of its own a few times a second."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, Protocol, Self

from offloadkit.errors import ConfigError
from offloadkit.monitor.figures import Figures, History, Machine, State
from offloadkit.monitor.figures import figures as compute_figures
from offloadkit.monitor.notebook import NotebookDisplay, running_shell
from offloadkit.planner import Plan
from offloadkit.stopping import Stop
from offloadkit.telemetry import StepRecord, Telemetry
from offloadkit.threads import Thread

DISPLAYS = ("auto", "notebook", "terminal", "none")
_SHORTEST, _LONGEST = 0.25, 0.5
"""Seconds between two drawings."""
_SHARE = 0.003
"""Fraction of a core's time that drawing may take, within the seconds above."""


class Display(Protocol):
    """Where figures are shown."""

    def open(self, figures: Figures) -> None: ...

    def update(self, figures: Figures, *, heeded: bool) -> None:
        """Args:
        heeded: whether the training loop asks for `stop_requested`.
        """

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

    It draws on a thread of its own; on the training thread it only stores each record. An error in drawing never
    reaches the training: the reason is printed once.

    Attributes:
        telemetry: the source of the records.
        plan, total_steps, baseline_seconds: may be set while it runs; None if not known.
        steps_before: steps of the run that were done before this attempt.
        machine: what this machine has, if the plan does not know it. Set it before `start`, or that finds it out.
        ranks: the newest record of each process, where several train the model.
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
            plan: the engine's; when that moves, the new one counts. If it knows no machine, the free memory of this
                machine is the budget, and the rate of its VRAM predicts the step without offloading. If that rate was
                never measured, `start` measures it in some hundredths of a second.
            telemetry: what the engine reports to; None makes one, which you pass to the engine.
            total_steps: how many steps there will be, to predict the time left.
            baseline_seconds: a measured step with everything in VRAM; None predicts it from what is measured here.
            display: "auto" uses the notebook or terminal it runs in, and elsewhere prints a line now and then.
                "none" shows nothing.

        Raises:
            ConfigError: an argument has no meaning.
        """
        _check(plan, telemetry, total_steps, baseline_seconds, display)
        self.plan, self.telemetry = plan, telemetry or Telemetry()
        self.total_steps, self.baseline_seconds = total_steps, baseline_seconds
        self.steps_before = 0
        self.ranks: dict[int, StepRecord] = {}
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
        """Whether to stop, by the button, an interrupt, SIGTERM or SIGHUP: finish, save and end.

        If a loop reads this after each step, the first signal only requests a stop; a second one stops at once.
        """
        return self.stop.requested

    @property
    def is_drawn(self) -> bool:
        """Whether it shows anything."""
        return self._wanted != "none"

    def request_stop(self) -> None:
        """Do what the button does. May be called on any thread."""
        self.stop.request()

    def start(self) -> Self:
        """Begin to show the run. Call it on the thread that trains."""
        if self._thread is None and not self._ended.is_set():
            self._unsubscribe = self.telemetry.subscribe(self._new.append)  # on the thread that trains: nothing else
            self.stop.catch_signals()
            if self.machine is None and Machine.of(self.plan) is None:
                try:
                    self.machine = Machine.here()
                except (OSError, RuntimeError) as error:
                    _say(f"budgets and a predicted slowdown are missing, because of {type(error).__name__}: {error}")
            self._try(self._open_display)
            self._thread = Thread(target=self._refresh, name="offloadkit-monitor", daemon=True)
            self._thread.start()
        return self

    def close(self, state: Literal["finished", "stopped", "failed"] | None = None) -> None:
        """Show the final state and leave a summary. Later calls do nothing.

        Args:
            state: how it ended. None means "stopped" if that was requested, "closed" if there were fewer steps than
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
        if state is None and self.stop.wished:
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
        """What is shown now, as numbers."""
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
            )

    def _present_state(self) -> State:
        if self._ended.is_set():
            return self._state
        if self.stop.wished:
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
            _say("this is no notebook; a line is printed now and then instead")
            return LogLines()
        return TerminalDisplay() if sys.stdout.isatty() else LogLines()

    def _refresh(self) -> None:
        """The drawing thread: draw when there is something new."""
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
            display.update(drawn, heeded=self.stop.heeded or self._history.num_steps < 3)

    def _try(self, draw: Callable[[], None]) -> None:
        """Draw. After an error, say it and draw nothing any more."""
        try:
            draw()
        except Exception as error:
            self._display = None
            _say(f"nothing is drawn any more, because of {type(error).__name__}: {error}")


def _check(plan: Any, telemetry: Any, total_steps: Any, baseline_seconds: Any, display: Any) -> None:
    """Raise `ConfigError` for the first argument without a meaning."""
    for name, value, kind in (("plan", plan, Plan), ("telemetry", telemetry, Telemetry)):
        if value is not None and not isinstance(value, kind):
            raise ConfigError(
                f"{name} must be a {kind.__name__}, as engine.{name} is, or None; got a {type(value).__name__}: "
                "Monitor(engine.plan, engine.telemetry)"
            )
    if display not in DISPLAYS:
        raise ConfigError(f"display must be one of {', '.join(map(repr, DISPLAYS))}, got {display!r}")
    if total_steps is not None and (type(total_steps) is not int or total_steps < 1):
        raise ConfigError(f"total_steps must be a whole number >= 1, or None where it is not known: {total_steps!r}")
    is_number = isinstance(baseline_seconds, int | float) and not isinstance(baseline_seconds, bool)
    if baseline_seconds is not None and not (is_number and 0 < baseline_seconds < float("inf")):
        raise ConfigError(f"baseline_seconds must be a positive number, or None: {baseline_seconds!r}")


def can_be_drawn() -> bool:
    """Whether there is a notebook or a terminal to draw in."""
    return running_shell() is not None or sys.stdout.isatty()


def _say(reason: str) -> None:
    """Print to stderr. A warning could be turned into an error, which would stop the training."""
    print(f"offloadkit.Monitor: {reason}. The training goes on.", file=sys.stderr, flush=True)
