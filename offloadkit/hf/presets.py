"""Architectures known by name, so that planning needs no network and no licence.

Values are from each model's config.json on the hub, without Phi-4-mini's factors for long contexts; a test compares
parameter counts with the hub's. An instruct model has its base model's values. Training from a checkpoint reads the
checkpoint's own config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Preset:
    hub_name: str

    model_type: str

    values: dict[str, Any]

    def config(self) -> PreTrainedConfig:
        from transformers import AutoConfig

        return AutoConfig.for_model(self.model_type, **self.values)


# -- T5

_T5_SHAPE = ("d_model", "d_ff", "num_layers", "num_heads", "d_kv")
"""The decoder has as many layers as the encoder; num_heads x d_kv (head width) may differ from d_model."""
_V1_0 = {
    "small": (512, 2048, 6, 8, 64),
    "base": (768, 3072, 12, 12, 64),
    "large": (1024, 4096, 24, 16, 64),
    "3b": (1024, 16_384, 24, 32, 128),
    "11b": (1024, 65_536, 24, 128, 128),
}
_V1_1 = {
    "small": (512, 1024, 8, 6, 64),
    "base": (768, 2048, 12, 12, 64),
    "large": (1024, 2816, 24, 16, 64),
    "xl": (2048, 5120, 24, 32, 64),
    "xxl": (4096, 10_240, 24, 64, 64),
}
_SIZE_ALIASES = {"xl": "3b", "xxl": "11b"}


def _t5(hub_name: str, shape: tuple[int, ...], *, gated: bool) -> Preset:
    """`gated`: v1.1 and flan, with a gated-gelu feed forward and an untied head; v1.0 has relu and a tied head."""
    values = {
        "architectures": ["T5ForConditionalGeneration"],
        "vocab_size": 32_128,
        **dict(zip(_T5_SHAPE, shape, strict=True)),
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": not gated,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }
    return Preset(hub_name, "t5", values)


def _t5s() -> dict[str, Preset]:
    presets: dict[str, Preset] = {}
    for size, shape in _V1_0.items():
        preset = _t5(f"google-t5/t5-{size}", shape, gated=False)
        presets |= {f"t5-{size}": preset, preset.hub_name: preset}
    for family in ("t5-v1_1", "flan-t5"):
        for size, shape in _V1_1.items():
            preset = _t5(f"google/{family}-{size}", shape, gated=True)
            for name in {size, _SIZE_ALIASES.get(size, size)}:
                presets |= {f"{family}-{name}": preset, f"google/{family}-{name}": preset}
    return presets


# -- decoders

_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
_Values = dict[str, Any]
_LLAMA_2: _Values = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA_3: _Values = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
_LLAMA_3 |= {"bos_token_id": 128_000, "eos_token_id": 128_001}


def _stretched(factor: float, **more: Any) -> dict[str, Any]:
    """RoPE scaling of Llama 3.1 and 3.2, beyond Llama 3's 8,192 positions."""
    rope: dict[str, Any] = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = {"rope_scaling": rope | {"original_max_position_embeddings": 8192}}
    return _LLAMA_3 | {"max_position_embeddings": 131_072} | scaled | more


_QWEN: _Values = {"rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "bos_token_id": 151_643, "eos_token_id": 151_643}
_QWEN_2 = _QWEN | {"max_position_embeddings": 32_768, "use_sliding_window": False}
_QWEN_3 = _QWEN | {"max_position_embeddings": 40_960, "head_dim": 128, "eos_token_id": 151_645}
_TIED: _Values = {"tie_word_embeddings": True}
_GEMMA: _Values = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
}
_GEMMA |= {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0} | _TIED
_GEMMA_2 = _GEMMA | {"max_position_embeddings": 8192, "sliding_window": 4096}
_GEMMA_2 |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA_3 = _GEMMA | {"max_position_embeddings": 32_768, "sliding_window": 512}
_GEMMA_3 |= {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
_MISTRAL: _Values = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32_768}
_MISTRAL_1 = _MISTRAL | {"sliding_window": 4096, "rope_theta": 10_000.0}
_MISTRAL_3 = _MISTRAL | {"sliding_window": None, "rope_theta": 1_000_000.0}
_WIDE: _Values = {"head_dim": 128}
_PHI_3: _Values = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "sliding_window": 2047}
_PHI_3 |= {"bos_token_id": 1, "eos_token_id": 32_000, "pad_token_id": 32_000}
_PHI_4: _Values = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16_384,
    "rope_theta": 250_000.0,
    "sliding_window": None,
}
_PHI_4 |= {"bos_token_id": 100_257, "eos_token_id": 100_265, "pad_token_id": 100_349}
_PHI_4_MINI: _Values = {"rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "partial_rotary_factor": 0.75} | _TIED
_PHI_4_MINI |= {"bos_token_id": 199_999, "eos_token_id": 199_999, "pad_token_id": 199_999, "sliding_window": None}

_Rows = list[tuple[str, tuple[str, ...], tuple[int, ...], dict[str, Any]]]
"""Start of the hub name, its endings, the values of `_SHAPE`, other config values."""
_CHAT, _IT = ("", "-Instruct"), ("", "-it")
_DECODERS: dict[tuple[str, str], _Rows] = {
    ("llama", "LlamaForCausalLM"): [
        ("meta-llama/Llama-2-7b", ("-hf", "-chat-hf"), (4096, 11_008, 32, 32, 32, 32_000), _LLAMA_2),
        ("meta-llama/Llama-2-13b", ("-hf", "-chat-hf"), (5120, 13_824, 40, 40, 40, 32_000), _LLAMA_2),
        ("meta-llama/Llama-2-70b", ("-hf", "-chat-hf"), (8192, 28_672, 80, 64, 8, 32_000), _LLAMA_2),
        ("meta-llama/Meta-Llama-3-8B", _CHAT, (4096, 14_336, 32, 32, 8, 128_256), _LLAMA_3),
        ("meta-llama/Meta-Llama-3-70B", _CHAT, (8192, 28_672, 80, 64, 8, 128_256), _LLAMA_3),
        ("meta-llama/Llama-3.1-8B", _CHAT, (4096, 14_336, 32, 32, 8, 128_256), _stretched(8.0)),
        ("meta-llama/Llama-3.1-70B", _CHAT, (8192, 28_672, 80, 64, 8, 128_256), _stretched(8.0)),
        ("meta-llama/Llama-3.2-1B", _CHAT, (2048, 8192, 16, 32, 8, 128_256), _stretched(32.0, **_TIED)),
        ("meta-llama/Llama-3.2-3B", _CHAT, (3072, 8192, 28, 24, 8, 128_256), _stretched(32.0, **_TIED)),
        ("meta-llama/Llama-3.3-70B", ("-Instruct",), (8192, 28_672, 80, 64, 8, 128_256), _stretched(8.0)),
    ],
    ("qwen2", "Qwen2ForCausalLM"): [
        ("Qwen/Qwen2.5-0.5B", _CHAT, (896, 4864, 24, 14, 2, 151_936), _QWEN_2 | _TIED),
        ("Qwen/Qwen2.5-1.5B", _CHAT, (1536, 8960, 28, 12, 2, 151_936), _QWEN_2 | _TIED),
        ("Qwen/Qwen2.5-3B", _CHAT, (2048, 11_008, 36, 16, 2, 151_936), _QWEN_2 | _TIED),
        ("Qwen/Qwen2.5-7B", _CHAT, (3584, 18_944, 28, 28, 4, 152_064), _QWEN_2),
        ("Qwen/Qwen2.5-14B", _CHAT, (5120, 13_824, 48, 40, 8, 152_064), _QWEN_2),
        ("Qwen/Qwen2.5-32B", _CHAT, (5120, 27_648, 64, 40, 8, 152_064), _QWEN_2),
        ("Qwen/Qwen2.5-72B", _CHAT, (8192, 29_568, 80, 64, 8, 152_064), _QWEN_2),
    ],
    ("qwen3", "Qwen3ForCausalLM"): [
        ("Qwen/Qwen3-0.6B", ("", "-Base"), (1024, 3072, 28, 16, 8, 151_936), _QWEN_3 | _TIED),
        ("Qwen/Qwen3-1.7B", ("", "-Base"), (2048, 6144, 28, 16, 8, 151_936), _QWEN_3 | _TIED),
        ("Qwen/Qwen3-4B", ("", "-Base"), (2560, 9728, 36, 32, 8, 151_936), _QWEN_3 | _TIED),
        ("Qwen/Qwen3-8B", ("", "-Base"), (4096, 12_288, 36, 32, 8, 151_936), _QWEN_3),
        ("Qwen/Qwen3-14B", ("", "-Base"), (5120, 17_408, 40, 40, 8, 151_936), _QWEN_3),
        ("Qwen/Qwen3-32B", ("",), (5120, 25_600, 64, 64, 8, 151_936), _QWEN_3),
    ],
    ("gemma2", "Gemma2ForCausalLM"): [
        ("google/gemma-2-2b", _IT, (2304, 9216, 26, 8, 4, 256_000), _GEMMA_2),
        ("google/gemma-2-9b", _IT, (3584, 14_336, 42, 16, 8, 256_000), _GEMMA_2),
        (
            "google/gemma-2-27b",
            _IT,
            (4608, 36_864, 46, 32, 16, 256_000),
            _GEMMA_2 | {"head_dim": 128, "query_pre_attn_scalar": 144},
        ),
    ],
    ("gemma3_text", "Gemma3ForCausalLM"): [
        ("google/gemma-3-270m", _IT, (640, 2048, 18, 4, 1, 262_144), _GEMMA_3),
        ("google/gemma-3-1b", ("-pt", "-it"), (1152, 6912, 26, 4, 1, 262_144), _GEMMA_3),
    ],
    ("mistral", "MistralForCausalLM"): [
        ("mistralai/Mistral-7B", ("-v0.1", "-Instruct-v0.1"), (4096, 14_336, 32, 32, 8, 32_000), _MISTRAL_1),
        ("mistralai/Mistral-7B", ("-v0.3", "-Instruct-v0.3"), (4096, 14_336, 32, 32, 8, 32_768), _MISTRAL_3),
        (
            "mistralai/Mistral-Nemo",
            ("-Base-2407", "-Instruct-2407"),
            (5120, 14_336, 40, 32, 8, 131_072),
            _MISTRAL_3 | _WIDE | {"max_position_embeddings": 131_072},
        ),
        (
            "mistralai/Mistral-Small-24B",
            ("-Base-2501", "-Instruct-2501"),
            (5120, 32_768, 40, 32, 8, 131_072),
            _MISTRAL_3 | _WIDE | {"rope_theta": 100_000_000.0},
        ),
    ],
    ("phi3", "Phi3ForCausalLM"): [
        ("microsoft/Phi-3-mini", ("-4k-instruct",), (3072, 8192, 32, 32, 32, 32_064), _PHI_3),
        ("microsoft/Phi-3-medium", ("-4k-instruct",), (5120, 17_920, 40, 40, 10, 32_064), _PHI_3),
        ("microsoft/phi-4", ("",), (5120, 17_920, 40, 40, 10, 100_352), _PHI_4),
        ("microsoft/Phi-4-mini", ("-instruct",), (3072, 8192, 32, 24, 8, 200_064), _PHI_4_MINI),
    ],
}
_GPT_2_SHAPE = ("n_embd", "n_layer", "n_head")
_GPT_2 = {"gpt2": (768, 12, 12), "gpt2-medium": (1024, 24, 16), "gpt2-large": (1280, 36, 20), "gpt2-xl": (1600, 48, 25)}


def _decoders() -> dict[str, Preset]:
    presets: dict[str, Preset] = {}
    for (model_type, architecture), rows in _DECODERS.items():
        for begins, endings, shape, rest in rows:
            values = {"architectures": [architecture], **dict(zip(_SHAPE, shape, strict=True)), **rest}
            for ending in endings:
                preset = Preset(begins + ending, model_type, values)
                presets |= {preset.hub_name: preset, _short(preset.hub_name): preset}
            presets.setdefault(_short(begins), presets[begins + endings[0]])
    for name, shape in _GPT_2.items():
        values = {
            "architectures": ["GPT2LMHeadModel"],
            **dict(zip(_GPT_2_SHAPE, shape, strict=True)),
        }
        preset = Preset(f"openai-community/{name}", "gpt2", values)
        presets |= {name: preset, preset.hub_name: preset}
    return presets


def _short(hub_name: str) -> str:
    return hub_name.split("/")[1].lower().removeprefix("meta-")


PRESETS: dict[str, Preset] = _t5s() | _decoders()
"""Presets by short and long name. A prefix such as "llama-2-7b" or "mistral-7b" names its first model."""
