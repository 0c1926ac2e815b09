"""The knee computed from hand-made steps, and its description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offloadkit.doors.comparing.knee import Knee, measured_knee, predicted_knee, reads_weights
from offloadkit.doors.comparing.sweeping import Sweep
from offloadkit.doors.engines.forecast import Forecast
from tests.doors.comparing.made_up import ENVIRONMENT, GIB, T5_3B, at_batch
from tests.messages import has_facts

SIZES = (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize(
    ("step", "size"),
    [
        (lambda b: max(1.6, 0.1 * b), 16.0),  # all computing is hidden under the optimizer
        (lambda b: max(1.6, 0.1 * b / 3) + 0.1 * b * 2 / 3, 15.8),  # only forward is hidden
        (lambda b: 1.6 + 0.1 * b, 13.6),  # nothing is hidden
        (lambda b: max(0.8, 0.1 * b), 8.0),
    ],
)
def test_the_knee_is_where_the_two_asymptotes_meet(step: Any, size: float) -> None:
    knee = measured_knee({b: step(b) for b in SIZES})
    assert knee is not None
    assert knee.where == "within"
    assert knee.size == pytest.approx(size, rel=0.06)


def test_a_knee_that_was_not_passed_lies_beyond_or_before() -> None:
    assert measured_knee({b: 5.0 + 0.001 * b for b in SIZES}) == Knee(64, "beyond")
    assert measured_knee({b: 0.01 * b for b in SIZES}) == Knee(1, "before")
    assert measured_knee({8: 1.0}) is None
    assert measured_knee({}) is None


def test_a_slow_smallest_step_moves_no_knee() -> None:
    steady = {b: max(1.6, 0.1 * b) for b in SIZES}
    assert measured_knee(steady | {1: 9.0}) == measured_knee(steady)


def test_the_plan_has_the_knee_where_computing_takes_as_long_as_the_optimizer() -> None:
    knee = predicted_knee({b: at_batch(b) for b in SIZES})
    assert knee is not None
    assert knee.size == pytest.approx(0.42 / 0.026)
    assert predicted_knee({8: at_batch(8)}) is None
    assert predicted_knee({}) is None


@pytest.mark.parametrize("seconds", [{"launches": 0.4}, {"D2H": 0.4}, {"GPU step": 0.4}])
def test_the_plan_counts_what_else_does_not_grow_with_the_batch(seconds: dict[str, float]) -> None:
    knee = predicted_knee({b: busy(at_batch(b), {"GPU": 0.05 * b, "CPU step": 0.01, **seconds}) for b in SIZES})
    assert knee is not None
    assert knee.size == pytest.approx(8)


def test_weights_that_are_read_for_every_row_are_on_the_flat_side() -> None:
    made = {b: busy(at_batch(b), {"GPU": max(0.4, 0.05 * b), "CPU step": 0.01}) for b in SIZES}
    knee = predicted_knee(made)
    assert knee is not None
    assert knee.size == pytest.approx(8)
    assert reads_weights(made)
    assert not reads_weights({b: at_batch(b) for b in SIZES})
    assert not reads_weights({8: at_batch(8)})
    rows = [row(b, max(0.4, 0.05 * b)) for b in SIZES]
    assert has_facts(swept(rows, made).explain(), "batch 8 ", "reading weights")


def busy(made: Forecast, seconds: dict[str, float]) -> Forecast:
    return Forecast(**{**vars(made), "busy": {**made.busy, **seconds}})


def test_sizes_away_are_counted_by_ratio() -> None:
    assert Knee(11.4, "within").place(SIZES) == 4
    assert Knee(11.2, "within").place(SIZES) == 3
    assert Knee(64, "beyond").place(SIZES) == 6
    assert Knee(1, "before").place(SIZES) == 0


def row(size: int, step_seconds: float, **changes: Any) -> dict[str, Any]:
    figures = {"step_seconds": step_seconds, "sample_seconds": step_seconds / size, "tokens_per_second": 1.0}
    figures |= {"epoch_seconds": step_seconds * 1000 / size, "vram_bytes": GIB, "peak_ram_bytes": GIB}
    return {"batch_size": size, "accumulation": 1, "scaling": "none", "status": "measured", **figures, **changes}


def swept(rows: list[dict[str, Any]], forecasts: dict[int, Forecast], **changes: Any) -> Sweep:
    made = {1: forecasts} if forecasts else {}
    return Sweep("t5-3b", rows, made, 1000, 11 * GIB, 64 * GIB, ENVIRONMENT, Path(), **changes)


def test_each_side_of_the_knee_is_explained() -> None:
    rows = [row(b, max(0.43, 0.009 * b) + 0.018 * b) for b in SIZES[:-1]]
    rows.append({**row(64, 1.0), "status": "does not fit", "reason": "does not fit: needs 13 GiB of VRAM, has 11 GiB"})
    forecasts = {b: at_batch(b) for b in SIZES[:-1]} | {64: at_batch(64, lacking={"vram": (13 * GIB, 11 * GIB)})}
    largest = {"batch_size": 56, "is_most": False, "status": "measured", "vram_bytes": 10 * GIB, "peak_ram_bytes": GIB}
    lines = swept(rows, forecasts, largest=largest).explain().splitlines()
    assert len(lines) == 5
    assert has_facts(lines[0], "batch 14", "CPU", "RAM's bandwidth", "8 rows", "1.3 times", "1 row")
    assert has_facts(lines[1], "GPU", "31.4 ms")
    assert has_facts(lines[2], "batch 16")
    assert has_facts(lines[3], "56", "10 GiB of VRAM")
    assert has_facts(lines[4], "64 x 1", rows[-1]["reason"])


def test_sweeps_without_a_knee_say_where_it_is_and_how_far_the_plan_is_off() -> None:
    forecasts = {b: at_batch(b) for b in SIZES}
    before = swept([row(b, 0.01 * b) for b in SIZES], forecasts).explain()
    assert has_facts(before, "batch 1 ", "GPU", "batch 16", "4 sizes")
    beyond = swept([row(b, 0.5) for b in SIZES], forecasts).explain()
    assert has_facts(beyond, "batch 64", "CPU", "1.0 times", "1 row", "beyond")


def test_a_largest_batch_that_fails_says_why() -> None:
    largest = {"batch_size": 512, "is_most": True, "status": "failed", "reason": "took more than 9 s"}
    text = swept([row(1, 0.5)], {1: T5_3B}, largest=largest).explain()
    first, second = text.splitlines()
    assert has_facts(first, "atch 1 ", "no knee")
    assert has_facts(second, "at least 512", "failed", "took more than 9 s")


def test_learning_is_summed_up() -> None:
    def learned(size: int, loss: float, scaling: str = "none") -> dict[str, Any]:
        return row(size, 1.0, eval_loss=loss, scaling=scaling, learning_rate=1e-3, num_samples=1024)

    result = swept([learned(4, 0.5), learned(16, 0.9), learned(16, 0.4, "sqrt")], {})
    first, same, scaled, lowest = result.explain().splitlines()[1:]
    assert has_facts(first, "1,024 samples", "0.5000", "4 rows")
    assert has_facts(same, "16 rows", "0.9000", "+0.4000")
    assert has_facts(scaled, "16 rows", "sqrt", "0.4000", "-0.1000")
    assert has_facts(lowest, "0.4000", "16 rows", "0.001", "sqrt")
    assert "0.4000" in str(result)
