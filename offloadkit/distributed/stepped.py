"""Shared-memory counters of the layers that the ranks of a host have stepped. A rank waits only for slower ranks.

Each rank writes its own counters, aligned 8-byte words, which a processor writes atomically; earlier writes to memory
are visible before them.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from offloadkit.errors import RankError
from offloadkit.facts.units import rounded

_PAUSE = 2e-5
"""Initial polling interval in seconds; it doubles up to `_LONGEST_PAUSE`."""
_LONGEST_PAUSE = 1e-4
CHECKS_EVERY = 0.1


class SteppedLayers:
    """Shared counters of all layers, one `Stepped` each."""

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
            file: descriptor of zero-filled shared memory; closed here.
            timeout: longest wait for another rank, in seconds.
            lost: returns a rank that is known to have died or failed.
        """
        self._memory = mmap.mmap(file, 8 * num_ranks * (num_layers + 1))
        os.close(file)
        self.rank, self.timeout, self._lost = rank, timeout, lost
        words = np.frombuffer(self._memory, dtype=np.int64).reshape(num_layers + 1, num_ranks)
        self._ended = words[num_layers]
        self.layers = [Stepped(self, words[at]) for at in range(num_layers)]

    def end(self) -> None:
        """Announce that this rank steps no further layers: ranks that still wait for it get an error."""
        self._ended[self.rank] = 1

    def missing(self) -> int | None:
        ended = [rank for rank in np.flatnonzero(self._ended).tolist() if rank != self.rank]
        return ended[0] if ended else self._lost()


class Stepped:
    def __init__(self, of: SteppedLayers, words: NDArray[np.int64]) -> None:
        """`words`: int64 [ranks], the number of times that rank r has stepped its range of the layer."""
        self._of, self._words = of, words
        self._others = np.arange(len(words)) != of.rank
        self._expected = 0

    def begin(self) -> None:
        """Expect one more step on all ranks. Call it before any thread waits for that step."""
        self._expected += 1

    def post(self) -> None:
        self._words[self._of.rank] = self._expected

    def reached(self) -> bool:
        return bool((self._words[self._others] >= self._expected).all())

    def wait(self) -> None:
        """Block the calling thread until the other ranks' new weights are in RAM."""
        began = checked = time.monotonic()
        pause = _PAUSE
        while not self.reached():
            time.sleep(pause)
            pause, now = min(2 * pause, _LONGEST_PAUSE), time.monotonic()
            if now - checked < CHECKS_EVERY:
                continue
            checked, missing = now, self._of.missing()
            if missing is not None and not self.reached():
                raise RankError(
                    f"rank {missing} has ended, or has raised an error, before it had stepped all weights: its error "
                    "says why. Resume from a checkpoint"
                )
            if now - began > self._of.timeout:
                raise RankError(
                    f"the other ranks have not stepped all weights within {rounded(self._of.timeout)} seconds "
                    "(ddp_timeout of finetune and TrainingArguments, timeout of init_process_group): look at their "
                    "errors, and resume from a checkpoint"
                )
