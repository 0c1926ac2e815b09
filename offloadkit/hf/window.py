"""A repeatable gradient accumulation window: its micro-batches, random states and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from offloadkit.checkpoint.values import random_states, set_random_states
from offloadkit.offload.buffers import Buffers


class Window:
    """Remembers one window of a Trainer until the next begins, without weights, because a window changes none."""

    def __init__(self) -> None:
        self._micro_batches: list[tuple[Any, dict[str, Any]]] = []
        self._buffers = Buffers()

    def begin(self, model: nn.Module) -> None:
        """Start a new window and forget the last."""
        self._micro_batches.clear()
        self._buffers.keep(model)

    def add(self, inputs: Any) -> None:
        """Record the next micro-batch and the present random states."""
        self._micro_batches.append((inputs, random_states()))

    def again(self) -> Iterator[Any]:
        """Restore the buffers, then yield the recorded micro-batches with their random states restored."""
        self._buffers.restore()
        for inputs, states in list(self._micro_batches):
            set_random_states(states)
            yield inputs
