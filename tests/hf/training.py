"""Small models, made-up rows, and trainers that have trained on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from offloadkit.hf.trainer import OffloadSeq2SeqTrainer

VOCAB = 40
Row = dict[str, torch.Tensor]


def t5(dropout: float = 0.0) -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=dropout,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=32, **shape))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **shape))


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(vocab_size=VOCAB, hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=3, **shape)
    )


def attentions(model: Any) -> set[str]:
    return {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}


def seq2seq_rows(num_rows: int = 8, seed: int = 1) -> list[Row]:
    """Inputs of 6 ids and 2 to 8 targets, padded to 10 with -100."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(num_rows):
        labels = torch.randint(3, VOCAB, (10,), generator=generator)
        labels[2 + index * 5 % 7 :] = -100
        inputs = torch.randint(3, VOCAB, (6,), generator=generator)
        rows.append({"input_ids": inputs, "attention_mask": torch.ones_like(inputs), "labels": labels})
    return rows


def causal_rows(num_rows: int = 8) -> list[Row]:
    rows = seq2seq_rows(num_rows)
    for row in rows:
        row["input_ids"] = row["labels"].clamp(min=0)
        row["attention_mask"] = torch.ones_like(row["input_ids"])
    return rows


def class_rows(num_rows: int = 8) -> list[Row]:
    return [{**row, "labels": torch.tensor(index % 3)} for index, row in enumerate(seq2seq_rows(num_rows))]


def arguments(folder: Path, **options: Any) -> Seq2SeqTrainingArguments:
    defaults = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    # AdamW's usual eps would make a weight with a gradient near 0 move by the sign of a rounding error.
    defaults |= {"max_steps": 3, "learning_rate": 1e-3, "per_device_train_batch_size": 2, "adam_epsilon": 1e-4}
    return Seq2SeqTrainingArguments(str(folder), **(defaults | options))


def logged(trainer: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def train(
    folder: Path,
    model: PreTrainedModel,
    rows: Any,
    trainer_class: type[Any] = OffloadSeq2SeqTrainer,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    trainer = trainer_class(model=model, args=arguments(folder, **options), train_dataset=rows, **(more or {}))
    trainer.train()
    return trainer


def losses_of_peft(
    model: Any, batch: dict[str, torch.Tensor], num_steps: int, *, learning_rate: float = 1e-2
) -> list[float]:
    """Train a `PeftModel` by torch alone, with the same batch in each step."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, eps=1e-4, weight_decay=0.0)
    losses = []
    for _ in range(num_steps):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 2e-5) -> None:
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name].float(), rtol=tolerance, atol=tolerance * 0.1, msg=name)
