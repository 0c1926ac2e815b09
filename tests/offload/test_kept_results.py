"""Recomputation that keeps the results of matmuls and attention: what is kept and computed, and equal gradients."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ModelError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.kernels import attention as attention_op
from offloadkit.offload import kept_results
from offloadkit.offload.recompute import cheaply_recomputed_in_backward, recomputed_in_backward
from offloadkit.planner import Plan, placed
from tests.hf import emulated_attention
from tests.models import Cube

DEVICE = torch.device("cpu")
Function = Callable[..., torch.Tensor]


class Ran(TorchDispatchMode):
    """Counts operations by name."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[operation.name().partition(".")[0].rpartition("::")[2]] += 1
        return operation(*args, **(kwargs or {}))


def gradients(function: Function, shapes: Sequence[tuple[int, ...]], cheap: bool) -> tuple[list[Any], Counter[str]]:
    """The output, the gradients of normal inputs of these shapes, the next random number; operations of backward."""
    torch.manual_seed(3)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    output = cheaply_recomputed_in_backward(DEVICE, function, *inputs) if cheap else function(*inputs)
    with Ran() as ran:
        output.sum().backward()
    return [output, *(each.grad for each in inputs), torch.rand(1)], ran.names


def check(function: Function, *shapes: tuple[int, ...]) -> Counter[str]:
    """Check that gradients are equal; returns the operations of backward beyond those of the plain function."""
    plain, of_plain = gradients(function, shapes, cheap=False)
    found, ran = gradients(function, shapes, cheap=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))
    return ran - of_plain


@pytest.fixture
def all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_results, "MIN_PRODUCTS", 1)


@pytest.mark.usefixtures("all_kept")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("masked", [False, True])
def test_matmuls_and_attention_are_not_computed_again(dropout: float, masked: bool) -> None:
    def function(x: torch.Tensor, up: torch.Tensor, bias: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        query, key, value = F.linear(F.layer_norm(x, (8,)), up, bias).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mask = torch.ones(5, 5).tril().log() if masked else None
        found = F.scaled_dot_product_attention(query.sin(), key.sin(), value, mask, dropout)
        found = F.dropout(found.transpose(1, 2).reshape(2, 5, 8), 0.5)  # its random numbers follow those of attention
        return x + torch.tanh(found @ down) @ down.mT

    again = check(function, (2, 5, 8), (24, 8), (24,), (8, 8))
    assert again["native_layer_norm"] == 1
    assert again["sin"] == 2
    assert again["tanh"] == 1
    assert not [name for name in again if "mm" in name or "attention" in name]


@pytest.mark.usefixtures("all_kept")
def test_results_that_are_written_later_are_computed_again() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        first = x @ w
        first.mul_(2.0)
        second = first.exp() @ w
        second[0].relu_()  # in a view
        third = second @ w
        return (third.sigmoid() @ w).tanh()

    assert check(function, (4, 4), (4, 4))["mm"] == 2


@pytest.mark.usefixtures("all_kept")
def test_a_result_that_is_written_after_the_block_is_computed_again() -> None:
    found = []
    for cheap in (False, True):
        x = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_()
        run = cheaply_recomputed_in_backward if cheap else lambda _, function, *args: function(*args)

        def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = x @ x
            return first, (first + 1).sin()

        first, second = run(DEVICE, function, x)
        first.zero_()
        second.sum().backward()
        found.append(x.grad)
    assert torch.equal(found[0], found[1])


class OtherTheSecondTime(nn.Module):
    """Runs other matmuls the second time. All of them have equal shapes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(8, 8, bias=False) for _ in range(2))
        self.how, self.num_runs = how, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_runs += 1
        first, second, is_second = self.first, self.second, self.num_runs == 2
        if self.how == "swapped" and is_second:
            first, second = second, first
        if (self.how == "fewer" and not is_second) or (self.how == "more" and is_second):
            x = x + x.detach() @ torch.ones(8, 8)
        found = first(x).tanh() * second(x).sigmoid()
        if self.how == "more, at the end" and is_second:
            found = found + x.detach() @ x.detach()
        return found.sin()


@pytest.mark.usefixtures("all_kept")
@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("fewer", "ran 0 of its matmuls and attention before it saved tensor 0, but in its forward 1"),
        ("more", "ran 1 of its matmuls and attention before it saved tensor 0, but in its forward 0"),
        ("more, at the end", r"ran aten::mm.* as number 3 of its matmuls and attention, but in its forward only 2"),
        ("swapped", r"ran aten::mm.* of \[8, 8\] float32, .* but in its forward aten::mm.* with another parameter"),
    ],
)
def test_a_second_run_with_other_matmuls_raises(how: str, found: str) -> None:
    x = torch.ones(8, 8, requires_grad=True)
    output = cheaply_recomputed_in_backward(DEVICE, OtherTheSecondTime(how), x)
    with pytest.raises(ModelError, match=f"a recomputed block {found}: its result depends on .*activations='keep'"):
        output.sum().backward()


@pytest.mark.usefixtures("all_kept")
def test_a_second_run_with_another_operation_raises() -> None:
    other = iter([False, True])

    def function(x: torch.Tensor) -> torch.Tensor:
        return (torch.addmm(x, x, x) if next(other) else x @ x).sin()

    output = cheaply_recomputed_in_backward(DEVICE, function, torch.ones(3, 3, requires_grad=True))
    with pytest.raises(ModelError, match=r"ran aten::addmm.* but in its forward aten::mm.*: its result depends on"):
        output.sum().backward()


@pytest.mark.usefixtures("all_kept")
def test_the_functions_of_others_are_run_again() -> None:
    assert check(lambda x, w: Cube.apply(x @ w).sin(), (3, 4), (4, 4))["mm"] == 0


@pytest.mark.usefixtures("all_kept")
def test_backwards_inside_the_block_leave_the_results_in_order() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(((x @ w).sin() @ w).exp().sum(), x)
        (other,) = torch.autograd.grad(((x * slope) @ w).exp().sum(), x)  # the results before it are dropped by now
        return (((x * other) @ w).tanh() @ w.mT).sin()

    check(function, (3, 4), (4, 4))


def test_a_matmul_that_adds_few_products_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_results, "MIN_PRODUCTS", 6)

    def attention(query: torch.Tensor, key: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((query @ key.mT).softmax(-1) @ key).sin() @ w

    again = check(attention, (2, 7, 5), (2, 7, 5), (5, 5))
    assert again["bmm"] == 1
    assert again["mm"] == 0


def alive(function: Function, run: Callable[..., Any], backward: bool) -> tuple[int, int]:
    """Bytes of the tensors that matmuls made, still alive after forward; and after backward, or the graph's end."""
    made: list[weakref.ref[Any]] = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = operation(*args, **(kwargs or {}))
            if operation.overloadpacket.__name__ == "mm":
                made.append(weakref.ref(output.untyped_storage()))
            return output

    def now() -> int:
        return sum(storage.nbytes() for reference in made if (storage := reference()) is not None)

    with Made():
        x = torch.ones(4, 4, requires_grad=True)
        output = run(DEVICE, function, x).sum()
    after_forward = now()
    if backward:
        output.backward()
    del output
    x.grad = None
    return after_forward, now()


@pytest.mark.usefixtures("all_kept")
@pytest.mark.parametrize("backward", [True, False], ids=["backward", "the graph is dropped"])
def test_the_results_that_backward_needs_are_kept_and_let_go(backward: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first = torch.sin(x @ x)
        return torch.exp(first @ x) + first @ x  # the last one is not needed

    gc.disable()
    try:
        assert alive(function, cheaply_recomputed_in_backward, backward) == (2 * 64, 0)
        assert alive(function, recomputed_in_backward, backward) == (0, 0)
    finally:
        gc.enable()


@pytest.mark.usefixtures("all_kept")
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_our_attention_is_kept_with_its_dropped_weights(monkeypatch: pytest.MonkeyPatch, dropout: float) -> None:
    monkeypatch.setattr(attention_op, "KERNELS", emulated_attention.KERNELS)

    def function(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        query = x.sin().to(torch.bfloat16)
        found = attention_op.attend(query, query, query, bias.to(torch.bfloat16), None, 0.5, dropout)
        return F.dropout(found.float(), 0.5).tanh()

    again = check(function, (2, 3, 16, 16), (1, 3, 16, 16))
    assert again["sin"] == 1
    assert again["tanh"] == 1
    assert again["attention"] == 0


def test_unknown_attention_is_run_again_because_it_may_draw_random_numbers() -> None:
    with torch.library._scoped_library("others", "FRAGMENT") as library:
        library.define("random_attention(Tensor x, float rate) -> Tensor")
        library.impl("random_attention", lambda x, rate: F.dropout(x, rate), "CPU")

        def function(x: torch.Tensor) -> torch.Tensor:
            found = torch.ops.others.random_attention(x.detach(), 0.5)
            return F.dropout(found + x, 0.5).sin()

        assert check(function, (8, 8))["random_attention"] == 1


@pytest.mark.slow
def test_flex_attention_is_kept() -> None:
    """Without a GPU it has no gradient."""
    x = torch.linspace(-1, 1, 2 * 128 * 16).view(1, 2, 128, 16)

    def function(w: torch.Tensor) -> torch.Tensor:
        return (flex_attention(x.sin(), x, x) * w).tanh()  # type: ignore[operator]

    again = check(function, (1, 2, 128, 16))
    assert again["sin"] == again["tanh"] == 1
    assert again["flex_attention"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_decoder_block_on_a_gpu_has_equal_gradients(dropout: float) -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    from offloadkit.hf.patches import fuse_norms
    from tests.hf.tiny import llama_config

    config: Any = llama_config(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4)
    config.attention_dropout, config._attn_implementation = dropout, "sdpa"
    torch.manual_seed(0)
    block: nn.Module = LlamaDecoderLayer(config, 0).cuda().bfloat16().train()
    fuse_norms(block)
    x = torch.randn(2, 128, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    positions = LlamaRotaryEmbedding(config).cuda()(x, torch.arange(128, device="cuda")[None])
    found = []
    for run in (lambda _, function, *args, **kwargs: function(*args, **kwargs), cheaply_recomputed_in_backward):
        torch.cuda.manual_seed(5)
        block.zero_grad()
        x.grad = None
        run(x.device, block, x, position_embeddings=positions).float().pow(2).sum().backward()
        found.append([x.grad, *(each.grad for each in block.parameters()), torch.rand(1, device="cuda")])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Caches(nn.Module):
    """Its second run uses the result of a matmul of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.cache = nn.Linear(8, 8), None
        self.register_buffer("table", torch.eye(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = x.detach() @ self.table
        return x + self.up(x).tanh() * self.cache


class CachingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Caches() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.cache = None
            x = block(x)
        return x.square().mean()


def trained(*, activations: Any, by_plan: bool) -> tuple[dict[str, torch.Tensor], Plan]:
    where, model = Placement(activations=activations), CachingModel()
    config = OffloadConfig(learning_rate=1e-2, working_dtype="fp32", placement=None if by_plan else where)
    with OffloadEngine(model, config, device="cpu") as engine:
        if by_plan:
            engine.move(placed(engine.plan, [where] * len(engine.plan.placements)))
        for _ in range(3):
            engine.backward(engine(torch.linspace(-1, 1, 16).view(2, 8)))
            engine.step()
        engine.synchronize()
        return {name: each.detach().clone() for name, each in model.state_dict().items()}, engine.plan


@pytest.mark.usefixtures("all_kept")
def test_a_block_with_other_matmuls_in_backward_leaves_the_level_that_a_plan_chose() -> None:
    expected, _ = trained(activations="keep", by_plan=False)
    with pytest.warns(RuntimeWarning, match=r"other matmuls in backward .*recomputed activations 0 -> 3") as warned:
        found, plan = trained(activations="cheap", by_plan=True)
    assert len(warned) == 1
    assert {where.activations for where in plan.placements} == {"checkpoint"}
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.usefixtures("all_kept")
def test_a_block_with_other_matmuls_in_backward_is_an_error_at_the_level_that_a_user_chose() -> None:
    with pytest.raises(ModelError, match="matmuls and attention"):
        trained(activations="cheap", by_plan=False)
