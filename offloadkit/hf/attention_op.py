"""`torch.ops.offloadkit.attention`: attention with a position bias, differentiable, by `triton_attention`'s kernels;
on the meta device shapes and flops alone."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

try:
    from offloadkit.hf import triton_attention
except ImportError:
    triton_attention = None  # type: ignore[assignment]

WIDTHS = (16, 32, 64, 128)
"""Of a head."""
DTYPES = (torch.bfloat16, torch.float16)
LEAST_QUERIES = 16
"""A matrix product's least; fewer are a text being generated."""
_LEAST_CAPABILITY = (8, 0)
"""Older GPUs are not tried: none was measured."""
_MUCH_SHARED_MEMORY = 200 << 10
"""For a block of threads, as Hopper has it. With less, smaller blocks of numbers: larger ones spill registers."""

_cuda: Any = torch.cuda  # whose signatures are typed in some releases of torch only
_kernels: Any = triton_attention


@cache
def available() -> bool:
    """Whether the kernels run on this machine's current CUDA device; warns once where Triton is there but fails."""
    if _kernels is None or not torch.cuda.is_available() or torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
        return False
    query = torch.zeros((1, 1, LEAST_QUERIES, WIDTHS[0]), dtype=DTYPES[0], device="cuda")
    bias = query.new_zeros((1, 1, LEAST_QUERIES, LEAST_QUERIES))
    try:
        outputs = attention(query, query, query, bias, None, 1.0, 0.1)
        attention_backward(outputs[0], query, query, query, bias, None, *outputs, 1.0, 0.1, True)
    except torch.OutOfMemoryError:  # says nothing of the kernels
        raise
    except Exception as error:  # the compiler, its driver and the C compiler it calls raise many types
        warnings.warn(f"Triton could not build T5's attention, so the model's own is used: {error}", stacklevel=2)
        return False
    return True


@torch.library.custom_op("offloadkit::attention", mutates_args=())
def attention(
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
    blocks = _blocks(query, forward=True)
    with _cuda.device_of(query):
        grid = (-(-queries // blocks["block_queries"]), batch * heads)
        _kernels.forward[grid](*arrays, *outputs, *numbers, **constants, **blocks)
    return found


@torch.library.custom_op("offloadkit::attention_backward", mutates_args=())
def attention_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in the layout of `output`, and of bias (empty where it is not asked for).

    Args:
        gradient: of `output`, contiguous.
    """
    gradients = d_query, d_key, d_value, d_bias = _empty_gradients(query, key, bias, of_bias)
    batch, heads, queries, width = query.shape
    arrays, numbers, constants = _arguments((query, key, value, bias, mask, seed), scaling, dropout)
    blocks, products = _blocks(query, forward=False), torch.empty_like(largest)
    of_queries, of_keys = -(-queries // blocks["block_queries"]), -(-key.shape[2] // blocks["block_keys"])
    arrays += [gradient, largest, total, products]
    with _cuda.device_of(query):
        _kernels.products_of_rows[of_queries, batch * heads](
            gradient, output, products, heads, queries, width=width, block_queries=blocks["block_queries"]
        )
        grid = (of_keys, batch * heads)
        _kernels.of_keys_and_values[grid](*arrays, d_key, d_value, *numbers, **constants, **blocks)
        _kernels.of_queries[of_queries, batch * heads](*arrays, d_query, *numbers, **constants, **blocks)
        if of_bias:
            _kernels.of_bias[of_queries, of_keys, heads](*arrays, d_bias, batch, *numbers, **constants, **blocks)
    return gradients


@attention.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_outputs(query)


@attention_backward.register_fake
def _(_gradient: Tensor, query: Tensor, key: Tensor, _value: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _empty_gradients(query, key, bias, rest[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scaling, ctx.dropout = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    of_bias = ctx.needs_input_grad[3]
    *found, d_bias = attention_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.scaling, ctx.dropout, of_bias)
    return *(one.transpose(1, 2) for one in found), d_bias if of_bias else None, None, None, None


attention.register_autograd(_differentiate, setup_context=_keep)


@register_flop_formula(torch.ops.offloadkit.attention)
def _flops(query: tuple[int, ...], key: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * _flops_of_a_product(query, key)


@register_flop_formula(torch.ops.offloadkit.attention_backward)
def _backward_flops(
    _gradient: tuple[int, ...], query: tuple[int, ...], key: tuple[int, ...], *rest: Any, **_: Any
) -> int:
    return (9 if rest[-1] else 7) * _flops_of_a_product(query, key)


def _flops_of_a_product(query: tuple[int, ...], key: tuple[int, ...]) -> int:
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * width


def _empty_outputs(query: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, queries, width = query.shape
    largest, total = (query.new_empty((batch, heads, queries), dtype=torch.float32) for _ in range(2))
    return query.new_empty((batch, queries, heads, width)), largest, total, query.new_empty((), dtype=torch.int64)


def _empty_gradients(query: Tensor, key: Tensor, bias: Tensor, of_bias: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, queries, width = query.shape
    keys = (batch, key.shape[2], heads, width)
    d_bias = torch.empty_like(bias) if of_bias else bias.new_empty(0)
    return query.new_empty((batch, queries, heads, width)), key.new_empty(keys), key.new_empty(keys), d_bias


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


def _blocks(query: Tensor, *, forward: bool) -> dict[str, int]:
    """Sizes that follow from shape and GPU alone: chosen by measured time, bits would depend on the clock."""
    if query.device.type == "cpu":  # Triton's interpreter
        return {"block_queries": 32, "block_keys": 16}
    if _shared_memory(query.device) < _MUCH_SHARED_MEMORY:
        return {"block_queries": 128 if forward else 64, "block_keys": 32, "num_warps": 8, "num_stages": 1}
    return {"block_queries": 128 if forward else 64, "block_keys": 64, "num_warps": 8, "num_stages": 2}


@cache
def _shared_memory(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
