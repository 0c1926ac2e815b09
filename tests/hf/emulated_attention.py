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


def _of_scores(arrays: Any, numbers: Any, has_mask: bool, drops: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Weights as they were used, gradients of the scores, of the output by heads."""
    query, key, value, bias, mask, seed, gradient, largest, total, product = arrays
    scores = _scores(query, key, bias, mask, numbers, has_mask)
    weights = (scores - largest[..., None]).exp() / total[..., None]
    kept, into = _kept(seed, weights, numbers, drops), gradient.float().transpose(1, 2)
    d_weights = into @ value.float().transpose(2, 3) * kept
    return weights * kept, weights * (d_weights - product[..., None]), into


def _of_queries(*given: Any, has_mask: bool, drops: bool, **_: Any) -> None:
    arrays, d_query, numbers = given[:10], given[10], given[11:]
    d_scores = _of_scores(arrays, numbers, has_mask, drops)[1]
    d_query.copy_((d_scores @ arrays[1].float() * numbers[-3]).transpose(1, 2))


def _of_keys_and_values(*given: Any, has_mask: bool, drops: bool, **_: Any) -> None:
    arrays, (d_key, d_value), numbers = given[:10], given[10:12], given[12:]
    used, d_scores, into = _of_scores(arrays, numbers, has_mask, drops)
    d_value.copy_((used.transpose(2, 3) @ into).transpose(1, 2))
    d_key.copy_((d_scores.transpose(2, 3) @ arrays[0].float() * numbers[-3]).transpose(1, 2))


def _of_bias(*given: Any, has_mask: bool, drops: bool, **_: Any) -> None:
    arrays, d_bias, numbers = given[:10], given[10], given[12:]
    d_bias.copy_(_of_scores(arrays, numbers, has_mask, drops)[1].sum(0, keepdim=True))


KERNELS = SimpleNamespace(
    forward=_Kernel(_forward),
    products_of_rows=_Kernel(_products_of_rows),
    of_queries=_Kernel(_of_queries),
    of_keys_and_values=_Kernel(_of_keys_and_values),
    of_bias=_Kernel(_of_bias),
)
