"""The engine computes the numbers of plain torch, for any module and any placement."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import EngineStateError
from offloadkit.facts import hardware
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.telemetry import Telemetry
from offloadkit.offload import gradient_buffers, update
from offloadkit.offload.layers import flat_layers
from offloadkit.optim.norm import NORM_BLOCK
from tests.models import Residual, SquaredOutput, TinyLM, Twin, WithFunction, tokens, train

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def freeze_half(model: nn.Module) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    return [
        {"params": matrices, "lr": 3e-3, "weight_decay": 0.1},
        {"params": vectors, "lr": 1e-2, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-6},
    ]


@pytest.mark.parametrize("steps", [20, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("tied", "frozen", "groups", "dtype", "accumulation", "max_grad_norm"),
    [  # every pair of values occurs once
        (True, False, None, "fp32", 1, None),
        (True, False, None, "bf16", 3, 0.3),
        (False, True, None, "fp32", 3, None),
        (False, True, None, "bf16", 1, 0.3),
        (True, False, two_groups, "fp32", 1, 0.3),
        (True, False, two_groups, "bf16", 3, None),
    ],
)
def test_steps_agree_with_torch_adamw(
    device: str,
    steps: int,
    dtype: str,
    accumulation: int,
    max_grad_norm: float | None,
    tied: bool,
    frozen: bool,
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None,
) -> None:
    torch.manual_seed(0)
    model = TinyLM(tied=tied, depth=2, hidden=259)
    if frozen:
        freeze_half(model)
    config = OffloadConfig(
        learning_rate=2e-3,
        weight_decay=0.01,
        max_grad_norm=max_grad_norm,
        gradient_accumulation=accumulation,
        working_dtype=dtype,  # type: ignore[arg-type]
    )
    started = {name: p.detach().clone() for name, p in model.named_parameters()}
    with OffloadEngine(model, config, device=device, param_groups=groups(model) if groups else None) as engine:
        twin = Twin(engine, groups, lr=2e-3, weight_decay=0.01)
        batches = tokens(steps * accumulation, device)
        for step in range(steps):
            window = batches[step * accumulation : (step + 1) * accumulation]
            twin.step(window, max_grad_norm)
            for batch in window:
                engine.backward(engine(batch))
                boundary = engine.step()
            assert boundary
            assert engine.grad_norm() == pytest.approx(twin.norm, rel=1e-5)
        assert twin.relative_difference() <= 5e-6
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter.detach().cpu().float(), started[name].to(parameter.dtype).float())
        assert moved == (parameter.requires_grad and name != "unused"), name


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (lambda: SquaredOutput(nn.Linear(5, 3)), (2, 5)),
        (
            lambda: SquaredOutput(nn.Sequential(nn.Linear(8, 700), nn.Tanh(), nn.Linear(700, 90), nn.Linear(90, 2))),
            (1, 8),
        ),
        (
            lambda: SquaredOutput(
                nn.Sequential(nn.Conv2d(3, 17, 3), nn.ReLU(), nn.Conv2d(17, 9, 3), nn.Flatten(), nn.Linear(144, 5))
            ),
            (2, 3, 8, 8),
        ),
        (WithFunction, (3, 9)),
    ],
    ids=["one Linear", "MLP", "CNN", "custom autograd.Function"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_module_trains(
    device: str, model: Callable[[], nn.Module], example: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    module = model().to(dtype)
    with OffloadEngine(module, OffloadConfig(learning_rate=1e-2, max_grad_norm=1.0), device=device) as engine:
        twin = Twin(engine, None, lr=1e-2, weight_decay=0.0)
        losses = []
        for _ in range(30):
            batch = torch.randn(example, generator=torch.Generator().manual_seed(7)).to(device, dtype)
            twin.step([batch], 1.0)
            loss = engine(batch)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        assert twin.relative_difference() <= 5e-6
        assert losses[-1] < 0.9 * losses[0]


def trained_weights(device: str, config: OffloadConfig, num: int = 12, **model: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module = TinyLM(**model)
    with OffloadEngine(module, config, device=device) as engine:
        train(engine, tokens(num, device))
        states = {
            f"{name}.{key}": value.clone()
            for name, s in engine.state_dict()["optimizer"].items()
            for key, value in s.items()
        }
        return {name: p.detach().cpu().clone() for name, p in module.named_parameters()} | states


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_placement_changes_no_number(device: str, accumulation: int, dtype: Any) -> None:
    def weights(placement: Placement | None) -> dict[str, torch.Tensor]:
        config = OffloadConfig(
            learning_rate=1e-2, gradient_accumulation=accumulation, working_dtype=dtype, placement=placement
        )
        return trained_weights(device, config, dropout=0.1)

    default = weights(None)
    for placement in (Placement(gradients="vram"), Placement(gradients="ram", activations="checkpoint")):
        other = weights(placement)
        for name, tensor in default.items():
            assert torch.equal(tensor, other[name]), (placement, name)


def test_delays_on_the_stepping_thread_change_no_number(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = OffloadConfig(learning_rate=1e-2)
    expected = trained_weights(device, config, num=25)
    rng, real = random.Random(0), update.LayerState.step

    def late(self: Any, *args: Any) -> None:
        time.sleep(rng.random() * 0.01)
        real(self, *args)

    monkeypatch.setattr(update.LayerState, "step", late)
    delayed = trained_weights(device, config, num=25)
    for name, tensor in expected.items():
        assert torch.equal(tensor, delayed[name]), name


@pytest.mark.parametrize("accumulation", [1, 2])
def test_returned_gradient_buffers_are_not_read_again(
    device: str, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OffloadConfig(learning_rate=1e-2, gradient_accumulation=accumulation)
    expected = trained_weights(device, config)
    real = gradient_buffers.BucketPool.take

    def poisoned(self: Any) -> torch.Tensor:
        buffer = real(self)
        return buffer.fill_(0xFF)  # NaN in bf16 and fp32

    monkeypatch.setattr(gradient_buffers.BucketPool, "take", poisoned)
    for name, tensor in trained_weights(device, config).items():
        assert torch.equal(tensor, expected[name]), name


def test_dropout_is_reproduced_on_recomputation(device: str) -> None:
    kept = trained_weights(device, OffloadConfig(learning_rate=1e-2), dropout=0.3)
    recomputed = trained_weights(device, OffloadConfig(learning_rate=1e-2, activation_checkpointing=True), dropout=0.3)
    for name, tensor in kept.items():
        assert torch.equal(tensor, recomputed[name]), name


def test_a_huggingface_model_recomputes_its_own_way(device: str) -> None:
    transformers = pytest.importorskip("transformers")
    size = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
    config = transformers.T5Config(**size, dropout_rate=0.2, decoder_start_token_id=0, use_cache=False)
    batch = {"input_ids": torch.arange(2, 12).view(2, 5).to(device), "labels": torch.arange(2, 8).view(2, 3).to(device)}
    weights = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = transformers.T5ForConditionalGeneration(config).train()
        options = OffloadConfig(learning_rate=1e-2, activation_checkpointing=recompute)
        with OffloadEngine(model, options, device=device) as engine:
            for _ in range(5):
                engine.backward(engine(**batch).loss)
                engine.step()
            assert model.is_gradient_checkpointing == recompute
            weights.append(engine.master_weights())
        assert not model.is_gradient_checkpointing
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_a_block_used_twice_gets_the_sum_of_its_gradients(device: str) -> None:
    class Twice(TinyLM):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            x = self.embed(batch)
            for block in (*self.blocks, *self.blocks):
                x = block(x)
            return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch.flip(-1).flatten())

    for accumulation in (1, 2):
        torch.manual_seed(0)
        config = OffloadConfig(learning_rate=1e-3, gradient_accumulation=accumulation)
        with OffloadEngine(Twice(tied=False, depth=2), config, device=device) as engine:
            twin = Twin(engine, None, lr=1e-3, weight_decay=0.0)
            batches = tokens(10 * accumulation, device)
            for step in range(10):
                window = batches[step * accumulation : (step + 1) * accumulation]
                twin.step(window, 1.0)
                for batch in window:
                    engine.backward(engine(batch))
                    engine.step()
            assert twin.relative_difference() <= 5e-6


def test_a_deepcopy_of_the_model_is_a_model_of_its_own(device: str) -> None:
    model = TinyLM(tied=True)
    batch = tokens(1, device)[0]
    with OffloadEngine(model, OffloadConfig(), device=device) as engine:
        other = copy.deepcopy(model)
        other(batch).backward()
        assert other.embed.weight.grad is not None
        with pytest.raises(EngineStateError, match="before backward"):
            engine.step()
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(EngineStateError, match="neither copied nor pickled"):
                copied(engine)


def test_freezing_between_steps_leaves_weights_states_and_step_counts_alone(device: str) -> None:
    model = TinyLM(depth=2)
    batches = tokens(6, device)
    with OffloadEngine(model, OffloadConfig(learning_rate=1e-2), device=device) as engine:
        train(engine, batches[:2])
        before = copy.deepcopy(engine.state_dict()["optimizer"]["blocks.0.up.weight"])
        weight = model.blocks[0].up.weight
        value = weight.detach().clone()
        weight.requires_grad_(False)
        train(engine, batches[2:4])
        after = engine.state_dict()["optimizer"]["blocks.0.up.weight"]
        assert torch.equal(weight, value)
        assert all(torch.equal(before[key], after[key]) for key in before)
        weight.requires_grad_(True)
        train(engine, batches[4:])
        assert not torch.equal(weight, value)
        assert int(after["step"]) == 4
        assert int(engine.state_dict()["optimizer"]["blocks.0.down.weight"]["step"]) == 6


def test_evaluation_and_saving_right_after_a_step_see_the_new_weights(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = update.LayerState.step

    def slow(self: Any, *args: Any) -> None:
        time.sleep(0.02)
        real(self, *args)

    monkeypatch.setattr(update.LayerState, "step", slow)
    batch = tokens(1, device)[0]
    seen = []
    for look in ("forward", "module", "state_dict", "settled"):
        torch.manual_seed(0)
        model = TinyLM(depth=3)
        with OffloadEngine(model, OffloadConfig(learning_rate=0.1), device=device) as engine:
            engine.backward(engine(batch))
            engine.step()
            if look == "settled":
                engine.synchronize()
            with torch.no_grad():
                if look == "state_dict":
                    seen.append({k: v.clone() for k, v in model.state_dict().items()})
                    engine.synchronize()
                    seen[-1] = [torch.equal(v, seen[-1][k]) for k, v in model.state_dict().items()]
                else:
                    seen.append((engine if look == "forward" else model)(batch).item())
    assert seen[0] == seen[1] == seen[3]
    assert all(seen[2])


def test_weights_written_from_outside_are_taken_over_without_a_stale_remainder(device: str) -> None:
    model = TinyLM(depth=2)
    best = {name: tensor.bfloat16() for name, tensor in TinyLM(depth=2).state_dict().items()}
    with OffloadEngine(model, OffloadConfig(learning_rate=1e-2, working_dtype="bf16"), device=device) as engine:
        train(engine, tokens(3, device))
        assert any(s["remainder"].any() for s in engine.state_dict()["optimizer"].values())
        model.load_state_dict(best)
        masters = engine.master_weights()
        for name, master in masters.items():
            assert torch.equal(master, best[name].float()), name
        twin = Twin(engine, None, lr=0.0, weight_decay=0.0)
        train(engine, tokens(1, device))
        assert not torch.equal(engine.master_weights()["norm.weight"], masters["norm.weight"])
        assert set(twin.masters) == set(masters)


def test_a_run_continues_bit_for_bit_from_its_state_dict(device: str) -> None:
    batches = tokens(8, device)
    config = OffloadConfig(learning_rate=1e-2, working_dtype="bf16", max_grad_norm=0.5)
    torch.manual_seed(0)
    model = TinyLM()
    with OffloadEngine(model, config, device=device) as engine:
        train(engine, batches[:4])
        saved = copy.deepcopy(engine.state_dict())
        saved_optimizer = copy.deepcopy(engine.optimizer.state_dict())
        train(engine, batches[4:])
        expected = engine.master_weights()
    for through_optimizer in (False, True):
        torch.manual_seed(5)
        other = TinyLM()
        with OffloadEngine(other, config, device=device) as engine:
            if through_optimizer:
                other.load_state_dict(saved["module"])
                engine.optimizer.load_state_dict(saved_optimizer)
            else:
                engine.load_state_dict(saved)
            train(engine, batches[4:])
            for name, master in engine.master_weights().items():
                assert torch.equal(master, expected[name]), name


@pytest.mark.parametrize("through", ["optimizer", "engine"])
def test_a_state_without_remainders_leaves_none_of_the_weights_trained_before(through: str, device: str) -> None:
    config = OffloadConfig(learning_rate=1e-2, working_dtype="bf16")
    model = TinyLM(depth=2)
    with OffloadEngine(model, config, device=device) as engine:
        saved = copy.deepcopy(engine.state_dict())
        saved_optimizer = copy.deepcopy(engine.optimizer.state_dict())
        train(engine, tokens(3, device))
        assert any(bool((m != w.float().cpu()).any()) for m, w in paired(engine, model))
        if through == "optimizer":
            for state in saved_optimizer["state"].values():
                state.pop("remainder", None)
            model.load_state_dict(saved["module"])
            engine.optimizer.load_state_dict(saved_optimizer)
        else:
            for state in saved["optimizer"].values():
                state.pop("remainder", None)
            engine.load_state_dict(saved)
        for master, weight in paired(engine, model):
            assert torch.equal(master, weight.float().cpu())


def paired(engine: OffloadEngine, model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of (master weights, working weights)."""
    masters, weights = engine.master_weights(), model.state_dict()
    return [(master.cpu(), weights[name]) for name, master in masters.items()]


@pytest.mark.parametrize("numels", [(65_536,), (65_536, 131_072), (65_535, 65_536, 65_537), (1, 65_536, 3)])
@pytest.mark.parametrize("placement", [None, Placement(gradients="vram", states="vram", step="gpu")])
def test_the_norm_is_that_of_all_gradients_where_parameters_are_whole_blocks(
    numels: tuple[int, ...], placement: Placement | None, device: str
) -> None:
    """Norm blocks have 65,536 elements. Parameters without a gradient have blocks too."""
    torch.manual_seed(0)
    model = Halves(numels)
    config = OffloadConfig(learning_rate=0.0, weight_decay=0.0, max_grad_norm=0.1, placement=placement)
    layers = flat_layers(model, config)
    assert sum(layer.num_norm_blocks for layer in layers) == sum(math.ceil(numel / NORM_BLOCK) for numel in numels)
    norms = [float(weight.detach().double().norm()) for weight in model.weights]
    with OffloadEngine(model, config, device=device) as engine:
        for used in ({*range(len(numels))}, *({at} for at in range(len(numels)))):
            engine.backward(engine(used))
            engine.step()
            assert engine.grad_norm() == pytest.approx(math.hypot(*(norms[at] for at in used)), rel=1e-6)


class Halves(nn.Module):
    """Half the sum of squared weights, so each gradient equals its weight."""

    def __init__(self, numels: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([1e-3 * torch.randn(numel) for numel in numels])

    def forward(self, used: set[int]) -> torch.Tensor:
        return torch.stack([0.5 * self.weights[at].square().sum() for at in used]).sum()


def test_the_optimizer_takes_torch_adamws_own_state_in_fp32(device: str) -> None:
    model = TinyLM(depth=2)
    plain = copy.deepcopy(model).to(device)
    torch_adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for batch in tokens(3, device):
        torch_adamw.zero_grad()
        plain(batch).backward()
        torch_adamw.step()
    with OffloadEngine(model.bfloat16(), OffloadConfig(), device=device) as engine:
        engine.optimizer.load_state_dict(torch_adamw.state_dict())
        ours, theirs = engine.optimizer.state_dict()["state"], torch_adamw.state_dict()["state"]
        for index, state in theirs.items():
            assert torch.equal(ours[index]["exp_avg"], state["exp_avg"].cpu())
            assert ours[index]["exp_avg"].dtype == torch.float32
        assert engine.optimizer.param_groups[0]["lr"] == 1e-3


def test_a_scheduler_drives_the_learning_rate(device: str) -> None:
    model = TinyLM(depth=2)
    with OffloadEngine(model, OffloadConfig(learning_rate=1e-2), device=device) as engine:
        scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 0.0 if step else 1.0)
        train(engine, tokens(1, device))
        scheduler.step()
        before = engine.master_weights()
        train(engine, tokens(2, device))
        for name, master in engine.master_weights().items():
            assert torch.equal(master, before[name])
        rates = [record.learning_rate for record in engine.telemetry.records]
        assert rates == [1e-2, 0.0, 0.0]


def test_zero_grad_drops_the_window(device: str) -> None:
    batches = tokens(3, device)
    for accumulation in (1, 2):
        torch.manual_seed(0)
        config = OffloadConfig(learning_rate=1e-2, gradient_accumulation=accumulation)
        weights = []
        for drop in (False, True):
            torch.manual_seed(0)
            with OffloadEngine(TinyLM(), config, device=device) as engine:
                if drop:
                    engine.backward(engine(batches[2]))
                    engine.optimizer.zero_grad()
                for batch in batches[:accumulation]:
                    engine.backward(engine(batch))
                    engine.step()
                weights.append(engine.master_weights())
        assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_a_short_window_ends_where_the_caller_says(device: str) -> None:
    batches = tokens(2, device)
    with OffloadEngine(TinyLM(), OffloadConfig(gradient_accumulation=4), device=device) as engine:
        for batch in batches:
            engine.backward(engine(batch), scale_by_accumulation=False)
        assert engine.step(boundary=True)
        assert engine.grad_norm() is not None
        assert len(engine.state_dict()["param_groups"]) == 1


def test_telemetry_records_every_step(device: str, tmp_path: Any) -> None:
    log = tmp_path / "steps.jsonl"
    engine = OffloadEngine(TinyLM(), OffloadConfig(), device=device, telemetry=Telemetry(log))
    losses = []
    for batch in tokens(5, device):
        loss = engine(batch)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    engine.close()
    records = list(engine.telemetry.records)
    assert [record.step for record in records] == [1, 2, 3, 4, 5]
    assert [record.loss for record in records] == pytest.approx(losses)
    assert all(record.seconds["cpu_step"] > 0 and record.seconds["backward"] > 0 for record in records)
    assert len(log.read_text().splitlines()) == 5
    assert records[0].bytes["ram"]["moments"] == engine.plan.tiers["ram"]["moments"]


def test_close_gives_memory_back_and_a_second_engine_starts() -> None:
    model = nn.Sequential(*[Residual(1024, 2048) for _ in range(4)])
    expected = sum(p.numel() for p in model.parameters()) * 4 * 4
    for _ in range(3):
        engine = OffloadEngine(model, OffloadConfig())
        held = hardware.process_ram_bytes()
        engine.close()
        gc.collect()
        assert held - hardware.process_ram_bytes() > 0.8 * expected
    assert all(p.isfinite().all() for p in model.parameters())
