"""Every decoder and encoder-decoder of the installed transformers as a model of a few thousand parameters.

A config is made tiny by rules on the names of its fields; `OVERRIDES` has what the rules do not know.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any, cast

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

VOCAB = 96
LAYERS = re.compile(
    r"^(num_(hidden_|decoder_|encoder_)?layers|n_layers?|(\w+_)?(encoder|decoder)_layers|num_blocks|depth|layers"
    r"|conf_num_hidden_layers|num_global_layers)$"
)
RULES = [
    (re.compile(pattern), value)
    for pattern, value in (
        (r"(^|_)codebook_size$", 64),
        (r"(^|_)(vocab_size(_per_layer_input)?|hash_byte_group_vocab)$", VOCAB),
        (r"(kv_heads|key_value_heads|linear_num_key_heads|kv_n_heads)$", 2),
        (r"(heads|n_head)$", 4),
        (r"(head_dim|kv_channels|d_kv|dim_head|attention_head_size|rotary_dim|d_head)$", 8),
        (r"lora_rank$", 16),
        (
            (
                r"^(hidden_size(_global)?|d_model|n_embd|dim_model|embedding_size|\w*hidden_dim|backbone_hidden_size"
                r"|word_embed_proj_dim|attention_hidden_size|lru_width|emb_dim|embed_dim|embedding_dim|state_size"
                r"|mamba_d_state|ssm_state_size|(in|out)put_(embedding_)?(size|dim|channels)|out_hidden_size|\w+_embed_dim"
                r"|output_proj_dims|projector_\w+_dim|vision_output_dim|router_hidden_size|hidden_size_per_layer_input)$"
            ),
            32,
        ),
        (
            r"(intermediate_size|ffn_dim|d_ff|dff|dim_ff|n_inner|ffn_hidden_size|mlp_dim|size_mlp|d_inner|forward_size)$",
            48,
        ),
        (r"^(moe_)?(num_|n_)(local_|routed_)?experts$", 4),
        (r"^(num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts|n_group|topk_group)$", 2),
        (
            r"(position_embeddings|n_positions|n_ctx|max_seq_len|(source|target)_positions|context_length|max_pos_emb)$",
            64,
        ),
        (r"(chunk_size|attention_window|zero_expert_num|axial_pos_shape)$", 4),
        (r"(conv_channels|out_channel|context_size|block_multiple_of)$", 32),
        (r"^downsample_hidden_size$", 8),
        (r"^mamba_d_ssm$", 64),
        (r"^image_size$", 28),
    )
]
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}

_EXPERTS = {"num_experts_per_tok": 2}
_STARTS = {"decoder_start_token_id": 0}
_FEW_FILTERS = {"num_filters": 1, "depths": [1] * 7}
_HYBRID = ["linear_attention", "full_attention"]
_SHARED_KEYS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "Gemma4AssistantForCausalLM": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
}
"""What a config must be given: its own defaults are refused."""
OVERRIDES: dict[str, dict[str, Any]] = {
    "Gemma4AssistantForCausalLM": {"text_config": {"num_kv_shared_layers": 2}},
    "Gemma4UnifiedAssistantForCausalLM": {"text_config": {"num_kv_shared_layers": 2}},
    "Gemma4UnifiedForCausalLM": {"global_head_dim": 16},
    "Gemma4UnifiedForConditionalGeneration": {"text_config": {"global_head_dim": 16}},
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "DoryForCausalLM": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "RecurrentGemmaForCausalLM": {"block_types": ["recurrent", "attention"]},
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "DeepseekV2ForCausalLM": _EXPERTS,
    "Dots1ForCausalLM": _EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1},
    "Gemma3nForCausalLM": _SHARED_KEYS
    | {"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]},
    "Gemma4ForCausalLM": _SHARED_KEYS
    | {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "global_head_dim": 16,
    },
    "Gemma4ForConditionalGeneration": {"text_config": _SHARED_KEYS | {"global_head_dim": 16}},
    "Dots3NoteForCausalLM": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "GraniteMoeHybridForCausalLM": {"layer_types": _HYBRID},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 8},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 8},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba2ForCausalLM": {"num_heads": 8},
    "MinistralForCausalLM": {"head_dim": 8},
    "NemotronForCausalLM": {"head_dim": 8, "num_key_value_heads": 2},
    "NemotronHForCausalLM": {"n_groups": 2},
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "ReformerModelWithLMHead": {
        "is_decoder": True,
        "hash_seed": 0,
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
    },
    # transformers fails with these routers' losses
    "FlintForCausalLM": {"output_router_logits": False},
    "NllbMoeForConditionalGeneration": {"output_router_logits": False},
    "GitForCausalLM": {"vision_config": {"patch_size": 14}},
    "MoshiForCausalLM": {"audio_encoder_config": {"upsample_groups": 32, "num_filters": 4, "num_quantizers": 8}},
    "Nemotron3_5TranscribeForConditionalGeneration": {
        "audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 32}}},
        "text_config": {"n_groups": 2},
    },
    "OmniASRForConditionalGeneration": {"audio_config": {"conv_dim": [8] * 7}},
    "VibeVoiceAsrForConditionalGeneration": {
        "acoustic_tokenizer_chunk_size": 6400,
        "acoustic_tokenizer_encoder_config": _FEW_FILTERS,
        "semantic_tokenizer_encoder_config": _FEW_FILTERS,
    },
    "xLSTMForCausalLM": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "XmodForCausalLM": {"default_language": "en_XX"},
    "ZambaForCausalLM": {"layers_block_type": ["hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 3},
    "EncoderDecoderModel": _STARTS | {"pad_token_id": 0},
    "LongT5ForConditionalGeneration": _STARTS,
    "SwitchTransformersForConditionalGeneration": _STARTS,
    "T5ForConditionalGeneration": _STARTS,
}


def classes() -> dict[str, str]:
    """The task of each class, by its name."""
    found = dict.fromkeys(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), "causal")
    return found | dict.fromkeys(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values(), "seq2seq")


def tiny_config(name: str) -> PreTrainedConfig:
    cls = getattr(transformers, name).config_class
    values = merged(shrunk(cls(**DEFAULTS.get(name, {}))), OVERRIDES.get(name, {}))
    return cast("PreTrainedConfig", cls(**values))


def merged(values: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    found = dict(values)
    for name, value in more.items():
        found[name] = (
            merged(found[name], value) if isinstance(value, dict) and isinstance(found.get(name), dict) else value
        )
    return found


def shrunk(config: PreTrainedConfig, *, inner: bool = False) -> dict[str, Any]:
    """The arguments of a small config like `config`. A config `inner` another one may differ from its class."""
    found: dict[str, Any] = {}
    fields = {field.name: field for field in dataclasses.fields(type(config))}
    number, kept = kept_layers(config, fields)
    for name, field in fields.items():
        value = vars(config).get(name)
        if isinstance(value, PreTrainedConfig):
            found[name] = shrunk(value, inner=True) | ({"model_type": value.model_type} if value.model_type else {})
            continue
        default = value if inner else field.default
        if name in TOKENS:
            if isinstance(default, int):
                found[name] = TOKENS[name]
        elif name in kept:
            found[name] = kept[name]
        elif name == "output_router_logits":
            found[name] = True  # the loss of the router is a part of the loss
        elif isinstance(default, int) and not isinstance(default, bool):
            if name.endswith(("token_id", "token_index")) and default >= VOCAB:
                found[name] = VOCAB - 1
            elif LAYERS.search(name):
                found[name] = min(default, number)
            else:
                small = next((value for pattern, value in RULES if pattern.search(name)), default)
                if small < default:
                    found[name] = small
                elif default != field.default:
                    found[name] = default
    if "kv_lora_rank" in fields and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found


def kept_layers(config: PreTrainedConfig, fields: Any) -> tuple[int, dict[str, list[Any]]]:
    """How many layers, and the lists by layer: the first layer of each kind."""
    number = vars(config).get("num_hidden_layers")
    lists = {}
    for name in fields:
        value = vars(config).get(name)
        if isinstance(value, list | tuple) and len(value) == number and len({*map(repr, value)}) <= 4:
            lists[name] = list(value)
    if not lists:
        return 2, {}
    first = {}
    for index, kind in enumerate(zip(*lists.values(), strict=True)):
        first.setdefault(repr(kind), index)
    indices = sorted(first.values())
    indices = indices if len(indices) > 1 else [0, 1]
    return len(indices), {name: [value[i] for i in indices] for name, value in lists.items()}


def tokens(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randint(5, VOCAB - 6, shape, generator=torch.Generator().manual_seed(seed))


def batch(name: str, length: int, seed: int) -> dict[str, Any]:
    """Two rows of `length` tokens, as the class trains on them."""
    if name in ("MusicgenForCausalLM", "MusicgenMelodyForCausalLM"):
        ids = tokens((8, length), seed)
        return {"input_ids": ids, "labels": ids.view(2, 4, length).mT.contiguous()}
    ids = tokens((2, length), seed)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
    if seed and "attention_mask" in inspect.signature(getattr(transformers, name).forward).parameters:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][1, -2:], ids[1, -2:], inputs["labels"][1, -2:] = 0, 0, -100
    generator = torch.Generator().manual_seed(seed)
    if name == "GitForCausalLM":
        inputs["pixel_values"] = torch.randn(2, 3, 28, 28, generator=generator)
    if name == "VoxtralRealtimeForConditionalGeneration":
        inputs["input_features"] = torch.randn(2, 128, 8 * length, generator=generator)
    if name == "BltForCausalLM":
        inputs["use_cache"] = False  # its default fails in transformers: BltConfig has no num_hidden_layers
    return inputs
