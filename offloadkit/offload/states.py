"""Everything of a flat layer that its step reads and writes, where the plan puts it: in pinned RAM for the CPU, in VRAM
for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from offloadkit.config import Placement
from offloadkit.errors import ModelError
from offloadkit.offload.disk import Region
from offloadkit.offload.gradients import LayerGradient, runs
from offloadkit.offload.host_memory import HostSlab, aligned
from offloadkit.offload.layers import FlatLayer, Slot
from offloadkit.offload.streaming import StreamedWeights
from offloadkit.offload.streams import CopyStream, Event
from offloadkit.offload.waits import Waits
from offloadkit.offload.weights import LayerWeights, ResidentWeights
from offloadkit.optim.adamw import (
    AdamWScalars,
    FlatState,
    Segment,
    adamw_scalars,
    join_master,
    split_master,
)
from offloadkit.optim.precision import BLOCK, MOMENT_DTYPES, random_key
from offloadkit.optim.step import adamw_step

REMAINDER_DTYPES = {torch.bfloat16: torch.int16, torch.float16: torch.float32}
"""What master weights hold beside working weights of a dtype: 16 more bits, or all of an fp32 number."""


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


Materialise = Callable[[Sequence[nn.Parameter]], None]
"""Makes parameters without memory real, in RAM and in their dtype; they stay the same objects."""

Cut = Callable[[int, torch.dtype], torch.Tensor]
"""Gives the next so many elements of some memory."""


def _flat_state(layer: FlatLayer, weights: torch.Tensor, cut: Cut) -> FlatState:
    """The layer's arrays, its states laid out one after the other."""
    moments = MOMENT_DTYPES[layer.precision]
    remainder = None if layer.dtype == torch.float32 else cut(layer.numel, REMAINDER_DTYPES[layer.dtype])
    flat = FlatState(weights, remainder, cut(layer.numel, moments), cut(layer.numel, moments))
    if layer.precision == "tiny":
        flat.exp_avg_scale, flat.exp_avg_sq_scale = (cut(layer.numel // BLOCK, torch.float32) for _ in range(2))
    return flat


def _cutter(memory: torch.Tensor) -> Cut:
    """Cuts 1-D uint8 `memory` as `HostSlab.cut` cuts a slab."""
    at = 0

    def cut(numel: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal at
        start, at = at, at + aligned(numel * dtype.itemsize)
        return memory[start : start + numel * dtype.itemsize].view(dtype)

    return cut


class LayerState:
    """A flat layer as its step sees it.

    Attributes:
        flat: working weights, remainder, exp_avg, exp_avg_sq: 1-D [layer.numel], on the processor that steps them. On
            the CPU, `flat.weights` are a copy of resident weights, or the streamed weights themselves. States on disk
            are mapped here; a step works on a copy in RAM.
        steps: fp32 [num_slots], how often each parameter was stepped.
        gradient: its gradient on the way to the step.
    """

    def __init__(
        self,
        layer: FlatLayer,
        placement: Placement,
        slab: HostSlab,
        accumulation: int,
        device: torch.device,
        waits: Waits,
        *,
        region: Region | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            slab: RAM for what `placement` puts there.
            region: disk for the states, where `placement` puts them there.
            seed: of stochastic rounding.
        """
        self.layer, self.placement, self._seed, self._region = layer, placement, seed, region
        on_gpu = placement.step == "gpu"

        def cut(numel: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(numel, dtype=dtype, device=device) if on_gpu else slab.cut(numel, dtype)

        weights = cut(layer.numel, layer.dtype)
        self.flat = _flat_state(layer, weights, cut if region is None else _cutter(region.mapped()))
        self.weights: LayerWeights
        if placement.weights == "ram":
            self.weights = StreamedWeights(layer, weights, device, waits)
        else:
            there = weights if on_gpu else torch.zeros_like(weights, device=device)
            self.weights = ResidentWeights(layer, there, waits)
        self.weights.stepped_on_gpu = on_gpu
        host = None if on_gpu else slab.cut(layer.numel, gradient_dtype(layer, accumulation))
        sums = slab.cut(layer.num_norm_blocks, torch.float64)
        self.gradient = LayerGradient(self.weights, host, sums, on_device=placement.gradients == "vram")
        self.steps = torch.zeros(len(layer.slots), dtype=torch.float32)
        self.uploaded: Event | None = None

    def take_parameters(self, materialise: Materialise | None) -> None:
        """Take the parameters' present values as master weights and bind the parameters to the flat buffer.

        Args:
            materialise: makes parameters on the meta device real first, in RAM.
        """
        parameters = [slot.parameter for slot in self.layer.slots]
        if materialise is not None:
            materialise(parameters)
        if any(parameter.is_meta for parameter in parameters):
            raise ModelError(
                f"the parameters of {self.layer.name!r} are on the meta device, without values: load the model's "
                "weights first, or pass materialise="
            )
        for slot in self.layer.slots:
            here, source = slice(slot.start, slot.start + slot.numel), slot.parameter.data.reshape(-1)
            remainder = None
            if self.layer.dtype == torch.bfloat16 and source.dtype == torch.float32:
                source, remainder = split_master(source)
            elif self.layer.dtype == torch.float16:
                remainder = source
            if self.flat.remainder is not None and remainder is not None:
                self.flat.remainder[here].copy_(remainder)
            self.flat.weights[here].copy_(source)
        if isinstance(self.weights, ResidentWeights):
            self.weights.flat.copy_(self.flat.weights)
            self.weights.start(self.weights.flat)
        else:
            self.weights.start(self.flat.weights)
        if self._region is not None:
            self._region.forget_pages()

    def take_over(self, slots: Sequence[Slot], *, keep_remainder: bool = False) -> None:
        """The weights of `slots`, written from outside, become the master weights, to which the remainder adds nothing,
        unless the caller sets it next."""
        if isinstance(self.weights, StreamedWeights):
            self.weights.save(slots)
        for slot in slots:
            here = slice(slot.start, slot.start + slot.numel)
            if isinstance(self.weights, ResidentWeights):
                self.flat.weights[here].copy_(self.weights.flat[here])
            if self.layer.dtype == torch.float16 and not keep_remainder:
                self.flat.remainder[here].copy_(self.flat.weights[here])  # type: ignore[index]
            elif self.flat.remainder is not None and not keep_remainder:
                self.flat.remainder[here].zero_()

    def master(self, slot: Slot) -> torch.Tensor:
        """fp32 copy of a parameter's master weights, in its shape, in RAM."""
        here = slice(slot.start, slot.start + slot.numel)
        weights = self.flat.weights[here]
        remainder = self.flat.remainder
        if remainder is None:
            flat = weights.clone()
        else:
            flat = join_master(weights, remainder[here]) if remainder.dtype == torch.int16 else remainder[here].clone()
        return flat.view(slot.parameter.shape).cpu()

    def step(self, slots: set[int], options: Sequence[GroupOptions], grad_scale: float, stream: CopyStream) -> None:
        """One AdamW step of the parameters at `slots`, in place; the others keep everything, their step count too. The
        calling thread waits for a step on the CPU; one on the GPU is done at `uploaded`, on `stream`.

        Either way the layer's working weights are where forward looks for them once `uploaded` is reached.
        """
        self._wait_for_copies()
        segments = self._segments(slots, options)
        if self.placement.step == "gpu":
            with stream.as_current():
                adamw_step(self.flat, self.gradient.kept, segments, grad_scale)
            self.uploaded = stream.record()
            return
        assert self.gradient.host is not None
        if self._region is None:
            adamw_step(self.flat, self.gradient.host, segments, grad_scale)
        else:
            with self._region.in_ram() as slab:
                flat = _flat_state(self.layer, self.flat.weights, slab.cut)
                adamw_step(flat, self.gradient.host, segments, grad_scale)
        if isinstance(self.weights, ResidentWeights):
            stream.copy(self.weights.flat, self.flat.weights, timed=True)
            self.uploaded = stream.record()

    def prefetch(self) -> None:
        """Start reading states from disk for the next `step`."""
        if self._region is not None:
            self._region.prefetch()

    def _wait_for_copies(self) -> None:
        """The weights in RAM are not written while they are copied from."""
        copied = self.weights.copied if isinstance(self.weights, StreamedWeights) else self.uploaded
        if copied is not None:
            copied.synchronize()

    def _segments(self, slots: set[int], options: Sequence[GroupOptions]) -> list[Segment]:
        for index in slots:
            self.steps[index] += 1
        if self.layer.precision != "exact":
            return [self._own_segment(index, options) for index in sorted(slots)]
        by_scalars: dict[AdamWScalars, set[int]] = {}
        for index in slots:
            scalars = _scalars(options[self.layer.slots[index].group], int(self.steps[index]))
            by_scalars.setdefault(scalars, set()).add(index)
        return [
            Segment(start, length, scalars)
            for scalars, indices in by_scalars.items()
            for start, length in runs(self.layer, indices)
        ]

    def _own_segment(self, index: int, options: Sequence[GroupOptions]) -> Segment:
        """One parameter's, with random bits of its own."""
        slot, step = self.layer.slots[index], int(self.steps[index])
        key = random_key(self._seed, slot.name, step)
        return Segment(slot.start, slot.numel, _scalars(options[slot.group], step), key)

    def views(self, index: int) -> dict[str, torch.Tensor]:
        """A parameter's states, as torch optimizers keep them: views, in its shape; block scales are 1-D."""
        slot = self.layer.slots[index]
        here, shape = slice(slot.start, slot.start + slot.numel), slot.parameter.shape
        blocks = slice(slot.start // BLOCK, -(-(slot.start + slot.numel) // BLOCK))
        views = {"step": self.steps[index]}
        views |= {name: getattr(self.flat, name)[here].view(shape) for name in ("exp_avg", "exp_avg_sq")}
        if self.flat.remainder is not None:
            views["remainder"] = self.flat.remainder[here].view(shape)
        if self.flat.exp_avg_scale is not None and self.flat.exp_avg_sq_scale is not None:
            views["exp_avg_scale"] = self.flat.exp_avg_scale[blocks]
            views["exp_avg_sq_scale"] = self.flat.exp_avg_sq_scale[blocks]
        return views


def optimizer_states(layers: Sequence[LayerState]) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
    """Every parameter's states."""
    return {slot.parameter: state.views(index) for state in layers for index, slot in enumerate(state.layer.slots)}
