"""The plan of a Trainer's engine: given, or made for the longest rows, or made after the first update."""

from __future__ import annotations

from typing import Any

from offloadkit.engine.outline import needs_plan, plan_for, proposing_disk
from offloadkit.facts.config import OffloadConfig
from offloadkit.facts.units import format_bytes
from offloadkit.hf.longest import NotReadableError, evaluation_rows, longest_batch
from offloadkit.hf.masks import Padding, known_padding
from offloadkit.hf.packed import known_boundaries
from offloadkit.hf.trained import print_on_rank_0
from offloadkit.hf.trl_loss import with_fused_head
from offloadkit.planner import Plan
from offloadkit.planner.plan import check_fits

_BEGINS = "the first update runs with little in VRAM and {} in RAM, and training is planned for its micro-batches"
_BEGINS_ON_CPU = "the budget is checked for the micro-batches of the first update, after it"
_NOT_TRACED = (
    "the longest rows do not run on the meta device, so activations cannot be planned: weights and states are planned "
    "alone. On a GPU training begins with little in VRAM, and is planned after a second update that is measured"
)


class TrainerPlan:
    """Makes the plan before training, or reports why the engine makes it later.

    Attributes:
        awaits_first_update: the engine makes its plan after the first update.
    """

    def __init__(self, given: Plan | None) -> None:
        self._given = given
        self._unplanned = ""
        self.awaits_first_update = False

    def make(self, trainer: Any, config: OffloadConfig) -> Plan | None:
        """The given plan, or a plan for the longest rows, which is printed.

        Returns:
            None if the config leaves no choice, or the rows cannot be read or traced before training.
        """
        if self._given is not None or not needs_plan(config, trainer.args.device):
            return self._given
        try:
            batch, padding, note, boundaries = longest_batch(trainer)
        except NotReadableError as error:
            self._unplanned = f"the longest rows are not known before training ({error})"
            return None
        with known_padding(padding if padding is Padding.UNREAD else None), known_boundaries(boundaries):
            plan = plan_for(
                trainer.model,
                config,
                trainer.args.device,
                with_fused_head(trainer, batch),
                rows_option="per_device_train_batch_size",
                evaluation_rows=evaluation_rows(trainer),
            )
        if plan is None:
            self._unplanned = _NOT_TRACED
            return None
        check_fits(proposing_disk(plan))
        print_on_rank_0(trainer, f"{plan}\n  ({note})" if note else plan)
        return plan

    def report(self, trainer: Any) -> None:
        """Before the first update print why there is no plan; after it, print the plan for its micro-batches."""
        engine = trainer.engine
        if not self.awaits_first_update or engine is None:
            return
        if not engine.is_beginning:
            self.awaits_first_update = False
            print_on_rank_0(trainer, engine.plan)
        elif self._unplanned:
            begins = _BEGINS.format(format_bytes(engine.plan.total_bytes("ram")))
            how = _BEGINS_ON_CPU if engine.plan.on_cpu else begins
            print_on_rank_0(trainer, self._unplanned if self._unplanned == _NOT_TRACED else f"{self._unplanned}: {how}")
            self._unplanned = ""
