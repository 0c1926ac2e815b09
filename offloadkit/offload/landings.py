"""Where gradients lie in VRAM: buffers that layers take turns in, and one where layers keep theirs until the step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from offloadkit.offload.streams import Event
from offloadkit.offload.waits import Waits
from offloadkit.optim.gradient_norm import block_sums
from offloadkit.plan import NUM_LANDINGS


class LandingPool:
    """Reusable device buffers of one size. A buffer returned with an event is written again only after that event, for
    which the device waits: of the `NUM_LANDINGS` layers whose gradients are in VRAM, one is autograd's."""

    def __init__(self, device: torch.device, num_bytes: int, waits: Waits) -> None:
        """
        Args:
            num_bytes: of the largest landing.
        """
        self._device, self._num_bytes, self._waits = device, num_bytes, waits
        self._free: list[tuple[torch.Tensor, Event | None]] = []

    def take(self) -> torch.Tensor:
        """A uint8 buffer."""
        ready = [item for item in self._free if item[1] is None or item[1].done()]
        if not ready and len(self._free) < NUM_LANDINGS - 1:
            return torch.zeros(self._num_bytes, dtype=torch.uint8, device=self._device)
        buffer, busy = (ready or self._free)[0]
        self._free = [item for item in self._free if item[0] is not buffer]
        if busy is not None:
            self._waits.delay(busy)
        return buffer

    def give_back(self, buffer: torch.Tensor, busy: Event | None) -> None:
        """Return a buffer that is still read until `busy`."""
        self._free.append((buffer, busy))


class KeptGradients:
    """Gradients of one dtype that stay in VRAM until the boundary, in one buffer: the norm takes one operation for all.

    Attributes:
        parts: each layer's, 1-D.
    """

    def __init__(
        self, numels: Sequence[int], blocks: Sequence[torch.Tensor], dtype: torch.dtype, sums: torch.Tensor
    ) -> None:
        """
        Args:
            numels: elements of each layer.
            blocks: each layer's norm blocks, as `norm_blocks` gives them.
            sums: fp64 on the device: where the sums of all blocks go, one after the other.
        """
        starts = list(accumulate(numels, initial=0))
        self._flat = torch.zeros(starts[-1], dtype=dtype, device=sums.device)
        self.parts = [self._flat[start:end] for start, end in pairwise(starts)]
        moved = [some + torch.tensor([start, 0]) for some, start in zip(blocks, starts[:-1], strict=True)]
        self._blocks, self._sums = torch.cat(moved).to(sums.device), sums

    def take_sums(self) -> None:
        """The norm's sums of what is here; those of layers without a gradient mean nothing."""
        block_sums(self._flat, self._blocks, self._sums)
