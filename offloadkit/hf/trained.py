"""The module that a Trainer trains, its ranks, and the model as the training loop calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from offloadkit.device.process_memory import phase
from offloadkit.distributed.ranks import SOLO, Ranks
from offloadkit.hf.frozen_models import WithFrozen, frozen_models_of
from offloadkit.hf.losses import WithLosses, called_through, losses_of

if TYPE_CHECKING:
    from torch import nn

    from offloadkit.engine.engine import OffloadEngine


def trained_module(trainer: Any) -> nn.Module:
    """The Trainer's model, together with the Trainer's loss modules, or frozen models that it calls, if it has any."""
    losses, frozen = losses_of(trainer), frozen_models_of(trainer)
    ours = None if trainer.engine is None else trainer.engine.module
    if frozen and not losses:
        if isinstance(ours, WithFrozen) and ours.model is trainer.model and dict(ours.frozen.items()) == frozen:
            return ours
        return WithFrozen(trainer.model, frozen)
    if not losses:
        return trainer.model  # type: ignore[no-any-return]
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


def cache_bytes_of(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Bytes of keys and values when `model.generate(*args, **kwargs)` ends, if it writes as many tokens as it may.

    0 if the model's config does not say their shape, or the call generates without them.
    """
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
    own = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    names = ("max_new_tokens", "max_length", "use_cache", "num_return_sequences")
    asked = {name: kwargs.get(name, getattr(own, name, None)) for name in names}
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    blocks, width = getattr(text, "num_hidden_layers", None), getattr(text, "head_dim", None)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not heads or not blocks or asked["use_cache"] is False:
        return 0
    width = width or text.hidden_size // text.num_attention_heads
    new = asked["max_new_tokens"]
    length = ids.shape[1] + new if new else max(ids.shape[1], asked["max_length"] or 0)
    rows = ids.shape[0] * (asked["num_return_sequences"] or 1)
    return int(2 * blocks * heads * width * rows * length * model.dtype.itemsize)


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

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `generate`, with the weights in VRAM if they fit. TRL's online Trainers call it."""
        untyped: Any = self.module
        run = partial(untyped.generate, *args, **kwargs)
        if self.engine is None:
            return run()
        cache_bytes = cache_bytes_of(self.module, args, kwargs)
        return self.engine.run_generation(run, model=self.module, cache_bytes=cache_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the engine takes gradients during backward."""

    def to(self, *args: Any, **kwargs: Any) -> WrappedModel:
        return self
