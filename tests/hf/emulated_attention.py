"""The kernels of attention in torch's operations, called as Triton's are: what is around them runs without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.hf.attention_reference import is_kept


class _Kernel:
    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(number > 0 for number in grid)
        return self._run


def _scores(query: Tensor, key: Tensor, bias: Tensor, mask: Tensor, numbers: Any, has_mask: bool) -> Tensor:
    assert all(one.stride(-1) == 1 for one in (query, key, bias, mask))  # the kernels take no other
    scores = query.float() @ key.float().transpose(2, 3) * numbers[-3] + bias.float()
    return scores + mask.float() if has_mask else scores


def _kept(seed: Tensor, weights: Tensor, numbers: Any, drops: bool) -> Tensor:
    """What each weight is multiplied with."""
    if not drops:
        return torch.ones(())
    return is_kept(int(seed), tuple(weights.shape), numbers[-2] / 2**32).float() * numbers[-1]


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor, seed: Tensor,
    output: Tensor, largest: Tensor, total: Tensor, *numbers: Any, has_mask: bool, drops: bool, **_: Any
) -> None:  # fmt: skip
    scores = _scores(query, key, bias, mask, numbers, has_mask)
    largest.copy_(scores.amax(-1))
    weights = (scores - largest[..., None]).exp()
    total.copy_(weights.sum(-1))
    weights = weights / total[..., None] * _kept(seed, weights, numbers, drops)
    output.copy_((weights @ value.float()).transpose(1, 2))


def _products_of_rows(gradient: Tensor, output: Tensor, product: Tensor, *_: Any, **__: Any) -> None:
    product.copy_((gradient.float() * output.float()).sum(-1).transpose(1, 2))


def _of_scores(*given: Any, has_mask: bool, drops: bool, of_bias: bool, **_: Any) -> None:
    query, key, value, bias, mask, seed, gradient, largest, total, product = given[:10]
    (all_used, all_d_scores, d_bias, _batches, first), numbers = given[10:15], given[15:]
    scores = _scores(query, key, bias, mask, numbers, has_mask)
    weights = (scores - largest[..., None]).exp() / total[..., None]
    kept, into = _kept(seed, weights, numbers, drops), gradient.float().transpose(1, 2)
    found = weights * (into @ value.float().transpose(2, 3) * kept - product[..., None])
    heads = slice(first, first + all_used.shape[1])
    for into_buffer, computed in ((all_used, weights * kept), (all_d_scores, found)):
        computed = computed[:, heads]
        into_buffer.view(-1)[: computed.numel()].copy_(computed.flatten())
    if of_bias:
        d_bias[:, heads] = found[:, heads].sum(0, keepdim=True)


def _of_queries(key: Tensor, d_scores: Tensor, d_query: Tensor, first: int, some: int, *numbers: Any, **_: Any) -> None:
    heads = slice(first, first + some)
    found = _some(d_scores, some) @ key[:, heads].float() * numbers[-1]
    d_query[:, :, heads] = found.transpose(1, 2).to(d_query.dtype)


def _of_keys_and_values(
    query: Tensor, gradient: Tensor, used: Tensor, d_scores: Tensor, d_key: Tensor, d_value: Tensor, first: int,
    some: int, *numbers: Any, **_: Any
) -> None:  # fmt: skip
    heads = slice(first, first + some)
    into = gradient.float().transpose(1, 2)[:, heads]
    d_value[:, :, heads] = (_some(used, some).transpose(2, 3) @ into).transpose(1, 2).to(d_value.dtype)
    found = _some(d_scores, some).transpose(2, 3) @ query[:, heads].float() * numbers[-1]
    d_key[:, :, heads] = found.transpose(1, 2).to(d_key.dtype)


def _some(between: Tensor, some: int) -> Tensor:
    """(batch, some heads, queries, keys) of what was written for them."""
    batch, _, queries, keys = between.shape
    return between.reshape(-1)[: batch * some * queries * keys].view(batch, some, queries, keys).float()


KERNELS = SimpleNamespace(
    forward=_Kernel(_forward),
    products_of_rows=_Kernel(_products_of_rows),
    of_scores=_Kernel(_of_scores),
    of_queries=_Kernel(_of_queries),
    of_keys_and_values=_Kernel(_of_keys_and_values),
)
