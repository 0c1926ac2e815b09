"""Weights in RAM that visit VRAM: reads in any order find the newest values."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM, T5ForConditionalGeneration

from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import EngineStateError, ModelError
from offloadkit.facts import graphs as facts_graphs
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.offload import kept_results
from offloadkit.offload.weight_ring import StreamedBlock, WeightRing
from tests.hf.tiny import llama_config, t5_config
from tests.models import TinyLM, tokens, train

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
STREAMED = Placement(weights="ram")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> str:
    monkeypatch.setattr(WeightRing, "fill_with_nan", True)
    monkeypatch.setattr(kept_results, "MIN_PRODUCTS", 1)
    return str(request.param)


def config(placement: Placement | None, **options: Any) -> OffloadConfig:
    return OffloadConfig(learning_rate=1e-2, working_dtype="fp32", placement=placement, **options)


def trained(model: nn.Module, device: str, placement: Placement | None, num: int = 6) -> dict[str, torch.Tensor]:
    with OffloadEngine(model, config(placement), device=device) as engine:
        train(engine, tokens(num, device))
    return {name: weight.detach().cpu().clone() for name, weight in model.state_dict().items()}


def assert_same(model: Any, device: str, *placements: Placement) -> None:
    """Compares with the weights in VRAM. `model` makes the module to train, the same each time."""
    expected = trained(model(), device, None)
    for placement in placements:
        found = trained(model(), device, placement)
        different = [name for name, weight in expected.items() if not torch.equal(weight, found[name])]
        assert not different, (placement, different)


class Scaled(nn.Module):
    """A block with parameters outside any submodule."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix, self.shift = nn.Parameter(torch.randn(width, width) / 8), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.matrix + self.shift) @ self.matrix.T


def lm_of(block: Any, order: tuple[int, ...] = (0, 1, 2, 3)) -> TinyLM:
    """A `TinyLM` of such blocks, called in that order."""
    torch.manual_seed(0)
    model = TinyLM()
    blocks = [block(65) for _ in range(4)]
    model.blocks = nn.ModuleList(blocks)
    inner = model.blocks
    model.blocks = _InOrder(inner, order)  # type: ignore[assignment]
    return model


class _InOrder(nn.Module):
    def __init__(self, blocks: nn.ModuleList, order: tuple[int, ...]) -> None:
        super().__init__()
        self.inner, self.order = blocks, order

    def __iter__(self) -> Any:
        return iter([self.inner[index] for index in self.order])


ALL = (STREAMED, *(replace(STREAMED, activations=how) for how in ("cheap", "checkpoint", "offload")))


def test_parameters_of_the_block_itself(device: str) -> None:
    assert_same(lambda: lm_of(Scaled), device, *ALL)


def test_a_cpu_with_a_number_is_the_cpu() -> None:
    """accelerate numbers the CPU if it has several ranks; tensors name it without a number."""
    runs = []
    for device in ("cpu:0", "cpu"):
        torch.manual_seed(0)
        runs.append(trained(TinyLM(), device, STREAMED, num=2))
    assert all(torch.equal(runs[0][name], weight) for name, weight in runs[1].items())


def test_a_block_used_twice(device: str) -> None:
    assert_same(lambda: lm_of(Scaled, (0, 1, 0, 2, 3, 3)), device, *ALL)


class Recomputed(Scaled):
    """A block whose forward has torch recompute it, without the block's hooks, like transformers' blocks after
    `gradient_checkpointing_enable()`."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return found


class RecomputedReentrantly(Recomputed):
    reentrant = True


@pytest.mark.parametrize("overwritten", [True, False])
@pytest.mark.parametrize("block", [Recomputed, RecomputedReentrantly])
def test_torchs_own_recomputation_within_a_block(
    block: type[Recomputed], overwritten: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a buffer keeps its weights until another block gets it."""
    monkeypatch.setattr(WeightRing, "fill_with_nan", overwritten)
    assert_same(lambda: lm_of(block, (0, 1, 2, 3, 0)), device, *ALL)


def test_a_model_of_transformers_recomputes_by_its_own_switch(device: str) -> None:
    """The model has more blocks than the ring has buffers, and the blocks share a position bias."""
    weights = []
    for placement in (None, STREAMED):
        torch.manual_seed(0)
        model: Any = T5ForConditionalGeneration(t5_config(dropout_rate=0.1)).train()
        model.gradient_checkpointing_enable()
        with OffloadEngine(model, config(placement), device=device) as engine:
            for ids in tokens(2, device, (2, 6)):
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()
        weights.append(model.cpu().state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


class RecomputesSeveral(TinyLM):
    """torch recomputes each group of blocks together. With `runs_before` all blocks run once before, and that graph is
    kept."""

    def __init__(self, groups: tuple[slice, ...], runs_before: bool = False) -> None:
        super().__init__()
        self.groups, self.runs_before = groups, runs_before

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch)
        for block in self.blocks if self.runs_before else ():
            x = block(x)
        for group in self.groups:
            x = checkpoint(nn.Sequential(*self.blocks[group]), x, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch.flip(-1).flatten())


PAIRS, ALL_AT_ONCE = (slice(0, 2), slice(2, 4)), (slice(0, 4),)


def test_blocks_recomputed_as_one_that_the_ring_holds(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightRing, "fill_with_nan", False)
    torch.manual_seed(0)
    state = TinyLM().state_dict()

    def make() -> nn.Module:
        model = RecomputesSeveral(PAIRS)
        model.load_state_dict(state)
        return model

    assert_same(make, device, STREAMED)


@pytest.mark.parametrize("runs_before", [False, True])
def test_more_blocks_recomputed_as_one_than_the_ring_holds_are_an_error(
    runs_before: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the gradients arrive when the weights are back: the first block's result came from other weights."""
    monkeypatch.setattr(WeightRing, "fill_with_nan", False)
    with pytest.raises(EngineStateError, match=r"block by block. If the model itself recomputes several blocks"):
        trained(RecomputesSeveral(ALL_AT_ONCE, runs_before), device, STREAMED, num=1)


class Bounded(Scaled):
    """A block that clamps its weights in its own forward, like layers with a max-norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.matrix.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_what_a_block_writes_in_its_own_forward_counts(device: str) -> None:
    assert_same(lambda: lm_of(Bounded), device, STREAMED, Placement("ram", activations="checkpoint"))


def test_an_order_that_changes_from_step_to_step(device: str) -> None:
    class Shuffled(TinyLM):
        calls = 0

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            order = torch.randperm(4, generator=torch.Generator().manual_seed(self.calls % 6)).tolist()
            x = self.embed(batch)
            for index in order:
                x = self.blocks[index](x)
            return self.head(self.norm(x)).float().pow(2).mean()

    def fresh() -> nn.Module:
        Shuffled.calls = 0
        torch.manual_seed(0)
        return Shuffled()

    assert_same(fresh, device, *ALL)


def test_blocks_are_fetched_ahead_and_not_twice(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on a block has been prefetched when it is needed."""
    monkeypatch.setattr(WeightRing, "fill_with_nan", False)
    asked_late: list[bool] = []
    real = WeightRing.use

    def use(self: WeightRing, block: StreamedBlock, **how: bool) -> None:
        asked_late.append(not self.holds(block))
        real(self, block, **how)

    fetched: list[StreamedBlock] = []
    fetch = WeightRing.fetch
    monkeypatch.setattr(WeightRing, "fetch", lambda self, block: (fetched.append(block), fetch(self, block))[1])
    monkeypatch.setattr(WeightRing, "use", use)
    torch.manual_seed(0)
    with OffloadEngine(TinyLM(depth=6), config(STREAMED), device=device) as engine:
        train(engine, tokens(2, device))
        asked_late.clear()
        fetched.clear()
        batch = tokens(1, device)[0]
        loss = engine(batch)
        assert asked_late.count(True) == 1, "only the first block of forward may be late"
        engine.backward(loss)
        assert asked_late.count(True) == 1
        # backward finds the last three blocks of forward still in VRAM
        assert len(fetched) == 6 + 3


def test_evaluation_and_generation_use_the_newest_weights(device: str) -> None:
    from transformers import T5ForConditionalGeneration

    def run(placement: Placement | None) -> list[Any]:
        torch.manual_seed(0)
        model: Any = T5ForConditionalGeneration(t5_config(num_layers=3, attn_implementation="eager"))
        ids = torch.arange(3, 13, device=device).view(2, 5)
        found: list[Any] = []
        with OffloadEngine(model, config(placement), device=device) as engine:
            for _ in range(3):
                engine.train()
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()
                engine.eval()
                found.append(engine.module.generate(input_ids=ids, max_new_tokens=5, do_sample=False).tolist())
                with torch.no_grad():
                    found.append(engine(input_ids=ids, labels=ids).loss.item())
                with torch.inference_mode():
                    found.append(engine.module(input_ids=ids, labels=ids).loss.item())
        return found

    expected = run(None)
    for placement in ALL:
        assert run(placement) == expected


def test_saved_and_loaded_between_placements(device: str) -> None:
    torch.manual_seed(0)
    with OffloadEngine(TinyLM(), config(STREAMED), device=device) as engine:
        train(engine, tokens(5, device))
        saved = {
            "module": {name: weight.clone() for name, weight in engine.state_dict()["module"].items()},
            **{key: value for key, value in engine.state_dict().items() if key != "module"},
        }
        saved["optimizer"] = {
            name: {key: value.clone() for key, value in state.items()} for name, state in saved["optimizer"].items()
        }
        train(engine, tokens(5, device))
        expected = {name: weight.cpu().clone() for name, weight in engine.module.state_dict().items()}
    elsewhere = (None, Placement(gradients="vram", states="vram", step="gpu"), Placement(states="disk"))
    for placement in (*elsewhere, *ALL):
        torch.manual_seed(3)
        with OffloadEngine(TinyLM(), config(placement), device=device) as engine:
            train(engine, tokens(2, device))
            engine.load_state_dict(saved)
            train(engine, tokens(5, device))
            found = engine.module.state_dict()
            assert all(torch.equal(weight, found[name].cpu()) for name, weight in expected.items()), placement


def test_weights_written_from_outside_count(device: str) -> None:
    def run(placement: Placement | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = TinyLM()
        with OffloadEngine(model, config(placement), device=device) as engine:
            train(engine, tokens(3, device))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            train(engine, tokens(3, device))
        return {name: weight.cpu() for name, weight in model.state_dict().items()}

    expected, found = run(None), run(STREAMED)
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())


def test_a_closed_engine_leaves_a_whole_model_where_its_weights_were_in_ram(device: str) -> None:
    """No second copy is made; weights in VRAM move to RAM. Forked workers inherit the memory."""
    model = TinyLM()
    with OffloadEngine(model, config(STREAMED), device=device) as engine:
        train(engine, tokens(3, device))
        kept = {weight.data_ptr() for state in engine.placed.states for weight in state.weights.bound}
        slabs = [state.memory.weights for state in engine.placed.states if state.memory.weights is not None]
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}
    assert {weight.data_ptr() for weight in model.blocks.parameters()} <= kept
    assert len(slabs) == len(model.blocks)
    assert not any(slab.pinned or not is_inherited(slab.address) for slab in slabs)
    model(tokens(1)[0]).backward()


def is_inherited(address: int) -> bool:
    """Whether forked processes inherit the mapping at `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "dc" not in line.split()  # do not copy on fork
    raise AssertionError(f"nothing is mapped at {address:x}")


def test_a_recomputed_block_that_left_too_early_is_an_error(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = TinyLM()
    with OffloadEngine(model, config(ALL[1]), device=device) as engine:
        loss = engine(tokens(1, device)[0])
        blocks = list(model.blocks)
        first: Any = blocks[0].up.weight
        last: Any = blocks[-1].up.weight
        # as if the last block's gradient came when the first block had its turn
        state = {view.parameter: s for s in engine.placed.states for view in s.layer.views}
        taker = state[last].weights
        first.register_hook(lambda gradient: taker.check_held(state[last].layer.views[0]))
        with pytest.raises(EngineStateError, match="came after its block had left VRAM"):
            engine.backward(loss)


def test_a_plan_of_another_model_is_refused(device: str) -> None:
    with OffloadEngine(TinyLM(), config(None), device=device) as engine:
        plan = engine.plan
    with pytest.raises(ModelError, match="the plan was made for another model"):
        OffloadEngine(TinyLM(depth=3), config(None), device=device, plan=plan)


def test_a_module_called_past_the_engine_with_gradients_is_an_error(device: str) -> None:
    model = TinyLM()
    with OffloadEngine(model, config(STREAMED), device=device) as engine:
        batch = tokens(1, device)[0]
        with pytest.raises(EngineStateError, match="the model was called directly, with gradients"):
            model(batch)
        with torch.no_grad():
            assert model(batch).isfinite()
        train(engine, [batch])


def test_an_engine_that_is_forgotten_leaves_the_models_weights(device: str) -> None:
    torch.manual_seed(0)
    model = TinyLM()
    engine = OffloadEngine(model, config(STREAMED), device=device)
    train(engine, tokens(3, device))
    expected = {name: weight.cpu().clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        engine(tokens(1, device)[0])
    del engine
    gc.collect()
    assert all(torch.equal(weight, expected[name]) for name, weight in model.cpu().state_dict().items())


def test_graphs_whose_backward_comes_later_keep_their_inputs(device: str) -> None:
    def norm(placement: Placement | None) -> float | None:
        torch.manual_seed(0)
        with OffloadEngine(TinyLM(), config(placement, gradient_accumulation=2), device=device) as engine:
            first, second, third = tokens(3, device)
            losses = [engine(first), engine(second)]
            engine.backward(losses[0])
            engine.step()
            engine(third)  # a graph without a backward
            engine.backward(losses[1])
            engine.step()
            return engine.grad_norm()

    expected = norm(None)
    assert [norm(placement) for placement in ALL] == [expected] * len(ALL)


@pytest.mark.parametrize("placement", ALL)
def test_a_forward_without_a_backward_leaves_no_activation(
    placement: Placement, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed forward likewise: leftovers would take memory that the retry needs."""
    monkeypatch.setattr(facts_graphs, "device_types", set())  # they keep theirs
    made: list[weakref.ref[Any]] = []

    class Softmax(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(300))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made.append(weakref.ref(x.untyped_storage()))
            y = torch.softmax(x * self.scale, -1)
            made.append(weakref.ref(y.untyped_storage()))
            return y * self.scale

    model = nn.Sequential(nn.Linear(300, 300), nn.Sequential(*[Softmax() for _ in range(4)]))
    with OffloadEngine(model, config(placement), device=device) as engine:
        x = torch.rand(2, 300, device=device)
        engine.backward(engine(x).sum())
        engine.step()
        made.clear()
        loss = engine(x).sum()
        engine.synchronize()
        del loss
        engine.backward(engine(x[:1]).sum())  # no copy of an input is on its way any more
        assert [reference() for reference in made[:8]] == [None] * 8


class InPlace(nn.Module):
    """A block that writes in place to its input or to tanh's output, which backward needs."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(8, 8), where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "input":
            return x.mul_(0.5) + torch.tanh(self.linear(x))
        y = torch.tanh(self.linear(x))
        return torch.tanh(x + y.mul_(2))


@pytest.mark.parametrize("activations", ["keep", "cheap", "checkpoint", "offload"])
@pytest.mark.parametrize("where", ["input", "output"])
def test_what_backward_needs_is_not_changed_unseen(where: str, activations: Any, device: str) -> None:
    """Like in plain torch, whose version counter detects it; torch does not check it for tensors that pass through
    hooks."""

    def norm(weights: Any, activations: Any) -> float | None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*[InPlace(where) for _ in range(3)]))
        placement = Placement(weights=weights, activations=activations)
        with OffloadEngine(model, config(placement), device=device) as engine:
            engine.backward(engine(torch.randn(2, 8, device=device)).pow(2).sum())
            engine.step()
            return engine.grad_norm()

    if where == "input" and activations == "keep":  # autograd does not save the original input
        assert norm("ram", "keep") == norm("vram", "keep")
        return
    with pytest.raises(ModelError, match=r"a tensor \[2, 8\] float32 that backward needs.*in-place"):
        norm("ram", activations)
    with pytest.raises((ModelError, RuntimeError)):
        norm("vram", activations)


@pytest.mark.parametrize("placement", [STREAMED, Placement(weights="ram", step="gpu")])
def test_a_graph_from_before_a_step_is_an_error(placement: Placement, device: str) -> None:
    with OffloadEngine(TinyLM(tied=False), config(placement), device=device) as engine:
        first, second = tokens(2, device)
        losses = [engine(first), engine(second)]
        engine.backward(losses[0])
        engine.step()
        with pytest.raises((ModelError, EngineStateError), match=r"engine.step\(\)"):
            engine.backward(losses[1])


@pytest.mark.parametrize("activations", ["keep", "cheap", "checkpoint", "offload"])
@pytest.mark.parametrize("weights", ["vram", "ram"])
def test_stepped_weights_of_a_block_are_told_from_those_that_a_graph_saw(
    weights: Any, activations: Any, device: str
) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])  # nothing outside the blocks
    with OffloadEngine(model, config(Placement(weights, activations=activations)), device=device) as engine:
        x = torch.randn(2, 8, device=device, requires_grad=True)
        losses = [engine(x).sum(), engine(x).sum()]
        engine.backward(losses[0])
        engine.step()
        error = RuntimeError if (weights, activations) == ("vram", "keep") else EngineStateError  # raised by autograd
        with pytest.raises(error, match=r"inplace operation|the weights of '.*' were stepped, written or moved after"):
            engine.backward(losses[1])


class Masked(nn.Module):
    """A block with an input shared by all blocks, by position or by name."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.linear, self.by_name = nn.Linear(8, 8), by_name

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, masks: Any = ()) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * (masks[0] if mask is None else mask)


class ChangesItsMask(nn.Module):
    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList([Masked(by_name) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, mask = self.first(x), torch.ones_like(x)
        for block in self.blocks:
            x = block(x, masks=(mask,)) if block.by_name else block(x, mask)
        mask.mul_(3)
        return x.sum()


@pytest.mark.parametrize("activations", ["keep", "cheap", "checkpoint", "offload"])
@pytest.mark.parametrize("weights", ["vram", "ram"])
@pytest.mark.parametrize("by_name", [False, True])
def test_what_blocks_share_is_not_changed_unseen(by_name: bool, weights: Any, activations: Any, device: str) -> None:
    placement = Placement(weights, activations=activations)
    with OffloadEngine(ChangesItsMask(by_name), config(placement), device=device) as engine:
        loss = engine(torch.randn(2, 8, device=device))
        with pytest.raises((ModelError, RuntimeError), match=r"was modified after|inplace operation"):
            engine.backward(loss)


@pytest.mark.parametrize("activations", ["keep", "cheap", "checkpoint", "offload"])
def test_what_blocks_of_transformers_share_is_not_changed_unseen(activations: Any, device: str) -> None:
    """transformers passes keywords bound, from 5.23 on together with the block."""
    model: Any = LlamaForCausalLM(llama_config()).train()
    with OffloadEngine(model, config(Placement(activations=activations)), device=device) as engine:
        (ids,), mask = tokens(1, device, (2, 8)), torch.zeros(2, 1, 8, 8, device=device)
        loss = engine(input_ids=ids, labels=ids, attention_mask=mask).loss
        mask[..., :4] = -1e9
        with pytest.raises((ModelError, RuntimeError), match=r"was modified after|inplace operation"):
            engine.backward(loss)


@pytest.mark.parametrize("placement", ALL)
def test_inference_mode_between_steps_changes_nothing(placement: Placement, device: str) -> None:
    def weights(mode: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = TinyLM()
        with OffloadEngine(model, config(placement), device=device) as engine:
            for batch in tokens(4, device):
                with mode():
                    engine(batch)
                train(engine, [batch])
        return {name: weight.detach().cpu().clone() for name, weight in model.state_dict().items()}

    expected, found = weights(torch.no_grad), weights(torch.inference_mode)
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())
