"""The plan changes where numbers live, not the numbers: every combination of placements gives the same weights.

The quick tests cover every pair of values of a placement's fields; the slow tests run every placement for many steps.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from offloadkit.device.streams import Event
from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.hf.patches import fuse_norms
from offloadkit.offload import kept_results
from offloadkit.offload.layers import flat_layers, plan_of
from offloadkit.planner import Plan, possible, tier_bytes
from tests.hf.tiny import llama_config, t5_config
from tests.models import TinyLM, assert_equal, numbers, tokens

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ACTIVATIONS = ("keep", "cheap", "checkpoint", "offload")
PLACEMENTS = [
    *(
        Placement(weights=w, gradients=g, activations=a)
        for w, g, a in product(("vram", "ram"), ("vram", "ram"), ACTIVATIONS)
    ),  # type: ignore[arg-type]
    *(Placement(weights=w, states="disk") for w in ("vram", "ram")),  # type: ignore[arg-type]
    *(Placement(weights=w, gradients=g, step="gpu") for w, g in product(("vram", "ram"), repeat=2)),  # type: ignore[arg-type]
    *(Placement(gradients="vram", states="vram", step="gpu", activations=a) for a in ACTIVATIONS),  # type: ignore[arg-type]
]


@pytest.fixture(autouse=True)
def every_matmul_is_kept(monkeypatch: pytest.MonkeyPatch, one_thread: None, what_left_a_buffer_is_nan: None) -> None:
    monkeypatch.setattr(kept_results, "MIN_PRODUCTS", 1)


def tiny(kind: str) -> nn.Module:
    """A small model with tied weights, a frozen part, dropout if the architecture has it, and fused norms."""
    from transformers import LlamaForCausalLM, T5ForConditionalGeneration

    torch.manual_seed(0)
    if kind == "lm":
        return TinyLM(dropout=0.1)
    if kind == "t5":
        model: Any = T5ForConditionalGeneration(t5_config(num_layers=3, attn_implementation="eager"))
        frozen = model.encoder.block[1].layer[1].DenseReluDense.wi.weight
    else:
        model = LlamaForCausalLM(llama_config(num_hidden_layers=4, tie_word_embeddings=True))
        frozen = model.model.layers[1].mlp.up_proj.weight
    frozen.requires_grad_(False)
    fuse_norms(model)
    return model


def batches(kind: str, num: int, device: str) -> list[Any]:
    if kind == "lm":
        return tokens(num, device)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(num):
        ids = torch.randint(3, 64, (2, 7), generator=generator).to(device)
        found.append({"input_ids": ids, "labels": ids[:, :5].clone() if kind == "t5" else ids})
    return found


def trained(
    kind: str,
    device: str,
    steps: int,
    placement: Placement | Plan | None,
    accumulation: int,
    dtype: Any = "bf16",
    precision: Any = "exact",
) -> dict[str, torch.Tensor]:
    """Weights and all states after `steps` steps with clipping."""
    plan = placement if isinstance(placement, Plan) else None
    config = OffloadConfig(
        learning_rate=1e-2,
        gradient_accumulation=accumulation,
        working_dtype=dtype,
        precision=precision,
        placement=None if plan else placement,  # type: ignore[arg-type]
    )
    with OffloadEngine(tiny(kind), config, device=device, plan=plan) as engine:
        engine.train()
        torch.manual_seed(2)
        for batch in batches(kind, steps * accumulation, device):
            loss = engine(**batch).loss if isinstance(batch, dict) else engine(batch)
            engine.backward(loss)
            engine.step()
        return numbers(engine)


def check_placements(
    placements: Sequence[Placement], kind: str, device: str, steps: int, accumulation: int, *more: Any
) -> None:
    expected = trained(kind, device, steps, None, accumulation, *more)
    for placement in placements:
        assert_equal(expected, trained(kind, device, steps, placement, accumulation, *more), placement)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "accumulation", "device"),
    [
        ("t5", 1, "cpu"),
        ("llama", 4, "cpu"),
        *(pytest.param(kind, number, "cuda", marks=pytest.mark.gpu) for kind in ("t5", "llama") for number in (1, 4)),
    ],
)
def test_no_placement_changes_a_number(kind: str, accumulation: int, device: str) -> None:
    steps = {"cpu": 6, "cuda": 50}[device] if accumulation == 1 else {"cpu": 2, "cuda": 5}[device]
    check_placements(PLACEMENTS, kind, device, steps, accumulation)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_no_mixture_of_placements_changes_a_number(seed: int, device: str) -> None:
    kind, accumulation, dtype = (
        ("lm", "t5", "llama", "t5")[seed],
        (1, 2, 1, 1)[seed],
        ("fp32", "bf16", "fp32", "bf16")[seed],
    )
    config = OffloadConfig(gradient_accumulation=accumulation, working_dtype=dtype)  # type: ignore[arg-type]
    model = tiny(kind)
    base = plan_of(model, flat_layers(model, config), config)
    draw = random.Random(seed)
    placements = tuple(possible(draw.choice(PLACEMENTS), layer) for layer in base.layers)
    mixed = replace(base, placements=placements, tiers=tier_bytes(base.layers, placements, accumulation))
    steps = {"cpu": 6, "cuda": 20}[device]
    expected = trained(kind, device, steps, None, accumulation, dtype)
    assert_equal(expected, trained(kind, device, steps, mixed, accumulation, dtype), placements)


AT_OTHER_PRECISIONS = (
    PLACEMENTS[-1],
    PLACEMENTS[-3],
    Placement(weights="ram"),
    Placement("ram", activations="offload"),
)


ON_CPU = [("compact", "bf16"), ("tiny", "fp16"), ("tiny", "fp32")]
OTHERS = [("compact", "fp16"), ("compact", "fp32"), ("tiny", "bf16")]


@pytest.mark.parametrize(("precision", "dtype"), ON_CPU)
def test_placements_change_no_number_at_another_precision(precision: str, dtype: str) -> None:
    check_placements(AT_OTHER_PRECISIONS, "t5", "cpu", 3, 1, dtype, precision)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "dtype", "device"),
    [
        *((*each, "cpu") for each in OTHERS),
        *(pytest.param(*each, "cuda", marks=pytest.mark.gpu) for each in [*ON_CPU, *OTHERS]),
    ],
)
def test_placements_change_no_number_at_any_precision(precision: str, dtype: str, device: str) -> None:
    check_placements(AT_OTHER_PRECISIONS, "t5", device, {"cpu": 5, "cuda": 20}[device], 1, dtype, precision)


def test_offloaded_inputs_are_let_go() -> None:
    model, inputs = tiny("llama"), []
    for block in model.model.layers:
        block.register_forward_pre_hook(lambda block, args: inputs.append(weakref.ref(args[0])))
    engine = OffloadEngine(model, OffloadConfig(placement=Placement(activations="offload")), device="cpu")
    loss = engine(**batches("llama", 1, "cpu")[0]).loss
    assert [reference() for reference in inputs] == [None] * 4
    engine.backward(loss)
    engine.close()


def test_offloaded_inputs_are_let_go_however_far_python_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy is ever done: freed inputs must be waited for on the device, not on the host."""
    monkeypatch.setattr(Event, "done", lambda event: False)
    engine = OffloadEngine(TinyLM(depth=12), OffloadConfig(placement=Placement(activations="offload")), device="cpu")
    inputs = engine.placed.offloaded_inputs
    loss = engine(tokens(1)[0])
    assert len(inputs.in_ram) == 12
    assert len(inputs.copying) <= 2
    engine.backward(loss)
    assert inputs.copying == []
    engine.close()


def test_an_input_fetched_ahead_and_not_used_is_kept_until_it_is_there() -> None:
    """Backward fails in the last block, when the input of the block before has been fetched."""
    model = TinyLM()

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    engine = OffloadEngine(model, OffloadConfig(placement=Placement(activations="offload")), device="cpu")
    inputs, last = engine.placed.offloaded_inputs, model.blocks[-1].up
    hook = last.register_forward_hook(lambda module, given, output: output.register_hook(fail) and None)
    loss = engine(tokens(1)[0])
    shape = inputs.in_ram[-2].shape
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss)
    hook.remove()
    del loss
    gc.collect()
    assert inputs.in_ram == []
    assert [memory.shape for memory, _ in inputs.copying] == [shape]
    engine.close()


def test_ram_of_inputs_is_kept_until_copies_into_it_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss is dropped, and the next batch is larger. No copy is ever done."""
    monkeypatch.setattr(Event, "done", lambda event: False)
    with OffloadEngine(TinyLM(), OffloadConfig(placement=Placement(activations="offload")), device="cpu") as engine:
        inputs = engine.placed.offloaded_inputs
        engine(tokens(1)[0])
        gc.collect()
        buffers = [weakref.ref(view.slab) for view in inputs.free]
        assert len(buffers) == 4
        engine(tokens(1, shape=(8, 64))[0])
        assert all(buffer() is not None for buffer in buffers)


def test_an_input_released_on_another_thread_is_kept_until_its_copy_is_done() -> None:
    """The garbage collector runs on the stepping thread, while this thread looks for copies that are done."""
    engine = OffloadEngine(TinyLM(), OffloadConfig(placement=Placement(activations="offload")), device="cpu")
    inputs, released = engine.placed.offloaded_inputs, (torch.zeros(1), Event())

    class Collects(Event):
        def done(self) -> bool:
            inputs.copying.append(released)
            return True

    inputs.copying = [(torch.zeros(1), Collects())]
    inputs._free_vram(1)
    assert len(inputs.copying) == 1
    assert inputs.copying[0] is released
    engine.close()


def test_inputs_released_on_another_thread_do_not_disturb_the_prefetch() -> None:
    engine = OffloadEngine(TinyLM(), OffloadConfig(placement=Placement(activations="offload")), device="cpu")
    inputs = engine.placed.offloaded_inputs

    class Collected(list[Any]):
        def index(self, *args: Any) -> int:
            found = super().index(*args)
            del self[:2]
            return found

    _, kept = engine(tokens(1, "cpu")[0]), engine(tokens(1, "cpu")[0])  # the first one's inputs are garbage
    inputs.in_ram = Collected(inputs.in_ram)
    engine.backward(kept)
    engine.close()


def test_buckets_are_those_that_were_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """T5's two last norms are one layer, which waits through the whole backward of the decoder. No copy finishes soon.
    Besides the buckets, autograd holds one layer's gradients."""
    monkeypatch.setattr(Event, "done", lambda event: False)
    from transformers import T5ForConditionalGeneration

    config = t5_config(num_layers=3, attn_implementation="eager", tie_word_embeddings=False, d_model=64)
    model = T5ForConditionalGeneration(config)
    layers = flat_layers(model, OffloadConfig())
    base = plan_of(model, layers, OffloadConfig())
    by_gpu = Placement(gradients="vram", states="vram", step="gpu")
    placements = tuple(by_gpu if not layer.in_block else Placement() for layer in base.layers)
    plan = replace(base, placements=placements, tiers=tier_bytes(base.layers, placements, 1))
    for made in (base, plan):
        engine = OffloadEngine(copy.deepcopy(model), OffloadConfig(), device="cpu", plan=made)
        engine.backward(engine(**batches("t5", 1, "cpu")[0]).loss)
        gradients = engine.placed.gradients
        taken = sum(buffer.numel() for buffer, _ in gradients.buckets.pool.free)
        taken += sum(layer.own_buffer.numel() for layer in gradients.layers if layer.own_buffer is not None)
        sums = sum(layer.sums_bytes() for layer in made.layers)
        autograds = max(layer.bucket_bytes() for layer in made.layers if not layer.shared)
        assert taken + autograds == made.tiers["vram"]["gradients"] - sums
        engine.close()


@pytest.mark.gpu
def test_offloaded_inputs_leave_vram() -> None:
    alive = {}
    for how in ("checkpoint", "offload"):
        model = TinyLM(width=256, hidden=512, depth=12).cuda()
        engine = OffloadEngine(model, OffloadConfig(placement=Placement(activations=how)), device="cuda")  # type: ignore[arg-type]
        ids = torch.randint(1, 60, (64, 512), device="cuda")
        engine.backward(engine(ids))
        engine.step()
        engine.synchronize()
        before = torch.cuda.memory_allocated()
        loss = engine(ids)
        torch.cuda.synchronize()
        alive[how] = torch.cuda.memory_allocated() - before
        engine.backward(loss)
        engine.close()
    one_input = 64 * 512 * 256 * 4
    assert alive["checkpoint"] - alive["offload"] >= 10 * one_input


def test_a_copy_of_a_transformer_that_recomputes_trains_by_itself() -> None:
    """HuggingFace's blocks store the recomputation function as an attribute, and a copy of a block shares it."""
    placement = Placement(weights="ram", activations="checkpoint")
    model = tiny("llama")
    with OffloadEngine(model, OffloadConfig(placement=placement), device="cpu"):
        copied: Any = copy.deepcopy(model)
        copied(**batches("llama", 1, "cpu")[0], use_cache=False).loss.backward()
    assert copied.model.layers[2].mlp.up_proj.weight.grad.abs().sum() > 0
