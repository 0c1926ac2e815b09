"""Triton kernels of the cross-entropy of a chunk of logits. Imported only if Triton is installed.

`gradient` has the bits of torch's eager operations; `exp` is libdevice's, as in torch's CUDA kernels.
"""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _finite(largest):
    return tl.where(tl.abs(largest) == float("inf"), 0.0, largest)


@triton.jit
def statistics(
    logits, target, logsumexp, at_target, stride, start, width, is_first: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """One row per program: add `width` columns of the vocabulary, from `start` on, to the row's log-sum-exp and to the
    logit of its target.
    """
    row = tl.program_id(0).to(tl.int64)
    values = logits + row * stride
    largest, total = float("-inf"), 0.0
    for first in range(0, width, block):
        columns = first + tl.arange(0, block)
        x = tl.load(values + columns, mask=columns < width, other=float("-inf")).to(tl.float32)
        before, largest = _finite(largest), tl.maximum(largest, tl.max(x, 0))
        scale = tl.exp(tl.minimum(before - _finite(largest), 0.0))
        total = total * scale + tl.sum(tl.exp(x - _finite(largest)), 0)
    found = _finite(largest) + tl.log(total)
    place = tl.load(target + row) - start
    value = tl.load(values + place, mask=(place >= 0) & (place < width), other=0.0).to(tl.float32)
    if not is_first:
        other = tl.load(logsumexp + row)
        more = tl.maximum(found, other)
        found = _finite(more) + tl.log(tl.exp(found - _finite(more)) + tl.exp(other - _finite(more)))
        value += tl.load(at_target + row)
    tl.store(logsumexp + row, found)
    tl.store(at_target + row, value)


@triton.jit
def gradient(
    logits, target, logsumexp, d_losses, out, stride, out_stride, start, width, block: tl.constexpr
):  # fmt: skip
    """`block` columns of a row per program: out = (softmax - one-hot) * d_losses. `out` may be `logits`."""
    program, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(width, block)
    row, columns = program // blocks, program % blocks * block + tl.arange(0, block)
    inside = columns < width
    x = tl.load(logits + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    softmax = libdevice.exp(x - tl.load(logsumexp + row))
    is_target = columns == tl.load(target + row) - start
    found = tl.where(is_target, softmax - 1.0, softmax) * tl.load(d_losses + row)
    tl.store(out + row * out_stride + columns, found, mask=inside)
