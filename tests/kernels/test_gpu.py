"""The GPU step's dispatch, its behaviour without Triton, and its kernel in Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloadkit import errors
from offloadkit.kernels import dispatch as step
from offloadkit.kernels import gpu
from offloadkit.optim.adamw import adamw_scalars
from offloadkit.optim.reference import step_reference
from offloadkit.optim.table import Segment, state_table
from tests.optim.states import DTYPES, PRECISIONS, assert_same_bits, clone, make_gradient, make_state

SCALARS = adamw_scalars(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=3)

INTERPRETED = "from tests.kernels.interpreted import main; main()"


class BrokenKernel:
    """A kernel on a machine without a C compiler: the first launch fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error or RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    def __getitem__(self, grid: Any) -> Any:
        raise self._error


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(errors, "warned", set())
    gpu.step_compiles.cache_clear()
    yield
    gpu.step_compiles.cache_clear()


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        (None, "Triton is not installed"),
        (SimpleNamespace(adamw=BrokenKernel(), ROWS=4, PRECISIONS=PRECISIONS), "Failed to find C compiler"),
    ],
)
def test_without_triton_the_step_is_the_same_and_warns_once(
    fresh: None, monkeypatch: pytest.MonkeyPatch, kernels: Any, words: str
) -> None:
    monkeypatch.setattr(gpu, "gpu_triton", kernels)
    whole, chunk = [Segment(0, 1001, SCALARS, 17)], [Segment(256, 745, SCALARS, 17, 256)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for dtype, kept in product(DTYPES, PRECISIONS):
            state, gradient = make_state(dtype, 1024, kept=kept), make_gradient(dtype, 1024)
            expected = clone(state)
            step_reference(expected, gradient, whole, 0.5)
            gpu.optimizer_step(state, gradient, [Segment(0, 256, SCALARS, 17)], 0.5)
            gpu.optimizer_step(state, gradient, chunk, 0.5)
            assert_same_bits(state, expected)
    messages = {str(one.message) for one in caught}
    assert len(messages) == 1
    assert words in messages.pop()


def test_a_gpu_that_is_full_is_no_broken_compiler(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    state, gradient = make_state(torch.float32, 256), make_gradient(torch.float32, 256)
    full = BrokenKernel(torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(gpu, "gpu_triton", SimpleNamespace(adamw=full, ROWS=4, PRECISIONS=PRECISIONS))
    for _ in range(2):  # one failure does not disable the kernel
        with pytest.raises(torch.OutOfMemoryError):
            gpu.optimizer_step(state, gradient, [Segment(0, 256, SCALARS, 17)], 0.5)


def test_a_state_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="gradient has 11 elements"):
        gpu.optimizer_step(make_state(torch.bfloat16, 10), torch.zeros(11), [Segment(0, 10, SCALARS)], 1.0)


@pytest.mark.parametrize("triton", [False, True])
def test_without_a_gpu_no_kernel_is_tried(monkeypatch: pytest.MonkeyPatch, triton: bool) -> None:
    monkeypatch.setattr(gpu, "gpu_triton", SimpleNamespace(PIECES=1, PIECES_AT_ONCE=1) if triton else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "zeros", lambda *arguments, **options: pytest.fail("a kernel was tried"))
    assert gpu.available.__wrapped__() is False


def test_one_name_steps_wherever_the_layer_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    for name in ("cpu", "gpu"):
        monkeypatch.setattr(getattr(step, name), "optimizer_step", lambda *arguments, name=name: steps.append(name))
    monkeypatch.setattr(step, "step_reference", lambda *arguments: steps.append("reference"))
    for device in ("cpu", "cuda", "meta"):
        weights = SimpleNamespace(device=torch.device(device))
        state: Any = SimpleNamespace(weights=weights, table=state_table("adamw", "exact", torch.float32))
        step.optimizer_step(state, torch.zeros(0), [], 1.0)
    assert steps == ["cpu", "gpu", "reference"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_triton_kernel_interpreted_on_the_cpu_equals_the_reference() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, check=True)
