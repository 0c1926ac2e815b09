"""offloadkit's engine, set up as in `finetune`."""

from __future__ import annotations

from typing import Any

import torch

from offloadkit.doors.engines.engine import Engine
from offloadkit.doors.engines.forecast import planned
from offloadkit.doors.engines.work import Work, lazy_model
from offloadkit.engine.engine import OffloadEngine
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
        """RAM is the sum over this host's ranks. After OOM recovery the plan is the current one, and "moves" has the
        reasons.
        """
        made, moves = self._model.plan, self._model.telemetry.moves
        planned = {
            "vram_bytes": made.total_bytes("vram"),
            "ram_bytes": made.num_on_host * made.total_bytes("ram"),
            "disk_bytes": made.total_bytes("disk"),
            "step_seconds": None if made.seconds is None else made.seconds.step,
        }
        found = {"num_parameters": made.num_parameters, "planned": planned}
        return found | ({"moves": [move.why for move in moves]} if moves else {})
