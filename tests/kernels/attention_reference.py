"""Attention with a position bias in fp64, and its gradients: the reference for the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offloadkit.kernels import attention as attention_op

MASKED = ("none", "keys", "pairs", "a whole row", "the first half, -inf")
"""Kinds of masks."""


def is_kept(seed: int, shape: tuple[int, ...], dropout: float) -> Tensor:
    """bool (batch, heads, queries, keys): the hash of `triton_attention`, in int64."""
    batch, heads, queries, keys = shape
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF

    def times(numbers: Tensor, factor: int) -> Tensor:
        upper = (numbers * (factor >> 16)) & 0xFFFFFFFF
        return (numbers * (factor & 0xFFFF) + (upper << 16)) & 0xFFFFFFFF

    rows = torch.arange(batch * heads).view(batch, heads, 1, 1)
    upper = (high + times(rows, 0x9E3779B9)) & 0xFFFFFFFF
    state = (torch.arange(queries * keys).view(queries, keys) + low) & 0xFFFFFFFF
    state = times(state ^ (state >> 16), 0x7FEB352D)
    state = times(state ^ (state >> 15) ^ upper, 0x846CA68B)
    state = times(state ^ (state >> 16), 0x7FEB352D)
    state = times(state ^ (state >> 15), 0x846CA68B)
    return (state ^ (state >> 16)) >= int(dropout * 2**32)


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Any, seed: Any, dropout: float) -> Tensor:
    """(batch, queries, heads, width)."""
    scores = query @ key.transpose(2, 3) + bias
    weights = (scores if mask is None else scores + mask).softmax(-1)
    if seed is not None:
        weights = weights * is_kept(int(seed), tuple(weights.shape), dropout).to(weights.device) / (1 - dropout)
    return (weights @ value).transpose(1, 2)


def inputs(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, masked: str, device: str
) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """query, key, value and bias, laid out as T5 has them; the mask; the output's gradient.

    Args:
        shape: batch, heads, queries, keys, width.
    """
    draw, (batch, heads, queries, keys, width) = torch.Generator().manual_seed(0), shape

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw).to(dtype).to(device)

    found = [normal(batch, length, heads, width).transpose(1, 2) for length in (queries, keys, keys)]
    found[0] = 4 * width**-0.5 * found[0]
    found.append(normal(1, queries, keys, heads).permute(0, 3, 1, 2))
    gradient, mask = normal(batch, queries, heads, width), None
    if masked != "none":
        seen = torch.rand(batch, 1, 1 if masked == "keys" else queries, keys, generator=draw) > 0.3
        seen[0] &= masked != "a whole row"
        zeros = torch.zeros(seen.shape, dtype=dtype)
        mask = zeros.masked_fill(~seen, torch.finfo(dtype).min).to(device).expand(batch, 1, queries, keys)
        if masked == "the first half, -inf":
            mask = torch.zeros_like(mask).masked_fill(torch.arange(keys, device=device) < keys // 2, -torch.inf)
    return [one.detach().requires_grad_() for one in found], mask, gradient


def with_gradients(output: Tensor, leaves: list[Tensor], into: Tensor) -> list[Tensor]:
    return [output.detach(), *torch.autograd.grad(output, leaves, into)]


def fused(
    leaves: list[Tensor], mask: Tensor | None, dropout: float, into: Tensor
) -> tuple[list[Tensor], Tensor | None]:
    """Output and gradients by the kernels, and the seed."""
    *others, bias = leaves
    output, _, _, seed = attention_op.attention(*others, bias.contiguous(), mask, 1.0, dropout)
    return with_gradients(output, leaves, into), seed if dropout else None


def check(shape: tuple[int, int, int, int, int], dtype: torch.dtype, masked: str, dropout: float, device: str) -> None:
    """The kernels' output and gradients are closer to the fp64 reference than torch operations in `dtype`."""
    leaves, mask, into = inputs(shape, dtype, masked, device)
    mine, seed = fused(leaves, mask, dropout, into)
    exact = [one.detach().double().requires_grad_() for one in leaves]
    wide = None if mask is None else mask.double()
    right = with_gradients(attention(*exact, wide, seed, dropout), exact, into.double())
    eager = with_gradients(attention(*leaves, mask, seed, dropout).to(dtype), leaves, into)
    for name, found, theirs, true in zip(("output", "query", "key", "value", "bias"), mine, eager, right, strict=True):
        error, theirs_error = (float((each.double() - true).norm() / true.norm()) for each in (found, theirs))
        assert error < theirs_error, f"{name} of {shape}, {masked}, {dropout}: {error}, torch's {theirs_error}"
