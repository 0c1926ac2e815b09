"""What happened in each step, as plain records. Drawn by widgets, summed up by the demo, written as JSON lines."""

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


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, read after it has happened.

    `seconds` by phase: "step" (wall time from boundary to boundary), "forward" and "backward" (on the device),
    "gradient_wait" (from step() until the last gradient was in RAM), "norm", "cpu_step" (AdamW and sending weights),
    "gpu_step" (AdamW on the device, from when the norm is known to the last kernel, with the copies it waits for),
    "other" (wall time between backward's end and the next forward: data loading, logging), "h2d" and "d2h" (copies on
    the bus), "gradient_tail" (from backward's end on the device until the last gradient was in RAM). Of forward and
    backward the device stood still for "forward_wait" (a layer that the CPU had not stepped yet), "backward_wait" (room
    for gradients that the CPU had not added yet), "forward_bus_wait" and "backward_bus_wait" (a copy on its way), and
    "forward_gpu_step_wait" (a layer that the GPU steps); one that did not occur is left out. Phases overlap: they do
    not add up to "step".
    """

    step: int
    loss: float
    """Sum of what backward was called with, each micro-batch's loss already divided by their number."""
    num_tokens: int | None
    """Input and label positions, padding included; None where the batch has neither."""
    grad_norm: float | None
    """Global, before clipping; NaN or Inf where the step was skipped."""
    learning_rate: float
    skipped: bool
    seconds: dict[str, float]
    bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    """By tier ("vram", "ram") and category; measured ones begin with "process"."""

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput over the whole step."""
        seconds = self.seconds.get("step")
        return self.num_tokens / seconds if self.num_tokens and seconds else None


class Telemetry:
    """Keeps the newest records, hands each to its subscribers and appends it to a JSON-lines log."""

    def __init__(self, log_path: str | Path | None = None, keep: int = 10_000) -> None:
        """
        Raises:
            OutputError: the log cannot be written.
        """
        self.records: deque[StepRecord] = deque(maxlen=keep)
        self._subscribers: list[Callable[[StepRecord], None]] = []
        self._log_path, self._log = log_path, self._opened(log_path)

    @staticmethod
    def _opened(log_path: str | Path | None) -> TextIO | None:
        if log_path is None:
            return None
        try:
            return Path(log_path).open("a", encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"cannot write the telemetry log {log_path}: {error.strerror}; choose another path"
            ) from error

    def subscribe(self, listener: Callable[[StepRecord], None]) -> Callable[[], None]:
        """Call `listener` with every later record, on the thread that trains; returns what ends that."""
        self._subscribers.append(listener)
        return lambda: self._subscribers.remove(listener) if listener in self._subscribers else None

    def add(self, record: StepRecord) -> None:
        """Take a finished step."""
        self.records.append(record)
        self._log = self._log or self._opened(self._log_path)
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
        """The log ends here, and training goes on."""
        warnings.warn(
            f"the telemetry log {self._log_path} could not be written at step {self.records[-1].step} and ends there "
            f"({error.strerror}); training goes on",
            RuntimeWarning,
            stacklevel=3,
        )
        self._log_path = None
        with suppress(OSError):  # closing writes what is left
            self.close()
        self._log = None

    def close(self) -> None:
        """Close the log; a later record opens it again."""
        if self._log is not None:
            self._log.close()
            self._log = None


def mean_seconds(records: Sequence[StepRecord]) -> dict[str, float]:
    """Mean seconds of a step by phase, the first tenth of the steps left out: they warm up."""
    settled = records[len(records) // 10 :]
    phases = dict.fromkeys(phase for record in settled for phase in record.seconds)
    return {phase: sum(record.seconds.get(phase, 0.0) for record in settled) / len(settled) for phase in phases}


def _finite(value: Any) -> Any:
    """Strict JSON has neither NaN nor Inf: null stands for them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
