"""Watches the rates that steps measure, and says when the plan should move because they are not those planned with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

from offloadkit.config import Placement
from offloadkit.distributed.ranks import SOLO, Ranks
from offloadkit.hardware import Hardware
from offloadkit.offload.shortage import of_all
from offloadkit.planner import Plan
from offloadkit.planner.faster import COMPUTE, MIN_GAIN, PYTHON, Rate, corrected, faster, judged
from offloadkit.telemetry import StepRecord
from offloadkit.units import format_seconds

WARM_UP = 8
"""Steps after a start or a move that are not judged: kernels compile, and the processors' shares settle."""
NUM_STEPS = 16
"""Steps that are judged together, by their medians: an evaluation or a checkpoint among them counts for nothing."""
MAX_SEARCHES = 2
"""Most times that a run is planned again for its rates. A search takes about a second, a move some seconds."""

_RESOURCES = {
    "H2D": "copies to the GPU run at",
    "D2H": "copies from the GPU run at",
    "CPU step": "the CPU's optimizer step runs at",
}


class RateWatch:
    """Collects the records of a run, and judges them `NUM_STEPS` at a time.

    It needs a plan whose placements were searched for a micro-batch on a GPU; with any other it does nothing.
    """

    def __init__(self, plan: Plan) -> None:
        self._searches_left = MAX_SEARCHES
        self._found: tuple[Plan, Plan, float] | None = None
        """A plan that `judge` found, the one before it, and the seconds of a step (or of a token) by that one."""
        self.begin(plan)

    def begin(self, plan: Plan) -> None:
        """The run goes on by `plan`: what was measured before counts no more."""
        basis = plan.basis
        searched = basis.work is not None and basis.config.placement is None and not plan.on_cpu
        self._machine: Hardware | None = basis.hardware if searched else None
        self._plan, self._warming_up = plan, WARM_UP
        self._records: list[StepRecord] = []
        if self._found is not None and self._found[0].placements != plan.placements:
            self._found = None

    def add(self, record: StepRecord) -> None:
        """Take the next step's record."""
        has_more_to_say = self._searches_left or self._found is not None
        if self._machine is None or not has_more_to_say or record.skipped or self.is_due:
            return
        if self._warming_up:
            self._warming_up -= 1
        else:
            self._records.append(record)

    @property
    def is_due(self) -> bool:
        """Whether there is something to judge."""
        return len(self._records) == NUM_STEPS

    def judge(
        self,
        placements: Sequence[Placement],
        room: Callable[[], Mapping[str, int]],
        ranks: Ranks = SOLO,
    ) -> tuple[Plan, str] | None:
        """Judge the records, and begin to collect anew.

        Several ranks call it together, when it is due on all of them. The slowest one's rates count, rank 0 judges, and
        all get what it finds.

        Args:
            placements: where the layers are, with the processors that step them now.
            room: says how many bytes of "vram" and "ram" a plan may need.
            ranks: those that train together.

        Returns:
            The plan to move to, and why; None to stay. A plan after which steps took longer is left for the one before.
        """
        records, self._records = self._records, []
        assert self._machine is not None
        pace = _pace(records)
        if ranks.size == 1:
            machine = self._machine
            return self._judge(pace, lambda: judged(self._plan, machine, placements, records), placements, room)
        rates = _slowest(ranks, judged(self._plan, self._machine, placements, records))
        least = of_all(ranks, room())
        found, self._machine = ranks.told(
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
            return before, f"steps took {pace / its_pace:.3g} times as long as before the last move"
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
        return plan, _in_words(rates)


def _slowest(ranks: Ranks, rates: Mapping[str, Rate]) -> dict[str, Rate]:
    """Each resource's rate on the rank where it is the slowest, by what was planned there.

    Several ranks call it together. What a rank plans with is nearly the same on all of them, so its own is kept. What
    only other ranks have judged is left out.
    """
    names = list(_RESOURCES)
    own = [rates[name].measured / rates[name].planned if name in rates else np.inf for name in names]
    told = ranks.agree(np.array(own, dtype=np.float64).view(np.int64)).view(np.float64).min(axis=0)
    least = dict(zip(names, told.tolist(), strict=True))
    return {name: Rate(least[name] * rate.planned, rate.planned) for name, rate in rates.items()}


def _pace(records: Sequence[StepRecord]) -> float:
    """Median seconds of a step, or of a token where their number is known: rows have several lengths."""
    return median(record.seconds["step"] / (record.num_tokens or 1) for record in records)


def _in_words(rates: Mapping[str, Rate]) -> str:
    """ "copies to the GPU run at 5.5 GB/s, planned with 55 GB/s"."""
    parts = []
    for name, rate in rates.items():
        if not rate.differs:
            continue
        if name in (COMPUTE, PYTHON):
            took, planned = (format_seconds(1 / each) for each in (rate.measured, rate.planned))
            of = " of shorter micro-batches" if name == PYTHON else ""
            parts.append(f"forward and backward{of} take {took}, planned with {planned}")
        else:
            took, planned = (f"{each / 1e9:.3g} GB/s" for each in (rate.measured, rate.planned))
            parts.append(f"{_RESOURCES[name]} {took}, planned with {planned}")
    return ", and ".join(parts)
