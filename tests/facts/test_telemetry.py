"""Step records: subscribers and summaries."""

from __future__ import annotations

import pytest

from offloadkit.facts.telemetry import StepRecord, Telemetry, mean_seconds


def record(step: int, /, **seconds: float) -> StepRecord:
    return StepRecord(step, 1.0, 100, 1.0, 1e-3, False, seconds)


def test_listeners_hear_of_every_later_record() -> None:
    telemetry, heard = Telemetry(), []
    telemetry.add(record(1))
    telemetry.subscribe(lambda new: heard.append(new.step))
    telemetry.add(record(2))
    assert heard == [2]
    assert [kept.step for kept in telemetry.records] == [1, 2]


def test_only_the_newest_records_are_kept() -> None:
    telemetry = Telemetry(keep=2)
    for step in range(1, 5):
        telemetry.add(record(step))
    assert [kept.step for kept in telemetry.records] == [3, 4]


def test_throughput_is_tokens_by_the_whole_step() -> None:
    assert record(1, step=0.5, forward=0.1).tokens_per_second == 200
    assert record(1, forward=0.1).tokens_per_second is None


def test_means_count_a_missing_phase_as_nothing() -> None:
    records = [*(record(step, step=2.0) for step in range(2, 10)), record(10, step=2.0, norm=9.0)]
    assert mean_seconds(records) == pytest.approx({"step": 2.0, "norm": 1.0})
    assert mean_seconds([]) == {}


def test_a_full_disk_ends_the_log_and_not_the_training() -> None:
    telemetry, heard = Telemetry(log_path="/dev/full"), []
    telemetry.subscribe(heard.append)
    with pytest.warns(RuntimeWarning, match="the telemetry log /dev/full could not be written at step 1 and ends"):
        telemetry.add(record(1))
    telemetry.add(record(2))
    telemetry.close()
    assert [each.step for each in heard] == [1, 2]
