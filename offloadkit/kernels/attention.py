"""Attention with a position bias, differentiable, by `attention_triton`'s kernels: `attend`, and for compilers and the
meta device, where it is shapes and flops alone, `torch.ops.offloadkit.attention`."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

try:
    from offloadkit.kernels import attention_triton
except ImportError:
    attention_triton = None  # type: ignore[assignment]

WIDTHS = (16, 32, 64, 128)
"""Of a head."""
DTYPES = (torch.bfloat16, torch.float16)
LEAST_QUERIES = 16
"""A matrix product's least; fewer are short targets, or a text being generated."""
_LEAST_CAPABILITY = (8, 0)
"""Older GPUs multiply no bf16."""
_AT_ONCE_BYTES = 128 << 20
"""Of the weights, and of the gradients of the scores, that backward writes for some heads before it takes the next; a
head's are the least."""
_BLOCKS = {"forward": (64, 32, 4, 3), "queries": (64, 32, 4, 3), "keys": (32, 64, 4, 3)}
"""Queries, keys, warps and stages. With a width of 128 a block of threads takes 92 KiB of shared memory at most on
Hopper, 80 on Ampere and Ada, where they compile without spills and were not run."""

_cuda: Any = torch.cuda  # whose signatures are typed in some releases of torch only
_kernels: Any = attention_triton


@cache
def available(width: int) -> bool:
    """Whether the kernels run on this machine's current CUDA device; warns once where Triton is there but fails."""
    if _kernels is None or not torch.cuda.is_available() or torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
        return False
    query = torch.zeros((2, 16, 64, width), dtype=DTYPES[0], device="cuda")  # many-sided as in training: compiled once
    bias = query.new_zeros((1, 16, 64, 64))
    try:
        outputs = attention(query, query, query, bias, None, 1.0, 0.1)
        attention_backward(outputs[0], query, query, query, bias, None, *outputs, 1.0, 0.1, True)
    except torch.OutOfMemoryError:  # says nothing of the kernels
        raise
    except Exception as error:  # the compiler, its driver and the C compiler it calls raise many types
        warnings.warn(f"Triton could not build T5's attention, so the model's own is used: {error}", stacklevel=2)
        return False
    return True


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None, scaling: float, dropout: float
) -> Tensor:
    """The first output of `attention`. Where nobody looks at operations its kernels are started without torch's
    dispatcher, which takes Python as much as starting them does."""
    given = (query, key, value, bias, mask, scaling, dropout)
    seen = torch.compiler.is_compiling() or query.is_meta
    output: Tensor = attention(*given)[0] if seen else _Eager.apply(*given)  # type: ignore[no-untyped-call]
    return output


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """softmax(query @ key^T * scaling + bias + mask) @ value, weights dropped by a seed that is drawn here: a compiler
    may draw it again for backward, but runs no operation again that it knows nothing of.

    Args:
        query, key, value: (batch, heads, queries or keys, width), one of `DTYPES`; the last stride is 1.
        bias: (1, heads, queries, keys), any floating-point dtype, contiguous.
        mask: (batch, 1, queries, keys), any floating-point dtype, added; the last stride is 1.
        dropout: the share of weights that is dropped; the others are divided by 1 - dropout.

    Returns:
        (batch, queries, heads, width), contiguous; fp32 (batch, heads, queries): each row's largest score, and its sum
        of exp(score - largest); the seed, int64 ().
    """
    *outputs, seed = found = _empty_outputs(query)
    if dropout:
        seed.random_()
    batch, heads, queries, _ = query.shape
    arrays, numbers, constants = _arguments((query, key, value, bias, mask, seed), scaling, dropout)
    blocks = _blocks("forward", query)
    with _cuda.device_of(query):
        grid = (_number(queries, blocks["block_queries"]), batch * heads)
        _kernels.forward[grid](*arrays, *outputs, *numbers, **constants, **blocks)
    return found


def _attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    output: Tensor,
    largest: Tensor,
    total: Tensor,
    seed: Tensor,
    scaling: float,
    dropout: float,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in the layout of `output`, and of bias (empty where it is not asked for); and
    what was written on the way, of no use to the caller but counted by who counts memory.

    Args:
        gradient, output: contiguous.
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
            _kernels.of_queries[_number(queries, of_queries["block_queries"]), batch * some](
                *arrays, gradient, output, largest, total, used, d_scores, d_query, first, some, *numbers,
                **constants, **of_queries,
            )  # fmt: skip
            _kernels.of_keys_and_values[_number(keys, of_keys["block_keys"]), batch * some](
                query, gradient, used, d_scores, d_key, d_value, first, some, *query.stride()[:3],
                heads, queries, keys, scaling, width=width, **of_keys,
            )  # fmt: skip
            if of_bias:
                written = d_scores[: batch * some * queries * keys].view(batch, some, queries, keys)
                torch.sum(written, 0, dtype=bias.dtype, out=d_bias[0, first : first + some])
    return found


attention = torch.library.custom_op("offloadkit::attention", _attention, mutates_args=())
attention_backward = torch.library.custom_op("offloadkit::attention_backward", _attention_backward, mutates_args=())


@attention.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_outputs(query)


@attention_backward.register_fake
def _(_gradient: Tensor, query: Tensor, key: Tensor, _value: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _empty_gradients(query, key, bias, rest[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scaling, ctx.dropout = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(
    ctx: Any, gradient: Tensor, *_: Any, backward: Any = attention_backward
) -> tuple[Tensor | None, ...]:
    of_bias = ctx.needs_input_grad[3]
    *found, d_bias, _ = backward(gradient.contiguous(), *ctx.saved_tensors, ctx.scaling, ctx.dropout, of_bias)
    return *(one.transpose(1, 2) for one in found), d_bias if of_bias else None, None, None, None


attention.register_autograd(_differentiate, setup_context=_keep)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        found = _attention(*inputs)
        _keep(ctx, inputs, found)
        return found[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("T5's attention has no second derivative in bf16 and fp16 on a GPU: take it in fp32")
        return _differentiate(ctx, *gradients, backward=_attention_backward)


@register_flop_formula(torch.ops.offloadkit.attention)
def _flops(query: tuple[int, ...], key: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * _flops_of_a_product(query, key)


@register_flop_formula(torch.ops.offloadkit.attention_backward)
def _backward_flops(_: tuple[int, ...], query: tuple[int, ...], key: tuple[int, ...], *__: Any, **___: Any) -> int:
    return 5 * _flops_of_a_product(query, key)


def _flops_of_a_product(query: tuple[int, ...], key: tuple[int, ...]) -> int:
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
    between = query.new_empty(2 * batch * _heads_at_once(query, keys) * queries * keys)
    return query.new_empty((batch, queries, heads, width)), d_key, d_value, d_bias, between


def _arguments(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor], scaling: float, dropout: float
) -> tuple[list[Tensor], list[float], dict[str, int]]:
    """What all kernels take: arrays (for no mask one that is not read), strides and sizes, constants."""
    query, key, value, bias, mask, seed = tensors
    strides = [stride for one in (query, key, value) for stride in one.stride()[:3]]
    strides += [mask.stride(0), mask.stride(2)] if mask is not None else [0, 0]
    numbers = [*strides, query.shape[1], query.shape[2], key.shape[2], scaling, int(dropout * 2**32), 1 / (1 - dropout)]
    constants = {"has_mask": mask is not None, "drops": dropout > 0, "width": query.shape[3]}
    return [query, key, value, bias, bias if mask is None else mask, seed], numbers, constants


def _heads_at_once(query: Tensor, keys: int) -> int:
    batch, heads, queries, _ = query.shape
    groups = _number(heads * batch * queries * keys * query.element_size(), _AT_ONCE_BYTES)
    smaller: Any = torch.sym_min  # of numbers that a compiler may not know
    at_once: int = _number(heads, smaller(groups, heads))
    return at_once


def _number(length: int, block: int) -> int:
    return -(-length // block)


def _blocks(name: str, query: Tensor) -> dict[str, int]:
    """Sizes that follow from shape and GPU alone: chosen by measured time, bits would depend on the clock."""
    if query.device.type == "cpu":  # Triton's interpreter
        return {"block_queries": 32, "block_keys": 16}
    queries, keys, warps, stages = _BLOCKS[name]
    return {"block_queries": queries, "block_keys": keys, "num_warps": warps, "num_stages": stages}
