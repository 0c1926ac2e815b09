"""offloadkit's engine, with the figures of the table."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from offloadkit.doors.engines.ours import Offloadkit
from offloadkit.facts import hardware


class Ours(Offloadkit):
    def row(self) -> dict[str, Any]:
        """Also the placements, the machine's rates and the phases of the last step.

        "received" counts bytes from other ranks per step.
        """
        found, made = super().row(), self._model.plan
        records = list(self._model.telemetry.records)
        work, machine = made.basis.work, made.basis.hardware
        figures: dict[str, Any] = {"operation_launches": work and work.operation_launches}
        if (graphs := self._model.placed.graphs) is not None and graphs.num_graphs():
            figures["graphs"] = graphs.num_graphs()
        if made.step_range is not None:
            figures |= {"planned_range": made.step_range, "python_spread": work and work.python_spread}
        if made.bound is not None:
            figures["bound_seconds"] = made.bound.step
        if context := hardware.vram_context_bytes(self._model.device):
            figures["VRAM of context"] = context
        if taken := hardware.library_bytes[self._model.device.index or 0]:
            figures["VRAM of NCCL"] = taken
        planned = {
            "received": made.communicated,
            "placements": {str(where): number for where, number in Counter(made.placements).items()},
            "hardware": None if machine is None else asdict(machine),
        }
        return found | {
            "planned": found["planned"] | planned,
            "figures": figures,
            "telemetry_seconds": dict(records[-1].seconds) if records else {},
            "moved": dict(records[-1].moved) if records else {},
            "received": dict(records[-1].received) if records else {},
        }
