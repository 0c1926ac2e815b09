"""Communication of several ranks: gradients go to the ranks that own them, and new weights come back.

All device operations of the ranks run on one stream, in an agreed order. The main thread issues them, in autograd hooks
and in the waits before forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from offloadkit.device import watchdog
from offloadkit.device.streams import CopyStream, Event, Waits, record_compute
from offloadkit.distributed.ranks import Group
from offloadkit.kernels.dispatch import block_sums
from offloadkit.offload.gradient_buffers import Buckets, RamSums
from offloadkit.offload.layer_gradient import LayerGradient, Stage
from offloadkit.offload.layers import FlatLayer
from offloadkit.offload.weights import LayerWeights


class GradientExchange:
    """Buffers that receive all ranks' gradients of this rank's range, one layer at a time."""

    def __init__(self, ranks: Group, device: torch.device, received_bytes: int, summed_bytes: int) -> None:
        """
        Args:
            received_bytes: size of the largest layer's range times the number of ranks.
            summed_bytes: size of the largest fp32 sum that leaves the device; 0 if none does.
        """
        self._ranks, self._device, self.stream = ranks, device, ranks.stream
        self._received = torch.zeros(received_bytes, dtype=torch.uint8, device=device)
        self._summed = torch.zeros(summed_bytes, dtype=torch.uint8, device=device)
        self._received_until: Event | None = None
        self._summed_until: Event | None = None

    def receive(self, bucket: torch.Tensor, layer: FlatLayer) -> torch.Tensor:
        """Exchange a layer's gradient, 1-D [numel]. Returns all ranks' gradients of this rank's range, 1-D, in rank
        order, valid on the exchange stream.
        """
        self.stream.wait(record_compute(self._device))  # wait: backward before an exchange
        if self._received_until is not None:
            self.stream.wait(self._received_until)  # wait: received gradients read before the next come
        num_bytes = self._ranks.size * layer.shard.numel * bucket.element_size()
        received = self._received[:num_bytes].view(bucket.dtype)
        with self.stream.traced(f"exchange {layer.name}", num_bytes - num_bytes // self._ranks.size):
            self.stream.run(partial(self._ranks.exchange, received, bucket, layer.cuts))
        return received

    def add(self, received: torch.Tensor, into: torch.Tensor, *, begins: bool) -> None:
        """Add received gradients to `into`, fp32 1-D, in rank order; if `begins`, the first one overwrites it."""
        pieces = parts(received, self._ranks.size)

        def add() -> None:
            for at, piece in enumerate(pieces):
                into.copy_(piece) if begins and at == 0 else into.add_(piece)

        self.stream.run(add)

    def sum(self, received: torch.Tensor, blocks: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """The fp32 sum of received gradients, in a reused buffer; its block sums go to `sums`."""
        numel = received.numel() // self._ranks.size
        into = self._summed[: 4 * numel].view(torch.float32)
        if self._summed_until is not None:
            self.stream.wait(self._summed_until)  # wait: a sum read before the next
        self.add(received, into, begins=True)
        self.stream.run(partial(block_sums, into, blocks, sums))
        return into

    def busy(self, *, received_until: Event | None = None, summed_until: Event | None = None) -> None:
        """Copies read the received gradients, or the sum, until these events."""
        self._received_until = received_until or self._received_until
        self._summed_until = summed_until or self._summed_until


class Reduction:
    """Exchanges the gradients of all layers, in one order on all ranks.

    Attributes:
        order: indices of the layers in the order of their exchange: rank 0's order of completion in the last step.
        completed: indices of the layers in the last backward's order of completion.
        exchanges_sums: each rank accumulates whole layers, and the ranks exchange the sums of a window.
    """

    def __init__(self, ranks: Group, device: torch.device, accumulation: int, d2h: CopyStream, waits: Waits) -> None:
        self._ranks, self._device, self._accumulation = ranks, device, accumulation
        self._d2h, self._waits = d2h, waits
        self.order, self.completed, self._completing = list[int](), list[int](), list[int]()
        self._num_exchanged = 0
        self._adds_to_sums = False
        """A micro-batch of this window was exchanged before, so the next one is added to its sum."""

    def arrange(self, layers: Sequence[LayerGradient], buckets: Buckets, ram_sums: RamSums) -> None:
        """Set the layers, after placing or a move, and allocate buffers to receive gradients."""
        self._layers, self._buckets, self._ram_sums = layers, buckets, ram_sums
        self.exchanges_sums = any(layer.exchanges_sums for layer in layers)
        received = [
            self._ranks.size * layer.shard.numel * (4 if layer.exchanges_sums else layer.bucket_dtype.itemsize)
            for layer in layers
            if not layer.all_sums
        ]
        leaving = [4 * layer.shard.numel for layer in layers if not layer.on_device and self._accumulation == 1]
        if not self.order:  # backward runs from the last layer, and collects gradients of tied weights until its end
            self.order = sorted(range(len(layers)), key=lambda at: (layers[at].layer.shared, -at))
            self.completed = self.order
        received_bytes, summed_bytes = max(received, default=0), max(leaving, default=0)
        self._exchange = GradientExchange(self._ranks, self._device, received_bytes, summed_bytes)

    def finish_exchanges(self) -> None:
        self._ranks.stream.synchronize()  # wait: exchanges before their buffers go

    def in_order(self) -> list[LayerGradient]:
        return [self._layers[at] for at in self.order]

    def complete(self, layer: LayerGradient) -> None:
        """The layer has all gradients of this micro-batch: exchange the complete layers whose turn it is."""
        self._completing.append(self._layers.index(layer))
        self.go_on()

    def go_on(self) -> None:
        """Exchange complete layers in order, up to the first incomplete layer."""
        while self._num_exchanged < len(self.order):
            layer = self._layers[self.order[self._num_exchanged]]
            if layer.stage is Stage.FILLING:
                return
            if not layer.exchanges_sums:
                self._exchange_layer(layer)
                continue
            self._num_exchanged += 1
            if not layer.all_sums:
                self._exchange_sum(layer, set(range(len(layer.layer.views))) - layer.window)

    def end_of_backward(self, *, exchanged: bool) -> None:
        """exchanged: this backward's gradients were exchanged."""
        self.completed = self._completing if exchanged else self.order
        self._completing, self._num_exchanged, self._adds_to_sums = [], 0, exchanged

    def end_of_window(self, submit: Callable[[Callable[[], None]], None]) -> None:
        """Exchange the sums of a window that ended early. The stepping thread adds sums in RAM (`StepThread`)."""
        for layer in self.in_order() if self.exchanges_sums else ():
            if layer.window and layer.all_sums:
                layer.sums_on_host = True
                submit(partial(layer.forget_missing, layer.missing))
            elif layer.window and layer.stage is not Stage.REDUCED:
                self._exchange_sum(layer, layer.missing)
        self._waits.delay(self._exchange.stream.record())  # wait: exchanges before sums of squares
        self._adds_to_sums = False

    def drop(self) -> None:
        self._completing, self._num_exchanged, self._adds_to_sums = [], 0, False

    def _exchange_sum(self, layer: LayerGradient, missing: Iterable[int]) -> None:
        """`missing`: indices of views without a gradient in this window, which hold values of an older window."""
        assert layer.accumulated is not None
        for index in missing:
            layer.accumulated[layer.layer.views[index].elements].fill_(-0.0)
        self._exchange.add(self._exchange.receive(layer.accumulated, layer.layer), layer.kept, begins=True)
        layer.stage = Stage.REDUCED

    def _exchange_layer(self, layer: LayerGradient) -> None:
        if not layer.received:
            self._buckets.open(layer, set())
        for index, place in enumerate(layer.places()):
            if index not in layer.received:
                place.fill_(-0.0)
        exchange = self._exchange
        received = exchange.receive(layer.bucket, layer.layer)
        self._num_exchanged += 1
        layer.sent = exchange.stream.record()
        self._buckets.release(layer, layer.sent)
        begins = not self._adds_to_sums
        if layer.on_device:
            assert layer.accumulated is not None
            exchange.add(received, layer.accumulated, begins=begins)
        elif self._accumulation == 1:
            assert layer.host is not None
            gradient = exchange.sum(received, layer.device_blocks, layer.device_sums)
            self._d2h.wait(exchange.stream.record())  # wait: an exchanged sum before its copy
            layer.sent = self._d2h.copy_all([(layer.host, gradient)], layer.layer.name)
            exchange.busy(summed_until=layer.sent)
        else:
            own = layer.shard.numel
            ranges = [(at * own, 0, own, at > 0 or not begins) for at in range(self._ranks.size) if own]
            self._d2h.wait(layer.sent)  # wait: an exchange before its copies
            exchange.busy(received_until=self._ram_sums.add(layer, received, ranges))


def parts(flat: torch.Tensor, num: int) -> list[torch.Tensor]:
    length = flat.numel() // num
    return [flat[at * length : (at + 1) * length] for at in range(num)]


class WeightGathers:
    """The layers of an update whose new weights are not gathered yet, in the order agreed on by all ranks.

    Attributes:
        looks_ahead: gather stepped layers before they are needed. False without a GPU, because there a gather blocks
            the host until the other ranks join.
    """

    def __init__(self, ranks: Group, device: torch.device, waits: Waits) -> None:
        self._ranks, self._waits = ranks, waits
        self.looks_ahead = device.type != "cpu"
        self._coming: deque[LayerWeights] = deque()
        self._newest: Event | None = None
        """The end of the newest gather."""

    def begin(self, coming: Sequence[LayerWeights]) -> None:
        self._coming.extend(coming)

    def bring(self, wanted: LayerWeights | None = None) -> None:
        """Issue the gathers up to `wanted`, or all. With `looks_ahead`, also gathers stepped layers behind `wanted`.

        Afterwards a layer's `pending.arrived` is the end of its gather. Blocks until this rank has stepped the layers
        and, without a GPU, until the other ranks have.
        """
        must = len(self._coming) if wanted is None else self._position(wanted)
        while self._coming and (must > 0 or (self.looks_ahead and self._is_stepped(self._coming[0]))):
            self._issue(self._coming[0])
            self._coming.popleft()
            must -= 1

    @property
    def has_any(self) -> bool:
        """Whether a gather of an update that this rank has applied has not ended."""
        if self._newest is not None and not self._newest.done():
            return True
        return any(each.pending is not None and each.pending.arrived is not None for each in self._coming)

    def forget(self) -> None:
        self._coming.clear()

    def _position(self, wanted: LayerWeights) -> int:
        return self._coming.index(wanted) + 1 if wanted in self._coming else 0

    @staticmethod
    def _is_stepped(weights: LayerWeights) -> bool:
        return weights.pending is not None and weights.pending.recorded.is_set()

    def _issue(self, weights: LayerWeights) -> None:
        pending = weights.pending
        assert pending is not None
        if not pending.recorded.is_set():
            with self._waits.blocking():
                watchdog.wait(pending.recorded, f"the update of {weights.layer.name!r}")  # wait: a gather's update
        if pending.arrived is None:
            return  # all ranks have skipped the update
        stream = self._ranks.stream
        # `arrived` comes after the last use of the old weights.
        stream.wait(pending.arrived)  # wait: an update before its gather
        layer, flat = weights.layer, weights.flat
        with stream.traced(f"gather {layer.name}", flat.nbytes - layer.shard.numel * flat.element_size()):
            stream.run(partial(self._ranks.gather, flat, layer.cuts))
        pending.arrived = self._newest = stream.record()
