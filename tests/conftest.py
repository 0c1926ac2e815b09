"""How the tests run: the whole suite in two processes without a GPU, `gpu` tests only with one."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offloadkit.facts.starting import collector_off

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

GPU_TESTS = Path(__file__).parent / "gpu"

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # nohup and shells ignore them for jobs in the background
        signal.signal(number, default)

if IS_WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the other core belongs to the other worker


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite in two processes if pytest-xdist is installed; `-n 0` runs it in one.

    Selected tests, a debugger and a GPU (whose memory the tests measure and fill) get one process.
    """
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    if IS_WORKER or not whole or config.option.usepdb or getattr(config.option, "numprocesses", 0) is not None:
        return
    import torch

    if not torch.cuda.is_available():
        config.option.numprocesses, config.option.dist = 2, "worksteal"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that no worker is left with one at the end. Mark everything under tests/gpu as
    `gpu`, and skip `gpu` tests if torch sees no CUDA device."""
    items.sort(key=_seconds, reverse=True)
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker("gpu")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _seconds(item: pytest.Item) -> float:
    """The seconds that the test's mark `slow` says; 0 if it says none."""
    return next((mark.args[0] for mark in item.iter_markers("slow") if mark.args), 0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without Python's garbage collector: the imports of all tests take a third longer with it."""
    with collector_off():
        return (yield)


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection: each engine runs one, and a pass over torch and transformers
    takes longer than most tests."""
    gc.callbacks.append(_time_collection)
    _freeze()


def pytest_runtest_logfinish() -> None:
    """Do the same with modules that the tests have imported since, and with what else makes a collection slow."""
    if _collection_seconds > 0.005 or len(sys.modules) >= _frozen_modules + 50:
        _freeze()


_frozen_modules = 0
_began = _collection_seconds = 0.0
"""Processor time when the last full collection began, and its duration."""


def _time_collection(phase: str, info: dict[str, int]) -> None:
    global _began, _collection_seconds
    if info["generation"] == 2:
        now = time.thread_time()
        if phase == "start":
            _began = now
        else:
            _collection_seconds = now - _began


def _freeze() -> None:
    global _frozen_modules, _collection_seconds
    _frozen_modules = len(sys.modules)
    gc.collect()
    gc.freeze()
    _collection_seconds = 0.0


@pytest.fixture(autouse=True)
def temporary_files_may_be_in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests with states on disk also run if /tmp is a tmpfs."""
    disk = sys.modules.get("offloadkit.device.state_file")
    if disk is not None:
        monkeypatch.setattr(disk, "RAM_FILE_SYSTEMS", set())


@pytest.fixture(autouse=True)
def saving_does_not_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of power cuts and of damage watch or replace `os.fsync` themselves."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(autouse=True)
def engines_without_a_budget_begin_on_a_gpu_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan is made for these engines: states are in RAM and the CPU steps, as most tests expect."""
    start = sys.modules.get("offloadkit.engine.start")
    if start is not None:
        import torch

        chooses = start.needs_plan
        monkeypatch.setattr(start, "needs_plan", lambda config, device: chooses(config, torch.device("cpu")))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run torch on one thread, which is faster for tiny matrices."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Otherwise the backward of torch's attention on a GPU adds in any order."""
    import torch

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep output out of the repository."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets_cache")


@pytest.fixture
def what_left_a_buffer_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also cut layers into several chunks."""
    from offloadkit.offload.state_ring import StateRing
    from offloadkit.offload.weight_ring import WeightRing
    from offloadkit.planner import layout

    monkeypatch.setattr(WeightRing, "fill_with_nan", True)
    monkeypatch.setattr(StateRing, "fill_with_nan", True)
    monkeypatch.setattr(layout, "STEP_CHUNK", 1024)
