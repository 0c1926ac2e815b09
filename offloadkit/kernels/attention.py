"""Differentiable attention with a position bias, on the kernels of `attention_triton`.

Compilers and the meta device see one operation, `torch.ops.offloadkit.attention`, with registered shapes and FLOPs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from offloadkit.kernels.gpu import is_built

try:
    from offloadkit.kernels import attention_triton
except ImportError:
    attention_triton = None  # type: ignore[assignment]

WIDTHS = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16)
LEAST_QUERIES = 16
"""Least rows of a matmul in Triton. Short targets and generation have fewer queries."""
LEAST_CAPABILITY = (8, 0)
"""Older GPUs have no bf16 matmuls."""
SCRATCH_BYTES = 128 << 20
"""Target size of the weights and score gradients that backward writes for a group of heads, at least for one head."""
_SIZES = ("block_queries", "block_keys", "num_warps", "num_stages")
BLOCKS: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {"forward": (64, 32, 4, 3), "queries": (64, 32, 4, 3), "keys": (32, 64, 4, 3)},
    "cpu": dict.fromkeys(("forward", "queries", "keys"), (32, 16)),  # Triton's interpreter
}
"""Queries, keys, warps and stages of a thread block, by device type and kernel.

With width 128, a thread block takes at most 88 of 99 KiB of shared memory on Ampere, Ada and GeForce Blackwell. On
Hopper and Blackwell it takes at most 108 of 227 KiB. The kernels compile for all of these without significant
register spills (tests/kernels/test_compiled.py), but ran only on Hopper.
"""

_cuda: Any = torch.cuda  # typed only in some releases of torch
KERNELS: Any = attention_triton
"""None without Triton. Tests replace it."""


@cache
def available(width: int) -> bool:
    """Whether the kernels run on the current CUDA device; warns once if Triton is installed but fails."""
    if KERNELS is None or not torch.cuda.is_available() or torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        return False
    query = torch.zeros((2, 16, 64, width), dtype=DTYPES[0], device="cuda")
    what = "T5's attention, so the model's own is used"
    return is_built(what, lambda: _try(query, query, query[:, :1], 0.1))


def _try(query: Tensor, bias: Tensor, mask: Tensor | None, dropout: float) -> None:
    """Run all kernels once on small zeros of these dtypes and head counts, with 64 keys and forked random states.

    No size is 1, because Triton would compile another kernel for it.
    """
    heads, width = query.shape[1], query.shape[3]
    with torch.random.fork_rng([query.device] if query.is_cuda else []), torch.no_grad():
        query, scores = query.new_zeros((2, heads, 64, width)), bias.new_zeros((1, heads, 64, 64))
        no_mask = None if mask is None else mask.new_zeros((2, 1, 64, 64))
        outputs = attention(query, query, query, scores, no_mask, 1.0, dropout)
        attention_backward(outputs[0], query, query, query, scores, no_mask, *outputs, 1.0, dropout, True)


compiled_kinds = set[tuple[Any, ...]]()


def _compile_aligned(query: Tensor, bias: Tensor, mask: Tensor | None, dropout: float) -> None:
    """Compile the kernels for multiples of 16 keys before a batch needs them."""
    kind = (query.device, query.dtype, *query.shape[1::2], bias.dtype, mask is None or mask.dtype, dropout > 0)
    if kind not in compiled_kinds:
        compiled_kinds.add(kind)
        _try(query, bias, mask, dropout)


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, scaling: float, dropout: float
) -> Tensor:
    """The first output of `attention`; same arguments.

    Bypasses torch's dispatcher, which takes as much Python time as launching the kernels, unless a compiler, a dispatch
    mode or the meta device must see the operation.
    """
    given = (query, key, value, bias, mask, scaling, dropout)
    seen = torch.compiler.is_compiling() or query.is_meta or torch._C._len_torch_dispatch_stack() > 0
    output: Tensor = attention(*given)[0] if seen else _Eager.apply(*given)  # type: ignore[no-untyped-call]
    return output


def _attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, scaling: float, dropout: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """softmax(query @ key^T * scaling + bias + mask) @ value, with dropout of the softmax's weights.

    The dropout seed is drawn inside the operation: a compiler may redraw random numbers for backward, but never runs an
    opaque operation twice.

    Args:
        query, key, value: (batch, heads, queries or keys, width), one of `DTYPES`, last stride 1.
        bias: (1, heads, queries, keys), floating-point, contiguous.
        mask: (batch, 1, queries, keys), floating-point, last stride 1; added to the scores.
        dropout: fraction of dropped weights. Kept weights are divided by 1 - dropout.

    Returns:
        The output: (batch, queries, heads, width), contiguous, in the dtype of `query`.
        The largest score per row: fp32 (batch, heads, queries).
        The sum of exp(score - largest) per row: fp32 (batch, heads, queries).
        The seed: int64 ().
    """
    *outputs, seed = found = _empty_outputs(query)
    if dropout:
        seed.random_()
    batch, heads, queries, _ = query.shape
    arrays, numbers, constants = _arguments((query, key, value, bias, mask, seed), scaling, dropout)
    if not constants["aligned"] and query.is_cuda:
        _compile_aligned(query, bias, mask, dropout)
    blocks = _blocks("forward", query)
    with _cuda.device_of(query):
        grid = (_num_blocks(queries, blocks["block_queries"]), batch * heads)
        KERNELS.forward[grid](*arrays, *outputs, *numbers, **constants, **blocks)
    return found


def _attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, output: Tensor,
    largest: Tensor, total: Tensor, seed: Tensor, scaling: float, dropout: float, of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `_attention`.

    Args:
        gradient, output: (batch, queries, heads, width), contiguous.

    Returns:
        The gradients of query, key and value: (batch, queries or keys, heads, width).
        The gradient of bias, empty if not `of_bias`.
        The scratch memory, returned so that memory tracing sees it.
    """
    found = d_query, d_key, d_value, d_bias, between = _empty_gradients(query, key, bias, of_bias)
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    at_once = _heads_at_once(query, keys)
    arrays, numbers, constants = _arguments((query, key, value, bias, mask, seed), scaling, dropout)
    used, d_scores = between.view(2, -1)
    of_queries, of_keys = _blocks("queries", query), _blocks("keys", query)
    with _cuda.device_of(query):
        for first in range(0, heads, at_once):
            some = min(at_once, heads - first)
            KERNELS.of_queries[_num_blocks(queries, of_queries["block_queries"]), batch * some](
                *arrays, gradient, output, largest, total, used, d_scores, d_query, first, some, *numbers,
                **constants, **of_queries,
            )  # fmt: skip
            KERNELS.of_keys_and_values[_num_blocks(keys, of_keys["block_keys"]), batch * some](
                query, gradient, used, d_scores, d_key, d_value, first, some, *query.stride()[:3],
                heads, queries, keys, scaling, aligned=constants["aligned"], width=width, **of_keys,
            )  # fmt: skip
            if of_bias:
                written = d_scores[: batch * some * queries * keys].view(batch, some, queries, keys)
                torch.sum(written, 0, dtype=bias.dtype, out=d_bias[0, first : first + some])
    return found


attention = torch.library.custom_op("offloadkit::attention", _attention, mutates_args=())
attention_backward = torch.library.custom_op("offloadkit::attention_backward", _attention_backward, mutates_args=())
OPERATIONS = (torch.ops.offloadkit.attention, torch.ops.offloadkit.attention_backward)


@attention.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_outputs(query)


@attention_backward.register_fake
def _(_gradient: Tensor, query: Tensor, key: Tensor, _value: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _empty_gradients(query, key, bias, rest[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scaling, ctx.dropout = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(
    ctx: Any, gradient: Tensor, *_: Any, backward: Any = attention_backward
) -> tuple[Tensor | None, ...]:
    of_bias = ctx.needs_input_grad[3]
    *found, d_bias, _ = backward(gradient.contiguous(), *ctx.saved_tensors, ctx.scaling, ctx.dropout, of_bias)
    return *(one.transpose(1, 2) for one in found), d_bias if of_bias else None, None, None, None


attention.register_autograd(_differentiate, setup_context=_save)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        found = _attention(*inputs)
        _save(ctx, inputs, found)
        return found[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("T5's attention has no second derivative in bf16 and fp16 on a GPU: take it in fp32")
        return _differentiate(ctx, *gradients, backward=_attention_backward)


@register_flop_formula(torch.ops.offloadkit.attention)
def _flops(query: tuple[int, ...], key: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * _matmul_flops(query, key)


@register_flop_formula(torch.ops.offloadkit.attention_backward)
def _backward_flops(_: tuple[int, ...], query: tuple[int, ...], key: tuple[int, ...], *__: Any, **___: Any) -> int:
    return 5 * _matmul_flops(query, key)


def _matmul_flops(query: tuple[int, ...], key: tuple[int, ...]) -> int:
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * width


def _empty_outputs(query: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, queries, width = query.shape
    largest, total = (query.new_empty((batch, heads, queries), dtype=torch.float32) for _ in range(2))
    return query.new_empty((batch, queries, heads, width)), largest, total, query.new_empty((), dtype=torch.int64)


def _empty_gradients(
    query: Tensor, key: Tensor, bias: Tensor, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    d_key, d_value = (key.new_empty((batch, keys, heads, width)) for _ in range(2))
    d_bias = torch.empty_like(bias) if of_bias else bias.new_empty(0)
    half = 8 * _num_blocks(batch * _heads_at_once(query, keys) * queries * keys, 8)  # aligns both halves to 16 bytes
    between = query.new_empty(2 * half)
    return query.new_empty((batch, queries, heads, width)), d_key, d_value, d_bias, between


def _arguments(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor], scaling: float, dropout: float
) -> tuple[list[Tensor], list[float], dict[str, int]]:
    query, key, value, bias, mask, seed = tensors
    strides = [stride for one in (query, key, value) for stride in one.stride()[:3]]
    of_mask = [mask.stride(0), mask.stride(2)] if mask is not None else [0, 0]
    strides += of_mask
    aligned = all(number % 16 == 0 for number in (key.shape[2], *of_mask))
    numbers = [*strides, query.shape[1], query.shape[2], key.shape[2], scaling, int(dropout * 2**32), 1 / (1 - dropout)]
    constants = {"has_mask": mask is not None, "drops": dropout > 0, "aligned": aligned, "width": query.shape[3]}
    return [query, key, value, bias, bias if mask is None else mask, seed], numbers, constants


def _heads_at_once(query: Tensor, keys: int) -> int:
    batch, heads, queries, _ = query.shape
    groups = _num_blocks(heads * batch * queries * keys * query.element_size(), SCRATCH_BYTES)
    smaller: Any = torch.sym_min  # sizes may be symbolic in a compiler
    at_once: int = _num_blocks(heads, smaller(groups, heads))
    return at_once


def _num_blocks(length: int, block: int) -> int:
    return -(-length // block)


def _blocks(name: str, query: Tensor) -> dict[str, int]:
    """Autotuning would make results vary."""
    return dict(zip(_SIZES, BLOCKS[query.device.type][name], strict=False))
