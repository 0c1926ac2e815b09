"""Steps of matrices on the GPU's stream, one after the other in one workspace.

The main thread captures the Newton-Schulz iterations of each shape when the workspace is allocated, because the main
thread cannot draw random numbers during a capture. The thread that queues the GPU's steps replays the graphs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from functools import partial

import torch

from offloadkit.device.graphs import pools_of_step
from offloadkit.device.streams import CopyStream, Event, hold_back
from offloadkit.facts.config import MuonOptions
from offloadkit.kernels.dispatch import optimizer_step
from offloadkit.kernels.muon import Workspace
from offloadkit.optim.muon import muon_scalars
from offloadkit.optim.table import FlatState, Matrix, Segment

MOST_QUEUED = 16
"""Maximum number of matrices whose steps are queued but not done: enough for a pause on an H100, where a step of T5-3B
takes 0.3 ms or more, and for the next fetch of states in RAM to be queued before the GPU is idle. Without graphs a step
queues some dozens of kernels, and a full stream (about a thousand operations) blocks every thread that queues an
operation.
"""


def workspace(device: torch.device, matrices: Collection[Matrix], options: MuonOptions) -> Workspace:
    """A workspace for each of the matrices, with graphs for `options` on devices that have graphs.

    Parameter groups with other options, except for the learning rate, weight decay and momentum, step without graphs.
    """
    most = max(matrix.workspace_bytes for matrix in matrices)
    made = Workspace(torch.zeros(most, dtype=torch.uint8, device=device))
    if device.type in pools_of_step:
        pool = pools_of_step[device.type](device)
        made.capture(matrices, muon_scalars(lr=0.0, options=options, step=1), lambda work: pool.capture(work).replay)
    return made


class MatrixSteps:
    """The steps of all matrices of an engine, on one stream in one workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
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
            hold_back(self._queued, MOST_QUEUED)
            stream.run(partial(optimizer_step, state, gradient, [segment], grad_scale, self._workspace))
            self._queued.append(stream.record())
