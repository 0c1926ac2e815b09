"""The benchmark of the monitor's cost: what it adds up, and a run in a real kernel."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

from benchmarks import monitor_cost
from benchmarks.run import Row


def turn(pair: int, step_seconds: float, *, watched: bool, busy: float = 0.0) -> Row:
    return {
        "pair": pair,
        "watched": watched,
        "seconds": 2 * step_seconds,
        "step_seconds": step_seconds,
        "each_step": [step_seconds, step_seconds],
        "thread_seconds": {"monitor": busy, "sending": busy / 2},
    }


def test_pairs_cancel_what_drifts() -> None:
    turns = []
    for pair, drift in enumerate((1.0, 2.0, 4.0)):  # the machine gets slower; the monitor costs 1, 2 and 3 %
        turns.append(turn(pair, drift * (1.01 + pair / 100), watched=True, busy=0.01 * drift))
        turns.append(turn(pair, drift, watched=False))
    found = monitor_cost.summary(turns)
    assert found["mean_difference"] == pytest.approx(0.02)
    assert found["median_difference"] == pytest.approx(0.02)
    assert found["interval_95"] == pytest.approx([0.02 - 4.303 * 0.01 / 3**0.5, 0.02 + 4.303 * 0.01 / 3**0.5], rel=1e-3)
    assert found["num_steps_with"] == found["num_steps_without"] == 6
    assert found["median_step_seconds_without"] == 2.0
    assert found["mean_step_seconds_without"] == pytest.approx(7 / 3)
    assert found["monitor_thread_share_with"] == pytest.approx(0.07 / (2 * (1.01 + 2 * 1.02 + 4 * 1.03)))
    assert found["sending_thread_share_with"] == pytest.approx(found["monitor_thread_share_with"] / 2)
    assert found["monitor_thread_share_without"] == 0


def test_half_a_pair_is_no_difference_and_one_has_no_interval() -> None:
    first = [turn(0, 1.1, watched=True)]
    assert monitor_cost.summary(first)["num_pairs"] == 0
    both = monitor_cost.summary([*first, turn(0, 1.0, watched=False)])
    assert both["mean_difference"] == pytest.approx(0.1)
    assert both["interval_95"] is None
    assert any("+10.00%" in line for line in monitor_cost.words(both))


@pytest.mark.parametrize(("number", "t"), [(2, 12.706), (6, 2.571), (11, 2.228), (20, 2.093), (60, 2.001)])
def test_intervals_are_students(number: int, t: float) -> None:
    values = [float(index % 2) for index in range(number)]
    found = monitor_cost.interval(values)
    assert found is not None
    mean = sum(values) / number
    deviation = (sum((value - mean) ** 2 for value in values) / (number - 1)) ** 0.5
    assert found[1] - mean == pytest.approx(t * deviation / number**0.5, rel=2e-3)


def test_a_threads_seconds_are_its_own() -> None:
    leave = threading.Event()

    def work() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        leave.wait(10)

    thread = threading.Thread(target=work, name=monitor_cost.THREADS["monitor"])
    before = time.thread_time()
    thread.start()
    while monitor_cost.thread_seconds()["monitor"] < 0.05:
        time.sleep(0.01)
    assert monitor_cost.thread_seconds()["monitor"] < 0.2
    assert time.thread_time() - before < 0.05
    leave.set()
    thread.join()
    assert monitor_cost.thread_seconds() == {"monitor": 0.0, "sending": 0.0}


def test_frames_are_of_what_was_measured(tmp_path: Path) -> None:
    pages = ["7 GiB planned", *(f"{size} GiB used, 7 GiB planned" for size in range(1, 6))]
    monitor_cost.keep_frames(pages, tmp_path / "frames")
    kept = [(tmp_path / "frames" / f"{name}.html").read_text()[0] for name in monitor_cost.FRAMES]
    assert kept == ["1", "3", "5"]


def test_no_frames_are_named(tmp_path: Path) -> None:
    pytest.importorskip("playwright")
    with pytest.raises(SystemExit, match=r"has no start.html: name the --frames of a run"):
        monitor_cost.main(["--render", str(tmp_path), str(tmp_path)])


def test_less_than_one_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        monitor_cost.main(["--steps", "0"])
    assert "--pairs, --steps and --batch are at least 1" in capsys.readouterr().err


def test_a_run_in_a_real_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out, frames = tmp_path / "cost.json", tmp_path / "frames"
    command = ["--cpu", "--batch", "1", "--pairs", "2", "--steps", "30", "--out", str(out), "--frames", str(frames)]
    rows = monitor_cost.main(command)
    total, *turns = rows
    assert json.loads(out.read_text())["rows"] == rows
    assert json.loads(out.read_text())["machine"]["gpu"] == "none"
    assert [(each["pair"], each["watched"]) for each in turns] == [(0, True), (0, False), (1, False), (1, True)]
    for each in turns:
        assert len(each["each_step"]) == 30
        assert sum(each["each_step"]) <= each["seconds"] == pytest.approx(30 * each["step_seconds"])
        assert (each["thread_seconds"]["monitor"] > 0) is each["watched"]
    assert 0 < total["monitor_thread_share_with"] < 0.5
    assert "difference of 2 pairs" in capsys.readouterr().out
    if monitor_cost.CHROMIUM:
        pytest.importorskip("playwright")
        pictures = monitor_cost.render(frames, tmp_path)
        assert [path.name for path in pictures] == [
            f"monitor-gpu{name}.png" for name in ("-moving", "", "-dark", "-narrow")
        ]
        assert all(path.stat().st_size > 10_000 for path in pictures)
