"""The first seconds of a run: a line before libraries load, and no garbage collection while they load."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import report, table
from benchmarks.start import Stopwatch, start
from offloadkit.facts import starting
from offloadkit.facts.starting import collector_off, said_if_long

STOPS_AT_TORCH = """
import sys

class Stop:
    def find_spec(self, name, *_):
        if name == "torch":
            raise SystemExit("torch is imported")

sys.meta_path.insert(0, Stop())
"""


@pytest.mark.parametrize(
    "code",
    [
        "import offloadkit; offloadkit.finetune",
        "sys.argv = ['offloadkit', 'plan', 't5-3b', '--json']; from offloadkit.doors.cli import app; app()",
        "sys.argv = ['offloadkit', 'train', 't5-3b', 'rows.jsonl']; from offloadkit.doors.cli import app; app()",
    ],
)
def test_a_line_comes_before_torch(code: str) -> None:
    """On stderr, because stdout may be JSON."""
    done = subprocess.run([sys.executable, "-c", STOPS_AT_TORCH + code], capture_output=True, text=True, check=False)
    first, last = done.stderr.splitlines()
    assert first.startswith("offloadkit: loading torch")
    assert last == "torch is imported"
    assert done.stdout == ""


def test_a_search_is_said_if_it_is_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with said_if_long("searching in no time"):
        pass
    monkeypatch.setattr(starting, "LONG_SECONDS", 0.01)
    with said_if_long("searching for long"):
        time.sleep(0.1)
    assert capsys.readouterr().err == "offloadkit: searching for long ...\n"


def test_the_end_of_a_command_looks_through_no_objects() -> None:
    """The first function registered with atexit runs last."""
    code = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0)); import offloadkit.doors.cli"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"


def test_the_collector_is_as_it_was() -> None:
    with collector_off():
        assert not gc.isenabled()
        with collector_off():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_phase_inside_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, times = Stopwatch(), iter([0.0, 1.0, 4.0, 10.0])
    monkeypatch.setattr("benchmarks.start.time.perf_counter", lambda: next(times))
    watch.timed(watch.timed(lambda: None, "inner"), "outer")()
    assert watch.seconds == {"inner": 3.0, "outer": 7.0}


@pytest.mark.slow
def test_a_start_is_measured_by_phase(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    (found,) = start("t5-tiny", sources=("random",), turns=1, device="cpu", out=out, commit="abc")
    assert {"import libraries", "plan", "draw weights", "first step", "rest", "CPU"} <= found["figures"].keys()
    assert all(number >= 0 for number in found["figures"].values())
    (row,) = table.read(out)
    assert (row["case"], row["gpu"], row["commit"]) == ("startup-t5-tiny-random", "none", "abc")
    assert (row["figures"], row["cores"]) == (found["figures"], found["cores"])


def test_the_command_s_start_is_a_row_and_a_line_of_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.start.run_command", lambda *_: {"all": 0.25})
    rows = start("t5-3b", sources=("command",), vram="8GiB", device="cpu", out=tmp_path / "rows.csv", commit="abc")
    assert [row["engine"] for row in rows] == ["offloadkit --help", "offloadkit plan t5-3b --vram 8GiB"]
    *_, first, last, _blank = report.starts(table.read(tmp_path / "rows.csv"))
    assert first.startswith("| startup-help | offloadkit --help | 0.2 | 0.0 | 0.25 | - | no GPU, ")
    assert last.startswith("| startup-plan-t5-3b | ")
