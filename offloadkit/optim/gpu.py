"""Triton kernels: the gradient norm's block sums on CUDA, with the bits of `gradient_norm.block_sums_reference`.

Where Triton is missing or cannot compile, `available()` is false and callers use torch operations.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

try:
    from offloadkit.optim import triton_norm
except ImportError:
    triton_norm = None  # type: ignore[assignment]

_BLOCKS_AT_ONCE = 1024
"""Blocks of one launch: their pieces' rows take 8 MiB between the two kernels."""


@cache
def available() -> bool:
    """Whether the kernels run on this machine's current CUDA device; warns once where Triton is there but fails."""
    if triton_norm is None or not torch.cuda.is_available():
        return False
    gradient = torch.zeros(32, dtype=torch.bfloat16, device="cuda")  # the dtype that older devices lack
    try:
        block_sums(gradient, torch.tensor([[0, 32]], device="cuda"), torch.empty(1, dtype=torch.float64, device="cuda"))
    except Exception as error:  # the compiler, its driver and the C compiler it calls raise many types
        warnings.warn(
            f"Triton could not build the gradient norm's kernel, so slower torch operations are used: {error}",
            stacklevel=2,
        )
        return False
    return True


def block_sums(gradient: Tensor, blocks: Tensor, out: Tensor) -> None:
    """`gradient_norm.block_sums`, which checks its arguments, on the gradient's device and current stream."""
    pieces, at_once = triton_norm.PIECES, triton_norm.PIECES_AT_ONCE
    kernels: Any = triton_norm
    with torch.cuda.device_of(gradient):  # type: ignore[no-untyped-call]
        for first in range(0, blocks.shape[0], _BLOCKS_AT_ONCE):
            some = blocks[first : first + _BLOCKS_AT_ONCE]
            num_blocks = some.shape[0]
            rows = torch.empty(num_blocks * pieces * 32, dtype=torch.float64, device=gradient.device)
            kernels.sum_rows_of_pieces[(num_blocks * pieces // at_once,)](gradient, some, rows, enable_fp_fusion=False)
            kernels.sum_pieces_of_block[(num_blocks,)](rows, out[first : first + num_blocks], enable_fp_fusion=False)
