"""AdamW: the scalars of a step and its fp32 formula in torch operations.

The C kernel (kernels/cpu_adamw.h) and the Triton kernel perform these operations in this order, each rounded once to
fp32, so the results are bit-equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AdamWScalars(NamedTuple):
    """Scalars of one step. fp32 represents every value exactly."""

    beta1: float
    beta2: float
    one_minus_beta1: float
    one_minus_beta2: float
    eps: float
    decay: float
    """1 - lr * weight_decay"""
    step_size: float
    """lr / (1 - beta1**step)"""
    inv_sqrt_bias_correction2: float
    """1 / sqrt(1 - beta2**step)"""


def adamw_scalars(*, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int) -> AdamWScalars:
    """Compute the scalars of step number `step` (from 1) in fp64 and round once to fp32.

    Formula: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", as in torch.optim.AdamW. Raises ValueError
    for a `step` below 1.
    """
    if step < 1:
        raise ValueError(f"step is {step}: AdamW counts its steps from 1")
    beta1, beta2 = betas
    exact = (
        beta1,
        beta2,
        1.0 - beta1,
        1.0 - beta2,
        eps,
        1.0 - lr * weight_decay,
        lr / (1.0 - beta1**step),
        1.0 / math.sqrt(1.0 - beta2**step),
    )
    return AdamWScalars(*torch.tensor(exact, dtype=torch.float32).tolist())


def adamw_update(weights: Tensor, gradient: Tensor, moments: Sequence[Tensor], scalars: Sequence[float]) -> None:
    """One step in place on fp32 tensors of one shape; moments: exp_avg, exp_avg_sq; scalars: `AdamWScalars`.

    Every torch operation here rounds once: no `alpha` and no addcmul, which may fuse, and no division by a scalar. The
    square root runs in fp64, because torch's fp32 root on the CPU (MKL) is off by one ulp in a fifth of all cases. An
    fp32 root is never within 2**-50 of a rounding border, so an fp64 root within one ulp rounds correctly.
    """
    s, g = AdamWScalars(*scalars), gradient
    m, v = moments
    m.mul_(s.beta1).add_(g * s.one_minus_beta1)
    v.mul_(s.beta2).add_((g * s.one_minus_beta2).mul_(g))
    denominator = v.double().sqrt_().float().mul_(s.inv_sqrt_bias_correction2).add_(s.eps)
    weights.mul_(s.decay).sub_((m / denominator).mul_(s.step_size))
