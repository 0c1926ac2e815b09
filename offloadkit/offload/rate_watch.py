"""Compares the rates that steps measure with the planned rates, and finds a faster plan if they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

from offloadkit.distributed.ranks import SOLO, Ranks
from offloadkit.facts.config import Placement
from offloadkit.facts.hardware import Hardware
from offloadkit.facts.telemetry import StepRecord
from offloadkit.facts.units import format_rate, format_seconds, rounded
from offloadkit.offload.shortage import minimum_over_ranks
from offloadkit.planner import Plan
from offloadkit.planner.faster import COMPUTE, MIN_GAIN, PYTHON, Rate, compared_rates, corrected, faster

WARM_UP = 8
"""Steps after a start or a move that are ignored, because kernels compile and the CPU/GPU balance settles."""
NUM_STEPS = 16
"""Steps judged together, by medians, so that a single evaluation or checkpoint does not count."""
MAX_SEARCHES = 2
"""Maximum number of new searches per run. A search takes about a second, a move some seconds."""

_RESOURCES = {
    "H2D": "copies to the GPU run at",
    "D2H": "copies from the GPU run at",
    "CPU step": "the CPU's optimizer step runs at",
}


class RateWatch:
    """Collects step records and judges them `NUM_STEPS` at a time.

    Does nothing unless the plan's placements were searched for a micro-batch on a GPU.
    """

    def __init__(self, plan: Plan) -> None:
        self._searches_left = MAX_SEARCHES
        self._found: tuple[Plan, Plan, float] | None = None
        """(plan that `judge` found, the plan before it, seconds per step or token with the plan before it)."""
        self.begin(plan)

    def begin(self, plan: Plan) -> None:
        """Start to measure `plan`; discard earlier measurements."""
        basis = plan.basis
        searched = basis.work is not None and basis.config.placement is None and not plan.on_cpu
        self._machine: Hardware | None = basis.hardware if searched else None
        self._plan, self._warming_up = plan, WARM_UP
        self._records: list[StepRecord] = []
        if self._found is not None and self._found[0].placements != plan.placements:
            self._found = None

    def add(self, record: StepRecord) -> None:
        has_more_to_say = self._searches_left or self._found is not None
        if self._machine is None or not has_more_to_say or record.skipped or self.is_due:
            return
        if self._warming_up:
            self._warming_up -= 1
        else:
            self._records.append(record)

    @property
    def is_due(self) -> bool:
        return len(self._records) == NUM_STEPS

    def judge(
        self,
        placements: Sequence[Placement],
        room: Callable[[], Mapping[str, int]],
        ranks: Ranks = SOLO,
    ) -> tuple[Plan, str] | None:
        """Judge the records and discard them.

        A collective, called when it is due on all ranks. The slowest rank's rates count, rank 0 judges, and all ranks
        get its result.

        Args:
            placements: current placements, with the processors that step the layers now.
            room: returns the bytes of "vram" and "ram" that a plan may need.

        Returns:
            (plan to move to, reason), or None to stay. If steps got slower after a move, the plan is the former one.
        """
        records, self._records = self._records, []
        assert self._machine is not None
        pace = _pace(records)
        if ranks.size == 1:
            machine = self._machine
            return self._judge(pace, lambda: compared_rates(self._plan, machine, placements, records), placements, room)
        rates = _slowest(ranks, compared_rates(self._plan, self._machine, placements, records))
        least = minimum_over_ranks(ranks, room())
        found, self._machine = ranks.broadcast_from(
            lambda: (self._judge(pace, lambda: rates, placements, lambda: least), self._machine)
        )
        return found

    def _judge(
        self,
        pace: float,
        measured: Callable[[], Mapping[str, Rate]],
        placements: Sequence[Placement],
        room: Callable[[], Mapping[str, int]],
    ) -> tuple[Plan, str] | None:
        assert self._machine is not None
        found, self._found = self._found, None
        has_moved = found is not None and found[0].placements == self._plan.placements
        if found is not None and has_moved and pace > (1 + MIN_GAIN) * found[2]:
            self._searches_left = 0
            _, before, its_pace = found
            if any(number > room()[tier] for tier, number in before.needs().items() if tier != "disk"):
                return None
            return before, f"steps took {rounded(pace / its_pace)} times as long as before the last move"
        if not self._searches_left:
            return None
        rates = measured()
        machine = corrected(self._plan, self._machine, placements, rates)
        if machine is None:
            return None
        self._searches_left, self._machine = self._searches_left - 1, machine
        plan = faster(self._plan, machine, placements, room())
        if plan is None:
            return None
        self._found = plan, self._plan, pace
        return plan, in_words(rates)


def _slowest(ranks: Ranks, rates: Mapping[str, Rate]) -> dict[str, Rate]:
    """Each resource's rate on the rank where it is slowest relative to its plan. A collective.

    The planned rate is this rank's, because planned rates are nearly equal on all ranks. Resources that this rank has
    not judged are left out.
    """
    names = list(_RESOURCES)
    own = [rates[name].measured / rates[name].planned if name in rates else np.inf for name in names]
    told = ranks.agree(np.array(own, dtype=np.float64).view(np.int64)).view(np.float64).min(axis=0)
    least = dict(zip(names, told.tolist(), strict=True))
    return {name: Rate(least[name] * rate.planned, rate.planned) for name, rate in rates.items()}


def _pace(records: Sequence[StepRecord]) -> float:
    """Median seconds per step, or per token if known, because rows differ in length."""
    return median(record.seconds["step"] / (record.num_tokens or 1) for record in records)


def in_words(rates: Mapping[str, Rate]) -> str:
    """For example "copies to the GPU run at 5.5 GB/s, planned with 55 GB/s"."""
    parts = []
    for name, rate in rates.items():
        if not rate.differs:
            continue
        if name in (COMPUTE, PYTHON):
            took, planned = (format_seconds(1 / each) for each in (rate.measured, rate.planned))
            of = " of shorter micro-batches" if name == PYTHON else ""
            parts.append(f"forward and backward{of} take {took}, but {planned} were planned")
        else:
            took, planned = (format_rate(each) for each in (rate.measured, rate.planned))
            parts.append(f"{_RESOURCES[name]} {took}, but {planned} were planned")
    return ", and ".join(parts)
