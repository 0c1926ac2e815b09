"""RMS norms in one kernel: a model's own take seven operations forward and as many again backward, each over all of the
hidden states in fp32, and keep some of these for backward.

`fuse_norms(model)` has them call `F.rms_norm`, which on a GPU is one kernel that keeps its input and a number a row. It
computes in fp32 and rounds once, where the models round before they multiply by the weight. On the CPU `F.rms_norm`
takes as many operations as the model's own, which is left to it; compiled blocks are fused by the compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def fuse_norms(model: nn.Module) -> Callable[[], None]:
    """Have the RMS norms of `model` run as one kernel where they can; returns what undoes it.

    A norm whose class computes something else, whose forward was replaced by others, or whose input is of another dtype
    than its weight, computes as before.
    """
    replaced: list[tuple[nn.Module, MethodType]] = []
    for module in model.modules():
        kind: Any = type(module)
        if "forward" not in vars(module) and _is_rms_norm(kind):
            method = MethodType(_forward, module)  # a method: a deepcopy of the model binds it to its own norm
            setattr(module, "forward", method)  # noqa: B010  # mypy lets no method be assigned to
            replaced.append((module, method))

    def undo() -> None:
        for module, method in replaced:
            if vars(module).get("forward") is method:
                del module.forward

    return undo


def _forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    kind = hidden_states.device.type
    if kind == "cpu" or hidden_states.dtype != self.weight.dtype or _autocasts(kind) or torch.compiler.is_compiling():
        own: torch.Tensor = type(self).forward(self, hidden_states)
        return own
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def _autocasts(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


@functools.cache
def _is_rms_norm(kind: type[nn.Module]) -> bool:
    """Whether `kind(width)` computes weight * x / sqrt(mean(x^2) + variance_epsilon), which is tried: transformers has
    a class for each family, most of them copies of one another, and some that differ in a detail."""
    if not kind.__name__.endswith(("RMSNorm", "LayerNorm")) or kind.__module__.startswith("torch."):
        return False
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        x, weight, epsilon = torch.linspace(-1.0, 2.0, 96).view(3, 32), torch.linspace(0.5, 1.5, 32), 0.5
        try:
            norm: Any = kind(32)
            norm.weight.copy_(weight)
            norm.variance_epsilon = epsilon
            return torch.allclose(norm(x), F.rms_norm(x, weight.shape, weight, epsilon))
        except Exception:  # anybody's class: other arguments, no such weight, no such number
            return False
