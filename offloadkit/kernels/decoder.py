"""Differentiable element-wise parts of decoder blocks, on the kernels of `decoder_triton`: gated activations, rotary
embeddings, and norms with a weight of 1 + w.

Outputs and gradients of the first two have the bits of torch's eager operations on the GPU; "gelu_tanh" differs in the
last bit of few gradients. Norms are rounded once, and their sums are added in a fixed order. Backward writes no saved
tensor, so a graph can be kept. The gated activation is computed again in backward instead of being saved. The meta
device sees one operation for each kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from offloadkit.kernels.gpu import is_built

try:
    from offloadkit.kernels import decoder_triton
except ImportError:
    decoder_triton = None  # type: ignore[assignment]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEAST_CAPABILITY = (8, 0)
"""Older GPUs have no conversions of bf16."""
ACTIVATIONS = ("silu", "gelu_tanh")
BLOCK = 1024
"""Elements per thread block of a gated activation."""
HEADS = 16
"""Heads that a thread block of the rotary embedding has in registers."""

NORM_BLOCK = 4096
"""Elements of the rows that a thread block normalizes at once, unless a row is longer."""
NORM_SHARES = 512
"""Most thread blocks of a norm's backward. Each writes a share of the weight's gradient."""
WIDEST_NORM = 16384

_cuda: Any = torch.cuda  # typed only in some releases of torch
KERNELS: Any = decoder_triton
"""None without Triton. Tests replace it."""


@cache
def available() -> bool:
    """Whether the kernels run on the current CUDA device; warns once if Triton is installed but fails."""
    if KERNELS is None or not torch.cuda.is_available() or torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        return False
    numbers = torch.zeros((1, 16, 2, 64), dtype=DTYPES[0], device="cuda")

    def run() -> None:
        _gated_backward(_gated(numbers, numbers, "silu"), numbers, numbers, "silu")
        _rotary(numbers.transpose(1, 2), numbers.transpose(1, 2), numbers[:, :, 0], numbers[:, :, 0], False)

    return is_built("the kernels of decoder blocks, so torch's operations are used", run)


def differentiable_gradients(output: Tensor, inputs: Sequence[Tensor | None], gradient: Tensor) -> list[Tensor | None]:
    """Differentiable gradients of the inputs that require one and are used; None for all other inputs."""
    wanted = [one is not None and one.requires_grad for one in inputs]
    given = [one for one, is_wanted in zip(inputs, wanted, strict=True) if one is not None and is_wanted]
    found = iter(torch.autograd.grad(output, given, gradient, create_graph=True, allow_unused=True))
    return [next(found) if is_wanted else None for is_wanted in wanted]


# -- gated activations


def gated(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """activation(gate) * up, differentiable any number of times.

    Args:
        gate, up: [..., width], of equal shape and dtype, one of `DTYPES`. If `up` is None, `gate` is [..., 2 * width]
            and has both.
        activation: one of `ACTIVATIONS`.
    """
    output: Tensor = _Gated.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    return output


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return (gated_op if gate.is_meta else _gated)(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (gate, up) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return *differentiable_gradients(eager(gate, up, ctx.activation), (gate, up), gradient), None
        d_gate, *d_up = gated_gradients(gradient, gate, up, ctx.activation)
        return d_gate, d_up[0] if d_up else None, None


def gated_gradients(gradient: Tensor, gate: Tensor, up: Tensor | None, activation: str) -> list[Tensor]:
    """[gradient of `gate`, gradient of `up`] of `gated`; one gradient if `up` is None."""
    found: list[Tensor] = (gated_backward_op if gate.is_meta else _gated_backward)(gradient, gate, up, activation)
    return found


def eager(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """`gated` by torch's operations."""
    gate, up = _halves(gate, up)
    return _activated(gate, activation) * up


def eager_gradients(gradient: Tensor, gate: Tensor, up: Tensor | None, activation: str) -> list[Tensor]:
    """`gated_gradients` by torch's operations."""
    first, second = _halves(gate, up)
    aten = torch.ops.aten
    d_first = gradient * second
    if activation == "silu":
        d_first = aten.silu_backward(d_first, first)
    else:
        d_first = aten.gelu_backward(d_first, first, approximate="tanh")
    d_second = gradient * _activated(first, activation)
    return [d_first, d_second] if up is not None else [torch.cat((d_first, d_second), dim=-1)]


def _activated(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def _gated(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    gate, up = _halves(gate, up)
    output = gate.new_empty(gate.shape)
    _launch_gated(KERNELS.gated, [gate, up, output], activation)
    return output


def _gated_backward(gradient: Tensor, gate: Tensor, up: Tensor | None, activation: str) -> list[Tensor]:
    """[gradient of `gate`, gradient of `up`]; one gradient if `up` is None."""
    found = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in (gate, up) if one is not None]
    d_gate, d_up = _halves(*found) if up is not None else _halves(found[0], None)
    _launch_gated(KERNELS.gated_backward, [gradient, *_halves(gate, up), d_gate, d_up], activation)
    return found


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, dim=-1)
    return first, second


def _launch_gated(kernel: Any, arrays: list[Tensor], activation: str) -> None:
    if arrays[0].numel() == 0:
        return
    is_flat = all(array.is_contiguous() for array in arrays)
    rows = [array.view(1, -1) if is_flat else _as_rows(array) for array in arrays]
    num_rows, width = rows[0].shape
    with _cuda.device_of(rows[0]):
        kernel[(num_rows * -(-width // BLOCK),)](
            *rows, *(row.stride(0) for row in rows), width, activation == "gelu_tanh", BLOCK, enable_fp_fusion=False
        )


def _as_rows(array: Tensor) -> Tensor:
    return (array if array.stride(-1) == 1 else array.contiguous()).reshape(-1, array.shape[-1])


# -- rotary embeddings


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """query * cos + rotate_half(query) * sin, and the same of the key, differentiable any number of times.

    If `cos` is narrower than the heads, the rest of each head is copied.

    Args:
        query, key: (batch, heads, length, width), of one of `DTYPES`.
        cos, sin: (batch or 1, length, rotated width), without a gradient, of the same dtype.
    """
    outputs: tuple[Tensor, Tensor] = _Rotated.apply(query, key, cos, sin, False)  # type: ignore[no-untyped-call]
    return outputs


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.inverse = inverse
        return (rotary_op if query.is_meta else _rotary)(query, key, cos, sin, inverse)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_query, d_key = _Rotated.apply(*gradients, *ctx.saved_tensors, not ctx.inverse)  # type: ignore[no-untyped-call]
        return d_query, d_key, None, None, None


def _rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """Outputs are (batch, heads, length, width), with the heads of a token side by side in memory."""
    outputs = _empty_like_heads(query, key)
    query, key, cos, sin = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key, cos, sin))
    batch, query_heads, length, width = query.shape
    half = cos.shape[2] // 2
    strides = [*query.stride()[:3], *key.stride()[:3]]
    for angles in (cos, sin):
        strides += [angles.stride(0) if angles.shape[0] > 1 else 0, angles.stride(1)]
    blocks = [min(HEADS, _power_of_2(query_heads)), _power_of_2(half), _power_of_2(width - 2 * half)]
    if batch * length:
        with _cuda.device_of(query):
            KERNELS.rotary[(batch * length,)](
                query, key, cos, sin, *outputs, length, *strides, query_heads, key.shape[1], width, half, inverse,
                *blocks, enable_fp_fusion=False,
            )  # fmt: skip
    return outputs


def _empty_like_heads(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    query_out, key_out = (one.new_empty(one.transpose(1, 2).shape).transpose(1, 2) for one in (query, key))
    return query_out, key_out


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


# -- norms


def normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset), rounded once, differentiable any number of times.

    Args:
        x: [..., width], of one of `DTYPES`.
        weight: [width], at most `WIDEST_NORM` numbers.
    """
    output: Tensor = _Normed.apply(x, weight, eps, offset)  # type: ignore[no-untyped-call]
    return output


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        output, scales = (norm_op if x.is_meta else _norm)(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, scales)
        ctx.eps, ctx.offset = eps, offset
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, weight, scales) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return (
                *differentiable_gradients(_eager_norm(x, weight, ctx.eps, ctx.offset), (x, weight), gradient),
                None,
                None,
            )
        d_x, d_weight, _ = (norm_backward_op if x.is_meta else _norm_backward)(gradient, x, weight, scales, ctx.offset)
        return d_x, d_weight, None, None


def _eager_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (weight.float() + offset)).to(x.dtype)


def _norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """The output, and fp32 1 / rms of each row."""
    output, scales = _empty_norm(x)
    blocks = _norm_blocks(x)
    if scales.numel():
        with _cuda.device_of(x):
            KERNELS.norm[(-(-scales.numel() // blocks["block_rows"]),)](
                x.contiguous(), weight, output, scales, scales.numel(), x.shape[-1], eps, offset,
                **blocks, enable_fp_fusion=False,
            )  # fmt: skip
    return output, scales


def _norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, scales: Tensor, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `x` and `weight`, and scratch memory, which memory tracing must see."""
    found = d_x, d_weight, shares = _empty_norm_gradients(x, weight)
    if scales.numel():
        with _cuda.device_of(x):
            KERNELS.norm_backward[(shares.shape[0],)](
                gradient.contiguous(), x.contiguous(), weight, scales, d_x, shares,
                scales.numel(), x.shape[-1], offset, _norm_steps(x), **_norm_blocks(x), enable_fp_fusion=False,
            )  # fmt: skip
    d_weight.copy_(shares.sum(0))
    return found


def _norm_blocks(x: Tensor) -> dict[str, int]:
    block = _power_of_2(x.shape[-1])
    block_rows = max(1, NORM_BLOCK // block)
    return {"block_rows": block_rows, "block": block, "num_warps": min(16, max(4, block * block_rows // 512))}


def _norm_steps(x: Tensor) -> int:
    """Rows of `NORM_SHARES` programs, in units of `block_rows`. It depends on the number of rows alone."""
    rows = x.numel() // max(1, x.shape[-1])
    return max(1, -(-rows // (NORM_SHARES * _norm_blocks(x)["block_rows"])))


def _empty_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _empty_norm_gradients(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // max(1, x.shape[-1])
    programs = -(-rows // (_norm_steps(x) * _norm_blocks(x)["block_rows"]))
    shares = x.new_empty((programs, x.shape[-1]), dtype=torch.float32)
    return x.new_empty(x.shape), torch.empty_like(weight), shares


# -- the same as operations of torch


gated_op = torch.library.custom_op("offloadkit::gated", _gated, mutates_args=())
gated_backward_op = torch.library.custom_op(
    "offloadkit::gated_backward",
    _gated_backward,
    mutates_args=(),
    schema="(Tensor gradient, Tensor gate, Tensor? up, str activation) -> Tensor[]",  # torch 2.6 infers no list
)
rotary_op = torch.library.custom_op("offloadkit::rotary", _rotary, mutates_args=())
norm_op = torch.library.custom_op("offloadkit::norm", _norm, mutates_args=())
norm_backward_op = torch.library.custom_op("offloadkit::norm_backward", _norm_backward, mutates_args=())


@gated_op.register_fake
def _(gate: Tensor, up: Tensor | None, _: str) -> Tensor:
    return gate.new_empty(_halves(gate, up)[0].shape)


@gated_backward_op.register_fake
def _(_gradient: Tensor, gate: Tensor, up: Tensor | None, _: str) -> list[Tensor]:
    return [one.new_empty(one.shape) for one in (gate, up) if one is not None]


@rotary_op.register_fake
def _(query: Tensor, key: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_like_heads(query, key)


@norm_op.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_norm(x)


@norm_backward_op.register_fake
def _(_gradient: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_norm_gradients(x, weight)
