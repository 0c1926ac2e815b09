"""The definition of the gradient norm, independent of device, chunking and number of ranks.

A parameter's gradient is cut into blocks of 65,536 consecutive elements, the last one zero-padded. Elements are
converted to fp64 and squared. A block is a matrix of 2048 rows and 32 columns that is summed as a binary tree: adjacent
rows pairwise until one row is left, then adjacent columns pairwise. The block sums are added one after another, in
parameter order, and the norm is the square root of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NORM_BLOCK = 65_536
NORM_COLUMNS = 32

_BLOCKS_AT_ONCE = 16
"""Blocks gathered at a time by the reference; its temporaries stay below 40 MiB."""


def norm_blocks(ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Blocks of parameters at (start, length) of a flat buffer: int64 [num_blocks, 2] of (start, length).

    Blocks never cross parameters; a parameter of length 0 has none.
    """
    blocks = [
        (at, min(NORM_BLOCK, start + length - at))
        for start, length in ranges
        for at in range(start, start + length, NORM_BLOCK)
    ]
    return torch.tensor(blocks, dtype=torch.int64).reshape(-1, 2)


def block_sums_reference(gradient: Tensor, blocks: Tensor, out: Tensor) -> None:
    """Write the sum of squares of every block to `out`, in torch operations, on any device.

    gradient: bf16, fp16 or fp32, 1-D. blocks: int64 [num_blocks, 2] from `norm_blocks`. out: fp64 [num_blocks]. All on
    one device. Raises TypeError or ValueError otherwise.
    """
    check_arguments(gradient, blocks, out)
    if gradient.numel() == 0:
        out.zero_()
        return
    offsets = torch.arange(NORM_BLOCK, device=gradient.device)
    for first in range(0, blocks.shape[0], _BLOCKS_AT_ONCE):
        starts, lengths = blocks[first : first + _BLOCKS_AT_ONCE].unsqueeze(-1).unbind(1)
        index = (starts + offsets).clamp_(max=gradient.numel() - 1)
        values = gradient[index].double().masked_fill_(offsets >= lengths, 0.0)
        out[first : first + _BLOCKS_AT_ONCE] = _tree(values.mul_(values))


def _tree(squares: Tensor) -> Tensor:
    """[num_blocks, 65536] -> [num_blocks]: rows pairwise, then columns pairwise."""
    rows = squares.view(-1, NORM_BLOCK // NORM_COLUMNS, NORM_COLUMNS)
    while rows.shape[1] > 1:
        rows = rows[:, 0::2] + rows[:, 1::2]
    columns = rows[:, 0]
    while columns.shape[1] > 1:
        columns = columns[:, 0::2] + columns[:, 1::2]
    return columns[:, 0]


def sum_in_order(sums: Sequence[NDArray[np.float64]]) -> float:
    """Add all block sums in fp64, one array after another, from first to last.

    `sum` of an array or tensor would add in another order.
    """
    in_order = np.concatenate([np.zeros(1), *sums])
    return float(np.add.accumulate(in_order)[-1])


def check_arguments(gradient: Tensor, blocks: Tensor, out: Tensor) -> None:
    """Raise TypeError or ValueError for invalid arguments of block sums."""
    if gradient.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"the gradient is {gradient.dtype}: the norm is taken of bf16, fp16 or fp32 gradients")
    if blocks.dtype != torch.int64 or out.dtype != torch.float64:
        raise TypeError(f"blocks must be int64 and out fp64, not {blocks.dtype} and {out.dtype}")
    if gradient.dim() != 1 or blocks.dim() != 2 or blocks.shape[1] != 2 or out.shape != blocks.shape[:1]:
        raise ValueError(
            "expected gradient [num_elements], blocks [num_blocks, 2], out [num_blocks], got "
            f"{tuple(gradient.shape)}, {tuple(blocks.shape)}, {tuple(out.shape)}"
        )
    if not (gradient.is_contiguous() and blocks.is_contiguous() and out.is_contiguous()):
        raise ValueError("gradient, blocks and out must be contiguous")
    if not gradient.device == blocks.device == out.device:
        raise ValueError(
            f"gradient, blocks and out are on {gradient.device}, {blocks.device}, {out.device}: use one device"
        )
