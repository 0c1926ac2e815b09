"""Feed-forward layers in tiles of tokens, compared with the whole layer by torch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from offloadkit.engine.tracing import META, OpCounter
from offloadkit.kernels import feed_forward
from offloadkit.kernels.decoder import ACTIVATIONS

WIDTH, FEATURES, TOKENS = 24, 40, 700


@pytest.fixture(autouse=True)
def three_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_forward, "TILE", 256 * FEATURES)


def layer(dtype: torch.dtype, *, joint: bool, biased: bool, device: str = "cpu") -> list[Any]:
    """x, the matrices and the biases."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=draw) / shape[-1] ** 0.5
        return numbers.to(device, dtype).detach().requires_grad_()

    into = [drawn(2 * FEATURES, WIDTH)] if joint else [drawn(FEATURES, WIDTH), drawn(FEATURES, WIDTH)]
    matrices = [*into, drawn(WIDTH, FEATURES)]
    biases = [drawn(len(each)) if biased else None for each in matrices]
    return [(drawn(2, TOKENS // 2, WIDTH) * WIDTH**0.5).detach().requires_grad_(), matrices, biases]


def whole(x: Tensor, matrices: list[Tensor], biases: list[Any], activation: str) -> Tensor:
    """The slow reference."""
    hidden = [F.linear(x, matrix, bias) for matrix, bias in zip(matrices[:-1], biases[:-1], strict=True)]
    gate, up = hidden if len(hidden) == 2 else hidden[0].chunk(2, dim=-1)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return F.linear(gate * up, matrices[-1], biases[-1])


def tiled(x: Tensor, matrices: list[Tensor], biases: list[Any], activation: str) -> Tensor:
    return feed_forward.gated_feed_forward(x, matrices[:-1], matrices[-1], biases, activation, kernels=True)


def trained(x: Tensor, matrices: list[Tensor], biases: list[Any]) -> list[Tensor]:
    return [x, *matrices, *(each for each in biases if each is not None)]


def results(run: Any, given: list[Any], activation: str) -> list[Tensor]:
    """The output and all gradients."""
    output = run(*given, activation)
    gradient = torch.linspace(-1, 2, output.numel(), dtype=output.dtype, device=output.device).view(output.shape)
    return [output, *torch.autograd.grad(output, trained(*given), gradient)]


def test_tiles_follow_from_shapes_and_cover_all_tokens() -> None:
    assert feed_forward.tiles(TOKENS, FEATURES) == [slice(0, 256), slice(256, 512), slice(512, 700)]
    assert feed_forward.tiles(3, FEATURES) == [slice(0, 3)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("joint", "biased"), [(False, False), (True, False), (False, True), (True, True)])
def test_tiles_equal_the_whole_layer(activation: str, joint: bool, biased: bool) -> None:
    given = layer(torch.float64, joint=joint, biased=biased)
    for found, expected in zip(results(tiled, given, activation), results(whole, given, activation), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_are_as_near_to_exact_numbers_as_the_whole_layer(dtype: torch.dtype, device: str) -> None:
    given = layer(dtype, joint=False, biased=False, device=device)
    wide = [given[0].detach().double().requires_grad_(), [each.detach().double() for each in given[1]], given[2]]
    for each in wide[1]:
        each.requires_grad_()
    exact = results(whole, wide, "silu")
    for found, own, right in zip(results(tiled, given, "silu"), results(whole, given, "silu"), exact, strict=True):
        assert found.dtype == dtype
        scale = right.abs().max()
        assert (found - right).abs().max() <= 1.5 * (own - right).abs().max() + 1e-6 * scale


def test_frozen_weights_and_inputs_have_no_gradient() -> None:
    x, matrices, biases = layer(torch.float32, joint=False, biased=False)
    expected = results(whole, [x, matrices, biases], "silu")
    for each in matrices[1:]:
        each.requires_grad_(False)
    output = tiled(x, matrices, biases, "silu")
    gradient = torch.linspace(-1, 2, output.numel()).view(output.shape)
    output.backward(gradient)
    torch.testing.assert_close([x.grad, matrices[0].grad], expected[1:3], rtol=1e-5, atol=1e-4)
    assert matrices[1].grad is matrices[2].grad is None
    frozen = tiled(x.detach(), [each.detach() for each in matrices], biases, "silu")
    assert not frozen.requires_grad
    assert torch.equal(frozen, output)


def test_second_derivatives_are_those_of_the_whole_layer() -> None:
    given = layer(torch.float64, joint=False, biased=True)

    def second(run: Any) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(run(*given, "silu").square().sum(), trained(*given), create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), trained(*given))

    torch.testing.assert_close(second(tiled), second(whole))


def test_a_written_weight_is_an_error_in_backward() -> None:
    given = layer(torch.float32, joint=False, biased=False)
    output = tiled(*given, "silu")
    with torch.no_grad():
        given[1][0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_one_tile_s_activations_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, width, features, rows = 131_072, 3072, 8192, 16_384
    monkeypatch.setattr(feed_forward, "TILE", rows * features)
    x = torch.empty(1, tokens, width, dtype=torch.bfloat16, device=META, requires_grad=True)
    shapes = [(features, width), (features, width), (width, features)]
    matrices = [torch.empty(shape, dtype=torch.bfloat16, device=META, requires_grad=True) for shape in shapes]
    with OpCounter([x, *matrices], mask_is_full=True) as counter:
        output = tiled(x, matrices, [None] * 3, "silu")
        tile, weights = rows * features * 2, 3 * features * width
        assert counter.live - output.nbytes < 1024  # x and the weights existed before
        assert counter.peak <= output.nbytes + 3 * tile + 1024
        matmuls = 2 * tokens * width * features
        assert counter.total.flops == 3 * matmuls
        before_backward = counter.peak = counter.live
        before = counter.total
        gradients = torch.autograd.grad(output, [x, *matrices], torch.empty_like(output))
        held = x.nbytes + output.nbytes + weights * 4  # gradients of x and of the output, and the sums
        assert counter.peak - before_backward < held + 5.5 * tile
        assert (counter.total - before).flops == 8 * matmuls
    assert [each.shape for each in gradients] == [x.shape, *(each.shape for each in matrices)]


def test_tiles_of_any_function_equal_the_function() -> None:
    """Three tiles of two tensors with a number for each token; one weight is frozen, and one is not used."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(TOKENS, WIDTH), (TOKENS, 2), (WIDTH, FEATURES), (FEATURES, 2), (FEATURES, WIDTH), (3,)]
    given = [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes]
    given[4].requires_grad_(False)
    trained, sizes = [*given[:4], given[5]], []

    def bind(weights: Any) -> Any:
        def run(x: Tensor, scales: Tensor) -> Tensor:
            sizes.append(len(x))
            return ((x @ weights[0]).tanh() * (weights[1] @ scales.T).T) @ weights[2]

        return run

    def results(output: Tensor) -> list[Any]:
        once = torch.autograd.grad(output, trained, torch.ones_like(output), retain_graph=True, allow_unused=True)
        first = torch.autograd.grad(output.square().sum(), trained, create_graph=True, allow_unused=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first[:4]), trained[:4])
        return [output, *first[:4], *second, *once[:4], first[4], once[4]]

    tiles = feed_forward.in_tiles(bind, given[:2], given[2:], WIDTH, 256)
    assert sizes == [256, 256, 188]
    for found, expected in zip(results(tiles), results(bind(given[2:])(*given[:2])), strict=True):
        assert found is expected is None or torch.allclose(found, expected, rtol=1e-10, atol=1e-10)
