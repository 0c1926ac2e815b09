"""Another plan in mid-training: after a full GPU, when RAM runs out, after the first window, and for measured rates.

No number changes in a move. Several ranks move together or not at all.
"""

from __future__ import annotations

import logging
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from offloadkit.checkpoint.values import random_states, set_random_states
from offloadkit.config import OffloadConfig
from offloadkit.device.process_memory import VramCap, forget_peak
from offloadkit.distributed.ranks import Group, Solo
from offloadkit.engine.loop import TrainingLoop
from offloadkit.errors import (
    EngineStateError,
    OffloadkitError,
    OutOfRamError,
    OutOfVramError,
    RepeatWindowError,
)
from offloadkit.offload.buffers import Buffers
from offloadkit.offload.layers import FlatLayer
from offloadkit.offload.rate_watch import RateWatch
from offloadkit.offload.shortage import (
    RamWatch,
    explained_shortage,
    full_gpu,
    moved_in_words,
    room,
    with_less_ram,
    with_less_vram,
    with_less_vram_at_rest,
)
from offloadkit.offload.states import LayerState
from offloadkit.optim.torch_optimizer import OffloadOptimizer
from offloadkit.outline import FirstWindow
from offloadkit.planner import Plan, placed
from offloadkit.planner.plan import of_rank
from offloadkit.telemetry import Move, Telemetry
from offloadkit.units import format_seconds

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def own_part(plan: Plan, layers: Sequence[FlatLayer], ranks: Solo | Group) -> Plan:
    """`plan` with what this rank has of each layer."""
    return plan if ranks.size == 1 else of_rank(plan, [layer.shape() for layer in layers])


def connect(plan: Plan, ranks: Solo | Group) -> None:
    """Connect the ranks' GPUs as `plan` has it."""
    ranks.connect(plan.basis.hardware.most_ctas if plan.basis.hardware else 0)


@dataclass(frozen=True)
class Boundary:
    """What is known where an accumulation window ends, before its update starts.

    Attributes:
        order: of the layers, as the ranks step them; None with one rank: the order of forward.
        scarce: what was seen of RAM that runs out on this rank, in words.
        scarce_on: the ranks where RAM is running out.
        leaner: with one rank where RAM is scarce: the plan with less in RAM.
        rates_are_due: whether all ranks have measured enough steps.
    """

    order: Sequence[LayerState] | None
    scarce: str | None
    scarce_on: Sequence[int]
    leaner: Plan | None
    rates_are_due: bool


class Replanner:
    """Decides when training goes on by another plan, and moves the model there.

    Attributes:
        plan: the present one.
        rate_watch: compares the rates of steps with the planned ones.
        first_window: what plans for the first window's micro-batches when that has ended; None if nothing is to choose.
        is_lost: whether a move failed so that training cannot go on. The engine closes then; the model has its weights.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        optimizer: OffloadOptimizer,
        layers: Sequence[FlatLayer],
        config: OffloadConfig,
        device: torch.device,
        ranks: Solo | Group,
        telemetry: Telemetry,
        *,
        first_window: FirstWindow | None,
        ram_watch: RamWatch,
        rate_watch: RateWatch,
        vram_cap: VramCap,
    ) -> None:
        self.plan, self.first_window, self.is_lost = loop.placed.plan, first_window, False
        self._loop, self._optimizer, self._layers, self._config = loop, optimizer, layers, config
        self._device, self._ranks, self._telemetry = device, ranks, telemetry
        self._ram_watch, self.rate_watch, self._vram_cap = ram_watch, rate_watch, vram_cap

    # ---- where a step may stop, in time order -------------------------------------------------------------------

    @contextmanager
    def recover_from_oom(self) -> Iterator[None]:
        """A context in which a full GPU makes the engine move to a leaner plan. It spans a micro-batch at most.

        With several ranks, this one computes nothing more in the window, and takes part in what the others wait for
        until all agree that it is void.

        Raises:
            RepeatWindowError: it did so. The gradients since the last update were dropped.
            OutOfVramError: no leaner plan is left, or the move failed. The gradients were dropped too.
        """
        num_backwards = self._loop.num_backwards
        alone = self._ranks.size == 1
        try:
            with explained_shortage(self.plan, self._device, self._loop.drop_gradients if alone else lambda: None):
                yield
        except RepeatWindowError:
            raise
        except OutOfVramError as error:
            if error.is_final or self.is_lost:  # an inner one could not make room
                raise
            traceback.clear_frames(error.__traceback__)  # the failed window must not hold its activations any more
            if alone:
                raise self._leave_vram(error, "the GPU's memory was full") from error.__cause__
            full = self._void_window(error, has_joined=self._loop.num_backwards > num_backwards)
            raise self._repeat_together(full, error) from error.__cause__

    def saw(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A micro-batch has passed forward: in the first window its shapes are what will be planned for."""
        if self.first_window is not None:
            self.first_window.saw(args, kwargs)

    def before_backward(self, loss: torch.Tensor) -> None:
        """Several ranks that exchange in the window's last micro-batch know before it whether one of them is full."""
        if self._exchanges_last and self._loop.num_backwards + 1 == self._config.gradient_accumulation:
            self._check_whole(loss)
            self._loop.in_last = True

    def after_backward(self) -> None:
        """Several ranks that exchange in each micro-batch know after it whether one of them is full."""
        if self._exchanges_each:
            self._check_whole()

    def check_memory(self) -> tuple[str | None, Plan | None]:
        """Where RAM is scarce: what was seen, and with one rank the plan with less RAM.

        Raises:
            OutOfRamError: no plan takes less.
        """
        self._vram_cap.renew("training")
        scarce, leaner = self._ram_watch.warning(), None
        if scarce is not None and self._ranks.size == 1:
            leaner = with_less_ram(self.plan, self._device)
            if leaner is None:
                raise OutOfRamError(scarce)
        return scarce, leaner

    def agree(self, shortage: tuple[str | None, Plan | None]) -> Boundary:
        """What all ranks do at this boundary. `shortage` is what `check_memory` gave.

        Raises:
            RepeatWindowError: a rank's GPU was full in this window, and all have moved to a leaner plan.
            OutOfVramError: so it was, and all stay where they are.
            EngineStateError: the ranks have gone apart.
        """
        scarce, leaner = shortage
        if self._ranks.size == 1:
            return Boundary(None, scarce, (), leaner, self._rates_are_due)
        if self._exchanges_last and not self._loop.in_last:
            self._check_whole()
        window = self._loop.num_updates, self._loop.num_backwards
        try:
            wishes = False, scarce is not None, self._rates_are_due
            wished, order = self._loop.placed.agree(self._ranks, window, wishes)
        except BaseException:
            self._loop.drop_gradients()
            raise
        full, is_scarce, due = wished.astype(bool).T
        if full.any():
            raise self._repeat_together(full)
        return Boundary(order, scarce, np.flatnonzero(is_scarce).tolist(), None, bool(due.all()))

    def recover_at_boundary(self) -> AbstractContextManager[None]:
        """As `recover_from_oom`, while an update is started.

        With several ranks the others step already: who is full here cannot have them repeat the window.
        """
        if self._ranks.size == 1:
            return self.recover_from_oom()
        return explained_shortage(self.plan, self._device, self._loop.drop_gradients)

    def after_update(self, boundary: Boundary) -> None:
        """The update was started: move if RAM is scarce, after the first window, or if measured rates say so.

        Raises:
            OutOfRamError: RAM is scarce, and the move to a plan with less failed, or several ranks have no such plan.
            DoesNotFitError: there is no GPU, and a budget is too small for the first window's micro-batches.
        """
        if boundary.scarce_on:
            self._leave_ram_together(boundary.scarce_on, boundary.scarce)
        elif boundary.leaner is not None:
            self._leave_ram(boundary.leaner, boundary.scarce)
        elif self.first_window is not None:
            self._move_after(self.first_window)
        elif boundary.rates_are_due:
            self._move_for_rates()

    def run_eval(self, run: Callable[[], _T]) -> _T:
        """What `run()` gives, repeated by leaner plans while the GPU is full. See `OffloadEngine.evaluates`."""
        states, buffers, module = random_states(), Buffers(), self._loop.placed.module
        if module.training:
            buffers.keep(module)
        while True:
            try:
                with explained_shortage(self.plan, self._device):
                    found = run()
            except OutOfVramError as error:
                said = not isinstance(error.__cause__, torch.OutOfMemoryError)  # why it cannot go on, by a call within
                if said or self.is_lost or isinstance(error, RepeatWindowError):
                    raise
                traceback.clear_frames(error.__traceback__)  # what failed must not hold its activations any more
                self._leave_vram_at_rest(error)
                buffers.restore()
                set_random_states(states)
            except BaseException:
                if not self.is_lost:
                    self._loop.placed.end_modules()
                raise
            else:
                self._vram_cap.renew("evaluation")
                return found

    # ---- several ranks, one of which is full ---------------------------------------------------------------------

    @property
    def _rates_are_due(self) -> bool:
        return self.rate_watch.is_due and self._loop.profile is None

    @property
    def _exchanges_each(self) -> bool:
        """Whether several ranks exchange gradients in each of a window's micro-batches: they agree after each then."""
        return self._accumulates_on_ranks and self._config.exchange == "micro_batch"

    @property
    def _exchanges_last(self) -> bool:
        """Whether they do in the last one only: they agree before it, or where the window ends sooner."""
        return self._accumulates_on_ranks and self._config.exchange == "step"

    @property
    def _accumulates_on_ranks(self) -> bool:
        return self._ranks.size > 1 and self._config.gradient_accumulation > 1

    def _who_is_full(self, *, am_full: bool) -> NDArray[np.bool_]:
        """Whether each rank's GPU is full: [ranks]. All ranks come here together."""
        return self._ranks.agree(np.array([int(am_full)]))[:, 0].astype(bool)

    def _check_whole(self, loss: torch.Tensor | None = None) -> None:
        """Several ranks come here together, and know then whether one of them is full and waits here.

        loss: of a micro-batch that no backward follows if one is.

        Raises:
            OutOfVramError: one is; a `RepeatWindowError` if all have moved to a leaner plan.
        """
        full = self._who_is_full(am_full=False)
        if full.any():
            if loss is not None:
                with suppress(RuntimeError):  # a view of a larger tensor
                    loss.detach_()
            raise self._repeat_together(full)

    def _void_window(self, error: OutOfVramError, *, has_joined: bool) -> NDArray[np.bool_]:
        """This rank cannot finish the window: wait until all ranks know that. Returns which of them cannot.

        Args:
            has_joined: whether it has finished the backward of this micro-batch.

        Raises:
            OutOfVramError: it cannot know what the others do next.
        """
        loop = self._loop
        if not has_joined:
            loop.placed.gradients.ends_window = loop.in_last
            with explained_shortage(self.plan, self._device):
                loop.placed.join_rest()
        loop.settle()
        if self._exchanges_last and not loop.in_last:
            return self._who_is_full(am_full=True)
        if not self._exchanges_each:
            window = loop.num_updates, loop.num_backwards
            return loop.placed.agree(self._ranks, window, (True, False, False))[0][:, 0].astype(bool)
        if has_joined:  # another micro-batch may come, or the end of the window
            loop.drop_gradients()
            error.is_final = True
            raise error
        return self._who_is_full(am_full=True)

    def _repeat_together(self, full: NDArray[np.bool_], error: OutOfVramError | None = None) -> OutOfVramError:
        """All ranks know that the window is void: drop it and move; returns the error to raise.

        Args:
            full: whether each rank's GPU is full: [ranks].
            error: this rank's, if its GPU is.
        """
        self._loop.drop_gradients()
        self._loop.settle()  # the stepping thread talks to the other ranks until then
        said = f"the memory of rank {int(full.argmax())}'s GPU was full"
        return self._leave_vram(error or OutOfVramError(f"{said}: its error says more"), said)

    # ---- to which plan, and why ----------------------------------------------------------------------------------

    def _leave_vram(self, error: OutOfVramError, why: str) -> OutOfVramError:
        """Move to a plan with less VRAM; returns the error to raise."""
        plan, full = with_less_vram(self.plan, self._device, self._ranks), full_gpu(self.plan, self._device)
        error.is_final = True
        if plan is None:
            return error
        try:
            words = self._move_with_a_warning(plan, why, stacklevel=6)
        except OffloadkitError as failure:
            failed = OutOfVramError(f"{error}. The move to a leaner plan failed: {failure}")
            failed.is_final = True
            return failed
        if self._ranks.size > 1:
            full = why
        return RepeatWindowError(
            f"{full}. The engine has moved to a leaner plan ({words}), which changes no number. The gradients since "
            "the last update were dropped: repeat this window, from its first micro-batch and with the random states "
            "that it had, and training goes on as if nothing had been"
        )

    def _leave_vram_at_rest(self, error: OutOfVramError) -> None:
        """Move to a plan with less VRAM, between windows.

        Raises:
            OutOfVramError: `error`, with why there is no such move.
        """
        if self._loop.num_backwards or self._loop.has_graph or self._loop.placed.is_busy:
            raise OutOfVramError(
                f"{error}. An accumulation window is under way, in which nothing can move: evaluate and generate after "
                "the step() that ends it, and the engine makes room"
            ) from error
        plan = with_less_vram_at_rest(self.plan, self._device) if self._ranks.size == 1 else None
        if plan is None:
            raise error
        try:
            self._move_with_a_warning(plan, "the GPU's memory was full in an evaluation", stacklevel=7)
        except OffloadkitError as why:
            raise OutOfVramError(f"{error}. The move to a leaner plan failed: {why}") from error

    def _leave_ram_together(self, ranks: Sequence[int], scarce: str | None) -> None:
        """Several ranks move to a plan with less RAM, since it is scarce on some of them.

        Raises:
            OutOfRamError: no plan takes less, or the move failed.
        """
        self._loop.settle()  # the stepping thread talks to the other ranks until then
        scarce = scarce or f"RAM is running out on rank {ranks[0]}, whose error says more"
        plan = with_less_ram(self.plan, self._device, self._ranks)
        if plan is None:
            raise OutOfRamError(scarce)
        self._leave_ram(plan, scarce)

    def _leave_ram(self, plan: Plan, scarce: str | None) -> None:
        """Move to a plan with less RAM.

        Raises:
            OutOfRamError: the move failed.
        """
        try:
            self._move_with_a_warning(plan, "RAM was running out", stacklevel=5)
        except OffloadkitError as error:
            raise OutOfRamError(f"{scarce}. The move to a plan with less RAM failed: {error}") from error

    def _move_after(self, first: FirstWindow) -> None:
        """Move to the plan for what the first window brought. Training goes on as it began if that cannot be.

        Raises:
            DoesNotFitError: there is no GPU, and a budget is too small for it; so it is after every further window.
        """
        if self._ranks.size > 1:
            self._loop.settle()  # the stepping thread talks to the other ranks until then
        plan = first.plan_now()
        self.first_window = None
        if plan is None:
            return
        try:
            self.move(plan, "the first window was done, and its micro-batches are planned for")
        except OffloadkitError as error:
            if self.is_lost:
                raise
            logger.warning(f"training goes on as it began, not as planned for its micro-batches: {error}")

    def _move_for_rates(self) -> None:
        """Move where measured rates say that another plan is faster. Training goes on as it is if that cannot be."""
        if self._ranks.size > 1:
            self._loop.settle()  # the stepping thread talks to the other ranks until then
        assigned = self._loop.placed.assigned
        found = self.rate_watch.judge(assigned, lambda: room(self.plan, self._device), self._ranks)
        if found is None:
            return
        try:
            self._move_with_a_warning(*found, stacklevel=5)
        except OffloadkitError as error:
            if self.is_lost:
                raise
            logger.warning(f"{found[1]}, and a faster plan was found, but the move to it failed: {error}")

    # ---- moving --------------------------------------------------------------------------------------------------

    def _move_with_a_warning(self, plan: Plan, why: str, *, stacklevel: int) -> str:
        """`move`, and a line that says so; returns what changed, in words."""
        before = self.plan
        self.move(plan, why)
        words, seconds = moved_in_words(before, plan), format_seconds(self._telemetry.moves[-1].seconds)
        message = f"{why} after step {self._loop.num_updates}: the plan has moved in {seconds} ({words})"
        warnings.warn(message, RuntimeWarning, stacklevel=stacklevel)
        return words

    def move(self, plan: Plan, why: str) -> None:
        """Go on by another plan, where no gradients are gathered. See `OffloadEngine.move` for what it raises."""
        began, before, plan = time.perf_counter(), self.plan, own_part(plan, self._layers, self._ranks)
        loop = self._loop
        loop.settle()
        loop.step_thread.settle()
        loop.placed.take_over_outside_writes()
        with self._ranks.together("beginning to move"):
            loop.placed.check_movable(plan.placements)
        try:
            connect(plan, self._ranks)
        except BaseException:
            self.is_lost = True  # nothing can go between the ranks any more
            raise
        try:
            with explained_shortage(plan, self._device), torch.inference_mode(False), torch.no_grad():
                loop.placed.move(plan.placements, self._has_moved)
        except BaseException as error:
            if not loop.placed.is_whole:
                self.is_lost = True
                if not isinstance(error, Exception):
                    raise  # an interrupt
                alone = self._ranks.size == 1
                apart = "and so did going on with what had moved" if alone else "on this rank or another"
                raise EngineStateError(
                    f"a move failed, {apart}: the engine is closed, and the model has its weights; the optimizer's "
                    f"states are gone. Go on from a checkpoint ({error})"
                ) from error
            plan = placed(before, loop.placed.placements)
            raise
        finally:
            if not self.is_lost:
                self.plan = loop.records.plan = self._telemetry.plan = plan
                self._ram_watch.expect(plan.tiers["ram"])
                self.rate_watch.begin(plan)
        seconds = time.perf_counter() - began
        self._vram_cap.watch()
        forget_peak(self._device)  # it was the other plan's: a GPU that is full again is explained by this one's
        old, new = ({tier: each.total_bytes(tier) for tier in each.tiers} for each in (before, plan))
        self._telemetry.moves.append(Move(loop.num_updates, why, old, new, seconds))

    def _has_moved(self, state: LayerState) -> None:
        for at, view in enumerate(state.layer.views):
            self._optimizer.state[view.parameter].update(state.state_of(at))
