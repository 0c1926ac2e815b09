"""Gated feed-forward layers in tiles of tokens, so that long rows need the memory of one tile.

Untiled, a layer of 8,192 features keeps 6 GiB of bf16 numbers for a row of 131,072 tokens. Tiled, it keeps its input,
and backward computes each tile again: eleven matmuls of the layer's size in total instead of nine. Weight gradients
are added over the tiles in fp32 and in order. The tiles follow from shapes alone, so all placements have equal bits.

The layer is two nodes of autograd. The first one saves the input and computes nothing; the second one computes and
saves nothing. A recomputed block thus ends at the first node, and computes no tile before backward needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from offloadkit.kernels import decoder
from offloadkit.kernels.linear_cross_entropy import ADDS_IN_FP32

LONG_ROW = 1 << 28
"""The layer is tiled if tokens of a row times features reach this number: 32,768 tokens with 8,192 features. Many
short rows are not tiled, because a smaller micro-batch needs less memory without more matmuls.
"""
TILE = 1 << 27
"""Most tokens times features of a tile: 256 MiB in bf16. Backward has five such arrays at once."""
ROWS = 256
"""Tokens of a tile are a multiple of this number."""
DTYPES = (*decoder.DTYPES, torch.float64)

_is_tiling: ContextVar[bool] = ContextVar("is_tiling", default=False)


def is_tiling() -> bool:
    """Whether this thread computes a tile, whose results nothing should keep."""
    return _is_tiling.get()


@contextmanager
def _tiling() -> Iterator[None]:
    before = _is_tiling.set(True)
    try:
        yield
    finally:
        _is_tiling.reset(before)


def is_long(x: Tensor, features: int) -> bool:
    """Whether the rows of `x`, [..., tokens, width], are long enough for tiles."""
    return x.dim() >= 2 and x.shape[-2] * features >= LONG_ROW


def tiles(tokens: int, features: int) -> list[slice]:
    """Equal tiles, multiples of `ROWS` tokens except the last one."""
    number = max(1, -(-tokens * features // TILE))
    size = -(-tokens // number // ROWS) * ROWS
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


@dataclass(frozen=True)
class _Layer:
    """A layer's weights and how to compute it.

    Attributes:
        weights: one matrix for gate and up, or one for each, and the matrix back; then their biases or None.
    """

    weights: Sequence[Any]
    activation: str
    kernels: bool

    @property
    def _matrices(self) -> int:
        return len(self.weights) // 2

    @property
    def into(self) -> list[tuple[Tensor, Tensor | None]]:
        return list(zip(self.weights[: self._matrices], self.weights[self._matrices :], strict=True))[:-1]

    @property
    def back(self) -> tuple[Tensor, Tensor | None]:
        return self.weights[self._matrices - 1], self.weights[-1]

    @property
    def features(self) -> int:
        return self.back[0].shape[1]

    def hidden(self, x: Tensor) -> list[Tensor]:
        """[tokens, features] of gate and of up, or both in one."""
        return [F.linear(x, matrix, bias) for matrix, bias in self.into]

    def product(self, hidden: Sequence[Tensor]) -> Tensor:
        gate, up = (*hidden, None)[:2]
        gated: Any = decoder.gated if self._fused(hidden[0]) else decoder.eager
        product: Tensor = gated(gate, up, self.activation)
        return product

    def gradients(self, hidden: Sequence[Tensor], d_product: Tensor) -> list[Tensor]:
        gate, up = hidden[0], hidden[1] if len(hidden) == 2 else None
        run = decoder.gated_gradients if self._fused(hidden[0]) else decoder.eager_gradients
        return run(d_product, gate, up, self.activation)

    def _fused(self, like: Tensor) -> bool:
        return self.kernels and like.device.type in ("cuda", "meta") and like.dtype in decoder.DTYPES


def gated_feed_forward(
    x: Tensor,
    into: Sequence[Tensor],
    back: Tensor,
    biases: Sequence[Tensor | None],
    activation: str,
    *,
    kernels: bool,
) -> Tensor:
    """(activation(x @ gate.T) * (x @ up.T)) @ back.T in tiles, differentiable any number of times: [..., width].

    Args:
        x: [..., width], of one of `DTYPES`, as all weights.
        into: gate and up, each [features, width], or both in one matrix of [2 * features, width].
        back: [width, features].
        biases: one for each matrix of `into`, then one for `back`; None: no bias.
        activation: one of `decoder.ACTIVATIONS`.
        kernels: use the kernels of `decoder` on a GPU, where they must be `available`, and on the meta device.
    """
    weights = [*into, back, *biases]
    apply_saved: Any = _Saved.apply
    apply_computed: Any = _Computed.apply
    place = apply_saved(x, activation, kernels, *weights)
    detached = [None if each is None else each.detach() for each in (x, *weights)]
    output: Tensor = apply_computed(place, detached, activation, kernels)
    return output


class _Saved(torch.autograd.Function):
    """Its output has the shape of the layer's output, and no memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, kernels: bool, *weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.activation, ctx.kernels = activation, kernels
        width = len(_Layer(weights, activation, kernels).back[0])
        return x.new_empty(1).expand(*x.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (x, *weights) = gradients, ctx.saved_tensors
        layer = _Layer(weights, ctx.activation, ctx.kernels)
        needs = [ctx.needs_input_grad[0], *ctx.needs_input_grad[3:]]
        if torch.is_grad_enabled():  # create_graph=True
            output = F.linear(layer.product(layer.hidden(x)), *layer.back)
            d_x, *d_weights = decoder.differentiable_gradients(output, [x, *weights], gradient)
        else:
            with _tiling():
                d_x, *d_weights = _backward(layer, x, gradient, needs)
        return d_x, None, None, *d_weights


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: Tensor, tensors: Sequence[Any], activation: str, kernels: bool) -> Tensor:
        layer = _Layer(tensors[1:], activation, kernels)
        matrix, bias = layer.back
        rows: Tensor = tensors[0].reshape(-1, tensors[0].shape[-1])
        output = rows.new_empty(len(rows), len(matrix))
        with _tiling():
            for tile in tiles(len(rows), layer.features):
                product = layer.product(layer.hidden(rows[tile]))
                if bias is None:
                    torch.mm(product, matrix.t(), out=output[tile])
                else:
                    torch.addmm(bias, product, matrix.t(), out=output[tile])
                del product
        return output.view(place.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None, None, None


def _backward(layer: _Layer, x: Tensor, gradient: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of `x` and of the weights that need one, else None."""
    rows, d_rows = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    wide = torch.promote_types(x.dtype, torch.float32)
    d_x = torch.empty_like(rows) if needs[0] else None
    sums = [
        None if weight is None or not needed else torch.zeros(weight.shape, dtype=wide, device=weight.device)
        for weight, needed in zip(layer.weights, needs[1:], strict=True)
    ]
    for tile in tiles(len(rows), layer.features):
        _backward_of_tile(layer, rows[tile], d_rows[tile], None if d_x is None else d_x[tile], sums)
    found = [None if d_x is None else d_x.view(x.shape)]
    while sums:  # each sum is freed before the next is converted
        total = sums.pop(0)
        found.append(None if total is None else total.to(x.dtype))
    return found


def _backward_of_tile(
    layer: _Layer, x: Tensor, d_output: Tensor, d_x: Tensor | None, sums: Sequence[Tensor | None]
) -> None:
    """Write the gradient of `x`, and add to the gradients of the weights, `sums`."""
    number, hidden = len(sums) // 2, layer.hidden(x)
    _add(sums[number - 1], sums[-1], d_output, layer.product(hidden))
    d_hidden = layer.gradients(hidden, d_output @ layer.back[0])
    del hidden
    for at, (matrix, _) in enumerate(layer.into):
        _add(sums[at], sums[number + at], d_hidden[at], x)
        if d_x is not None and at == 0:
            torch.mm(d_hidden[at], matrix, out=d_x)
        elif d_x is not None:
            torch.addmm(d_x, d_hidden[at], matrix, out=d_x)


def _add(matrix: Tensor | None, bias: Tensor | None, d_output: Tensor, input: Tensor) -> None:
    """Add one tile's gradients of a matrix and its bias."""
    if matrix is not None and matrix.dtype == input.dtype:
        torch.addmm(matrix, d_output.t(), input, out=matrix)
    elif matrix is not None and ADDS_IN_FP32 and input.is_cuda:
        torch.addmm(matrix, d_output.t(), input, out_dtype=matrix.dtype, out=matrix)
    elif matrix is not None:
        matrix += d_output.t() @ input
    if bias is not None:
        bias += d_output.sum(0, dtype=bias.dtype)
