"""Feed-forward layers in tiles of tokens, so that long rows need the memory of one tile.

Untiled, a layer of 8,192 features keeps 6 GiB of bf16 numbers for a row of 131,072 tokens. Tiled, it keeps its input,
and backward computes each tile again: eleven matmuls of the layer's size in total instead of nine. Weight gradients
are added over the tiles in fp32 and in order. The tiles follow from shapes alone, so all placements have equal bits.

`gated_feed_forward` has plain matrices. `in_tiles` runs any function of tokens, such as experts or layers with LoRA's
adapters, and differentiates it tile by tile.

The layer is two nodes of autograd. The first one saves the input and computes nothing; the second one computes and
saves nothing. A recomputed block thus ends at the first node, and computes no tile before backward needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

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
"""Most tokens times features of a tile: 256 MiB in bf16."""
ARRAYS = 5
"""Such arrays that exist at once in backward."""
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


def tile_of_experts(tokens: int, numbers: int, weights: Callable[[], Sequence[Tensor]]) -> int:
    """Tokens of a tile of a layer of experts; 0: too few tokens for tiles.

    Each tile reads and writes the sums of the gradients of all experts, four bytes for each number of the weights. So a
    tile's arrays are about as large as the sums, and tiles begin where they halve the memory.

    Args:
        numbers: of a token, in all arrays of its experts.
        weights: returns those of all experts. It is called for many tokens only.
    """
    if tokens * numbers < ARRAYS * LONG_ROW:
        return 0
    summed = sum(each.numel() for each in weights() if each.requires_grad)
    return 0 if tokens * numbers < 4 * summed else tile_size(tokens, numbers, max(ARRAYS * TILE, summed))


def tile_size(tokens: int, features: int, most: int) -> int:
    """Tokens of equal tiles of at most about `most` features: a multiple of `ROWS`."""
    number = max(1, -(-tokens * features // most))
    return -(-tokens // number // ROWS) * ROWS


def tiles(tokens: int, features: int) -> list[slice]:
    """Equal tiles, multiples of `ROWS` tokens except the last one."""
    size = tile_size(tokens, features, TILE)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


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
    return _applied(_Gated(activation, kernels), (*x.shape[:-1], len(back)), [x, *into, back, *biases])


def in_tiles(
    bind: Callable[[Sequence[Tensor]], Callable[..., Tensor]],
    tokens: Sequence[Tensor],
    weights: Sequence[Tensor],
    width: int,
    size: int,
) -> Tensor:
    """`bind(weights)(*tokens)` in tiles, differentiable any number of times: [number of tokens, width].

    Args:
        bind: returns a function that is free of random numbers, and computes each token's output from that token's
            numbers alone.
        tokens: each [number of tokens, ...]. The output has the dtype of the first tensor.
        size: tokens of a tile.
    """
    shape = (len(tokens[0]), width)
    return _applied(_Function(bind, len(tokens), size), shape, [*tokens, *weights])


class _Work(Protocol):
    """A layer's computation. The first of its tensors gives the output's dtype and device."""

    def in_tiles(self, tensors: Sequence[Any], output: Tensor) -> None:
        """Write the output, one tile at a time."""

    def whole(self, tensors: Sequence[Any]) -> Tensor:
        """The same output, differentiable."""

    def gradients(self, tensors: Sequence[Any], gradient: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of the tensors that need one, else None, one tile at a time."""


def _applied(work: _Work, shape: tuple[int, ...], tensors: Sequence[Tensor | None]) -> Tensor:
    apply_saved: Any = _Saved.apply
    apply_computed: Any = _Computed.apply
    place = apply_saved(work, shape, *tensors)
    output: Tensor = apply_computed(place, [None if each is None else each.detach() for each in tensors], work)
    return output


class _Saved(torch.autograd.Function):
    """Its output has the shape of the layer's output, and no memory."""

    @staticmethod
    def forward(ctx: Any, work: _Work, shape: tuple[int, ...], *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.work = work
        first: Any = tensors[0]
        place: Tensor = first.new_empty(1).expand(shape)
        return place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), tensors = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return None, None, *decoder.differentiable_gradients(ctx.work.whole(tensors), tensors, gradient)
        with _tiling():
            return None, None, *ctx.work.gradients(tensors, gradient, ctx.needs_input_grad[2:])


class _Computed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: Tensor, tensors: Sequence[Any], work: _Work) -> Tensor:
        output: Tensor = tensors[0].new_empty(place.shape)
        with _tiling():
            work.in_tiles(tensors, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None, None


# -- any function of tokens


@dataclass(frozen=True)
class _Function:
    bind: Callable[[Sequence[Tensor]], Callable[..., Tensor]]
    num_tokens: int
    """Number of tensors that have a token in each row; weights follow them."""
    size: int

    def in_tiles(self, tensors: Sequence[Any], output: Tensor) -> None:
        run = self.bind(tensors[self.num_tokens :])
        for tile in self._tiles(output):
            output[tile] = run(*(each[tile] for each in tensors[: self.num_tokens]))

    def whole(self, tensors: Sequence[Any]) -> Tensor:
        output: Tensor = self.bind(tensors[self.num_tokens :])(*tensors[: self.num_tokens])
        return output

    def gradients(self, tensors: Sequence[Any], gradient: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        leaves = [each.detach().requires_grad_(need) for each, need in zip(tensors, needs, strict=True)]
        tokens, weights = leaves[: self.num_tokens], leaves[self.num_tokens :]
        found: list[Tensor | None] = [torch.zeros_like(each) if each.requires_grad else None for each in tokens]
        sums = dict[int, Tensor]()
        for at, weight in enumerate(weights):
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(partial(_add_gradient, sums, at))
        run = self.bind(weights)
        for tile in self._tiles(gradient):
            parts = [each[tile].detach().requires_grad_(each.requires_grad) for each in tokens]
            with torch.enable_grad():
                output = run(*parts)
            if output.requires_grad:
                torch.autograd.backward(output, gradient[tile])
            for part, whole in zip(parts, found, strict=True):
                if whole is not None and part.grad is not None:
                    whole[tile] = part.grad
            del parts, part, output
        found += [sums.pop(at).to(weight.dtype) if at in sums else None for at, weight in enumerate(weights)]
        return found

    def _tiles(self, rows: Tensor) -> list[slice]:
        return [slice(start, min(start + self.size, len(rows))) for start in range(0, len(rows), self.size)]


def _add_gradient(sums: dict[int, Tensor], at: int, weight: Tensor) -> None:
    """Move a weight's gradient to its sum. A weight without a gradient in any tile has no sum."""
    gradient: Any = weight.grad
    weight.grad = None
    if at in sums:
        sums[at] += gradient
    else:
        sums[at] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))


# -- gated layers


@dataclass(frozen=True)
class _Gated:
    activation: str
    kernels: bool

    def in_tiles(self, tensors: Sequence[Any], output: Tensor) -> None:
        layer = self._layer(tensors)
        matrix, bias = layer.back
        rows, outputs = tensors[0].reshape(-1, tensors[0].shape[-1]), output.view(-1, len(matrix))
        for tile in tiles(len(rows), layer.features):
            product = layer.product(layer.hidden(rows[tile]))
            if bias is None:
                torch.mm(product, matrix.t(), out=outputs[tile])
            else:
                torch.addmm(bias, product, matrix.t(), out=outputs[tile])
            del product

    def whole(self, tensors: Sequence[Any]) -> Tensor:
        layer = self._layer(tensors)
        return F.linear(layer.product(layer.hidden(tensors[0])), *layer.back)

    def gradients(self, tensors: Sequence[Any], gradient: Tensor, needs: Sequence[bool]) -> list[Tensor | None]:
        return _backward(self._layer(tensors), tensors[0], gradient, needs)

    def _layer(self, tensors: Sequence[Any]) -> _Layer:
        return _Layer(tensors[1:], self.activation, self.kernels)


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
