"""Trainers that keep the loss beside the model, as those of sentence-transformers: both are trained by one engine.

Such a Trainer has `loss`, a module or a dict of modules by the name of a data set. Each holds the model and may have
weights of its own, and `compute_loss` calls it in the model's place, with the features and the labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offloadkit.checkpoint.arrays import ArrayFile, write_arrays
from offloadkit.checkpoint.origin import Origin
from offloadkit.checkpoint.weights import check_weights, load_weights
from offloadkit.errors import ModelError

LOSS_FILE = "losses.safetensors"
"""In a checkpoint: weights of the losses, which `save_pretrained` does not know."""


class WithLosses(nn.Module):
    """A model and its losses, in one module: the engine's."""

    def __init__(self, model: nn.Module, losses: dict[str, nn.Module]) -> None:
        super().__init__()
        self.model, self.losses = model, nn.ModuleDict(losses)

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""
        return next(self.model.parameters()).dtype

    def forward(self, *args: Any, through: str | None = None, **kwargs: Any) -> Any:
        """The loss of this name, which calls the model; None: the model itself."""
        return (self.model if through is None else self.losses[through])(*args, **kwargs)

    def train(self, mode: bool = True) -> WithLosses:
        """The losses alone: whoever calls it has the model's own mode in hand."""
        self.training = mode
        self.losses.train(mode)
        return self

    def own(self) -> dict[str, torch.Tensor]:
        """Weights and buffers of the losses alone, by name."""
        ours = {id(each) for each in (*self.model.parameters(), *self.model.buffers())}
        named = self.losses.state_dict(keep_vars=True).items()
        return {name: each.detach() for name, each in named if isinstance(each, torch.Tensor) and id(each) not in ours}

    def write(self, folder: Path, origin: Origin) -> None:
        """Write the losses' own weights into a checkpoint; nothing where they have none."""
        if own := self.own():
            write_arrays(folder / LOSS_FILE, own, origin.of_arrays(LOSS_FILE))

    def read(self, folder: Path, *, incomplete: bool = False) -> None:
        """Read what `write` wrote.

        Args:
            incomplete: whether a checkpoint without it is taken.

        Raises:
            ModelError: the checkpoint has other losses, or none.
        """
        own, path = self.own(), folder / LOSS_FILE
        if own and not path.is_file() and not incomplete:
            raise ModelError(
                f"{folder} lacks {LOSS_FILE}, the losses' own weights ({', '.join(own)}), which sentence-transformers' "
                "Trainer does not save: resume from a checkpoint that has it, or pass "
                "offload=OffloadConfig(resume_incomplete=True) to go on with the values that the losses have"
            )
        if own and path.is_file():
            with ArrayFile(path) as file:
                check_weights(file, own)
                load_weights(file, own)


def losses_of(trainer: Any) -> dict[str, nn.Module]:
    """The losses of a Trainer that keeps them beside the model; none of any other."""
    if not hasattr(trainer, "override_model_in_loss"):
        return {}
    loss = getattr(trainer, "loss", None)
    return dict(loss) if isinstance(loss, dict) else {"loss": loss} if isinstance(loss, nn.Module) else {}


@contextmanager
def called_through(trainer: Any, call: Callable[..., Any]) -> Iterator[None]:
    """A context in which the Trainer's losses are `call(..., through=NAME)`. (Such a Trainer puts the model that it
    calls into them itself, which must be a module.)"""
    kept = trainer.loss

    def through(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: call(*args, through=name, **kwargs)

    trainer.loss = {name: through(name) for name in kept} if isinstance(kept, dict) else through("loss")
    try:
        yield
    finally:
        trainer.loss = kept
