"""Support for Trainers whose loss is a module outside the model, as in sentence-transformers.

`trainer.loss` is a module, or a dict of modules by dataset name, and calls the model. The engine trains the losses'
weights together with the model.
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
"""Weights of the losses, which `save_pretrained` does not save."""


class WithLosses(nn.Module):
    """The module that the engine trains: model and losses."""

    def __init__(self, model: nn.Module, losses: dict[str, nn.Module]) -> None:
        super().__init__()
        self.model, self.losses = model, nn.ModuleDict(losses)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def forward(self, *args: Any, through: str | None = None, **kwargs: Any) -> Any:
        return (self.model if through is None else self.losses[through])(*args, **kwargs)

    def train(self, mode: bool = True) -> WithLosses:
        """Set the losses' mode only; the caller sets the model's."""
        self.training = mode
        self.losses.train(mode)
        return self

    def own(self) -> dict[str, torch.Tensor]:
        ours = {id(each) for each in (*self.model.parameters(), *self.model.buffers())}
        named = self.losses.state_dict(keep_vars=True).items()
        return {name: each.detach() for name, each in named if isinstance(each, torch.Tensor) and id(each) not in ours}

    def write(self, folder: Path, origin: Origin) -> None:
        """Save `own()` to `LOSS_FILE`, unless it is empty."""
        if own := self.own():
            write_arrays(folder / LOSS_FILE, own, origin.of_arrays(LOSS_FILE))

    def read(self, folder: Path, *, incomplete: bool = False) -> None:
        """Load the weights that `write` saved; `incomplete` accepts a checkpoint without them."""
        own, path = self.own(), folder / LOSS_FILE
        if own and not path.is_file() and not incomplete:
            raise ModelError(
                f"{folder} lacks {LOSS_FILE}, the losses' own weights ({', '.join(own)}), which sentence-transformers' "
                "Trainer does not save: resume from a checkpoint that has it, or pass "
                "offload=OffloadConfig(resume_incomplete=True) to continue with the present values of the losses"
            )
        if own and path.is_file():
            with ArrayFile(path) as file:
                check_weights(file, own)
                load_weights(file, own)


def losses_of(trainer: Any) -> dict[str, nn.Module]:
    """Loss modules of a sentence-transformers Trainer, by name; {} for other Trainers."""
    if not hasattr(trainer, "override_model_in_loss"):
        return {}
    loss = getattr(trainer, "loss", None)
    return dict(loss) if isinstance(loss, dict) else {"loss": loss} if isinstance(loss, nn.Module) else {}


@contextmanager
def called_through(trainer: Any, call: Callable[..., Any]) -> Iterator[None]:
    """Within this context the Trainer's losses are functions that run `call(..., through=NAME)`.

    They cannot be modules: the Trainer would set their `model`, which must be a module.
    """
    kept = trainer.loss

    def through(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: call(*args, through=name, **kwargs)

    trainer.loss = {name: through(name) for name in kept} if isinstance(kept, dict) else through("loss")
    try:
        yield
    finally:
        trainer.loss = kept
