"""offloadkit's engine, set up as in `finetune`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import torch

from offloadkit.doors.engines.engine import Engine
from offloadkit.doors.engines.forecast import planned
from offloadkit.doors.engines.work import Work, lazy_model
from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts import hardware
from offloadkit.planner import Dtype
from offloadkit.planner.plan import check_fits


class Offloadkit(Engine):
    """`OffloadEngine` with a plan within the limits and random weights."""

    def __init__(self, work: Work, dtype: Dtype, device: torch.device) -> None:
        """Raises `DoesNotFitError` if no plan fits."""
        model = lazy_model(work, dtype, device)
        config, plan = planned(model, work, device)
        check_fits(plan)
        self._model = OffloadEngine(model, config, device=device, plan=plan)

    def settle(self) -> None:
        self._model.synchronize()

    def row(self) -> dict[str, Any]:
        """The plan's figures, the machine's rates and the phases of the last step.

        RAM is the sum over this host's ranks; "received" counts bytes from other ranks per step. After OOM recovery the
        plan is the current one, and "moves" has the reasons.
        """
        made, moves = self._model.plan, self._model.telemetry.moves
        seconds, machine = made.seconds, made.basis and made.basis.hardware
        records = list(self._model.telemetry.records)
        work = made.basis.work
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
        return {
            "num_parameters": made.num_parameters,
            "planned": {
                "vram_bytes": made.total_bytes("vram"),
                "ram_bytes": made.num_on_host * made.total_bytes("ram"),
                "received": made.communicated,
                "disk_bytes": made.total_bytes("disk"),
                "step_seconds": None if seconds is None else seconds.step,
                "placements": {str(where): number for where, number in Counter(made.placements).items()},
                "hardware": None if machine is None else asdict(machine),
            },
            "figures": figures,
            "telemetry_seconds": dict(records[-1].seconds) if records else {},
            "moved": dict(records[-1].moved) if records else {},
            "received": dict(records[-1].received) if records else {},
        } | ({"moves": [move.why for move in moves]} if moves else {})
