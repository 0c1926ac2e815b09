"""Towers attend to all segments at once, as transformers does segment by segment."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.nn.attention import varlen
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from offloadkit import OffloadConfig, Placement
from offloadkit.engine.outline import without_memory
from offloadkit.engine.tracing import trace_micro_batch
from offloadkit.facts import graphs as facts_graphs
from offloadkit.hf import packed, segments
from offloadkit.hf.patches import patched
from offloadkit.offload.layers import flat_layers
from offloadkit.planner.graphs import capturable
from tests.graphs import assert_equals_eager, train
from tests.sub_models import FAMILIES, qwen_batch

pytestmark = pytest.mark.usefixtures("one_thread")

TOWERS = ["qwen2.5-vl", "qwen3-vl"]
GRIDS = [(1, 4, 4), (1, 8, 12), (2, 4, 8)]
CAPABILITY = (9, 0)


def of_dtype(values: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in values.items()}


def loss_and_gradients(model: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int]]:
    """The GPU's kernel in plain operations, as its documentation describes it, on the CPU. Returns the lengths of
    segments in each call, and the longest that the call was told.
    """
    found: list[tuple[list[int], int]] = []

    def reference(
        query: Tensor, key: Tensor, value: Tensor, ends: Tensor, same: Tensor, most: int, most_keys: int, *,
        scale: float, window_size: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        assert ends is same
        assert window_size == (-1, -1)
        assert most == most_keys
        found.append((ends.diff().tolist(), most))
        parts = zip(*(each.split(found[-1][0]) for each in (query, key, value)), strict=True)
        alone = ([each.transpose(0, 1)[None] for each in part] for part in parts)
        return torch.cat([F.scaled_dot_product_attention(*each, scale=scale)[0].transpose(0, 1) for each in alone])

    assert packed.kernel_runs(CAPABILITY)  # of torch's own function, whose options are remembered
    monkeypatch.setattr(varlen, "varlen_attn", reference)
    monkeypatch.setattr(segments, "DEVICES", ("cpu", "meta"))
    return found


@pytest.mark.parametrize("family", TOWERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_is_called_once_in_a_block_and_computes_the_same(
    family: str, dtype: torch.dtype, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32, which the kernel lacks, runs segment by segment."""
    torch.manual_seed(0)
    model = FAMILIES[family][0]().to(dtype)
    undo = patched(model, OffloadConfig(), capability=CAPABILITY)
    batch = of_dtype(qwen_batch(GRIDS), dtype)
    once, own = loss_and_gradients(model, batch)
    frames, windows = ([16, 96, 32, 32], 128), ([16] * 11, 16)  # of 4 x 4 patches
    per_block = [windows, frames, windows] if family == "qwen2.5-vl" else [frames] * 3
    assert calls == (per_block if dtype == torch.bfloat16 else [])
    monkeypatch.setattr(segments, "DEVICES", ("meta",))
    loss, theirs = loss_and_gradients(model, batch)
    undo()
    assert len(calls) in (0, 3)
    assert once == loss
    assert own.keys() == theirs.keys()
    assert all(own[name].equal(gradient) for name, gradient in theirs.items())


def test_another_packages_attention_gets_each_segment(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    other_model = patched(FAMILIES["qwen3-vl"][0](), OffloadConfig(), capability=CAPABILITY)
    table: Any = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    own: Any = sdpa_attention_forward  # another model may be open, and the table's function ours
    model, lengths = FAMILIES["qwen3-vl"][0]().bfloat16(), list[int]()
    undo = patched(model, OffloadConfig(), capability=CAPABILITY)

    def attention(module: Any, query: Tensor, *given: Any, **named: Any) -> Any:
        lengths.append(query.shape[2])
        return own(module, query, *given, **named)

    with monkeypatch.context() as changed:
        changed.setitem(table._local_mapping, "sdpa", attention)
        model.model.visual(torch.randn(176, 24).bfloat16(), torch.tensor(GRIDS))
    undo()
    other_model()
    assert lengths == [176, 16, 96, 32, 32] * 3
    assert not calls


@pytest.mark.slow
@pytest.mark.parametrize("family", TOWERS)
def test_a_gpus_plan_counts_one_call_and_no_wait(family: str) -> None:
    """Images of one size, so that equal segments of the plan are the batch's segments."""
    make, grids = FAMILIES[family][0], [(1, 8, 8)] * 3
    works = []
    for kernels in (False, True):
        model = without_memory(make().train()).bfloat16()
        undo = patched(model, OffloadConfig(), kernels=kernels, capability=CAPABILITY)
        works.append(trace_micro_batch(model, of_dtype(qwen_batch(grids), torch.bfloat16)))
        undo()
    loop, once = ([stage for stage in work.stages if ".visual." in stage.block] for work in works)
    assert [stage.waits for stage in loop] == [True] * 3
    assert [stage.waits for stage in once] == [False] * 3
    for one, other in zip(once, loop, strict=True):
        assert one.forward.sdpa_flops == other.forward.sdpa_flops
        assert one.forward.num_operations < other.forward.num_operations
    layers = flat_layers(make(), OffloadConfig())
    blocks = {stage.block for stage in works[1].stages if stage.block}
    assert capturable([layer.shape() for layer in layers], works[1]) == blocks


def test_modules_are_as_before_without_a_gpu_that_has_the_kernel() -> None:
    model = FAMILIES["qwen2.5-vl"][0]()
    ask = importlib.import_module(type(model).__module__).get_max_seqlen
    undo = segments.attend_to_all_segments(model, CAPABILITY)
    assert importlib.import_module(type(model).__module__).get_max_seqlen is not ask
    undo()
    for capability in ((7, 5), None):
        segments.attend_to_all_segments(model, capability)
        assert not any("forward" in vars(module) for module in model.modules())
        assert importlib.import_module(type(model).__module__).get_max_seqlen is ask


@pytest.mark.slow
def test_every_tower_of_transformers_that_cuts_its_input_is_found() -> None:
    """A class whose loop over segments reads otherwise would wait in each block."""
    found, missed = [], []
    for family in pkgutil.iter_modules(transformers.models.__path__):
        name = f"transformers.models.{family.name}.modeling_{family.name}"
        try:
            file = importlib.import_module(name)
        except ImportError:
            continue
        for kind in vars(file).values():
            is_module = inspect.isclass(kind) and issubclass(kind, torch.nn.Module) and kind.__module__ == name
            if is_module and kind.__name__.endswith("Attention"):
                if "cu_seqlens" in inspect.signature(kind.forward).parameters:
                    (found if segments.cuts(kind) else missed).append(kind.__name__)
    assert len(found) >= 25
    assert not missed


def test_the_kernel_takes_head_dims_of_towers() -> None:
    for width, fits in ((80, True), (72, True), (64, True), (36, False), (264, False)):
        heads = torch.empty(1, 2, 4, width, device="meta")
        assert packed.has_kernel(heads, heads) == fits


@pytest.mark.slow
@pytest.mark.parametrize("placement", [Placement(), Placement(activations="checkpoint")], ids=str)
def test_blocks_of_towers_run_as_graphs(
    placement: Placement, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second grid has other segments of as many patches."""
    monkeypatch.setattr(facts_graphs, "device_types", {"cpu"})
    grids = [[(1, 4, 8), (1, 8, 8)], [(1, 8, 8), (1, 4, 8)]] * 3
    data = [of_dtype(qwen_batch(each), torch.bfloat16) for each in grids]

    def run() -> Any:
        torch.manual_seed(0)
        model = FAMILIES["qwen2.5-vl"][0]()
        undo = segments.attend_to_all_segments(model, CAPABILITY)
        try:
            return train(model, data, placement, working_dtype="bf16")
        finally:
            undo()

    found = run()
    assert found[2] == 2 * (3 + 2)
    assert {tuple(lengths) for lengths, _ in calls} == {(32, 64), (64, 32), (16,) * 6}
    assert_equals_eager(found, run, monkeypatch)


@pytest.mark.slow
def test_compiled_blocks_attend_as_transformers_does(calls: list[Any]) -> None:
    model, batch = FAMILIES["qwen2.5-vl"][0](), qwen_batch(GRIDS)
    loss = model(**batch).loss
    undo = patched(model, OffloadConfig(compile_blocks=True), capability=CAPABILITY)
    for block in model.model.visual.blocks:
        block.forward = torch.compile(block.forward, backend="eager")
    assert model(**batch).loss.item() == pytest.approx(loss.item(), rel=1e-6)
    undo()
    assert not calls
