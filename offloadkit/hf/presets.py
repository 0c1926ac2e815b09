"""The T5 family's shapes, so that a plan or `init="random"` needs no network.

Source: the `config.json` of each checkpoint on the hub (google-t5/*, google/t5-v1_1-*, google/flan-t5-*).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """One T5 architecture under its name on the hub."""

    hub_name: str
    """Where the pretrained weights and the tokenizer are."""

    d_model: int
    d_ff: int
    num_layers: int
    """Blocks of the encoder, and again of the decoder."""

    num_heads: int
    d_kv: int
    """Width of one attention head; heads x d_kv need not be d_model."""

    gated: bool
    """v1.1 and flan: gated-gelu feed forward and a head of its own; v1.0: relu and the head tied to the embeddings."""

    def config_values(self) -> dict[str, Any]:
        """Keyword arguments of `transformers.T5Config`."""
        return {
            "architectures": ["T5ForConditionalGeneration"],
            "vocab_size": 32_128,
            "d_model": self.d_model,
            "d_ff": self.d_ff,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "d_kv": self.d_kv,
            "feed_forward_proj": "gated-gelu" if self.gated else "relu",
            "tie_word_embeddings": not self.gated,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
        }


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


def _all_presets() -> dict[str, Preset]:
    presets: dict[str, Preset] = {}
    for size, shape in _V1_0.items():
        preset = Preset(f"google-t5/t5-{size}", *shape, gated=False)
        presets |= {f"t5-{size}": preset, preset.hub_name: preset}
    for family in ("t5-v1_1", "flan-t5"):
        for size, shape in _V1_1.items():
            preset = Preset(f"google/{family}-{size}", *shape, gated=True)
            for name in {size, _SIZE_ALIASES.get(size, size)}:
                presets |= {f"{family}-{name}": preset, f"google/{family}-{name}": preset}
    return presets


PRESETS: dict[str, Preset] = _all_presets()
"""Every name that is known without a network, short and long."""


def close_names(name: str) -> list[str]:
    """Up to three preset names that look like `name`, the closest first."""
    return difflib.get_close_matches(name.lower(), sorted(PRESETS), n=3, cutoff=0.6)
