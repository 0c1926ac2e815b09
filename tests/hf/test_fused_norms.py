"""Norms as one kernel: eligible norms, the plan's bytes, and restoring the model's own norms."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, T5ForConditionalGeneration, TrainerCallback
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import offloadkit
from offloadkit.engine import engine
from offloadkit.engine.tracing import META, AsOnGpu, OpCounter, trace_micro_batch
from offloadkit.facts.changes import changed
from offloadkit.facts.config import OffloadConfig
from offloadkit.hf.patches import fuse_norms
from offloadkit.offload import compile as compiled_blocks
from offloadkit.planner import Pass
from tests.hf.tiny import llama_config, t5_config
from tests.hf.training import seq2seq_rows, t5, train


class NoNormLayerNorm(nn.Module):
    """A norm by name and attributes, without the square root."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def is_replaced(norm: nn.Module) -> bool:
    return "forward" in vars(norm)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, T5LayerNorm, Qwen3RMSNorm, Olmo2RMSNorm])
def test_norms_that_compute_it_run_as_one_kernel(kind: Any) -> None:
    norm = kind(16)
    undo = fuse_norms(norm)
    assert is_replaced(norm)
    undo()
    assert not is_replaced(norm)


@pytest.mark.parametrize("kind", [GemmaRMSNorm, NoNormLayerNorm, nn.LayerNorm, nn.RMSNorm, nn.Linear])
def test_others_are_left_as_they_are(kind: Any) -> None:
    norm = kind(16, 16) if kind is nn.Linear else kind(16)
    fuse_norms(norm)
    assert not is_replaced(norm)


def test_a_forward_that_others_replaced_stays_theirs() -> None:
    def theirs(x: torch.Tensor) -> torch.Tensor:
        return x

    before: Any = LlamaRMSNorm(16)
    before.forward = theirs
    fuse_norms(before)()
    after: Any = LlamaRMSNorm(16)
    undo = fuse_norms(after)
    after.forward = theirs
    undo()
    assert before.forward is after.forward is theirs


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_on_the_cpu_the_numbers_are_the_models_own(kind: str) -> None:
    torch.manual_seed(0)
    model: Any = T5ForConditionalGeneration(t5_config()) if kind == "t5" else LlamaForCausalLM(llama_config())
    ids = torch.arange(3, 13).view(2, 5)
    own = model.eval()(input_ids=ids, labels=ids)
    fuse_norms(model)
    norms = [module for module in model.modules() if is_replaced(module)]
    assert len(norms) == sum(isinstance(module, LlamaRMSNorm | T5LayerNorm) for module in model.modules()) > 4
    assert torch.equal(model(input_ids=ids, labels=ids).logits, own.logits)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(input_ids=ids, labels=ids).logits, own.logits), "a copied model must keep its own norms"


def test_what_a_gpu_does_is_one_operation_forward_and_two_backward() -> None:
    x = torch.empty(8, 1024, device=META, dtype=torch.bfloat16, requires_grad=True)
    norm = LlamaRMSNorm(1024).bfloat16().to(META)
    fuse_norms(norm)
    with AsOnGpu(), OpCounter([x, norm.weight], mask_is_full=True) as counter:
        y = norm(x)
        assert counter.total == Pass(moved_bytes=2 * x.nbytes + norm.weight.nbytes, num_operations=1)
        assert counter.live == y.nbytes + 512  # one fp32 number a row, rounded to the allocator's minimum
        counter.total = Pass()
        y.backward(torch.empty_like(y))
    assert counter.total == Pass(moved_bytes=4 * x.nbytes + 2 * norm.weight.nbytes, num_operations=2)


def test_a_norm_of_another_dtype_computes_as_before() -> None:
    norm = LlamaRMSNorm(16).bfloat16().to(META)
    fuse_norms(norm)
    with AsOnGpu(), OpCounter([], mask_is_full=True) as counter:
        norm(torch.empty(2, 16, device=META))
    assert counter.total.num_operations > 3


def test_a_micro_batch_keeps_and_moves_less() -> None:
    def work(*, fused: bool) -> Any:
        with torch.device("meta"):
            model = LlamaForCausalLM(llama_config(use_cache=False)).bfloat16().train()
        if fused:
            fuse_norms(model)
        ids = torch.empty(2, 64, dtype=torch.long)
        return trace_micro_batch(model, {"input_ids": ids, "labels": ids})

    own, fused = (next(stage for stage in work(fused=each).stages if stage.block) for each in (False, True))
    assert fused.kept_bytes < own.kept_bytes
    assert fused.forward.moved_bytes < own.forward.moved_bytes
    assert fused.backward.num_operations <= own.backward.num_operations - 20
    assert fused.forward.flops == own.forward.flops


def test_they_are_planned_where_a_gpu_computes_eagerly() -> None:
    def activations(**options: Any) -> int:
        made = offloadkit.plan("t5-small", vram="16GiB", ram="30GiB", offload=OffloadConfig(**options))
        assert {placement.activations for placement in made.placements} == {"keep"}
        return made.tiers["vram"]["activations"]

    assert activations() < activations(compile_blocks=True)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_the_trainer_fuses_them_while_it_trains(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    monkeypatch.setattr(engine, "changed", lambda model, config, kernels: changed(model, config, kernels=True))
    found: list[int] = []

    class Looks(TrainerCallback):
        def on_step_end(self, *arguments: Any, model: nn.Module, **others: Any) -> None:
            found.append(sum(map(is_replaced, norms(model))))

    def norms(model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if isinstance(module, T5LayerNorm)]

    more = {"callbacks": [Looks()], "offload": OffloadConfig(compile_blocks=compiled)}
    trainer = train(tmp_path, t5(), seq2seq_rows(), more=more, max_steps=1)
    assert found == [0 if compiled else len(norms(trainer.model))]
    trainer.close()
    assert not any(map(is_replaced, norms(trainer.model)))
