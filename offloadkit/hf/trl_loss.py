"""TRL's loss by a fused head, in a plan: SFT, DPO, KTO and GRPO call the model with `fused_lm_head=True`.

TRL's autograd function needs values and, on a GPU, Triton. On the meta device a function of the same matmuls and memory
replaces it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offloadkit.engine.tracing import Call
from offloadkit.facts.changes import claim

_ARGUMENT = "fused_lm_head"
_OPTIONAL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_MOST_TOKENS = 4096
"""Tokens of a tile of logits: TRL's `TOKEN_CHUNK_SIZE`."""


def with_fused_head(trainer: Any, call: Call) -> Call:
    """The call of the model in TRL's SFT, if `call` has the batch; for other Trainers `call` itself."""
    if not type(trainer).compute_loss.__module__.startswith("trl.") or not _has_fused_head(trainer.model):
        return call
    alternatives = tuple(with_fused_head(trainer, each) for each in call.alternatives)
    return replace(call, kwargs={**call.kwargs, _ARGUMENT: True}, alternatives=alternatives)


def _has_fused_head(model: torch.nn.Module) -> bool:
    forwards = (getattr(vars(module).get("forward"), "__func__", None) for module in model.modules())
    codes = (getattr(forward, "__code__", None) for forward in forwards)
    return any(_ARGUMENT in code.co_varnames for code in codes if code is not None)


def plan_fused_head() -> Callable[[], None]:
    """Let TRL's fused head run on the meta device, if TRL is loaded; returns a function that undoes it."""
    theirs = sys.modules.get("trl.trainer.utils")
    if not hasattr(theirs, "_ChunkedLogProbFunction"):
        return lambda: None
    return claim(theirs, "_ChunkedLogProbFunction", _ByDevice(vars(theirs)["_ChunkedLogProbFunction"]))


class _ByDevice:
    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def apply(self, hidden: Tensor, *args: Any) -> Any:
        return (_OnMeta if hidden.is_meta else self._theirs).apply(hidden, *args)


class _OnMeta(torch.autograd.Function):
    """TRL's `ChunkedLogProbFunction` on the meta device: its matmuls, and the memory that it takes on a GPU."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        scale: float = 1.0,
        outputs: tuple[str, ...] = _OPTIONAL,
    ) -> tuple[Tensor | None, ...]:
        def a_token(dtype: torch.dtype = torch.float32) -> Tensor:
            return hidden.new_empty(len(hidden), dtype=dtype)

        for tile, chunk, of_vocabulary in _tiles(hidden, weight, chunk_size):
            torch.mm(chunk, of_vocabulary.t(), out=tile)
        ctx.save_for_backward(hidden, weight, bias, targets, a_token(), a_token())
        ctx.chunk_size = chunk_size
        more = [
            a_token(torch.bool if name == "is_top1" else torch.float32) if name in outputs else None
            for name in _OPTIONAL
        ]
        ctx.mark_non_differentiable(*(each for each in more[1:] if each is not None))
        return a_token(), *more

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        hidden, weight, bias, *_ = ctx.saved_tensors
        sums = [
            torch.zeros_like(each, dtype=torch.float32) if each is not None and needed else None
            for each, needed in zip((hidden, weight, bias), ctx.needs_input_grad[:3], strict=True)
        ]
        for tile, chunk, of_vocabulary in _tiles(hidden, weight, ctx.chunk_size):
            torch.mm(chunk, of_vocabulary.t(), out=tile)
            if sums[0] is not None:
                torch.mm(tile, of_vocabulary, out=_like(chunk, sums[0]))
            if sums[1] is not None:
                torch.mm(tile.t(), chunk, out=_like(of_vocabulary, sums[1]))
        own = zip(sums, (hidden, weight, bias), strict=True)
        return *(None if total is None else total.to(each.dtype) for total, each in own), *[None] * 6


def _tiles(hidden: Tensor, weight: Tensor, chunk_size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Views of the buffer of logits [tokens, rows of the vocabulary], with their hidden states and head weights."""
    buffer = hidden.new_empty(min(len(hidden), _MOST_TOKENS), chunk_size)
    for chunk in torch.split(hidden, _MOST_TOKENS):
        for of_vocabulary in torch.split(weight, chunk_size):
            yield buffer[: len(chunk), : len(of_vocabulary)], chunk, of_vocabulary.to(hidden.dtype)


def _like(part: Tensor, total: Tensor) -> Tensor:
    """Memory of an fp32 sum, seen as a matmul's result like `part`: nothing is allocated."""
    return total.view(part.dtype)[: len(part), : part.shape[1]]
