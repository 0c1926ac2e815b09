"""PEFT's adapters: the same numbers wherever the base lives, and PEFT's own calls with an open engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from offloadkit import OffloadTrainer
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ModelError
from offloadkit.facts.config import OffloadConfig
from tests.hf.tiny import llama_config
from tests.hf.training import arguments, causal_rows, llama, logged
from tests.offload.test_frozen import BASE_ALONE, RESIDENT, STREAMED, assert_equal, opened, weights_of

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PLACES: list[Any] = [RESIDENT, STREAMED, BASE_ALONE]


def base(dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config()).to(dtype)


def adapted(**options: Any) -> Any:
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    torch.manual_seed(1)
    model = peft.get_peft_model(base(), config).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def batches(device: str, number: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    some = [torch.randint(0, 64, (2, 7), generator=generator).to(device) for _ in range(number)]
    return [{"input_ids": ids, "labels": ids} for ids in some]


def step(engine: OffloadEngine, batch: dict[str, torch.Tensor]) -> float:
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


def logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=batch["input_ids"]).logits.float().cpu()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_the_base_may_live_anywhere(device: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Training; reference logits without adapters; merging and unmerging; saving."""
    runs = []
    for at, place in enumerate(PLACES):
        model, found = adapted(**options), []
        some = batches(device)
        with opened(model, place, device) as engine:
            found += [step(engine, batch) for batch in some]
            with model.disable_adapter():
                plain = logits(engine, some[0])
            found.append(step(engine, some[0]))
            before = logits(engine, some[1])
            # PEFT adds DoRA's factors, which are in VRAM, to a copy of the base's weight.
            if device == "cpu" or "use_dora" not in options:
                model.merge_adapter()
                merged = logits(engine, some[1])
                model.unmerge_adapter()
            else:
                merged = before
            found.append(step(engine, some[1]))
            model.save_pretrained(tmp_path / str(at))
            last = logits(engine, some[2])
        runs.append((found, plain, before, merged, last, weights_of(model)))
        assert not torch.equal(plain, before)
        torch.testing.assert_close(merged, before, rtol=0.1, atol=0.1)
        again = peft.PeftModel.from_pretrained(base(), tmp_path / str(at))
        saved = {name: each for name, each in weights_of(again).items() if "lora" in name or "to_save" in name}
        assert_equal({name: runs[-1][-1][name] for name in saved}, saved)
    for found, *tensors, weights in runs[1:]:
        assert found == runs[0][0]
        assert all(torch.equal(one, other) for one, other in zip(tensors, runs[0][1:-1], strict=True))
        assert_equal(weights, runs[0][-1])


@pytest.mark.slow
def test_a_trainer_saves_adapters_and_goes_on_from_its_base_alone(tmp_path: Path) -> None:
    def run(folder: Path, model: Any, resume: str | None = None, **options: Any) -> Any:
        made = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        torch.manual_seed(1)
        offload = {"offload": OffloadConfig(placement=STREAMED)}
        args, rows = arguments(folder, **options), causal_rows()
        trainer = OffloadTrainer(peft.get_peft_model(model, made), args=args, train_dataset=rows, **offload)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole = run(tmp_path / "whole", llama(), **saving)
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert not (checkpoint / "model.safetensors").exists()
    resumed = run(tmp_path / "resumed", llama(), resume=str(checkpoint))
    assert logged(resumed, "loss") == logged(whole, "loss")
    assert_equal(weights_of(resumed.model), weights_of(whole.model))
    other = llama()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(ModelError, match=r"1 frozen weights differ .*up_proj\.weight"):
        run(tmp_path / "other", other, resume=str(checkpoint))
