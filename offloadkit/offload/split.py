"""Which of the layers that either processor can step the GPU steps: corrected by what both really took.

The plan's assignment comes from predicted rates. Layers move from the processor that ends later to the other one as
long as that is worth it; since both give the same bits, no number depends on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from offloadkit.offload.states import LayerState
from offloadkit.offload.streams import Event

WARM_UP = 2
"""Updates that are not looked at: kernels are compiled, and pages and caches are cold."""
MOST_MOVES = 4
"""Layers that move before one step."""
MOST_SEEN = 4
"""Updates whose mean decides: the newest of those since a layer moved."""
WORTH = 0.02
"""Layers move where the processor that ends later then ends sooner by more than this share."""
NOISE = 0.15
"""One update alone moves none before the processors' times differ by more than this share of the longer one."""


@dataclass(frozen=True)
class Took:
    """One update on both processors.

    Attributes:
        cpu_seconds: of the C kernels and what they waited for.
        cpu_numel: elements that the CPU stepped.
        gpu: from the first kernel's turn to the last kernel's end.
        gpu_numel: elements whose states passed through VRAM.
    """

    cpu_seconds: float
    cpu_numel: int
    gpu: tuple[Event, Event] | None
    gpu_numel: int

    def is_over(self) -> bool:
        """Whether the GPU is done with it too."""
        return self.gpu is None or self.gpu[1].done()


class Split:
    """Corrects the assignment between updates."""

    def __init__(self) -> None:
        self._took: deque[Took] = deque()
        self._seen: deque[tuple[float, float, float, float]] = deque(maxlen=MOST_SEEN)
        """Seconds and elements of the CPU, and of the GPU."""
        self._num_updates = 0
        self._alone = self._one_before_alone = False

    def add(self, took: Took) -> None:
        """What the newest update took."""
        self._num_updates += 1
        self._alone, self._one_before_alone = False, self._alone
        if self._num_updates > WARM_UP:
            self._took.append(took)

    def disregard_newest(self) -> None:
        """It was waited for: without a forward beside it the GPU ends sooner than in other steps. Where every update is
        waited for, they count."""
        if not self._alone and not self._one_before_alone and self._took:
            self._took.pop()
        self._alone = True

    def correct(self, layers: Sequence[LayerState]) -> None:
        """Move up to `MOST_MOVES` of `layers`, which are stepped next, if the updates that are over say so."""
        movable = [layer for layer in layers if layer.switchable]
        while self._took and self._took[0].is_over():  # Python may be a step ahead of the GPU
            took = self._took.popleft()
            gpu = took.gpu[1].seconds_since(took.gpu[0]) if took.gpu else 0.0
            self._seen.append((took.cpu_seconds, took.cpu_numel, gpu, took.gpu_numel))
        if not movable or not self._seen:
            return
        cpu, cpu_numel, gpu, gpu_numel = (sum(column) / len(self._seen) for column in zip(*self._seen, strict=True))
        if len(self._seen) == 1 and abs(cpu - gpu) < NOISE * max(cpu, gpu):
            return
        by_cpu, by_gpu = cpu / cpu_numel if cpu_numel else 0.0, gpu / gpu_numel if gpu_numel else 0.0
        rates = by_cpu or by_gpu, by_gpu or by_cpu  # the one that did nothing is taken to be as fast
        before, moved = max(cpu, gpu), list[LayerState]()
        while len(moved) < MOST_MOVES and (move := _move(movable, cpu, gpu, *rates)) is not None:
            layer, cpu, gpu = move
            layer.on_gpu = not layer.on_gpu
            moved.append(layer)
        if max(cpu, gpu) > (1 - WORTH) * before:
            for layer in moved:
                layer.on_gpu = not layer.on_gpu
        elif moved:
            self._took.clear()  # of before the move
            self._seen.clear()


def _move(
    layers: Sequence[LayerState], cpu: float, gpu: float, by_cpu: float, by_gpu: float
) -> tuple[LayerState, float, float] | None:
    """The layer whose move helps most, of equal ones the last, and both processors' seconds then; None where the later
    one would end no sooner."""
    best, least = None, max(cpu, gpu)
    for layer in layers:
        if layer.on_gpu == (gpu > cpu):
            sign = 1 if layer.on_gpu else -1
            then = cpu + sign * layer.layer.numel * by_cpu, gpu - sign * layer.layer.numel * by_gpu
            if max(then) < least or (best is not None and max(then) == least):
                best, least = (layer, *then), max(then)
    return best
