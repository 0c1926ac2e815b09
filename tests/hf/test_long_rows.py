"""Rows long enough for tiles: every placement gives the same numbers, near those of whole layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import offloadkit
from offloadkit.engine.tracing import META, trace_micro_batch
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.hf.masks import Padding, known_padding
from offloadkit.hf.patches import change_feed_forwards, fuse, patched
from offloadkit.kernels import feed_forward
from offloadkit.offload import kept_results
from offloadkit.offload.weight_ring import WeightRing
from tests.hf import families

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


def tiny(model_type: str, **changes: Any) -> Any:
    values = {"vocab_size": 64, "num_hidden_layers": BLOCKS, "head_dim": 8, "pad_token_id": 0, "use_cache": False}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values, **SIZES, **changes)).train()


def trained(
    model_type: str, device: str, placement: Placement, make: Callable[..., Any] = tiny
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the steps, and the weights."""
    draw, losses = torch.Generator().manual_seed(1), []
    config = OffloadConfig(learning_rate=1e-2, placement=placement, working_dtype="bf16")
    with offloadkit.OffloadEngine(make(model_type), config, device=device) as engine:
        for _ in range(STEPS):
            ids = torch.randint(3, 64, (1, TOKENS), generator=draw).to(device)
            loss = engine(input_ids=ids, labels=ids).loss
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        engine.synchronize()
        return losses, {name: weight.cpu().clone() for name, weight in engine.state_dict()["module"].items()}


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


# -- experts

EXPERTS = {"moe_intermediate_size": FEATURES, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
OF_EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss")
"""The last one has biases and transposed matrices, with gate and up in alternate columns."""


def experts(model_type: str) -> Any:
    """A model whose loss contains the router's."""
    return tiny(model_type, output_router_logits=True, **EXPERTS)


def layer_of_experts(model_type: str, dtype: torch.dtype) -> tuple[Any, list[torch.Tensor]]:
    """The experts of one layer, and their arguments."""
    model = tiny(model_type, **EXPERTS)
    layer = next(each for each in model.modules() if hasattr(each, "is_concatenated"))
    draw = torch.Generator().manual_seed(0)
    for weight in layer.parameters():
        weight.data = (torch.randn(weight.shape, generator=draw) / weight.shape[-1] ** 0.5).to(dtype)
    x = torch.randn(TOKENS, SIZES["hidden_size"], generator=draw).to(dtype).requires_grad_()
    weights, index = torch.rand(TOKENS, 4, generator=draw).topk(2)
    return layer, [x, index, weights.to(dtype).detach().requires_grad_()]


def results(layer: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output and all gradients."""
    output = layer(*given)
    gradient = torch.linspace(-1, 2, output.numel()).to(output.dtype).view(output.shape)
    return [output, *torch.autograd.grad(output, [given[0], given[2], *layer.parameters()], gradient)]


@pytest.fixture
def calls_of_tiles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The token sizes of all functions computed in tiles."""
    called, own = [], feed_forward.in_tiles
    monkeypatch.setattr(feed_forward, "in_tiles", lambda *a: called.append(a[-1]) or own(*a))
    return called


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("model_type", OF_EXPERTS)
def test_experts_in_tiles_are_the_experts(model_type: str, implementation: str, calls_of_tiles: list[Any]) -> None:
    for dtype, rounding in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        layer, given = layer_of_experts(model_type, dtype)
        layer.config._experts_implementation = implementation
        own = results(layer, given)
        undo = change_feed_forwards(layer, kernels=False)
        tiled = results(layer, given)
        assert calls_of_tiles.pop() == 256
        layer(*(each[:300] for each in given))  # too few tokens
        undo()
        assert not calls_of_tiles
        wide = [each.detach().double().requires_grad_() if each.is_floating_point() else each for each in given]
        layer.config._experts_implementation = "eager"  # the other one has no fp64
        exact = results(layer.double(), wide)
        for found, whole, right in zip(tiled, own, exact, strict=True):
            assert found.dtype == dtype
            nearest = (whole - right).abs().max() if dtype == torch.bfloat16 else 0
            assert (found - right).abs().max() <= nearest + rounding * right.abs().max()


@pytest.mark.slow(25)
def test_experts_of_all_families_have_tiles(calls_of_tiles: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_forward, "tile_of_experts", lambda *_: 8)
    seen = 0
    for name in families.classes():
        kind = getattr(transformers, name)
        if "@use_experts_implementation" not in inspect.getsource(inspect.getmodule(kind)):
            continue
        torch.manual_seed(0)
        try:
            model = kind(families.tiny_config(name)).float().eval()
        except ImportError:  # needs timm
            continue
        weights = [each for each in model.parameters() if each.requires_grad]
        for each in weights:
            each.data = each.data if each.dim() != 3 else torch.randn(each.shape) / 10

        def gradients(model: Any, weights: Any, batch: dict[str, Any]) -> tuple[float, list[Any]]:
            loss = model(**batch).loss
            return loss.item(), torch.autograd.grad(loss, weights, allow_unused=True)

        batch = families.batch(name, 24, 1)
        loss, own = gradients(model, weights, batch)
        calls_of_tiles.clear()
        undo = change_feed_forwards(model, kernels=False)
        tiled, found = gradients(model, weights, batch)
        undo()
        scale = max(each.abs().max() for each in own if each is not None)
        assert tiled == pytest.approx(loss, rel=1e-6), name
        for one, other in zip(own, found, strict=True):
            assert (one is None) == (other is None), name
            assert one is None or (one - other).abs().max() <= 3e-6 * scale, name
        seen += bool(calls_of_tiles)
    assert seen > 50


def test_frozen_experts_get_no_gradient(calls_of_tiles: list[Any]) -> None:
    layer, given = layer_of_experts("qwen3_moe", torch.float32)
    expected = results(layer, given)
    undo = change_feed_forwards(layer.requires_grad_(False), kernels=False)
    output = layer(*given)
    undo()
    output.backward(torch.linspace(-1, 2, output.numel()).view(output.shape))
    assert calls_of_tiles
    torch.testing.assert_close([output, given[0].grad, given[2].grad], expected[:3])
    assert all(each.grad is None for each in layer.parameters())


def test_tiles_of_experts_begin_where_they_need_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes of Qwen3-30B-A3B. Sums of the gradients need no memory if the experts are frozen."""
    monkeypatch.setattr(feed_forward, "LONG_ROW", 1 << 28)
    monkeypatch.setattr(feed_forward, "TILE", 1 << 27)
    with torch.device(META):
        weights = [torch.empty(128, 1536, 2048), torch.empty(128, 2048, 768)]
    numbers = 8 * (2 * 2048 + 3 * 768)
    frozen = [feed_forward.tile_of_experts(tokens, numbers, lambda: weights) for tokens in (16_384, 32_768, 131_072)]
    trained = [each.requires_grad_() for each in weights]
    found = [feed_forward.tile_of_experts(tokens, numbers, lambda: trained) for tokens in (32_768, 65_536, 131_072)]
    assert frozen == [0, 11_008, 13_312]
    assert found == [0, 13_312, 13_312]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", OF_EXPERTS)
def test_no_placement_changes_a_number_of_experts(
    model_type: str, device: str, deterministic: None, calls_of_tiles: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, weights = trained(model_type, device, Placement(), experts)
    if device == "cpu":
        assert calls_of_tiles == STEPS * BLOCKS * [256]
    for placement in PLACEMENTS:
        others = trained(model_type, device, placement, experts)
        assert losses == others[0], placement
        assert all(torch.equal(weight, others[1][name]) for name, weight in weights.items()), placement
    monkeypatch.setattr(feed_forward, "LONG_ROW", 1 << 28)
    calls_of_tiles.clear()
    whole = trained(model_type, device, Placement(), experts)
    assert not calls_of_tiles
    torch.testing.assert_close(losses, whole[0], rtol=2e-3, atol=0)


def test_the_plan_counts_what_tiles_of_experts_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    def block() -> Any:
        with torch.device(META):
            model = tiny("qwen3_moe", attn_implementation="sdpa", **EXPERTS).bfloat16()
        undo = fuse(model)
        ids = torch.empty(1, TOKENS, dtype=torch.long)
        found = next(each for each in trace_micro_batch(model, {"input_ids": ids, "labels": ids}).stages if each.block)
        undo()
        return found

    tiled = block()
    monkeypatch.setattr(feed_forward, "LONG_ROW", 1 << 28)
    whole = block()
    pairs = 2 * TOKENS  # a token and one of its two experts
    freed = pairs * (2 * (2 * SIZES["hidden_size"] + 4 * FEATURES) + 3 * 8)  # bf16 numbers, and the sorted order
    assert whole.kept_bytes - tiled.kept_bytes == pytest.approx(freed, rel=0.01)
    assert tiled.cheap.kept_bytes < whole.cheap.kept_bytes
    extra = 2 * 3 * pairs * FEATURES * SIZES["hidden_size"]
    assert tiled.backward.flops - whole.backward.flops == pytest.approx(extra, rel=0.05)
    assert tiled.forward.flops == pytest.approx(whole.forward.flops, rel=0.01)


# -- LoRA


def adapted(model_type: str = "llama", **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False, **options
    )
    return peft.get_peft_model(tiny(model_type, **(EXPERTS if "moe" in model_type else {})), config).train()


def of_adapters(model: Any) -> tuple[torch.Tensor, list[Any]]:
    """The loss and the gradients of all parameters."""
    ids = torch.randint(3, 64, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids).loss
    return loss.detach(), torch.autograd.grad(loss, [each for each in model.parameters() if each.requires_grad])


@pytest.mark.parametrize("model_type", ["llama", pytest.param("phi3", marks=pytest.mark.slow)])
def test_layers_with_adapters_in_tiles_are_the_layers(model_type: str, calls_of_tiles: list[Any]) -> None:
    model = adapted(model_type)
    loss, gradients = of_adapters(model)
    undo = fuse(model)
    tiled, found = of_adapters(model)
    assert calls_of_tiles == BLOCKS * [256]
    torch.testing.assert_close(tiled, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(found, gradients, rtol=1e-6, atol=1e-6)
    with model.disable_adapter(), torch.no_grad():
        off = model(torch.arange(3, 63).repeat(1, 10)).logits
    assert len(calls_of_tiles) == 2 * BLOCKS
    undo()
    with model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(model(torch.arange(3, 63).repeat(1, 10)).logits, off)


def test_adapted_experts_in_tiles_are_the_experts(calls_of_tiles: list[Any]) -> None:
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = adapted("qwen3_moe", target_parameters=parameters)
    loss, gradients = of_adapters(model)
    undo = fuse(model)
    tiled, found = of_adapters(model)
    undo()
    assert calls_of_tiles == BLOCKS * [256]
    torch.testing.assert_close(tiled, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(found, gradients, rtol=1e-6, atol=1e-6)


def test_adapters_that_draw_numbers_or_mix_tokens_are_not_tiled(calls_of_tiles: list[Any]) -> None:
    for options in ({"lora_dropout": 0.5}, {"use_dora": True}):
        model = adapted(**options)
        undo = fuse(model)
        of_adapters(model)
        assert not calls_of_tiles
        undo()
    model = adapted(lora_dropout=0.5).eval()
    undo = fuse(model)
    of_adapters(model)
    undo()
    assert len(calls_of_tiles) == BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_no_placement_changes_a_number_of_adapters(device: str, deterministic: None, calls_of_tiles: list[Any]) -> None:
    losses, weights = trained("llama", device, Placement(), adapted)
    if device == "cpu":
        assert calls_of_tiles == STEPS * BLOCKS * [256]
    for placement in PLACEMENTS:
        others = trained("llama", device, placement, adapted)
        assert losses == others[0], placement
        assert all(torch.equal(weight, others[1][name]) for name, weight in weights.items()), placement


# -- masks


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
