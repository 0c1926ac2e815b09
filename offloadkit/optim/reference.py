"""The optimizer step and split master weights in torch operations: the definition for all kernels.

NaNs are stored as NaN, with unspecified payload.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offloadkit.optim import moments
from offloadkit.optim.table import PRECISIONS, FlatState, Segment, check_state

SLICE = 1 << 18
"""Elements stepped at a time, which keeps temporaries at a few MiB, mostly in the caches. A multiple of 256."""


def round_to_fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32).item())


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 master weights into bf16 working weights (rounded to nearest) and int16 remainders.

    `join_master` restores every finite value and Inf bit for bit. NaN becomes (NaN, 0). Finite values of at least
    2**127 * (2 - 2**-8) have Inf as the bf16 half, as in a cast to bf16, and are still restored. Exact ties round away
    from zero, unlike in a cast. Source: Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training".
    """
    bits = master.view(torch.int32).masked_fill(master.isnan(), moments.CANONICAL_NAN)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join_master(weights: Tensor, remainder: Tensor) -> Tensor:
    """Restore fp32 master weights from bf16 working weights and int16 remainders of the same shape."""
    return ((weights.view(torch.int16).to(torch.int32) << 16) + remainder).view(torch.float32)


def step_reference(state: FlatState, gradient: Tensor, segments: Sequence[Segment], grad_scale: float) -> None:
    """One optimizer step in place, on CPU or CUDA tensors.

    Elements outside the segments are untouched. `gradient` is bf16, fp16 or fp32, as long as the weights, and is first
    multiplied by `grad_scale` (rounded to fp32). Raises as `check_state` does.
    """
    check_state(state, gradient, segments)
    scale = round_to_fp32(grad_scale)
    for segment in segments:
        end = segment.start + segment.length
        size = segment.length if segment.matrix is not None else SLICE
        for first in range(segment.start, end, size):
            at = slice(first, min(first + size, end))
            _step_slice(state, gradient[at].float() * scale, at, segment)


def _step_slice(state: FlatState, gradient: Tensor, at: slice, segment: Segment) -> None:
    averages = read_moments(state, at)
    weights, remainder = state.weights[at], state.remainder
    if remainder is None:
        master = weights
    elif weights.dtype == torch.float16:
        master = remainder[at]
    else:
        master = join_master(weights, remainder[at])
    if (matrix := segment.matrix) is not None:
        state.table.optimizer.update(
            matrix.of(master), matrix.of(gradient), list(map(matrix.of, averages)), segment.scalars
        )
    else:
        state.table.optimizer.update(master, gradient, averages, segment.scalars)
    if remainder is not None and weights.dtype == torch.float16:
        weights.copy_(master)
    elif remainder is not None:
        high, low = split_master(master)
        weights.copy_(high)
        remainder[at].copy_(low)
    if state.table.is_rounded:
        first = segment.offset + at.start - segment.start
        random = moments.random_bits(segment.random_key, first, gradient.numel(), gradient.device)
        _store_moments(state, at, averages, random)


def read_moments(state: FlatState, at: slice) -> list[Tensor]:
    """fp32 moments of a range of elements: views if `exact`, otherwise copies. With scales, `at` starts at a multiple
    of 256.
    """
    kept, found = PRECISIONS[state.table.precision], []
    for moment in state.table.optimizer.moments:
        stored, scales = state[moment.name][at], _scales(state, moment.name, at)
        found.append(stored if kept.decode is None else kept.decode(stored, scales, moment.is_signed))
    return found


def _store_moments(state: FlatState, at: slice, averages: Sequence[Tensor], random: Tensor) -> None:
    """`random`: int64, 32 bits per element: the lower half rounds the first moment, the upper half the second
    moment.
    """
    kept = PRECISIONS[state.table.precision]
    assert kept.encode is not None
    for index, (moment, values) in enumerate(zip(state.table.optimizer.moments, averages, strict=True)):
        stored, scales = kept.encode(values, random >> 16 * index & 0xFFFF, moment.is_signed)
        state[moment.name][at] = stored
        if scales is not None:
            state[f"{moment.name}_scale"][state.table[f"{moment.name}_scale"].part(at.start, at.stop)] = scales


def _scales(state: FlatState, name: str, at: slice) -> Tensor | None:
    if PRECISIONS[state.table.precision].block is None:
        return None
    return state[f"{name}_scale"][state.table[f"{name}_scale"].part(at.start, at.stop)]
