"""An accumulation window that can be repeated: its micro-batches, and what they drew from and wrote to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from offloadkit.checkpoint.values import random_states, set_random_states
from offloadkit.offload.buffers import Buffers


class Window:
    """Remembers one window of a Trainer until the next begins. Weights are not remembered: a window changes none."""

    def __init__(self) -> None:
        self._micro_batches: list[tuple[Any, dict[str, Any]]] = []
        self._buffers = Buffers()

    def begin(self, model: nn.Module) -> None:
        """A window begins: forget the last one."""
        self._micro_batches.clear()
        self._buffers.keep(model)

    def add(self, inputs: Any) -> None:
        """The next micro-batch begins."""
        self._micro_batches.append((inputs, random_states()))

    def again(self) -> Iterator[Any]:
        """The micro-batches so far, one after the other, each with the random states that it had.

        The buffers are first as they were.
        """
        self._buffers.restore()
        for inputs, states in list(self._micro_batches):
            set_random_states(states)
            yield inputs
