"""Models with sub-models for images and sound, by the bare loop: traced, cut, planned and trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from offloadkit import OffloadConfig, OffloadEngine, Placement
from offloadkit.engine.outline import without_memory
from offloadkit.engine.tracing import trace_micro_batch
from offloadkit.hf.freezing import freeze_parts
from offloadkit.offload.layers import flat_layers, repeated_blocks
from offloadkit.planner.graphs import capturable
from tests.engine.test_tracing import saved_in_a_real_run
from tests.sub_models import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ("qwen2.5-vl", "gemma3", "whisper", "clip")
"""The families whose training the quick tests compare; the slow tests compare all."""
TRAINED = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


@pytest.mark.parametrize("family", FAMILIES)
def test_both_towers_are_traced_with_what_autograd_saves(family: str) -> None:
    make, batch = FAMILIES[family]
    model, micro_batch = make().train(), batch(3)
    saved = saved_in_a_real_run(model, micro_batch)
    copied = without_memory(model)
    work = trace_micro_batch(copied, micro_batch)
    called = {stage.block for stage in work.stages if stage.block}
    assert called == {name for name, _ in repeated_blocks(copied)}
    kept = sum(stage.kept_bytes for stage in work.stages)
    assert saved <= kept <= 1.2 * saved  # tensors are rounded up to 512 bytes


PLACEMENTS = {
    "vram": Placement(gradients="vram", states="vram", step="gpu"),
    "recomputed": Placement(activations="checkpoint"),
    "ram": Placement(weights="ram", activations="offload"),
}


def losses_of(
    family: str, place: str, steps: int = 3, frozen: Sequence[str] = ()
) -> tuple[list[float], dict[str, torch.Tensor]]:
    make, batch = FAMILIES[family]
    torch.manual_seed(0)
    model = make().train()
    freeze_parts(model, frozen)
    config = OffloadConfig(learning_rate=1e-3, max_grad_norm=None, weight_decay=0.1, placement=PLACEMENTS[place])
    losses = []
    with OffloadEngine(model, config, device="cpu") as engine:
        for step in range(steps):
            seed_everything(step)
            loss = engine(**batch(2 + step % 2)).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        if frozen:
            blocks = [name for name, _ in repeated_blocks(model) if f".{frozen[0]}." in name]
            layers = {
                layer.name: where for layer, where in zip(engine.plan.layers, engine.plan.placements, strict=True)
            }
            assert blocks
            assert {layers[name].weights for name in blocks} == {PLACEMENTS[place].weights}
        return losses, engine.master_weights()


def seed_everything(seed: int) -> None:
    """wav2vec2 draws masks with numpy."""
    torch.manual_seed(seed)
    np.random.seed(seed)


def losses_of_plain_adamw(family: str, steps: int = 3, frozen: Sequence[str] = ()) -> list[float]:
    make, batch = FAMILIES[family]
    torch.manual_seed(0)
    model = make().train()
    freeze_parts(model, frozen)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1)
    losses = []
    for step in range(steps):
        seed_everything(step)
        loss = model(**batch(2 + step % 2)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("family", TRAINED)
def test_equal_over_placements_and_as_plain_adamw(family: str) -> None:
    """Blocks of both towers are flat layers: their weights leave VRAM, and their activations are recomputed."""
    losses, weights = losses_of(family, "vram")
    for place in ("recomputed", "ram"):
        others, moved = losses_of(family, place)
        assert others == losses
        assert all(moved[name].equal(weight) for name, weight in weights.items())
    assert losses == pytest.approx(losses_of_plain_adamw(family), rel=1e-5)


@pytest.mark.parametrize(("family", "tower"), [("gemma3", "vision_tower"), ("qwen2.5-vl", "visual")])
def test_a_frozen_tower_is_planned_and_streams(family: str, tower: str) -> None:
    losses, weights = losses_of(family, "vram", frozen=[tower])
    others, moved = losses_of(family, "ram", frozen=[tower])
    assert others == losses
    assert all(moved[name].equal(weight) for name, weight in weights.items())
    assert not any(f".{tower}." in name for name in weights)
    assert losses == pytest.approx(losses_of_plain_adamw(family, frozen=[tower]), rel=1e-5)


def test_blocks_that_read_lengths_are_not_planned_as_graphs() -> None:
    """The vision tower cuts its input at lengths that it reads; the decoder does not wait."""
    make, batch = FAMILIES["qwen2.5-vl"]
    work = trace_micro_batch(without_memory(make().train()), batch(2))
    waits = {stage.block.split(".")[1]: stage.waits for stage in work.stages if stage.block}
    assert waits == {"visual": True, "language_model": False}
    layers = flat_layers(make(), OffloadConfig())
    assert capturable([layer.shape() for layer in layers], work) == {
        stage.block for stage in work.stages if ".language_model." in stage.block
    }
