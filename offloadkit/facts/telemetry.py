"""Per-step records for widgets, reports and the JSON-lines log."""

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
from offloadkit.facts.files import path_of

Peaks = dict[str, dict[str, int]]
"""Peak bytes of the process by phase (see `planner.phases`) and tier ("ram", "vram")."""


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    Phases in `seconds` overlap, so their sum is not "step". Phases that did not occur are missing.

    - "step": wall time from one update to the next.
    - "forward", "backward": on the device.
    - "forward_wait", "backward_wait": device time inside the phase spent waiting for the CPU: for a layer's CPU step or
      for room for gradients.
    - "forward_bus_wait", "backward_bus_wait": device time inside the phase spent waiting for copies.
    - "forward_gpu_step_wait": device time inside forward spent waiting for a layer's GPU step.
    - "gradient_wait": from step() until the last gradient was in RAM.
    - "gradient_tail": from the end of backward on the device until the last gradient was in RAM.
    - "norm": the gradient norm.
    - "cpu_step": the optimizer step on the CPU, including sending the weights.
    - "gpu_step": the optimizer step on the device, from the norm to the last kernel, including waits for copies.
    - "h2d", "d2h": copies to and from the device, including the last update's copies, which overlap this forward. Time
      during which several streams copy counts once.
    - "other": wall time between the end of backward and the next forward (data loading, logging).
    """

    step: int
    loss: float
    """Mean loss of this rank's micro-batches."""
    num_tokens: int | None
    """Number of input and label positions, including padding; None if the batch has neither."""
    grad_norm: float | None
    """Global norm before clipping; NaN or Inf if the step was skipped."""
    learning_rate: float
    skipped: bool
    seconds: dict[str, float]
    bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes by tier ("vram", "ram") and category. Categories that begin with "process" are measured."""
    moved: dict[str, int] = field(default_factory=dict)
    """Bytes copied during "h2d" and "d2h", and the memory traffic of "cpu_step"."""
    received: dict[str, int] = field(default_factory=dict)
    """Bytes this rank received by kind: "exchange" (gradients), "gather" (the last update's new weights), "norm",
    "matrices" (updates of Muon), and "agreement". Empty at world size 1."""

    def without_waits(self, phase: str) -> float:
        """Seconds of "forward" or "backward" without device waits."""
        named = (number for name, number in self.seconds.items() if name.startswith(phase) and name.endswith("wait"))
        return max(0.0, self.seconds.get(phase, 0.0) - sum(named))

    @property
    def tokens_per_second(self) -> float | None:
        seconds = self.seconds.get("step")
        return self.num_tokens / seconds if self.num_tokens and seconds else None


@dataclass(frozen=True)
class Move:
    step: int
    """Number of updates before the change."""
    why: str
    before: dict[str, int]
    after: dict[str, int]
    seconds: float
    """Seconds during which training paused."""


STEPS_FILE = "steps.jsonl"
"""Name of the log in an output folder: one JSON object per step and line."""


class Telemetry:
    """Keeps the newest records, passes each to subscribers and appends it to a JSON-lines log.

    Attributes:
        records: the newest steps.
        plan: the engine's current plan; None before the engine exists.
        moves: changes of the plan.
        generation_moves: seconds of bringing weights to VRAM before a generation, and of leaving after it, in turn.
        padding_share: padding as a share of the training's tokens; None: unknown.
        peaks: measured memory peaks by phase. To measure them, the engine and the Trainer reset torch's peak statistics
            at phase boundaries.
    """

    def __init__(self, log_path: str | Path | None = None, keep: int = 1_000) -> None:
        """Raises `OutputError` if the log cannot be written."""
        self.records: deque[StepRecord] = deque(maxlen=keep)
        self.peaks: Peaks = {}
        self.plan: Any = None
        self.padding_share: float | None = None
        self.moves: list[Move] = []
        self.generation_moves: deque[float] = deque(maxlen=keep)
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
        """Append later records to a log, unless a log is set already. The first record opens the file; `anew` truncates
        it.
        """
        if self._log_path is None:
            self._log_path, self._empties_log = Path(path), anew

    def subscribe(self, listener: Callable[[StepRecord], None]) -> Callable[[], None]:
        """Call `listener` with every later record on the training thread. Returns a function that unsubscribes it."""
        self._subscribers.append(listener)
        return lambda: self._subscribers.remove(listener) if listener in self._subscribers else None

    def add(self, record: StepRecord) -> None:
        """Store, log and publish the record of a finished step."""
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
        warnings.warn(
            f"the telemetry log {self._log_path} could not be written at step {self.records[-1].step} and ends there "
            f"({error.strerror}); training continues",
            RuntimeWarning,
            stacklevel=3,
        )
        self._log_path = None
        log, self._log = self._log, None
        with suppress(OSError):  # closing flushes the buffer
            if log is not None:
                log.close()

    def close(self) -> None:
        """Close the log; a later record reopens it. A failure only warns."""
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
    """Mean seconds per step by phase."""
    phases = dict.fromkeys(phase for record in records for phase in record.seconds)
    return {phase: sum(record.seconds.get(phase, 0.0) for record in records) / len(records) for phase in phases}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
