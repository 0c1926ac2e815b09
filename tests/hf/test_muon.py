"""Muon through the Trainer and `finetune`: the weights it steps in transformers' models, schedules, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from offloadkit import MuonOptions, OffloadConfig, Placement, finetune
from offloadkit.errors import ConfigError
from offloadkit.hf.trainer import OffloadTrainer
from offloadkit.offload.layers import flat_layers
from tests.hf.tiny import t5_config
from tests.hf.training import VOCAB, causal_rows, gpt2, llama, logged, seq2seq_rows, t5, train

MUON = OffloadConfig(optimizer="muon")
PLACEMENTS = {
    "cpu": Placement(),
    "vram": Placement(states="vram", gradients="vram", step="gpu"),
    "streamed": Placement(weights="ram", states="ram", step="gpu", activations="checkpoint"),
}


def qwen_moe() -> Qwen2MoeForCausalLM:
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=VOCAB, num_key_value_heads=2, **shape, **experts))


@pytest.mark.parametrize(
    ("model", "others"),
    [
        (t5, ("shared", "relative_attention_bias", "layer_norm")),
        (llama, ("embed_tokens", "lm_head", "norm")),
        (gpt2, ("wte", "wpe", "ln_", "bias")),
        (qwen_moe, ("embed_tokens", "lm_head", "norm", "bias", "mlp.gate.", "mlp.experts.", "shared_expert_gate")),
    ],
)
def test_which_weights_it_steps(model, others: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    """All weights of linear layers in blocks, GPT-2's as transposes; no embedding, norm, head, router or 3-D expert."""
    layers = flat_layers(model(), MUON)
    views = [(layer.kind.optimizer, view) for layer in layers for view in layer.views]
    for optimizer, view in views:
        assert optimizer == ("adamw" if any(name in view.name for name in others) else "muon"), view.name
        if view.matrix is not None:
            shape = view.matrix.rows, view.matrix.columns
            assert tuple(view.parameter.shape) == (shape[::-1] if model is gpt2 else shape)


@pytest.mark.parametrize("model", [t5, gpt2])
def test_a_trainer_gets_the_same_bits_in_every_placement(tmp_path: Path, model) -> None:  # type: ignore[no-untyped-def]
    rows = seq2seq_rows() if model is t5 else causal_rows()
    found = []
    for placement in PLACEMENTS.values():
        more = {"offload": OffloadConfig(optimizer="muon", placement=placement)}
        trainer = train(tmp_path, model(), rows, OffloadTrainer, more, weight_decay=0.2, gradient_accumulation_steps=2)
        assert [group["optimizer"] for group in trainer.optimizer.param_groups] == ["muon", "adamw", "adamw"]
        assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.2, 0.0]
        found.append(trainer.model.state_dict())
    for name, weights in found[0].items():
        assert all(torch.equal(weights, other[name]) for other in found[1:]), name


def test_the_schedule_sets_both_learning_rates(tmp_path: Path) -> None:
    more = {"offload": OffloadConfig(optimizer="muon", muon=MuonOptions(learning_rate=4e-3))}
    trainer = train(tmp_path, llama(), causal_rows(), OffloadTrainer, more, lr_scheduler_type="linear")
    rates = [group["lr"] for group in trainer.optimizer.param_groups]
    assert rates == [0.0, 0.0, 0.0]
    assert [group["initial_lr"] for group in trainer.optimizer.param_groups] == [4e-3, 1e-3, 1e-3]
    assert logged(trainer, "learning_rate") == pytest.approx([4e-3, 4e-3 * 2 / 3, 4e-3 / 3])


def test_a_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = train(tmp_path / "run", llama(), causal_rows(), OffloadTrainer, {"offload": MUON}, **saves)
    resumed = OffloadTrainer(llama(), whole.args, train_dataset=causal_rows(), offload=MUON)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    weights, expected = resumed.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    other = OffloadTrainer(llama(), whole.args, train_dataset=causal_rows())
    with pytest.raises(ConfigError, match="the run was saved with optimizer='muon', this run has 'adamw'"):
        other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))


def test_another_optimizer_in_the_arguments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="optimizer: 'muon' in OffloadConfig, 'lion' by TrainingArguments"):
        train(tmp_path, llama(), causal_rows(), OffloadTrainer, {"offload": MUON}, optim="lion_32bit")


def test_adapters_leave_it_nothing_to_step(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    with pytest.raises(ConfigError, match=r"optimizer='muon' finds no matrix to step: .*LoRA's factors"):
        train(tmp_path, model, causal_rows(), OffloadTrainer, {"offload": MUON})


@pytest.mark.slow
def test_finetune_says_what_it_steps_and_goes_on_bit_for_bit(tmp_path: Path, capsys: Any) -> None:
    t5_config().save_pretrained(tmp_path / "config")
    rows = [{"input": f"a{n}", "target": f"b{n}"} for n in range(8)]
    options: dict[str, Any] = {"init": "random", "tokenizer": "byte", "batch_size": 2, "use_cpu": True, "max_steps": 4}
    options |= {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 3, "monitor": False, "offload": MUON}
    whole = finetune(str(tmp_path / "config"), rows, output_dir=tmp_path / "whole", **options)
    assert "Muon steps 32 matrices with 16,896 parameters, AdamW the rest" in capsys.readouterr().out
    (tmp_path / "resumed").mkdir()
    (tmp_path / "whole" / "checkpoint-2").rename(tmp_path / "resumed" / "checkpoint-2")
    resumed = finetune(str(tmp_path / "config"), rows, output_dir=tmp_path / "resumed", resume=True, **options)
    expected = whole.model.state_dict()
    assert all(torch.equal(weights, expected[name]) for name, weights in resumed.model.state_dict().items())
