"""Lion: the scalars of a step and its fp32 formula in torch operations, bit-equal to C and Triton as for `adamw`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class LionScalars(NamedTuple):
    """Scalars of one step. fp32 represents every value exactly."""

    beta1: float
    beta2: float
    one_minus_beta1: float
    one_minus_beta2: float
    decay: float
    lr: float


def lion_scalars(*, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int) -> LionScalars:
    """Compute the scalars of a step in fp64 and round once to fp32. Lion ignores `eps` and `step`.

    Formula: Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675), algorithm 2.
    """
    beta1, beta2 = betas
    exact = (beta1, beta2, 1.0 - beta1, 1.0 - beta2, 1.0 - lr * weight_decay, lr)
    return LionScalars(*torch.tensor(exact, dtype=torch.float32).tolist())


def lion_update(weights: Tensor, gradient: Tensor, moments: Sequence[Tensor], scalars: Sequence[float]) -> None:
    """One step in place on fp32 tensors of one shape; moments: exp_avg; scalars: `LionScalars`.

    The direction is the sign of a mean of exp_avg and the gradient; zero if the mean is zero or NaN.
    """
    s, g = LionScalars(*scalars), gradient
    (m,) = moments
    mean = (m * s.beta1).add_(g * s.one_minus_beta1)
    direction = (mean > 0).float().sub_((mean < 0).float())
    weights.mul_(s.decay).sub_(direction.mul_(s.lr))
    m.mul_(s.beta2).add_(g * s.one_minus_beta2)
