"""Adapters on 4-bit weights of bitsandbytes on a GPU have the losses of PEFT's own training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaForCausalLM

import offloadkit
from tests.hf.tiny import llama_config
from tests.hf.training import losses_of_peft

peft = pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

NUM_STEPS = 10
SHAPE = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}


def test_adapters_on_4_bit_weights_train_as_pefts_do(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(num_key_value_heads=4, **SHAPE)).save_pretrained(tmp_path)
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    config = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")

    def adapted(seed: int) -> Any:
        model = LlamaForCausalLM.from_pretrained(
            tmp_path, quantization_config=four_bits, device_map={"": 0}, dtype=torch.bfloat16
        )
        torch.manual_seed(seed)
        return peft.get_peft_model(model, copy.deepcopy(config)).train()

    tokens = torch.randint(3, 500, (4, 40), generator=torch.Generator().manual_seed(1)).cuda()
    batch = {"input_ids": tokens, "labels": tokens}
    curves = [torch.tensor(losses_of_peft(adapted(seed), batch, NUM_STEPS, learning_rate=5e-3)) for seed in (0, 1)]
    options = offloadkit.OffloadConfig(learning_rate=5e-3, eps=1e-4, weight_decay=0.0, max_grad_norm=1.0)
    with offloadkit.OffloadEngine(adapted(0), options, example=batch) as engine:
        found = []
        for _ in range(NUM_STEPS):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
    assert curves[0][-1] < curves[0][0] - 0.2
    between_seeds = (curves[0] - curves[1]).abs().mean()
    assert (torch.tensor(found) - curves[0]).abs().mean() < between_seeds
