"""Optimizer states in RAM that the GPU steps: chunk by chunk they pass through a few buffers in VRAM.

A chunk is fetched on one stream, stepped on a second and sent back on a third, so that both directions of the bus and
the GPU work at once. Events alone hold the order, and everything of a step may be queued at once:

| | starts after |
|---|---|
| H2D of a chunk | D2H of what its buffer held, and of the same chunk in the last step; the step before it |
| its step | its H2D; what the kernels' stream waits for: the compute stream still reads weights that stay in VRAM |
| D2H | its step; copies out of the same weights in RAM |

Between two H2Ds the bus is free for a kernel's time, so that weights that forward waits for go first, on other streams.
A stream whose next copy may always start at once would keep its copy engine until its queue is empty. On an H200 a
layer's weights that were ready after 20 ms of an update then came at its end, after 260 ms.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle
from typing import ClassVar

import torch

from offloadkit.device.streams import CopyStream, Event, record_compute
from offloadkit.kernels.dispatch import optimizer_step
from offloadkit.optim.table import FlatState, Segment, aligned
from offloadkit.planner import chunk_numel

MOST_UNDER_WAY = 32
"""Chunks that are queued and not stepped yet: a stream whose queue is full (about a thousand operations) would stop
whoever queues next, on any stream."""
_PAUSE = 1e-3

_Layout = tuple[tuple[str, torch.dtype, int], ...]


def cutter(memory: torch.Tensor) -> Callable[[int, torch.dtype], torch.Tensor]:
    """A function that cuts 1-D uint8 `memory` as `HostSlab.cut` cuts a slab."""
    at = 0

    def cut(numel: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal at
        start, at = at, at + aligned(numel * dtype.itemsize)
        return memory[start : start + numel * dtype.itemsize].view(dtype)

    return cut


@dataclass(eq=False)
class _Chunk:
    """Elements start .. start + numel of a layer, and the parts of its arrays in RAM that pass, by name."""

    start: int
    numel: int
    host: dict[str, torch.Tensor]
    resident: torch.Tensor | None

    @cached_property
    def layout(self) -> _Layout:
        return tuple((name, part.dtype, part.numel()) for name, part in self.host.items())


@dataclass(eq=False)
class PassingStates:
    """What of a layer passes through VRAM when the GPU steps it.

    Attributes:
        name: in a trace.
        host: its states are in RAM, and so are its weights where they are not `resident`.
        resident: 1-D working weights that are in VRAM and are stepped there.
        gradient: 1-D, in RAM; None: it is in VRAM.
        drained: the end of the newest copy into `host`'s arrays; until then nobody else reads or writes them.
    """

    name: str
    host: FlatState
    resident: torch.Tensor | None
    gradient: torch.Tensor | None
    drained: Event | None = None

    @cached_property
    def chunks(self) -> list[_Chunk]:
        """In the order in which they pass."""
        total = self.host.weights.numel()
        size = max(chunk_numel(total), 1)  # a rank may own nothing of a layer
        chunks = []
        for start in range(0, total, size):
            end = min(start + size, total)
            host = {} if self.resident is not None else {"weights": self.host.weights[start:end]}
            host |= {array.name: self.host[array.name][array.part(start, end)] for array in self.host.table.arrays}
            if self.gradient is not None:
                host["gradient"] = self.gradient[start:end]
            resident = None if self.resident is None else self.resident[start:end]
            chunks.append(_Chunk(start, end - start, host, resident))
        return chunks


@dataclass(eq=False)
class _Buffer:
    """One place in VRAM for a chunk."""

    memory: torch.Tensor
    views: dict[_Layout, dict[str, torch.Tensor]]
    free: Event | None = None
    """The memory is made, or what it held is in RAM again."""
    arrived: Event | None = None

    def parts(self, chunk: _Chunk) -> dict[str, torch.Tensor]:
        """The parts of a chunk here, one after the other."""
        if chunk.layout not in self.views:
            cut = cutter(self.memory)
            self.views[chunk.layout] = {name: cut(numel, dtype) for name, dtype, numel in chunk.layout}
        return self.views[chunk.layout]


class StateRing:
    """Buffers in VRAM, of `num_bytes` each, that chunks of states take turns in.

    It has the streams that fetch them and send them back.
    """

    fill_with_nan: ClassVar[bool] = False
    """For tests: a buffer is filled with NaN as soon as its chunk was sent back."""

    def __init__(self, device: torch.device, num_bytes: int, num_buffers: int) -> None:
        self.h2d, self.d2h = CopyStream(device, "H2D"), CopyStream(device, "D2H")
        memories = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(num_buffers)]
        made = record_compute(device)
        self._buffers = [_Buffer(memory, {}, free=made) for memory in memories]
        self._turns = cycle(self._buffers)
        self._ahead: deque[tuple[_Chunk, _Buffer]] = deque()
        self._under_way: deque[Event] = deque()
        self._stepped: Event | None = None

    def forget_ahead(self) -> None:
        """What was fetched ahead is fetched again: its step was skipped, and RAM may have been written since."""
        self._ahead.clear()

    def fetch_ahead(self, layer: PassingStates) -> None:
        """Start fetching a layer's first chunks, but for gradients, which may still be on their way to RAM; as many as
        there are buffers without a chunk. They are the next to be stepped."""
        for chunk in layer.chunks:
            if len(self._ahead) == len(self._buffers):
                return
            states = [name for name in chunk.host if name != "gradient"]
            self._ahead.append((chunk, self._fetch(layer, chunk, next(self._turns), states)))

    def step(
        self,
        layer: PassingStates,
        gradient: torch.Tensor | None,
        segments: Sequence[Segment],
        grad_scale: float,
        stream: CopyStream,
        *,
        unread: Event | None = None,
    ) -> Event:
        """Queue one optimizer step of a layer; `layer.drained` is its end.

        Args:
            gradient: 1-D, in VRAM, where it does not pass.
            stream: where the kernels run.
            unread: the weights in RAM are read until then.

        Returns:
            The end of the kernels: weights that stay in VRAM are stepped.
        """
        if unread is not None:
            self.d2h.wait(unread)  # wait: weights in RAM read before their update is copied
        drained, table = layer.drained, layer.host.table
        for chunk in layer.chunks:
            parts = _within(segments, chunk)
            if not parts:
                continue
            self._hold_back()
            buffer = self._fetched(layer, chunk)
            here = buffer.parts(chunk)
            weights = here["weights"] if chunk.resident is None else chunk.resident
            state = FlatState(table, weights, {array.name: here[array.name] for array in table.arrays})
            own = here["gradient"] if gradient is None else gradient[chunk.start : chunk.start + chunk.numel]
            assert buffer.arrived is not None
            stream.wait(buffer.arrived)
            stream.run(partial(optimizer_step, state, own, parts, grad_scale))
            self._stepped = stepped = stream.record()
            self._under_way.append(stepped)
            self.d2h.wait(stepped)
            stepped_parts = [(part, here[of]) for of, part in chunk.host.items() if of != "gradient"]
            buffer.free = drained = self.d2h.copy_all(stepped_parts, layer.name)
            if self.fill_with_nan:
                self.d2h.run(partial(buffer.memory.fill_, 255))
                buffer.free = self.d2h.record()
        layer.drained = drained
        return stream.record()

    def copy_down(self, layer: PassingStates, into: torch.Tensor, source: torch.Tensor, after: Event | None) -> None:
        """Copy from VRAM to RAM among the layer's other arrays."""
        if after is not None:
            self.d2h.wait(after)  # wait: a step before its weights are copied down
        self.d2h.copy(into, source, layer.name)
        layer.drained = self.d2h.record()

    def _fetched(self, layer: PassingStates, chunk: _Chunk) -> _Buffer:
        """The buffer that holds all of a chunk when `arrived` is reached."""
        if self._ahead and self._ahead[0][0] is chunk:
            buffer = self._ahead.popleft()[1]
            return self._fetch(layer, chunk, buffer, ["gradient"]) if "gradient" in chunk.host else buffer
        self._ahead.clear()
        return self._fetch(layer, chunk, next(self._turns), list(chunk.host))

    def _fetch(self, layer: PassingStates, chunk: _Chunk, buffer: _Buffer, names: Sequence[str]) -> _Buffer:
        for event in (
            buffer.free,
            layer.drained,  # wait: states in RAM before they are fetched
            self._stepped,  # wait: a step before the next fetch
        ):
            if event is not None:
                self.h2d.wait(event)
        here = buffer.parts(chunk)
        buffer.arrived = self.h2d.copy_all([(here[name], chunk.host[name]) for name in names], layer.name)
        return buffer

    def _hold_back(self) -> None:
        while len(self._under_way) >= MOST_UNDER_WAY:
            if self._under_way[0].done():
                self._under_way.popleft()
            else:
                time.sleep(_PAUSE)


def _within(segments: Sequence[Segment], chunk: _Chunk) -> list[Segment]:
    """The parts of `segments` that lie in a chunk, counted from its beginning."""
    found = []
    for start, length, scalars, key, offset in segments:
        first, end = max(start, chunk.start), min(start + length, chunk.start + chunk.numel)
        if first < end:
            found.append(Segment(first - chunk.start, end - first, scalars, key, offset + first - start))
    return found
