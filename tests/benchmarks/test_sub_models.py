"""The cases of the bare loop over any model: their batches are as their models take them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import sub_models
from benchmarks.cases import CASES, ENGINES, config_of
from offloadkit import OffloadEngine
from offloadkit.engine.outline import without_memory
from offloadkit.engine.tracing import trace_micro_batch
from offloadkit.offload.layers import repeated_blocks

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("tiny-any-")])
def test_batches_reach_all_blocks(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    config_of(case.model).save_pretrained(tmp_path)
    work = case.work(ENGINES["any"], str(tmp_path), "")
    model, batch = sub_models.model_of(work, "bf16", CPU), sub_models.batch_of(work, torch.bfloat16, CPU)
    assert float(model(**batch).loss.detach()) < 10
    traced = trace_micro_batch(without_memory(model), batch)
    assert {stage.block for stage in traced.stages if stage.block} == {name for name, _ in repeated_blocks(model)}
    assert sub_models.num_positions(batch, work) == traced.num_tokens or "input_ids" not in batch


def test_default_cases_are_those_of_the_claim() -> None:
    assert sub_models.parse([]).cases == [
        "whisper-large-10",
        "qwen2.5-vl-3b-24",
        "gemma3-4b-24",
        "modernbert-large-4",
        "qwen3-moe-6b-24",
    ]
    assert len(sub_models.parse(["--tiny"]).cases) == 5


def test_a_model_with_unread_weights_has_the_same_ties_and_is_drawn_when_placed(tmp_path: Path) -> None:
    case = CASES["tiny-any-gemma3"]
    config_of(case.model).save_pretrained(tmp_path)
    work = case.work(ENGINES["any"], str(tmp_path), "")
    model, whole = sub_models.lazy_model_of(work, "fp32", CPU), sub_models.model_of(work, "fp32", CPU)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    with OffloadEngine(model, device="cpu") as engine:
        assert float(engine(**sub_models.batch_of(work, torch.float32, CPU)).loss.detach()) < 10
