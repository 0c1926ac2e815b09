"""Frozen layers: trained through adapters, the base may live in RAM, and every number is torch's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import EngineStateError, ModelError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.offload.layers import flat_layers, plan_of
from offloadkit.offload.weight_ring import StreamedWeights, WeightRing
from offloadkit.offload.weights import LookedUpWeights
from offloadkit.optim.adamw import adamw_scalars, adamw_update
from offloadkit.planner import placed
from offloadkit.planner.layout import WeightsAlone, possible
from offloadkit.planner.seconds import IN_VRAM
from tests.models import TinyLM, tokens, train

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RESIDENT = Placement(weights="vram")
STREAMED = Placement(weights="ram")
BASE_ALONE = "base in RAM"
"""As plans place it: the frozen weights stream, the adapters stay in VRAM."""
PLACEMENTS = [
    *(replace(where, activations=how) for where in (RESIDENT, STREAMED) for how in ("keep", "checkpoint", "offload")),
    BASE_ALONE,
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> str:
    monkeypatch.setattr(WeightRing, "fill_with_nan", True)
    return str(request.param)


class Adapted(nn.Module):
    """A frozen linear layer with trained factors of low rank, as PEFT's LoRA writes them."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer, self.enabled = base.requires_grad_(False), True
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, dtype=torch.float32)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.base_layer(x)
        if self.enabled:
            found = found + self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))).to(found.dtype)
        return found

    @torch.no_grad()
    def merge(self, sign: int = 1) -> None:
        self.base_layer.weight.data += sign * (self.lora_B.weight @ self.lora_A.weight).to(self.base_layer.weight.dtype)


def adapted(dtype: torch.dtype = torch.float32, *, first: int = 0, depth: int = 4) -> Any:
    """A `TinyLM` whose blocks from `first` on have adapters; everything else is frozen."""
    torch.manual_seed(0)
    model: Any = TinyLM(tied=False, depth=depth).to(dtype).requires_grad_(False)
    for block in model.blocks[first:]:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


def adapters(model: Any) -> list[Adapted]:
    return [module for module in model.modules() if isinstance(module, Adapted)]


def config(placement: Placement | str | None = STREAMED, **options: Any) -> OffloadConfig:
    where = None if isinstance(placement, str) else placement
    return OffloadConfig(learning_rate=1e-2, placement=where, **options)


def opened(model: nn.Module, placement: Placement | str | None, device: str, **options: Any) -> OffloadEngine:
    made = config(placement, **options)
    if placement != BASE_ALONE:
        return OffloadEngine(model, made, device=device)
    plan = plan_of(model, flat_layers(model, made), made)
    where = [IN_VRAM if layer.kind.is_trained else WeightsAlone(weights="ram") for layer in plan.layers]
    return OffloadEngine(model, made, device=device, plan=placed(plan, where))


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().cpu().clone() for name, weight in model.state_dict().items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, weight in expected.items() if not torch.equal(found[name], weight)]


def by_torch(model: nn.Module, batches: list[torch.Tensor], accumulation: int = 1) -> list[float]:
    """Trains `model` by plain torch and AdamW's formula, whose roots are right to the last bit; the losses."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    moments = {parameter: (torch.zeros_like(parameter), torch.zeros_like(parameter)) for parameter in trained}
    losses = []
    for at, batch in enumerate(batches):
        loss = model(batch)
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (at + 1) % accumulation:
            continue
        options: Any = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        scalars = adamw_scalars(**options, step=(at + 1) // accumulation)
        with torch.no_grad():
            for parameter in trained:
                if parameter.grad is not None:
                    adamw_update(parameter, parameter.grad, moments[parameter], scalars)
                    parameter.grad = None
    return losses


def by_engine(
    model: nn.Module, batches: list[torch.Tensor], placement: Placement | str | None, device: str, **options: Any
) -> list[float]:
    losses = []
    with opened(model, placement, device, **options) as engine:
        for batch in batches:
            loss = engine(batch)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        engine.synchronize()
    return losses


def streamed_layers(engine: OffloadEngine) -> set[str]:
    return {
        state.layer.name
        for state in engine.placed.states
        if isinstance(state.weights, StreamedWeights) and not state.layer.kind.is_trained
    }


OPTIONS: dict[str, Any] = {"max_grad_norm": None, "weight_decay": 0.0}


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize(("dtype", "accumulation"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 2)])
def test_every_bit_is_torchs(placement: Placement | str, dtype: torch.dtype, accumulation: int, device: str) -> None:
    """The adapters are fp32, as PEFT makes them; the base has `dtype`."""
    expected, model, batches = adapted(dtype).to(device), adapted(dtype), tokens(6, device)
    losses = by_torch(expected, batches, accumulation)
    found = by_engine(model, batches, placement, device, gradient_accumulation=accumulation, **OPTIONS)
    assert found == losses
    assert_equal(weights_of(model), weights_of(expected))


def test_the_numbers_are_those_of_torchs_optimizer() -> None:
    expected, model, batches = adapted(), adapted(), tokens(6)
    losses = by_engine(model, batches, STREAMED, "cpu", **OPTIONS)
    trained = [parameter for parameter in expected.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    for batch, known in zip(batches, losses, strict=True):
        loss = expected(batch)
        torch.testing.assert_close(loss.item(), known, rtol=1e-5, atol=0.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("activations", ["keep", "cheap", "checkpoint"])
@pytest.mark.parametrize("first", [0, 2, 4])
def test_frozen_blocks_below_the_trained_ones_stream_too(first: int, activations: Any, device: str) -> None:
    """Backward does not reach blocks before the `first` one with adapters; if there is none, the norm is trained."""
    runs = []
    for weights in ("vram", "ram"):
        model = adapted(first=first)
        model.norm.requires_grad_(True)
        where = Placement(weights=weights, activations=activations)
        losses = by_engine(model, tokens(4, device), where, device)
        runs.append((losses, weights_of(model)))
    assert runs[0][0] == runs[1][0]
    assert_equal(runs[1][1], runs[0][1])


def test_a_frozen_layer_has_weights_alone(device: str) -> None:
    model = adapted()
    with OffloadEngine(model, config(), device=device) as engine:
        train(engine, tokens(2, device))
        assert streamed_layers(engine) == {f"blocks.{at}" for at in range(4)}
        frozen = [state for state in engine.placed.states if not state.layer.kind.is_trained]
        assert [len(state.layer.views) for state in frozen] == [1, 4, 4, 4, 4], "embeddings; two weights, two biases"
        for state in frozen:
            assert not state.flat.arrays
            assert state.gradient.host is None
            assert not any(view.parameter in engine.optimizer.state for view in state.layer.views)
        assert all("lora" in name for name in engine.state_dict()["optimizer"])
        assert all("lora" in name for name in engine.master_weights())
        planned = engine.plan.tiers["ram"]["frozen weights"]
        assert planned == sum(state.weights.flat.nbytes for state in frozen)


def test_a_frozen_module_in_two_blocks_does_not_keep_their_other_weights_in_vram() -> None:
    model, one = adapted(), nn.Linear(65, 65).requires_grad_(False)
    for block in model.blocks[:2]:
        block.one = one
    found = flat_layers(model, config())
    layers = [layer for layer in found if layer.block is not None and not layer.kind.is_trained]
    assert [layer.name for layer in layers] == [f"blocks.{at}" for at in range(4)]
    assert not any(layer.shared for layer in layers)
    assert all(view.parameter is not one.weight for layer in layers for view in layer.views)


def test_a_move_carries_frozen_weights_between_ram_and_vram(device: str) -> None:
    expected, model, batches = adapted(torch.bfloat16), adapted(torch.bfloat16), tokens(6, device)
    losses = by_engine(expected, batches, None, device)
    found = []
    with OffloadEngine(model, config(None), device=device) as engine:
        for at, batch in enumerate(batches):
            loss = engine(batch)
            found.append(loss.item())
            engine.backward(loss)
            engine.step()
            weights: Any = ("ram", "vram")[at % 2]
            where = [Placement(weights=weights) for _ in engine.plan.layers]
            engine.move(
                placed(engine.plan, [possible(each, of) for each, of in zip(where, engine.plan.layers, strict=True)])
            )
            assert len(streamed_layers(engine)) == (4 if weights == "ram" else 0)
    assert found == losses
    assert_equal(weights_of(model), weights_of(expected))


def test_adapters_can_be_disabled_and_merged(device: str) -> None:
    """As PEFT does for reference logits and for evaluation; the same numbers wherever the base is."""
    runs = []
    for placement in (RESIDENT, STREAMED, replace(STREAMED, activations="checkpoint"), BASE_ALONE):
        model, found = adapted(torch.bfloat16), []
        batches = tokens(4, device)
        with opened(model, placement, device) as engine:
            train(engine, batches[:2])
            for each in adapters(model):
                each.enabled = False
                each.lora_A.requires_grad_(False)
            with torch.no_grad():
                found += [engine(batches[2]).item(), model(batches[3]).item()]
            for each in adapters(model):
                each.enabled = True
                each.lora_A.requires_grad_(True)
            train(engine, batches[2:])
            with torch.no_grad():
                found.append(engine(batches[0]).item())
                for each in adapters(model):
                    each.merge()
                    each.enabled = False
                found.append(engine(batches[0]).item())
                merged = weights_of(model)
                for each in adapters(model):
                    each.merge(-1)
                    each.enabled = True
            train(engine, batches[:1])
        runs.append((found, merged, weights_of(model)))
    for found, merged, after in runs[1:]:
        assert found == runs[0][0]
        assert_equal(merged, runs[0][1])
        assert_equal(after, runs[0][2])
    assert found[3] != found[2], "merging rounds to bf16"


def test_frozen_embeddings_are_looked_up_in_ram(device: str, tmp_path: Path) -> None:
    """Reading, writing, moving, saving and closing, as if they were in VRAM."""
    model, other, some = adapted(), adapted().to(device), tokens(3, device)
    with OffloadEngine(model, config(None), device=device) as engine:
        train(engine, some)
        in_vram = weights_of(model)
    model = adapted()
    with OffloadEngine(model, config(None), device=device) as engine:
        for weights in ("ram", "vram", "ram"):
            where = [Placement(weights=weights) for _ in engine.plan.layers]
            pairs = zip(where, engine.plan.layers, strict=True)
            engine.move(placed(engine.plan, [possible(each, of) for each, of in pairs]))
            embeddings = next(state for state in engine.placed.states if state.layer.looked_up)
            assert isinstance(embeddings.weights, LookedUpWeights) == (weights == "ram")
            assert embeddings.weights.flat.device.type == ("cpu" if weights == "ram" else torch.device(device).type)
            assert model.embed.weight.device == engine.device
            train(engine, some[:1])
            some = [*some[1:], some[0]]
        assert_equal(weights_of(model), in_vram)
        engine.save_checkpoint(tmp_path / "saved")
        with torch.no_grad():
            model.embed.weight[3] += 1
            other.load_state_dict({name: value.to(device) for name, value in in_vram.items()})
            other.embed.weight[3] += 1
            ids = torch.full((1, 3), 3, device=device)
            assert engine(ids).item() == other(ids).item()
        with pytest.raises(ModelError, match=r"1 frozen weights differ .*'embed\.weight'"):
            engine.load_checkpoint(tmp_path / "saved")
        written = weights_of(model)
    assert model.embed.weight.device.type == "cpu"
    assert_equal(weights_of(model), written)


def test_embeddings_that_write_their_weights_stay_in_vram(device: str) -> None:
    model = adapted()
    model.embed.max_norm = 1.0
    with OffloadEngine(model, config(), device=device) as engine:
        assert not any(state.layer.looked_up for state in engine.placed.states)
        train(engine, tokens(1, device))


def test_a_penalty_may_use_frozen_weights(device: str) -> None:
    """Outside of their blocks, in forward and between: the distance of the merged weights from the frozen ones."""
    runs = []
    for placement in (RESIDENT, STREAMED, BASE_ALONE):
        model, losses = adapted(), []
        with opened(model, placement, device) as engine:
            for batch in tokens(3, device):
                loss = engine(batch)
                for each in adapters(model):
                    share = each.lora_B.weight @ each.lora_A.weight / (1 + each.base_layer.weight.square())
                    loss = loss + 1e-3 * share.square().sum()
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
        runs.append((losses, weights_of(model)))
    for losses, weights in runs[1:]:
        assert losses == runs[0][0]
        assert_equal(weights, runs[0][1])


def test_a_frozen_weight_can_be_read_written_and_loaded_between_steps(device: str) -> None:
    model, other = adapted(), adapted()
    with OffloadEngine(model, config(), device=device) as engine:
        train(engine, tokens(2, device))
        weight = model.blocks[1].up.base_layer.weight
        assert torch.equal(weight.detach().cpu(), other.blocks[1].up.base_layer.weight)
        with torch.no_grad():
            weight.mul_(2)
            other.blocks[1].up.base_layer.weight.mul_(2)
        states = {name: value for name, value in weights_of(model).items() if "lora" in name}
        other.load_state_dict(states, strict=False)
        batch = tokens(1, device)[0]
        with torch.no_grad():
            assert engine(batch).item() == other.to(device)(batch).item()
        zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items() if "base_layer" in name}
        model.load_state_dict(zeros, strict=False)
        train(engine, [batch])
        assert not weight.detach().any()
    assert not model.blocks[3].down.base_layer.weight.detach().any(), "closing keeps what was written"


def test_what_was_frozen_cannot_be_trained_later(device: str) -> None:
    model = adapted()
    with OffloadEngine(model, config(), device=device) as engine:
        train(engine, tokens(1, device))
        model.blocks[0].up.base_layer.weight.requires_grad_(True)
        with pytest.raises(ModelError, match=r"'blocks\.0\.up\.base_layer\.weight' was added, replaced or unfrozen"):
            train(engine, tokens(1, device))


def test_two_engines_may_share_frozen_weights() -> None:
    trunk = adapted().blocks[0].up.base_layer
    one, other = (nn.Sequential(trunk, nn.Linear(1027, 65)) for _ in range(2))
    with (
        OffloadEngine(one, config(RESIDENT), device="cpu") as first,
        OffloadEngine(other, config(), device="cpu") as second,
    ):
        for engine in (first, second, first):
            train_on_ones(engine)


def test_frozen_weights_in_the_ram_of_an_engine_are_refused_to_another() -> None:
    trunk = adapted().blocks[0].up.base_layer
    one, other = (nn.Sequential(trunk, nn.Linear(1027, 65)) for _ in range(2))
    said = r"'0\.weight' is in RAM.*weights='vram'"
    with OffloadEngine(one, config(), device="cpu"), pytest.raises(EngineStateError, match=said):
        OffloadEngine(other, config(), device="cpu")
    with OffloadEngine(other, config(), device="cpu") as engine:
        train_on_ones(engine)


def train_on_ones(engine: OffloadEngine) -> None:
    engine.backward(engine(torch.ones(1, 65)).sum())
    engine.step()


def recomputed_as_one(model: Any) -> None:
    """The model itself recomputes all of its blocks as one."""
    blocks = model.blocks

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = blocks

        def __iter__(self) -> Any:
            yield lambda x: checkpoint(nn.Sequential(*self.inner), x, use_reentrant=False)

    model.blocks = Whole()


def test_a_backward_that_outlives_the_buffers_of_frozen_blocks_is_an_error(device: str) -> None:
    model = adapted(depth=8)
    recomputed_as_one(model)
    model.embed.requires_grad_(True)
    with (
        OffloadEngine(model, config(), device=device) as engine,
        pytest.raises(EngineStateError, match="block by block"),
    ):
        train(engine, tokens(1, device))
