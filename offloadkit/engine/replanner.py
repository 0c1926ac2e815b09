"""Changes of plan during training: OOM recovery, scarce RAM, the end of the first window, measured rates.

A move changes no number. Several ranks move together or not at all.
"""

from __future__ import annotations

import gc
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from offloadkit.checkpoint.values import random_states, set_random_states
from offloadkit.device.process_memory import VramCap, forget_peak
from offloadkit.distributed.ranks import SOLO, Group, Ranks, Solo
from offloadkit.engine.agreement import RankFlags, agree
from offloadkit.engine.loop import TrainingLoop
from offloadkit.engine.outline import FirstWindow
from offloadkit.engine.start import connect, plan_of_rank
from offloadkit.errors import (
    EngineStateError,
    OffloadkitError,
    OutOfRamError,
    OutOfVramError,
    RepeatWindowError,
)
from offloadkit.facts.config import OffloadConfig
from offloadkit.facts.telemetry import Move, Telemetry
from offloadkit.facts.units import format_seconds, parse_bytes
from offloadkit.offload.buffers import Buffers
from offloadkit.offload.layers import FlatLayer
from offloadkit.offload.rate_watch import RateWatch
from offloadkit.offload.shortage import (
    RamWatch,
    explained_shortage,
    forget_frames,
    full_gpu,
    move_summary,
    room,
    with_less_ram,
    with_less_vram,
    with_less_vram_at_rest,
)
from offloadkit.offload.states import LayerState
from offloadkit.optim.torch_optimizer import OffloadOptimizer
from offloadkit.planner import Plan, placed
from offloadkit.planner.make import generating_in_vram, never_cheap, without_graphs

logger = logging.getLogger(__name__)

_REPEAT = (
    "The gradients since the last update were dropped: repeat this window, from its first micro-batch and with its "
    "original random states, and training continues with the same numbers"
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Watches:
    """Measurements that tell when to change the plan: of free RAM, rates, and VRAM."""

    ram: RamWatch
    rates: RateWatch
    vram_cap: VramCap

    @classmethod
    def start(
        cls, plan: Plan, config: OffloadConfig, device: torch.device, telemetry: Telemetry, undo: ExitStack
    ) -> Watches:
        """undo: receives the callbacks that end them."""
        ram, rates = RamWatch(plan.tiers["ram"]), RateWatch(plan)
        undo.callback(ram.close)
        undo.callback(telemetry.subscribe(rates.add))
        vram_cap = VramCap(None if config.vram is None else parse_bytes(config.vram), device)
        undo.callback(vram_cap.remove)
        return cls(ram, rates, vram_cap)


@dataclass(frozen=True)
class RamShortage:
    """RAM that is running out on this rank.

    Attributes:
        warning: a sentence for the user.
        leaner: the plan with less in RAM; None with several ranks, which look for it together after the update.
    """

    warning: str
    leaner: Plan | None


@dataclass(frozen=True)
class Boundary:
    """Facts known at the end of an accumulation window, before its update starts.

    Attributes:
        order: the layers in the ranks' stepping order; None at world size 1: forward order.
        shortage: of RAM on this rank, or None.
        scarce_on: the ranks whose RAM is running out; empty at world size 1.
        rates_are_due: all ranks have measured enough steps.
        has_unlike: a rank has "cheap" blocks whose second run had other matmuls.
    """

    order: Sequence[LayerState] | None
    shortage: RamShortage | None
    scarce_on: Sequence[int]
    rates_are_due: bool
    has_unlike: bool


class Replanner:
    """Decides when to change the plan, and moves the model.

    Attributes:
        first_window: plans for the first window's micro-batches at its end; None afterwards, or if all is fixed.
        is_lost: a move failed so that training cannot go on. The engine then closes; the model keeps its weights.
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
        watches: Watches,
    ) -> None:
        self.plan, self.first_window, self.is_lost = loop.placed.plan, first_window, False
        self._loop, self._optimizer, self._layers, self._config = loop, optimizer, layers, config
        self._device, self._ranks, self._telemetry = device, ranks, telemetry
        self._watches = watches
        self._cache_bytes, self._generates, self._num_shortages = 0, False, 0

    # ---- the steps of a window, in time order -------------------------------------------------------------------

    @contextmanager
    def recover_from_oom(self) -> Iterator[None]:
        """See `OffloadEngine.recover_from_oom`.

        With several ranks, this rank computes nothing more in the window, but takes part in the collectives of the
        other ranks until all agree to drop the window.
        """
        num_backwards = self._loop.num_backwards
        alone = self._ranks.size == 1
        try:
            with explained_shortage(self.plan, self._device, self._loop.drop_gradients if alone else lambda: None):
                yield
        except RepeatWindowError:
            raise
        except OutOfVramError as error:
            if error.is_final or self.is_lost:  # a nested context could not recover
                raise
            forget_frames(error)  # releases the activations of the failed window
            if alone:
                raise self._leave_vram(error, "the GPU's memory was full") from error.__cause__
            full = self._void_window(error, has_joined=self._loop.num_backwards > num_backwards)
            raise self._repeat_together(full, error) from error.__cause__

    def record_micro_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the shapes of a micro-batch that passed forward in the first window."""
        if self.first_window is not None:
            self.first_window.record_micro_batch(args, kwargs)

    def before_backward(self, loss: torch.Tensor) -> None:
        """Before the window's last micro-batch: agree whether a rank is out of memory, if only this one exchanges
        gradients.
        """
        if self._exchanges_last and self._loop.num_backwards + 1 == self._config.gradient_accumulation:
            self._check_whole(loss)
            self._loop.in_last = True

    def after_backward(self) -> None:
        """After a micro-batch: agree whether a rank is out of memory, if every micro-batch exchanges gradients."""
        if self._exchanges_each:
            self._check_whole()

    def check_memory(self) -> RamShortage | None:
        """Check whether RAM is running out on this rank. Raises `OutOfRamError` at world size 1 if no plan takes
        less.
        """
        self._watches.vram_cap.renew("training")
        warning = self._watches.ram.warning()
        if warning is None:
            return None
        leaner = with_less_ram(self.plan, self._device) if self._ranks.size == 1 else None
        if leaner is None and self._ranks.size == 1:
            raise OutOfRamError(warning)
        return RamShortage(warning, leaner)

    def agree(self, shortage: RamShortage | None) -> Boundary:
        """A collective: agree on the actions at this boundary.

        Raises:
            RepeatWindowError: a rank's GPU was full in this window, and all ranks have moved to a leaner plan.
            OutOfVramError: a rank's GPU was full, and no rank has moved.
            EngineStateError: the ranks are at different steps.
        """
        if self._ranks.size == 1:
            return Boundary(None, shortage, (), self._rates_are_due, bool(self._loop.placed.unlike))
        if self._exchanges_last and not self._loop.in_last:
            self._check_whole()
        window = self._loop.num_updates, self._loop.num_backwards
        try:
            flags = RankFlags(
                ram_is_scarce=shortage is not None,
                rates_are_due=self._rates_are_due,
                has_unlike=bool(self._loop.placed.unlike),
            )
            agreed = agree(self._loop.placed, self._ranks, window, flags)
        except BaseException:
            self._loop.drop_gradients()
            raise
        if agreed.full.any():
            raise self._repeat_together(agreed.full)
        scarce_on = np.flatnonzero(agreed.scarce).tolist()
        return Boundary(agreed.order, shortage, scarce_on, bool(agreed.due.all()), bool(agreed.unlike.any()))

    def recover_at_boundary(self) -> AbstractContextManager[None]:
        """`recover_from_oom` for the start of an update, but several ranks cannot recover, because other ranks are
        already stepping.
        """
        if self._ranks.size == 1:
            return self.recover_from_oom()
        return explained_shortage(self.plan, self._device, self._loop.drop_gradients)

    def after_update(self, boundary: Boundary) -> None:
        """After the start of an update: move if RAM is scarce, if blocks cannot be recomputed cheaply, after the first
        window, or if measured rates say so. The plan of one rank that gave up graphs has eager blocks from then on.

        Raises:
            OutOfRamError: RAM is scarce, and the move failed, or several ranks have no leaner plan.
            DoesNotFitError: there is no GPU, and a budget is too small for the first window's micro-batches.
        """
        if boundary.scarce_on:
            self._leave_ram_together(boundary.scarce_on, boundary.shortage)
        elif boundary.shortage is not None and boundary.shortage.leaner is not None:
            self._leave_ram(boundary.shortage.leaner, boundary.shortage.warning)
        elif boundary.has_unlike:
            self._leave_cheap()
        elif self.first_window is not None:
            self._move_after(self.first_window)
        elif self._ranks.size == 1 and self.plan.is_graphed and self._loop.placed.gave_up_graphs:
            self._plan_eager_blocks()
        elif boundary.rates_are_due:
            self._move_for_rates()

    def run_eval(self, run: Callable[[], _T], *, together: bool = False) -> _T:
        """See `OffloadEngine.run_eval`."""
        states, buffers, placed = random_states(), Buffers(), self._loop.placed
        ranks = self._ranks if together else SOLO
        placed.release_graphs()
        if placed.module.training:
            buffers.keep(placed.module)
        found: list[_T] = []
        while True:
            error = None
            try:
                if not found:
                    with explained_shortage(self.plan, self._device):
                        found.append(run())
            except OutOfVramError as full:
                if not self.is_lost:
                    placed.end_modules()
                said = not isinstance(full.__cause__, torch.OutOfMemoryError)  # `run` has explained the error
                if said or self.is_lost or isinstance(full, RepeatWindowError):
                    raise
                forget_frames(full)  # releases the activations of the failed run
                error = full
            except BaseException:
                if not self.is_lost:
                    placed.end_modules()
                raise
            are_full = ranks.agree(np.array([int(error is not None)]))[:, 0]
            if not are_full.any():
                self._watches.vram_cap.renew("evaluation")
                return found[0]
            self._leave_vram_at_rest(error, ranks, int(are_full.argmax()))
            if error is not None:
                buffers.restore()
                set_random_states(states)

    def note_generation(self, cache_bytes: int, *, in_training: bool) -> None:
        """Count the keys and values of a generation in the plan, if no earlier one had as many. In training on one
        rank, move to a plan that leaves room for all weights beside them, if there is one.
        """
        in_training = in_training and self._ranks.size == 1
        if cache_bytes <= self._cache_bytes and (self._generates or not in_training):
            return
        self._cache_bytes, self._generates = max(cache_bytes, self._cache_bytes), self._generates or in_training
        self.plan = self._loop.records.plan = self._telemetry.plan = self._with_generation(self.plan)
        if not in_training or self.first_window is not None or self._is_inside_a_window:
            return
        if (found := generating_in_vram(self.plan)) is None:
            return
        why = "text is generated with all weights in VRAM"
        try:
            self._move_with_a_warning(found, why, stacklevel=6)
        except OffloadkitError as error:
            if self.is_lost:
                raise
            logger.warning(f"{why}, and a plan with room for them was found, but the move to it failed: {error}")

    @property
    def _is_inside_a_window(self) -> bool:
        return bool(self._loop.num_backwards or self._loop.has_graph or self._loop.placed.is_busy)

    def _with_generation(self, plan: Plan) -> Plan:
        if not self._cache_bytes:
            return plan
        known = replace(plan.basis, cache_bytes=self._cache_bytes, generates=self._generates)
        return replace(plan, basis=known)

    # ---- OOM with several ranks ----------------------------------------------------------------------------------

    @property
    def _rates_are_due(self) -> bool:
        return self._watches.rates.is_due and self._loop.profile is None

    @property
    def _exchanges_each(self) -> bool:
        return self._accumulates_on_ranks and self._config.exchange == "micro_batch"

    @property
    def _exchanges_last(self) -> bool:
        return self._accumulates_on_ranks and self._config.exchange == "step"

    @property
    def _accumulates_on_ranks(self) -> bool:
        return self._ranks.size > 1 and self._config.gradient_accumulation > 1

    def _who_is_full(self, *, am_full: bool) -> NDArray[np.bool_]:
        """A collective: whether each rank's GPU is full, [ranks]."""
        return self._ranks.agree(np.array([int(am_full)]))[:, 0].astype(bool)

    def _check_whole(self, loss: torch.Tensor | None = None) -> None:
        """A collective: check whether a rank is out of memory and waits in `_who_is_full`.

        The graph of `loss` is forgotten if so, because no backward follows.

        Raises:
            OutOfVramError: a rank is; a `RepeatWindowError` if all ranks have moved to a leaner plan.
        """
        full = self._who_is_full(am_full=False)
        if full.any():
            if loss is not None:
                self._loop.forget_graph(loss)
            raise self._repeat_together(full)

    def _void_window(self, error: OutOfVramError, *, has_joined: bool) -> NDArray[np.bool_]:
        """This rank cannot finish the window: wait until all ranks know. Returns whether each rank is full: [ranks].

        `has_joined`: this rank has finished the backward of this micro-batch.

        Raises:
            OutOfVramError: the next collective of the other ranks is unknown.
        """
        loop = self._loop
        if not has_joined:
            loop.placed.gradients.ends_window = loop.in_last
            with explained_shortage(self.plan, self._device):
                loop.placed.join_remaining_exchanges()
        loop.settle()
        if self._exchanges_last and not loop.in_last:
            return self._who_is_full(am_full=True)
        if not self._exchanges_each:
            window = loop.num_updates, loop.num_backwards
            return agree(loop.placed, self._ranks, window, RankFlags(is_full=True)).full
        if has_joined:  # the other ranks may run another micro-batch or end the window
            loop.drop_gradients()
            error.is_final = True
            raise error
        return self._who_is_full(am_full=True)

    def _repeat_together(self, full: NDArray[np.bool_], error: OutOfVramError | None = None) -> OutOfVramError:
        """Drop the window on all ranks and move. Returns the error to raise.

        Args:
            full: whether each rank's GPU is full: [ranks].
            error: this rank's error, if its GPU is full.
        """
        self._loop.drop_gradients()
        self._loop.settle()  # until then the stepping thread communicates with other ranks
        said = f"the memory of rank {int(full.argmax())}'s GPU was full"
        return self._leave_vram(error or OutOfVramError(f"{said}: its error says more"), said)

    # ---- choosing the plan ---------------------------------------------------------------------------------------

    def _leave_vram(self, error: OutOfVramError, why: str) -> OutOfVramError:
        error.is_final = True
        full = full_gpu(self.plan, self._device)
        gc.collect()  # activations of the failed window may be in reference cycles
        had_graphs = np.array([int(self._loop.placed.give_up_graphs())])
        if self._ranks.agree(had_graphs).any():
            self._plan_eager_blocks()
            return RepeatWindowError(f"{full}. CUDA graphs of blocks are not used any more. {_REPEAT}")
        plan = with_less_vram(self.plan, self._device, error.__cause__, self._num_shortages, self._ranks)
        if plan is None:
            return error
        self._num_shortages += 1
        try:
            words = self._move_with_a_warning(plan, why, stacklevel=6)
        except OffloadkitError as failure:
            failed = OutOfVramError(f"{error}. The move to a leaner plan failed: {failure}")
            failed.is_final = True
            return failed
        if self._ranks.size > 1:
            full = why
        return RepeatWindowError(
            f"{full}. The engine has moved to a leaner plan ({words}), which changes no number. {_REPEAT}"
        )

    def _plan_eager_blocks(self) -> None:
        self.plan = self._loop.records.plan = self._telemetry.plan = without_graphs(self.plan)
        self._loop.placed.follow(self.plan)  # of several ranks, this one may have had no graphs to give up
        self._watches.rates.begin(self.plan)
        forget_peak(self._device)  # it included graphs

    def _leave_vram_at_rest(self, error: OutOfVramError | None, ranks: Ranks, full_rank: int) -> None:
        """Move to a plan with less VRAM, between windows. If that fails, raises `error` with the reason.

        Args:
            error: this rank's, if its GPU is full.
            ranks: those that have called this.
        """
        whose = "the GPU's memory" if ranks.size == 1 else f"the memory of rank {full_rank}'s GPU"
        error = error or OutOfVramError(f"{whose} was full in an evaluation: its error says more")
        if ranks.size < self._ranks.size:
            raise error
        if ranks.agree(np.array([int(self._is_inside_a_window)])).any():
            raise OutOfVramError(
                f"{error}. An accumulation window is open, so nothing can move: evaluate and generate after the step() "
                "that ends it, and the engine can recover"
            ) from error
        if ranks.size > 1:
            self._loop.settle()  # see _repeat_together
        plan = with_less_vram_at_rest(self.plan, error.__cause__, self._num_shortages, ranks)
        if plan is None:
            raise OutOfVramError(str(error)) from error  # no rank tries again if this call is nested in another
        self._num_shortages += 1
        try:
            self._move_with_a_warning(plan, f"{whose} was full in an evaluation", stacklevel=7)
        except OffloadkitError as why:
            raise OutOfVramError(f"{error}. The move to a leaner plan failed: {why}") from error

    def _leave_ram_together(self, ranks: Sequence[int], shortage: RamShortage | None) -> None:
        """Move several ranks to a plan with less RAM, because RAM is scarce on `ranks`.

        Raises:
            OutOfRamError: no plan takes less, or the move failed.
        """
        self._loop.settle()  # see _repeat_together
        scarce = (
            f"RAM is running out on rank {ranks[0]}, whose error says more" if shortage is None else shortage.warning
        )
        plan = with_less_ram(self.plan, self._device, self._ranks)
        if plan is None:
            raise OutOfRamError(scarce)
        self._leave_ram(plan, scarce)

    def _leave_ram(self, plan: Plan, scarce: str) -> None:
        """Raises `OutOfRamError` if the move fails."""
        try:
            self._move_with_a_warning(plan, "RAM was running out", stacklevel=5)
        except OffloadkitError as error:
            raise OutOfRamError(f"{scarce}. The move to a plan with less RAM failed: {error}") from error

    def _leave_cheap(self) -> None:
        """Recompute as a whole the blocks whose second run had other matmuls on a rank; no later plan chooses "cheap"
        for them. If the move fails, training goes on with a warning, because backward runs them as a whole anyway.
        """
        self._loop.settle()  # see _repeat_together
        own = np.zeros(len(self.plan.layers), dtype=np.int64)
        own[self._loop.placed.unlike] = 1
        unlike = np.flatnonzero(self._ranks.agree(own).any(axis=0)).tolist()
        plan = never_cheap(self.plan, unlike)
        name = self.plan.layers[unlike[0]].name
        why = f"{name!r} and {len(unlike) - 1} other layers" if len(unlike) > 1 else f"{name!r}"
        try:
            self._move_with_a_warning(plan, f"{why} ran other matmuls in backward than in forward", stacklevel=5)
        except OffloadkitError as error:
            if self.is_lost:
                raise
            logger.warning(f"{why} are recomputed as a whole, but the move to a plan that says so failed: {error}")

    def _move_after(self, first: FirstWindow) -> None:
        """Move to the plan for the first window's micro-batches. If the move fails, training goes on with a warning.

        Raises:
            DoesNotFitError: there is no GPU, and a budget is too small. Every further window raises it again.
        """
        if self._ranks.size > 1:
            self._loop.settle()  # see _repeat_together
        plan = first.plan_now()
        if first.is_done:
            self.first_window = None
        if plan is None:
            return
        plan = generating_in_vram(self._with_generation(plan)) or plan
        try:
            self.move(plan, "the first window was done, and the plan is now made for its micro-batches")
        except OffloadkitError as error:
            if self.is_lost:
                raise
            logger.warning(f"training continues with the initial plan instead of one for its micro-batches: {error}")

    def _move_for_rates(self) -> None:
        """Move if another plan is faster at the measured rates. If the move fails, training goes on with a warning."""
        if self._ranks.size > 1:
            self._loop.settle()  # see _repeat_together
        assigned = self._loop.placed.layers.assigned
        found = self._watches.rates.judge(assigned, lambda: room(self.plan, self._device), self._ranks)
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
        before = self.plan
        self.move(plan, why)
        words, seconds = move_summary(before, plan), format_seconds(self._telemetry.moves[-1].seconds)
        message = f"{why} after step {self._loop.num_updates}: the plan has moved in {seconds} ({words})"
        warnings.warn(message, RuntimeWarning, stacklevel=stacklevel)
        return words

    def move(self, plan: Plan, why: str) -> None:
        """Move to `plan` while no gradients are pending. Raises the errors of `OffloadEngine.move`."""
        began, before = time.perf_counter(), self.plan
        plan, loop = self._with_generation(plan_of_rank(plan, self._layers, self._ranks)), self._loop
        loop.settle()
        loop.step_thread.settle()
        loop.placed.layers.take_over_external_writes()
        with self._ranks.together("beginning to move"):
            loop.placed.layers.check_movable(plan.placements)
        try:
            connect(plan, self._ranks)
        except BaseException:
            self.is_lost = True  # the ranks cannot communicate any more
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
                apart = "and so did continuing with the layers that had moved" if alone else "on this rank or another"
                raise EngineStateError(
                    f"a move failed, {apart}: the engine is closed, and the model has its weights; the optimizer "
                    f"states are lost. Resume from a checkpoint ({error})"
                ) from error
            plan = placed(before, loop.placed.layers.placements)
            raise
        finally:
            if not self.is_lost:
                self.plan = loop.records.plan = self._telemetry.plan = plan
                self._watches.ram.expect(plan.tiers["ram"])
                self._watches.rates.begin(plan)
                loop.placed.follow(plan)
        seconds = time.perf_counter() - began
        self._watches.vram_cap.watch()
        forget_peak(self._device)  # the next OOM message must not report the old plan's peak
        old, new = ({tier: each.total_bytes(tier) for tier in each.tiers} for each in (before, plan))
        self._telemetry.moves.append(Move(loop.num_updates, why, old, new, seconds))

    def _has_moved(self, state: LayerState) -> None:
        for at, view in enumerate(state.layer.views):
            self._optimizer.state[view.parameter].update(state.state_of(at))


class Window:
    """Remembers one window of a Trainer until the next begins, without weights, because a window changes none."""

    def __init__(self) -> None:
        self._micro_batches: list[tuple[Any, dict[str, Any]]] = []
        self._buffers = Buffers()

    def begin(self, model: nn.Module) -> None:
        self._micro_batches.clear()
        self._buffers.keep(model)

    def add(self, inputs: Any) -> None:
        """Record the next micro-batch and the present random states."""
        self._micro_batches.append((inputs, random_states()))

    def again(self) -> Iterator[Any]:
        """Restore the buffers, then yield the recorded micro-batches with their random states restored."""
        self._buffers.restore()
        for inputs, states in list(self._micro_batches):
            set_random_states(states)
            yield inputs
