"""Working weights that live in pinned RAM and visit VRAM: a ring of reusable buffers, fetched one block ahead.

A block is fetched when something asks for it: its forward, a recomputation, or backward unpacking a weight that
autograd saved. Asking again while it is there costs nothing, so no order of hooks is relied on. Which block follows
which is remembered from the last time, for forward and for backward, and that one is fetched meanwhile. Autograd never
keeps a view of a buffer: a saved weight is packed as its place in its block, and looked up again in backward. (A
recomputation is not packed: its views live until the block's own backward is done, before which no other is used.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
from torch import nn

from offloadkit.device.streams import CopyStream, Event, Waits, record_compute
from offloadkit.errors import EngineStateError
from offloadkit.offload.layers import FlatLayer, ParameterView
from offloadkit.offload.recompute import changed_in_place
from offloadkit.offload.weights import LayerWeights, PendingUpdate


class StreamedWeights(LayerWeights):
    """The working weights of a flat layer in RAM.

    Attributes:
        host: 1-D pinned tensor, `layer.numel` elements; the parameters are views of it between steps.
        host_bytes: the same as uint8.
        copied: the end of the newest copy out of `host`, which is not written before that.
        written: the end of the newest copy into `host`, where the GPU stepped it.
    """

    def __init__(self, layer: FlatLayer, host: torch.Tensor, device: torch.device, waits: Waits) -> None:
        super().__init__(layer, device, waits)
        self.host, self.host_bytes = host, host.view(torch.uint8)
        self.copied: Event | None = None
        self.written: Event | None = None
        self.block: StreamedBlock | None = None
        self._host_views: list[torch.Tensor] = []
        self._views: dict[int, list[torch.Tensor]] = {}
        nan = torch.full((1,), torch.nan, dtype=layer.dtype, device=device)
        self._nowhere = [nan.expand(view.parameter.shape) for view in layer.views]

    def start(self, flat: torch.Tensor) -> None:
        super().start(flat)
        self._host_views = self._bound

    def rest(self) -> None:
        """Bind the parameters to RAM, for whoever reads or writes them there."""
        self.bind(self._host_views)

    def leave(self) -> None:
        """Bind the parameters to a NaN on the device while others use the buffer: reading them unasked shows. (Bound to
        RAM, a change of device, autograd would forget their accumulator, and add up the uses of a block that is used
        twice in another order.)"""
        self.bind(self._nowhere)

    def save(self, views: Sequence[ParameterView]) -> None:
        """Take what was written to parameters of `views` in VRAM to RAM; what was written in RAM is there."""
        if self._bound is self._host_views or self._bound is self._nowhere:
            return
        for view in views:
            self.host[view.start : view.start + view.numel].copy_(view.parameter.data.reshape(-1))

    def enter(self, memory: torch.Tensor) -> None:
        """Bind the parameters to `memory`, the layer's bytes in one of the ring's buffers."""
        address = memory.data_ptr()
        if address not in self._views:
            with torch.inference_mode(False):  # views made in it could not be trained with
                self._views[address] = self.tensors(memory.view(self.layer.dtype))
        self.bind(self._views[address])

    def use(self) -> None:
        assert self.block is not None
        self.block.use()

    def settle(self) -> None:
        self.wait()
        if self.written is not None:
            self.written.synchronize()
        assert self.block is not None
        self.block.ring.evict(self.block)

    def start_update(self, views: set[int]) -> PendingUpdate:
        assert self.block is not None
        self.block.ring.evict(self.block)
        pending = super().start_update(views)
        self.block.num_updates = [layer.num_updates for layer in self.block.layers]
        return pending

    def check_held(self, view: ParameterView) -> None:
        """
        Raises:
            EngineStateError: the gradient was computed after a recomputed block's buffer went to another block.
        """
        block = self.block
        if block is not None and block.recomputed and not block.ring.holds(block):
            raise EngineStateError(
                f"the gradient of {view.name!r} came after its block had left VRAM: this model's backward does not run "
                "block by block. Train it with Placement(activations='keep'), or with weights='vram'"
            )


class StreamedBlock:
    """The streamed flat layers of one repeated block (one for each dtype): they come and go together.

    Attributes:
        recomputed: whether backward may hold views of the block's buffer, made by a recomputation.
        num_updates: of each layer.
    """

    def __init__(self, layers: Sequence[StreamedWeights], ring: WeightRing) -> None:
        self.layers, self.ring = layers, ring
        self.recomputed, self.num_updates = False, [0] * len(layers)
        for layer in layers:
            layer.block = self

    def use(self) -> None:
        """Have the block in VRAM, for what the compute stream does next.

        Raises:
            EngineStateError: the module was called past the engine, so that autograd would save views of the buffer.
        """
        if torch.is_grad_enabled() and not (self.ring.in_forward or self.ring.in_backward):
            raise EngineStateError(
                "the model was called directly, with gradients, while the engine keeps its weights in RAM: "
                "call the engine, loss = engine(**batch).loss, or use torch.no_grad()"
            )
        self.recomputed = self.ring.in_backward
        self.ring.use(self)

    def wait(self) -> None:
        """Wait for the pending update."""
        for layer in self.layers:
            layer.wait()

    def ready(self) -> bool:
        """Whether the newest weights are in RAM."""
        return all(layer.pending is None or layer.pending.recorded.is_set() for layer in self.layers)


@dataclass(eq=False)
class _Buffer:
    """One place in VRAM for a block's weights."""

    memory: torch.Tensor
    start: int
    """Where it begins in the memory of all, in bytes."""
    holds: StreamedBlock | None = None
    arrived: Event | None = None
    left: Event | None = None
    """The compute stream's work when another block came into use; None while this one is, or before any was."""
    used: int = 0
    """When it was last used, counted in uses."""
    _parts: dict[StreamedBlock, list[tuple[StreamedWeights, torch.Tensor]]] = field(default_factory=dict)

    def parts(self, block: StreamedBlock) -> list[tuple[StreamedWeights, torch.Tensor]]:
        """Each layer of the block and its bytes here, one after the other."""
        if block not in self._parts:
            ends = list(accumulate((layer.host_bytes.numel() for layer in block.layers), initial=0))
            places = [self.memory[start:end] for start, end in pairwise(ends)]
            self._parts[block] = list(zip(block.layers, places, strict=True))
        return self._parts[block]


@dataclass(slots=True)
class _SavedWeight:
    """A view of a block's weights, as offset in bytes, dtype, shape and strides, and the updates that they had seen."""

    block: StreamedBlock
    num_updates: list[int]
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


class WeightRing:
    """Reusable buffers in VRAM that streamed blocks take turns in."""

    fill_with_nan: ClassVar[bool] = False
    """For tests: a block leaves, and its buffer is filled with NaN, as soon as another one is used."""

    def __init__(self, layers: Sequence[StreamedWeights], device: torch.device, num_buffers: int, waits: Waits) -> None:
        self.device, self._waits = device, waits
        self.in_forward = self.in_backward = False
        by_block: dict[nn.Module | None, list[StreamedWeights]] = {}
        for layer in layers:
            by_block.setdefault(layer.layer.block, []).append(layer)
        self._blocks = [StreamedBlock(group, self) for group in by_block.values()]
        size = max(sum(layer.host_bytes.numel() for layer in block.layers) for block in self._blocks)
        self._memory = torch.zeros(num_buffers * size, dtype=torch.uint8, device=device)
        self._address, self._num_bytes, self._size = self._memory.data_ptr(), num_buffers * size, size
        self._as_dtype: dict[torch.dtype, torch.Tensor] = {}
        starts = range(0, num_buffers * size, size)
        self._buffers = [_Buffer(self._memory[start : start + size], start) for start in starts]
        self.h2d = CopyStream(device, "H2D")
        self._current: _Buffer | None = None
        self._follows: dict[tuple[bool, StreamedBlock], StreamedBlock] = {}
        self._num_uses = 0

    def use(self, block: StreamedBlock) -> None:
        """Bring `block` here if need be, bind its parameters, and fetch the block that came next the last time."""
        current = self._current
        if current is not None and current.holds is block:
            return
        block.wait()
        if current is not None:
            self._leave(current, block)
        buffer = self._of(block) or self._fetch(block)
        assert buffer.arrived is not None
        self._waits.delay(buffer.arrived)
        self._num_uses += 1
        buffer.used, buffer.left, self._current = self._num_uses, None, buffer
        for layer, memory in buffer.parts(block):
            layer.enter(memory)
        following = self._follows.get((self.in_backward, block))
        if following is not None and following.ready() and not self.holds(following):
            self._fetch(following)

    def holds(self, block: StreamedBlock) -> bool:
        """Whether the block is in VRAM."""
        current = self._current
        return (current is not None and current.holds is block) or self._of(block) is not None

    def evict(self, block: StreamedBlock) -> None:
        """Send the block back: its parameters are views of RAM again, its buffer may be taken."""
        buffer = self._of(block)
        if buffer is not None:
            if buffer is self._current:
                buffer.left, self._current = record_compute(self.device), None
            buffer.holds = None
        for layer in block.layers:
            layer.rest()

    @contextmanager
    def saved_tensors(self) -> Iterator[None]:
        """While it is open, autograd saves no weight that is here, but where to find it again."""
        before, self.in_forward = self.in_forward, True
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self.in_forward = before

    def synchronize(self) -> None:
        """Block the calling thread until the copies asked for are done: their memory may go."""
        self.h2d.synchronize()

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int] | _SavedWeight:
        offset = tensor.data_ptr() - self._address
        if 0 <= offset < self._num_bytes and tensor.device == self.device:
            index, offset = divmod(offset, self._size)
            block = self._buffers[index].holds
            if block is not None:
                return _SavedWeight(block, block.num_updates, offset, tensor.dtype, tensor.shape, tensor.stride())
        # an operation's output would hold itself through what its node saved, and stay if backward never comes
        return tensor.detach() if tensor.requires_grad else tensor, tensor._version

    def _unpack(self, saved: tuple[torch.Tensor, int] | _SavedWeight) -> torch.Tensor:
        """
        Raises:
            ModelError, EngineStateError: what was saved is not there any more. (Autograd checks this itself, but not
                for what passes through hooks.)
        """
        if type(saved) is tuple:
            tensor, version = saved
            if tensor._version != version:
                raise changed_in_place(tensor)
            return tensor
        assert isinstance(saved, _SavedWeight)
        if saved.num_updates != saved.block.num_updates:
            for layer, num_updates in zip(saved.block.layers, saved.num_updates, strict=True):
                layer.check_seen(num_updates)
        self.use(saved.block)
        assert self._current is not None
        if saved.dtype not in self._as_dtype:
            self._as_dtype[saved.dtype] = self._memory.view(saved.dtype)
        start = (self._current.start + saved.offset) // saved.dtype.itemsize
        return self._as_dtype[saved.dtype].as_strided(saved.shape, saved.stride, start)

    def _leave(self, buffer: _Buffer, successor: StreamedBlock) -> None:
        assert buffer.holds is not None
        self._follows[self.in_backward, buffer.holds] = successor
        if self.fill_with_nan:
            self._clear(buffer)
            buffer.memory.view(torch.float32).fill_(torch.nan)
        buffer.left = record_compute(self.device)

    def _fetch(self, block: StreamedBlock) -> _Buffer:
        """Copy a block into the buffer that was used the longest ago; an empty one first."""
        free = [buffer for buffer in self._buffers if buffer is not self._current or buffer.left is not None]
        buffer = min(free, key=lambda buffer: (buffer.holds is not None, buffer.used))
        self._clear(buffer)
        if buffer.left is not None:
            self.h2d.wait(buffer.left)
        for layer, memory in buffer.parts(block):
            if layer.written is not None:
                self.h2d.wait(layer.written)
            timed = self.in_forward or self.in_backward
            buffer.arrived = self.h2d.copy_all([(memory, layer.host_bytes)], layer.layer.name, timed=timed)
        buffer.holds = block
        for layer in block.layers:
            layer.copied = buffer.arrived
        return buffer

    def _clear(self, buffer: _Buffer) -> None:
        if buffer.holds is not None:
            for layer in buffer.holds.layers:
                layer.leave()
            buffer.holds = None

    def _of(self, block: StreamedBlock) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.holds is block), None)
