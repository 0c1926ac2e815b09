"""The gradient norm's definition in plain Python, in torch operations, and in C at every CPU level."""

from __future__ import annotations

import importlib.util
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from offloadkit.kernels import cpu
from offloadkit.kernels.dispatch import block_sums
from offloadkit.optim.norm import NORM_BLOCK, block_sums_reference, norm_blocks, sum_in_order
from tests.optim.states import DTYPES, assert_same_array_bits, forced_level, make_gradient

LEVELS = cpu.cpu_levels() or [pytest.param("none", marks=pytest.mark.skip(reason="the C kernel is not built"))]
RANGES = [(3, 2 * NORM_BLOCK + 777), (140_000, 1), (140_001, 31), (140_032, 64), (140_100, 65), (141_000, NORM_BLOCK)]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    with forced_level(request.param):
        yield request.param


def sums_of(gradient: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    out = torch.full((blocks.shape[0],), -1.0, dtype=torch.float64)
    block_sums(gradient, blocks, out)
    return out


def reference_sums_of(gradient: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    out = torch.full((blocks.shape[0],), -1.0, dtype=torch.float64)
    block_sums_reference(gradient, blocks, out)
    return out


def test_without_the_c_kernel_the_reference_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "available", lambda: False)
    gradient, blocks = make_gradient(torch.float32, 150_000), norm_blocks([(3, 140_000)])
    assert_same_array_bits(sums_of(gradient, blocks), reference_sums_of(gradient, blocks))


def plain_python_sum(gradient: torch.Tensor, start: int, length: int) -> float:
    """The definition literally: squares, zero padding, adjacent rows, adjacent columns."""
    squares = [value * value for value in gradient[start : start + length].double().tolist()]
    squares += [0.0] * (NORM_BLOCK - length)
    rows = [squares[at : at + 32] for at in range(0, NORM_BLOCK, 32)]
    while len(rows) > 1:
        rows = [[x + y for x, y in zip(rows[i], rows[i + 1], strict=True)] for i in range(0, len(rows), 2)]
    columns = rows[0]
    while len(columns) > 1:
        columns = [columns[i] + columns[i + 1] for i in range(0, len(columns), 2)]
    return columns[0]


def test_blocks_cut_each_parameter_by_itself() -> None:
    blocks = norm_blocks([(0, 0), (10, NORM_BLOCK), (NORM_BLOCK + 10, NORM_BLOCK + 1), (900_000, 5)])
    second = NORM_BLOCK + 10
    assert blocks.tolist() == [[10, NORM_BLOCK], [second, NORM_BLOCK], [second + NORM_BLOCK, 1], [900_000, 5]]
    assert norm_blocks([]).shape == (0, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c_and_reference_follow_the_definition(level: str, dtype: torch.dtype) -> None:
    gradient = make_gradient(dtype, 210_000)
    blocks = norm_blocks(RANGES)
    expected = torch.tensor([plain_python_sum(gradient, *block) for block in blocks.tolist()], dtype=torch.float64)
    assert_same_array_bits(reference_sums_of(gradient, blocks), expected)
    assert_same_array_bits(sums_of(gradient, blocks), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_short_length(level: str, dtype: torch.dtype) -> None:
    """Lengths around rows and pairs of rows, and a number of rows with every pattern of bits."""
    gradient = make_gradient(dtype, NORM_BLOCK + 8)
    lengths = [*range(130), *(32 * rows + 5 for rows in range(3, 2048, 61)), NORM_BLOCK - 1, NORM_BLOCK]
    blocks = torch.tensor([[7, length] for length in lengths])
    assert_same_array_bits(sums_of(gradient, blocks), reference_sums_of(gradient, blocks))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38, 1e-45, -0.0])
def test_special_values(level: str, value: float) -> None:
    gradient = make_gradient(torch.float32, 5000)
    gradient[777] = value
    blocks = norm_blocks([(0, 5000)])
    sums = sums_of(gradient, blocks)
    assert_same_array_bits(sums, reference_sums_of(gradient, blocks))
    assert math.isfinite(sums[0].item()) == math.isfinite(value)


def test_no_blocks_and_no_gradient() -> None:
    assert sums_of(torch.zeros(0), norm_blocks([])).tolist() == []
    assert reference_sums_of(torch.zeros(0), torch.tensor([[0, 0]])).tolist() == [0.0]


def test_blocks_are_added_in_order_without_compensation() -> None:
    generator = random.Random(0)
    values = [generator.random() * 10.0 ** generator.randint(-12, 12) for _ in range(1000)]
    total = 0.0
    for value in values:
        total += value
    sums = np.array(values)
    assert sum_in_order([sums[:10], sums[10:10], sums[10:]]) == total
    assert sum_in_order([]) == 0.0
    assert total != math.fsum(values), "the values must distinguish the two sums"


@pytest.mark.parametrize("block", [[-1, 5], [69_996, 5], [0, NORM_BLOCK + 1], [3, -1], [0, -1]])
def test_a_block_outside_the_gradient_is_refused(block: list[int]) -> None:
    if not cpu.available():
        pytest.skip("the C kernel is not built")
    for blocks in ([block], [[0, 4], block]):  # every block is checked
        with pytest.raises(ValueError, match="a block leaves the gradient of 70000 elements"):
            sums_of(torch.zeros(70_000), torch.tensor(blocks))


def test_arguments_that_do_not_fit_are_refused() -> None:
    blocks, out = norm_blocks([(0, 10)]), torch.zeros(1, dtype=torch.float64)
    with pytest.raises(TypeError, match="float64: the norm is taken of bf16, fp16 or fp32"):
        block_sums(torch.zeros(10).double(), blocks, out)
    with pytest.raises(TypeError, match="blocks must be int64 and out fp64"):
        block_sums(torch.zeros(10), blocks, out.float())
    sums = {
        (torch.zeros(10), blocks): (2,),
        (torch.zeros(2, 5), blocks): (1,),
        (torch.zeros(10), blocks[0]): (2,),
        (torch.zeros(10), torch.zeros(1, 3, dtype=torch.int64)): (1,),
    }
    for arguments, shape in sums.items():
        with pytest.raises(ValueError, match=r"expected gradient \[num_elements\]"):
            block_sums(*arguments, torch.zeros(shape, dtype=torch.float64))
    with pytest.raises(ValueError, match="must be contiguous"):
        block_sums(torch.zeros(20)[::2], blocks, out)
    with pytest.raises(ValueError, match="are on meta, cpu, cpu"):
        block_sums(torch.zeros(10, device="meta"), blocks, out)


INTERPRETED = """
import torch
from offloadkit.kernels import gpu
from offloadkit.optim.norm import block_sums_reference, norm_blocks
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    gradient = (torch.randn(80_000) * torch.logspace(-4, 3, 80_000)).to(dtype)
    blocks = norm_blocks([(3, 70_001), (70_004, 1), (70_010, 2049)])
    one, other = torch.empty(4, dtype=torch.float64), torch.empty(4, dtype=torch.float64)
    gpu.block_sums(gradient, blocks, one)
    block_sums_reference(gradient, blocks, other)
    assert torch.equal(one, other), (dtype, one, other)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_triton_kernels_interpreted_on_the_cpu_equal_the_reference() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, check=True)
