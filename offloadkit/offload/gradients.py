"""Gradients: from autograd into one bucket per layer, and on to the optimizer step.

When autograd has all gradients of a layer, one operation copies them into the layer's *bucket*, a 1-D buffer in VRAM,
and the tensors in `.grad` are dropped. The next steps depend on placement and accumulation. "Sums" are the sums of
squares by norm block, for the gradient norm:

| | `gradients="ram"` | `gradients="vram"` |
|---|---|---|
| one micro-batch | sums on the device, D2H on the copy stream | bucket stays; sums and D2H at the boundary |
| several | D2H, then the stepping thread adds into fp32 in RAM | added into fp32 on the device; D2H at the boundary |

With one micro-batch per window, or `exchange="micro_batch"`, several ranks exchange each bucket first: a rank receives
all ranks' gradients of the range that it owns, and adds them in fp32 in rank order. The table then applies to the owned
range. All ranks exchange layers in rank 0's order of completion in the last step; layers incomplete at the end of
backward are exchanged then. A parameter without a gradient counts as -0.0, which changes no sum.

With several micro-batches and `exchange="step"`, each rank accumulates whole layers, as at world size 1. Then each rank
receives all ranks' sums of its range and adds them in rank order. Sums in VRAM are exchanged layer by layer in the
backward of the window's last micro-batch, or at the boundary if the window ends early. Sums in RAM are in shared
memory, and the stepping thread adds them before the norm.

Block sums computed on the device go to RAM at the boundary, in one copy for all layers. They are equal on CPU and GPU
(`optim.norm`). Micro-batches are added in order.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from enum import Enum
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offloadkit.device import host_memory, trace
from offloadkit.device.streams import CopyStream, Event, Waits, record_compute
from offloadkit.distributed.ranks import Group, Solo
from offloadkit.errors import EngineStateError, ModelError
from offloadkit.kernels import cpu
from offloadkit.kernels.dispatch import block_sums
from offloadkit.offload.external_writes import Watched, unwatched
from offloadkit.offload.layers import FlatLayer, ParameterView
from offloadkit.offload.shards import GradientExchange
from offloadkit.offload.weights import LayerWeights
from offloadkit.optim.norm import NORM_BLOCK, norm_blocks
from offloadkit.planner import NUM_GRADIENT_BUCKETS, is_small


class BucketPool:
    """Reusable device buffers of the size of the largest bucket.

    The pool holds NUM_GRADIENT_BUCKETS - 1 buckets, because autograd holds the gradients of one more layer. A buffer is
    returned with the event of the copy that reads it; the compute stream waits for the event before the next write.

    Attributes:
        free: the returned buffers, each with the event of that copy.
    """

    def __init__(self, device: torch.device, num_bytes: int, waits: Waits) -> None:
        self._device, self._num_bytes, self._waits = device, num_bytes, waits
        self.free: list[tuple[torch.Tensor, Event | None]] = []

    def take(self) -> torch.Tensor:
        """A free uint8 buffer of `num_bytes`; if all are busy, the oldest."""
        ready = [item for item in self.free if item[1] is None or item[1].done()]
        if not ready and len(self.free) < NUM_GRADIENT_BUCKETS - 1:
            return torch.zeros(self._num_bytes, dtype=torch.uint8, device=self._device)
        buffer, busy = (ready or self.free)[0]
        self.free = [item for item in self.free if item[0] is not buffer]
        if busy is not None:
            self._waits.delay(busy)
        return buffer

    def give_back(self, buffer: torch.Tensor, busy: Event | None) -> None:
        """Return a buffer that copies read until `busy`."""
        self.free.append((buffer, busy))


class Stage(Enum):
    """Where a layer's gradient is in its window."""

    FILLING = "autograd may still compute gradients of this backward"
    FULL = "this backward's gradients were sent, or added to the window"
    REDUCED = "the window's sum was exchanged: no further micro-batch is possible"


class LayerGradient:
    """One layer's gradient on its way from autograd to the optimizer step.

    The bucket covers the whole layer; other tensors cover the part that this rank owns. Indices of views refer to the
    whole layer.

    Attributes:
        on_device: the window's gradient stays in VRAM.
        host: 1-D pinned tensor with the gradient of the whole window, valid after `sent`. fp32 if accumulated or tied,
            else in the layer's dtype. Ranges of views without a gradient are undefined. None: only the GPU steps it.
        sums: fp64 [num_blocks] in pinned RAM: sums of squares of the window's gradient by norm block, after `sent`.
        sums_on_host: the CPU computes the sums, because the gradient is accumulated in RAM.
        received: indices of the views that got a gradient in this micro-batch.
        window: indices of the views that got a gradient in this accumulation window.
        known: indices of the views that ever got a gradient.
        stage: of this window; the last backward of a window may end as REDUCED, other backwards end as FILLING.
        at_end_only: send at the end of backward, because a view may get more than one gradient.
        missing: several ranks: indices of views in the window that got no gradient on this rank.
        exchanges_sums: several ranks: each rank accumulates the whole layer before the exchange.
        all_sums: the ranks' accumulated gradients in shared RAM, by rank: fp32, 1-D. `host` is this rank's range of
            `all_sums[rank]`.
    """

    def __init__(
        self,
        weights: LayerWeights,
        host: torch.Tensor | None,
        *,
        on_device: bool,
        exchanges_sums: bool = False,
        all_sums: Sequence[torch.Tensor] = (),
    ) -> None:
        self.weights, self.on_device = weights, on_device
        self.exchanges_sums, self.all_sums = exchanges_sums, all_sums
        self.missing = set[int]()
        self.layer: FlatLayer = weights.layer
        self.host, self.sums = host, torch.empty(0)
        self.bucket_dtype = torch.float32 if self.layer.shared else self.layer.dtype
        self.shard: FlatLayer = self.layer.shard
        ranges = [(view.start, view.numel) for view in self.shard.views]
        self.host_blocks = norm_blocks(ranges)
        num_blocks = [-(-view.numel // NORM_BLOCK) for view in self.shard.views]
        self._first_block = list(accumulate(num_blocks, initial=0))
        self.device_blocks = self.host_blocks.to(weights.device)
        self.device_sums = torch.empty(0)
        self.sums_on_host = False
        self.received, self.window, self.known = set[int](), set[int](), set[int]()
        self.stage = Stage.FILLING
        self.at_end_only = self.layer.shared
        self.buffer: torch.Tensor | None = None
        self.accumulated: torch.Tensor | None = None
        """1-D fp32 sum of the micro-batches, if it stays in VRAM."""
        self.own_buffer: torch.Tensor | None = None
        self.sent: Event | None = None
        self._places: dict[int, list[torch.Tensor]] = {}

    def follow(self, old: LayerGradient) -> None:
        """Take over what `old`, the same layer in its former placement, has learned about backward."""
        self.known, self.at_end_only = old.known, old.at_end_only

    def forget_buffers(self) -> None:
        """Release buffers in VRAM and sums. No window may be open."""
        self.buffer = self.own_buffer = self.accumulated = self.sent = None
        self.sums = self.device_sums = torch.empty(0)
        self.sums_on_host = False
        self._places.clear()

    @property
    def bucket_bytes(self) -> int:
        """Size of one micro-batch's gradient."""
        return self.layer.numel * self.bucket_dtype.itemsize

    @property
    def bucket(self) -> torch.Tensor:
        """1-D view of the bucket buffer, in `bucket_dtype`."""
        assert self.buffer is not None
        return self.buffer[: self.bucket_bytes].view(self.bucket_dtype)

    @property
    def kept(self) -> torch.Tensor:
        """The window's gradient in VRAM, for a step on the GPU: 1-D, fp32 if accumulated."""
        if self.accumulated is None:
            return self.bucket
        return self.accumulated[self._own] if self.exchanges_sums else self.accumulated

    @property
    def _own(self) -> slice:
        return slice(self.shard.begin, self.shard.begin + self.shard.numel)

    @property
    def window_numel(self) -> int:
        """Elements accumulated during a window."""
        return self.layer.numel if self.exchanges_sums else self.shard.numel

    @property
    def window_in_ram(self) -> torch.Tensor:
        """The tensor that accumulates micro-batches in RAM."""
        assert self.host is not None
        return self.all_sums[self.layer.rank] if self.all_sums else self.host

    def forget_missing(self, missing: set[int]) -> None:
        """Overwrite views without a gradient by -0.0 in the accumulated gradient in RAM."""
        for index in missing:
            self.window_in_ram[self.layer.views[index].elements].numpy().fill(-0.0)

    def add_all_sums(self) -> None:
        """Add all ranks' accumulated gradients in RAM over this rank's range, in rank order. Only this rank accesses
        that range now."""
        first, *others = [each[self._own] for each in self.all_sums]
        for other in others:
            cpu.accumulate(first, other, add=True)
        if self.layer.rank:
            cpu.accumulate(self.window_in_ram[self._own], first, add=False)

    def places(self) -> list[torch.Tensor]:
        """Views of the bucket in the parameters' shapes."""
        assert self.buffer is not None
        address = self.buffer.data_ptr()
        if address not in self._places:
            bucket = self.bucket
            self._places[address] = [bucket[view.elements].view(view.parameter.shape) for view in self.layer.views]
        return self._places[address]

    def sums_of(self, index: int, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        """The part of `sums` for view `index`; zeros for blocks that another rank owns."""
        own = index - self.shard.first_view
        if self.shard is self.layer:
            return sums[self._first_block[index] : self._first_block[index + 1]]
        found = np.zeros(-(-self.layer.views[index].numel // NORM_BLOCK))
        if 0 <= own < len(self.shard.views):
            part = sums[self._first_block[own] : self._first_block[own + 1]]
            first = self.shard.views[own].first // NORM_BLOCK
            found[first : first + len(part)] = part
        return found


def runs(layer: FlatLayer, indices: set[int]) -> list[tuple[int, int]]:
    """(start, length) of the element ranges of the views; adjacent ranges are joined."""
    found: list[tuple[int, int]] = []
    for view in (layer.views[index] for index in sorted(indices)):
        if found and sum(found[-1]) == view.start:
            found[-1] = found[-1][0], found[-1][1] + view.numel
        else:
            found.append((view.start, view.numel))
    return found


class Gradients:
    """Takes the gradients of all layers from autograd and brings them to the optimizer step.

    Attributes:
        layers: in definition order.
        order: several ranks: indices of the layers in the order of their exchange.
        completed: indices of the layers in the last backward's order of completion.
        pool: the buckets of gradients that leave VRAM.
        ends_window: the next backward is the last of the accumulation window.
    """

    ends_window = False

    def __init__(
        self,
        views: Iterable[ParameterView],
        device: torch.device,
        *,
        accumulation: int,
        submit: Callable[[Callable[[], None]], None],
        got_gradient: Callable[[LayerWeights, ParameterView], None],
        waits: Waits,
        ranks: Solo | Group,
    ) -> None:
        """
        Args:
            views: all trained parameters. `arrange` assigns them to layers.
            accumulation: micro-batches per window.
            submit: queues a job for the stepping thread.
            got_gradient: called on each parameter's first gradient.
        """
        self._ranks = ranks
        self._exchange: GradientExchange | None = None
        self.order, self.completed, self._completing = list[int](), list[int](), list[int]()
        self._num_exchanged = 0
        self._adds_to_sums = False
        """A micro-batch of this window was exchanged before, so the next one is added to its sum."""
        self._accumulation, self._device = accumulation, device
        self._submit, self._got_gradient, self._waits = submit, got_gradient, waits
        self.d2h = CopyStream(device, "D2H")
        self.layers: Sequence[LayerGradient] = ()
        self._layer_of: dict[ParameterView, tuple[LayerGradient, int]] = {}
        self._hooks: list[Any] = []
        self._hook_of: dict[int, int] = {}
        for view in views:
            parameter: Any = view.parameter
            with unwatched():
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._gradient_hook(view)))
            self._hook_of[id(parameter)] = self._hooks[-1].id

    def hook_last(self, parameter: Any) -> None:
        """Move the engine's hook behind all other post-accumulate hooks of the parameter."""
        hooks, own = parameter._post_accumulate_grad_hooks, self._hook_of.get(id(parameter))
        if own in hooks:
            hooks[own] = hooks.pop(own)  # autograd follows the dict's order, which `move_to_end` does not change

    def arrange(self, layers: Sequence[LayerGradient], staging: Sequence[torch.Tensor]) -> None:
        """Set the layers, after placing or a move, and allocate their buffers.

        Args:
            staging: pinned uint8 buffers, each as large as the largest bucket. A micro-batch's gradient passes through
                a staging buffer before it is added in RAM. Empty if nothing accumulates in RAM.
        """
        self.layers = layers
        # Layers whose gradient leaves the bucket as soon as the micro-batch completes it.
        passing = [layer for layer in layers if not layer.layer.shared and (not layer.on_device or self._is_sum)]
        sizes = [layer.bucket_bytes for layer in passing]
        self.pool = BucketPool(self._device, max(sizes, default=0), self._waits)
        self._pooled = {layer for layer in passing if not is_small(layer.bucket_bytes, max(sizes))}
        self._staging: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for buffer in staging:
            self._staging.put(buffer)
        self._in_vram: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """(gradients of one dtype in VRAM, their norm blocks, their block sums): summed by one operation."""
        self.allocate()
        if isinstance(self._ranks, Group):
            self._exchange = self._new_exchange(self._ranks)
        for gradient in layers:
            for index, view in enumerate(gradient.layer.views):
                self._layer_of[view] = (gradient, index)

    @property
    def _is_sum(self) -> bool:
        return self._accumulation > 1 or self._ranks.size > 1

    def _new_exchange(self, ranks: Group) -> GradientExchange:
        received = [
            ranks.size * layer.shard.numel * (4 if layer.exchanges_sums else layer.bucket_dtype.itemsize)
            for layer in self.layers
            if not layer.all_sums
        ]
        leaving = [4 * layer.shard.numel for layer in self.layers if not layer.on_device and self._accumulation == 1]
        if not self.order:  # backward runs from the last layer, and collects gradients of tied weights until its end
            self.order = sorted(range(len(self.layers)), key=lambda at: (self.layers[at].layer.shared, -at))
            self.completed = self.order
        return GradientExchange(ranks, self._device, max(received, default=0), max(leaving, default=0))

    def forget_buffers(self) -> None:
        """Release all buffers before layers move. No gradient may be pending, and no job may be running."""
        self.d2h.synchronize()  # wait: copies before their buffers go
        if self._exchange is not None:
            self._exchange.stream.synchronize()  # wait: exchanges before their buffers go
        for layer in self.layers:
            layer.forget_buffers()
        self._layer_of.clear()
        self.layers, self._pooled, self._in_vram, self._exchange = (), set(), [], None
        self.pool = BucketPool(self._device, 0, self._waits)
        self._staging = queue.SimpleQueue()
        self._host_sums = self._device_sums = torch.empty(0)

    def allocate(self) -> None:
        """Allocate the block sums of all layers, on the device and in pinned RAM, and the gradients that stay in VRAM,
        one buffer per dtype."""
        groups: dict[torch.dtype | None, list[LayerGradient]] = {}
        for layer in self.layers:
            dtype_in_vram = torch.float32 if self._is_sum else layer.bucket_dtype
            groups.setdefault(dtype_in_vram if layer.on_device else None, []).append(layer)
        num_blocks = sum(len(layer.host_blocks) for layer in self.layers)
        (slab,) = host_memory.allocate([8 * num_blocks], self._device, "the norm's sums")
        self._host_sums = slab.cut(num_blocks, torch.float64)
        self._device_sums = torch.zeros(num_blocks, dtype=torch.float64, device=self._device)
        end = 0
        for dtype, group in groups.items():
            first = end
            for layer in group:
                start, end = end, end + len(layer.host_blocks)
                layer.sums, layer.device_sums = self._host_sums[start:end], self._device_sums[start:end]
            if dtype is not None:
                starts = list(accumulate((layer.window_numel for layer in group), initial=0))
                flat = torch.zeros(starts[-1], dtype=dtype, device=self._device)
                for layer, (start, stop) in zip(group, pairwise(starts), strict=True):
                    if self._is_sum:
                        layer.accumulated = flat[start:stop]
                    else:
                        layer.own_buffer = flat[start:stop].view(torch.uint8)
                owned = [
                    at + layer.shard.begin * layer.exchanges_sums for layer, at in zip(group, starts, strict=False)
                ]
                moved = [layer.host_blocks + torch.tensor([at, 0]) for layer, at in zip(group, owned, strict=True)]
                self._in_vram.append((flat, torch.cat(moved).to(self._device), self._device_sums[first:end]))

    def _gradient_hook(self, view: ParameterView) -> Callable[[torch.Tensor], None]:
        layer_of = self._layer_of

        def take(parameter: torch.Tensor) -> None:
            if isinstance(parameter, Watched):
                parameter.grad = None
                raise _without_the_engine(view)
            layer, index = layer_of[view]
            gradient = parameter.grad
            if gradient is None:  # `TiedUses` has handed over the gradient of every use, or another hook has dropped it
                return
            if layer.at_end_only or layer.stage is not Stage.FILLING:
                parameter.grad = None
                self.receive(view, gradient)
                return
            layer.weights.check_held(view)
            layer.received.add(index)
            if len(layer.received) == len(layer.layer.views):
                self._finish(layer)

        return take

    def _gather(self, layer: LayerGradient) -> None:
        views = [layer.layer.views[index] for index in layer.received]
        gradients: list[Any] = [view.parameter.grad for view in views]
        for view, gradient in zip(views, gradients, strict=True):
            _check_dense(view, gradient)
        self._open(layer, layer.received)
        places = layer.places()
        torch._foreach_copy_([places[index] for index in layer.received], gradients)
        for view in views:
            view.parameter.grad = None

    @torch.no_grad()
    def receive(self, view: ParameterView, gradient: torch.Tensor) -> None:
        """Add one gradient, in the parameter's shape, to its part of the bucket.

        Used for layers with tied weights, and for layers that were already sent; they are sent at the end of backward.
        """
        if isinstance(view.parameter, Watched):
            raise _without_the_engine(view)
        _check_dense(view, gradient)
        if view not in self._layer_of:
            raise EngineStateError(f"the loss belongs to a closed engine: {view.name!r} is a tied weight")
        layer, index = self._layer_of[view]
        layer.weights.check_held(view)
        if layer.stage is not Stage.FILLING:
            self._reopen(layer)
        if not layer.received:
            self._open(layer, {index})
        place = layer.places()[index]
        if index in layer.received:
            place.add_(gradient)
        else:
            place.copy_(gradient)
            layer.received.add(index)

    def _open(self, layer: LayerGradient, views: set[int]) -> None:
        """Give the layer a bucket for the first gradients of a backward; they belong to `views` (indices).

        The compute stream waits if the last step or a copy to RAM may still read the layer's own buffer.
        """
        layer.weights.check_waited([layer.layer.views[index] for index in views & layer.known])
        layer.weights.wait()  # wait: the last update before new gradients
        if layer.own_buffer is not None and layer.sent is not None:
            self._waits.delay(layer.sent)  # wait: the last copy before new gradients
        if layer.buffer is None:
            layer.buffer = self._take_buffer(layer)

    def end_of_backward(self) -> None:
        """Finish the layers that this micro-batch did not complete, because it uses only some of their views.

        Several ranks that exchange now finish all layers in order, because another rank may have gradients.
        """
        in_order = self._exchanges_now
        for layer in [self.layers[at] for at in self.order] if in_order else self.layers:
            if (layer.received or in_order) and layer.stage is Stage.FILLING:
                self._finish(layer)
        self.completed = self._completing if in_order else self.order
        self._completing, self._num_exchanged = [], 0
        self._adds_to_sums = in_order
        for layer in self.layers:
            layer.received.clear()
            if layer.stage is Stage.FULL:
                layer.stage = Stage.FILLING

    def join_remaining_exchanges(self) -> None:
        """This rank cannot finish its backward: take part in the remaining exchanges with zeros.

        All ranks will drop the window. Gradients of incomplete layers are dropped.
        """
        for layer in self.layers:
            if layer.stage is Stage.FILLING:
                layer.received.clear()
            for view in layer.layer.views:
                view.parameter.grad = None
        if self._exchange is not None and self._exchanges_now:
            self._exchange_in_order(self._exchange)  # from the layer at which it stopped
            self.end_of_backward()

    def end_of_window(self) -> None:
        """Copy the gradients that stayed on the device, and the block sums of all layers, to RAM."""
        for layer in self.layers:
            # The block sums in RAM are overwritten below. The last update computed its norm from them before its
            # weights arrived, so wait for the weights, even if no forward has used the layer.
            layer.weights.wait()  # wait: the last update before new sums of squares
        window = [layer for layer in self.layers if layer.window]
        if self._exchange is not None:
            if self._exchanges_sums:
                self._exchange_window(self._exchange)
            self._waits.delay(self._exchange.stream.record())  # wait: exchanges before sums of squares
        if any(layer.on_device for layer in window):
            for flat, blocks, sums in self._in_vram:  # the sums of layers without a gradient are meaningless
                block_sums(flat, blocks, sums)
        self.d2h.wait(record_compute(self._device))
        for layer in window:
            if layer.on_device and layer.host is not None:
                self.d2h.copy(layer.host, layer.kept, layer.layer.name, timed=True)
        self.d2h.copy(self._host_sums, self._device_sums, "norm sums")
        arrived = self.d2h.record()
        self._adds_to_sums = False
        for layer in self.layers:
            layer.stage = Stage.FILLING
        for layer in window:
            layer.sent = arrived

    @property
    def _exchanges_sums(self) -> bool:
        return any(layer.exchanges_sums for layer in self.layers)

    @property
    def _exchanges_now(self) -> bool:
        return self._ranks.size > 1 and (self.ends_window or not self._exchanges_sums)

    @property
    def window_is_full(self) -> bool:
        """Whether sums of this window were exchanged, so that no further micro-batch is possible."""
        return any(layer.stage is Stage.REDUCED for layer in self.layers)

    def _exchange_window(self, exchange: GradientExchange) -> None:
        """Exchange the sums of a window that ended early. The stepping thread adds sums in RAM (`StepThread`)."""
        for layer in (self.layers[at] for at in self.order):
            if layer.window and layer.all_sums:
                layer.sums_on_host = True
                self._submit(partial(layer.forget_missing, layer.missing))
            elif layer.window and layer.stage is not Stage.REDUCED:
                self._exchange_sum(exchange, layer, layer.missing)

    def _exchange_sum(self, exchange: GradientExchange, layer: LayerGradient, missing: Iterable[int]) -> None:
        """Exchange this rank's sum in VRAM, and add all ranks' sums of the range that this rank owns.

        missing: indices of views without a gradient in this window, which hold values of an older window.
        """
        assert layer.accumulated is not None
        for index in missing:
            layer.accumulated[layer.layer.views[index].elements].fill_(-0.0)
        exchange.add(exchange.receive(layer.accumulated, layer.layer), layer.kept, begins=True)
        layer.stage = Stage.REDUCED

    def drop(self) -> None:
        """Drop the gradients of this window."""
        self._completing, self._num_exchanged, self._adds_to_sums = [], 0, False
        for layer in self.layers:
            layer.window.clear()
            layer.received.clear()
            layer.stage = Stage.FILLING
            self._release(layer, None)
            for view in layer.layer.views:
                view.parameter.grad = None

    def remove(self) -> None:
        """Remove the hooks, and wait for the copies."""
        for hook in self._hooks:
            hook.remove()
        self.d2h.synchronize()  # wait: copies before the engine is dropped

    def _finish(self, layer: LayerGradient) -> None:
        """Called when a layer has all its gradients of this micro-batch: start the operations of the module's table."""
        if layer.received and not layer.at_end_only:
            self._gather(layer)
        if (tracing := trace.active()) is not None:
            tracing.has_gradients_of(layer.layer.name)
        layer.stage = Stage.FULL
        for index in layer.received - layer.known:
            self._got_gradient(layer.weights, layer.layer.views[index])
        layer.known |= layer.received
        first, again = layer.received - layer.window, layer.received & layer.window
        layer.window |= layer.received
        if self._exchange is None or layer.exchanges_sums:
            self._take_in(layer, first, again)
        if self._exchange is not None and self._exchanges_now:
            self._completing.append(self.layers.index(layer))
            self._exchange_in_order(self._exchange)

    def _take_in(self, layer: LayerGradient, first: set[int], again: set[int]) -> None:
        """Send a micro-batch's gradient to RAM, or accumulate it. It is the window's first gradient for the views in
        `first`."""
        if not layer.received:
            return
        if self._accumulation == 1:
            if not layer.on_device:
                self._send(layer)
        elif layer.on_device:
            assert layer.accumulated is not None
            for part, add in ((first, False), (again, True)):
                for start, length in runs(layer.layer, part):
                    into, piece = (tensor[start : start + length] for tensor in (layer.accumulated, layer.bucket))
                    into.add_(piece) if add else into.copy_(piece)
            self._release(layer, None)
        else:
            ranges = [(start, start, length, False) for start, length in runs(layer.layer, first)]
            ranges += [(start, start, length, True) for start, length in runs(layer.layer, again)]
            self.d2h.wait(record_compute(self._device))  # wait: backward before a copy of one micro-batch
            self._release(layer, self._accumulate_in_ram(layer, layer.bucket, ranges))

    def _exchange_in_order(self, exchange: GradientExchange) -> None:
        """Exchange complete layers in order, up to the first incomplete layer."""
        while self._num_exchanged < len(self.order):
            layer = self.layers[self.order[self._num_exchanged]]
            if layer.stage is Stage.FILLING:
                return
            if not layer.exchanges_sums:
                self._exchange_layer(exchange, layer)
                continue
            self._num_exchanged += 1
            if not layer.all_sums:
                self._exchange_sum(exchange, layer, set(range(len(layer.layer.views))) - layer.window)

    def _exchange_layer(self, exchange: GradientExchange, layer: LayerGradient) -> None:
        """Exchange a micro-batch's gradient, and add all ranks' gradients of the range that this rank owns."""
        if not layer.received:
            self._open(layer, set())
        for index, place in enumerate(layer.places()):
            if index not in layer.received:
                place.fill_(-0.0)
        received = exchange.receive(layer.bucket, layer.layer)
        self._num_exchanged += 1
        layer.sent = exchange.stream.record()
        self._release(layer, layer.sent)
        begins = not self._adds_to_sums
        if layer.on_device:
            assert layer.accumulated is not None
            exchange.add(received, layer.accumulated, begins=begins)
        elif self._accumulation == 1:
            assert layer.host is not None
            gradient = exchange.sum(received, layer.device_blocks, layer.device_sums)
            self.d2h.wait(exchange.stream.record())  # wait: an exchanged sum before its copy
            layer.sent = self.d2h.copy_all([(layer.host, gradient)], layer.layer.name)
            exchange.busy(summed_until=layer.sent)
        else:
            own = layer.shard.numel
            ranges = [(at * own, 0, own, at > 0 or not begins) for at in range(self._ranks.size) if own]
            self.d2h.wait(layer.sent)  # wait: an exchange before its copies
            exchange.busy(received_until=self._accumulate_in_ram(layer, received, ranges))

    def _accumulate_in_ram(
        self, layer: LayerGradient, source: torch.Tensor, ranges: Sequence[tuple[int, int, int, bool]]
    ) -> Event:
        """Copy `source` to a staging buffer; the stepping thread adds it to the gradient in RAM.

        Args:
            source: 1-D, in the bucket's dtype; the D2H stream has waited for it.
            ranges: (start in `source`, start in the gradient, length, True to add or False to overwrite).

        Returns:
            The end of the copy.
        """
        staged: list[torch.Tensor] = []  # the staging buffer, until it is returned
        try:
            # If all are in use, this waits until the stepping thread returns a buffer.
            with self._waits.blocking() if self._staging.empty() else nullcontext():
                staged.append(self._staging.get())
            return self._accumulate_through(staged, layer, source, ranges)
        except BaseException:  # including an interrupt; otherwise later micro-batches would wait for the buffer forever
            self._give_back_staging(staged)
            raise

    def _accumulate_through(
        self,
        staged: list[torch.Tensor],
        layer: LayerGradient,
        source: torch.Tensor,
        ranges: Sequence[tuple[int, int, int, bool]],
    ) -> Event:
        host, piece = layer.window_in_ram, staged[0][: source.nbytes].view(source.dtype)
        arrived = self.d2h.copy_all([(piece, source)], layer.layer.name)
        layer.sums_on_host = True

        def add_to_window() -> None:
            try:
                arrived.synchronize()  # wait: a copy before it is accumulated
                for at, start, length, add in ranges:
                    cpu.accumulate(host[start : start + length], piece[at : at + length], add=add)
            finally:
                self._give_back_staging(staged)

        self._submit(add_to_window)
        layer.sent = arrived
        return arrived

    def _give_back_staging(self, staged: list[torch.Tensor]) -> None:
        with suppress(IndexError):  # the other thread has already returned it
            self._staging.put(staged.pop())

    def _send(self, layer: LayerGradient) -> None:
        assert layer.host is not None
        gradient = layer.bucket
        block_sums(gradient, layer.device_blocks, layer.device_sums)
        self.d2h.wait(record_compute(self._device))
        layer.sent = self.d2h.copy_all([(layer.host, gradient)], layer.layer.name)
        self._release(layer, layer.sent)

    def _take_buffer(self, layer: LayerGradient) -> torch.Tensor:
        """The buffer for a micro-batch's gradient: from the pool, or the layer's own.

        A layer has its own buffer if it is small, has tied weights, or keeps its gradient there until the boundary.
        """
        if layer in self._pooled:
            return self.pool.take()
        if layer.own_buffer is None:
            layer.own_buffer = torch.zeros(layer.bucket_bytes, dtype=torch.uint8, device=self._device)
        return layer.own_buffer

    def _release(self, layer: LayerGradient, busy: Event | None) -> None:
        if layer.buffer is not None and layer.buffer is not layer.own_buffer:
            self.pool.give_back(layer.buffer, busy)
            layer.buffer = None

    def _reopen(self, layer: LayerGradient) -> None:
        """A gradient arrived after the layer was sent, so the layer is used twice: send it at the end of backward."""
        if self._exchange is not None and (layer.stage is Stage.REDUCED or not layer.exchanges_sums):
            raise EngineStateError(
                f"a parameter of {layer.layer.name!r} got a second gradient after the layer's gradients were sent to "
                "the other ranks: blocks that torch recomputes and that are used twice can be trained on one GPU only. "
                "Use OffloadConfig(activation_checkpointing=True) instead of torch's checkpoint()"
            )
        layer.at_end_only, layer.stage = True, Stage.FILLING
        if self._accumulation > 1:
            layer.received.clear()
        elif not layer.on_device:
            assert layer.sent is not None
            assert layer.host is not None
            layer.sent.synchronize()  # wait: a copy before its gradient comes again
            layer.buffer = self._take_buffer(layer)
            layer.bucket.copy_(layer.host)


def _without_the_engine(view: ParameterView) -> EngineStateError:
    return EngineStateError(
        f"a gradient of {view.name!r} arrived outside engine.backward(): call engine.backward(loss) instead of "
        "loss.backward(). With several losses, add them first. The engine scales the loss of fp16 itself. If another "
        "engine's loss is computed through this model (a GAN), freeze this model meanwhile: "
        "module.requires_grad_(False). To train without the engine (with another Trainer, say), close it first: "
        "engine.close() or trainer.close()"
    )


def _check_dense(view: ParameterView, gradient: torch.Tensor) -> None:
    if gradient.is_sparse:
        raise ModelError(f"parameter {view.name!r} has sparse gradients: build its nn.Embedding with sparse=False")


def compute_host_sums(layer: LayerGradient) -> None:
    """Compute the sums of squares on the CPU, if the gradient was accumulated in RAM."""
    if layer.sums_on_host and layer.host is not None:
        block_sums(layer.host, layer.host_blocks, layer.sums)
