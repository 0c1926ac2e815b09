"""A full GPU in mid-training: `finetune` goes on by a leaner plan, and the weights are those of a run that had room."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration

import offloadkit
from offloadkit import OffloadConfig, Placement, planning
from offloadkit.errors import ConfigError, OutOfVramError
from offloadkit.planner import layout as memory
from tests.hf.tiny import save_config

PAIRS = [{"input": f"{number}+1", "target": str(number + 1)} for number in range(10)]
SHAPE: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 2, "vocab_size": 384}
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _a_small_card(one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned for: a card that fits the run, on which the process itself takes nothing: beside that, what of
    so small a run can be leaner would not count."""
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


@pytest.fixture
def by_name(tmp_path: Path) -> str:
    config = T5Config(**SHAPE, decoder_start_token_id=0, dropout_rate=0.1)
    config.architectures = ["T5ForConditionalGeneration"]
    folder = save_config(config, tmp_path / "by-name")
    ByT5Tokenizer().save_pretrained(folder)
    return str(folder)


def finetune(model: Any, **options: Any) -> offloadkit.FinetuneResult:
    """5 micro-batches and 3 updates an epoch, the last of one micro-batch; 7 updates in all."""
    defaults: dict[str, Any] = {"tokenizer": "byte", "max_steps": 7, "batch_size": 2, "gradient_accumulation": 2}
    defaults |= {"bf16": True, "use_cpu": True, "learning_rate": 1e-2, "save_strategy": "no", "logging_steps": 1}
    defaults |= {"max_input_length": 64, "max_target_length": 16}
    if isinstance(model, str):
        defaults["init"] = "random"
    defaults["overwrite"] = not options.get("resume")
    return offloadkit.finetune(model, PAIRS, **(defaults | options))


@pytest.fixture
def full_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Has the numbered training forwards, or their backwards, fail as on a full GPU; returns the forwards so far."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "number", "in_backward", "finished"),
    [
        pytest.param("handed over", 0, False, 0, id="handed over, first"),
        pytest.param("handed over", 1, True, 0, id="handed over, first window", marks=pytest.mark.slow),
        pytest.param("handed over", 4, False, 2, id="handed over, last of an epoch"),
        pytest.param("handed over", 5, False, 3, id="handed over, first of an epoch", marks=pytest.mark.slow),
        pytest.param("handed over", 8, True, 4, id="handed over, mid-epoch", marks=pytest.mark.slow),
        pytest.param("by name", 0, False, 0, id="by name, first", marks=pytest.mark.slow),
        pytest.param("by name", 8, True, 4, id="by name, mid-epoch"),
        pytest.param(
            "by name, ignore_data_skip", 8, True, 4, id="by name, data not to be skipped", marks=pytest.mark.slow
        ),
    ],
)
def test_the_weights_are_those_of_a_run_with_enough_memory(
    how: str,
    number: int,
    in_backward: bool,
    finished: int,
    by_name: str,
    full_at: Callable[..., list[int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = finetune(by_name if "by name" in how else handed_over())
    seen = full_at(number, in_backward=in_backward)
    skip = {"ignore_data_skip": True} if "ignore" in how else {}
    with pytest.warns(RuntimeWarning, match=r"memory is full: .*Planned were .*Training goes on by a leaner plan"):
        result = finetune(by_name if "by name" in how else handed_over(), retry_leaner=True, **skip)
    weights = result.model.state_dict()
    assert [name for name, weight in whole.model.state_dict().items() if not torch.equal(weight, weights[name])] == []
    assert result.plan.total_bytes("vram") < 7 / 8 * whole.plan.total_bytes("vram")
    assert result.plan.placements != whole.plan.placements
    assert str(result.plan) in capsys.readouterr().out
    micro_batches = [0, 2, 4, 5, 7, 9, 10, 12]  # before each update
    assert len(seen) == number + 1 + micro_batches[7] - micro_batches[finished]
    assert [step.step for step in result.steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [log["grad_norm"] for log in result.history if "grad_norm" in log] == [
        log["grad_norm"] for log in whole.history if "grad_norm" in log
    ]


def test_it_is_tried_once_more_and_no_further(full_at: Callable[..., list[int]]) -> None:
    full_at(4, 6)
    with (
        pytest.warns(RuntimeWarning, match="leaner plan"),
        pytest.raises(OutOfVramError, match=r"second attempt: the first was planned with .* MiB .*, this one with"),
    ):
        finetune(handed_over(), retry_leaner=True)


def test_unasked_the_error_says_that_it_could_be_tried(full_at: Callable[..., list[int]], tmp_path: Path) -> None:
    full_at(4)
    with pytest.raises(OutOfVramError, match=r"Take a smaller micro-batch .*or pass retry_leaner=True"):
        finetune(handed_over(), output_dir=tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_where_no_plan_is_leaner_the_error_says_why_and_the_steps_so_far_are_saved(
    full_at: Callable[..., list[int]], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"offload": OffloadConfig(placement=Placement()), "output_dir": tmp_path / "out"}
    full_at(4)
    with pytest.raises(
        OutOfVramError,
        match=r"retry_leaner found no plan .*: does not fit: needs .*resume=True .*goes on from .*point-2",
    ):
        finetune(handed_over(), retry_leaner=True, **options)
    whole = finetune(handed_over())
    resumed = finetune(handed_over(), resume=True, **options)
    weights = resumed.model.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in whole.model.state_dict().items())


def test_the_switch_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match="retry_leaner must be True or False, got 2"):
        finetune(handed_over(), retry_leaner=2)
