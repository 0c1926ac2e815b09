"""Steps of matrices on the GPU's stream, one after the other in one workspace."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch

from offloadkit.device.streams import CopyStream, Event
from offloadkit.kernels.dispatch import optimizer_step
from offloadkit.optim.table import FlatState, Segment

MOST_QUEUED = 4
"""Maximum number of matrices whose steps are queued but not done. A step queues some dozens of kernels, and a full
stream (about a thousand operations) blocks every thread that queues an operation.
"""
_PAUSE = 1e-3


class MatrixSteps:
    """The workspace for the steps of all matrices of an engine on one stream.

    Attributes:
        workspace: uint8 on the device; as large as the matrix with the most `workspace_bytes` needs.
    """

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._queued: deque[Event] = deque()

    def step(
        self,
        state: FlatState,
        gradient: torch.Tensor,
        segments: Sequence[Segment],
        grad_scale: float,
        stream: CopyStream,
    ) -> None:
        """Queue one optimizer step of the matrices in `segments`."""
        for segment in segments:
            while len(self._queued) >= MOST_QUEUED:
                if self._queued[0].done():
                    self._queued.popleft()
                else:
                    time.sleep(_PAUSE)
            stream.run(partial(optimizer_step, state, gradient, [segment], grad_scale, self.workspace))
            self._queued.append(stream.record())
