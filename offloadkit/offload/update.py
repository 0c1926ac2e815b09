"""The update: one optimizer step on separate threads, between `step()` and the next forward's use of the new weights.

The stepping thread waits for the gradients, computes the norm, and steps the CPU's layers in forward order; each
layer's upload starts right after its step. Meanwhile a second thread queues the GPU's steps, because that takes Python
time while the C kernels release the GIL. `StepBalancer` shifts layers between CPU and GPU between updates.
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

from offloadkit.device import trace, watchdog
from offloadkit.device.streams import BusyTime, CopyStream, Event
from offloadkit.distributed.ranks import SOLO, Group, Loan, Ranks, Solo
from offloadkit.errors import ThreadLimitError
from offloadkit.facts.threads import Thread
from offloadkit.offload.layer_gradient import LayerGradient
from offloadkit.offload.states import LayerState, Publication
from offloadkit.offload.weights import PendingUpdate
from offloadkit.optim.norm import sum_in_order
from offloadkit.optim.table import Options
from offloadkit.planner import NUM_STATE_BUFFERS

LayerUpdate = tuple[LayerState, set[int], PendingUpdate]
"""A layer, the indices of its views that have a gradient, and the update that forward waits for."""


@dataclass
class Update:
    """One optimizer step.

    Attributes:
        layers: the layers to step, in this order; empty once `done` is set.
        compute_done: the compute stream's work at step(), before which weights in VRAM are not overwritten.
        loss_scale: the gradients are divided by it.
        scale_may_fall: the loss scale can still go down, so a non-finite norm is an overflow, not an error.
        norm: global gradient norm, valid once `norm_known` is set. If it is NaN or Inf, the step was skipped.
        seconds: wall seconds of the stepping thread, by phase; complete once `done` is set.
        busy: busy times of "h2d", "d2h" and "gpu_step"; complete once `done` is set.
        gpu: the events around the GPU's steps.
        cpu_bytes: memory traffic of the CPU's steps.
        received: several ranks: bytes of the "norm" all-reduce and of the updates of "matrices".
        loan: several ranks with matrices: the device's group, returned when all operations on matrices are queued.
        nonfinite: names of the parameters whose gradients were not finite.
    """

    number: int
    layers: list[LayerUpdate]
    options: Sequence[Options]
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
    cpu_bytes: int = 0
    received: dict[str, int] = field(default_factory=dict)
    loan: Loan | None = None
    nonfinite: list[str] = field(default_factory=list)

    @property
    def skipped(self) -> bool:
        """Valid once the norm is known."""
        return not math.isfinite(self.norm)

    def grad_scale(self) -> float:
        """Factor for the gradients: the coefficient of torch.nn.utils.clip_grad_norm_, divided by the loss scale."""
        clip = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (self.norm + 1e-6))
        return clip / self.loss_scale


class _Worker(Thread):
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
            except BaseException as error:  # raised in the engine's next call
                self._failed(error)
            del job  # it references layers, which may move before the next job arrives
            watchdog.progressed()

    def has_ended(self, seconds: float) -> bool:
        self.join(seconds)
        return not self.is_alive()


class StepThread:
    """The stepping thread and the thread that queues the GPU's steps.

    Jobs and updates run in order. After an exception, updates are no longer applied.

    Attributes:
        error: the first exception of either thread.
        gpu_worker: the thread that queues the GPU's steps.
    """

    def __init__(self, device: torch.device, ranks: Solo | Group = SOLO) -> None:
        """`ranks`: the ranks that sum the norm."""
        self._device, self._ranks = device, ranks
        self.h2d = CopyStream(device, "H2D")
        self.kernels = CopyStream(device, "step on the GPU", urgent=True)  # short kernels that copies wait for
        self.balancer = StepBalancer()
        self.error: BaseException | None = None
        self._worker = _Worker("offloadkit-step", device, self._failed)
        try:
            self.gpu_worker = _Worker("offloadkit-gpu-step", device, self._failed)
        except ThreadLimitError:
            self._worker.jobs.put(None)
            raise

    def _failed(self, error: BaseException) -> None:
        self.error = self.error or error

    def submit(self, job: Callable[[], None]) -> None:
        self._worker.jobs.put(job)

    def close(self) -> None:
        """Finish all jobs and end the threads."""
        self.submit(partial(self.gpu_worker.jobs.put, None))
        self._worker.jobs.put(None)
        if threading.current_thread() not in (self._worker, self.gpu_worker):  # a finalizer runs on any thread
            for worker in (self._worker, self.gpu_worker):
                watchdog.until(worker.has_ended, f"the thread {worker.name!r} to end")
        if self._device.type == "cuda":
            with watchdog.uninterruptible("the GPU's work"):
                torch.cuda.synchronize(self._device)  # wait: the GPU before the thread ends

    def settle(self) -> None:
        """Wait until all jobs are done, and reset the balancer's times."""
        done = threading.Event()
        self.submit(self.balancer.forget)
        self.submit(done.set)
        watchdog.wait(done, "the stepping thread")  # wait: jobs of the stepping thread

    def start(self, update: Update) -> None:
        """Queue an optimizer step."""
        if isinstance(self._ranks, Group) and any(state.exchanges_matrices for state, _, _ in update.layers):
            update.loan = self._ranks.lend()
        self.submit(partial(self._run_and_release, update))

    def finish(self, update: Update) -> None:
        """Wait until the update is done, and exclude it from the balancer."""
        watchdog.wait(update.done, f"the update of step {update.number}")  # wait: the newest update
        if not update.skipped:  # as a job: only the stepping thread may touch the balancer
            self.submit(self.balancer.disregard_newest)

    def _run_and_release(self, update: Update) -> None:
        """Run the update. If it fails, all its waiters are still woken up."""
        try:
            if self.error is None:
                self._run(update)
        except BaseException as error:  # must be set before waiters wake up, because they would read an invalid norm
            self._failed(error)
        finally:
            update.norm_known.set()
            if update.loan is not None and not update.loan.returned.is_set():
                update.loan.failed = self.error is not None or not update.skipped
                update.loan.returned.set()
            for _, _, pending in update.layers:
                if not pending.recorded.is_set():
                    pending.record(None)
            update.layers = []  # the layers may move while the update is still referenced
            update.done.set()

    def _run(self, update: Update) -> None:
        started = time.perf_counter()
        rings = {state.ring for state, _, _ in update.layers if state.ring is not None}
        for ring in rings:
            ring.forget_ahead()
        self.balancer.correct([state for state, _, _ in update.layers])
        for state, _, _ in sorted(update.layers, key=lambda item: not item[0].exchanges_matrices):  # in stepping order
            state.prefetch()
        for sent in {state.gradient.sent for state, _, _ in update.layers}:  # one event at the end of a window
            assert sent is not None
            sent.synchronize()
        for state, _, _ in update.layers:
            state.finish_reading()  # no rank steps before all ranks have the norm
        self._add_all_sums([state.gradient for state, _, _ in update.layers if state.gradient.all_sums])
        arrived = time.perf_counter()
        with trace.host("norm", "norm"):
            update.norm = gradient_norm(update, self._ranks) / update.loss_scale
        update.norm_known.set()
        normed = time.perf_counter()
        update.seconds = {"gradient_wait": arrived - started, "norm": normed - arrived}
        if update.skipped:
            return
        self._step(update)
        update.busy.append(("h2d", self.h2d.take_busy()))
        for ring in rings:
            update.busy += [("h2d", ring.h2d.take_busy()), ("d2h", ring.d2h.take_busy())]

    def _add_all_sums(self, layers: Sequence[LayerGradient]) -> None:
        """Several ranks: add up the accumulated gradients in shared RAM. `layers` are the same on all ranks.

        When the norm is known, all ranks have done so, and a rank may overwrite its gradients.
        """
        if layers:
            assert isinstance(self._ranks, Group)
            self._ranks.meet()
            for layer in layers:
                layer.add_all_sums()

    def _step(self, update: Update) -> None:
        on_gpu = [item for item in update.layers if item[0].on_gpu]
        on_cpu = [item for item in update.layers if not item[0].on_gpu]
        queued = threading.Event()
        if on_gpu:
            self.gpu_worker.jobs.put(partial(self._queue_on_gpu, update, on_gpu, queued))
        else:
            queued.set()
        began = time.perf_counter()
        try:
            self._step_on_cpu(update, on_cpu)
        finally:
            update.seconds["cpu_step"] = seconds = time.perf_counter() - began
            watchdog.wait(queued, "the GPU's steps to be queued")
        update.cpu_bytes = sum(state.step_bytes() for state, _, _ in on_cpu)
        through_vram = [state.layer.numel for state, _, _ in on_gpu if state.is_streamed]
        self.balancer.add(
            StepTimes(seconds, sum(state.layer.numel for state, _, _ in on_cpu), update.gpu, sum(through_vram))
        )

    def _step_on_cpu(self, update: Update, layers: Sequence[LayerUpdate]) -> None:
        self.h2d.wait(update.compute_done)  # wait: backward before the CPU's weights are uploaded
        scale = update.grad_scale()
        for index, (state, views, pending) in enumerate(layers):
            for coming, _, _ in layers[index + 1 : index + 1 + NUM_STATE_BUFFERS]:
                coming.prefetch()
            with trace.host("CPU step", state.layer.name, state.step_bytes):
                state.step(views, update.options, scale, self.h2d)
            watchdog.progressed()
            pending.record(state.uploaded)

    def _queue_on_gpu(self, update: Update, layers: Sequence[LayerUpdate], queued: threading.Event) -> None:
        """Queue the GPU's steps. Matrices that ranks exchange come first, in an order common to all ranks. Layers with
        states in VRAM come next, because they wait for no copy. But matrices take long: if they are stepped, states in
        RAM pass through VRAM between the steps of layers in VRAM.

        Several ranks with weights in RAM notify each other of finished layers.
        """
        coming: deque[Publication] = deque()

        def stepped(state: LayerState, pending: PendingUpdate) -> None:
            watchdog.progressed()
            pending.record(state.uploaded)
            if (posting := state.publication()) is not None:
                coming.append(posting)
            while coming and coming[0].done():
                coming.popleft().post()

        try:
            self.kernels.wait(update.compute_done)  # wait: backward before a step on the GPU
            scale, began = update.grad_scale(), self.kernels.record(timing=True)
            self._exchange_matrices(update, [item for item in layers if item[0].exchanges_matrices], stepped)
            others = [item for item in layers if not item[0].exchanges_matrices]
            in_vram = deque(item for item in others if not item[0].is_streamed)
            streamed = [item for item in others if item[0].is_streamed]
            num_in_vram, num_streamed = (sum(item[0].layer.numel for item in each) for each in (in_vram, streamed))
            num_stepped = num_passed = 0

            def step(state: LayerState, views: set[int], pending: PendingUpdate) -> None:
                with self.kernels.traced(state.layer.name):
                    state.step(views, update.options, scale, self.kernels, passed)
                stepped(state, pending)

            def passed(numel: int) -> None:
                nonlocal num_stepped, num_passed
                num_passed += numel
                while in_vram and num_stepped * num_streamed < num_passed * num_in_vram:
                    num_stepped += in_vram[0][0].layer.numel
                    step(*in_vram.popleft())

            if not any(state.layer.kind.step_unit == "matrix" for state, _, _ in others):
                passed(num_streamed)
            for item in streamed:
                step(*item)
            while in_vram:
                step(*in_vram.popleft())
            update.gpu = began, self.kernels.record(timing=True)
            busy = BusyTime()
            busy.add(*update.gpu)
            update.busy.append(("gpu_step", busy))
        except BaseException as error:
            self._failed(error)  # before the stepping thread goes on
            raise
        finally:
            queued.set()
        for posting in coming:
            posting.post()

    def _exchange_matrices(
        self,
        update: Update,
        layers: Sequence[LayerUpdate],
        stepped: Callable[[LayerState, PendingUpdate], None],
    ) -> None:
        """Queue the steps of matrices on several ranks; see `matrix_exchange`. A layer with states in RAM is applied at
        once, because it occupies one of three buffers.
        """
        scale, received = update.grad_scale(), 0

        def apply(at: int) -> None:
            state, _, pending = layers[at]
            state.apply_matrices(self.kernels)
            stepped(state, pending)

        for at in range(len(layers) + 2 if layers else 0):
            if at < len(layers):
                state, views, _ = layers[at]
                received += state.begin_matrices(views, update.options, scale, self.kernels)
            if 1 <= at <= len(layers):
                layers[at - 1][0].orthogonalize_matrices(self.kernels)
                if layers[at - 1][0].is_streamed:
                    apply(at - 1)
            if at >= 2 and not layers[at - 2][0].is_streamed:
                apply(at - 2)
        if update.loan is not None:
            update.received["matrices"] = received
            update.loan.returned.set()


def gradient_norm(update: Update, ranks: Ranks) -> float:
    """Global gradient norm: the root of the sum of all block sums, added in the model's parameter order.

    With several ranks, the block sums are all-reduced; a rank contributes zeros for blocks that another rank owns. If
    the norm is not finite, `update.nonfinite` gets the names of the parameters with non-finite gradients.
    """
    for state, _, _ in update.layers:
        state.gradient.compute_sums_on_host()
    views = [(state.layer.views[index], state, index) for state, indices, _ in update.layers for index in indices]
    views.sort(key=lambda item: item[0].order)
    by_layer = {state: state.gradient.sums.numpy() for state, _, _ in update.layers}
    sums = [state.gradient.sums_of(index, by_layer[state]) for _, state, index in views]
    if ranks.size > 1:
        together = np.concatenate([np.zeros(0), *sums])
        ranks.sum(together)
        update.received["norm"] = together.nbytes
        sums = np.split(together, np.cumsum([len(part) for part in sums])[:-1])
    total = sum_in_order(sums)
    if not math.isfinite(total):
        named = zip(views, sums, strict=True)
        update.nonfinite = [view.name for (view, _, _), part in named if not np.isfinite(part).all()]
    return math.sqrt(total) if total >= 0 else total


WARM_UP = 2
"""The first updates are ignored, because kernels are compiled, and pages and caches are cold."""
MAX_MOVES = 4
"""Maximum number of layers that move before one update."""
MAX_AVERAGED = 4
"""Maximum number of updates to average, all newer than the last move."""
MIN_GAIN = 0.02
"""Move layers only if the slower processor's time falls by more than this fraction."""
MIN_DIFFERENCE = 0.15
"""After a single update, move layers only if the times differ by this fraction of the longer one, due to noise."""


@dataclass(frozen=True)
class StepTimes:
    """Times of one update on both processors.

    Attributes:
        cpu_seconds: wall seconds of the CPU's steps, including waits.
        gpu: the events around the GPU's steps; None if it stepped nothing.
        gpu_numel: elements with states in RAM that the GPU stepped, through VRAM.
    """

    cpu_seconds: float
    cpu_numel: int
    gpu: tuple[Event, Event] | None
    gpu_numel: int


class StepBalancer:
    """Moves layers between CPU and GPU so that both finish an update at the same time.

    Attributes:
        unread: the times of updates that the GPU may not have finished.
    """

    def __init__(self) -> None:
        self.unread: deque[StepTimes] = deque()
        self._averaged: deque[tuple[float, float, float, float]] = deque(maxlen=MAX_AVERAGED)
        """(CPU seconds, CPU elements, GPU seconds, GPU elements) of each update."""
        self._num_updates = 0
        self._was_waited_for = self._earlier_was_waited_for = False

    def add(self, times: StepTimes) -> None:
        self._num_updates += 1
        self._was_waited_for, self._earlier_was_waited_for = False, self._was_waited_for
        if self._num_updates > WARM_UP:
            self.unread.append(times)

    def forget(self) -> None:
        self.unread.clear()
        self._averaged.clear()

    def disregard_newest(self) -> None:
        """Exclude the newest update, because the engine waited for it: without a concurrent forward, the GPU finished
        sooner than usual. If the engine waits for every update, updates do count.
        """
        if not self._was_waited_for and not self._earlier_was_waited_for and self.unread:
            self.unread.pop()
        self._was_waited_for = True

    def correct(self, layers: Sequence[LayerState]) -> None:
        """Before `layers` are stepped: move up to `MAX_MOVES` of them, if the finished updates predict a gain."""
        movable = [layer for layer in layers if layer.switchable]
        while self.unread:
            if (last := self.unread[0].gpu) is not None and not last[1].done():
                break  # the GPU may be a step behind Python
            times = self.unread.popleft()
            gpu = times.gpu[1].seconds_since(times.gpu[0]) if times.gpu else 0.0
            self._averaged.append((times.cpu_seconds, times.cpu_numel, gpu, times.gpu_numel))
        if not movable or not self._averaged:
            return
        num_averaged, columns = len(self._averaged), zip(*self._averaged, strict=True)
        cpu, cpu_numel, gpu, gpu_numel = (sum(column) / num_averaged for column in columns)
        if num_averaged == 1 and abs(cpu - gpu) < MIN_DIFFERENCE * max(cpu, gpu):
            return
        by_cpu, by_gpu = cpu / cpu_numel if cpu_numel else 0.0, gpu / gpu_numel if gpu_numel else 0.0
        rates = by_cpu or by_gpu, by_gpu or by_cpu  # assume equal speed for a processor that stepped nothing
        before, moved = max(cpu, gpu), list[LayerState]()
        while len(moved) < MAX_MOVES and (move := _best_move(movable, cpu, gpu, *rates)) is not None:
            layer, cpu, gpu = move
            layer.on_gpu = not layer.on_gpu
            moved.append(layer)
        if max(cpu, gpu) > (1 - MIN_GAIN) * before:
            for layer in moved:
                layer.on_gpu = not layer.on_gpu
        elif moved:
            self.unread.clear()  # these times belong to the old assignment
            self._averaged.clear()


def _best_move(
    layers: Sequence[LayerState], cpu: float, gpu: float, by_cpu: float, by_gpu: float
) -> tuple[LayerState, float, float] | None:
    """The layer whose move helps most (the last one in a tie), with the CPU's and GPU's seconds after it; or None.

    `cpu`, `gpu`: present seconds of the processors. `by_cpu`, `by_gpu`: seconds per element.
    """
    best, least = None, max(cpu, gpu)
    for layer in layers:
        if layer.on_gpu == (gpu > cpu):
            sign = 1 if layer.on_gpu else -1
            then = cpu + sign * layer.layer.numel * by_cpu, gpu - sign * layer.layer.numel * by_gpu
            if max(then) < least or (best is not None and max(then) == least):
                best, least = (layer, *then), max(then)
    return best
