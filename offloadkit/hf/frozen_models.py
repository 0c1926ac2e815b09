"""Frozen models that a Trainer calls together with the trained model: TRL's reference, teacher and reward models.

TRL gives them to `accelerator.prepare_model(..., evaluation_mode=True)`, which would move them to the GPU whole. The
engine takes them over instead: their blocks' weights are in VRAM or stream from RAM, as planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from offloadkit.engine.checks import check_not_wrapped


class WithFrozen(nn.Module):
    """The module that the engine trains: the model, and frozen models that the Trainer calls by themselves."""

    def __init__(self, model: nn.Module, frozen: dict[str, nn.Module]) -> None:
        super().__init__()
        self.model, self.frozen = model, nn.ModuleDict(frozen)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def config(self) -> Any:
        return getattr(self.model, "config", None)

    def frozen_models(self) -> dict[str, nn.Module]:
        """For the plan: the frozen models by name."""
        return dict(self.frozen.items())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The trained model's forward. On the meta device, where work is counted, models of its class run too."""
        output = self.model(*args, **kwargs)
        if next(self.model.parameters()).is_meta:
            for model in self.frozen.values():
                if type(model) is type(self.model):  # a reference reads the same rows; a reward model may not
                    with torch.no_grad():
                        model(*args, **kwargs)
        return output

    def train(self, mode: bool = True) -> WithFrozen:
        """Set the trained model's mode; the frozen models stay in evaluation."""
        self.training = mode
        self.model.train(mode)
        return self


class FrozenModels:
    """The frozen models that one Trainer has prepared, in order."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []

    def prepare(self, model: nn.Module) -> nn.Module:
        """Keep `model` for the engine, frozen and in evaluation; it stays where it is until training starts.

        Raises:
            ModelError: the model is compiled, or wrapped for distributed training.
        """
        check_not_wrapped(model)
        model.requires_grad_(False).eval()
        if all(model is not each for each in self.models):
            self.models.append(model)
        return model


def frozen_models_of(trainer: Any) -> dict[str, nn.Module]:
    """The prepared frozen models, by the names of the Trainer's attributes; the trained model is not among them."""
    prepared: FrozenModels | None = getattr(trainer, "frozen_models", None)
    found: dict[str, nn.Module] = {}
    for model in prepared.models if prepared is not None else ():
        if model is not trainer.model:
            name = next((name for name, each in _attributes(trainer) if each is model), "model")
            found[name if name not in found else f"{name}_{len(found)}"] = model
    return found


def _attributes(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of the Trainer, and the items of those that are lists, as "reward_funcs_0"."""
    for name, value in vars(trainer).items():
        if isinstance(value, list):
            yield from ((f"{name}_{at}", each) for at, each in enumerate(value))
        else:
            yield name, value
