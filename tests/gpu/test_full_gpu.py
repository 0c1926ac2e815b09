"""A GPU that really fills up in mid-training: `finetune` continues with a leaner plan and the same numbers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ByT5Tokenizer, T5Config

import offloadkit
from offloadkit.device.measure import measure
from tests.hf.tiny import save_config

ROWS = [{"input": f"{number} " * 100, "target": f"{number} " * 20} for number in range(64)]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    shape: dict[str, Any] = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
    config = T5Config(**shape, vocab_size=384, decoder_start_token_id=0, dropout_rate=0.1)
    config.architectures = ["T5ForConditionalGeneration"]
    save_config(config, tmp_path / "model")
    ByT5Tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def whole_card() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def finetune(folder: str, output: Path, **options: Any) -> offloadkit.FinetuneResult:
    defaults: dict[str, Any] = {"init": "random", "tokenizer": "byte", "max_steps": 4, "batch_size": 8}
    defaults |= {"gradient_accumulation": 2, "max_input_length": 512, "max_target_length": 128, "save_strategy": "no"}
    return offloadkit.finetune(folder, ROWS, output_dir=output, **(defaults | options))


def test_the_weights_are_those_of_a_run_with_enough_memory(
    folder: str, tmp_path: Path, whole_card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure()  # briefly takes more VRAM than this model
    torch.cuda.reset_peak_memory_stats()
    whole = finetune(folder, tmp_path / "whole")
    expected = {name: weight.cpu().clone() for name, weight in whole.model.state_dict().items()}
    allocated = whole.steps[-1].bytes["vram"]["process peak allocated"]
    del whole
    room = int(0.85 * allocated)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < room, "mapped memory stays available to the second run"
    share = room / torch.cuda.get_device_properties(0).total_memory
    forward = offloadkit.OffloadEngine.__call__

    def after_the_plan(engine: offloadkit.OffloadEngine, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_per_process_memory_fraction(share)  # the GPU is fuller now than during planning
        return forward(engine, *args, **kwargs)

    monkeypatch.setattr(offloadkit.OffloadEngine, "__call__", after_the_plan)
    with pytest.warns(RuntimeWarning, match="memory was full after step .* the plan has moved"):
        result = finetune(folder, tmp_path / "full")
    weights = result.model.state_dict()
    assert [name for name, weight in expected.items() if not torch.equal(weight, weights[name].cpu())] == []


def test_an_evaluation_on_a_full_gpu_goes_on_by_a_leaner_plan(
    folder: str, tmp_path: Path, whole_card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out: dict[str, Any] = {"eval_dataset": ROWS, "per_device_eval_batch_size": 64, "eval_strategy": "no"}
    whole = finetune(folder, tmp_path / "whole", **held_out)
    expected, loss = {name: weight.cpu().clone() for name, weight in whole.model.state_dict().items()}, whole.metrics
    del whole
    gc.collect()
    torch.cuda.empty_cache()
    evaluates, filled = offloadkit.OffloadEngine.run_eval, list[int]()

    def on_a_full_card(engine: offloadkit.OffloadEngine, run: Any, **options: Any) -> Any:
        if not filled:
            engine.synchronize()
            engine.placed.release_graphs()
            gc.collect()
            torch.cuda.empty_cache()
            filled.append(torch.cuda.memory_reserved() + (64 << 20))
            torch.cuda.set_per_process_memory_fraction(filled[0] / torch.cuda.get_device_properties(0).total_memory)
        return evaluates(engine, run, **options)

    monkeypatch.setattr(offloadkit.OffloadEngine, "run_eval", on_a_full_card)
    with pytest.warns(RuntimeWarning, match="memory was full in an evaluation after step 4: the plan has moved"):
        result = finetune(folder, tmp_path / "full", **held_out)
    assert {move.why for move in result.moves} == {"the GPU's memory was full in an evaluation"}
    assert result.metrics["eval_loss"] == pytest.approx(loss["eval_loss"], rel=1e-4)
    weights = result.model.state_dict()
    assert [name for name, weight in expected.items() if not torch.equal(weight, weights[name].cpu())] == []
