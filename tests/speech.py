"""A tiny Whisper, its processor, and tones with their names."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AddedToken,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

RATE = 16_000
START = 257


def processor(mel: int = 8) -> WhisperProcessor:
    """A window of a second, 100 frames, and a token for each byte."""
    tokenizer = WhisperTokenizer(
        vocab={char: index for index, char in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]
    )
    tokenizer.add_tokens([AddedToken(f"<|{name}|>", special=True) for name in ("startoftranscript", "notimestamps")])
    made: Any = WhisperProcessor(WhisperFeatureExtractor(feature_size=mel, chunk_length=1), tokenizer)
    made.tokenizer.set_prefix_tokens()
    return made


def model() -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=272, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48,
        decoder_ffn_dim=48, encoder_attention_heads=2, decoder_attention_heads=2, max_source_positions=50,
        max_target_positions=32, pad_token_id=256, bos_token_id=256, eos_token_id=256, decoder_start_token_id=START,
        dropout=0.0, suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def rows(number: int = 8, seconds: float = 0.6, rate: int = RATE) -> list[dict[str, Any]]:
    """Tones of two pitches and their names."""
    found = []
    for index in range(number):
        times = np.arange(int(rate * (seconds + 0.01 * index))) / rate
        wave = np.sin(2 * np.pi * (300 if index % 2 else 2000) * times).astype(np.float32)
        found.append({"audio": {"array": wave, "sampling_rate": rate}, "text": "low" if index % 2 else "high pitch"})
    return found
