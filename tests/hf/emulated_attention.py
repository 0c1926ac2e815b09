"""The attention kernels in torch operations, with the interface of Triton's kernels, for tests without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.kernels.attention_reference import is_kept


class Kernel:
    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(number > 0 for number in grid)
        return self.run


def _scores(query: Tensor, key: Tensor, bias: Tensor, mask: Tensor, numbers: Any, has_mask: bool) -> Tensor:
    assert all(one.stride(-1) == 1 for one in (query, key, bias, mask))  # required by the kernels
    scores = query.float() @ key.float().transpose(2, 3) * numbers[-3] + bias.float()
    return scores + mask.float() if has_mask else scores


def _kept(seed: Tensor, weights: Tensor, numbers: Any, drops: bool) -> Tensor:
    """The factor of each weight in dropout."""
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


def _of_queries(*given: Any, has_mask: bool, drops: bool, **_: Any) -> None:
    query, key, value, bias, mask, seed, gradient, output, largest, total = given[:10]
    (all_used, all_d_scores, d_query, first, some), numbers = given[10:15], given[15:]
    scores = _scores(query, key, bias, mask, numbers, has_mask)
    weights = (scores - largest[..., None]).exp() / total[..., None]
    kept, into = _kept(seed, weights, numbers, drops), gradient.float().transpose(1, 2)
    products = (into * output.float().transpose(1, 2)).sum(-1, keepdim=True)
    found = weights * (into @ value.float().transpose(2, 3) * kept - products)
    heads = slice(first, first + some)
    for buffer, computed in ((all_used, weights * kept), (all_d_scores, found)):
        buffer[: computed[:, heads].numel()] = computed[:, heads].flatten().to(buffer.dtype)
    d_query[:, :, heads] = (found @ key.float() * numbers[-3]).transpose(1, 2)[:, :, heads].to(d_query.dtype)


def _of_keys_and_values(
    query: Tensor, gradient: Tensor, used: Tensor, d_scores: Tensor, d_key: Tensor, d_value: Tensor, first: int,
    some: int, *numbers: Any, **_: Any
) -> None:  # fmt: skip
    heads, (num_queries, num_keys) = slice(first, first + some), numbers[-3:-1]
    shape = (query.shape[0], some, num_queries, num_keys)
    weights, of_scores = (one[: math.prod(shape)].view(shape).float().transpose(2, 3) for one in (used, d_scores))
    d_value[:, :, heads] = (weights @ gradient.float().transpose(1, 2)[:, heads]).transpose(1, 2).to(d_value.dtype)
    found = of_scores @ query[:, heads].float() * numbers[-1]
    d_key[:, :, heads] = found.transpose(1, 2).to(d_key.dtype)


KERNELS = SimpleNamespace(
    forward=Kernel(_forward), of_queries=Kernel(_of_queries), of_keys_and_values=Kernel(_of_keys_and_values)
)
