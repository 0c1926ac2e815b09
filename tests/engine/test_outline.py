"""The bare engine plans too, from an example or from its first window, and keeps its budgets."""

from __future__ import annotations

import random
from dataclasses import replace
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from offloadkit import OffloadConfig, OffloadEngine, Placement
from offloadkit.checkpoint.values import random_states, set_random_states
from offloadkit.engine import outline
from offloadkit.engine.block_calls import BlockCalls
from offloadkit.engine.tracing import trace_blocks, trace_micro_batch
from offloadkit.errors import DoesNotFitError, NonFiniteGradientError
from offloadkit.facts.fitted import LOADED_LATER_BYTES
from offloadkit.offload.layers import flat_layers, hooks_of, repeated_blocks
from offloadkit.offload.placed_layers import PlacedLayers
from offloadkit.planner import counts, layout
from offloadkit.planner.layout import ALLOCATOR_BYTES, activation_bytes
from tests.models import Residual, TinyLM
from tests.planner.machines import GIB, H200

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
FIXED = H200.vram_context_bytes + LOADED_LATER_BYTES + ALLOCATOR_BYTES
TIGHT = OffloadConfig(vram=FIXED + (1 << 20), ram="8GiB", gradient_accumulation=2, learning_rate=1e-2)


def model() -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(width=32, hidden=515)


def window(seed: int) -> list[torch.Tensor]:
    """Two micro-batches; the second one is larger."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 61, (rows, 9), generator=generator) for rows in (2, 3)]


def trained(engine: OffloadEngine, steps: int = 3) -> dict[str, torch.Tensor]:
    for seed in range(steps):
        for tokens in window(seed):
            engine.backward(engine(tokens))
            engine.step()
    return engine.master_weights()


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for an H200; the plan runs on the CPU."""
    monkeypatch.setattr(outline, "measured_by", lambda *_, **__: H200)


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    with OffloadEngine(model(), OffloadConfig(gradient_accumulation=2, learning_rate=1e-2), device="cpu") as engine:
        return trained(engine)


@pytest.mark.usefixtures("on_a_card")
def test_an_example_is_planned_for_within_the_budget(plain: dict[str, torch.Tensor]) -> None:
    plans = []
    for example in (window(0)[1], (window(0)[1],), {"tokens": window(0)[1]}):
        with OffloadEngine(model(), TIGHT, device="cpu", example=example) as engine:
            plans.append(engine.plan)
            weights = trained(engine)
        assert all(weights[name].equal(weight) for name, weight in plain.items())
    assert plans[0].tiers["vram"]["activations"] > 0
    assert plans[0].total_bytes("vram") <= FIXED + (1 << 20)
    assert "ram" in {where.states for where in plans[0].placements}
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.usefixtures("on_a_card")
def test_without_one_the_largest_micro_batch_of_the_first_window_is(plain: dict[str, torch.Tensor]) -> None:
    """The run begins with every block recomputed, and moves once."""
    config = replace(TIGHT, vram=4 * GIB)
    with OffloadEngine(model(), config, device="cpu", example=window(0)[1]) as engine:
        planned = engine.plan
    with OffloadEngine(model(), config, device="cpu") as engine:
        before = engine.plan
        assert engine.is_beginning
        weights = trained(engine)
        assert not engine.is_beginning
        assert len(engine.telemetry.moves) == 1
        assert engine.plan == planned
    in_blocks = [where for layer, where in zip(before.layers, before.placements, strict=True) if layer.in_block]
    assert {where.activations for where in in_blocks} == {"checkpoint"}
    assert {where.activations for where in planned.placements} == {"keep"}
    assert before.seconds is None
    assert all(weights[name].equal(weight) for name, weight in plain.items())


@pytest.mark.usefixtures("on_a_card")
def test_a_mask_of_ones_is_planned_as_one_over_padding() -> None:
    """A later micro-batch may be padded. Without a mask, no bias is planned."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    network = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=1, vocab_size=64))
    config, device, ids = OffloadConfig(), torch.device("cpu"), torch.ones(2, 64, dtype=torch.int64)
    whole, plans = {"input_ids": ids, "labels": ids}, []
    for example in (whole, whole | {"attention_mask": ids}, whole | {"attention_mask": ids.tril()}):
        first = outline.FirstWindow(network, flat_layers(network, config), config, device)
        first.record_micro_batch((), example)
        plans += [first.plan_now(), outline.plan_for(network, config, device, example)]
    without, _, ones, *_ = vram = [plan and plan.tiers["vram"]["activations"] for plan in plans]
    assert without is not None
    assert ones is not None
    assert without < ones
    assert vram == [without, without, ones, ones, ones, ones]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_ram_of_the_model_is_not_free_until_its_layers_are_taken_over(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU all RAM is pinned before. On a CPU the weights are the engine's, layer by layer."""
    blocks = (nn.Linear(1 << 14, 1 << 13, bias=False, device="meta") for _ in range(8))
    network = nn.Sequential(*blocks).to_empty(device="cpu")  # RAM that is never written takes no pages
    held = sum(parameter.nbytes for parameter in network.parameters())
    available = 13 * GIB
    machine = replace(H200, device=device, ram_available_bytes=available)
    monkeypatch.setattr(outline, "measured_by", lambda *_, **__: machine)
    config = OffloadConfig(working_dtype="bf16", vram="24GiB")
    plan = outline.FirstWindow(network, flat_layers(network, config), config, CPU).plan
    assert plan.basis.held_bytes == held == 4 * GIB
    if device == "cpu":
        assert plan.budgets["ram"] == available + held
    else:
        assert 0.7 * available < plan.total_bytes("ram") <= available


@pytest.mark.usefixtures("on_a_card")
def test_training_goes_on_as_it_began_where_the_first_windows_plan_cannot_be(
    plain: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: object) -> None:
        raise DoesNotFitError("no room for both at once")

    monkeypatch.setattr(PlacedLayers, "check_movable", no_room)
    with OffloadEngine(model(), replace(TIGHT, vram=4 * GIB), device="cpu") as engine:
        before = engine.plan
        weights = trained(engine)
        assert engine.plan == before
    assert (
        "continues with the initial plan instead of one for its micro-batches: no room for both at once" in caplog.text
    )
    assert all(weights[name].equal(weight) for name, weight in plain.items())


@pytest.mark.usefixtures("on_a_card")
def test_a_first_window_that_is_not_finite_is_planned_for_too() -> None:
    """The next step reports the NaN, like any step."""
    with OffloadEngine(model(), replace(TIGHT, vram=4 * GIB, gradient_accumulation=1), device="cpu") as engine:
        engine.backward(engine(window(0)[0]) * torch.inf)
        assert engine.step()
        assert len(engine.telemetry.moves) == 1
        engine.backward(engine(window(0)[0]))
        with pytest.raises(NonFiniteGradientError, match="step 1 is"):
            engine.step()


class Reads(TinyLM):
    """Reads a weight, whose value the meta device does not have."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.norm.weight[0].tolist() < 1e6
        return super().forward(tokens)


def num_hooks(engine: OffloadEngine) -> list[int]:
    return [len(block._forward_pre_hooks) for _, block in repeated_blocks(engine.module)]


LARGER = {"width": 64, "hidden": 2051, "depth": 8}
BUDGET = 20 << 20
"""With everything in VRAM, `LARGER` needs twice as much."""


@pytest.fixture
def on_a_tiny_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for a card whose VRAM is all the model's, so that a budget of some MiB has shares."""
    monkeypatch.setattr(outline, "measured_by", lambda *_, **__: replace(H200, vram_context_bytes=0))
    for module in (layout, counts):
        monkeypatch.setattr(module, "ALLOCATOR_BYTES", 0)


@pytest.mark.usefixtures("on_a_tiny_card")
def test_a_model_that_cannot_be_traced_is_planned_from_a_measured_window(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(TIGHT, vram=BUDGET)
    first = outline.FirstWindow(TinyLM(**LARGER), flat_layers(TinyLM(**LARGER), config), config, CPU)
    planned = outline.plan_for(TinyLM(**LARGER), config, CPU, window(0)[1])
    assert planned is not None
    assert planned.basis.work is not None
    work = planned.basis.work
    lean = activation_bytes(work, recomputed=True)
    placed = sum(size for name, size in first.plan.tiers["vram"].items() if name not in ("framework", "activations"))
    monkeypatch.setattr(outline, "peak_allocated_bytes", lambda _: placed + lean)  # as torch's allocator on a GPU
    torch.manual_seed(0)
    with OffloadEngine(Reads(**LARGER), config, device="cpu", example=window(0)[0]) as engine:
        used, hooks = [], num_hooks(engine)
        for seed in range(3):
            for tokens in window(seed):
                engine.backward(engine(tokens))
                engine.step()
            used.append(engine.plan.total_bytes("vram"))
        assert not engine.is_beginning
        assert len(engine.telemetry.moves) == 1
        weights = engine.master_weights()
        assert num_hooks(engine) == hooks
    assert "cannot be planned" in caplog.text
    assert used[0] < 0.5 * BUDGET
    assert 0.8 * BUDGET <= used[1] == used[2] <= BUDGET
    assert used[1] == pytest.approx(planned.total_bytes("vram"), rel=0.1)
    torch.manual_seed(0)
    unplanned = OffloadConfig(gradient_accumulation=2, learning_rate=1e-2)
    with OffloadEngine(TinyLM(**LARGER), unplanned, device="cpu") as engine:
        others = trained(engine)
    assert all(weights[name].equal(weight) for name, weight in others.items())


def set_forward(network: nn.Module) -> nn.Module:
    """Set a forward that holds the network's own, as TRL does."""
    own: Any = network.forward
    network.forward = MethodType(lambda self, *args: own(*args), network)  # type: ignore[assignment]
    return network


def test_a_set_forward_that_holds_itself_is_copied() -> None:
    network, calls = TinyLM(**LARGER), []
    own: Any = network.forward

    def twice(self: Any, tokens: torch.Tensor, *, again: bool = True) -> Any:
        calls.append(self)
        return twice(self, tokens, again=False) if again else own(tokens)

    network.forward = MethodType(twice, network)  # type: ignore[assignment]
    copied = outline.without_memory(network).train()
    trace_micro_batch(copied, window(0)[1])
    assert calls == [copied, copied]


@pytest.mark.usefixtures("on_a_tiny_card")
@pytest.mark.parametrize("more", [0, 4 << 20])
def test_a_set_forward_is_traced_and_a_window_is_measured(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(TIGHT, vram=BUDGET)
    planned = outline.plan_for(TinyLM(**LARGER), config, CPU, window(0)[1])
    assert planned is not None
    assert planned.basis.work is not None
    work = planned.basis.work
    lean = activation_bytes(work, recomputed=True)
    first = outline.FirstWindow(set_forward(TinyLM(**LARGER)), flat_layers(TinyLM(**LARGER), config), config, CPU)
    placed = sum(size for name, size in first.plan.tiers["vram"].items() if name not in ("framework", "activations"))
    monkeypatch.setattr(outline, "peak_allocated_bytes", lambda _: placed + lean + more)
    torch.manual_seed(0)
    with OffloadEngine(set_forward(TinyLM(**LARGER)), config, device="cpu") as engine:
        plans = []
        for seed in range(3):
            for tokens in window(seed):
                engine.backward(engine(tokens))
                engine.step()
            plans.append(engine.plan)
    assert plans[0].basis.work is None
    assert plans[1] == plans[2]
    measured = plans[1].basis.work
    assert measured is not None
    *blocks, last = measured.stages
    assert blocks == list(work.stages[:-1])
    assert activation_bytes(measured, recomputed=True) == lean + more
    assert (last == work.stages[-1]) == (not more)
    assert plans[1].total_bytes("vram") <= BUDGET


def test_the_copy_without_memory_runs_the_set_forward_on_its_own_modules() -> None:
    network, calls = TinyLM(**LARGER), []
    own: Any = network.forward

    def wider(self: Any, tokens: torch.Tensor, *, times: int = 3) -> torch.Tensor:
        calls.append(self)
        return own(tokens) + self.embed.weight.expand(times, -1, -1).contiguous().square().mean()

    plain = trace_micro_batch(outline.without_memory(TinyLM(**LARGER)).train(), window(0)[1])
    network.forward = MethodType(wider, network)  # type: ignore[assignment]
    copied = outline.without_memory(set_forward(network)).train()  # a set forward that holds a set forward
    wide = trace_micro_batch(copied, window(0)[1])
    assert calls == [copied]
    assert wide.stages[-1].kept_bytes >= plain.stages[-1].kept_bytes + 3 * copied.embed.weight.nbytes  # type: ignore[operator, union-attr]
    assert wide.stages[:-1] == plain.stages[:-1]


@pytest.mark.usefixtures("on_a_tiny_card")
def test_a_run_that_ends_before_its_measured_window_leaves_no_hooks() -> None:
    model = Reads(**LARGER)
    with OffloadEngine(model, replace(TIGHT, vram=BUDGET), device="cpu", example=window(0)[0]) as engine:
        for tokens in window(0):
            engine.backward(engine(tokens))
            engine.step()
        assert engine.is_beginning
    assert not any(each for module in model.modules() for each in hooks_of(module))


@pytest.mark.usefixtures("on_a_card")
def test_the_measured_micro_batch_is_the_largest() -> None:
    """Its blocks have the shapes of a trace of the whole model, in order."""
    small, large = (torch.zeros(rows, 9, dtype=torch.int64) for rows in (2, 3))
    network = TinyLM(width=32, hidden=515)
    calls = BlockCalls(network)
    for tokens in (small, large):
        network(tokens)
    calls.keep()
    network(small)
    calls.close()
    network(small)
    found = trace_blocks(outline.without_memory(network).train(), calls.kept, 27)
    whole = trace_micro_batch(outline.without_memory(network).train(), large)
    assert found.stages == tuple(stage for stage in whole.stages if stage.block)


@pytest.mark.usefixtures("on_a_card")
def test_a_model_whose_blocks_cannot_be_traced_is_trained_as_it_began(caplog: pytest.LogCaptureFixture) -> None:
    with OffloadEngine(Inside(width=8, hidden=16), TIGHT, device="cpu", example=window(0)[0]) as engine:
        before = engine.plan
        trained(engine, steps=3)
        assert engine.plan is before
        assert not engine.is_beginning
    assert "cannot be planned" in caplog.text


class _Reading(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.up.weight.flatten()[0].tolist() < 1e6
        return super().forward(x)


class Inside(TinyLM):
    """Its blocks read weights."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width=width, hidden=hidden)
        self.blocks = nn.ModuleList([_Reading(width, hidden) for _ in range(2)])


class DropsLayers(TinyLM):
    """Draws random numbers in Python, like models that drop whole layers."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(tokens)
        return loss * float(torch.rand(()) + random.random() + np.random.rand() > 0)


@pytest.mark.usefixtures("on_a_card")
def test_a_plan_draws_no_random_number_of_the_run() -> None:
    given, states = DropsLayers(), random_states()
    made = outline.plan_for(given, TIGHT, torch.device("cpu"), window(0)[0])
    assert made is not None
    assert made.seconds is not None
    drawn = float(torch.rand(())), random.random(), float(np.random.rand())
    set_random_states(states)
    assert drawn == (float(torch.rand(())), random.random(), float(np.random.rand()))


class Logits(nn.Module):
    """A model whose loss is computed by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 512))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"logits": self.layers(x), "loss": None}


@pytest.mark.usefixtures("on_a_card")
def test_a_loss_outside_the_model_is_stood_in_for() -> None:
    config = OffloadConfig(vram=4 * GIB, ram="8GiB")
    held = []
    for rows in (4, 4096):
        with OffloadEngine(Logits(), config, device="cpu", example=torch.zeros(rows, 16)) as engine:
            held.append(engine.plan.tiers["vram"]["activations"])
    assert held[1] - held[0] >= 2 * 4092 * 512 * 4  # the logits, and a softmax's copy of them


@pytest.mark.usefixtures("on_a_card")
def test_hooks_of_the_model_do_not_run_while_it_is_planned() -> None:
    given, calls = model(), list[Any]()
    given.blocks[0].register_forward_hook(lambda *args: calls.append(args))
    given.head.register_full_backward_hook(lambda *args: calls.append(args))
    made = outline.plan_for(given, TIGHT, torch.device("cpu"), window(0)[0])
    assert made is not None
    assert made.seconds is not None
    assert not calls


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize("example", [None, torch.zeros(2, 9, dtype=torch.int64)])
def test_a_budget_that_is_too_small_is_refused_before_anything_moves(example: torch.Tensor | None) -> None:
    given = model()
    weight = given.head.weight.data_ptr()
    with pytest.raises(DoesNotFitError, match=r"needs .* of VRAM, has 256 MiB(.|\n)* would fit"):
        OffloadEngine(given, OffloadConfig(vram="256MiB"), device="cpu", example=example)
    assert given.head.weight.data_ptr() == weight
    OffloadEngine(given, OffloadConfig(vram=4 * GIB), device="cpu", example=example).close()


def test_a_budget_of_ram_is_kept_without_a_gpu_too() -> None:
    with pytest.raises(DoesNotFitError, match="RAM, has 1 MiB"):
        OffloadEngine(model(), OffloadConfig(ram="1MiB"), device="cpu")


def test_a_placement_on_disk_needs_no_folder_to_be_planned() -> None:
    config = OffloadConfig(ram="8GiB", placement=Placement(states="disk"))
    with OffloadEngine(model(), config, device="cpu", example=window(0)[0]) as engine:
        assert engine.plan.total_bytes("disk") > 0


def test_nothing_is_measured_where_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(outline, "measured_by", refuse)
    OffloadEngine(model(), device="cpu").close()
