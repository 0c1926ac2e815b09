"""The AdamW step on CUDA: Triton, torch operations and the C kernel give the same bits."""

from __future__ import annotations

import pytest
import torch

from offloadkit.facts.config import Precision
from offloadkit.kernels import cpu, gpu
from offloadkit.kernels import dispatch as step
from offloadkit.optim.adamw import adamw_scalars
from offloadkit.optim.lion import lion_scalars
from offloadkit.optim.moments import random_key
from offloadkit.optim.reference import step_reference
from offloadkit.optim.table import Segment, state_table
from tests.optim.states import (
    DTYPES,
    PRECISIONS,
    assert_same_bits,
    make_gradient,
    make_state,
    special_state,
    to,
)

LENGTH = 3 * 1024 * 1024
LENGTHS = (1, 255, 256, 70_001, 1_000_003, 513, 1_500_000)


def ragged_segments(number: int) -> list[Segment]:
    """Views of LENGTHS elements, each padded to 256, with alternating scalars, for step `number`."""
    segments, start = [], 256
    for index, length in enumerate(LENGTHS):
        betas = ((0.9, 0.999), (0.8, 0.99))[index % 2]
        scalars = adamw_scalars(lr=1e-3, betas=betas, eps=1e-8, weight_decay=0.01, step=number)
        offset = 2**32 - 512 if index == 4 else 0
        segments.append(Segment(start, length, scalars, random_key(0, f"weight {index}", number), offset))
        start += -(-length // 256) * 256
    assert start <= LENGTH
    return segments


@pytest.mark.parametrize("kept", PRECISIONS)
@pytest.mark.parametrize("gradient_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights_dtype", DTYPES, ids=str)
def test_triton_c_and_reference_are_equal_bit_for_bit_over_5_steps(
    weights_dtype: torch.dtype, gradient_dtype: torch.dtype, kept: Precision
) -> None:
    assert gpu.step_compiles(state_table("adamw", kept, weights_dtype), gradient_dtype)
    on_cpu = make_state(weights_dtype, LENGTH, kept=kept)
    triton, reference = to(on_cpu, "cuda"), to(on_cpu, "cuda")
    for number in range(1, 6):
        gradient, segments = make_gradient(gradient_dtype, LENGTH, seed=number), ragged_segments(number)
        grad_scale = 1.0 / gradient.double().norm().item()
        cpu.optimizer_step(on_cpu, gradient, segments, grad_scale)
        step.optimizer_step(triton, gradient.cuda(), segments, grad_scale)
        step_reference(reference, gradient.cuda(), segments, grad_scale)
    assert_same_bits(to(triton, "cpu"), on_cpu)
    assert_same_bits(to(reference, "cpu"), on_cpu)


@pytest.mark.parametrize("kept", PRECISIONS)
@pytest.mark.parametrize("place", ["master", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("gradient_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights_dtype", DTYPES, ids=str)
def test_special_values(weights_dtype: torch.dtype, gradient_dtype: torch.dtype, place: str, kept: Precision) -> None:
    state, gradient = special_state(weights_dtype, gradient_dtype, place, kept)
    on_gpu = to(state, "cuda")
    segments = [ragged_segments(3)[0]._replace(start=0, length=gradient.numel())]
    cpu.optimizer_step(state, gradient, segments, 0.9)
    gpu.optimizer_step(on_gpu, gradient.cuda(), segments, 0.9)
    assert_same_bits(to(on_gpu, "cpu"), state)


@pytest.mark.parametrize("kept", PRECISIONS)
def test_the_host_does_not_wait_and_no_memory_is_taken(kept: Precision) -> None:
    state = to(make_state(torch.bfloat16, LENGTH, kept=kept), "cuda")
    gradient = torch.ones(LENGTH, device="cuda").bfloat16()
    gpu.optimizer_step(state, gradient, ragged_segments(1), 0.5)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gpu.optimizer_step(state, gradient, ragged_segments(2), 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() == before


def test_a_stream_other_than_the_default_is_followed() -> None:
    on_cpu = make_state(torch.bfloat16, LENGTH)
    on_gpu, gradient = to(on_cpu, "cuda"), torch.zeros(LENGTH, device="cuda")
    compiled_with = to(on_gpu, "cuda")
    gpu.optimizer_step(compiled_with, gradient, ragged_segments(1), 1.0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        gradient.fill_(1.0)
        gpu.optimizer_step(on_gpu, gradient, ragged_segments(1), 1.0)
    stream.synchronize()
    cpu.optimizer_step(on_cpu, torch.ones(LENGTH), ragged_segments(1), 1.0)
    assert_same_bits(to(on_gpu, "cpu"), on_cpu)


@pytest.mark.parametrize("gradient_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights_dtype", DTYPES, ids=str)
def test_lion_s_triton_c_and_reference_are_equal_bit_for_bit(
    weights_dtype: torch.dtype, gradient_dtype: torch.dtype
) -> None:
    assert gpu.step_compiles(state_table("lion", "exact", weights_dtype), gradient_dtype)
    scalars = lion_scalars(lr=1e-3, betas=(0.9, 0.99), eps=0.0, weight_decay=0.1, step=1)
    for place in ("master", "exp_avg"):
        on_cpu, gradient = special_state(weights_dtype, gradient_dtype, place, optimizer="lion")
        triton, reference = to(on_cpu, "cuda"), to(on_cpu, "cuda")
        segments = [Segment(256, gradient.numel() - 300, scalars)]
        for _ in range(3):
            cpu.optimizer_step(on_cpu, gradient, segments, 0.5)
            step.optimizer_step(triton, gradient.cuda(), segments, 0.5)
            step_reference(reference, gradient.cuda(), segments, 0.5)
        assert_same_bits(to(triton, "cpu"), on_cpu)
        assert_same_bits(to(reference, "cpu"), on_cpu)
