"""What happened in each step, as plain records. Widgets draw them, the demo sums them up, a log holds them as JSON."""

from __future__ import annotations

import json
import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from offloadkit.errors import OutputError
from offloadkit.files import path_of

Peaks = dict[str, dict[str, int]]
"""Highest bytes that the process had, by phase of a run (see `planner.phases`) and tier, "ram" and "vram"."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, read after it has happened.

    `seconds` has these phases. They overlap, so they do not add up to "step". One that did not occur is left out.

    - "step": wall time from one update to the next.
    - "forward", "backward": on the device.
    - "forward_wait", "backward_wait": parts of these in which the device waited for the CPU: for a layer that was not
      stepped yet, or for room for gradients.
    - "forward_bus_wait", "backward_bus_wait": parts in which it waited for a copy.
    - "forward_gpu_step_wait": the part in which it waited for a layer that the GPU steps.
    - "gradient_wait": from step() until the last gradient was in RAM.
    - "gradient_tail": from the end of backward on the device until the last gradient was in RAM.
    - "norm": the gradient norm.
    - "cpu_step": the optimizer step on the CPU, and sending the weights.
    - "gpu_step": the optimizer step on the device, from the norm to the last kernel, with the copies it waits for.
    - "h2d", "d2h": copies to and from the device, those of the last update included: they ran beside this forward.
      Where several streams copied at the same time, it counts once.
    - "other": wall time between the end of backward and the next forward (data loading, logging).
    """

    step: int
    loss: float
    """Sum of the micro-batches' losses, each divided by their number; of one rank's, where there are several."""
    num_tokens: int | None
    """Input and label positions, padding included; None if the batch has neither."""
    grad_norm: float | None
    """Global norm before clipping; NaN or Inf if the step was skipped."""
    learning_rate: float
    skipped: bool
    seconds: dict[str, float]
    bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    """By tier ("vram", "ram") and category. Categories that begin with "process" are measured."""
    moved: dict[str, int] = field(default_factory=dict)
    """Bytes that were copied in the seconds of "h2d" and "d2h", and the memory traffic of "cpu_step"."""
    received: dict[str, int] = field(default_factory=dict)
    """Bytes that this rank received from the others, by kind: "exchange" of gradients, "gather" of the last update's
    new weights, sums of the "norm", and "agreement". {} with one rank."""

    def without_waits(self, phase: str) -> float:
        """Seconds of "forward" or "backward" without those in which the device waited."""
        named = (number for name, number in self.seconds.items() if name.startswith(phase) and name.endswith("wait"))
        return max(0.0, self.seconds.get(phase, 0.0) - sum(named))

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens over the wall time of the step."""
        seconds = self.seconds.get("step")
        return self.num_tokens / seconds if self.num_tokens and seconds else None


@dataclass(frozen=True)
class Move:
    """A change of the plan in mid-run."""

    step: int
    """Updates before it."""
    why: str
    before: dict[str, int]
    """Planned bytes by tier."""
    after: dict[str, int]
    seconds: float
    """How long training stood still."""


STEPS_FILE = "steps.jsonl"
"""In a run's output folder: the record of each step, one JSON object a line."""


class Telemetry:
    """Keeps the newest records, hands each to its subscribers and appends it to a JSON-lines log.

    Attributes:
        records: of the newest steps.
        plan: the engine's, which a move changes; None before there is an engine.
        moves: changes of the plan.
        peaks: measured peaks of memory by phase. To measure them, engine and Trainer let torch's peak statistics start
            anew where a phase begins or ends.
    """

    def __init__(self, log_path: str | Path | None = None, keep: int = 1_000) -> None:
        """
        Raises:
            OutputError: the log cannot be written.
        """
        self.records: deque[StepRecord] = deque(maxlen=keep)
        self.peaks: Peaks = {}
        self.plan: Any = None
        self.moves: list[Move] = []
        self._subscribers: list[Callable[[StepRecord], None]] = []
        self._log_path = None if log_path is None else path_of(log_path, "log_path")
        self._empties_log = False
        self._log = self._opened()

    def _opened(self) -> TextIO | None:
        if self._log_path is None:
            return None
        try:
            if self._empties_log:
                Path(self._log_path).write_text("")
            self._empties_log = False
            return Path(self._log_path).open("a", encoding="utf-8")
        except OSError as error:
            why = f"cannot write the telemetry log {self._log_path}: {error.strerror}; choose another path"
            raise OutputError(why) from error

    def log_to(self, path: str | Path, *, anew: bool) -> None:
        """Append every later record to a log, if there is none yet. It is opened by the first record.

        Args:
            anew: whether that empties it.
        """
        if self._log_path is None:
            self._log_path, self._empties_log = Path(path), anew

    def subscribe(self, listener: Callable[[StepRecord], None]) -> Callable[[], None]:
        """Call `listener` with every later record, on the thread that trains. Returns a function that ends this."""
        self._subscribers.append(listener)
        return lambda: self._subscribers.remove(listener) if listener in self._subscribers else None

    def add(self, record: StepRecord) -> None:
        """Store the record of a finished step, log it and pass it to the subscribers."""
        self.records.append(record)
        self._log = self._log or self._opened()
        if self._log is not None:
            line = asdict(record) | {"tokens_per_second": record.tokens_per_second}
            try:
                self._log.write(json.dumps(_finite(line)) + "\n")
                self._log.flush()
            except OSError as error:
                self._give_up(error)
        for listener in list(self._subscribers):
            listener(record)

    def _give_up(self, error: OSError) -> None:
        """End the log with a warning; training continues."""
        warnings.warn(
            f"the telemetry log {self._log_path} could not be written at step {self.records[-1].step} and ends there "
            f"({error.strerror}); training goes on",
            RuntimeWarning,
            stacklevel=3,
        )
        self._log_path = None
        log, self._log = self._log, None
        with suppress(OSError):  # closing writes what is left
            if log is not None:
                log.close()

    def close(self) -> None:
        """Close the log; a later record opens it again. Where that fails, a warning says so."""
        log, self._log = self._log, None
        if log is None:
            return
        try:
            log.close()
        except OSError as error:
            warnings.warn(
                f"the telemetry log {self._log_path} could not be closed ({error.strerror}): its last lines may be "
                "missing",
                RuntimeWarning,
                stacklevel=2,
            )


def mean_seconds(records: Sequence[StepRecord]) -> dict[str, float]:
    """Mean seconds of a step by phase, without the first tenth of the steps, which warm up."""
    settled = records[len(records) // 10 :]
    phases = dict.fromkeys(phase for record in settled for phase in record.seconds)
    return {phase: sum(record.seconds.get(phase, 0.0) for record in settled) / len(settled) for phase in phases}


def _finite(value: Any) -> Any:
    """The value with null for NaN and Inf, which strict JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
