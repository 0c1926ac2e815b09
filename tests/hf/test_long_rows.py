"""Rows long enough for tiles: every placement gives the same numbers, near those of whole layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import offloadkit
from offloadkit.engine.tracing import META, trace_micro_batch
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.hf.masks import Padding, known_padding
from offloadkit.hf.patches import fuse, patched
from offloadkit.kernels import feed_forward
from offloadkit.offload import kept_results
from offloadkit.offload.weight_ring import WeightRing

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FEATURES, TOKENS, STEPS, BLOCKS = 40, 600, 2, 3
SIZES = {"hidden_size": 16, "intermediate_size": FEATURES, "num_attention_heads": 2, "num_key_value_heads": 1}
FAMILIES = ("llama", pytest.param("phi3", marks=pytest.mark.slow), pytest.param("gemma2", marks=pytest.mark.slow))
"""Gate and up in two matrices, in one, and with a norm after the layer, which saves the layer's output."""
PLACEMENTS = (
    Placement(activations="checkpoint"),
    Placement(activations="offload"),
    Placement(activations="cheap"),
    Placement(weights="ram", activations="checkpoint"),
    Placement(weights="ram", activations="cheap"),
    Placement(weights="ram"),
    Placement(states="vram", gradients="vram", step="gpu"),
)


@pytest.fixture(autouse=True)
def short_rows_are_long(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(feed_forward, "LONG_ROW", TOKENS * FEATURES)
    monkeypatch.setattr(feed_forward, "TILE", 256 * FEATURES)
    monkeypatch.setattr(kept_results, "MIN_PRODUCTS", 1)
    monkeypatch.setattr(WeightRing, "fill_with_nan", True)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention's backward on a GPU adds in any order otherwise."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def tiny(model_type: str, **changes: Any) -> Any:
    values = {"vocab_size": 64, "num_hidden_layers": BLOCKS, "head_dim": 8, "pad_token_id": 0, "use_cache": False}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values, **SIZES, **changes)).train()


def trained(model_type: str, device: str, placement: Placement) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the steps, and the weights."""
    draw, losses = torch.Generator().manual_seed(1), []
    config = OffloadConfig(learning_rate=1e-2, placement=placement, working_dtype="bf16")
    with offloadkit.OffloadEngine(tiny(model_type), config, device=device) as engine:
        for _ in range(STEPS):
            ids = torch.randint(3, 64, (1, TOKENS), generator=draw).to(device)
            loss = engine(input_ids=ids, labels=ids).loss
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        engine.synchronize()
        return losses, {name: weight.clone() for name, weight in engine.state_dict()["module"].items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_placement_changes_a_number(
    model_type: str, device: str, monkeypatch: pytest.MonkeyPatch, deterministic: None
) -> None:
    called, own = [], feed_forward.tiles
    monkeypatch.setattr(feed_forward, "tiles", lambda *sizes: called.append(sizes) or own(*sizes))
    losses, weights = trained(model_type, device, Placement())
    assert len(own(TOKENS, FEATURES)) == 3
    if device == "cpu":  # a GPU replays graphs
        assert called == 2 * STEPS * BLOCKS * [(TOKENS, FEATURES)]  # forward and backward
    for placement in PLACEMENTS:
        called.clear()
        others = trained(model_type, device, placement)
        assert losses == others[0], placement
        assert all(torch.equal(weight, others[1][name]) for name, weight in weights.items()), placement
        if device == "cpu" and model_type != "gemma2":  # its recomputation needs the layer's output
            assert len(called) == 2 * STEPS * BLOCKS, placement
    monkeypatch.setattr(feed_forward, "LONG_ROW", TOKENS * FEATURES + 1)
    called.clear()
    whole = trained(model_type, device, Placement())
    assert not called
    torch.testing.assert_close(losses, whole[0], rtol=2e-3, atol=0)


def test_layers_with_hooks_or_another_dtype_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    own = feed_forward.gated_feed_forward
    monkeypatch.setattr(feed_forward, "gated_feed_forward", lambda *a, **k: called.append(a) or own(*a, **k))
    model = tiny("llama")
    undo = fuse(model)
    mlp, x = model.model.layers[0].mlp, torch.randn(1, TOKENS, SIZES["hidden_size"])
    expected = mlp(x)
    assert called
    mlp(x[:, 1:])  # shorter
    hook = mlp.up_proj.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(mlp(x), expected)
    hook.remove()
    with torch.autocast("cpu", torch.bfloat16):
        mlp(x)
    assert len(called) == 1
    undo()


def test_the_plan_counts_what_tiles_keep() -> None:
    def block(tokens: int) -> Any:
        with torch.device(META):
            model = tiny("llama", attn_implementation="sdpa").bfloat16()
        undo = fuse(model)
        ids = torch.empty(1, tokens, dtype=torch.long)
        found = next(each for each in trace_micro_batch(model, {"input_ids": ids, "labels": ids}).stages if each.block)
        undo()
        return found

    whole, tiled = block(TOKENS - 1), block(TOKENS)
    array = TOKENS * FEATURES * 2
    assert whole.kept_bytes - tiled.kept_bytes == pytest.approx(3 * array, rel=0.05)  # gate, up and their product
    assert tiled.cheap.kept_bytes < whole.cheap.kept_bytes
    extra = 2 * 2 * TOKENS * FEATURES * SIZES["hidden_size"]
    assert tiled.backward.flops - whole.backward.flops == pytest.approx(extra, rel=0.05)
    assert tiled.forward.flops == pytest.approx(whole.forward.flops, rel=0.01)


@pytest.mark.parametrize("masked", [False, True])
def test_no_mask_of_all_pairs_of_tokens_is_built(masked: bool) -> None:
    tokens = 8192
    with torch.device(META):
        model = tiny("llama", attn_implementation="sdpa").bfloat16()
    undo = patched(model, OffloadConfig())
    ids = torch.empty(1, tokens, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids} | ({"attention_mask": torch.ones_like(ids)} if masked else {})
    with known_padding(Padding.UNREAD if masked else None):
        stages = trace_micro_batch(model, batch).stages
    undo()
    assert max(max(stage.forward_peak_bytes, stage.backward_peak_bytes) for stage in stages) < tokens**2 / 4
