"""A full GPU in mid-training: `finetune` continues with a leaner plan and the weights of a run that had room."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import offloadkit
from offloadkit import OffloadConfig, Placement
from offloadkit.doors import planning
from offloadkit.errors import OutOfVramError
from offloadkit.planner import layout as memory

PAIRS = [{"input": f"{number}+1", "target": str(number + 1)} for number in range(10)]
SHAPE: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 2, "vocab_size": 384}
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _a_small_card(one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for a card that fits the run, without a context or allocator reserve, which would dwarf what so small a run
    can save."""
    card = replace(
        planning.ASSUMED_CARD,
        vram_total_bytes=24 * MIB,
        vram_free_bytes=24 * MIB + memory.ALLOCATOR_BYTES,
        vram_context_bytes=-memory.ALLOCATOR_BYTES,
        ram_total_bytes=8 << 30,
        ram_available_bytes=8 << 30,
    )
    monkeypatch.setattr(planning, "machine_for", lambda config, device: (card, True))
    monkeypatch.chdir(tmp_path)


def handed_over() -> Any:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**SHAPE, decoder_start_token_id=0, dropout_rate=0.1))


def finetune(model: Any, **options: Any) -> offloadkit.FinetuneResult:
    """5 micro-batches and 3 updates an epoch, the last one with a single micro-batch; 7 updates in total."""
    defaults: dict[str, Any] = {"tokenizer": "byte", "max_steps": 7, "batch_size": 2, "gradient_accumulation": 2}
    defaults |= {"bf16": True, "use_cpu": True, "learning_rate": 1e-2, "save_strategy": "no", "logging_steps": 1}
    defaults |= {"max_input_length": 64, "max_target_length": 16}
    defaults["overwrite"] = not options.get("resume")
    return offloadkit.finetune(model, PAIRS, **(defaults | options))


@pytest.fixture
def full_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Makes the numbered training forwards, or their backwards, run out of memory; returns the list of forwards."""
    forward = T5ForConditionalGeneration.forward
    seen: list[int] = []

    def install(*numbers: int, in_backward: bool = False) -> list[int]:
        @functools.wraps(forward)
        def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = forward(self, *args, **kwargs)
            if torch.is_grad_enabled() and output.loss is not None and output.loss.device.type != "meta":
                seen.append(len(seen))
                if seen[-1] in numbers and in_backward:
                    output.loss.register_hook(fail)
                elif seen[-1] in numbers:
                    fail(output.loss)
            return output

        monkeypatch.setattr(T5ForConditionalGeneration, "forward", fails)
        return seen

    def fail(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    return install


@pytest.mark.parametrize(
    ("number", "in_backward", "more"),
    [
        pytest.param(0, False, {}, id="first", marks=pytest.mark.slow),
        pytest.param(8, True, {}, id="mid-epoch, twice", marks=pytest.mark.slow),
    ],
)
def test_the_weights_are_those_of_a_run_with_enough_memory(
    number: int, in_backward: bool, more: dict[str, Any], full_at: Callable[..., list[int]]
) -> None:
    whole = finetune(handed_over())
    seen = full_at(number, number + 2, in_backward=in_backward)
    with pytest.warns(RuntimeWarning, match=r"memory was full after step \d: the plan has moved in .*\(.*VRAM .* -> "):
        result = finetune(handed_over(), **more)
    weights = result.model.state_dict()
    assert [name for name, weight in whole.model.state_dict().items() if not torch.equal(weight, weights[name])] == []
    assert result.plan.total_bytes("vram") < 7 / 8 * whole.plan.total_bytes("vram")
    assert result.plan.placements != whole.plan.placements
    assert (len(whole.moves), len(result.moves)) == (0, 2)
    as_before = {phase.name: {"ram": phase.ram + MIB * MIB} for phase in whole.plan.phases}
    assert "memory: " in repr(replace(whole, peaks=as_before))
    assert "memory: " not in repr(replace(result, peaks=as_before))  # these were measured under two plans
    assert len(seen) > 12
    assert [step.step for step in result.steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [step.loss for step in result.steps] == [step.loss for step in whole.steps]
    for key in ("loss", "grad_norm"):
        assert [log[key] for log in result.history if key in log] == [log[key] for log in whole.history if key in log]


def test_a_fixed_placement_is_not_replaced_by_a_leaner_plan(full_at: Callable[..., list[int]]) -> None:
    full_at(0)
    fixed: Any = {"offload": OffloadConfig(placement=Placement())}
    with pytest.raises(OutOfVramError, match=r"Planned were .*Use a smaller micro-batch"):
        finetune(handed_over(), **fixed)


@pytest.mark.slow
def test_a_gpu_that_is_full_in_evaluation_and_in_generation_ends_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    held_out: dict[str, Any] = {"eval_dataset": PAIRS[:2], "max_steps": 1, "gradient_accumulation": 1}
    whole = finetune(handed_over(), **held_out)
    forward, full = T5ForConditionalGeneration.forward, [True, True]

    @functools.wraps(forward)
    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, generating = forward(self, *args, **kwargs), "labels" not in kwargs
        if not torch.is_grad_enabled() and output.logits.device.type != "meta" and full[generating]:
            full[generating] = False
            raise torch.OutOfMemoryError("CUDA out of memory")
        return output

    monkeypatch.setattr(T5ForConditionalGeneration, "forward", fails)
    with pytest.warns(RuntimeWarning, match="memory was full in an evaluation after step 1: the plan has moved in"):
        result = finetune(handed_over(), **held_out)
    assert full == [False, False]
    assert [move.why for move in result.moves] == ["the GPU's memory was full in an evaluation"]  # then fewer rows fit
    assert result.plan.total_bytes("vram") == result.moves[-1].after["vram"]
    assert (result.samples, result.metrics["eval_loss"]) == (whole.samples, whole.metrics["eval_loss"])
