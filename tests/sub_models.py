"""Tiny models with sub-models for images and sound, and micro-batches as their processors make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 120
IMAGE = 100
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": 99,
    "vision_start_token_id": 101,
    "vision_end_token_id": 102,
}


def qwen2_5_vl() -> PreTrainedModel:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {
        "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 2,
        "window_size": 8, "fullatt_block_indexes": [1], "spatial_merge_size": 2,
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=_TEXT | {"rope_parameters": rope}, vision_config=vision, **_QWEN_IDS
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> PreTrainedModel:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True, "rope_theta": 10000.0}
    vision = {
        "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 2,
        "spatial_merge_size": 2, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config=_TEXT | {"rope_parameters": rope}, vision_config=vision, **_QWEN_IDS
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def qwen_batch(grids: list[tuple[int, int, int]], words: int = 6) -> dict[str, Any]:
    """One image for each row. `pixel_values` has the patches of all images: [patches, values of a patch]."""
    generator = torch.Generator().manual_seed(len(grids) + words)
    rows = []
    for grid in grids:
        merged = grid[0] * grid[1] * grid[2] // 4
        text = torch.randint(3, 90, (words,), generator=generator).tolist()
        rows.append([101, *[IMAGE] * merged, 102, *text])
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    patches = sum(t * h * w for t, h, w in grids)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "pixel_values": torch.randn(patches, 3 * 2 * 2 * 2, generator=generator),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "labels": ids.masked_fill((ids == 0) | (ids == IMAGE), -100),
    }


def gemma3() -> PreTrainedModel:
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 8,
        "patch_size": 2, "vision_use_head": False,
    }  # fmt: skip
    text = _TEXT | {"sliding_window": 8, "query_pre_attn_scalar": 16}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=101,
        eoi_token_index=102,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


def gemma4() -> PreTrainedModel:
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "patch_size": 2, "pooling_kernel_size": 2,
        "position_embedding_size": 64,
    }  # fmt: skip
    text = _TEXT | {"sliding_window": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 16}
    ids = {"boi_token_id": 101, "eoi_token_id": 102, "image_token_id": IMAGE, "video_token_id": 99}
    ids |= {"boa_token_id": 103, "eoa_token_index": 104, "audio_token_id": 98}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **ids)
    return transformers.Gemma4ForConditionalGeneration(config)


def smolvlm() -> PreTrainedModel:
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 8,
        "patch_size": 2,
    }  # fmt: skip
    config = transformers.SmolVLMConfig(
        text_config=_TEXT | {"model_type": "llama"}, vision_config=vision, image_token_id=IMAGE, scale_factor=2,
        pad_token_id=0,
    )  # fmt: skip
    return transformers.SmolVLMForConditionalGeneration(config)


def whisper() -> PreTrainedModel:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=3, decoder_layers=2, encoder_ffn_dim=48,
        decoder_ffn_dim=48, encoder_attention_heads=2, decoder_attention_heads=2, max_source_positions=24,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.0,
        suppress_tokens=[], begin_suppress_tokens=[],
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def vit() -> PreTrainedModel:
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2, image_size=8, patch_size=2,
        num_labels=3,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def clip() -> PreTrainedModel:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = shape | {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 2, "bos_token_id": 1}
    config = transformers.CLIPConfig(
        text_config=text, vision_config=shape | {"image_size": 8, "patch_size": 2}, projection_dim=16
    )
    return transformers.CLIPModel(config)


def wav2vec2() -> PreTrainedModel:
    config = transformers.Wav2Vec2Config(
        vocab_size=32, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48,
        conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0,
        final_dropout=0.0, layerdrop=0.0, mask_time_length=2, mask_time_prob=0.2, pad_token_id=0,
        ctc_loss_reduction="mean",
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


def _generator(rows: int) -> torch.Generator:
    return torch.Generator().manual_seed(rows)


def _ids(rows: int, words: int, images: int, tokens: int) -> torch.Tensor:
    """[rows, length]; each row begins with the places of its images, and the last row has padding."""
    before = [token for _ in range(images) for token in (101, *[IMAGE] * tokens, 102)]
    ids = torch.randint(3, 90, (rows, len(before) + words), generator=_generator(rows))
    ids[:, : len(before)] = torch.tensor(before, dtype=torch.int64)
    ids[-1, -2:] = 0
    return ids


def _with_labels(ids: torch.Tensor) -> dict[str, Any]:
    labels = ids.masked_fill((ids == 0) | (ids == IMAGE), -100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def gemma3_batch(rows: int, words: int = 6) -> dict[str, Any]:
    ids = _ids(rows, words, 1, 4)
    pixels = torch.randn(rows, 3, 8, 8, generator=_generator(rows))
    return _with_labels(ids) | {"pixel_values": pixels, "token_type_ids": (ids == IMAGE).long()}


def gemma4_batch(rows: int, words: int = 6) -> dict[str, Any]:
    """Images of 4 x 4 patches, which pooling makes 4 tokens."""
    ids = _ids(rows, words, 1, 4)
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(1, 16, 2)
    pixels = torch.rand(rows, 16, 12, generator=_generator(rows))
    more = {"image_position_ids": places.repeat(rows, 1, 1), "mm_token_type_ids": (ids == IMAGE).long()}
    return _with_labels(ids) | {"pixel_values": pixels} | more


def smolvlm_batch(rows: int, words: int = 6) -> dict[str, Any]:
    """Two images for each row."""
    ids = _ids(rows, words, 2, 4)
    pixels = torch.randn(rows, 2, 3, 8, 8, generator=_generator(rows))
    return _with_labels(ids) | {"pixel_values": pixels, "pixel_attention_mask": torch.ones(rows, 2, 8, 8).bool()}


def whisper_batch(rows: int, words: int = 6) -> dict[str, Any]:
    features = torch.randn(rows, 8, 48, generator=_generator(rows))
    return {"input_features": features, "labels": torch.randint(3, 90, (rows, words), generator=_generator(rows))}


def vit_batch(rows: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=_generator(rows)), "labels": torch.arange(rows) % 3}


def clip_batch(rows: int, words: int = 6) -> dict[str, Any]:
    ids = torch.randint(3, 90, (rows, words), generator=_generator(rows))
    ids[:, -1] = 2
    pixels = torch.randn(rows, 3, 8, 8, generator=_generator(rows))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, "return_loss": True}


def wav2vec2_batch(rows: int, samples: int = 400) -> dict[str, Any]:
    sound = torch.randn(rows, samples, generator=_generator(rows))
    mask = torch.ones(rows, samples, dtype=torch.int64)
    mask[-1, -samples // 4 :] = 0
    labels = torch.randint(1, 30, (rows, 3), generator=_generator(rows))
    labels[-1, -1] = -100
    return {"input_values": sound, "attention_mask": mask, "labels": labels}


def qwen_rows(rows: int) -> dict[str, Any]:
    return qwen_batch([(1, 4, 4 * (1 + row)) for row in range(rows)])


FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[int], dict[str, Any]]]] = {
    "qwen2.5-vl": (qwen2_5_vl, qwen_rows),
    "qwen3-vl": (qwen3_vl, qwen_rows),
    "gemma3": (gemma3, gemma3_batch),
    "gemma4": (gemma4, gemma4_batch),
    "smolvlm": (smolvlm, smolvlm_batch),
    "whisper": (whisper, whisper_batch),
    "vit": (vit, vit_batch),
    "clip": (clip, clip_batch),
    "wav2vec2": (wav2vec2, wav2vec2_batch),
}
"""A maker of the model, and of a micro-batch of so many rows, by name of the family."""
