"""Step records: times, loss and norm of each step, and warnings about steps that were not applied.

A record is made when all events of its step are over, one or two steps later, so that timing never blocks.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from offloadkit.device import trace
from offloadkit.device.streams import BusyTime, Event, record_compute, seconds_of_any
from offloadkit.errors import NonFiniteGradientError
from offloadkit.facts import hardware
from offloadkit.facts.telemetry import StepRecord, Telemetry
from offloadkit.offload.update import Update
from offloadkit.planner import Plan

LOOK = "Look at the data and the loss of that step, lower the learning rate"

_COPIES = ("h2d", "d2h")


@dataclass
class _Window:
    """Measurements of one accumulation window.

    Attributes:
        began, ended: `time.perf_counter()`; `last_backward` too.
        forwards, backwards: (start, end) events.
        losses: a scalar in RAM for each micro-batch.
        other_seconds: wall seconds between a backward and the next forward.
        busy: waits and copies of the compute stream, by name.
        received: bytes from other ranks, by kind, without the norm.
    """

    began: float
    forwards: list[tuple[Event, Event]] = field(default_factory=list)
    backwards: list[tuple[Event, Event]] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    num_tokens: int | None = None
    other_seconds: float = 0.0
    last_backward: float | None = None
    ended: float = 0.0
    busy: list[tuple[str, BusyTime]] = field(default_factory=list)
    received: dict[str, int] = field(default_factory=dict)
    learning_rate: float = 0.0
    update: Update | None = None


class StepRecords:
    """Marks the phases of each step, adds finished steps to the telemetry, and reports steps that were not applied.

    Only `wait` blocks.
    """

    def __init__(
        self, telemetry: Telemetry, plan: Plan, device: torch.device, on_nonfinite: str, num_ranks: int = 1
    ) -> None:
        """`num_ranks`: number of ranks with equally many micro-batches; multiplies this rank's loss."""
        self._telemetry, self.plan, self._device, self._on_nonfinite = telemetry, plan, device, on_nonfinite
        self._num_ranks = num_ranks
        self._current = _Window(time.perf_counter())
        self._ended: deque[_Window] = deque()
        """Windows without a record yet."""
        self._unreported: deque[Update] = deque()
        """Updates that may turn out to be skipped."""
        self._beside: list[tuple[str, BusyTime]] = []
        """Copies of the last recorded window's update, which runs concurrently with the next window's forward."""
        self._context_bytes: int | None = None

    @contextmanager
    def forward(self, num_tokens: int | None) -> Iterator[None]:
        """While open, forward runs over `num_tokens` positions. A failed forward is not recorded."""
        now = self._current
        if now.last_backward is not None:
            now.other_seconds += time.perf_counter() - now.last_backward
            now.last_backward = None
        _traced("forward")
        began = record_compute(self._device, timing=True)
        yield
        if num_tokens is not None:
            self._current.num_tokens = (self._current.num_tokens or 0) + num_tokens
        _traced("")
        self._current.forwards.append((began, record_compute(self._device, timing=True)))

    @contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """While open, backward of `loss` runs: a scalar, this micro-batch's share. Its value is copied to RAM."""
        copy = torch.empty((), dtype=torch.float32, pin_memory=self._device.type == "cuda")
        copy.copy_(loss.detach().reshape(()), non_blocking=True)
        self._current.losses.append(copy)
        _traced("backward")
        began = record_compute(self._device, timing=True)
        yield
        _traced("")
        self._current.backwards.append((began, record_compute(self._device, timing=True)))
        self._current.last_backward = time.perf_counter()

    def drop_window(self) -> None:
        """Remove the loss and tokens of dropped gradients from the record; their seconds stay."""
        if self._current.losses:
            self._current.losses.clear()
            self._current.num_tokens = None

    def end_window(
        self, update: Update, learning_rate: float, busy: list[tuple[str, BusyTime]], received: dict[str, int]
    ) -> None:
        """End the window with `update`. `busy` and `received` count since the last window."""
        now = self._current
        now.update, now.learning_rate, now.busy, now.received = update, learning_rate, busy, received
        now.ended = time.perf_counter()
        self._ended.append(now)
        self._unreported.append(update)
        self._current = _Window(now.ended, last_backward=now.ended)

    def forget(self) -> None:
        """Release the updates, and with them the layers."""
        self._ended.clear()
        self._unreported.clear()
        self._beside.clear()

    def wait(self) -> None:
        """Block until the timings of all ended windows are available to `read`."""
        for window in self._ended:
            assert window.update is not None
            ends: list[Event | BusyTime] = [busy for _, busy in (*window.busy, *window.update.busy)]
            ends += [end for _, end in window.forwards + window.backwards]
            for end in ends:
                end.synchronize()  # wait: timings

    def read(self) -> None:
        """Record finished steps, and report steps that were not applied.

        Raises:
            NonFiniteGradientError: unless `on_nonfinite` is "skip", for the oldest such step not reported yet.
        """
        while self._ended and _is_finished(self._ended[0]):
            window = self._ended.popleft()
            record = _record(window, self._beside, self._memory(), self._num_ranks)
            assert window.update is not None
            self._beside = window.update.busy
            self._telemetry.add(record)
        while self._unreported and self._unreported[0].norm_known.is_set():
            update = self._unreported.popleft()
            if update.skipped and not update.scale_may_fall:
                self._report(update)

    def _report(self, update: Update) -> None:
        names = ", ".join(update.nonfinite[:3]) + (" and others" if len(update.nonfinite) > 3 else "")
        message = f"the gradient norm of step {update.number} is {update.norm} (from {names}): the step was not applied"
        if self._on_nonfinite == "skip":
            warnings.warn(message, RuntimeWarning, stacklevel=5)
            return
        if self._on_nonfinite == "rollback":
            raise NonFiniteGradientError(message)
        raise NonFiniteGradientError(
            f"{message} and the weights are unchanged. {LOOK}, or pass OffloadConfig(on_nonfinite='skip') to skip such "
            "steps"
        )

    def _memory(self) -> dict[str, dict[str, int]]:
        tiers = {tier: dict(categories) for tier, categories in self.plan.tiers.items()}
        tiers["ram"]["process"] = hardware.process_ram_bytes()
        if self._device.type == "cuda":
            allocator = torch.cuda.memory_stats_as_nested_dict(self._device)  # much faster than memory_stats
            tiers["vram"]["process peak allocated"] = allocator["allocated_bytes"]["all"]["peak"]
            reserved = allocator["reserved_bytes"]["all"]["current"]
            if self._context_bytes is None:  # after the first step, which has loaded the kernels
                self._context_bytes = hardware.vram_context_bytes(self._device)
            tiers["vram"] |= {"process reserved": reserved, "process": reserved + self._context_bytes}
        return tiers


def _traced(phase: str) -> None:
    if (tracing := trace.active()) is not None:
        tracing.phase(phase)


def _is_finished(window: _Window) -> bool:
    assert window.update is not None
    if not window.update.done.is_set() or not all(busy.done() for _, busy in window.update.busy):
        return False
    return all(end.done() for _, end in window.forwards + window.backwards) and all(b.done() for _, b in window.busy)


def _record(
    window: _Window, beside: list[tuple[str, BusyTime]], memory: dict[str, dict[str, int]], num_ranks: int
) -> StepRecord:
    """`beside`: copies of the preceding update, which shared the bus with the window's copies."""
    update = window.update
    assert update is not None
    seconds = {
        "step": window.ended - window.began,
        "forward": sum(end.seconds_since(began) for began, end in window.forwards),
        "backward": sum(end.seconds_since(began) for began, end in window.backwards),
        **update.seconds,
        "forward_wait": 0.0,
        "other": window.other_seconds,
    }
    moved = {"cpu_step": update.cpu_bytes}
    for name in _COPIES:
        copies = [busy for of, busy in (*beside, *window.busy) if of == name]
        seconds[name], moved[name] = seconds_of_any(copies), sum(busy.num_bytes for busy in copies)
    for name, busy in (*update.busy, *window.busy):
        if name not in _COPIES:
            seconds[name] = seconds.get(name, 0.0) + busy.seconds()
    for name, busy in window.busy:
        if name == "d2h" and busy.last is not None and window.backwards:
            tail = busy.last.seconds_since(window.backwards[-1][1])
            seconds["gradient_tail"] = max(seconds.get("gradient_tail", 0.0), tail)
    return StepRecord(
        step=update.number,
        loss=sum(float(loss) for loss in window.losses) * num_ranks,
        num_tokens=window.num_tokens,
        grad_norm=update.norm,
        learning_rate=window.learning_rate,
        skipped=update.skipped,
        seconds=seconds,
        bytes=memory,
        moved=moved,
        received=window.received | update.received,
    )


def num_tokens(model: nn.Module, batch: dict[str, Any]) -> int | None:
    """Positions of a batch: input ids, plus targets for an encoder-decoder; None without input ids and targets."""
    parts = [batch.get("input_ids")]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        # Without labels, the loss is computed outside the model.
        parts.append(batch.get("labels", batch.get("decoder_input_ids")))
    return sum(part.numel() for part in parts if isinstance(part, torch.Tensor)) or None
