"""Streamed weights: they live in pinned RAM and are copied into a ring of VRAM buffers, one block ahead.

A block is fetched when it is used: by its forward, by a recomputation, or when backward unpacks a saved weight. Using a
block that is in VRAM is free, so the order of hooks does not matter. The ring prefetches the block that followed last
time. `torch.utils.checkpoint` may run parts of a block without its hooks, so in backward, parameters of unused blocks
are guarded (`external_writes.Guarded`).

The ranks of a host share the RAM, and each rank fetches from it independently. A fetch waits until all ranks have
stepped the layer. No rank steps too early, because every rank finishes its fetches before the norm all-reduce. Writes
between steps go to a private copy (copy-on-write) and must be equal on all ranks; `step()` publishes the range that
each rank owns.

A graph of a block reads a copy of its weights. Then the parameters are not bound to the buffer until other code reads
them: between blocks they are watched, and in backward guarded. After a step, parameters that are bound to no memory are
bound to RAM when other code reads them.

Autograd never keeps a view of a buffer: a saved weight is packed as its position in the block. Tensors of a
recomputation are not packed: their views live until the block's backward is done. If the buffer goes to another block
before that, as when several blocks are recomputed as one, the next gradient raises an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.utils import dlpack

from offloadkit.device.host_memory import SharedSlab
from offloadkit.device.streams import CopyStream, Event, Waits, record_compute
from offloadkit.distributed.stepped import Stepped
from offloadkit.errors import EngineStateError
from offloadkit.offload.external_writes import ExternalWrites, read, set_data, unwatched
from offloadkit.offload.layers import FlatLayer, ParameterView
from offloadkit.offload.recompute import changed_in_place
from offloadkit.offload.weights import LayerWeights, PendingUpdate


class SharedRam(NamedTuple):
    """RAM of one layer's weights, shared by the ranks of a host."""

    slab: SharedSlab
    stepped: Stepped


class _Place(NamedTuple):
    """A layer's part of a ring buffer, the parameters' views of it, and their addresses."""

    flat: torch.Tensor
    views: list[torch.Tensor]
    addresses: list[int]


class StreamedWeights(LayerWeights):
    """The working weights of a flat layer in RAM.

    Attributes:
        flat_bytes: `flat` (pinned) as uint8. Between steps the parameters are views of this memory when they are read.
        block: the layers that are fetched and evicted with this one, set by `StreamedBlock`.
        copied: the end of the newest copy out of `flat`; `flat` must not be written earlier.
        written: the end of the newest copy into `flat`, if the GPU steps the layer.
        shared: RAM shared by several ranks, or None at world size 1.
    """

    is_streamed = True

    def __init__(
        self,
        layer: FlatLayer,
        flat: torch.Tensor,
        device: torch.device,
        waits: Waits,
        shared: SharedRam | None = None,
    ) -> None:
        super().__init__(layer, flat, device, waits)
        self.shared = shared
        self.flat_bytes = flat.view(torch.uint8)
        self.copied: Event | None = None
        self.written: Event | None = None
        self.block: StreamedBlock
        self._places: dict[int, _Place] = {}
        """By address."""
        self._lent = flat
        self._rests = False
        """The parameters are unbound in place of bound to RAM, and no code has read them since."""
        self._bound_versions: list[int] = []
        self._read_outside: set[ParameterView] = set()
        nan = torch.full((), torch.nan, dtype=layer.dtype, device=device)
        self._unbound = [nan.expand(view.parameter.shape) for view in layer.views]

    def retire(self) -> None:
        super().retire()
        self.flat_bytes = torch.empty(0)
        self.forget_views()

    def forget_views(self) -> None:
        """Drop the views of buffers that are freed."""
        self._places.clear()
        self._lent = self.flat_bytes

    def leave_ring(self) -> None:
        self.forget_views()
        self.copied = self.written = None

    def bind(self, tensors: list[torch.Tensor]) -> None:
        super().bind(tensors)
        self._rests = False

    def bind_to_ram(self) -> None:
        """Bind the parameters to RAM, for reads and writes from outside."""
        if self.bound is not self._home:
            self.bind(self._home)

    def rest(self) -> None:
        """Bind the parameters to RAM. Those that are unbound stay so until other code reads them: the next graph would
        unbind them again, and each takes 2 µs.
        """
        self._rests = self.bound is self._unbound
        if not self._rests:
            self.bind_to_ram()

    def described(self, view: ParameterView) -> torch.Tensor:
        return self.home(view) if self._rests else view.parameter

    def unbind(self) -> None:
        """Bind the parameters to a NaN on the device, while another block uses the buffer, or a graph the block.

        A read that bypasses the ring then shows. The parameters are not bound to RAM, because that is another device:
        autograd would make new gradient accumulators, and add gradients of a block used twice in another order.
        """
        if self.bound is not self._unbound:
            self.bind(self._unbound)

    @property
    def _is_bound_to_vram(self) -> bool:
        return self.bound is not self._home and self.bound is not self._unbound

    def leaves_vram(self) -> None:
        """Save weights that the model itself wrote in VRAM, as layers with a max-norm do."""
        if self._is_bound_to_vram and self._present_versions() != self._bound_versions:
            self.save(self.layer.views)

    def save(self, views: Sequence[ParameterView]) -> None:
        """Copy the parameters of `views`, written in VRAM, to RAM. Does nothing if the parameters are bound to RAM."""
        if not self._is_bound_to_vram:
            return
        self.begin_write()
        with unwatched():
            for view in views:
                self.flat[view.elements].copy_(view.parameter.data.reshape(-1))
        # So that `leaves_vram` does not write again, possibly after another rank has begun to step.
        self._bound_versions = self._present_versions()

    def bind_to_vram(self, memory: torch.Tensor) -> None:
        """Bind the parameters to `memory`: uint8, the layer's part of a ring buffer."""
        views = self._place(memory).views
        if self.bound is not views:
            self.bind(views)
            self._bound_versions = self._present_versions()

    def lend(self, memory: torch.Tensor) -> None:
        """Let `copy_to` read `memory`: uint8, the layer's part of a ring buffer. The parameters are not bound to it,
        but leave RAM, because autograd expects their gradients on their device.
        """
        self._lent, self._rests = self._place(memory).flat, False
        if self.bound is self._home:
            self.unbind()

    def _place(self, memory: torch.Tensor) -> _Place:
        address = memory.data_ptr()
        if address not in self._places:
            with torch.inference_mode(False):  # autograd refuses tensors made in inference mode
                flat = memory.view(self.layer.dtype)
                views = self.tensors(flat)
            self._places[address] = _Place(flat, views, list(map(torch.Tensor.data_ptr, views)))
        return self._places[address]

    def copy_to(self, flat: torch.Tensor) -> None:
        if self.bound is self._unbound and self.block.lent and self.block.ring.computes_with(self.block):
            flat.copy_(self._lent)
            return
        addresses = list(map(torch.Tensor.data_ptr, self.parameters))
        place = self._places.get(addresses[0])
        if place is not None and addresses == place.addresses:
            flat.copy_(place.flat)
        else:  # code of the model has exchanged `.data`
            super().copy_to(flat)

    def for_graph(self, view: ParameterView) -> torch.Tensor:
        if self.bound is not self._home:
            return view.parameter  # the block is running, and the ring packs the tensors that autograd saves
        with torch.no_grad():
            value = view.parameter.detach()  # shares the version counter, so backward raises after a step in between
            if value.device != self.device:
                value = value.to(self.device)
                self.unbind()  # so that autograd puts the gradient on the device
        use: torch.Tensor = read(view.parameter, value)
        self._read_outside.add(view)
        self.used_outside = True
        self.bind_to_ram()
        return use

    def is_viewed(self) -> bool:
        """Whether other tensors share the VRAM that the parameters are bound to."""
        if not self._is_bound_to_vram:
            return False
        counts = [torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) for tensor in self.bound]
        return max(counts) > _own_users()

    def use(self, *, by_copy: bool = False) -> None:
        self.block.use(by_copy=by_copy)

    def _wait_for_ranks(self) -> None:
        if not self.is_stepped_by_others():
            assert self.shared is not None
            with self._waits.blocking():
                self.shared.stepped.wait()  # wait: other ranks' steps

    def is_stepped_by_others(self) -> bool:
        """Whether other ranks have stepped their parts too, after this rank has stepped or skipped the layer."""
        return self.shared is None or self.shared.stepped.reached()

    def finish_reading(self) -> None:
        """Several ranks: wait for copies out of `flat`, before other ranks write it."""
        if self.shared is not None and self.copied is not None:
            self.copied.synchronize()  # wait: copies before other ranks step

    @property
    def has_private_copy(self) -> bool:
        """Whether this rank has a private copy, written since the last boundary."""
        return self.shared is not None and self.shared.slab.is_private

    def begin_write(self) -> None:
        if self.shared is not None and not self.has_private_copy:
            if self.copied is not None:
                self.copied.synchronize()  # wait: copies before weights are written
            self.shared.slab.part()

    def publish(self) -> None:
        """Copy this rank's range of the private copy to the shared RAM, after all ranks have reached the boundary."""
        if self.has_private_copy:
            assert self.shared is not None
            self.shared.slab.publish(self.own)

    def rejoin(self) -> None:
        """Drop the private copy, after all ranks have published their ranges."""
        if self.has_private_copy:
            assert self.shared is not None
            self.shared.slab.rejoin()

    def settle(self) -> None:
        self.wait()  # wait: an update before streamed weights are read
        if self.written is not None:
            self.written.synchronize()  # wait: weights in RAM before they are read
        self.block.ring.evict(self.block)

    def open(self) -> None:
        """Raises `EngineStateError` if forward or backward runs, and another block's weights are in VRAM."""
        ring = self.block.ring
        if not (ring.in_forward or ring.in_backward):
            self.settle()
        elif not ring.computes_with(self.block):
            raise EngineStateError(
                f"a weight of {self.layer.name!r} was used outside its block's forward, while the engine keeps it in "
                "RAM: call the block, read the weight before or after the step, or train with Placement(weights='vram')"
            )
        else:
            ring.use(self.block)  # it may have run as a graph

    def changed(self) -> None:
        super().changed()
        self.block.num_updates = [layer.num_updates for layer in self.block.layers]

    def start_update(self, views: set[int]) -> PendingUpdate:
        self.block.ring.evict(self.block, to_read=False)
        self._read_outside.clear()
        return super().start_update(views)

    def check_held(self, view: ParameterView) -> None:
        """Raise `EngineStateError` if the block was recomputed, and its buffer went to another block before this
        gradient.
        """
        block = self.block
        if not block.recomputed:
            return
        held = view in self._read_outside or block.ring.holds(block)  # autograd waits for all uses of a parameter
        if block.lost or not held:
            raise _left_too_early(f"the gradient of {view.name!r}")


def _left_too_early(what: str) -> EngineStateError:
    return EngineStateError(
        f"{what} came after its block had left VRAM: this model's backward does not run block by block. If the model "
        "itself recomputes several blocks as one (torch.utils.checkpoint), let it recompute each block by itself, or "
        "none: Placement(activations='checkpoint') does it. Otherwise train it with Placement(activations='keep'), or "
        "with weights='vram'"
    )


@cache
def _own_users() -> int:
    """Storage use count of a bound parameter without other views: the parameter, its tensor and base, this query."""
    exchange: Any = dlpack  # as in `LayerWeights.tensors`
    with torch.inference_mode(False):
        tensor = exchange.from_dlpack(exchange.to_dlpack(torch.zeros(1))).view(1)
        parameter = nn.Parameter(torch.zeros(0))
    set_data(parameter, tensor)
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


class StreamedBlock:
    """The streamed flat layers of one repeated block, one per dtype. They are fetched and evicted together.

    Attributes:
        recomputed: a recomputation in this backward may still hold views of the block's buffer.
        lost: the buffer went to another block while such views existed.
        guarded: touching a parameter of the block uses the block.
        lent: the last use was by copy, so the parameters are not bound to the buffer.
        buffer: holds the block, or None.
        num_updates: number of updates of each layer.
    """

    def __init__(self, layers: Sequence[StreamedWeights], ring: WeightRing) -> None:
        self.layers: Sequence[StreamedWeights] = layers
        self.ring = ring
        self.recomputed = self.lost = self.guarded = self.lent = False
        self.buffer: _Buffer | None = None
        self.num_updates = [0] * len(layers)
        for layer in layers:
            layer.block = self

    def use(self, *, by_copy: bool = False) -> None:
        """Have the block in VRAM for the compute stream. `by_copy`: as for `LayerWeights.use`.

        Raises:
            EngineStateError: the model was not called through the engine, so autograd would save views of the buffer.
        """
        if torch.is_grad_enabled() and not (self.ring.in_forward or self.ring.in_backward):
            if torch._C._current_graph_task_id() != -1:
                raise EngineStateError(
                    "a backward other than the engine's (torch.autograd.grad, loss.backward) reached recomputed blocks "
                    "whose weights are in RAM, which it cannot pass. Call engine.backward(loss), which also fills an "
                    'input\'s .grad; or keep weights in VRAM: OffloadConfig(placement=Placement(weights="vram"))'
                )
            raise EngineStateError(
                "the model was called directly, with gradients, while the engine keeps its weights in RAM: "
                "call the engine, loss = engine(**batch).loss, or use torch.no_grad()"
            )
        if not by_copy:
            self.recomputed = self.ring.in_backward
        self.ring.use(self, by_copy=by_copy)

    def is_viewed(self) -> bool:
        return self.recomputed and any(layer.is_viewed() for layer in self.layers)

    def check_kept(self) -> None:
        """Called at the end of backward.

        Raises:
            EngineStateError: its buffer went to another block while a recomputation had views of frozen weights.
        """
        if self.lost and not all(layer.layer.kind.is_trained for layer in self.layers):
            raise _left_too_early(f"a gradient in the backward of {self.layers[0].layer.name!r}")

    def ready(self) -> bool:
        """Whether the newest weights are in RAM."""
        for layer in self.layers:
            pending = layer.pending
            if pending is not None and not (pending.recorded.is_set() and layer.is_stepped_by_others()):
                return False
        return True


@dataclass(eq=False)
class _Buffer:
    memory: torch.Tensor
    start: int
    """Offset in bytes in the ring's memory."""
    block: StreamedBlock | None = None
    arrived: Event | None = None
    released: Event | None = None
    """The end of the compute stream's work with the buffer; None while in use. Initially the end of its allocation."""
    reads_on: bool = False
    """The compute stream may still read the buffer after `released`."""
    last_use: int = 0
    _parts: dict[StreamedBlock, list[tuple[StreamedWeights, torch.Tensor]]] = field(default_factory=dict)

    def parts(self, block: StreamedBlock) -> list[tuple[StreamedWeights, torch.Tensor]]:
        """The block's layers with their consecutive parts of this buffer, uint8."""
        if block not in self._parts:
            ends = list(accumulate((layer.flat_bytes.numel() for layer in block.layers), initial=0))
            places = [self.memory[start:end] for start, end in pairwise(ends)]
            self._parts[block] = list(zip(block.layers, places, strict=True))
        return self._parts[block]


@dataclass(slots=True)
class _SavedWeight:
    """A view of a block's weights that autograd saved: offset in bytes, dtype, shape and strides.

    Attributes:
        num_updates: the block's `num_updates` when the view was saved.
    """

    block: StreamedBlock
    num_updates: list[int]
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


class WeightRing:
    """Reusable VRAM buffers of the size of the largest streamed block."""

    fill_with_nan: ClassVar[bool] = False
    """For tests: empty a buffer and fill it with NaN as soon as another block is used."""

    def __init__(
        self,
        layers: Sequence[StreamedWeights],
        device: torch.device,
        num_buffers: int,
        waits: Waits,
        external_writes: ExternalWrites,
    ) -> None:
        self.device, self._waits, self._external_writes = device, waits, external_writes
        self.in_forward = self.in_backward = False
        by_block: dict[nn.Module | None, list[StreamedWeights]] = {}
        for layer in layers:
            by_block.setdefault(layer.layer.block, []).append(layer)
        self._blocks = [StreamedBlock(group, self) for group in by_block.values()]
        size = max(sum(layer.flat_bytes.numel() for layer in block.layers) for block in self._blocks)
        self._memory = torch.zeros(num_buffers * size, dtype=torch.uint8, device=device)
        self._address, self._num_bytes, self._size = self._memory.data_ptr(), num_buffers * size, size
        self._as_dtype: dict[torch.dtype, torch.Tensor] = {}
        starts = range(0, num_buffers * size, size)
        made = record_compute(device)
        self._buffers = [_Buffer(self._memory[start : start + size], start, released=made) for start in starts]
        self.h2d = CopyStream(device, "H2D")
        self._current: _Buffer | None = None
        self._own: dict[StreamedBlock, _Buffer] = {}
        """Buffers outside the ring's memory, of blocks that stay in VRAM for a while (`resident`)."""
        self._successor: dict[tuple[bool, StreamedBlock], StreamedBlock] = {}
        self._num_uses = 0

    def use(self, block: StreamedBlock, *, by_copy: bool = False) -> None:
        """Have `block` in VRAM, bind its parameters, and prefetch the block that followed it last time.

        by_copy: a graph reads a copy. The parameters are not bound, and in backward stay guarded. In a backward other
        than the engine's they are bound, because neither a guard nor `external_writes` may see reads by hooks.
        """
        by_copy &= self.in_forward or self.in_backward
        current = self._current
        if current is not None and current.block is block:
            if (block.lent or block.guarded) and not by_copy:
                self._bind(block)
            return
        if block in self._own and block.buffer is not None:
            self._bind(block)
            return
        for layer in block.layers:
            layer.wait()
        left = None if current is None else self._release(current, block)
        buffer = block.buffer or self.fetch(block)
        assert buffer.arrived is not None
        self._waits.delay(buffer.arrived, began=left)
        self._num_uses += 1
        buffer.last_use, buffer.released, buffer.reads_on, self._current = self._num_uses, None, False, buffer
        block.lent = by_copy
        if by_copy:
            for layer, memory in buffer.parts(block):
                layer.lend(memory)
        else:
            self._bind(block)
        following = self._successor.get((self.in_backward, block))
        if following is not None and following.buffer is None and following.ready():
            self.fetch(following)

    def _bind(self, block: StreamedBlock) -> None:
        if block.guarded:
            self._release_guarded(block)
        assert block.buffer is not None
        block.lent = False
        for layer, memory in block.buffer.parts(block):
            layer.bind_to_vram(memory)

    def computes_with(self, block: StreamedBlock) -> bool:
        """Whether the block is the last one used."""
        return self._current is not None and self._current.block is block

    def holds(self, block: StreamedBlock) -> bool:
        return block.buffer is not None

    def evict(self, block: StreamedBlock, *, to_read: bool = True) -> None:
        """Bind the block's parameters to RAM, and free its buffer. `to_read`: other code reads them now."""
        buffer = block.buffer
        if buffer is not None:
            if buffer is self._current:
                buffer.released, self._current = record_compute(self.device), None
            elif block in self._own:
                buffer.released = record_compute(self.device)
            for layer in block.layers:
                layer.leaves_vram()
            buffer.block = block.buffer = None
        for layer in block.layers:
            if to_read:
                layer.bind_to_ram()
            else:
                layer.rest()

    @contextmanager
    def resident(self, blocks: Collection[nn.Module]) -> Iterator[None]:
        """While open, each of `blocks` has a VRAM buffer of its own, so that no block of them is copied again. Other
        blocks visit the ring. Updates must be done, and none may begin; no graph may be built.

        Raises:
            torch.OutOfMemoryError: the GPU is full. Nothing has changed.
        """
        chosen = [block for block in self._blocks if block.layers[0].layer.block in blocks]
        for block in chosen:
            self.evict(block)
        kept = list(self._buffers)
        try:
            for block in chosen:
                size = sum(layer.flat_bytes.numel() for layer in block.layers)
                with torch.inference_mode(False):
                    memory = torch.empty(size, dtype=torch.uint8, device=self.device)
                self._own[block] = _Buffer(memory, 0, released=record_compute(self.device))
                self._buffers.append(self._own[block])
                self.fetch(block)
            self.synchronize()  # wait: seconds of a move into VRAM
            yield
        finally:
            for block in chosen:
                self.evict(block)
            self.synchronize()  # wait: fetches before a block's own memory is freed
            self._buffers = kept
            self._own.clear()
            for block in chosen:
                for layer in block.layers:
                    layer.forget_views()

    @contextmanager
    def saved_tensors(self) -> Iterator[None]:
        """While open, autograd saves a weight's position in the ring instead of the weight."""
        before, self.in_forward = self.in_forward, True
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self.in_forward = before

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context for backward, while `external_writes` watches no parameter.

        Raises:
            EngineStateError: a recomputed block without trained weights lost its buffer, so that gradients of others
                may be wrong. (`check_held` sees blocks with trained weights.)
        """
        for block in self._blocks:
            block.recomputed = block.lost = False
            self._guard(block)
        self.in_backward = True
        try:
            yield
            for block in self._blocks:
                block.check_kept()
        finally:
            self.in_backward = False
            for block in self._blocks:
                self._release_guarded(block)

    def _guard(self, block: StreamedBlock) -> None:
        block.guarded = True
        for layer in block.layers:
            self._external_writes.guard(layer.layer)

    def _release_guarded(self, block: StreamedBlock) -> None:
        block.guarded = False
        for layer in block.layers:
            self._external_writes.release(layer.layer)

    def synchronize(self) -> None:
        """Block the calling thread until all copies are done, so that their memory may be freed."""
        self.h2d.synchronize()  # wait: fetches before their memory is freed

    def close(self) -> None:
        """Free the buffers. The blocks' layers must be settled, and may join another ring.

        Backward through a graph that saved weights in this ring raises. The model may keep the ring object alive, in
        its blocks' recomputation functions.
        """
        for block in self._blocks:
            for layer in block.layers:
                layer.leave_ring()
            block.layers = ()
        self._blocks.clear()
        self._buffers.clear()
        self._as_dtype.clear()
        self._successor.clear()
        self._current = None
        self._memory = self._memory[:0].clone()

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int] | _SavedWeight:
        offset = tensor.data_ptr() - self._address
        if 0 <= offset < self._num_bytes and tensor.device == self.device:
            index, offset = divmod(offset, self._size)
            block = self._buffers[index].block
            if block is not None:
                return _SavedWeight(block, block.num_updates, offset, tensor.dtype, tensor.shape, tensor.stride())
        # Detached, because an operation's output saved by its own node would keep itself alive if backward never runs.
        return tensor.detach() if tensor.requires_grad else tensor, tensor._version

    def _unpack(self, saved: tuple[torch.Tensor, int] | _SavedWeight) -> torch.Tensor:
        """Raises `ModelError` or `EngineStateError` if the saved tensor was written after it was saved. Autograd skips
        this check for tensors that pass through hooks.
        """
        if type(saved) is tuple:
            tensor, version = saved
            if tensor._version != version:
                raise changed_in_place(tensor)
            return tensor
        assert isinstance(saved, _SavedWeight)
        if not self._blocks:
            raise EngineStateError("the weights moved after this loss was computed: compute the loss again")
        if saved.num_updates != saved.block.num_updates:
            for layer, num_updates in zip(saved.block.layers, saved.num_updates, strict=True):
                layer.check_seen(num_updates)
        self.use(saved.block)
        assert self._current is not None
        if saved.dtype not in self._as_dtype:
            self._as_dtype[saved.dtype] = self._memory.view(saved.dtype)
        start = (self._current.start + saved.offset) // saved.dtype.itemsize
        return self._as_dtype[saved.dtype].as_strided(saved.shape, saved.stride, start)

    def _release(self, buffer: _Buffer, successor: StreamedBlock) -> Event:
        """Returns the end of the compute stream's work so far."""
        assert buffer.block is not None
        left = buffer.block
        self._successor[self.in_backward, left] = successor
        buffer.reads_on = self.in_backward and left.is_viewed()
        if self.fill_with_nan:
            self._empty(buffer)
            buffer.memory.view(torch.float32).fill_(torch.nan)
        buffer.released = record_compute(self.device, timing=True)
        if self.in_backward and not left.guarded:
            self._guard(left)
        return buffer.released

    def fetch(self, block: StreamedBlock) -> _Buffer:
        """Copy a block into its own buffer, else into an empty one of the ring, or into the least recently used one."""
        buffer = self._own.get(block) or self._least_needed()
        self._empty(buffer)
        if buffer.released is not None:  # the compute stream may still read it
            self.h2d.wait(record_compute(self.device) if buffer.reads_on else buffer.released)
        for layer, memory in buffer.parts(block):
            if layer.written is not None:  # the GPU's step may still be copying new weights to RAM
                self.h2d.wait(layer.written)
            timed = self.in_forward or self.in_backward
            buffer.arrived = self.h2d.copy_all([(memory, layer.flat_bytes)], layer.layer.name, timed=timed)
        buffer.block, block.buffer = block, buffer
        for layer in block.layers:
            layer.copied = buffer.arrived
        return buffer

    def _least_needed(self) -> _Buffer:
        own = self._own.values()
        free = [each for each in self._buffers if each is not self._current or each.released is not None]
        shared = [each for each in free if not any(each is one for one in own)] if own else free
        return min(shared, key=lambda buffer: (buffer.block is not None, buffer.last_use))

    def _empty(self, buffer: _Buffer) -> None:
        if (block := buffer.block) is not None:
            block.lost |= buffer.reads_on and block.is_viewed()
            for layer in block.layers:
                layer.leaves_vram()
                layer.unbind()
            buffer.block = block.buffer = None
