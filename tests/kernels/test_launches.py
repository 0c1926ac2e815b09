"""A Triton kernel that was compiled for arguments of the same kind is launched without Triton's search for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offloadkit.kernels import gpu

ARRAY, STREAM = torch.zeros(64), 5


class Kernel:
    """Like a function of Triton; notes the arguments that it was compiled for and those it was launched with."""

    def __init__(self, returns_compiled: bool = True) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self._returns_compiled = returns_compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, enable_fp_fusion: bool) -> Any:
            assert not enable_fp_fusion
            self.compiled.append(arguments)
            return Compiled(self.launched) if self._returns_compiled else None

        return run


class Compiled:
    """Like Triton's `CompiledKernel`: `run` takes the grid, the stream, what to launch, and hooks."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self, launched: list[tuple[Any, ...]]) -> None:
        self._launched = launched

    def run(self, *arguments: Any) -> None:
        grid, stream, function, metadata, *hooks = arguments[:3], *arguments[3:9]
        assert (stream, function, metadata) == (STREAM, self.function, self.packed_metadata)
        assert hooks == [None, None, None]
        self._launched.append((grid, *arguments[9:]))


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(gpu, "_compiled", {})
    monkeypatch.setattr(gpu, "_stream_of", lambda device: STREAM if device == ARRAY.get_device() else None)
    module = SimpleNamespace(LAUNCHES_TAKE_CONSTANTS=True)
    monkeypatch.setattr(gpu, "gpu_triton", module)
    return module


@pytest.mark.parametrize(
    ("first", "second"),
    [(17, 18), (16, 1024), (0, 32), (0.5, 1.0), (-5, 33), (2**40, 2**41), (ARRAY, ARRAY[32:])],
)
def test_arguments_of_the_same_kind_are_launched_at_once(first: Any, second: Any) -> None:
    kernel = Kernel()
    gpu._launch(kernel, 3, ARRAY, first, True)
    gpu._launch(kernel, 4, ARRAY, second, True)
    assert len(kernel.compiled) == 1
    assert len(kernel.launched) == 1
    grid, *arguments = kernel.launched[0]
    assert grid == (4, 1, 1)
    given = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in (ARRAY, second, True)]
    assert list(zip(map(type, arguments), arguments, strict=True)) == list(zip(map(type, given), given, strict=True))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (17, 16),
        (17, 1),
        (1, True),
        (0, False),
        (0.0, 0),
        (2**31 - 1, 2**31),
        (-(2**31), 2**31),
        (True, False),
        (ARRAY, ARRAY[1:]),
        (ARRAY, ARRAY.bfloat16()),
    ],
)
def test_arguments_of_another_kind_are_compiled_for(first: Any, second: Any) -> None:
    kernel = Kernel()
    for argument in (first, second):
        gpu._launch(kernel, 3, ARRAY, argument)
    assert len(kernel.compiled) == 2
    assert not kernel.launched


def test_kernels_share_nothing() -> None:
    for kernel in (Kernel(), Kernel()):
        gpu._launch(kernel, 3, ARRAY)
        assert len(kernel.compiled) == 1


def test_the_interpreter_older_versions_and_amd_search_each_time(
    triton: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(returns_compiled=False)
    for _ in range(2):
        gpu._launch(kernel, 3, ARRAY)
    assert len(kernel.compiled) == 2
    triton.LAUNCHES_TAKE_CONSTANTS = False
    kernel = Kernel()
    for _ in range(2):
        gpu._launch(kernel, 3, ARRAY)
    assert len(kernel.compiled) == 2
    triton.LAUNCHES_TAKE_CONSTANTS = True
    monkeypatch.setattr(torch.version, "hip", "6.4")
    kernel = Kernel()
    for _ in range(2):
        gpu._launch(kernel, 3, ARRAY)
    assert len(kernel.compiled) == 2
