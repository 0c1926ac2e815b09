"""Fresh processes: limits of time and RAM, crashes, errors, and cached rows."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import offloadkit
from offloadkit.device import process_memory as memory
from offloadkit.doors.comparing.words import duration, text_table
from offloadkit.doors.engines import plain, runner, worker
from offloadkit.doors.engines import timing as steps
from offloadkit.doors.engines.plain import Baseline
from offloadkit.doors.engines.work import Work, plain_model, random_steps
from offloadkit.errors import DoesNotFitError, OutputError, RepeatWindowError

CPU = torch.device("cpu")
TINY = Work("t5-tiny", batch_size=2, input_length=8, target_length=4, steps=1, warmup=0)


def test_a_task_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    row = runner.in_fresh_process({"mode": "plan", "works": []}, timeout=0.3, ram=None, log=tmp_path / "log")
    assert row == {"status": "failed", "reason": "took more than 0.3 s (--timeout)"}


LASTING = """
import os, subprocess, sys, time
from pathlib import Path

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
Path(__file__).with_name("new").write_text(f"{os.getpid()} {child.pid}")
Path(__file__).with_name("new").rename(Path(__file__).with_name("pids"))
time.sleep(300)
"""
WAITING = """
from offloadkit.doors.engines.runner import in_fresh_process

in_fresh_process({}, timeout=300, ram=None, log=None, module="lasting")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_task_ends_with_the_process_that_started_it(how: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "lasting.py").write_text(LASTING)
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    with subprocess.Popen([sys.executable, "-c", WAITING], env=os.environ | {"PYTHONPATH": paths}) as parent:
        assert within(60, (tmp_path / "pids").exists)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(psutil.Process(pid).is_running() for pid in pids)
        parent.send_signal(how)
    assert parent.returncode == -how
    try:
        assert within(10, lambda: not any(runs(pid) for pid in pids))
    finally:
        for pid in filter(runs, pids):
            os.kill(pid, signal.SIGKILL)


def runs(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def within(seconds: float, done: Callable[[], bool]) -> bool:
    """Whether `done` becomes true within `seconds`."""
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.05)
    return done()


@pytest.mark.slow
def test_an_error_in_a_task_is_a_row_and_its_log_stays(tmp_path: Path) -> None:
    task = {"mode": "measure", "engine": "no-such-engine", "work": asdict(TINY)}
    row = runner.Runs(tmp_path, timeout=100).row(task)
    assert row["status"] == "failed"
    assert row["reason"] == "KeyError: 'no-such-engine'"
    (log,) = (tmp_path / "logs").iterdir()
    assert "Traceback" in log.read_text()


def test_a_process_that_dies_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.sys, "executable", "/bin/false")
    row = runner.in_fresh_process({}, timeout=10, ram=None, log=tmp_path / "log")
    assert row == {"status": "failed", "reason": "exit 1: it printed nothing"}


def test_a_peak_that_was_not_seen_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"status": "measured", "peak_ram_bytes": 200 << 30}
    (tmp_path / "short_peak.py").write_text(f"import json, sys; open(sys.argv[2], 'w').write(json.dumps({row}))")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = [
        runner.in_fresh_process({}, timeout=60, ram=ram, log=tmp_path / "log", module="short_peak")["status"]
        for ram in (100 << 30, 300 << 30, None)
    ]
    assert found == ["does not fit", "measured", "measured"]


def test_a_row_that_was_written_by_halves_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "in_fresh_process", lambda task, **_: {"status": "measured", "number": 1})
    runs = runner.Runs(tmp_path, timeout=1)
    assert runs.row({"mode": "plan"}) == {"status": "measured", "number": 1}
    (path,) = (tmp_path / "rows").iterdir()
    for wrong in (path.read_text()[:20], "[1, 2]", "3", '{"row": [1]}', '{"row": {}}'):
        path.write_text(wrong)
        assert "kept" not in runs.row({"mode": "plan"})
    assert runs.row({"mode": "plan"})["kept"]
    assert json.loads(path.read_text())["environment"]["torch"] == metadata.version("torch")
    path.unlink()
    path.mkdir()
    with pytest.raises(OutputError, match=rf"rows/{path.name} could not be written, .*Is a directory"):
        runs.row({"mode": "plan"})


def test_rows_that_users_saved_are_found_again() -> None:
    """A row's file is named by its task, so tasks of the first release keep their fields and order."""
    first = ["model", "batch_size", "input_length", "target_length", "accumulation", "precision", "dtype", "recomputed"]
    first += ["our_compute", "vram", "ram", "steps", "warmup", "seed"]
    assert list(TINY.to_dict()) == first
    later = replace(TINY, mask="ragged", compiled=True, disk="/folder", bucket_elements=5)
    assert list(later.to_dict()) == [*first, "mask", "compiled", "disk", "bucket_elements"]
    assert Work(**later.to_dict()) == later


def test_what_does_a_task_is_no_part_of_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "in_fresh_process", lambda task, **_: {"status": "measured"})
    runs = runner.Runs(tmp_path, timeout=1)
    runs.row({"mode": "finetune", "function": "somewhere:first"})
    assert runs.row({"mode": "finetune", "function": "elsewhere:second"})["kept"]
    assert "kept" not in runs.row({"mode": "finetune", "seed": 1, "function": "elsewhere:second"})


BOUND = """
import json, os, sys
row = {"cores": len(os.sched_getaffinity(0)), "threads": os.environ.get("OMP_NUM_THREADS")}
open(sys.argv[2], "w").write(json.dumps({"status": "measured"} | row))
"""


def test_a_process_is_bound_to_as_many_cores_as_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bound.py").write_text(BOUND)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = [
        runner.in_fresh_process({}, timeout=60, ram=None, log=tmp_path / "log", module="bound", cores=cores)
        for cores in (1, 0)
    ]
    assert [(row["cores"], row["threads"]) for row in found] == [(1, "1"), (len(os.sched_getaffinity(0)), None)]


WHERE = """
import importlib.util, json, sys
from pathlib import Path
origins = {name: getattr(importlib.util.find_spec(name), "origin", None) for name in ("offloadkit", "deepspeed", "hf")}
Path(sys.argv[2]).write_text(json.dumps({"status": "measured", **origins}))
"""


def test_a_process_imports_this_package_whose_parts_hide_no_other_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`offloadkit/deepspeed` is not DeepSpeed."""
    (tmp_path / "where.py").write_text(WHERE)
    (tmp_path / "deepspeed.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    row = runner.in_fresh_process({}, timeout=60, ram=None, log=tmp_path / "log", module="where")
    assert (row["offloadkit"], row["deepspeed"], row["hf"]) == (
        offloadkit.__file__,
        str(tmp_path / "deepspeed.py"),
        None,
    )


class Steps:
    """An engine with a simulated clock: steps take 4 ms, the first four 20 ms."""

    def __init__(self) -> None:
        self.taken, self.now = 0, 0.0

    def forward(self, batch: Any) -> torch.Tensor:
        return torch.zeros(())

    def backward(self, loss: torch.Tensor) -> None:
        self.taken += 1
        self.now += 0.02 if self.taken < 5 else 0.004

    def step(self, is_boundary: bool) -> None:
        pass

    def settle(self) -> None:
        pass


def test_as_many_steps_are_timed_as_it_takes_for_two_runs_to_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "WARM_SECONDS", 0.2)
    monkeypatch.setattr(steps, "TIMED_SECONDS", 0.3)

    def timed(work: Work) -> dict[str, Any]:
        engine: Any = Steps()
        monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: engine.now))
        return steps.timed_steps(engine, [[{"input_ids": torch.zeros(1, 1)}]], work, CPU, memory.DeviceMemory(CPU))

    row = timed(replace(TINY, steps=None))
    assert 0.2 < sum(row["all_step_seconds"]) <= 0.3  # enough for 0.3 s at the first steps' speed
    assert row["step_seconds"] == pytest.approx(0.004)
    assert len(timed(replace(TINY, steps=3))["all_step_seconds"]) == 3
    monkeypatch.setattr(steps, "TIMED_SECONDS", 0.001)
    assert len(timed(replace(TINY, steps=None))["all_step_seconds"]) == 6


def test_steps_of_several_widths_come_in_turn_and_count_equally() -> None:
    class Ragged(Steps):
        def forward(self, batch: Any) -> torch.Tensor:
            self.width = batch["input_ids"].shape[1]
            return torch.zeros(())

        def backward(self, loss: torch.Tensor) -> None:
            self.now += self.width

    engine: Any = Ragged()
    given = [[{"input_ids": torch.zeros(1, columns)}] for columns in (3, 2, 2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: engine.now))
        row = steps.timed_steps(engine, given, replace(TINY, steps=4), CPU, memory.DeviceMemory(CPU))
    assert len(row["all_step_seconds"]) == 6
    assert row["step_seconds"] == pytest.approx(7 / 3)
    assert row["seconds_by_width"] == {2: 2, 3: 3}


def test_a_plan_that_was_too_large_is_left_as_finetune_leaves_it_and_the_next_one_is_timed() -> None:
    class Moves(Steps):
        """The GPU is full in steps two and four."""

        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            if self.taken in (2, 4):
                raise RepeatWindowError("the engine has moved to a leaner plan")

    engine: Any = Moves()
    work = replace(TINY, steps=3, warmup=1)
    row = steps.timed_steps(engine, random_steps(work, CPU), work, CPU, memory.DeviceMemory(CPU))
    assert engine.taken == 2 + 2 + (1 + 1 + 1 + 3)
    assert len(row["all_step_seconds"]) == 3


def test_ram_of_children_counts() -> None:
    child = "import time; kept = bytearray(64 << 20); print(len(kept), flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        seen = memory.tree_ram_bytes(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
    assert 64 << 20 < seen < 256 << 20
    assert memory.tree_ram_bytes(process.pid) == 0


def test_ram_that_one_look_alone_has_found_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak_of(seen: list[int]) -> tuple[int, bool]:
        looks = iter(seen)
        monkeypatch.setattr(runner, "tree_ram_bytes", lambda _: next(looks, 1))
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
            monkeypatch.setattr(runner, "_LOOK_SECONDS", 0.01)
            peak, killed = runner._watch(process, 0.2, 20)
            process.kill()
        assert killed is not None
        return peak, "RAM" in killed["reason"]

    assert peak_of([10, 30, 10, 12, 30, 11]) == (12, False)
    assert peak_of([10, 30, 25]) == (25, True)


def test_a_full_gpu_says_what_it_needs_at_least() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 30.00 GiB. GPU 0 has ...")
    wrapped = RuntimeError("deepspeed failed")
    wrapped.__cause__ = error
    row = worker.why(wrapped, 11 << 30)
    assert row["status"] == "does not fit"
    assert row["reason"] == "does not fit: needs more than 30 GiB of VRAM, has 11 GiB"


def test_a_refused_plan_does_not_fit_and_another_error_failed() -> None:
    refused = DoesNotFitError("the plan does not fit: needs 38 GiB of VRAM, has 11 GiB\nx would fit")
    assert worker.why(refused, None) == {
        "status": "does not fit",
        "reason": "does not fit: needs 38 GiB of VRAM, has 11 GiB",
    }
    assert worker.why(ValueError(""), None) == {"status": "failed", "reason": "ValueError: "}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_baseline_trains_in_every_dtype(dtype: str, recomputed: bool, one_thread: None) -> None:
    work = Work(
        "t5-tiny", batch_size=2, input_length=8, target_length=4, accumulation=2, recomputed=recomputed, steps=6
    )
    engine: Any = Baseline(work, dtype, CPU)
    before = [weight.clone() for weight in engine.masters]
    row = steps.timed_steps(engine, random_steps(work, CPU), work, CPU, memory.DeviceMemory(CPU))
    assert len(row["all_step_seconds"]) == work.steps
    assert 4 < row["last_loss"] < 8
    moved = [(after - first).abs().max() for after, first in zip(engine.masters, before, strict=True)]
    assert max(moved) > 1e-5
    assert max(moved) < 1e-3  # ten updates of at most 1e-5
    for weight, master in zip(engine.weights, engine.masters, strict=True):
        assert weight.equal(master.to(weight.dtype))


def test_the_baseline_s_parts_step_as_the_whole(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work("t5-tiny", batch_size=2, input_length=8, target_length=4)
    ((batch,),) = random_steps(work, CPU)

    def trained() -> Baseline:
        torch.manual_seed(0)  # for dropout
        engine = Baseline(work, "bf16", CPU)
        for _ in range(2):
            engine.backward(engine.forward(batch))
            engine.step(True)
        return engine

    whole = trained()
    monkeypatch.setattr(plain, "ELEMENTS_AT_ONCE", 5000)
    in_parts = trained()
    assert len(in_parts.parts) > 10
    assert all(first.equal(second) for first, second in zip(whole.masters, in_parts.masters, strict=True))


def test_both_engines_get_the_same_rows_and_a_baseline_of_our_compute() -> None:
    (first,), (again,) = random_steps(TINY, CPU), random_steps(TINY, CPU)
    assert all(tensor.equal(again[0][name]) for name, tensor in first[0].items())
    ours: Any = plain_model(Work("t5-tiny", 1, 8, 4, our_compute=True), "fp32", CPU, CPU)
    assert ours.config._attn_implementation == "eager"
    theirs: Any = plain_model(Work("t5-tiny", 1, 8, 4), "fp32", CPU, CPU)
    fused = [sum("forward" in vars(module) for module in model.modules()) for model in (theirs, ours)]
    assert fused[0] == 0 < fused[1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.9996, "1 s"),
        (0.0453, "45.3 ms"),
        (8.34, "8.34 s"),
        (125, "2 min 05 s"),
        (4680, "78 min"),
        (8400, "2 h 20 min"),
        (7200, "2 h"),
    ],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_remark_widens_no_column() -> None:
    lines = text_table(["a", "b", "c"], [["1", "2", "3"], ["10", "a remark that is long"]], 1)
    assert lines == ["a   b  c", "--  -  -", "1   2  3", "10  a remark that is long"]
