"""Steps on the GPU of optimizer states in RAM: the states pass in chunks through a few VRAM buffers.

A chunk is fetched on one stream, stepped on a second and sent back on a third, so that both directions of the bus and
the GPU work at once. Only events order the operations, so a whole step may be queued at once:

| | starts after |
|---|---|
| H2D of a chunk | D2H of the buffer's last chunk, and of the same chunk in the last step; the preceding chunk's step |
| its step | its H2D; for weights in VRAM also the compute stream's reads of them |
| D2H | its step; copies out of the same weights in RAM |

Between two H2Ds the bus is free for a kernel's time, so that weights that forward waits for get through on other
streams. A stream whose next copy can always start at once keeps its copy engine until its queue is empty: on an H200, a
layer's weights that were ready 20 ms into an update then arrived at its end, after 260 ms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import cycle, pairwise
from typing import ClassVar

import torch

from offloadkit.device.streams import CopyStream, Event, hold_back, record_compute
from offloadkit.kernels.dispatch import optimizer_step
from offloadkit.offload.matrix_steps import MatrixSteps
from offloadkit.optim.table import FlatState, Segment, aligned
from offloadkit.planner import chunk_numel

MOST_UNDER_WAY = 32
"""Maximum number of chunks queued but not stepped: if a stream's queue is full (about a thousand operations), the next
thread that queues an operation blocks, on any stream.
"""

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
    """Elements start .. start + numel of a layer, and the parts of its arrays in RAM to pass, by name."""

    start: int
    numel: int
    host: dict[str, torch.Tensor]
    resident: torch.Tensor | None
    states: dict[_Buffer, FlatState] = field(default_factory=dict)
    """The chunk's arrays in each buffer that it has been in."""

    @cached_property
    def layout(self) -> _Layout:
        return tuple((name, part.dtype, part.numel()) for name, part in self.host.items())


@dataclass(eq=False)
class StreamedStates:
    """The arrays of a layer that pass through VRAM when the GPU steps it.

    Attributes:
        name: label in a trace.
        host: the states in RAM, and the weights in RAM if they are not `resident`.
        resident: 1-D working weights that live in VRAM.
        gradient: 1-D, in RAM; None if it is in VRAM.
        cuts: the starts of the chunks, if the layer's matrices pass one by one; None: chunks of equal size.
        drained: the end of the newest copy into `host`'s arrays, which must not be accessed earlier.
    """

    name: str
    host: FlatState
    resident: torch.Tensor | None
    gradient: torch.Tensor | None
    cuts: Sequence[int] | None = None
    drained: Event | None = None

    @cached_property
    def chunks(self) -> list[_Chunk]:
        """The layer's chunks, in passing order."""
        total = self.host.weights.numel()
        size = max(chunk_numel(total), 1)  # a rank may own no part of a layer
        starts = range(0, total, size) if self.cuts is None else self.cuts
        chunks = []
        for start, end in pairwise([*starts, total]):
            host = {} if self.resident is not None else {"weights": self.host.weights[start:end]}
            host |= {array.name: self.host[array.name][array.part(start, end)] for array in self.host.table.arrays}
            if self.gradient is not None:
                host["gradient"] = self.gradient[start:end]
            resident = None if self.resident is None else self.resident[start:end]
            chunks.append(_Chunk(start, end - start, host, resident))
        return chunks


@dataclass(eq=False)
class _Buffer:
    memory: torch.Tensor
    views: dict[_Layout, dict[str, torch.Tensor]]
    free: Event | None = None
    """The buffer is allocated, or its last chunk is back in RAM."""
    arrived: Event | None = None

    def parts(self, chunk: _Chunk) -> dict[str, torch.Tensor]:
        """The chunk's arrays in this buffer, one after the other."""
        if chunk.layout not in self.views:
            cut = cutter(self.memory)
            self.views[chunk.layout] = {name: cut(numel, dtype) for name, dtype, numel in chunk.layout}
        return self.views[chunk.layout]


@dataclass(eq=False)
class Loaded:
    """A chunk in a VRAM buffer."""

    state: FlatState
    gradient: torch.Tensor
    """1-D, in VRAM."""
    chunk: _Chunk
    buffer: _Buffer


class StateRing:
    """VRAM buffers of `num_bytes` each, which chunks of states use in turn, and the streams that copy the chunks.

    Attributes:
        ahead: chunks fetched before their step, each with its buffer.
        under_way: the ends of the queued steps.
    """

    fill_with_nan: ClassVar[bool] = False
    """For tests: fill a buffer with NaN as soon as its chunk was sent back."""

    def __init__(self, device: torch.device, num_bytes: int, num_buffers: int) -> None:
        self.h2d, self.d2h = CopyStream(device, "H2D"), CopyStream(device, "D2H")
        memories = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(num_buffers)]
        made = record_compute(device)
        self.buffers = [_Buffer(memory, {}, free=made) for memory in memories]
        self._turns = cycle(self.buffers)
        self.ahead: deque[tuple[_Chunk, _Buffer]] = deque()
        self.under_way: deque[Event] = deque()
        self._stepped: Event | None = None
        self._waited_for: Event | None = None

    def forget_ahead(self) -> None:
        """Discard prefetched chunks, because their step was skipped and RAM may have been written since."""
        self.ahead.clear()

    def fetch_ahead(self, layer: StreamedStates) -> None:
        """Prefetch the first chunks of the layer to be stepped next, as many as buffers are available, without
        gradients, which may not have arrived in RAM yet.
        """
        for chunk in layer.chunks:
            if len(self.ahead) == len(self.buffers):
                return
            states = [name for name in chunk.host if name != "gradient"]
            self.ahead.append((chunk, self._fetch(layer, chunk, next(self._turns), states)))

    def step(
        self,
        layer: StreamedStates,
        gradient: torch.Tensor | None,
        segments: Sequence[Segment],
        grad_scale: float,
        stream: CopyStream,
        *,
        unread: Event | None = None,
        matrix_steps: MatrixSteps | None = None,
        passed: Callable[[int], None] | None = None,
    ) -> Event:
        """Queue one optimizer step of a layer; it ends with `layer.drained`.

        Args:
            gradient: 1-D, in VRAM; None if the gradient passes from RAM.
            stream: the kernels' stream.
            unread: event after which the weights in RAM are no longer read.
            matrix_steps: steps the layer if its step unit is a matrix.
            passed: called with the length of each chunk whose step and copies are queued. It may queue steps of layers
                that do not pass through the ring.

        Returns:
            The end of the kernels, when weights in VRAM are up to date.
        """
        if unread is not None:
            self.d2h.wait(unread)  # wait: weights in RAM read before their update is copied
        drained, ended = layer.drained, None
        for chunk in layer.chunks:
            parts = _within(segments, chunk)
            if not parts:
                continue
            loaded = self._load(layer, chunk, gradient, stream)
            if matrix_steps is not None:
                matrix_steps.step(loaded.state, loaded.gradient, parts, grad_scale, stream)
            else:
                stream.run(partial(optimizer_step, loaded.state, loaded.gradient, parts, grad_scale))
            drained, ended = self._store(layer, loaded, stream), self._stepped
            if passed is not None:
                passed(chunk.numel)
        layer.drained = drained
        return ended or stream.record()

    def load(self, layer: StreamedStates, gradient: torch.Tensor | None, stream: CopyStream) -> Loaded:
        """Fetch a layer of one chunk for work on `stream`; `store` follows. At most two layers may be loaded at a time.

        gradient: as for `step`.
        """
        (chunk,) = layer.chunks
        return self._load(layer, chunk, gradient, stream)

    def store(self, layer: StreamedStates, loaded: Loaded, stream: CopyStream) -> Event:
        """Send the states back after the work on `stream`. Returns the end of that work. The weights in RAM must not be
        read any more.
        """
        layer.drained = self._store(layer, loaded, stream)
        return stream.record()

    def _load(self, layer: StreamedStates, chunk: _Chunk, gradient: torch.Tensor | None, stream: CopyStream) -> Loaded:
        hold_back(self.under_way, MOST_UNDER_WAY)
        buffer, table = self._fetched(layer, chunk), layer.host.table
        here = buffer.parts(chunk)
        if buffer not in chunk.states:
            weights = here["weights"] if chunk.resident is None else chunk.resident
            chunk.states[buffer] = FlatState(table, weights, {array.name: here[array.name] for array in table.arrays})
        state = chunk.states[buffer]
        own = here["gradient"] if gradient is None else gradient[chunk.start : chunk.start + chunk.numel]
        assert buffer.arrived is not None
        stream.wait(buffer.arrived)
        return Loaded(state, own, chunk, buffer)

    def _store(self, layer: StreamedStates, loaded: Loaded, stream: CopyStream) -> Event:
        chunk, buffer = loaded.chunk, loaded.buffer
        self._stepped = stepped = stream.record()
        self.under_way.append(stepped)
        self.d2h.wait(stepped)
        here = buffer.parts(chunk)
        stepped_parts = [(part, here[of]) for of, part in chunk.host.items() if of != "gradient"]
        buffer.free = drained = self.d2h.copy_all(stepped_parts, layer.name)
        if self.fill_with_nan:
            self.d2h.run(partial(buffer.memory.fill_, 255))
            buffer.free = self.d2h.record()
        return drained

    def copy_down(self, layer: StreamedStates, into: torch.Tensor, source: torch.Tensor, after: Event | None) -> None:
        """Copy `source` in VRAM to `into`, which is in RAM; `layer.drained` covers the copy."""
        if after is not None:
            self.d2h.wait(after)  # wait: a step before its weights are copied down
        self.d2h.copy(into, source, layer.name)
        layer.drained = self.d2h.record()

    def _fetched(self, layer: StreamedStates, chunk: _Chunk) -> _Buffer:
        """The buffer that holds the whole chunk after `arrived`."""
        if self.ahead and self.ahead[0][0] is chunk:
            buffer = self.ahead.popleft()[1]
            return self._fetch(layer, chunk, buffer, ["gradient"]) if "gradient" in chunk.host else buffer
        self.ahead.clear()
        return self._fetch(layer, chunk, next(self._turns), list(chunk.host))

    def _fetch(self, layer: StreamedStates, chunk: _Chunk, buffer: _Buffer, names: Sequence[str]) -> _Buffer:
        drained = None if layer.drained is self._waited_for else layer.drained  # all chunks of a layer have one
        for event in (
            buffer.free,
            drained,  # wait: states in RAM before they are fetched
            self._stepped,  # wait: a step before the next fetch
        ):
            if event is not None:
                self.h2d.wait(event)
        self._waited_for = layer.drained
        here = buffer.parts(chunk)
        buffer.arrived = self.h2d.copy_all([(here[name], chunk.host[name]) for name in names], layer.name)
        return buffer


def _within(segments: Sequence[Segment], chunk: _Chunk) -> list[Segment]:
    found = []
    for start, length, scalars, key, offset, matrix in segments:
        first, end = max(start, chunk.start), min(start + length, chunk.start + chunk.numel)
        if first < end:
            found.append(Segment(first - chunk.start, end - first, scalars, key, offset + first - start, matrix))
    return found
