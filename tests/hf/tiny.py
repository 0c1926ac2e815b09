"""Models and tokenizers of a few thousand parameters, made without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast, T5Config

from offloadkit.hf.source import ModelSource, resolve
from offloadkit.offload.unread import Materialise, is_unread, make_real

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "tree",
    "user",
    "assistant",
    "hello",
    "good",
    "bad",
]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"


def t5_config(**changes: Any) -> T5Config:
    """T5 v1.0: relu, head tied to the embeddings, a byte-level vocabulary."""
    values: dict[str, Any] = {
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": 384,
        "d_model": 24,
        "d_ff": 40,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    }
    return T5Config(**(values | changes))


def t5_v1_1_config(**changes: Any) -> T5Config:
    """T5 v1.1: gated-gelu, and an untied head."""
    return t5_config(**({"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False} | changes))


def llama_config(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 48,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**(values | changes))


def bert_config(**changes: Any) -> BertConfig:
    values: dict[str, Any] = {
        "architectures": ["BertForMaskedLM"],
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 48,
    }
    return BertConfig(**(values | changes))


def word_tokenizer(*, chat_template: str | None = None, pad_token: str | None = "<pad>") -> PreTrainedTokenizerFast:
    """One id a word, `<s>` in front and no end token, like Llama's tokenizers."""
    vocabulary = {word: index for index, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token=pad_token
    )
    fast.chat_template = chat_template
    return fast


def save_config(config: Any, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder


def load_model(model: Any, *, progress: bool = False, dtype: Any = None, device: str = "cpu", **how: Any) -> Any:
    """A model by name, folder or instance, with its weights. `how`: init, task, id2label, num_labels."""
    return source_of(model, **how).load(dtype=dtype, device=device, progress=progress)


def build_model(model: Any, *, dtype: Any = None, **how: Any) -> tuple[PreTrainedModel, Materialise | None]:
    """The same model with unread parameters, and the function that reads them; None if they have been read."""
    built = source_of(model, **how).load_lazily(dtype=dtype)
    return built, make_real if is_unread(built) else None


def source_of(model: Any, *, num_labels: int = 0, **how: Any) -> ModelSource:
    task, id2label = how.pop("task", None), how.pop("id2label", None)
    source = resolve(model, **how)
    labels = id2label or {index: f"LABEL_{index}" for index in range(num_labels)} or None
    return source.for_rows(task, labels) if task else source
