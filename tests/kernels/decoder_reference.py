"""Gated activations and rotary embeddings by torch's operations: the reference for the kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from offloadkit.kernels import decoder

HEADS = [
    (2, 5, 2, 7, 12, 12),
    (1, 20, 4, 3, 16, 16),
    (2, 3, 3, 5, 20, 12),
]
"""batch, heads of queries and of keys, length, width of a head, and its rotated width."""
SIZES = [(3, 77), (2, 5, 2050), (1, 1), (0, 64)]


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def rotate(x: Tensor) -> Tensor:
        rest = x[..., cos.shape[-1] :]
        x = x[..., : cos.shape[-1]]
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return torch.cat((x * cos[:, None] + turned * sin[:, None], rest), dim=-1)

    return rotate(query), rotate(key)


def heads(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Query and key as a joint projection gives them, with gradients; cos and sin, of one row for all if it has 16
    columns."""
    draw = torch.Generator().manual_seed(0)
    batch, query_heads, key_heads, length, width, rotated_width = shape

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw).to(dtype).to(device)

    joint = normal(batch, length, (query_heads + key_heads) * width)
    split = joint.split([query_heads * width, key_heads * width], dim=-1)
    leaves = [one.view(batch, length, -1, width).transpose(1, 2).detach().requires_grad_() for one in split]
    rows = 1 if rotated_width == 16 else batch
    return leaves, [normal(rows, length, rotated_width) for _ in range(2)]


def gates(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [(4 * torch.randn(shape, generator=draw)).to(dtype).to(device).requires_grad_() for _ in range(2)]


def with_gradients(outputs: Any, leaves: list[Tensor], **options: Any) -> list[Tensor]:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    draw = torch.Generator().manual_seed(1)
    into = [torch.randn(one.shape, generator=draw).to(one) for one in outputs]
    return [*(one.detach() for one in outputs), *torch.autograd.grad(outputs, leaves, into, **options)]


def check_rotary(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Outputs and gradients have the bits of torch's operations."""
    leaves, angles = heads(shape, dtype, device)
    expected = with_gradients(rotated(*leaves, *angles), leaves)
    found = decoder.rotated(*leaves, *angles)
    for _ in range(2):  # a graph that is kept gives the same again
        assert all(map(torch.equal, with_gradients(found, leaves, retain_graph=True), expected)), shape


def check_gated(gate: Tensor, up: Tensor, activation: str, largest_error: float = 0.0, joint_too: bool = True) -> None:
    """Outputs and gradients equal torch's up to `largest_error` of the largest number."""
    expected = with_gradients(gated(gate, up, activation), [gate, up])
    output = decoder.gated(gate, up, activation)
    found = with_gradients(output, [gate, up], retain_graph=True)
    again = with_gradients(output, [gate, up])
    assert all(map(same, found, again))
    for mine, theirs in zip(found, expected, strict=True):
        assert same(mine, theirs) or float((mine - theirs).abs().max()) <= largest_error * float(theirs.abs().max())
    if joint_too:
        both = torch.cat((gate, up), dim=-1).detach().requires_grad_()
        output, gradient = with_gradients(decoder.gated(both, None, activation), [both])
        assert same(output, found[0])
        assert same(gradient, torch.cat(found[1:], dim=-1))


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def check_norm(shape: tuple[int, ...], dtype: torch.dtype, offset: float, device: str) -> None:
    """Errors against fp64 are about torch's, and the bits are the same each time."""
    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(size, generator=draw).to(dtype).to(device).requires_grad_() for size in (shape, shape[-1:])]

    def eager(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight + offset, 1e-5)

    output = decoder.normed(leaves[0], leaves[1], 1e-5, offset)
    found, again = (with_gradients(output, leaves, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, found, again))
    theirs, wide = with_gradients(eager(*leaves), leaves), [each.detach().double().requires_grad_() for each in leaves]
    for mine, other, right in zip(found, theirs, with_gradients(eager(*wide), wide), strict=True):
        error, other_error = (float((each.double() - right).norm()) for each in (mine, other))
        assert error <= 1.1 * other_error + torch.finfo(dtype).eps / 4 * float(right.norm())
