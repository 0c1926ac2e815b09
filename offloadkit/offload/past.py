"""What has become known of updates that were started earlier: their records, and whether they were applied."""

from __future__ import annotations

import warnings
from collections import deque

import torch

from offloadkit import hardware
from offloadkit.errors import NonFiniteGradientError
from offloadkit.offload.step_clock import StepClock
from offloadkit.offload.update import Update
from offloadkit.plan import Plan
from offloadkit.telemetry import Telemetry


class Past:
    """Updates on their way or done, oldest first. Reading never waits."""

    def __init__(
        self, clock: StepClock, telemetry: Telemetry, plan: Plan, device: torch.device, on_nonfinite: str
    ) -> None:
        self._clock, self._telemetry, self._plan = clock, telemetry, plan
        self._device, self._on_nonfinite = device, on_nonfinite
        self._updates: deque[Update] = deque()
        self._context_bytes: int | None = None

    def add(self, update: Update) -> None:
        """An update that was just started."""
        self._updates.append(update)

    def forget(self) -> None:
        """Let go of the updates, and with them of the layers."""
        self._updates.clear()

    def read(self) -> None:
        """Record finished steps, and report those that were not applied.

        Raises:
            NonFiniteGradientError: with `on_nonfinite="raise"`, for the oldest step not reported yet.
        """
        for record in self._clock.finished(self._memory):
            self._telemetry.add(record)
        while self._updates and self._updates[0].norm_known.is_set():
            update = self._updates.popleft()
            if update.skipped and not update.scale_may_fall:
                self._report(update)

    def _report(self, update: Update) -> None:
        names = ", ".join(update.nonfinite[:3]) + (" and others" if len(update.nonfinite) > 3 else "")
        message = f"the gradient norm of step {update.number} is {update.norm} (from {names}): the step was not applied"
        if self._on_nonfinite == "skip":
            warnings.warn(message, RuntimeWarning, stacklevel=5)
            return
        raise NonFiniteGradientError(
            f"{message} and the weights are as before it. Look at the data and the loss of that step, lower the "
            "learning rate, or pass OffloadConfig(on_nonfinite='skip') to leave such steps out"
        )

    def _memory(self) -> dict[str, dict[str, int]]:
        """Planned bytes by tier and category, and what the process really uses."""
        tiers = {tier: dict(categories) for tier, categories in self._plan.tiers.items()}
        tiers["ram"]["process"] = hardware.process_ram_bytes()
        if self._device.type == "cuda":
            allocator = torch.cuda.memory_stats_as_nested_dict(self._device)  # its named totals take much longer
            tiers["vram"]["process peak allocated"] = allocator["allocated_bytes"]["all"]["peak"]
            reserved = allocator["reserved_bytes"]["all"]["current"]
            if self._context_bytes is None:  # after the first step, whose kernels are loaded
                self._context_bytes = hardware.vram_context_bytes(self._device)
            tiers["vram"] |= {"process reserved": reserved, "process": reserved + self._context_bytes}
        return tiers
