"""A checkpoint from which training goes on exactly where a step of it failed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback


class StopPoint(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Remembers the random numbers' states that a resumed run must find when it begins with the step under way.

    The Trainer puts saved states back before an epoch's first batch is drawn, and elsewhere after a step's batches were
    drawn and before its first forward: they are taken at the same places.
    """

    def __init__(self) -> None:
        self._first_step = 0
        self._at_new_epoch = False
        self._states = _random_states()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._first_step = state.global_step

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._states, self._at_new_epoch = _random_states(), True

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._at_new_epoch:
            self._states = _random_states()
        self._at_new_epoch = False

    def any_step_finished(self, trainer: Any) -> bool:
        """Whether this run of the trainer has got further than where it began."""
        return bool(trainer.state.global_step > self._first_step)

    def save(self, trainer: Any) -> Path:
        """Write the checkpoint of the last finished step, with its optimizer, into the trainer's output folder.

        Raises:
            OutputError: it could not be written.
            NonFiniteGradientError: the last step's gradients were not finite.
        """
        trainer.optimizer.zero_grad()
        _set_random_states(self._states)
        args = trainer.args
        weights_only, args.save_only_model = args.save_only_model, False
        try:
            trainer._save_checkpoint(trainer.model, None)
        finally:
            args.save_only_model = weights_only
        return Path(args.output_dir) / f"checkpoint-{trainer.state.global_step}"


def _random_states() -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
