"""One accumulation window of a Trainer: loss weights of its micro-batches, and their repetition after an OOM.

The loss of the window is the mean over its targets on all ranks: each micro-batch's mean times its share of the
targets.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from offloadkit.engine.replanner import Window
from offloadkit.errors import RepeatWindowError
from offloadkit.hf.longest import is_standard
from offloadkit.hf.loss import num_targets, on_device, with_dummy_target
from offloadkit.hf.masks import Padding, known_padding, split_notes
from offloadkit.hf.packed import known_boundaries
from offloadkit.hf.sharding import TARGETS, without_targets
from offloadkit.hf.trained import called_through_engine

TrainingStep = Callable[[Any, Any], torch.Tensor]


class TrainingWindow:
    def __init__(self) -> None:
        self._is_unfinished = False
        self._num_micro_batches = 1
        self._num_targets: torch.Tensor | int = 0
        self._share: torch.Tensor | float | None = None
        self._losses: list[torch.Tensor] = []
        self._replay = Window()

    def begin(
        self, trainer: Any, batches: list[Any], num_batches: int, *, ends_with_filler: bool
    ) -> list[torch.Tensor]:
        """Count micro-batches and targets, and drop the gradients of an unfinished window.

        Args:
            batches: micro-batches of this rank. The surplus is removed if a stream has ended on another rank.
            num_batches: upper bound of their number.
            ends_with_filler: the last micro-batch is a filler, whose targets do not count.

        Returns:
            Losses of an unfinished window, which count in no logged loss.
        """
        if trainer.args.world_size > 1:
            if ends_with_filler:
                batches[-1] = {**batches[-1], TARGETS: 0}
            self._count_on_all_ranks(trainer, batches, num_batches)
        else:
            self._num_micro_batches = len(batches)
            self._num_targets = sum(num_targets(trainer.model, batch) for batch in batches)
        dropped: list[torch.Tensor] = []
        if self._is_unfinished and trainer.engine is not None:
            trainer.engine.optimizer.zero_grad()
            dropped = self._losses
        self._losses = []
        self._replay.begin(trainer.model)
        return dropped

    def _count_on_all_ranks(self, trainer: Any, batches: list[Any], num_batches: int) -> None:
        counts = np.full(num_batches, -1, dtype=np.int64)
        for at, batch in enumerate(batches):
            inputs, known = without_targets(batch)
            counts[at] = int(num_targets(trainer.model, inputs)) if known is None else known
        gathered = trainer.engine.ranks.agree(counts)
        num = int((gathered >= 0).sum(1).min())
        del batches[num:]
        self._num_micro_batches = num * trainer.args.world_size
        self._num_targets = on_device(int(gathered[:, :num].sum()), trainer.args.device)

    def train(self, trainer: Any, inputs: Any, step: TrainingStep) -> torch.Tensor:
        """Forward and backward of the next micro-batch; after an OOM recovery, of the whole window so far.

        Returns:
            This micro-batch's part of the window's loss, a scalar on the device, times the number of ranks, since the
                Trainer logs the mean over ranks.
        """
        self._replay.add(inputs)
        loss = None
        with suppress(RepeatWindowError):
            loss = self._train_once(trainer, inputs, step)
        if loss is None:
            loss = self.repeat(trainer, step)
        if not trainer.accelerator.sync_gradients:
            trainer.engine.step(boundary=False)
        loss = loss if trainer.args.world_size == 1 else loss * trainer.args.world_size
        self._losses.append(loss)
        return loss

    def repeat(self, trainer: Any, step: TrainingStep) -> torch.Tensor:
        while True:
            with suppress(RepeatWindowError):  # the engine has moved to a still smaller plan
                for number, inputs in enumerate(self._replay.again()):
                    if number:
                        trainer.engine.step(boundary=False)
                    loss = self._train_once(trainer, inputs, step)
                return loss

    def _train_once(self, trainer: Any, inputs: Any, step: TrainingStep) -> torch.Tensor:
        model = trainer.model
        inputs, padding, boundaries = split_notes(inputs)
        positions = None if boundaries is None else inputs["position_ids"]
        inputs, targets = without_targets(inputs)
        one_mask = not getattr(getattr(model, "config", None), "is_encoder_decoder", True)
        if not is_standard(type(trainer).compute_loss) or (padding is Padding.NONE and not one_mask):
            padding = None  # the model or the user's loss may ask about another mask
        share: torch.Tensor | float | None = None
        if self._num_micro_batches != 1:
            inputs, count = with_dummy_target(inputs, num_targets(model, inputs))
            share = count * 0.0 if targets == 0 else count / self._num_targets
        # A loss divided by this number is the micro-batch's mean, as for a model that ignores `num_items_in_batch`.
        # `True` says that the user's compute_loss divides by the targets of the whole accumulated batch.
        if getattr(trainer, "loss_is_scaled_for_ga", None) is True:
            # TRL's GRPO divides by a number that it has made with `current_gradient_accumulation_steps`.
            share, num_items = 0.0 if targets == 0 else None, self._num_targets
        else:
            num_items = num_targets(model, inputs)
            trainer.current_gradient_accumulation_steps = 1
        self._share = share
        with (
            trainer.engine.recover_from_oom(),
            known_padding(padding),
            known_boundaries(boundaries, positions),
            called_through_engine(trainer),
        ):  # also in a custom loss
            loss = step(inputs, on_device(num_items, trainer.args.device))
        return loss if share is None else loss * share

    def backward(self, trainer: Any, loss: torch.Tensor) -> None:
        if self._share is not None:
            loss = loss * self._share
        trainer.engine.backward(loss, scale_by_accumulation=False)
        self._is_unfinished = not trainer.accelerator.sync_gradients
