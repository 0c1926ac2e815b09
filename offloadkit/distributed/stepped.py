"""Which ranks of a host have stepped a layer: numbers in memory that they share. No rank waits for one that is ahead.

A rank writes its own numbers and reads the others'. They are whole words, which a processor writes at once. What was
written to memory before them is seen before them.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from offloadkit.errors import RankError

_PAUSE = 2e-5
"""Seconds between two looks at the numbers, at first; they grow to `_LONGEST_PAUSE`."""
_LONGEST_PAUSE = 1e-4
_CHECKS_EVERY = 0.1
"""Seconds between two looks at whether the other ranks are there."""


class SteppedLayers:
    """What the ranks tell each other of all layers.

    Attributes:
        layers: one object for each layer.
    """

    def __init__(
        self,
        file: int,
        rank: int,
        num_ranks: int,
        num_layers: int,
        timeout: float,
        lost: Callable[[], int | None],
    ) -> None:
        """
        Args:
            file: descriptor of memory that the ranks share, filled with zeros. It is closed.
            timeout: seconds that a rank waits for another one.
            lost: a rank that has died or failed, if one is known.
        """
        self._memory = mmap.mmap(file, 8 * num_ranks * (num_layers + 1))
        os.close(file)
        self.rank, self.timeout, self._lost = rank, timeout, lost
        words = np.frombuffer(self._memory, dtype=np.int64).reshape(num_layers + 1, num_ranks)
        self._ended = words[num_layers]
        self.layers = [Stepped(self, words[at]) for at in range(num_layers)]

    def end(self) -> None:
        """This rank steps nothing any more: who still waits for it gets an error."""
        self._ended[self.rank] = 1

    def missing(self) -> int | None:
        """Another rank that steps nothing any more."""
        ended = [rank for rank in np.flatnonzero(self._ended).tolist() if rank != self.rank]
        return ended[0] if ended else self._lost()


class Stepped:
    """What the ranks tell each other of one layer."""

    def __init__(self, of: SteppedLayers, words: NDArray[np.int64]) -> None:
        """words: int64 [ranks], how often each has stepped its range of the layer."""
        self._of, self._words = of, words
        self._others = np.arange(len(words)) != of.rank
        self._expected = 0

    def begin(self) -> None:
        """All ranks step the layer once more. Called before anybody waits for that."""
        self._expected += 1

    def post(self) -> None:
        """This rank's new weights are in RAM."""
        self._words[self._of.rank] = self._expected

    def reached(self) -> bool:
        """Whether the other ranks' are; does not wait."""
        return bool((self._words[self._others] >= self._expected).all())

    def wait(self) -> None:
        """Block the calling thread until the other ranks' new weights are in RAM.

        Raises:
            RankError: one of them has ended, or does not come before the timeout.
        """
        began = checked = time.monotonic()
        pause = _PAUSE
        while not self.reached():
            time.sleep(pause)
            pause, now = min(2 * pause, _LONGEST_PAUSE), time.monotonic()
            if now - checked < _CHECKS_EVERY:
                continue
            checked, missing = now, self._of.missing()
            if missing is not None and not self.reached():
                raise RankError(
                    f"rank {missing} has ended, or has raised an error, before it had stepped all weights: its error "
                    "says why. Go on from a checkpoint"
                )
            if now - began > self._of.timeout:
                raise RankError(
                    f"the other ranks have not stepped all weights within {self._of.timeout:g} seconds (ddp_timeout of "
                    "finetune and TrainingArguments, timeout of init_process_group): look at their errors, and go on "
                    "from a checkpoint"
                )
