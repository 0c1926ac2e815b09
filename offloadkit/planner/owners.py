"""The rank that orthogonalizes each matrix, if several ranks train together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from offloadkit.optim.table import Matrix


def matrix_owners(layers: Sequence[Sequence[Matrix]], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    """The owner of each matrix of each layer. The FLOPs of all layers together are balanced between the ranks.

    The matrix with the most FLOPs comes first, and goes to the rank with the fewest so far.
    """
    return _owners(tuple(map(tuple, layers)), num_ranks)


@lru_cache(maxsize=8)
def _owners(layers: tuple[tuple[Matrix, ...], ...], num_ranks: int) -> tuple[tuple[int, ...], ...]:
    flops = [0] * num_ranks
    found = [[0] * len(layer) for layer in layers]
    places = [(layer, at) for layer, matrices in enumerate(layers) for at in range(len(matrices))]
    for layer, at in sorted(places, key=lambda place: -layers[place[0]][place[1]].flops):
        owner = found[layer][at] = flops.index(min(flops))
        flops[owner] += layers[layer][at].flops
    return tuple(map(tuple, found))
