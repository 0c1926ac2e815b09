"""The update: what happens between `step()` and the next forward, on threads of its own.

The stepping thread waits for the gradients' events, knows the norm, steps the CPU's layers in forward order and sends
each one's new weights to the device as soon as it is stepped. A second one queues the GPU's steps meanwhile: the C
kernels release the GIL, and queuing takes Python's time. The main thread never waits here; forward does, by layer.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from offloadkit.device import trace
from offloadkit.device.streams import BusyTime, CopyStream, Event
from offloadkit.offload.gradients import compute_host_sums
from offloadkit.offload.states import GroupOptions, LayerState
from offloadkit.offload.weights import PendingUpdate
from offloadkit.optim.norm import sum_in_order
from offloadkit.planner import NUM_STATE_BUFFERS

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


class StepBalancer:
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


Stepped = tuple[LayerState, set[int], PendingUpdate]
"""A layer, the views that have a gradient, and what forward waits for."""


@dataclass
class Update:
    """One optimizer step on its way.

    Attributes:
        layers: the layers to step, in that order, each with the views that have a gradient.
        compute_done: the compute stream's work at step(); the device's weights are not overwritten before it.
        loss_scale: what the gradients are to be divided by.
        scale_may_fall: a norm that is not finite may be an overflow, after which the scale goes down: no error.
        norm: global gradient norm, once `norm_known` is set; NaN or Inf: the step was skipped.
        seconds: wall seconds of the stepping thread, by phase; complete once `done` is set.
        busy: copies, "h2d" and "d2h", and "gpu_step": what moves and is stepped beside backward; complete then too.
        gpu: where the GPU's steps began and ended.
    """

    number: int
    layers: list[Stepped]
    options: Sequence[GroupOptions]
    max_grad_norm: float | None
    compute_done: Event
    loss_scale: float = 1.0
    scale_may_fall: bool = False
    norm: float = math.nan
    norm_known: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    seconds: dict[str, float] = field(default_factory=dict)
    busy: list[tuple[str, BusyTime]] = field(default_factory=list)
    gpu: tuple[Event, Event] | None = None
    nonfinite: list[str] = field(default_factory=list)

    @property
    def skipped(self) -> bool:
        """Whether the gradients were not finite; valid once the norm is known."""
        return not math.isfinite(self.norm)

    def grad_scale(self) -> float:
        """The clip coefficient, as torch.nn.utils.clip_grad_norm_ defines it, over the loss scale."""
        clip = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (self.norm + 1e-6))
        return clip / self.loss_scale


class _Worker(threading.Thread):
    """Runs jobs one after the other until it gets None."""

    def __init__(self, name: str, device: torch.device, failed: Callable[[BaseException], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._device, self._failed = device, failed
        self.start()

    def run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (job := self.jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # shown to the caller at its next call
                self._failed(error)


class StepThread:
    """Runs jobs one after the other on one thread, and queues the GPU's steps on a second; after an exception no more
    updates are made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.h2d = CopyStream(device, "H2D")
        self.kernels = CopyStream(device, "step on the GPU", urgent=True)  # short, and the bus waits for them
        self.balancer = StepBalancer()
        self.error: BaseException | None = None
        self._worker = _Worker("offloadkit-step", device, self._failed)
        self._queuing = _Worker("offloadkit-gpu-step", device, self._failed)

    def _failed(self, error: BaseException) -> None:
        self.error = self.error or error

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after those submitted before."""
        self._worker.jobs.put(job)

    def close(self) -> None:
        """Finish what was submitted and end the threads."""
        self.submit(partial(self._queuing.jobs.put, None))
        self._worker.jobs.put(None)
        if threading.current_thread() not in (self._worker, self._queuing):  # the garbage collector runs on any thread
            self._worker.join()
            self._queuing.join()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def start(self, update: Update) -> None:
        """Queue an optimizer step."""
        self.submit(partial(self._make, update))

    def finish(self, update: Update) -> None:
        """Wait until the newest update is done; `split` is the thread's alone."""
        update.done.wait()
        if not update.skipped:
            self.submit(self.balancer.disregard_newest)

    def _make(self, update: Update) -> None:
        """Whatever happens, nobody is left waiting for the update."""
        try:
            if self.error is None:
                self._run(update)
        finally:
            update.norm_known.set()
            for _, _, pending in update.layers:
                if not pending.recorded.is_set():
                    pending.record(None)
            update.done.set()

    def _run(self, update: Update) -> None:
        """Wait for the gradients, take the norm, step every layer and send its weights."""
        started = time.perf_counter()
        rings = {state.ring for state, _, _ in update.layers if state.ring is not None}
        for ring in rings:
            ring.forget_ahead()
        self.balancer.correct([state for state, _, _ in update.layers])
        for state, _, _ in update.layers:
            state.prefetch()
        for state, _, _ in update.layers:
            assert state.gradient.sent is not None
            state.gradient.sent.synchronize()
        arrived = time.perf_counter()
        with trace.host("norm", "norm"):
            update.norm = _norm(update) / update.loss_scale
        update.norm_known.set()
        normed = time.perf_counter()
        update.seconds = {"gradient_wait": arrived - started, "norm": normed - arrived}
        if update.skipped:
            return
        self._step(update)
        update.busy.append(("h2d", self.h2d.take_busy()))
        for ring in rings:
            update.busy += [("h2d", ring.h2d.take_busy()), ("d2h", ring.d2h.take_busy())]

    def _step(self, update: Update) -> None:
        """Both processors at once, each in forward order."""
        on_gpu = [item for item in update.layers if item[0].on_gpu]
        on_cpu = [item for item in update.layers if not item[0].on_gpu]
        queued = threading.Event()
        if on_gpu:
            self._queuing.jobs.put(partial(self._queue_on_gpu, update, on_gpu, queued))
        else:
            queued.set()
        began = time.perf_counter()
        try:
            self._step_on_cpu(update, on_cpu)
        finally:
            update.seconds["cpu_step"] = seconds = time.perf_counter() - began
            queued.wait()
        through_vram = [state.layer.numel for state, _, _ in on_gpu if state.passes]
        self.balancer.add(
            Took(seconds, sum(state.layer.numel for state, _, _ in on_cpu), update.gpu, sum(through_vram))
        )

    def _step_on_cpu(self, update: Update, layers: Sequence[Stepped]) -> None:
        self.h2d.wait(update.compute_done)
        scale = update.grad_scale()
        for index, (state, views, pending) in enumerate(layers):
            for coming, _, _ in layers[index + 1 : index + 1 + NUM_STATE_BUFFERS]:
                coming.prefetch()
            with trace.host("CPU step", state.layer.name, state.step_bytes):
                state.step(views, update.options, scale, self.h2d)
            pending.record(state.uploaded)

    def _queue_on_gpu(self, update: Update, layers: Sequence[Stepped], queued: threading.Event) -> None:
        """Layers whose states are in VRAM first: they wait for no bus."""
        try:
            self.kernels.wait(update.compute_done)
            scale, began = update.grad_scale(), self.kernels.record(timing=True)
            for state, views, pending in sorted(layers, key=lambda item: item[0].passes):
                with self.kernels.traced(state.layer.name):
                    state.step(views, update.options, scale, self.kernels)
                pending.record(state.uploaded)
            update.gpu = began, self.kernels.record(timing=True)
            busy = BusyTime()
            busy.add(*update.gpu)
            update.busy.append(("gpu_step", busy))
        finally:
            queued.set()


def _norm(update: Update) -> float:
    """sqrt of the block sums, added one after another in the model's parameter order."""
    for state, _, _ in update.layers:
        compute_host_sums(state.gradient)
    views = [(state.layer.views[index], state, index) for state, indices, _ in update.layers for index in indices]
    views.sort(key=lambda item: item[0].order)
    by_layer = {state: state.gradient.sums.numpy() for state, _, _ in update.layers}
    sums = [by_layer[state][state.gradient.blocks_of(index)] for _, state, index in views]
    total = sum_in_order(sums)
    if not math.isfinite(total):
        named = zip(views, sums, strict=True)
        update.nonfinite = [view.name for (view, _, _), part in named if not np.isfinite(part).all()]
    return math.sqrt(total) if total >= 0 else total
