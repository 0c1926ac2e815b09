"""Optimizer states of a flat layer in pinned RAM, and everything of that layer that the CPU step reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from offloadkit.offload.gradients import LayerGradient, runs
from offloadkit.offload.host_memory import HostSlab
from offloadkit.offload.layers import FlatLayer, Slot
from offloadkit.offload.streams import Event
from offloadkit.offload.weights import LayerWeights
from offloadkit.optim import cpu
from offloadkit.optim.adamw import AdamWScalars, FlatState, Segment, adamw_scalars, join_master, split_master


@dataclass(frozen=True)
class GroupOptions:
    """What the scheduler may change between steps: one optimizer group's AdamW options at the time of step()."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, group: dict[str, Any]) -> GroupOptions:
        """The present options of one of the optimizer's param_groups."""
        return cls(float(group["lr"]), tuple(group["betas"]), float(group["eps"]), float(group["weight_decay"]))


@lru_cache(maxsize=256)
def _scalars(options: GroupOptions, step: int) -> AdamWScalars:
    return adamw_scalars(
        lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay, step=step
    )


def gradient_dtype(layer: FlatLayer, accumulation: int) -> torch.dtype:
    """dtype of the gradient that the step reads: fp32 when it is a sum of several, else the layer's."""
    return torch.float32 if accumulation > 1 or layer.shared else layer.dtype


class LayerState:
    """A flat layer as the CPU step sees it.

    Attributes:
        flat: working weights (host copy), remainder, exp_avg, exp_avg_sq: 1-D [layer.numel] in pinned RAM.
        steps: fp32 [num_slots], how often each parameter was stepped.
        gradient: its gradient on the way to RAM.
    """

    def __init__(self, weights: LayerWeights, slab: HostSlab, accumulation: int) -> None:
        layer = weights.layer
        self.layer, self.weights = layer, weights
        self.flat = FlatState(
            weights=slab.cut(layer.numel, layer.dtype),
            remainder=slab.cut(layer.numel, torch.int16) if layer.dtype == torch.bfloat16 else None,
            exp_avg=slab.cut(layer.numel, torch.float32),
            exp_avg_sq=slab.cut(layer.numel, torch.float32),
        )
        gradient = slab.cut(layer.numel, gradient_dtype(layer, accumulation))
        self.gradient = LayerGradient(weights, gradient, slab.cut(layer.num_norm_blocks, torch.float64))
        self.steps = torch.zeros(len(layer.slots), dtype=torch.float32)
        self.uploaded: Event | None = None
        self._initialise()

    def _initialise(self) -> None:
        """Take the parameters' present values as master weights and bind the parameters to the flat buffer."""
        for slot in self.layer.slots:
            here, source = slice(slot.start, slot.start + slot.numel), slot.parameter.data.reshape(-1)
            if self.flat.remainder is not None and source.dtype == torch.float32:
                source, remainder = split_master(source)
                self.flat.remainder[here].copy_(remainder)
            self.weights.flat[here].copy_(source)
        self.flat.weights.copy_(self.weights.flat)
        self.weights.bind()

    def take_over(self, slots: Sequence[Slot], *, keep_remainder: bool = False) -> None:
        """The device's weights of `slots`, written from outside, become the master weights: their remainder is zero,
        unless the caller sets it next."""
        for slot in slots:
            here = slice(slot.start, slot.start + slot.numel)
            self.flat.weights[here].copy_(self.weights.flat[here])
            if self.flat.remainder is not None and not keep_remainder:
                self.flat.remainder[here].zero_()

    def master(self, slot: Slot) -> torch.Tensor:
        """fp32 copy of a parameter's master weights, in its shape, in RAM."""
        here = slice(slot.start, slot.start + slot.numel)
        weights = self.flat.weights[here]
        remainder = self.flat.remainder
        flat = weights.clone() if remainder is None else join_master(weights, remainder[here])
        return flat.view(slot.parameter.shape)

    def step(self, slots: set[int], options: Sequence[GroupOptions], grad_scale: float) -> None:
        """One AdamW step of the parameters at `slots`, in place; the others keep everything, their step count too."""
        for index in slots:
            self.steps[index] += 1
        segments: list[Segment] = []
        by_scalars: dict[AdamWScalars, set[int]] = {}
        for index in slots:
            scalars = _scalars(options[self.layer.slots[index].group], int(self.steps[index]))
            by_scalars.setdefault(scalars, set()).add(index)
        for scalars, indices in by_scalars.items():
            segments += [Segment(start, length, scalars) for start, length in runs(self.layer, indices)]
        cpu.adamw_step(self.flat, self.gradient.host, segments, grad_scale)


def optimizer_states(layers: Sequence[LayerState]) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
    """Views of the flat arrays, as torch optimizers keep their states."""
    states = {}
    for state in layers:
        for index, slot in enumerate(state.layer.slots):
            here, shape = slice(slot.start, slot.start + slot.numel), slot.parameter.shape
            views = {"step": state.steps[index]}
            views |= {name: getattr(state.flat, name)[here].view(shape) for name in ("exp_avg", "exp_avg_sq")}
            if state.flat.remainder is not None:
                views["remainder"] = state.flat.remainder[here].view(shape)
            states[slot.parameter] = views
    return states
