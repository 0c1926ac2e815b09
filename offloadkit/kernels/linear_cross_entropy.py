"""Fused head and cross-entropy over chunks of the vocabulary, without the full [tokens, vocabulary] logits.

A chunk's logits are computed in the working dtype, as by the head, and the loss in fp32. Backward recomputes every
chunk: four matmuls of the head's size in total instead of three. The logits' gradient is rounded to the working dtype
once, as without chunks. The hidden states' gradient is accumulated over chunks in fp32. Chunks of tokens instead would
need an fp32 sum of the weight's size (2 GiB for Llama-3.1-8B), read and written by every chunk.

Fused, the kernels of `linear_cross_entropy_triton` read each logit once in forward, and read and write it once in
backward: 14 bytes move for a logit in 16 bits, its matmuls included, instead of 76. Gradients have the bits of torch's
operations for the same log-sum-exp, whose sums are added in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from offloadkit.kernels.gpu import is_built

try:
    from offloadkit.kernels import linear_cross_entropy_triton
except ImportError:
    linear_cross_entropy_triton = None  # type: ignore[assignment]

Step = Callable[[Tensor, slice], Tensor]
"""Element-wise function of the head's output: (logits, their columns of the vocabulary) -> logits."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_CAPABILITY = (8, 0)
"""Older GPUs have no conversions of bf16."""
FUSED_CHUNK = 4
"""A fused chunk has this many times `chunk_elements`, because its logits have no copies in fp32."""
ADDS_IN_FP32 = hasattr(torch.ops.aten.addmm, "dtype_out")
"""Whether this torch adds a product of 16-bit matrices to an fp32 matrix on a GPU, without rounding the product."""
BLOCK = 2048
"""Logits that a thread block reads at once."""
KERNELS: Any = linear_cross_entropy_triton
"""None without Triton. Tests replace it."""
_cuda: Any = torch.cuda  # typed only in some releases of torch


@dataclass(frozen=True)
class Cast:
    """A `Step` that converts the logits to a wider dtype."""

    dtype: torch.dtype

    def __call__(self, logits: Tensor, columns: slice) -> Tensor:
        return logits.to(self.dtype)


@cache
def available() -> bool:
    """Whether the kernels run on the current CUDA device; warns once if Triton is installed but fails."""
    if KERNELS is None or not torch.cuda.is_available() or torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        return False
    logits = torch.zeros((2, 64), dtype=DTYPES[0], device="cuda")
    row, target = torch.zeros(2, device="cuda"), torch.zeros(2, dtype=torch.int64, device="cuda")

    def run() -> None:
        _statistics(logits, target, row, row, 0, True)
        _gradient_of_logits(logits, target, row, row, logits, 0)

    return is_built("the kernels of the loss, so torch's operations are used", run)


def token_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    steps: tuple[Step, ...],
    chunk_elements: int,
    fused: bool = False,
) -> Tensor:
    """Cross-entropy per token: [tokens] in fp32 (fp64 for fp64), differentiable once.

    Args:
        hidden: [tokens, width], the head's input.
        weight: [vocabulary, width], in the dtype of `hidden`.
        bias: [vocabulary], or None.
        target: [tokens], int64, indices into the vocabulary.
        steps: functions of the head's output, applied before the softmax.
        chunk_elements: approximate number of logits per chunk.
        fused: use the kernels on a GPU, where they must be `available`, and on the meta device.

    Raises:
        IndexError, RuntimeError: a target is outside the vocabulary (a device-side assertion on the GPU).
    """
    fused = fused and hidden.device.type in ("cuda", "meta") and hidden.dtype in DTYPES
    while fused and steps and isinstance(steps[-1], Cast):  # the kernels convert by themselves
        steps = steps[:-1]
    apply: Any = _TokenLosses.apply
    losses: Tensor = apply(hidden, weight, bias, target, steps, chunk_elements * (FUSED_CHUNK if fused else 1), fused)
    return losses


def no_autocast(like: Tensor) -> AbstractContextManager[None]:
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, steps: tuple[Step, ...],
        chunk_elements: int, fused: bool,
    ) -> Tensor:  # fmt: skip
        weight[:, 0].gather(0, target)  # raises torch's error for labels outside the vocabulary
        logsumexp = at_target = None
        add = _added_fused if fused else _added
        with no_autocast(hidden):
            for columns in _chunks(len(hidden), len(weight), chunk_elements):
                logits = _chunk(hidden, weight, bias, steps, columns)[1]
                logsumexp, at_target = add(logits, target, columns, logsumexp, at_target)
                del logits
        assert logsumexp is not None
        assert at_target is not None
        ctx.save_for_backward(hidden, weight, bias, target, logsumexp)
        ctx.steps, ctx.chunk_elements, ctx.fused = steps, chunk_elements, fused
        return logsumexp - at_target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor | None, ...]:
        saved = hidden, weight, bias, _, logsumexp = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.zeros_like(hidden, dtype=logsumexp.dtype) if wants_hidden else None
        d_weight = torch.empty_like(weight) if wants_weight else None
        d_bias = torch.empty_like(bias) if wants_bias else None
        adds_product = ADDS_IN_FP32 and ctx.fused and hidden.is_cuda and hidden.dtype != logsumexp.dtype
        with no_autocast(hidden):
            for columns in _chunks(len(hidden), len(weight), ctx.chunk_elements):
                d_logits = _gradient(saved, d_losses, ctx.steps, columns, ctx.fused)
                if d_hidden is not None and adds_product:
                    torch.addmm(d_hidden, d_logits, weight[columns], out_dtype=d_hidden.dtype, out=d_hidden)
                elif d_hidden is not None:
                    d_hidden += d_logits @ weight[columns]
                if d_weight is not None:
                    torch.mm(d_logits.t(), hidden, out=d_weight[columns])
                if d_bias is not None:
                    d_bias[columns] = d_logits.sum(0)
                del d_logits
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, None, None, None, None


def _added(
    logits: Tensor, target: Tensor, columns: slice, logsumexp: Tensor | None, at_target: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and logit of the target of each row, over the columns so far and these; None before the first."""
    logits = _wide(logits)
    chunk_sum = logits.logsumexp(-1)
    here, index = _places(target, columns)
    value = logits.gather(1, index).squeeze(1).masked_fill(~here, 0)
    if logsumexp is None or at_target is None:
        return chunk_sum, value
    return torch.logaddexp(logsumexp, chunk_sum), at_target + value


def _added_fused(
    logits: Tensor, target: Tensor, columns: slice, logsumexp: Tensor | None, at_target: Tensor | None
) -> tuple[Tensor, Tensor]:
    is_first = logsumexp is None or at_target is None
    if logsumexp is None or at_target is None:
        logsumexp, at_target = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    run = statistics_op if logits.is_meta else _statistics
    run(logits, target, logsumexp, at_target, columns.start, is_first)
    return logsumexp, at_target


def _gradient(saved: tuple[Any, ...], d_losses: Tensor, steps: tuple[Step, ...], columns: slice, fused: bool) -> Tensor:
    """Gradient of the head's output in these columns: [tokens, columns], in the output's dtype.

    It is (softmax - one-hot) * d_losses, propagated back through the steps. `saved`: hidden, weight, bias, target,
    logsumexp.
    """
    hidden, weight, bias, target, logsumexp = saved
    with torch.enable_grad():
        head_output, logits = _chunk(hidden, weight, bias, steps, columns)
    if fused:
        d_logits = logits.detach() if logits is head_output else torch.empty_like(logits)
        run = gradient_op if logits.is_meta else _gradient_of_logits
        run(logits.detach(), target, logsumexp, d_losses.contiguous(), d_logits, columns.start)
    else:
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


# -- the kernels, and the same as operations of torch


def _statistics(
    logits: Tensor, target: Tensor, logsumexp: Tensor, at_target: Tensor, start: int, is_first: bool
) -> None:
    """`_added` in place: [tokens] in fp32; `start` is the first column."""
    rows, width = logits.shape
    if rows:
        with _cuda.device_of(logits):
            KERNELS.statistics[(rows,)](
                logits, target, logsumexp, at_target, logits.stride(0), start, width, is_first, BLOCK,
                enable_fp_fusion=False,
            )  # fmt: skip


def _gradient_of_logits(
    logits: Tensor, target: Tensor, logsumexp: Tensor, d_losses: Tensor, out: Tensor, start: int
) -> None:
    """Write (softmax - one-hot) * d_losses to `out`, which may be `logits`."""
    rows, width = logits.shape
    if rows:
        with _cuda.device_of(logits):
            KERNELS.gradient[(rows * -(-width // BLOCK),)](
                logits, target, logsumexp, d_losses, out, logits.stride(0), out.stride(0), start, width, BLOCK,
                enable_fp_fusion=False,
            )  # fmt: skip


statistics_op = torch.library.custom_op(
    "offloadkit::loss_statistics", _statistics, mutates_args=("logsumexp", "at_target")
)
gradient_op = torch.library.custom_op("offloadkit::loss_gradient", _gradient_of_logits, mutates_args=("out",))


@statistics_op.register_fake
def _(*_: Any) -> None:
    return None


@gradient_op.register_fake
def _(*_: Any) -> None:
    return None
