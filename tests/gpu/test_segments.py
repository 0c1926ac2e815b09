"""Towers on the GPU: `varlen_attn` attends to all segments, in CUDA graphs, and no block waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offloadkit import OffloadConfig, OffloadEngine, Placement
from offloadkit.facts import graphs as facts_graphs
from offloadkit.hf import packed, segments
from offloadkit.hf.patches import patched
from tests.hf.test_segments import GRIDS, TOWERS, loss_and_gradients, of_dtype
from tests.sub_models import FAMILIES, qwen_batch
from tests.synchronisations import of_the_callers, synchronisations

KINDS = [*TOWERS, "qwen2.5-vl wide"]


def made(family: str) -> Any:
    """On the GPU in bf16. Heads are 16 or, if wide, 80 numbers, as in Qwen2.5-VL-3B."""
    torch.manual_seed(0)
    model = FAMILIES[family.split()[0]][0]()
    if family.endswith("wide"):
        config = model.config
        config.vision_config.hidden_size = 160
        model = type(model)(config)
    return model.to("cuda", torch.bfloat16)


def batch_of(grids: list[tuple[int, int, int]]) -> dict[str, Any]:
    return {name: each.cuda() for name, each in of_dtype(qwen_batch(grids), torch.bfloat16).items()}


@pytest.mark.parametrize("family", KINDS)
def test_bf16_is_as_near_to_fp32_as_transformers_loop(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    own_kernel = packed.by_varlen
    monkeypatch.setattr(packed, "by_varlen", lambda *given: (calls.append(given[4]), own_kernel(*given))[1])
    model, batch = made(family), batch_of(GRIDS)
    undo = patched(model, OffloadConfig())
    once, own = loss_and_gradients(model, batch)
    num_calls = len(calls)
    monkeypatch.setattr(segments, "DEVICES", ())
    loop, theirs = loss_and_gradients(model, batch)
    exact, right = loss_and_gradients(model.float(), of_dtype(batch, torch.float32))
    undo()
    assert num_calls == len(calls) == 3
    assert abs(once - exact) <= 2 * abs(loop - exact) + 2e-3 * exact
    for name, gradient in right.items():
        if name.endswith("k_proj.bias"):  # zero but for rounding
            continue
        bound = 2 * (theirs[name].float() - gradient).norm() + 0.02 * gradient.norm() + 1e-6
        assert (own[name].float() - gradient).norm() <= bound, name


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
@pytest.mark.parametrize("weights", ["vram", "ram"])
def test_blocks_are_graphs_and_wait_for_nothing(
    weights: Any, activations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts_graphs, "device_types", {"cuda"})
    placement = Placement(weights=weights, activations=activations)
    data = [batch_of(grids) for grids in ([(1, 4, 8), (1, 8, 8)], [(1, 8, 8), (1, 4, 8)])]
    config = OffloadConfig(learning_rate=1e-3, working_dtype="bf16", placement=placement)
    with OffloadEngine(made("qwen2.5-vl wide").train(), config, device="cuda") as engine:

        def step(batch: dict[str, Any]) -> None:
            engine.backward(engine(**batch).loss)
            engine.step()

        for _ in range(3):
            step(data[0])
            step(data[1])
        engine.synchronize()
        graphs = engine.placed.graphs
        assert graphs is not None
        assert graphs.num_graphs() == 2 * (3 + 2)
        with synchronisations() as found:
            step(data[0])
            step(data[1])
        engine.synchronize()
    inside = [each.stack.partition("offload/graphs.py")[2] for each in of_the_callers(found)]  # "" outside of blocks
    waits = ["\n".join(stack.splitlines()[-6:]) for stack in inside if "modeling_" in stack or "segments.py" in stack]
    assert not waits, "\n\n".join(waits)
