"""Ranks without other processes: the others have the same gradients as this one, and step nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offloadkit.device.streams import CopyStream
from offloadkit.distributed.ranks import Ranks


class MirroredRanks(Ranks):
    """One rank of several.

    Attributes:
        num_gathers: layers whose new weights were gathered.
    """

    def __init__(self, device: torch.device, rank: int = 0, size: int = 2) -> None:
        self.rank, self.size, self._device = rank, size, device
        self.stream = CopyStream(device, "ranks")
        self.num_gathers = 0
        self._received = Counter()

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, cuts: Sequence[int]) -> None:
        own = sent[cuts[self.rank] : cuts[self.rank + 1]]
        for at in range(self.size):
            received[at * own.numel() : (at + 1) * own.numel()].copy_(own)

    def gather(self, flat: torch.Tensor, cuts: Sequence[int]) -> None:
        self.num_gathers += 1
        for part in (flat[: cuts[self.rank]], flat[cuts[self.rank + 1] :]):
            part.mul_(1)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """It has rank 0's numbers."""

    def agree(self, own: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.stack([own] * self.size)

    def told(self, make: Callable[[], Any], *, by: int = 0) -> Any:
        return make()

    def sum(self, numbers: NDArray[np.float64]) -> None:
        """The others have zeros."""

    def close(self) -> None:
        """There is nothing to close."""
