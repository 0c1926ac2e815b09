"""The module that a Trainer trains, its ranks, and the model as the training loop calls it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from offloadkit.device.process_memory import phase
from offloadkit.distributed.ranks import SOLO, Ranks
from offloadkit.hf.losses import WithLosses, called_through, losses_of

if TYPE_CHECKING:
    from torch import nn

    from offloadkit.engine.engine import OffloadEngine


def trained_module(trainer: Any) -> nn.Module:
    """The Trainer's model, together with the Trainer's loss modules if it has any."""
    losses = losses_of(trainer)
    if not losses:
        return trainer.model  # type: ignore[no-any-return]
    ours = None if trainer.engine is None else trainer.engine.module
    if isinstance(ours, WithLosses) and ours.model is trainer.model and dict(ours.losses.items()) == losses:
        return ours
    return WithLosses(trainer.model, losses)


def called_through_engine(trainer: Any) -> AbstractContextManager[None]:
    if not losses_of(trainer):
        return nullcontext()
    return called_through(trainer, WrappedModel(trained_module(trainer), trainer.engine))


def ranks_of(trainer: Any) -> Ranks:
    return SOLO if trainer.engine is None else trainer.engine.ranks


def print_on_rank_0(trainer: Any, text: object) -> None:
    if trainer.is_world_process_zero():
        print(text, flush=True)


def phase_of(trainer: Any, name: str) -> AbstractContextManager[None]:
    return phase(name, trainer.telemetry.peaks, trainer.args.device)


class WrappedModel:
    """The model that the Trainer's loop calls. Calls go through the engine; all other attributes are the module's."""

    def __init__(self, module: nn.Module, engine: OffloadEngine | None) -> None:
        self.module = module
        self.engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.engine or self.module
        if torch.is_grad_enabled() or getattr(self.module, "dtype", None) is not torch.bfloat16:
            return call(*args, **kwargs)
        # A bf16 loss has three digits, too few to tell two checkpoints apart. The weights are bf16 already, so autocast
        # changes only the loss, to fp32.
        with torch.autocast(next(self.module.parameters()).device.type, torch.bfloat16):
            return call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the engine takes gradients during backward."""

    def to(self, *args: Any, **kwargs: Any) -> WrappedModel:
        return self
