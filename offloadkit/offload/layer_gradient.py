"""`LayerGradient`: one layer's gradient on its way from autograd to the optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from offloadkit.device.streams import Event
from offloadkit.kernels import cpu
from offloadkit.kernels.dispatch import block_sums
from offloadkit.offload.layers import FlatLayer
from offloadkit.offload.weights import LayerWeights
from offloadkit.optim.norm import NORM_BLOCK, norm_blocks


class Stage(Enum):
    """Where a layer's gradient is in its window."""

    FILLING = "autograd may still compute gradients of this backward"
    FULL = "this backward's gradients were sent, or added to the window"
    REDUCED = "the window's sum was exchanged: no further micro-batch is possible"


class LayerGradient:
    """One layer's gradient on its way from autograd to the optimizer step.

    The bucket covers the whole layer; other tensors cover the part that this rank owns. Indices of views refer to the
    whole layer.

    Attributes:
        on_device: the window's gradient stays in VRAM.
        host: 1-D pinned tensor with the gradient of the whole window, valid after `sent`. fp32 if accumulated or tied,
            else in the layer's dtype. Ranges of views without a gradient are undefined. None: only the GPU steps it.
        sums: fp64 [num_blocks] in pinned RAM: sums of squares of the window's gradient by norm block, after `sent`.
        sums_on_host: the CPU computes the sums, because the gradient is accumulated in RAM.
        received: indices of the views that got a gradient in this micro-batch.
        window: indices of the views that got a gradient in this accumulation window.
        known: indices of the views that ever got a gradient.
        stage: of this window; the last backward of a window may end as REDUCED, other backwards end as FILLING.
        at_end_only: send at the end of backward, because a view may get more than one gradient.
        missing: several ranks: indices of views in the window that got no gradient on this rank.
        exchanges_sums: several ranks: each rank accumulates the whole layer before the exchange.
        all_sums: the ranks' accumulated gradients in shared RAM, by rank: fp32, 1-D. `host` is this rank's range of
            `all_sums[rank]`.
    """

    def __init__(
        self,
        weights: LayerWeights,
        host: torch.Tensor | None,
        *,
        on_device: bool,
        exchanges_sums: bool = False,
        all_sums: Sequence[torch.Tensor] = (),
    ) -> None:
        self.weights, self.on_device = weights, on_device
        self.exchanges_sums, self.all_sums = exchanges_sums, all_sums
        self.missing = set[int]()
        self.layer: FlatLayer = weights.layer
        self.host, self.sums = host, torch.empty(0)
        self.bucket_dtype = torch.float32 if self.layer.shared else self.layer.dtype
        self.shard: FlatLayer = self.layer.shard
        ranges = [(view.start, view.numel) for view in self.shard.views]
        self.host_blocks = norm_blocks(ranges)
        num_blocks = [-(-view.numel // NORM_BLOCK) for view in self.shard.views]
        self._first_block = list(accumulate(num_blocks, initial=0))
        self.device_blocks = self.host_blocks.to(weights.device)
        self.device_sums = torch.empty(0)
        self.sums_on_host = False
        self.received, self.window, self.known = set[int](), set[int](), set[int]()
        self.stage = Stage.FILLING
        self.at_end_only = self.layer.shared
        self.buffer: torch.Tensor | None = None
        self.accumulated: torch.Tensor | None = None
        """1-D fp32 sum of the micro-batches, if it stays in VRAM."""
        self.own_buffer: torch.Tensor | None = None
        self.sent: Event | None = None
        self._places: dict[int, list[torch.Tensor]] = {}
        self._bucket: tuple[torch.Tensor, torch.Tensor] | None = None
        """A buffer, and the bucket in it."""

    def follow(self, old: LayerGradient) -> None:
        """Take over what `old`, the same layer in its former placement, has learned about backward."""
        self.known, self.at_end_only = old.known, old.at_end_only

    def forget_buffers(self) -> None:
        """Release buffers in VRAM and sums. No window may be open."""
        self.buffer = self.own_buffer = self.accumulated = self.sent = self._bucket = None
        self.sums = self.device_sums = torch.empty(0)
        self.sums_on_host = False
        self._places.clear()

    @property
    def bucket_bytes(self) -> int:
        return self.layer.numel * self.bucket_dtype.itemsize

    @property
    def bucket(self) -> torch.Tensor:
        assert self.buffer is not None
        if self._bucket is None or self._bucket[0] is not self.buffer:
            self._bucket = self.buffer, self.buffer[: self.bucket_bytes].view(self.bucket_dtype)
        return self._bucket[1]

    @property
    def kept(self) -> torch.Tensor:
        """The window's gradient in VRAM, for a step on the GPU: 1-D, fp32 if accumulated."""
        if self.accumulated is None:
            return self.bucket
        return self.accumulated[self._own] if self.exchanges_sums else self.accumulated

    @property
    def _own(self) -> slice:
        return slice(self.shard.begin, self.shard.begin + self.shard.numel)

    @property
    def window_numel(self) -> int:
        return self.layer.numel if self.exchanges_sums else self.shard.numel

    @property
    def window_in_ram(self) -> torch.Tensor:
        assert self.host is not None
        return self.all_sums[self.layer.rank] if self.all_sums else self.host

    def forget_missing(self, missing: set[int]) -> None:
        """Overwrite views without a gradient by -0.0 in the accumulated gradient in RAM."""
        for index in missing:
            self.window_in_ram[self.layer.views[index].elements].numpy().fill(-0.0)

    def add_all_sums(self) -> None:
        """Add all ranks' accumulated gradients in RAM over this rank's range, in rank order. Only this rank accesses
        that range now."""
        first, *others = [each[self._own] for each in self.all_sums]
        for other in others:
            cpu.accumulate(first, other, add=True)
        if self.layer.rank:
            cpu.accumulate(self.window_in_ram[self._own], first, add=False)

    def places(self) -> list[torch.Tensor]:
        assert self.buffer is not None
        address = self.buffer.data_ptr()
        if address not in self._places:
            bucket = self.bucket
            self._places[address] = [bucket[view.elements].view(view.parameter.shape) for view in self.layer.views]
        return self._places[address]

    def sums_of(self, index: int, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """The part of `sums` for view `index`; zeros for blocks that another rank owns."""
        own = index - self.shard.first_view
        if self.shard is self.layer:
            return sums[self._first_block[index] : self._first_block[index + 1]]
        found = np.zeros(-(-self.layer.views[index].numel // NORM_BLOCK))
        if 0 <= own < len(self.shard.views):
            part = sums[self._first_block[own] : self._first_block[own + 1]]
            first = self.shard.views[own].first // NORM_BLOCK
            found[first : first + len(part)] = part
        return found

    def compute_sums_on_host(self) -> None:
        """Compute the sums of squares on the CPU, if the gradient was accumulated in RAM."""
        if self.sums_on_host and self.host is not None:
            block_sums(self.host, self.host_blocks, self.sums)


def runs(layer: FlatLayer, indices: set[int]) -> list[tuple[int, int]]:
    """(start, length) of the element ranges of the views; adjacent ranges are joined."""
    found: list[tuple[int, int]] = []
    for view in (layer.views[index] for index in sorted(indices)):
        if found and sum(found[-1]) == view.start:
            found[-1] = found[-1][0], found[-1][1] + view.numel
        else:
            found.append((view.start, view.numel))
    return found
