"""Who is busy until when: processors and the bus as queues, and the ring through which states pass VRAM."""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush

from offloadkit.plan.shapes import NUM_STEP_BUFFERS

FEW_CORES = 2
"""With no more than these the CPU's step takes them from Python, which starts the GPU's operations."""


class Queues:
    """When each resource is free again, and how long it has worked for what."""

    def __init__(self, num_cores: int) -> None:
        self._launches = "CPU step" if num_cores <= FEW_CORES else "launches"
        self.free: defaultdict[str, float] = defaultdict(float)
        self.busy: defaultdict[str, float] = defaultdict(float)

    def take(self, resource: str, seconds: float, ready: float, purpose: str | None = None) -> float:
        """Work that can start at `ready`; the time of its end."""
        began = self.free[resource]
        end = self.free[resource] = (began if began > ready else ready) + seconds
        self.busy[purpose or resource] += seconds
        return end

    def launched(self, seconds: float, ready: float) -> float:
        """Python has started what the GPU does last, which ends no sooner; when that is."""
        end = self.free["GPU"] = max(self.free["GPU"], self.take(self._launches, seconds, ready, "launches"))
        return end

    def python(self, seconds: float) -> None:
        """Python does something else."""
        self.take(self._launches, seconds, 0.0, "launches")

    def python_waits(self, until: float) -> None:
        """Nothing is started before `until`."""
        self.free[self._launches] = max(self.free[self._launches], until)

    def python_goes_on(self) -> float:
        """When Python is free again."""
        return self.free[self._launches]


class Ring:
    """States that pass through VRAM in chunks, from the beginning of the update on: H2D, the GPU's step, D2H, each as
    soon as the one before is done with the chunk and a buffer is free; an H2D after the step of the chunk before.

    Other copies to VRAM go first, each when it can: the ring's wait for them, and not for what they wait for.
    """

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._h2d = self._d2h = 0.0
        self._others: list[tuple[float, float]] = []

    def give_way(self, end: float, seconds: float) -> None:
        """A copy of so many seconds to VRAM that is over at `end`."""
        heappush(self._others, (end - seconds, seconds))

    def sent(self, seconds: float) -> None:
        """A copy of so many seconds to RAM, some time or other."""
        self._d2h += seconds

    def step(self, h2d: float, d2h: float, kernel: float, num_chunks: int) -> tuple[float, float]:
        """When a layer is stepped, and when it is back in RAM.

        Args:
            h2d, d2h, kernel: seconds of the whole layer.
        """
        began = self._h2d
        stepped = began + h2d + kernel
        while self._others and self._others[0][0] <= stepped:
            stepped += heappop(self._others)[1]
        back = max(max(self._d2h, began + (h2d + kernel) / num_chunks) + d2h, stepped + d2h / num_chunks)
        self._h2d = max(stepped, back - (NUM_STEP_BUFFERS - 1) * d2h / num_chunks)
        self._d2h = back
        self._queues.busy["H2D"] += h2d
        self._queues.busy["D2H"] += d2h
        return stepped, back
