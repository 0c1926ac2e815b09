"""The update: what happens between `step()` and the next forward, on a thread of its own.

The stepping thread waits for the gradients' events, knows the norm, steps the layers in forward order and sends each
one's new weights to the device as soon as it is stepped. The main thread never waits here; forward does, by layer.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from offloadkit.offload.gradients import take_sums
from offloadkit.offload.states import GroupOptions, LayerState
from offloadkit.offload.streams import BusyTime, CopyStream, Event
from offloadkit.offload.weights import PendingUpdate
from offloadkit.optim.gradient_norm import sum_in_order
from offloadkit.plan import NUM_STATE_BUFFERS


@dataclass
class Update:
    """One optimizer step on its way.

    Attributes:
        layers: the layers to step, in that order, each with the slots that have a gradient.
        compute_done: the compute stream's work at step(); the device's weights are not overwritten before it.
        loss_scale: what the gradients are to be divided by.
        scale_may_fall: a norm that is not finite may be an overflow, after which the scale goes down: no error.
        norm: global gradient norm, once `norm_known` is set; NaN or Inf: the step was skipped.
        seconds: wall seconds of the stepping thread, by phase; complete once `done` is set.
        h2d: copies of stepped weights; complete then too.
    """

    number: int
    layers: list[tuple[LayerState, set[int], PendingUpdate]]
    options: Sequence[GroupOptions]
    max_grad_norm: float | None
    compute_done: Event
    loss_scale: float = 1.0
    scale_may_fall: bool = False
    norm: float = math.nan
    norm_known: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    seconds: dict[str, float] = field(default_factory=dict)
    h2d: BusyTime = field(default_factory=BusyTime)
    nonfinite: list[str] = field(default_factory=list)

    @property
    def skipped(self) -> bool:
        """Whether the gradients were not finite; valid once the norm is known."""
        return not math.isfinite(self.norm)

    def grad_scale(self) -> float:
        """The clip coefficient, as torch.nn.utils.clip_grad_norm_ defines it, over the loss scale."""
        clip = 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (self.norm + 1e-6))
        return clip / self.loss_scale


class StepThread:
    """Runs jobs one after the other on one thread; after an exception no more updates are made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.h2d = CopyStream(device)
        self.error: BaseException | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="offloadkit-step", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after those submitted before."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:  # the garbage collector runs on any thread
            self._thread.join()
        self.h2d.synchronize()

    def _work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # shown to the caller at its next call
                self.error = self.error or error

    def start(self, update: Update) -> None:
        """Queue an optimizer step."""
        self.submit(partial(self._make, update))

    def _make(self, update: Update) -> None:
        """Whatever happens, nobody is left waiting for the update."""
        try:
            if self.error is None:
                run(update, self.h2d)
        finally:
            update.norm_known.set()
            for _, _, pending in update.layers:
                if not pending.recorded.is_set():
                    pending.record(None)
            update.done.set()


def run(update: Update, h2d: CopyStream) -> None:
    """Wait for the gradients, take the norm, step every layer and send its weights."""
    started = time.perf_counter()
    for state, _, _ in update.layers:
        state.prefetch()
    for state, _, _ in update.layers:
        assert state.gradient.sent is not None
        state.gradient.sent.synchronize()
    arrived = time.perf_counter()
    update.norm = _norm(update) / update.loss_scale
    update.norm_known.set()
    normed = time.perf_counter()
    update.seconds = {"gradient_wait": arrived - started, "norm": normed - arrived}
    if update.skipped:
        return
    h2d.wait(update.compute_done)
    scale = update.grad_scale()
    for index, (state, slots, pending) in enumerate(update.layers):
        for coming, _, _ in update.layers[index + 1 : index + 1 + NUM_STATE_BUFFERS]:
            coming.prefetch()
        state.step(slots, update.options, scale, h2d)
        pending.record(state.uploaded)
    update.seconds["cpu_step"] = time.perf_counter() - normed
    update.h2d = h2d.take_busy()


def _norm(update: Update) -> float:
    """sqrt of the block sums, added one after another in the model's parameter order."""
    for state, _, _ in update.layers:
        take_sums(state.gradient)
    slots = [(state.layer.slots[index], state, index) for state, indices, _ in update.layers for index in indices]
    slots.sort(key=lambda item: item[0].order)
    sums = [state.gradient.slot_sums(index) for _, state, index in slots]
    total = sum_in_order(sums)
    if not math.isfinite(total):
        bad = [slot.name for (slot, _, _), part in zip(slots, sums, strict=True) if not part.isfinite().all()]
        update.nonfinite = bad
    return math.sqrt(total) if total >= 0 else total
