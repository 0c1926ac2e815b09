"""Buffers of the gradients: buckets, staging for sums in RAM, sums in VRAM, and block sums for the norm."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch

from offloadkit.device import host_memory, watchdog
from offloadkit.device.streams import CopyStream, Event, Waits, record_compute
from offloadkit.kernels import cpu
from offloadkit.kernels.dispatch import block_sums
from offloadkit.offload.layer_gradient import LayerGradient
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
        ready = next((item for item in self.free if item[1] is None or item[1].done()), None)
        if ready is None and len(self.free) < NUM_GRADIENT_BUCKETS - 1:
            return torch.zeros(self._num_bytes, dtype=torch.uint8, device=self._device)
        buffer, busy = ready or self.free[0]
        self.free = [item for item in self.free if item[0] is not buffer]
        if ready is None and busy is not None:
            self._waits.delay(busy)
        return buffer

    def give_back(self, buffer: torch.Tensor, busy: Event | None) -> None:
        self.free.append((buffer, busy))


class Buckets:
    """Gives each layer the bucket for a micro-batch's gradient: from a pool, or the layer's own.

    A layer has its own bucket if it is small, has tied weights, or keeps its gradient there until the boundary.

    Attributes:
        pool: the buckets of gradients that leave VRAM.
    """

    def __init__(self, layers: Sequence[LayerGradient], device: torch.device, waits: Waits, *, is_sum: bool) -> None:
        """is_sum: the gradient leaves the bucket as soon as the micro-batch completes it, also if it stays in VRAM."""
        self._device, self._waits = device, waits
        passing = [layer for layer in layers if not layer.layer.shared and (not layer.on_device or is_sum)]
        sizes = [layer.bucket_bytes for layer in passing]
        self.pool = BucketPool(device, max(sizes, default=0), waits)
        self._pooled = {layer for layer in passing if not is_small(layer.bucket_bytes, max(sizes))}

    def open(self, layer: LayerGradient, views: set[int]) -> None:
        """Give the layer a bucket for the first gradients of a backward; they belong to `views` (indices).

        The compute stream waits if the last step or a copy to RAM may still read the layer's own bucket.
        """
        if layer.weights.pending is not None:
            layer.weights.check_waited([layer.layer.views[index] for index in views & layer.known])
        layer.weights.wait()  # wait: the last update before new gradients
        if layer.own_buffer is not None and layer.sent is not None:
            self._waits.delay(layer.sent)  # wait: the last copy before new gradients
        if layer.buffer is None:
            self.take(layer)

    def take(self, layer: LayerGradient) -> None:
        if layer in self._pooled:
            layer.buffer = self.pool.take()
            return
        if layer.own_buffer is None:
            layer.own_buffer = torch.zeros(layer.bucket_bytes, dtype=torch.uint8, device=self._device)
        layer.buffer = layer.own_buffer

    def release(self, layer: LayerGradient, busy: Event | None) -> None:
        """Return a bucket of the pool, which copies read until `busy`."""
        if layer.buffer is not None and layer.buffer is not layer.own_buffer:
            self.pool.give_back(layer.buffer, busy)
            layer.buffer = None


Ranges = Sequence[tuple[int, int, int, bool]]
"""(start in the source, start in the sum, length, True to add or False to overwrite)."""


class Staging:
    """A ring of bytes in pinned RAM for gradients that wait to be added.

    Gradients leave the ring in the order in which they entered it. A gradient may cross the ring's end, so it fits
    whenever enough bytes are free.
    """

    def __init__(self, memory: torch.Tensor, waits: Waits) -> None:
        """memory: 1-D pinned uint8."""
        self._memory, self._waits = memory, waits
        self._taken: deque[tuple[int, int, threading.Event]] = deque()
        """(first byte, bytes, set once the bytes may be overwritten) of the gradients in the ring, oldest first."""

    def take(self, num_bytes: int, is_free: threading.Event) -> list[torch.Tensor]:
        """Reserve bytes until `is_free` is set. Returns one uint8 tensor, or two if the bytes cross the ring's end.

        Blocks until the stepping thread has added the gradients that are in the way.
        """
        size = self._memory.numel()
        if not num_bytes:  # a rank may own no part of a layer
            return []
        while size - sum(taken for _, taken, _ in self._taken) < num_bytes:
            oldest = self._taken[0][2]
            if not oldest.is_set():
                with self._waits.blocking():
                    watchdog.wait(oldest, "gradients to be added in RAM")  # wait: a sum before its staging is reused
            self._taken.popleft()
        first = sum(self._taken[-1][:2]) % size if self._taken else 0
        self._taken.append((first, num_bytes, is_free))
        parts = [self._memory[first : first + num_bytes], self._memory[: max(0, first + num_bytes - size)]]
        return [part for part in parts if part.numel()]


class RamSums:
    """Accumulates micro-batches in RAM. A gradient passes through the staging ring; the stepping thread adds it."""

    def __init__(
        self, d2h: CopyStream, waits: Waits, submit: Callable[[Callable[[], None]], None], staging: torch.Tensor
    ) -> None:
        """
        Args:
            submit: queues a job for the stepping thread.
            staging: memory of the ring.
        """
        self._d2h, self._submit, self._staging = d2h, submit, Staging(staging, waits)

    def add(self, layer: LayerGradient, source: torch.Tensor, ranges: Ranges) -> Event:
        """Copy `source` to RAM, and have its `ranges` added to the layer's sum. Returns the end of the copy.

        source: 1-D, in the bucket's dtype; the D2H stream has waited for it.
        """
        is_free = threading.Event()
        try:
            return self._add_through(self._staging.take(source.nbytes, is_free), is_free, layer, source, ranges)
        except BaseException:  # including an interrupt; otherwise later micro-batches would wait for the bytes forever
            is_free.set()
            raise

    def _add_through(
        self,
        staged: Sequence[torch.Tensor],
        is_free: threading.Event,
        layer: LayerGradient,
        source: torch.Tensor,
        ranges: Ranges,
    ) -> Event:
        host, pieces = layer.window_in_ram, [part.view(source.dtype) for part in staged]
        starts = list(accumulate((piece.numel() for piece in pieces), initial=0))
        copies = [(piece, source[begin:end]) for piece, (begin, end) in zip(pieces, pairwise(starts), strict=True)]
        arrived = self._d2h.copy_all(copies, layer.layer.name)
        layer.sums_on_host = True

        def add_to_window() -> None:
            try:
                arrived.synchronize()  # wait: a copy before it is accumulated
                for at, start, length, add in ranges:
                    for piece, begin in zip(pieces, starts, strict=False):
                        low, high = max(at, begin), min(at + length, begin + piece.numel())
                        if low < high:
                            into = host[start + low - at : start + high - at]
                            cpu.accumulate(into, piece[low - begin : high - begin], add=add)
            finally:
                is_free.set()

        self._submit(add_to_window)
        layer.sent = arrived
        return arrived


class NormSums:
    """The block sums of all layers, on the device and in pinned RAM.

    Gradients that stay in VRAM share one buffer per dtype, so that one operation sums their squares.
    """

    def __init__(self, layers: Sequence[LayerGradient], device: torch.device, *, is_sum: bool) -> None:
        """is_sum: gradients in VRAM are fp32 sums; otherwise buckets."""
        self._device = device
        groups: dict[torch.dtype | None, list[LayerGradient]] = {}
        for layer in layers:
            dtype_in_vram = torch.float32 if is_sum else layer.bucket_dtype
            groups.setdefault(dtype_in_vram if layer.on_device else None, []).append(layer)
        num_blocks = sum(len(layer.host_blocks) for layer in layers)
        (slab,) = host_memory.allocate([8 * num_blocks], device, "the norm's sums")
        self._host = slab.cut(num_blocks, torch.float64)
        self._on_device = torch.zeros(num_blocks, dtype=torch.float64, device=device)
        self._in_vram: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """(gradients of one dtype in VRAM, their norm blocks, their block sums)."""
        end = 0
        for dtype, group in groups.items():
            first = end
            for layer in group:
                start, end = end, end + len(layer.host_blocks)
                layer.sums, layer.device_sums = self._host[start:end], self._on_device[start:end]
            if dtype is not None:
                starts = list(accumulate((layer.window_numel for layer in group), initial=0))
                flat = torch.zeros(starts[-1], dtype=dtype, device=device)
                for layer, (start, stop) in zip(group, pairwise(starts), strict=True):
                    if is_sum:
                        layer.accumulated = flat[start:stop]
                    else:
                        layer.own_buffer = flat[start:stop].view(torch.uint8)
                owned = [
                    at + layer.shard.begin * layer.exchanges_sums for layer, at in zip(group, starts, strict=False)
                ]
                moved = [layer.host_blocks + torch.tensor([at, 0]) for layer, at in zip(group, owned, strict=True)]
                self._in_vram.append((flat, torch.cat(moved).to(device), self._on_device[first:end]))

    def send(self, window: Sequence[LayerGradient], d2h: CopyStream) -> Event:
        """Copy the block sums, and the gradients of `window` that stayed on the device, to RAM. Returns the end."""
        if any(layer.on_device for layer in window):
            for flat, blocks, sums in self._in_vram:  # the sums of layers without a gradient are meaningless
                block_sums(flat, blocks, sums)
        d2h.wait(record_compute(self._device))
        for layer in window:
            if layer.on_device and layer.host is not None:
                d2h.copy(layer.host, layer.kept, layer.layer.name, timed=True)
        d2h.copy(self._host, self._on_device, "norm sums")
        return d2h.record()
