"""Agreement of several ranks at the end of an accumulation window: one collective before each update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offloadkit.distributed.ranks import Ranks
from offloadkit.errors import EngineStateError
from offloadkit.offload.model import PlacedModel
from offloadkit.offload.states import LayerState
from offloadkit.offload.weight_ring import StreamedWeights


@dataclass(frozen=True)
class RankFlags:
    """Facts about one rank that all ranks learn.

    Attributes:
        is_full: the rank's GPU is out of memory, so it cannot finish the window.
        has_unlike: `PlacedModel.unlike` has layers.
    """

    is_full: bool = False
    ram_is_scarce: bool = False
    rates_are_due: bool = False
    has_unlike: bool = False


@dataclass(frozen=True)
class Agreement:
    """The result of the collective, equal on all ranks.

    Attributes:
        full, scarce, due, unlike: the flags of all ranks, [ranks].
        order: the layers in rank 0's stepping order; meaningless if a rank is full.
    """

    full: NDArray[np.bool_]
    scarce: NDArray[np.bool_]
    due: NDArray[np.bool_]
    unlike: NDArray[np.bool_]
    order: Sequence[LayerState]


def agree(placed: PlacedModel, ranks: Ranks, window: tuple[int, int], flags: RankFlags) -> Agreement:
    """A collective at the window's end: all ranks step the same parameters, in rank 0's layer order, and exchange
    gradients in rank 0's order. If a rank's GPU is full, the ranks agree on nothing else.

    Args:
        window: (updates, micro-batches) so far; must be equal on all ranks.

    Raises:
        EngineStateError: the ranks are at different steps or micro-batches, or have written different weights.
    """
    states, order, reduction = placed.trained, placed.forward_order, placed.gradients.reduction
    assert reduction is not None
    at = {state: index for index, state in enumerate(states)}
    num, counts = len(states), [len(state.layer.views) for state in states]
    got = np.zeros(sum(counts), dtype=np.int64)
    starts = [0, *np.cumsum(counts).tolist()]
    for start, state in zip(starts, states, strict=False):
        got[[start + index for index in state.gradient.window]] = 1
    written = [isinstance(state.weights, StreamedWeights) and state.weights.has_private_copy for state in placed.states]
    own = [*window, flags.is_full, flags.ram_is_scarce, flags.rates_are_due, flags.has_unlike]
    own += [*(at[state] for state in order), *reduction.completed, *got.tolist(), *written]
    told = ranks.agree(np.array(own, dtype=np.int64))
    windows, (full, scarce, due, unlike), told = told[:, :2].tolist(), told[:, 2:6].astype(bool).T, told[:, 6:]
    if full.any():
        return Agreement(full, scarce, due, unlike, order)
    if len({*map(tuple, windows)}) > 1:
        listed = ", ".join(f"rank {rank}: {m} in step {n}" for rank, (n, m) in enumerate(windows))
        raise EngineStateError(
            f"the ranks are at different micro-batches ({listed}): every rank must call backward() and step() "
            "equally often. Give all ranks the same number of batches"
        )
    end = 2 * num + len(got)
    _share_writes(placed, ranks, told[:, end:])
    by_any = told[:, 2 * num : end].max(axis=0)
    for start, state, count in zip(starts, states, counts, strict=False):
        by_ranks = set(np.flatnonzero(by_any[start : start + count]).tolist())
        state.gradient.missing = by_ranks - state.gradient.window
        state.gradient.window = by_ranks
    reduction.order = told[0, num : 2 * num].tolist()
    return Agreement(full, scarce, due, unlike, [states[index] for index in told[0, :num].tolist()])


def _share_writes(placed: PlacedModel, ranks: Ranks, parted: NDArray[np.int64]) -> None:
    """Publish weights in RAM that all ranks wrote since the last boundary, each rank in its private copy.

    `parted`: [ranks, layers], 1 where a rank has a private copy. All ranks are between backward and step.

    Raises:
        EngineStateError: a rank has not written weights that another rank has.
    """
    for at in np.flatnonzero(parted.min(axis=0) != parted.max(axis=0)):
        wrote = ", ".join(map(str, np.flatnonzero(parted[:, at])))
        raise EngineStateError(
            f"weights of {placed.states[at].layer.name!r} were written or loaded on rank {wrote}, but not on the "
            "other ranks: between steps every rank must write the same weights"
        )
    if not parted.any():
        return
    streamed = [state.weights for state in placed.states if isinstance(state.weights, StreamedWeights)]
    with ranks.together("sharing weights that were written"):
        for weights in streamed:
            weights.publish()
    for weights in streamed:
        weights.rejoin()
