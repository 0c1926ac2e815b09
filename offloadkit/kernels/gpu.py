"""Triton kernels on CUDA: the AdamW step and the gradient norm's block sums, with the bits of their references.

Where Triton is missing or cannot compile, torch operations do the same, slower.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from offloadkit.config import Precision
from offloadkit.optim.adamw import AdamWScalars, FlatState, Segment, adamw_step_reference, check_state
from offloadkit.optim.moments import BLOCK, MOMENT_DTYPES

try:
    from offloadkit.kernels import gpu_triton
except ImportError:
    gpu_triton = None  # type: ignore[assignment]

_BLOCKS_AT_ONCE = 1024
"""Blocks of one launch: their pieces' rows take 8 MiB between the two kernels."""


@cache
def available() -> bool:
    """Whether the kernels run on this machine's current CUDA device; warns once where Triton is there but fails."""
    if gpu_triton is None or not torch.cuda.is_available():
        return False
    gradient = torch.zeros(32, dtype=torch.bfloat16, device="cuda")  # the dtype that older devices lack
    try:
        block_sums(gradient, torch.tensor([[0, 32]], device="cuda"), torch.empty(1, dtype=torch.float64, device="cuda"))
    except torch.OutOfMemoryError:  # says nothing of the kernel
        raise
    except Exception as error:  # the compiler, its driver and the C compiler it calls raise many types
        warnings.warn(
            f"Triton could not build the gradient norm's kernel, so slower torch operations are used: {error}",
            stacklevel=2,
        )
        return False
    return True


def block_sums(gradient: Tensor, blocks: Tensor, out: Tensor) -> None:
    """`gradient_norm.block_sums`, which checks its arguments, on the gradient's device and current stream."""
    pieces, at_once = gpu_triton.PIECES, gpu_triton.PIECES_AT_ONCE
    kernels: Any = gpu_triton
    with torch.cuda.device_of(gradient):  # type: ignore[no-untyped-call]
        for first in range(0, blocks.shape[0], _BLOCKS_AT_ONCE):
            some = blocks[first : first + _BLOCKS_AT_ONCE]
            num_blocks = some.shape[0]
            rows = torch.empty(num_blocks * pieces * 32, dtype=torch.float64, device=gradient.device)
            kernels.sum_rows_of_pieces[(num_blocks * pieces // at_once,)](gradient, some, rows, enable_fp_fusion=False)
            kernels.sum_pieces_of_block[(num_blocks,)](rows, out[first : first + num_blocks], enable_fp_fusion=False)


def adamw_step(state: FlatState, gradient: Tensor, segments: Sequence[Segment], grad_scale: float) -> None:
    """One AdamW step, in place, over CUDA arrays, on the current stream, without a host synchronisation.

    What `adamw_step_reference` does, bit for bit. Raises as `check_state` does.
    """
    check_state(state, gradient, segments)
    if _adamw_compiles(state.weights.dtype, gradient.dtype, state.precision):
        _launch_adamw(state, gradient, segments, grad_scale)
    else:
        adamw_step_reference(state, gradient, segments, grad_scale)


@cache
def _adamw_compiles(weights: torch.dtype, gradient: torch.dtype, kept: Precision) -> bool:
    """Whether Triton builds the step's kernel for such arrays; warns once where it does not."""
    if gpu_triton is None:
        _warn_without_adamw("Triton is not installed")
        return False
    remainders = {torch.bfloat16: torch.int16, torch.float16: torch.float32}
    device = "cuda" if torch.cuda.is_available() else "cpu"  # the CPU: in Triton's interpreter

    def zeros(dtype: torch.dtype, length: int = BLOCK) -> Tensor:
        return torch.zeros(length, dtype=dtype, device=device)

    state = FlatState(
        weights=zeros(weights),
        remainder=zeros(remainders[weights]) if weights in remainders else None,
        exp_avg=zeros(MOMENT_DTYPES[kept]),
        exp_avg_sq=zeros(MOMENT_DTYPES[kept]),
        exp_avg_scale=zeros(torch.float32, 1) if kept == "tiny" else None,
        exp_avg_sq_scale=zeros(torch.float32, 1) if kept == "tiny" else None,
    )
    segment = Segment(0, BLOCK, AdamWScalars(0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0))
    try:
        _launch_adamw(state, zeros(gradient), [segment], 0.0)
    except torch.OutOfMemoryError:  # says nothing of the kernel
        raise
    except Exception as error:  # the compiler, its driver and the C compiler it calls raise many types
        _warn_without_adamw(f"{type(error).__name__}: {error}")
        return False
    return True


@cache
def _warn_without_adamw(reason: str) -> None:
    warnings.warn(
        "Triton could not build the AdamW step's kernel, so the GPU's optimizer step runs on torch operations: the "
        f"same result, slower. {reason}",
        stacklevel=4,
    )


def _launch_adamw(state: FlatState, gradient: Tensor, segments: Sequence[Segment], grad_scale: float) -> None:
    kernel: Any = gpu_triton.adamw
    none = state.weights
    arrays = [
        none if array is None else _patterns(array)
        for array in (
            *(state.weights, state.remainder, state.exp_avg, state.exp_avg_sq, gradient),
            *(state.exp_avg_scale, state.exp_avg_sq_scale),
        )
    ]
    is_bf16 = gradient.dtype == torch.bfloat16
    with torch.cuda.device_of(gradient):  # type: ignore[no-untyped-call]
        for start, length, scalars, key, offset in segments:
            if length > 0:
                grid = (-(-length // (BLOCK * gpu_triton.ROWS)),)
                random = _signed(key), _signed(key >> 32), offset
                kernel[grid](*arrays, start, length, grad_scale, *scalars, *random, is_bf16, enable_fp_fusion=False)


def _patterns(array: Tensor) -> Tensor:
    return array.view(torch.int16) if array.dtype == torch.bfloat16 else array


def _signed(bits: int) -> int:
    """The lower 32 bits as int32, so that Triton sees one type whatever the value."""
    return (bits & 0xFFFFFFFF ^ 0x80000000) - 0x80000000
