"""T5's attention by offloadkit's kernels: conditions, planned memory, and restoring the model's own attention."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from transformers import (
    LongT5Config,
    LongT5ForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.udop.modeling_udop import RelativePositionBias1D

import offloadkit
from offloadkit.engine.tracing import trace_micro_batch
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.hf import patches as fused_attention
from offloadkit.hf.patches import NAME, fuse, fuse_attention
from offloadkit.kernels import attention as attention_op
from offloadkit.offload import compile as compiled_blocks
from tests.hf import emulated_attention
from tests.hf.tiny import llama_config, t5_config
from tests.hf.training import attentions
from tests.kernels.attention_reference import MASKED, check, fused, inputs, is_kept, with_gradients

INTERPRETED = "from tests.kernels.interpreted_attention import main; main()"
SHAPE = {"d_model": 64, "d_kv": 16, "num_heads": 4, "num_layers": 3, "attn_implementation": "eager"}


def batch(rows: int = 2, tokens: int = 24, device: str = "cpu") -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 64, (rows, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    return {"input_ids": ids, "labels": ids[:, :20].clone()}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(
    tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4),
    reason="Triton's interpreter takes arrays of one number for numbers, which numpy 2.4 refuses",
)
def test_the_kernels_interpreted_on_the_cpu_are_nearer_to_fp64_than_torch() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, check=True)


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_as_many_weights_are_dropped_as_asked_for_and_others_with_another_seed(dropout: float) -> None:
    shape = (2, 8, 64, 64)
    first, second = is_kept(1, shape, dropout), is_kept(1 << 32, shape, dropout)
    for kept in (first, second):
        for dims in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
            share = kept.double().mean(dims)
            deviation = (dropout * (1 - dropout) / (kept.numel() / share.numel())) ** 0.5
            assert ((share - (1 - dropout)).abs() < 5 * deviation).all()
    both = float((first & second).double().mean())
    assert both == pytest.approx((1 - dropout) ** 2, abs=0.01)


@pytest.mark.parametrize(
    "model",
    [
        T5ForConditionalGeneration(t5_config(**SHAPE)),
        MT5ForConditionalGeneration(MT5Config(**t5_config(**SHAPE).to_dict())),
        UMT5ForConditionalGeneration(UMT5Config(**t5_config(**SHAPE).to_dict())),
    ],
    ids=["t5", "mt5", "umt5"],
)
def test_it_is_undone_and_on_the_cpu_the_models_own_runs(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"
    before = model.eval()(**batch()).loss
    undo = fuse_attention(model)
    again = fuse_attention(model)
    assert NAME in attentions(model)
    assert torch.equal(model(**batch()).loss, before)
    assert model.generate(batch()["input_ids"], max_new_tokens=4, do_sample=False).shape[0] == 2
    again()
    undo()
    assert attentions(model) == {"eager"}
    assert not any("compute_bias" in vars(module) for module in model.modules())
    assert torch.equal(model(**batch()).loss, before)


def test_a_model_that_has_another_attention_keeps_it() -> None:
    from transformers import LlamaForCausalLM

    for model in (T5ForConditionalGeneration(t5_config(attn_implementation="sdpa")), LlamaForCausalLM(llama_config())):
        before = attentions(model)
        fuse_attention(model)
        assert attentions(model) == before


def test_a_copy_and_a_saved_model_are_whole(tmp_path: Path) -> None:
    model: Any = T5EncoderModel(t5_config(**SHAPE)).eval()
    fuse_attention(model)
    assert model.config._attn_implementation == NAME
    copied: Any = copy.deepcopy(model)
    biased = copied.encoder.block[0].layer[0].SelfAttention
    assert vars(biased)["compute_bias"].__self__ is biased
    model.save_pretrained(tmp_path)
    assert NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    loaded: Any = T5EncoderModel.from_pretrained(tmp_path, attn_implementation="eager")
    ids = batch()["input_ids"]
    assert torch.equal(loaded.eval()(ids).last_hidden_state, model(ids).last_hidden_state)


@pytest.mark.parametrize("kind", ["local", "transient-global"])
def test_attention_of_other_kinds_is_left_alone(kind: str) -> None:
    sizes: Any = {"d_model": 64, "d_kv": 16, "num_heads": 4, "num_layers": 2, "d_ff": 64, "vocab_size": 64}
    config = LongT5Config(**sizes, encoder_attention_type=kind, decoder_start_token_id=0, attn_implementation="eager")
    model: Any = LongT5ForConditionalGeneration(config).eval()
    before = model(**batch()).loss
    undo = fuse_attention(model)
    assert torch.equal(model(**batch()).loss, before)
    undo()
    boxes: Any = RelativePositionBias1D(num_heads=4)  # of UDOP: a bias without attention
    fuse_attention(boxes)()


def traced(dtype: torch.dtype, *, fused: bool) -> Any:
    with torch.device("meta"):
        model: Any = T5ForConditionalGeneration(t5_config(**SHAPE, use_cache=False)).to(dtype).train()
        if fused:
            fuse_attention(model)
        return trace_micro_batch(model, batch(8, 256, "meta"))


def test_a_plan_counts_fewer_operations_and_bytes() -> None:
    own, fused = (traced(torch.bfloat16, fused=fused) for fused in (False, True))
    for part in ("forward", "backward"):
        numbers = [sum(getattr(stage, part).num_operations for stage in work.stages) for work in (own, fused)]
        assert numbers[1] < 0.9 * numbers[0]
        moved = [sum(getattr(stage, part).moved_bytes for stage in work.stages) for work in (own, fused)]
        assert moved[1] < 0.6 * moved[0]
    assert sum(stage.kept_bytes for stage in fused.stages) < 0.8 * sum(stage.kept_bytes for stage in own.stages)
    for part, share in (("forward", 1), ("backward", 4 / 5)):  # backward computes one forward product again
        passes = [[getattr(stage, part) for stage in work.stages] for work in (own, fused)]
        products, others = (sum(one.flops for one in each) for each in passes)
        in_kernels = sum(one.fused_attention_flops for one in passes[1])
        assert in_kernels > 0
        assert sum(one.num_attention for one in passes[1]) == 3 + 2 * 3  # encoder; decoder self- and cross-attention
        assert not sum(one.num_attention for one in passes[0])
        assert products - others == share * in_kernels


def test_the_bias_is_kept_once_for_all_blocks() -> None:
    blocks = [stage.kept_bytes for stage in traced(torch.bfloat16, fused=True).stages if "encoder" in stage.block]
    bias = 4 * 256 * 256 * 2
    assert blocks[0] - blocks[1] >= bias


def test_in_fp32_the_models_own_runs() -> None:
    own, fused = (traced(torch.float32, fused=fused) for fused in (False, True))
    for part in ("forward", "backward"):
        numbers = [sum(getattr(stage, part).flops for stage in work.stages) for work in (own, fused)]
        assert numbers[0] == numbers[1]


def test_where_the_kernels_cannot_be_built_the_models_own_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("no compiler")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch, "zeros", lambda *_, zeros=torch.zeros, device=None, **kwargs: zeros(*_, **kwargs))
    monkeypatch.setattr(attention_op, "KERNELS", Broken())
    model = T5ForConditionalGeneration(t5_config(**SHAPE))
    attention_op.available.cache_clear()
    with pytest.warns(UserWarning, match=r"could not build T5's attention.*no compiler"):
        fuse_attention(model)
    fuse_attention(model)  # logs once
    attention_op.available.cache_clear()
    assert attentions(model) == {"eager"}


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_gpus_that_were_not_measured_and_those_without_triton_are_left_alone(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(attention_op, "KERNELS", object() if capability < (8, 0) else None)
    attention_op.available.cache_clear()
    model = T5ForConditionalGeneration(t5_config(**SHAPE))
    fuse_attention(model)
    attention_op.available.cache_clear()
    assert attentions(model) == {"eager"}


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the kernels on the CPU, in torch operations."""
    monkeypatch.setattr(attention_op, "KERNELS", emulated_attention.KERNELS)
    monkeypatch.setattr(fused_attention, "KINDS", ("cpu", "meta"))
    monkeypatch.setattr(compiled_blocks, "BACKEND", "aot_eager")


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("masked", MASKED)
@pytest.mark.parametrize("heads_at_once", [3, 2, 1])
def test_the_operation_gives_and_keeps_what_its_gradients_need(
    masked: str, dropout: float, heads_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_op, "SCRATCH_BYTES", heads_at_once * 2 * 24 * 40 * 2)
    check((2, 3, 24, 40, 16), torch.bfloat16, masked, dropout, "cpu")


@pytest.mark.usefixtures("emulated")
def test_a_wider_bias_has_a_gradient_of_its_own_dtype() -> None:
    leaves, mask, into = inputs((2, 3, 24, 40, 16), torch.bfloat16, "none", "cpu")
    wide = [*leaves[:3], leaves[3].detach().float().requires_grad_()]
    narrow, wider = (fused(given, mask, 0.0, into)[0][4] for given in (leaves, wide))
    assert wider.dtype == torch.float32
    assert torch.equal(wider.bfloat16(), narrow)
    assert not torch.equal(wider, narrow.float())  # the sum was not rounded before


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_what_compilers_see_as_an_operation_is_what_runs_without_them(dropout: float) -> None:
    leaves, mask, into = inputs((2, 3, 24, 40, 16), torch.bfloat16, "pairs", "cpu")
    found = []
    for run in (attention_op.attend, lambda *given: attention_op.attention(*given)[0]):
        torch.manual_seed(3)
        found.append(with_gradients(run(*leaves[:3], leaves[3].contiguous(), mask, 1.0, dropout), leaves, into))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Derived(T5Attention):
    """A class from a file without an attention function."""


@pytest.mark.usefixtures("emulated")
def test_what_the_kernels_do_not_take_is_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def attended(fused: bool, mask: Any = None, **changes: Any) -> torch.Tensor:
        torch.manual_seed(0)
        attention: Any = Derived(T5Config(**t5_config(**SHAPE | changes).to_dict()), True, layer_idx=0).bfloat16()
        attention.config._attn_implementation = "eager"
        if fused:
            fuse_attention(attention)
        hidden = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        torch.manual_seed(2)
        return attention.train()(hidden, mask)[0]

    plain = torch.zeros(2, 1, 24, 24).masked_fill(torch.rand(2, 1, 24, 24) > 0.7, -1e9).bfloat16()
    turned = plain.transpose(2, 3).contiguous().transpose(2, 3)
    mine = attended(True, plain)
    assert not torch.equal(mine, attended(False, plain))
    assert torch.equal(mine, attended(True, turned))
    one_row = plain[:, :, :1, :1].expand(2, 1, 24, 24)
    assert torch.equal(attended(True, one_row), attended(True, one_row.contiguous()))
    learned = plain.clone().requires_grad_()
    attended(True, learned).sum().backward()
    assert learned.grad is not None
    assert torch.equal(attended(True, dropout_rate=1.0), attended(False, dropout_rate=1.0))
    monkeypatch.setattr(fused_attention, "MOST_ROWS", 7)
    assert torch.equal(attended(True), attended(False))


@pytest.mark.usefixtures("emulated")
def test_a_second_derivative_is_refused_not_wrong() -> None:
    leaves, _, into = inputs((1, 2, 24, 24, 16), torch.bfloat16, "none", "cpu")
    output = attention_op.attend(*leaves[:3], leaves[3].contiguous(), None, 1.0, 0.0)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(output, leaves[:1], into, create_graph=True)


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_one_graph_is_compiled_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_op, "SCRATCH_BYTES", 2 * 24 * 24 * 2 * 2)  # one group of heads, then several
    graphs: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def attend(query: Any, bias: Any) -> Any:
        return attention_op.attend(query, query, query, bias, None, 1.0, 0.0)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=aot_autograd(fw_compiler=backend, bw_compiler=backend), dynamic=True)
    for length in (24, 32, 40, 64):
        (query, _, _, bias), _, into = inputs((2, 4, length, length, 16), torch.bfloat16, "none", "cpu")
        compiled(query, bias.contiguous()).backward(into)
    assert len(graphs) == 2
    torch._dynamo.reset()


def trained(placement: Placement, *, fused: bool = True, compiled: bool = False, dropout: float = 0.1) -> Any:
    """Losses of ten steps, and the weights."""
    torch._dynamo.reset()  # torch.compile limits recompilations per process
    torch.manual_seed(0)
    model: Any = T5ForConditionalGeneration(t5_config(**SHAPE, dropout_rate=dropout)).bfloat16().train()
    if fused:
        fuse(model, compiled=compiled)
    settings = OffloadConfig(learning_rate=1e-2, placement=placement, compile_blocks=compiled)
    draw, losses = torch.Generator().manual_seed(1), []
    attended = (torch.arange(40) < torch.tensor([[40], [33], [20], [40]])).long()
    with offloadkit.OffloadEngine(model, settings, device="cpu") as engine:
        torch.manual_seed(2)
        for _ in range(10):
            ids = torch.randint(3, 64, (4, 40), generator=draw)
            loss = engine(input_ids=ids, attention_mask=attended, labels=ids[:, :24].clone()).loss
            losses.append(loss.detach().float())
            engine.backward(loss)
            engine.step()
        engine.synchronize()
        return torch.stack(losses), [weight.clone() for weight in engine.state_dict()["module"].values()]


PLACEMENTS = (
    Placement(activations="cheap"),
    Placement(activations="checkpoint"),
    Placement(activations="offload"),
    Placement(weights="ram"),
    Placement(weights="ram", activations="checkpoint"),
    Placement(states="vram", gradients="vram", step="gpu"),
)


@pytest.mark.slow(15)
@pytest.mark.usefixtures("emulated", "one_thread")
@pytest.mark.parametrize("compiled", [False, True])
def test_no_placement_changes_a_number_and_dropped_weights_are_found_again(compiled: bool) -> None:
    losses, weights = trained(Placement(), compiled=compiled)
    for placement in PLACEMENTS[4:5] if compiled else PLACEMENTS:  # compiling takes time for each placement
        others = trained(placement, compiled=compiled)
        assert torch.equal(losses, others[0]), placement
        assert all(torch.equal(one, other) for one, other in zip(weights, others[1], strict=True)), placement


@pytest.mark.usefixtures("emulated", "one_thread")
def test_every_layer_and_step_drops_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    kernel = emulated_attention.KERNELS.forward

    def forward(*given: Any, **constants: Any) -> None:
        seeds.append(int(given[5]))
        kernel.run(*given, **constants)

    monkeypatch.setattr(emulated_attention.KERNELS, "forward", emulated_attention.Kernel(forward))
    trained(Placement())
    assert len(set(seeds)) == len(seeds) > 2 * SHAPE["num_layers"]


@pytest.mark.slow
@pytest.mark.usefixtures("emulated", "one_thread")
def test_a_model_learns_as_with_its_own_attention() -> None:
    mine, own = (trained(Placement(), fused=fused, dropout=0.0)[0] for fused in (True, False))
    assert not torch.equal(mine, own)
    torch.testing.assert_close(mine, own, rtol=0.02, atol=0.02)
