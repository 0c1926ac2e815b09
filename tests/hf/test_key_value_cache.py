"""Training keeps no keys and values in any part of a model, whatever its config says."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import offloadkit
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ModelError
from offloadkit.facts.config import OffloadConfig, Placement
from tests.hf.training import seq2seq_rows, t5, train

SHAPE: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 384}


def cached(model: Any) -> set[bool]:
    return {module.config.use_cache for module in model.modules() if hasattr(module, "config")}


@pytest.mark.parametrize("use", [False, True])
def test_no_stack_keeps_any_while_training(use: bool, tmp_path: Path) -> None:
    seen: list[set[bool]] = []
    model = t5()
    assert cached(model) == {False, True}  # T5's encoder has none
    model.decoder.register_forward_pre_hook(lambda *_: seen.append(cached(model)))
    trainer = train(tmp_path, model, seq2seq_rows(), use_cache=use)
    assert seen == 3 * [{False}]
    trainer.close()
    assert model.decoder.config.use_cache


def test_in_a_bare_loop_none_are_kept_and_placements_are_equal() -> None:
    trained, batch = [], seq2seq_batch()
    for activations in ("keep", "checkpoint"):
        model = t5(dropout=0.1)
        assert cached(model) == {False, True}
        placement = Placement(activations=activations)  # type: ignore[arg-type]
        with OffloadEngine(model, OffloadConfig(learning_rate=1e-2, placement=placement), device="cpu") as engine:
            for _ in range(2):
                output = engine(**batch)
                assert output.past_key_values is None
                engine.backward(output.loss)
                engine.step()
            with pytest.raises(ModelError, match="use_cache=True in training"):
                engine(**batch, use_cache=True)
            engine.eval()
            with torch.no_grad():
                assert engine(**batch).past_key_values is not None
            trained.append(engine.master_weights())
        assert cached(model) == {False, True}
    assert [name for name, weight in trained[0].items() if not torch.equal(weight, trained[1][name])] == []


def seq2seq_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = {"input_ids": 5, "labels": 3}
    return {name: torch.randint(2, 40, (2, length), generator=generator) for name, length in lengths.items()}


def test_a_plan_counts_none() -> None:
    plans = []
    for use in (False, True):
        with torch.device("meta"):
            model = T5ForConditionalGeneration(T5Config(**SHAPE, decoder_start_token_id=0, use_cache=use))
        plans.append(offloadkit.plan(model, offload=OffloadConfig(), batch_size=2, device=torch.device("cpu")))
        assert cached(model) == {False, use}
    assert plans[0].tiers == plans[1].tiers
    assert plans[0].seconds == plans[1].seconds is not None


@pytest.mark.slow
def test_a_run_that_goes_on_rounds_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    T5Config(**SHAPE, decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"]).save_pretrained(
        tmp_path / "config"
    )
    rows = [{"input": f"{number} and {number}", "target": str(2 * number)} for number in range(24)]
    options: dict[str, Any] = {"init": "random", "tokenizer": "byte", "batch_size": 2, "max_steps": 6, "seed": 1}
    options |= {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 3, "monitor": False}
    whole = offloadkit.finetune(str(tmp_path / "config"), rows, output_dir=tmp_path / "whole", **options)
    (tmp_path / "resumed").mkdir()
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "resumed" / "checkpoint-3")
    resumed = offloadkit.finetune(
        str(tmp_path / "config"), rows, output_dir=tmp_path / "resumed", resume=True, **options
    )
    expected = whole.model.state_dict()
    assert [
        name for name, weight in resumed.model.state_dict().items() if not torch.equal(weight, expected[name])
    ] == []
