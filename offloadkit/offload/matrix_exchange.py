"""Steps of matrices on several ranks. Every rank holds pieces of matrices; one rank orthogonalizes a whole matrix.

A layer is stepped in three parts, on the stepping stream unless another is named:

| part | work | then, on the ranks' stream |
|---|---|---|
| `begin` | every rank updates the momentum of its pieces and writes their updates | the pieces go to the owners |
| `orthogonalize` | every owner orthogonalizes its matrices, one after the other | the results go back |
| `apply` | every rank steps the master weights of its pieces | |

The owners are balanced over all layers, not within a layer. Therefore a layer is begun before the previous layer is
orthogonalized, and it may be applied after the next layer is orthogonalized: no rank waits for the owners of a single
layer. All ranks use the same order of layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, cycle, pairwise

import torch

from offloadkit.device.streams import CopyStream, Event, hold_back
from offloadkit.distributed.ranks import Group
from offloadkit.kernels.muon import Workspace, apply_update, orthogonalize, write_update
from offloadkit.offload.layers import FlatLayer, ParameterView
from offloadkit.offload.matrix_steps import MOST_QUEUED
from offloadkit.optim.table import FlatState, Segment
from offloadkit.planner.layout import MATRIX_BYTES, NUM_MATRIX_BUFFERS, NUM_PIECE_BUFFERS, LayerShape, exchange_sizes
from offloadkit.planner.owners import matrix_owners

_PAUSE = 1e-4
"""Seconds between looks at the oldest queued work. Sixteen queued pieces keep the GPU busy for about 0.8 ms."""


@dataclass(frozen=True)
class _Route:
    """The elements of a layer's updates that this rank sends and receives.

    Attributes:
        pieces: (index of the view, range in the buffer of pieces) of this rank's pieces, sorted by owner.
        matrices: (index of the view, range in the buffer of matrices) of the matrices that this rank owns.
        sent: number of elements that go to each rank, and come back.
        received: number of elements that come from each rank, and go back.
    """

    pieces: tuple[tuple[int, slice], ...]
    matrices: tuple[tuple[int, slice], ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(eq=False)
class MatrixStep:
    """One layer's step that has begun."""

    layer: FlatLayer
    state: FlatState
    """This rank's pieces."""
    segments: Mapping[int, Segment]
    """This rank's pieces by index of the view."""
    scalars: Mapping[int, tuple[float, ...]]
    """Scalars by index of the view. They include views that only other ranks hold."""
    route: _Route
    pieces: torch.Tensor
    """bf16, 1-D"""
    matrices: torch.Tensor
    """bf16, 1-D"""
    arrived: Event


class MatrixExchange:
    """The buffers for the steps of all matrices of an engine on several ranks, and the owners of the matrices."""

    def __init__(
        self,
        ranks: Group,
        device: torch.device,
        layers: Sequence[FlatLayer],
        shapes: Sequence[LayerShape],
        workspace: Workspace,
    ) -> None:
        self._ranks, self._workspace = ranks, workspace
        sizes = exchange_sizes(shapes)
        memory = [
            [torch.zeros(size // MATRIX_BYTES, dtype=torch.bfloat16, device=device) for _ in range(number)]
            for size, number in zip(sizes, (NUM_PIECE_BUFFERS, NUM_MATRIX_BUFFERS), strict=True)
        ]
        self._pieces, self._matrices = map(cycle, memory)
        self._owners = _owners(layers, shapes, ranks.size)
        self._routes: dict[tuple[FlatLayer, tuple[int, ...]], _Route] = {}
        self._queued: deque[Event] = deque()

    def received_bytes(self, step: MatrixStep) -> int:
        """Bytes that other ranks send for a step, of pieces and of results."""
        rank, route = self._ranks.rank, step.route
        return MATRIX_BYTES * sum(sum(each) - each[rank] for each in (route.received, route.sent))

    def begin(
        self,
        layer: FlatLayer,
        state: FlatState,
        gradient: torch.Tensor,
        segments: Mapping[int, Segment],
        scalars: Mapping[int, tuple[float, ...]],
        grad_scale: float,
        stream: CopyStream,
    ) -> MatrixStep:
        """Queue the first part of a step. The arguments are as in `MatrixStep`; `gradient` is of this rank's pieces."""
        key = layer, tuple(sorted(scalars))
        if key not in self._routes:
            self._routes[key] = self._route(*key)
        route = self._routes[key]
        pieces, matrices = next(self._pieces), next(self._matrices)
        for index, place in route.pieces:
            work = partial(write_update, state, gradient, segments[index], grad_scale, pieces[place], self._workspace)
            self._queue(work, stream)
        sent, received = pieces[: sum(route.sent)], matrices[: sum(route.received)]
        arrived = self._exchange(layer, received, sent, route.received, route.sent, stream)
        return MatrixStep(layer, state, segments, scalars, route, sent, received, arrived)

    def orthogonalize(self, step: MatrixStep, stream: CopyStream) -> None:
        stream.wait(step.arrived)  # wait: pieces of the other ranks before their matrix is orthogonalized
        for index, place in step.route.matrices:
            matrix = step.layer.views[index].matrix
            assert matrix is not None
            update = step.matrices[place]
            self._queue(partial(orthogonalize, update, matrix, step.scalars[index], self._workspace), stream)
        route = step.route
        step.arrived = self._exchange(step.layer, step.pieces, step.matrices, route.sent, route.received, stream)

    def apply(self, step: MatrixStep, stream: CopyStream) -> None:
        stream.wait(step.arrived)  # wait: updates of the owners before they are applied
        for index, place in step.route.pieces:
            segment = step.segments[index]
            self._queue(partial(apply_update, step.state, step.pieces[place], segment, self._workspace), stream)

    def _queue(self, work: Callable[[], None], stream: CopyStream) -> None:
        hold_back(self._queued, MOST_QUEUED, _PAUSE)
        stream.run(work)
        self._queued.append(stream.record())

    def _exchange(
        self,
        layer: FlatLayer,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_lengths: Sequence[int],
        sent_lengths: Sequence[int],
        stream: CopyStream,
    ) -> Event:
        """Exchange parts of updates after the work on `stream`; returns the end."""
        of_ranks = self._ranks.stream
        of_ranks.wait(stream.record())  # wait: updates before they are exchanged
        with of_ranks.traced(f"matrices of {layer.name}", received.nbytes):
            of_ranks.run(partial(self._ranks.exchange_parts, received, sent, received_lengths, sent_lengths))
        return of_ranks.record()

    def _route(self, layer: FlatLayer, indices: Sequence[int]) -> _Route:
        rank, owners = self._ranks.rank, self._owners[layer]
        lengths = {index: _lengths(layer.views[index], layer.cuts) for index in indices}
        by_owner = sorted((index for index in indices if lengths[index][rank]), key=lambda index: owners[index])
        own = [index for index in indices if owners[index] == rank]
        return _Route(
            tuple(zip(by_owner, _ranges([lengths[index][rank] for index in by_owner]), strict=True)),
            tuple(zip(own, _ranges([layer.views[index].numel for index in own]), strict=True)),
            tuple(
                sum(lengths[index][rank] for index in indices if owners[index] == each)
                for each in range(self._ranks.size)
            ),
            tuple(sum(lengths[index][each] for index in own) for each in range(self._ranks.size)),
        )


def _owners(layers: Sequence[FlatLayer], shapes: Sequence[LayerShape], num_ranks: int) -> dict[FlatLayer, list[int]]:
    """The owner of each view, for each layer whose step unit is the matrix.

    Among equally large matrices of a layer, an owner gets the matrix with its largest piece.
    """
    placed = [(layer, shape.matrices) for layer, shape in zip(layers, shapes, strict=True) if shape.matrices]
    found: dict[FlatLayer, list[int]] = {}
    for (layer, matrices), owners in zip(placed, matrix_owners([each for _, each in placed], num_ranks), strict=True):
        free: dict[int, list[int]] = {}
        for matrix, owner in zip(matrices, owners, strict=True):
            free.setdefault(matrix.flops, []).append(owner)
        parts = [_lengths(view, layer.cuts) for view in layer.views]
        found[layer] = [-1] * len(parts)
        for _, at, rank in sorted((-part, at, rank) for at, of in enumerate(parts) for rank, part in enumerate(of)):
            of_view = layer.views[at].matrix
            assert of_view is not None
            if found[layer][at] < 0 and rank in free[of_view.flops]:
                free[of_view.flops].remove(rank)
                found[layer][at] = rank
    return found


def _lengths(view: ParameterView, cuts: Sequence[int]) -> list[int]:
    """Elements of a view that each rank has."""
    end = view.start + view.numel
    return [max(0, min(end, last) - max(view.start, first)) for first, last in pairwise(cuts)]


def _ranges(lengths: Sequence[int]) -> list[slice]:
    return [slice(first, last) for first, last in pairwise(accumulate(lengths, initial=0))]
