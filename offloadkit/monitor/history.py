"""Records of steps as they come, kept small: what a long run is drawn from in constant time and memory."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

from offloadkit.telemetry import StepRecord

Point = tuple[int, float]
"""A step and its loss."""

NUM_RECENT = 20
"""Steps that a typical one is the mean of."""
MAX_POINTS = 300
_MAX_WARM_UP = 5
_PAUSE = 2.0
"""A step of more than so many medians had an evaluation or a checkpoint in it."""


@dataclass
class _Bucket:
    """Neighbouring steps: lowest and highest loss, and their mean."""

    lowest: Point
    highest: Point
    number: int
    total: float

    def join(self, other: _Bucket) -> None:
        self.lowest = min(self.lowest, other.lowest, key=lambda point: point[1])
        self.highest = max(self.highest, other.highest, key=lambda point: point[1])
        self.number += other.number
        self.total += other.total


class LossCurve:
    """A loss by step in at most `MAX_POINTS` points: buckets of steps that double in width when there are too many."""

    def __init__(self) -> None:
        self._buckets: list[_Bucket] = []
        self._width = 1

    def add(self, step: int, loss: float) -> None:
        """The next step's loss; one that is not finite is left out."""
        if not math.isfinite(loss):
            return
        new = _Bucket((step, loss), (step, loss), 1, loss)
        if self._buckets and self._buckets[-1].number < self._width:
            self._buckets[-1].join(new)
            return
        self._buckets.append(new)
        if len(self._buckets) > MAX_POINTS // 2:
            for left, right in zip(self._buckets[::2], self._buckets[1::2], strict=False):
                left.join(right)
            self._buckets = self._buckets[::2]
            self._width *= 2

    def points(self) -> tuple[Point, ...]:
        """Lowest and highest of each bucket, by step."""
        found = []
        for bucket in self._buckets:
            low, high = bucket.lowest, bucket.highest
            found += [low] if low == high else [low, high] if low < high else [high, low]
        return tuple(found)

    def trend(self) -> tuple[Point, ...]:
        """The mean over a twentieth of the curve before and at each bucket; () for a short one."""
        span = len(self._buckets) // 20
        if span < 2:
            return ()
        found = []
        total, number = 0.0, 0
        for index, bucket in enumerate(self._buckets):
            total, number = total + bucket.total, number + bucket.number
            if index >= span:
                gone = self._buckets[index - span]
                total, number = total - gone.total, number - gone.number
            found.append((max(bucket.lowest[0], bucket.highest[0]), total / number))
        return tuple(found)

    def newest(self) -> float | None:
        """The newest bucket's mean; None before there is one."""
        return self._buckets[-1].total / self._buckets[-1].number if self._buckets else None


class History:
    """What the records so far add up to.

    Attributes:
        newest: the newest record.
        num_steps: how many came.
        elapsed_seconds: sum of their steps' wall time.
    """

    def __init__(self) -> None:
        self.newest: StepRecord | None = None
        self.num_steps = self.num_skipped = 0
        self.elapsed_seconds = 0.0
        self.loss = LossCurve()
        self._first_seconds = 0.0
        self._recent: deque[StepRecord] = deque(maxlen=NUM_RECENT)

    def add(self, record: StepRecord) -> None:
        """Take the next record."""
        seconds = record.seconds.get("step", 0.0)
        if not self.num_steps:
            self._first_seconds = seconds
        self.newest = record
        self.num_steps += 1
        self.num_skipped += record.skipped
        self.elapsed_seconds += seconds
        self.loss.add(record.step, record.loss)
        self._recent.append(record)

    def mean_step_seconds(self) -> float | None:
        """Of all steps but the first, which warms up; None before there are two."""
        if self.num_steps < 2:
            return None
        return (self.elapsed_seconds - self._first_seconds) / (self.num_steps - 1)

    def typical(self) -> list[StepRecord]:
        """The newest records without the run's first ones, which warm up, and those with a pause in them."""
        records = list(self._recent)
        warm_up = min(_MAX_WARM_UP, max(1, self.num_steps // 10)) - (self.num_steps - len(records))
        records = records[min(max(0, warm_up), len(records) - 1) :] if records else []
        if not records:
            return []
        most = _PAUSE * statistics.median(record.seconds.get("step", 0.0) for record in records)
        return [record for record in records if record.seconds.get("step", 0.0) <= most]
