"""A micro-batch with images from a model's config alone, to plan for before the rows and the processor are known.

Each row has images in at most half of its tokens, one if a family's images have a fixed number of tokens, and text
elsewhere. Names and shapes are those of the processors of transformers.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import torch

from offloadkit.hf.longest import unknown_pixels
from offloadkit.hf.tokenize import IGNORED

_META = torch.device("meta")


def assumed_batch(config: Any, rows: int, length: int) -> dict[str, torch.Tensor] | None:
    """Arguments of the model's forward: tokens and labels int64 [rows, length], and pixel values on the meta device.

    None if a row has no room for an image. A family with other names or shapes cannot run them, and is then planned
    without activations.
    """
    vision, each = config.vision_config, length // 2
    if vision.model_type == "pixtral":
        num_tokens, more = _sized(config, rows, each)
    elif hasattr(vision, "spatial_merge_size") and hasattr(vision, "temporal_patch_size"):
        num_tokens, more = _grids(vision, rows, each)
    elif hasattr(vision, "pooling_kernel_size"):
        num_tokens, more = _pooled(vision, rows, each)
    else:
        num_tokens, more = _squares(config, rows, each)
    before = [token for name in ("vision_start_token_id", "boi_token_id") if (token := getattr(config, name, None))]
    if len(before) + num_tokens >= length:
        return None
    image = getattr(config, "image_token_id", None)
    image = config.image_token_index if image is None else image
    ids = torch.zeros(rows, length, dtype=torch.int64)
    if image == 0:
        ids += 1
    ids[:, : len(before)] = torch.tensor(before, dtype=torch.int64)
    ids[:, len(before) : len(before) + num_tokens] = image
    types = (ids == image).long()
    if config.model_type.startswith("gemma3"):
        more["token_type_ids"] = types
    elif {"image_grid_thw", "image_position_ids"} & more.keys():
        more["mm_token_type_ids"] = types
    labels = ids.masked_fill(ids == image, IGNORED)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels} | more


def _grids(vision: Any, rows: int, most: int) -> tuple[int, dict[str, torch.Tensor]]:
    """Square images of any size, whose patches are in one tensor, as of Qwen2.5-VL."""
    side, merge = max(1, isqrt(most)), vision.spatial_merge_size
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    values = channels * vision.temporal_patch_size * vision.patch_size**2
    patches = rows * (side * merge) ** 2
    grid = torch.tensor([[1, side * merge, side * merge]] * rows)
    return side**2, {"pixel_values": torch.empty(patches, values, device=_META), "image_grid_thw": grid}


def _sized(config: Any, rows: int, most: int) -> tuple[int, dict[str, torch.Tensor]]:
    """Square images of any size, as of Pixtral and Mistral 3."""
    side, patch = max(1, isqrt(most)), config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    pixels = torch.empty(rows, 3, side * patch, side * patch, device=_META)
    return side**2, {"pixel_values": pixels, "image_sizes": torch.tensor([[side * patch] * 2] * rows)}


def _pooled(vision: Any, rows: int, most: int) -> tuple[int, dict[str, torch.Tensor]]:
    """Square images of at most 16 x 16 tokens, with the places of their patches, as of Gemma 4."""
    side = max(1, min(16, isqrt(most)))
    patches = side * vision.pooling_kernel_size
    along = torch.arange(patches)
    places = torch.stack(torch.meshgrid(along, along, indexing="xy"), -1).reshape(1, patches**2, 2)
    pixels = torch.empty(rows, patches**2, 3 * vision.patch_size**2, device=_META)
    return side**2, {"pixel_values": pixels, "image_position_ids": places.repeat(rows, 1, 1)}


def _squares(config: Any, rows: int, most: int) -> tuple[int, dict[str, torch.Tensor]]:
    """Images of the config's size: one, or as many parts of an image as have room, as of Idefics 3 and SmolVLM."""
    vision = config.vision_config
    size, patch = (each if isinstance(each, int) else each[0] for each in (vision.image_size, vision.patch_size))
    if hasattr(config, "scale_factor"):
        num_tokens = (size // patch) ** 2 // config.scale_factor**2
        parts = max(1, most // num_tokens)
        seen = torch.ones(rows, parts, size, size, dtype=torch.bool)
        pixels = unknown_pixels((rows, parts, 3, size, size), torch.float32)
        return parts * num_tokens, {"pixel_values": pixels, "pixel_attention_mask": seen}
    named = (getattr(config, name, None) for name in ("mm_tokens_per_image", "image_seq_length"))
    num_tokens = next((each for each in named if each), (size // patch) ** 2)
    return num_tokens, {"pixel_values": torch.empty(rows, 3, size, size, device=_META)}
