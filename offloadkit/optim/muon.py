"""Muon: the options and scalars of a step, and its formula in torch operations.

The formula is the code of torch.optim.Muon (torch 2.13): momentum as a moving average (`lerp`), Nesterov, five
Newton-Schulz iterations in bf16, decoupled weight decay. Source: Jordan, "Muon: An optimizer for hidden layers in
neural networks"; `match_rms_adamw`: Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982).

A matrix is stepped as a whole, one matrix a call, from a contiguous bf16 copy of its update. Matmuls round by shape and
layout, so two matrices are never stacked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offloadkit.facts.config import MuonOptions

SLICE = 1 << 22
"""Elements, in whole rows, that element-wise operations in a workspace take at a time."""


class MuonScalars(NamedTuple):
    """Scalars of one step, not rounded to fp32."""

    lr: float
    decay: float
    momentum: float
    nesterov: float
    matches_adamw: float
    """1: scale updates to the RMS of AdamW's updates, 0: only updates of tall matrices."""
    eps: float
    ns_steps: int
    a: float
    b: float
    c: float


def muon_scalars(*, lr: float, options: MuonOptions, step: int) -> MuonScalars:
    matches = options.adjust_lr_fn == "match_rms_adamw"
    of_update = options.momentum, options.nesterov, matches, options.eps, options.ns_steps
    return MuonScalars(lr, 1 - lr * options.weight_decay, *of_update, *options.ns_coefficients)


def workspace_sizes(rows: int, columns: int, row: int) -> dict[str, int]:
    """Bytes of the arrays of `kernels.muon`'s workspace. `row`: elements of a row of the parameter."""
    numel, short = rows * columns, min(rows, columns)
    scratch = rows_at_once(numel, row) * row
    return {
        "one": 2 * numel,
        "two": 2 * numel,
        "gram": 2 * short**2,
        "polynomial": 2 * short**2,
        "fp32": 4 * scratch,
        "mask": scratch,
    }


def rows_at_once(numel: int, row: int) -> int:
    return min(max(1, SLICE // row), numel // row)


def adjusted_lr(scalars: MuonScalars, rows: int, columns: int) -> float:
    if scalars.matches_adamw:
        return scalars.lr * (0.2 * math.sqrt(max(rows, columns)))
    return scalars.lr * math.sqrt(max(1, rows / columns))


def muon_update(weights: Tensor, gradient: Tensor, moments: Sequence[Tensor], scalars: Sequence[float]) -> None:
    """One Muon step in place on fp32 matrices of one shape; moments: momentum_buffer; scalars: `MuonScalars`."""
    s = MuonScalars(*scalars)  # type: ignore[arg-type]
    (buffer,) = moments
    buffer.lerp_(gradient, 1 - s.momentum)
    update = gradient.lerp(buffer, s.momentum) if s.nesterov else buffer
    update = orthogonalized(update.to(torch.bfloat16, copy=True, memory_format=torch.contiguous_format), s)
    weights.mul_(s.decay)
    weights.add_(update, alpha=-adjusted_lr(s, *weights.shape))


def orthogonalized(update: Tensor, s: MuonScalars) -> Tensor:
    """Newton-Schulz iterations of a contiguous bf16 matrix, which is overwritten. The result is near U V^T of the SVD.

    Tall matrices are iterated as their transposes.
    """
    is_tall = update.size(0) > update.size(1)
    x = update.T if is_tall else update
    x.div_(x.norm().clamp(min=s.eps))  # the spectral norm is at most 1 then
    for _ in range(s.ns_steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=s.b, alpha=s.c)
        x = torch.addmm(x, polynomial, x, beta=s.a)
    return x.T if is_tall else x


STEPS = 5
"""Default of `MuonOptions.ns_steps`, which plans assume."""
PRODUCTS = 3
"""Matrix products of an iteration."""


def newton_schulz_flops(rows: int, columns: int) -> int:
    short, long = sorted((rows, columns))
    return STEPS * (4 * short * short * long + 2 * short**3)


def newton_schulz_bytes(rows: int, columns: int) -> int:
    """Memory traffic of the operations between the products: the update is written, read for the norm, divided by the
    norm, and applied; every iteration copies it and the Gram matrix, because `addmm` adds to a copy.
    """
    numel, short = rows * columns, min(rows, columns)
    return 10 * numel + STEPS * 4 * (numel + short**2)
