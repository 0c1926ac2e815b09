"""Where the compute stream stood still, and for what: events around each wait, read when they are long past."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offloadkit.offload.streams import BusyTime, Event, compute_stream, record_compute


class Waits:
    """Waits of one accumulation window, by name: "forward_wait", "forward_bus_wait", "backward_bus_wait", ..."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase: str | None = None
        self._busy: dict[str, BusyTime] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """While it is open, waits are those of "forward" or "backward"; outside of both none is timed."""
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """While it is open, the CPU's step keeps the calling thread, and the compute stream runs dry."""
        began = self._begin()
        yield
        self._end(began, "wait")

    def delay(self, event: Event, what: str = "bus_wait") -> None:
        """Let the compute stream wait for `event`; the calling thread does not wait."""
        if event.done():
            return
        began = self._begin()
        event.delay(compute_stream(self._device))
        self._end(began, what)

    def take(self) -> dict[str, BusyTime]:
        """What the compute stream waited since the last call."""
        busy, self._busy = self._busy, {}
        return busy

    def _begin(self) -> Event | None:
        return None if self._phase is None else record_compute(self._device, timing=True)

    def _end(self, began: Event | None, what: str) -> None:
        if began is not None:
            name = f"{self._phase}_{what}"
            self._busy.setdefault(name, BusyTime()).add(began, record_compute(self._device, timing=True))
