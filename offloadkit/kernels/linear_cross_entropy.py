"""Fused head and cross-entropy over chunks of the vocabulary, without the full [tokens, vocabulary] logits.

A chunk's logits are computed in the working dtype, as by the head, and the loss in fp32. Backward recomputes every
chunk: four matmuls of the head's size in total instead of three. The logits' gradient is rounded to the working dtype
once, as without chunks. The hidden states' gradient is accumulated over chunks in fp32. Chunks of tokens instead would
need an fp32 sum of the weight's size (2 GiB for Llama-3.1-8B), read and written by every chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Step = Callable[[Tensor, slice], Tensor]
"""Element-wise function of the head's output: (logits, their columns of the vocabulary) -> logits."""


def token_losses(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, steps: tuple[Step, ...], chunk_elements: int
) -> Tensor:
    """Cross-entropy per token: [tokens] in fp32 (fp64 for fp64), differentiable once.

    Args:
        hidden: [tokens, width], the head's input.
        weight: [vocabulary, width], in the dtype of `hidden`.
        bias: [vocabulary], or None.
        target: [tokens], int64, indices into the vocabulary.
        steps: functions of the head's output, applied before the softmax.
        chunk_elements: approximate number of logits per chunk.

    Raises:
        IndexError, RuntimeError: a target is outside the vocabulary (a device-side assertion on the GPU).
    """
    apply: Any = _TokenLosses.apply
    losses: Tensor = apply(hidden, weight, bias, target, steps, chunk_elements)
    return losses


def no_autocast(like: Tensor) -> AbstractContextManager[None]:
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, steps: tuple[Step, ...],
        chunk_elements: int,
    ) -> Tensor:  # fmt: skip
        weight[:, 0].gather(0, target)  # raises torch's error for labels outside the vocabulary
        logsumexp = at_target = None
        with no_autocast(hidden):
            for columns in _chunks(len(hidden), len(weight), chunk_elements):
                logits = _wide(_chunk(hidden, weight, bias, steps, columns)[1])
                chunk_sum = logits.logsumexp(-1)
                logsumexp = chunk_sum if logsumexp is None else torch.logaddexp(logsumexp, chunk_sum)
                here, index = _places(target, columns)
                value = logits.gather(1, index).squeeze(1).masked_fill(~here, 0)
                at_target = value if at_target is None else at_target + value
                del logits
        assert logsumexp is not None
        assert at_target is not None
        ctx.save_for_backward(hidden, weight, bias, target, logsumexp)
        ctx.steps, ctx.chunk_elements = steps, chunk_elements
        return logsumexp - at_target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor | None, ...]:
        saved = hidden, weight, bias, _, logsumexp = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.zeros_like(hidden, dtype=logsumexp.dtype) if wants_hidden else None
        d_weight = torch.empty_like(weight) if wants_weight else None
        d_bias = torch.empty_like(bias) if wants_bias else None
        with no_autocast(hidden):
            for columns in _chunks(len(hidden), len(weight), ctx.chunk_elements):
                d_logits = _gradient(saved, d_losses, ctx.steps, columns)
                if d_hidden is not None:
                    d_hidden += d_logits @ weight[columns]
                if d_weight is not None:
                    torch.mm(d_logits.t(), hidden, out=d_weight[columns])
                if d_bias is not None:
                    d_bias[columns] = d_logits.sum(0)
                del d_logits
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, None, None, None


def _gradient(saved: tuple[Any, ...], d_losses: Tensor, steps: tuple[Step, ...], columns: slice) -> Tensor:
    """Gradient of the head's output in these columns: [tokens, columns], in the output's dtype.

    It is (softmax - one-hot) * d_losses, propagated back through the steps. `saved`: hidden, weight, bias, target,
    logsumexp.
    """
    hidden, weight, bias, target, logsumexp = saved
    with torch.enable_grad():
        head_output, logits = _chunk(hidden, weight, bias, steps, columns)
    d_logits = (_wide(logits.detach()) - logsumexp.unsqueeze(1)).exp_()
    here, index = _places(target, columns)
    d_logits.scatter_(1, index, d_logits.gather(1, index) - here.unsqueeze(1).to(d_logits.dtype))
    d_logits.mul_(d_losses.unsqueeze(1))
    return torch.autograd.grad(logits, head_output, d_logits.to(logits.dtype))[0]


def _chunk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, steps: tuple[Step, ...], columns: slice
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        output = F.linear(hidden, weight[columns], None if bias is None else bias[columns])
    logits = output.requires_grad_(torch.is_grad_enabled())
    for step in steps:
        logits = step(logits, columns)
    return output, logits


def _places(target: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Whether a target is in these columns (bool [tokens]), and its column ([tokens, 1], arbitrary if outside)."""
    index = target - columns.start
    width = columns.stop - columns.start
    return (index >= 0) & (index < width), index.clamp(0, width - 1).unsqueeze(1)


def _chunks(num_tokens: int, vocabulary: int, chunk_elements: int) -> Iterator[slice]:
    """Equal chunks of the vocabulary; all but the last are multiples of 64 columns."""
    num_chunks = max(1, -(-num_tokens * vocabulary // chunk_elements))
    width = -(-vocabulary // num_chunks // 64) * 64
    for start in range(0, vocabulary, width):
        yield slice(start, min(start + width, vocabulary))


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
