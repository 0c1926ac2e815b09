"""A group in one process: simulated ranks have the same gradients as this rank, and constant weights.

A stream does their reads and writes of shared weights in RAM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offloadkit.device.host_memory import file_in_ram
from offloadkit.device.streams import CopyStream, Event
from offloadkit.distributed.ranks import Group
from offloadkit.distributed.stepped import Stepped, SteppedLayers


class MirroredStepped(Stepped):
    """Simulated ranks have stepped their layers once all ranks know the norm."""

    ranks: MirroredRanks
    index: int

    def post(self) -> None:
        self._words[:] = self._expected
        own, scratch = self.ranks.own.get(self.index, (torch.empty(0),) * 2)
        self.ranks.simulated.copy(scratch, own)

    def reached(self) -> bool:
        return self.ranks.wrote is None or self.ranks.wrote.done()

    def wait(self) -> None:
        assert self.ranks.wrote is not None
        self.ranks.wrote.synchronize()


class MirroredRanks(Group):
    """One real rank among simulated ranks.

    Attributes:
        num_gathers: layers whose new weights were gathered.
        own: by layer index: this rank's part of the weights in RAM, and scratch memory of that size.
        foreign: parts of the simulated ranks, with copies.
        simulated: stream of the simulated ranks.
        wrote: event after the last write of the simulated ranks.
    """

    def __init__(self, device: torch.device, rank: int = 0, size: int = 2) -> None:
        self.rank, self.size, self._device = rank, size, device
        self.stream = CopyStream(device, "ranks")
        self.num_gathers = 0
        self._received = Counter()
        self.simulated, self.wrote = CopyStream(device, "other ranks"), None
        self.own = dict[int, tuple[torch.Tensor, torch.Tensor]]()
        self.foreign = list[tuple[torch.Tensor, torch.Tensor]]()

    wrote: Event | None

    def watch(self, layers: Sequence[tuple[int, torch.Tensor, Sequence[int]]]) -> None:
        """Let the simulated ranks use weights in RAM: (layer index, the whole flat layer, cuts)."""
        self.own, self.foreign = {}, []
        for index, flat, cuts in layers:
            parts = [flat[start:end] for start, end in pairwise(cuts)]
            own = parts.pop(self.rank)
            self.own[index] = own, torch.empty_like(own)
            self.foreign += [(part, part.clone()) for part in parts]

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, cuts: Sequence[int]) -> None:
        own = sent[cuts[self.rank] : cuts[self.rank + 1]]
        for at in range(self.size):
            received[at * own.numel() : (at + 1) * own.numel()].copy_(own)

    def exchange_parts(
        self, received: torch.Tensor, sent: torch.Tensor, received_lengths: Sequence[int], sent_lengths: Sequence[int]
    ) -> None:
        """Simulated ranks send small numbers."""
        received.copy_((sent.float().sum() * 0 + 0.01).to(received.dtype).expand_as(received))

    def gather(self, flat: torch.Tensor, cuts: Sequence[int]) -> None:
        self.num_gathers += 1
        for part in (flat[: cuts[self.rank]], flat[cuts[self.rank + 1] :]):
            part.mul_(1)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Nothing to do: the tensor already has rank 0's values."""

    def agree(self, own: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.stack([own] * self.size)

    def broadcast_from(self, make: Callable[[], Any], *, by: int = 0) -> Any:
        return make()

    def sum(self, numbers: NDArray[np.float64]) -> None:
        """Simulated ranks add zeros. They have fetched all weights by now, and step theirs afterwards."""
        self.simulated.record().synchronize()
        for part, copy in self.foreign:
            self.simulated.copy(part, copy)
        self.wrote = self.simulated.record()

    def meet(self) -> None:
        """Simulated ranks are always ready."""

    def share(self, sizes: Sequence[int]) -> list[int]:
        return [file_in_ram(size) for size in sizes]

    def stepped(self, num_layers: int) -> list[Stepped]:
        (file,) = self.share([8 * self.size * (num_layers + 1)])
        layers = SteppedLayers(file, self.rank, self.size, num_layers, 60.0, lambda: None).layers
        for index, layer in enumerate(layers):
            layer.__class__ = MirroredStepped
            layer.ranks, layer.index = self, index
        return layers

    def close(self) -> None:
        """Nothing to close."""
