"""How the tests run: the whole suite in two processes without a GPU, `gpu` tests only with one."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

GPU_TESTS = Path(__file__).parent / "gpu"

IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ

if IS_WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the other core is the other worker's


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole suite in two processes where pytest-xdist is installed; `-n 0` runs it in one.

    Chosen tests, a debugger and a GPU (whose memory tests measure, and fill) have one process.
    """
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    if IS_WORKER or not whole or config.option.usepdb or getattr(config.option, "numprocesses", 0) is not None:
        return
    import torch

    if not torch.cuda.is_available():
        config.option.numprocesses, config.option.dist = 2, "worksteal"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything under tests/gpu as `gpu`, and skip what is so marked where torch sees no CUDA device."""
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


def pytest_collection_finish() -> None:
    """Leave the imported modules out of garbage collections: each engine makes one, and a pass over torch and
    transformers takes longer than most tests."""
    _freeze_modules()


def pytest_runtest_logfinish() -> None:
    """Do the same with the modules that the tests imported since."""
    if len(sys.modules) >= _frozen_modules + 50:
        _freeze_modules()


_frozen_modules = 0


def _freeze_modules() -> None:
    global _frozen_modules
    _frozen_modules = len(sys.modules)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def temporary_files_may_be_in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /tmp is a tmpfs, tests of states on disk run all the same."""
    disk = sys.modules.get("offloadkit.device.state_file")
    if disk is not None:
        monkeypatch.setattr(disk, "RAM_FILE_SYSTEMS", set())


@pytest.fixture(autouse=True)
def engines_without_a_budget_begin_on_a_gpu_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is planned for them: states are in RAM and the CPU steps, which is what most tests are about."""
    engine = sys.modules.get("offloadkit.engine.engine")
    if engine is not None:
        import torch

        chooses = engine.needs_plan
        monkeypatch.setattr(engine, "needs_plan", lambda config, device: chooses(config, torch.device("cpu")))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes on one thread: for tiny matrices that is faster."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
