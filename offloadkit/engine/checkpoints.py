"""The checkpoints of an engine: saving, continuing, and the return to the last one after NaN."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offloadkit.checkpoint.folder import explained_write_errors, origin_from
from offloadkit.checkpoint.one_run import Saves
from offloadkit.checkpoint.run import check_scheduler, load_run, save_run
from offloadkit.checkpoint.states import SavedStates
from offloadkit.device import watchdog
from offloadkit.device.process_memory import phase
from offloadkit.distributed.ranks import Ranks
from offloadkit.engine.loop import TrainingLoop
from offloadkit.engine.run_state import RunState
from offloadkit.errors import ConfigError, NonFiniteGradientError, OffloadkitError, RolledBackError, shown
from offloadkit.facts.files import path_of
from offloadkit.facts.telemetry import Telemetry
from offloadkit.offload.records import LOOK

MAX_ROLLBACKS = 3
"""More consecutive rollbacks raise an error."""


class Checkpoints:
    """Saves and loads a run, and goes back to its last checkpoint. `OffloadEngine` documents the methods.

    Attributes:
        state: the numbers of the run.
    """

    def __init__(
        self, state: RunState, loop: TrainingLoop, ranks: Ranks, telemetry: Telemetry, device: torch.device
    ) -> None:
        self.state, self._loop, self._ranks, self._telemetry, self._device = state, loop, ranks, telemetry, device
        self._saves = Saves()
        self._scheduler: Any = None
        self._num_saved_updates = self._failed_at = self._num_rollbacks = 0
        """Updates in the last checkpoint; the furthest update with NaN, and rollbacks since."""

    @property
    def last(self) -> Path | None:
        """The folder last saved or resumed from."""
        return self._loop.last_checkpoint

    @last.setter
    def last(self, folder: Path) -> None:
        self._loop.last_checkpoint = watchdog.state.last_checkpoint = folder
        self._num_saved_updates = self._loop.num_updates

    def save(self, folder: str | Path, scheduler: Any, position: Any) -> None:
        states = _states_of(scheduler)
        where = _real(folder)
        with phase("saving", self._telemetry.peaks, self._device):
            with self._ranks.together("claiming a checkpoint"):
                if self._ranks.rank == 0:
                    with explained_write_errors(where):
                        where.parent.mkdir(parents=True, exist_ok=True)
                        self._saves.claim(where)
            save_run(where, self.state.snapshot(), self._ranks, scheduler=states, position=position)
        self.last, self._scheduler = where, scheduler

    def load(self, folder: str | Path, scheduler: Any) -> Any:
        folder, own = _real(folder), _states_of(scheduler)

        def took_weights() -> None:
            self._loop.placed.layers.take_over_external_writes(keep_remainder=True)

        # Released, because watched weights would be copied before each write. All ranks write the same numbers to
        # shared weights, while no rank reads them.
        with (
            phase("resuming", self._telemetry.peaks, self._device),
            self._loop.placed.external_writes.released(),
            self._ranks.together("resuming"),
        ):
            with self._ranks.together("beginning to resume"):
                numbers = self.state.snapshot()
            values = load_run(folder, numbers, scheduler=own, took_weights=took_weights, ranks=self._ranks)
            self.state.go_on(values, lambda: origin_from(folder))
        if scheduler is not None:
            scheduler.load_state_dict(values["scheduler"])
        self.last, self._scheduler = folder, scheduler
        self._saves.go_on_from(folder)
        return values.get("position")

    def load_states(self, folder: Path, scheduler: Any) -> dict[str, Any]:
        numbers = self.state.snapshot()
        with SavedStates(folder) as saved:
            values = numbers.check(folder, saved)
            if (states := _states_of(scheduler)) is not None:
                check_scheduler(folder, values, states)
            numbers.load_states(saved)
        self.state.go_on(values, lambda: origin_from(folder))
        return values

    def roll_back(self, step: int, said: str, own_return: Callable[[], Path | None] | None) -> NonFiniteGradientError:
        """Go back to the last checkpoint after update `step` had NaN or Inf in its gradients; returns the error to
        raise.

        Args:
            said: a sentence about the update.
            own_return: returns the checkpoint that the caller itself will load; None: `last` is loaded here.

        Raises:
            ModelError, ConfigError: as `load`.
        """
        folder = self.last if own_return is None else own_return()
        if folder is None:
            return NonFiniteGradientError(
                f"{said}, and on_nonfinite='rollback' has no checkpoint to go back to. {watchdog.in_words(None)}: save "
                f"earlier, in a custom loop before the first step. {LOOK}, or pass on_nonfinite='skip' to skip such "
                "steps"
            )
        if step > self._failed_at:
            self._failed_at, self._num_rollbacks = step, 0
        if self._num_rollbacks == MAX_ROLLBACKS:
            return NonFiniteGradientError(
                f"{said}. Training has gone back {MAX_ROLLBACKS} times without passing step {self._failed_at}, so the "
                f"fault is permanent. {LOOK}, or continue with on_nonfinite='skip' to skip such steps. "
                f"{watchdog.in_words(folder)}"
            )
        self._num_rollbacks += 1
        back = RolledBackError(
            f"{said}. Training goes back to step {self._num_saved_updates}, {str(folder)!r} (time "
            f"{self._num_rollbacks} of {MAX_ROLLBACKS} before step {self._failed_at} is passed)"
        )
        back.step, back.num_updates, back.checkpoint = step, self._num_saved_updates, folder
        if own_return is not None:
            self._loop.num_updates = self._num_saved_updates  # transformers' checkpoints do not contain it
            return back
        try:
            back.position = self.load(folder, self._scheduler)
        except OffloadkitError as error:
            error.add_note(str(back))
            raise
        return back

    def end(self) -> None:
        """Let other processes write the folders of this run."""
        self._saves.end()


def _real(folder: str | Path) -> Path:
    """The target of a symbolic link: the link is kept, and its target replaced."""
    return path_of(os.path.realpath(path_of(folder, "folder")), "folder")


def _states_of(scheduler: Any) -> dict[str, Any] | None:
    """The scheduler's `state_dict()`. Raises `ConfigError` for an object that is not a scheduler."""
    if scheduler is None:
        return None
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "state_dict", None)):
        raise ConfigError(f"scheduler must be a scheduler of torch.optim.lr_scheduler, got {shown(scheduler)}")
    states: dict[str, Any] = scheduler.state_dict()
    return states
