"""Backward adds the gradients of a tensor that a block and other code use in the order of eager blocks.

Each test trains a model with blocks as graphs and with eager blocks, for equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
import torch
import transformers
from torch import nn

from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts import graphs as facts_graphs
from offloadkit.facts.config import Placement
from offloadkit.offload import use_order
from offloadkit.offload.graphs import BlockGraphs
from offloadkit.offload.layers import repeated_blocks
from tests.graphs import PLACEMENTS, Trained, assert_equals_eager, batches, llama, t5, train_by
from tests.hf import families
from tests.offload.test_graphs import Block, Stack

USED_AFTER = "its input or a weight of it is used after it too"


@pytest.fixture(autouse=True)
def graphs_are_on(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(facts_graphs, "device_types", {"cpu"})


Use = Callable[[Any, list[torch.Tensor]], torch.Tensor]
"""The part of a loss that uses these outputs of the model and inputs of its blocks."""


def deep(output: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    return inputs[1].float().square().mean()


def views(output: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Of two layers, one of them the first block's input."""
    return (inputs[0][:, 0] * inputs[2][:, 1]).float().sum()


def deep_in_decoder(output: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    return inputs[-2].float().square().mean()


def end_of_encoder(output: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    """All blocks of the decoder use it too."""
    return cast(torch.Tensor, output.encoder_last_hidden_state.float().square().mean())


def end(output: Any, inputs: list[torch.Tensor]) -> torch.Tensor:
    """No block uses it."""
    return cast(torch.Tensor, output.logits.float().square().mean())


USES: list[tuple[str, Use, int]] = [
    ("llama", deep, 1),
    ("llama", views, 2),
    ("llama", end, 0),
    ("t5", deep, 1),
    ("t5", deep_in_decoder, 1),
    ("t5", end_of_encoder, 3),
    ("t5", end, 0),
]
"""(model, use, number of blocks that run eagerly)"""


class Seen:
    """Of a training with graphs."""

    def __init__(self) -> None:
        self.gave_up, self.num_used_after, self.reasons = False, 0, list[str]()

    def look(self, graphs: BlockGraphs | None) -> None:
        if graphs is not None:
            self.gave_up, self.reasons = graphs.gave_up, list(graphs.num_eager)
            self.num_used_after = sum(block.is_used_after for block in graphs._blocks)


def forwards_with(
    kind: str, use: Use, factors: list[float | None], seen: Seen, device: str = "cpu"
) -> Callable[[OffloadEngine], Iterator[torch.Tensor]]:
    """One loss for each of `factors` of `use`. None: the loss does not use it."""

    def forwards(engine: OffloadEngine) -> Iterator[torch.Tensor]:
        inputs = list[torch.Tensor]()
        for _, block in repeated_blocks(engine.module):
            block.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        for batch, factor in zip(batches(kind, len(factors), device), factors, strict=True):
            output = engine(**batch)
            yield output.loss if factor is None else output.loss + factor * use(output, inputs)
            inputs.clear()
        seen.look(engine.placed.graphs)

    return forwards


def assert_order(
    kind: str,
    use: Use,
    num_eager: int,
    factors: list[float | None],
    placement: Placement,
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> None:
    seen = Seen()

    def run() -> Trained:
        changes = {"num_layers": 3} if kind == "t5" else {"num_hidden_layers": 4}
        model = {"t5": t5, "llama": llama}[kind](**changes).train()
        return train_by(model, forwards_with(kind, use, factors, seen), placement, **options)

    found = run()
    assert found[2] >= 2 * 2
    assert seen.num_used_after == num_eager
    assert seen.reasons == [USED_AFTER] * (num_eager > 0)
    assert_equals_eager(found, run, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "use", "num_eager"), USES, ids=lambda each: getattr(each, "__name__", str(each)))
@pytest.mark.parametrize(("placement", "accumulation"), [*zip(PLACEMENTS, [1, 2] * 3, strict=True)])
def test_losses_use_hidden_states(
    kind: str, use: Use, num_eager: int, placement: Placement, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = "fp32" if accumulation == 1 else "bf16"
    factors: list[float | None] = [0.3, 0.7] * 4
    assert_order(
        kind, use, num_eager, factors, placement, monkeypatch, gradient_accumulation=accumulation, working_dtype=dtype
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "use", "num_eager"), USES, ids=lambda each: getattr(each, "__name__", str(each)))
@pytest.mark.parametrize("placement", [PLACEMENTS[0], PLACEMENTS[4]])
def test_losses_use_hidden_states_from_a_step_on(
    kind: str, use: Use, num_eager: int, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first such step graphs are in use: a factor of 0 makes no order of sums visible."""
    factors = [None, None, None, None, 0.0, 0.3, 0.7, 0.3]
    assert_order(kind, use, num_eager, factors, placement, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BltForCausalLM", "Inkling2ForCausalLM", "Inkling2LoopForCausalLM"])
def test_models_use_inputs_of_blocks_after_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 222 classes of transformers, these three."""
    seen = Seen()

    def forwards(engine: OffloadEngine) -> Iterator[torch.Tensor]:
        for step in range(4):
            yield engine(**families.batch(name, 8, step)).loss
        seen.look(engine.placed.graphs)

    def run() -> Trained:
        torch.manual_seed(0)
        model = getattr(transformers, name)(families.tiny_config(name)).train()
        return train_by(model, forwards, Placement())

    found = run()
    assert seen.num_used_after >= 2
    assert_equals_eager(found, run, monkeypatch)


# ---- other uses


class Attends(Block):
    """Adds another input, which all blocks share, and returns it too."""

    def forward(self, x: torch.Tensor, scale: float = 1.0, pair: Any = None) -> Any:
        return super().forward(x) + torch.tanh(x * pair) + self.up(pair).mean(), pair


class Deep(Stack):
    """Returns the inputs of the blocks, the output of the last one, and the input that blocks share."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind() for _ in range(4)])
        self.embedding = nn.Linear(8, 8)
        self.adds_input, self.adds = 0.0, 4

    def forward(self, size: tuple[int, int], inputs: torch.Tensor | None = None) -> Any:
        x = torch.linspace(-1, 1, size[0] * size[1] * 8).view(*size, 8)
        shared = self.embedding(x)
        found = [shared * 2 if inputs is None else inputs]
        for block in self.blocks:
            x = found[-1]
            if isinstance(block, Attends):
                x, _ = block(x, pair=shared)
            else:
                x = block(x)
            if self.adds_input:
                x = x + self.adds_input * found[: self.adds][-1]
            found.append(x)
        return [*found, shared]


Loss = Callable[[OffloadEngine, Deep, int], torch.Tensor]
"""Of a step."""


def trained_by(loss_of: Loss, seen: Seen, activations: Any = "keep", kind: type[nn.Module] = Block) -> Trained:
    def forwards(engine: OffloadEngine) -> Iterator[torch.Tensor]:
        yield from (loss_of(engine, model, step) for step in range(6))
        seen.look(engine.placed.graphs)

    torch.manual_seed(7)
    model = Deep(kind)
    return train_by(model, forwards, Placement(activations=activations))


def of(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean()


def first(engine: OffloadEngine, model: Deep, step: int) -> torch.Tensor:
    """The first block's input."""
    found = engine((2, 3))
    return of(found[-2]) + 0.3 * of(found[0])


def two_forwards(engine: OffloadEngine, model: Deep, step: int) -> torch.Tensor:
    found = engine((2, 3))
    deep = of(found[-2]) + 0.3 * of(found[1])
    return deep + of(engine((2, 3))[-2])


def second_forward(engine: OffloadEngine, model: Deep, step: int) -> torch.Tensor:
    """Blocks are not captured before the first backward."""
    before, found = engine((2, 3)), engine((2 + step % 2, 3))
    return of(before[-2]) + of(found[-2]) + 0.3 * of(found[1])


def between(engine: OffloadEngine, model: Deep, step: int) -> torch.Tensor:
    """All blocks."""
    model.adds_input = 0.0 if step < 3 else 1e-30 if step == 3 else 0.3
    return of(engine((2, 3))[-2])


def between_but_others(engine: OffloadEngine, model: Deep, step: int) -> torch.Tensor:
    """As many nodes: the first block's input is added after each block, later the second block's. The loss uses the
    input of the last block.
    """
    model.adds, model.adds_input = 1 + (step >= 3), 1e-30 if step == 3 else 0.3
    return of(engine((2, 3))[-3])


def another_in_each_step(engine: OffloadEngine, model: Deep, step: int) -> torch.Tensor:
    """The factor is 0 until graphs are given up."""
    found = engine((2, 3))
    return of(found[-2]) + (0.0 if step < 4 else 0.3) * of(found[step % 4])


def penalty(engine: OffloadEngine, model: Deep, step: int) -> torch.Tensor:
    """On weights that blocks use once."""
    return of(engine((2, 3))[-2]) + 0.3 * sum(of(each) for each in model.blocks.parameters())


def last_is_unused(engine: OffloadEngine, model: Deep, step: int) -> torch.Tensor:
    return of(engine((2, 3))[-3])


def shared(engine: OffloadEngine, model: Deep, step: int) -> torch.Tensor:
    """All blocks."""
    found = engine((2, 3))
    return of(found[-2]) + (0.3 * of(found[-1]) if step > 3 else 0.0 * of(found[-1]) if step == 3 else 0.0)


def leaf(engine: OffloadEngine, model: Deep, step: int) -> torch.Tensor:
    """That the first block gets; its gradient is used in the next step."""
    before = getattr(model, "leaf", torch.ones(2, 3, 8))
    model.leaf = (before.detach() + (0.0 if before.grad is None else before.grad)).requires_grad_()
    found = engine((2, 3), inputs=model.leaf)
    return of(found[-2]) + 0.3 * of(found[0])


def evaluated(engine: OffloadEngine, model: Deep, step: int) -> torch.Tensor:
    """Graphs are dropped and captured again."""
    if step == 3:
        engine.run_eval(lambda: None)
    return first(engine, model, step)


def from_a_step_on(engine: OffloadEngine, model: Deep, step: int) -> torch.Tensor:
    found = engine((2, 3))
    return of(found[-2]) + (0.3 * of(found[1]) if step > 3 else 0.0 * of(found[1]) if step == 3 else 0.0)


class OneUse(Block):
    def forward(self, x: torch.Tensor, scale: float = 1.0, pair: Any = None) -> Any:
        return self.down(torch.tanh(self.up(x)))


class UsesWeightTwice(Block):
    def forward(self, x: torch.Tensor, scale: float = 1.0, pair: Any = None) -> Any:
        return super().forward(x) + torch.tanh(x @ self.up.weight.t() @ self.up.weight)


def adds_input(engine: OffloadEngine, model: Deep, step: int) -> torch.Tensor:
    model.adds_input = 1.0
    return of(engine((2, 3))[-2])


CASES: list[tuple[Loss, type[nn.Module], int | None]] = [
    (first, Block, 1),
    (two_forwards, Block, 1),
    (second_forward, Block, 1),
    (between, Block, 4),
    (between_but_others, Block, 2),
    (another_in_each_step, Block, None),
    (penalty, Block, 0),
    (penalty, UsesWeightTwice, 4),
    (adds_input, OneUse, 0),
    (last_is_unused, Block, 0),
    (shared, Attends, 4),
    (leaf, Block, 1),
    (evaluated, Block, 1),
    (from_a_step_on, Block, 1),
]
"""(loss, block, number of blocks that run eagerly; None: graphs are given up)"""


@pytest.mark.parametrize(("loss_of", "kind", "num_eager"), CASES, ids=lambda each: getattr(each, "__name__", str(each)))
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_other_code_uses_a_tensor_of_a_block(
    loss_of: Loss, kind: type[nn.Module], num_eager: int | None, activations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen()

    def run() -> Trained:
        return trained_by(loss_of, seen, activations, kind)

    found = run()
    assert seen.gave_up == (num_eager is None)
    assert seen.num_used_after == (num_eager or 0)
    assert_equals_eager(found, run, monkeypatch)


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_two_forwards_run_before_their_backwards(
    newest_first: bool, activations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of the second backward uses a hidden state."""
    seen = Seen()

    def forwards(engine: OffloadEngine) -> Iterator[torch.Tensor]:
        for _ in range(4):
            found = [engine((2, 3)), engine((2, 3))]
            first, second = reversed(found) if newest_first else found
            yield of(first[-2])
            yield of(second[-2]) + 0.3 * of(second[1])
        seen.look(engine.placed.graphs)

    def run() -> Trained:
        torch.manual_seed(7)
        return train_by(Deep(Block), forwards, Placement(activations=activations), gradient_accumulation=2)

    found = run()
    assert seen.num_used_after == 1
    assert_equals_eager(found, run, monkeypatch)


@pytest.mark.parametrize("num_uses", [0, 1])
def test_settled_steps_look_at_the_nodes_of_the_loss_alone(num_uses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at blocks: the first step has looked at eager blocks, the second one at graphs."""
    own, steps = use_order.edges, list[list[int]]()

    def edges(tensors: Sequence[torch.Tensor], oldest: int) -> Iterator[Any]:
        found = [*own(tensors, oldest)]
        steps[-1].append(len(found))
        return iter(found)

    def loss_of(engine: OffloadEngine, model: Deep, step: int) -> torch.Tensor:
        steps.append([])
        return first(engine, model, step) if num_uses else of(engine((2, 3))[-2])

    monkeypatch.setattr(use_order, "edges", edges)
    trained_by(loss_of, Seen())
    assert [len(each) for each in steps] == [2, 2, 1, 1, 1, 1]
    assert steps[0][1] > 50
    assert {each[0] for each in steps} == {2 + 5 * num_uses}


def test_not_all_structures_of_losses_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(use_order, "MOST_SEEN", 3)
    order, weight = use_order.UseOrder(lambda node: None), torch.ones((), requires_grad=True)
    for num_uses in range(10):
        order.begin()
        loss = weight * 2
        order.ran(use_order.next_node() - 1, [])
        for _ in range(num_uses + 1):
            loss = loss + weight
        order.used_after(loss)
        assert 1 <= len(order._seen) <= 3
    assert len(order._seen) == 1
