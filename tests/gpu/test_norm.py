"""The gradient norm on CUDA: Triton, torch operations and the C kernel give the same bits."""

from __future__ import annotations

import pytest
import torch

from offloadkit.kernels import gpu
from offloadkit.kernels.dispatch import block_sums
from offloadkit.optim.norm import NORM_BLOCK, block_sums_reference, norm_blocks
from tests.optim.states import DTYPES, assert_same_array_bits, make_gradient

pytestmark = pytest.mark.gpu

RANGES = [(3, 20 * NORM_BLOCK + 777), (1_400_000, 1), (1_400_001, 31), (1_400_032, 2049), (1_410_000, NORM_BLOCK)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_reference_and_c_are_equal_bit_for_bit(dtype: torch.dtype) -> None:
    assert gpu.available()
    gradient, blocks = make_gradient(dtype, 1_500_000), norm_blocks(RANGES)
    sums = torch.empty(blocks.shape[0], dtype=torch.float64)
    block_sums(gradient, blocks, sums)
    on_gpu = gradient.cuda(), blocks.cuda()
    for function in (gpu.block_sums, block_sums, block_sums_reference):
        out = torch.full_like(sums, -1.0, device="cuda")
        function(*on_gpu, out)
        assert_same_array_bits(out.cpu(), sums, function.__module__)


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 3e38, 1e-45])
def test_special_values(value: float) -> None:
    gradient, blocks = make_gradient(torch.float32, 100_000), norm_blocks([(0, 100_000)])
    gradient[66_666] = value
    sums, out = torch.empty(2, dtype=torch.float64), torch.empty(2, dtype=torch.float64, device="cuda")
    block_sums(gradient, blocks, sums)
    gpu.block_sums(gradient.cuda(), blocks.cuda(), out)
    assert_same_array_bits(out.cpu(), sums)


def test_more_blocks_than_one_launch_takes() -> None:
    gradient = make_gradient(torch.bfloat16, 50_000).cuda()
    blocks = norm_blocks([(start, 5) for start in range(2 * gpu.BLOCKS_AT_ONCE + 7)]).cuda()
    one, other = (torch.empty(blocks.shape[0], dtype=torch.float64, device="cuda") for _ in range(2))
    gpu.block_sums(gradient, blocks, one)
    block_sums_reference(gradient, blocks, other)
    assert_same_array_bits(one, other)


def test_neither_memory_nor_the_host_waits_for_the_norm() -> None:
    gradient = torch.ones(64 << 20, dtype=torch.bfloat16, device="cuda")
    blocks = norm_blocks([(0, gradient.numel())]).cuda()
    out = torch.empty(blocks.shape[0], dtype=torch.float64, device="cuda")
    for function in (gpu.block_sums, block_sums_reference):
        function(gradient, blocks, out)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            function(gradient, blocks, out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.max_memory_allocated() - before < 64 << 20
        assert out.sum().item() == gradient.numel()


def test_a_stream_other_than_the_default_is_followed() -> None:
    gradient, blocks = torch.zeros(32 << 20, device="cuda"), norm_blocks([(0, 32 << 20)]).cuda()
    out = torch.empty(blocks.shape[0], dtype=torch.float64, device="cuda")
    gpu.block_sums(gradient, blocks, out)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        gradient.fill_(1.0)
        gpu.block_sums(gradient, blocks, out)
    stream.synchronize()
    assert out.sum().item() == gradient.numel()
