"""The slowdown against plain training: measured if plain training fits, otherwise predicted, and labelled as such."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offloadkit.doors.comparing.slowdown import Slowdown, measure_slowdown
from offloadkit.doors.engines import forecast
from offloadkit.errors import ConfigError, DoesNotFitError, OffloadkitError
from tests.doors.comparing.made_up import GIB, T5_3B
from tests.messages import has_facts

Task = dict[str, Any]
Answers = Callable[[Callable[[Task], dict[str, Any]]], list[Task]]
LARGE = forecast.replace(T5_3B, limits={"vram": 139 * GIB, "ram": 64 * GIB})
OURS = {"status": "measured", "step_seconds": 0.5, "vram_bytes": GIB, "peak_ram_bytes": GIB}
PLAIN = OURS | {"step_seconds": 0.2}


def answering(*made: forecast.Forecast, **rows: dict[str, Any]) -> Callable[[Task], dict[str, Any]]:
    def answer(task: Task) -> dict[str, Any]:
        if task["mode"] == "plan":
            return {"status": "measured", "forecasts": [forecast.as_row(each) for each in made]}
        return rows[task["engine"]]

    return answer


def test_both_are_run_where_the_gpu_has_room(answers: Answers) -> None:
    asked = answers(answering(T5_3B, LARGE, offloadkit=OURS, baseline=PLAIN))
    found = measure_slowdown("t5-3b", vram="11GiB", ram="64GiB")
    assert found == Slowdown(0.5, 0.2, "measured")
    assert found.ratio == 2.5
    assert has_facts(str(found), "2.5x", "GPU", "measured")
    assert asked[1]["work"]["vram"] == 11 * GIB
    assert asked[2]["work"]["vram"] is None
    assert asked[2]["work"]["our_compute"]


def test_without_a_gpu_it_says_what_it_is_compared_with(answers: Answers) -> None:
    here = forecast.replace(T5_3B, on_cpu=True, limits={"ram": 640 * GIB})
    ours, plain = OURS | {"all_step_seconds": [0.9, 0.6, 0.8]}, PLAIN | {"all_step_seconds": [0.3, 0.9]}
    answers(answering(here, here, offloadkit=ours, baseline=plain))
    assert has_facts(str(measure_slowdown("t5-3b")), "2x", "CPU", "measured")


def test_it_is_predicted_where_plain_training_does_not_fit(answers: Answers) -> None:
    made = forecast.replace(T5_3B, large_gpu_seconds=0.25)
    asked = answers(answering(made, made, offloadkit=OURS))
    found = measure_slowdown("t5-3b")
    assert found.baseline == "predicted"
    assert found.ratio == 2
    assert has_facts(str(found), "2x", "GPU", "predicted", "44.9 GiB of VRAM", "11 GiB")
    assert [task["mode"] for task in asked] == ["plan", "measure"]


def test_it_is_predicted_where_plain_training_runs_out_of_memory(answers: Answers) -> None:
    full = {"status": "does not fit", "reason": "does not fit: needs more than 139 GiB of VRAM, has 139 GiB"}
    answers(answering(T5_3B, LARGE, offloadkit=OURS, baseline=full))
    found = measure_slowdown("t5-3b")
    assert (found.baseline, found.baseline_seconds) == ("predicted", 0.2)
    assert "139 GiB" in str(found)


def test_what_cannot_be_trained_or_predicted_is_an_error(answers: Answers) -> None:
    none = forecast.replace(T5_3B, lacking={"ram": (37 * GIB, 20 * GIB)})
    answers(answering(none, none))
    with pytest.raises(DoesNotFitError, match="needs 37 GiB of RAM, has 20 GiB"):
        measure_slowdown("t5-3b", ram="20GiB")
    answers(answering(T5_3B, LARGE, offloadkit={"status": "failed", "reason": "took more than 9 s"}))
    with pytest.raises(OffloadkitError, match="took more than 9 s"):
        measure_slowdown("t5-3b")
    full = {"status": "does not fit", "reason": "does not fit: needs more than 64 GiB of RAM"}
    answers(answering(T5_3B, LARGE, offloadkit=full))
    with pytest.raises(DoesNotFitError, match="needs more than 64 GiB"):
        measure_slowdown("t5-3b")
    unknown = forecast.replace(T5_3B, large_gpu_seconds=None)
    answers(answering(unknown, unknown, offloadkit=OURS))
    with pytest.raises(OffloadkitError, match="nor predicted for this model"):
        measure_slowdown("t5-3b")
    answers(lambda task: {"status": "measured", "forecasts": [{"failed": "no head"}] * 2})
    with pytest.raises(OffloadkitError, match="no head"):
        measure_slowdown("t5-3b")
    with pytest.raises(ConfigError, match="steps must be a whole number"):
        measure_slowdown("t5-3b", steps=0)


@pytest.mark.slow
def test_a_tiny_model_is_measured_here(in_this_process: list[Task], tmp_path: Path) -> None:
    shape: dict[str, Any] = {"batch_size": 2, "max_input_length": 12, "max_target_length": 6, "steps": 2}
    found = measure_slowdown("t5-tiny", **shape, output_dir=tmp_path)
    assert found.baseline == "measured"
    assert found.ratio > 0
    assert len(in_this_process) == 3
    assert measure_slowdown("t5-tiny", **shape, output_dir=tmp_path) == found
    assert len(in_this_process) == 3
