"""Python's time for a model's blocks, measured on the CPU, and the plan made from it."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import LlamaForCausalLM, T5ForConditionalGeneration

from offloadkit.device import measure as measuring
from offloadkit.engine import outline, python_time
from offloadkit.engine.python_time import Blocks, BlockSeconds, OperationSeconds, blocks_called
from offloadkit.engine.tracing import trace_micro_batch
from offloadkit.facts.config import OffloadConfig
from offloadkit.offload.layers import repeated_blocks
from offloadkit.planner import MicroBatch
from offloadkit.planner.seconds import weighed
from tests.hf.tiny import llama_config, t5_config
from tests.planner.machines import H200

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measuring, "own_rates", {})
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [])  # no other process disturbs


def t5() -> nn.Module:
    with torch.device("meta"):
        return T5ForConditionalGeneration(t5_config(num_layers=3, use_cache=False)).train()


def llama() -> nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(llama_config(num_hidden_layers=3, use_cache=False)).train()


def traced(model: nn.Module, rows: int = 8) -> tuple[Blocks, MicroBatch]:
    ids = torch.empty(rows, 16, dtype=torch.int64, device="meta")
    with blocks_called(model) as blocks:
        return blocks, trace_micro_batch(model, {"input_ids": ids, "labels": ids, "attention_mask": ids})


@pytest.mark.parametrize(("make", "names"), [(t5, ["encoder.block.1", "decoder.block.1"]), (llama, ["model.layers.0"])])
def test_the_most_frequent_kinds_are_timed_with_few_rows(
    make: Any, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three Llama blocks are of one kind. T5's first blocks compute the position bias and form kinds for themselves."""
    model = make()
    blocks, work = traced(model)
    timed: list[tuple[str, int]] = []
    times = iter([BlockSeconds(0.003, 0.006, 0.010), BlockSeconds(0.005, 0.008, 0.014)])

    def time(kind: Any, device: torch.device) -> BlockSeconds:
        timed.append((kind.names[0], kind.arguments[0].size[0]))
        return next(times)

    monkeypatch.setattr(python_time, "timed", time)
    seconds = blocks.operation_seconds(work, CPU)
    assert timed == [(name, 8) for name in names]
    stages = {stage.block: stage for stage in work.stages}
    forward = sum(weighed(stages[name].forward) for name in names)
    backward = sum(weighed(stages[name].backward) for name in names)
    both, one = (0.008 / forward, 0.014 / backward, 0.024 / 0.022), (0.003 / forward, 0.006 / backward, 0.010 / 0.009)
    expected = both if len(names) == 2 else one
    assert seconds == pytest.approx(expected)
    assert blocks.operation_seconds(work, CPU) == seconds, "the cached time must be used"
    assert len(timed) == len(names)
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("make", [t5, llama])
def test_a_real_block_runs_by_itself_and_changes_nothing(make: Any) -> None:
    seen: list[int] = []
    model = make()
    blocks, work = traced(model)
    kinds = {type(block) for _, block in repeated_blocks(model)}

    def called(module: nn.Module, args: Any) -> None:
        if type(module) in kinds:
            seen.append(args[0].shape[0])

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    handle = register_module_forward_pre_hook(called)
    try:
        seconds = blocks.operation_seconds(work, CPU)
    finally:
        handle.remove()
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    assert seconds is not None
    assert all(1e-7 < part < 1e-2 for part in (seconds.forward, seconds.backward))
    assert seconds.spread >= 1
    assert set(seen) == {2}, "blocks must be timed with few rows"
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())


def test_a_trace_counts_the_same_beside_it() -> None:
    model = t5()
    ids = torch.empty(8, 16, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "labels": ids, "attention_mask": ids}
    assert traced(model)[1] == trace_micro_batch(model, batch)


class NeedsItsModel(nn.Module):
    """A block that cannot run alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta:
            raise ValueError("no")
        return self.linear(x)


class Disturbed(nn.Linear):
    """A block whose first calls are slow, as if another process took the core."""

    slow = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta and Disturbed.slow:
            Disturbed.slow -= 1
            time.sleep(0.01)
        return super().forward(x)


def test_what_other_work_takes_is_not_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight of the first calls are slow; one quick burst is enough. The spread shows the slow ones of the second
    burst."""
    with torch.device("meta"):
        model = nn.Sequential(*(Disturbed(8, 8) for _ in range(3)))
    with blocks_called(model) as blocks:
        work = trace_micro_batch(model, torch.empty(4, 8, device="meta"))
    monkeypatch.setattr(Disturbed, "slow", 8)
    seconds = blocks.operation_seconds(work, CPU)
    assert Disturbed.slow == 0
    assert seconds is not None
    assert seconds.forward * weighed(work.stages[0].forward) < 0.005
    assert seconds.spread > 2


def test_a_block_that_cannot_run_by_itself_is_planned_as_before() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(NeedsItsModel() for _ in range(3)))
    with blocks_called(model) as blocks:
        work = trace_micro_batch(model, torch.empty(4, 8, device="meta"))
    assert blocks.operation_seconds(work, CPU) is None
    assert not measuring.cache_file().exists()


def test_a_plan_for_the_gpu_here_times_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Blocks, "operation_seconds", lambda self, work, device: OperationSeconds(3e-5, 4e-5, 1.2))
    batch = torch.empty(2, 8, device="meta")

    def found(**changes: Any) -> Any:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        work = outline.outlined(model, OffloadConfig(), replace(H200, **changes)).work(batch)
        assert work is not None
        return work.operation_launches, work.python_spread

    launches, spread = found(launch_seconds=5e-6)
    assert (*launches, spread) == pytest.approx((6, 8, 1.2))
    assert found(assumed="a card that is not here") == found(device="cpu") == (None, 1.0)


def test_the_cache_says_what_was_timed() -> None:
    blocks, work = traced(llama())
    blocks.operation_seconds(work, CPU)
    ((key, kept),) = json.loads(measuring.cache_file().read_text()).items()
    assert "LlamaDecoderLayer" in key
    assert set(kept) == {"forward_seconds", "backward_seconds", "slowest_seconds"}
