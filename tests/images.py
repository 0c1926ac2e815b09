"""Tiny models that see images, their processors, and pictures of two colours with their names."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

_CONTENT = (
    "{%% for part in message['content'] %%}{%% if part['type'] == 'image' %%}%s"
    "{%% else %%}{{ part['text'] | trim }}{%% endif %%}{%% endfor %%}"
)
_GEMMA = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' }}"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}{{ '\n' }}"
    + _CONTENT % "<start_of_image>"
    + "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_QWEN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    + _CONTENT % "<|vision_start|><|image_pad|><|vision_end|>"
    + "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_IDEFICS = (
    "{{ '<|im_start|>' }}{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    + _CONTENT % "<image>"
    + "{{ '<end_of_utterance>\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""As the models' own templates write conversations."""


def _tokenizer(named: dict[str, str], others: list[str]) -> PreTrainedTokenizerFast:
    """A token for each byte, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    bytes_only.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", extra_special_tokens=named
    )
    made.add_special_tokens({"additional_special_tokens": others})
    return made  # type: ignore[no-any-return]


_TEXT: dict[str, Any] = {
    "vocab_size": 288, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 258, "bos_token_id": 256,
    "eos_token_id": 257,
}  # fmt: skip
_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "patch_size": 2}


def _ids(tokenizer: Any, **names: str) -> dict[str, int]:
    return {key: tokenizer.convert_tokens_to_ids(name) for key, name in names.items()}


def gemma() -> tuple[PreTrainedModel, Any]:
    """Images of 8 x 8 pixels and 4 tokens."""
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _tokenizer(named, ["<start_of_turn>", "<end_of_turn>"])
    images: Any = Gemma3ImageProcessorPil(size={"height": 8, "width": 8})
    processor = transformers.Gemma3Processor(images, tokenizer, chat_template=_GEMMA, image_seq_length=4)
    ids = _ids(tokenizer, image_token_index=named["image_token"], boi_token_index=named["boi_token"])
    ids |= _ids(tokenizer, eoi_token_index=named["eoi_token"])
    config = transformers.Gemma3Config(
        text_config=_TEXT | {"sliding_window": 64, "query_pre_attn_scalar": 16},
        vision_config=_VISION | {"num_hidden_layers": 2, "image_size": 8, "vision_use_head": False},
        mm_tokens_per_image=4, pad_token_id=258, **ids,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Gemma3ForConditionalGeneration(config), processor


class _OfImages(transformers.Qwen2_5_VLProcessor):
    """Without the processor of videos, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        is_video = argument_name == "video_processor"
        return None if is_video else super().check_argument_for_proper_class(argument_name, argument)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        self.tokenizer.save_pretrained(save_directory)
        self.image_processor.save_pretrained(save_directory)


def qwen() -> tuple[PreTrainedModel, Any]:
    """A token for each 4 x 4 pixels; at most 16."""
    names = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _tokenizer({}, names)
    size = {"shortest_edge": 16, "longest_edge": 256}
    images: Any = Qwen2VLImageProcessorPil(patch_size=2, merge_size=2, temporal_patch_size=2, size=size)
    processor = _OfImages(images, tokenizer, None, chat_template=_QWEN)
    ids = _ids(tokenizer, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>")
    ids |= _ids(tokenizer, vision_start_token_id="<|vision_start|>", vision_end_token_id="<|vision_end|>")
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 2,
        "window_size": 8, "fullatt_block_indexes": [1], "spatial_merge_size": 2,
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(text_config=_TEXT | {"rope_parameters": rope}, vision_config=vision, **ids)
    torch.manual_seed(0)
    return transformers.Qwen2_5_VLForConditionalGeneration(config), processor


def idefics() -> tuple[PreTrainedModel, Any]:
    """Images of 8 x 8 pixels and 4 tokens, which are cut into such parts if they are larger."""
    tokenizer = _tokenizer({}, ["<|im_start|>", "<end_of_utterance>"])
    largest = {"longest_edge": 8}
    images: Any = Idefics3ImageProcessorPil(size={"longest_edge": 16}, max_image_size=largest)
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=_IDEFICS)
    config = transformers.Idefics3Config(
        text_config=_TEXT | {"model_type": "llama"}, vision_config=_VISION | {"num_hidden_layers": 2, "image_size": 8},
        scale_factor=2, pad_token_id=258, **_ids(tokenizer, image_token_id="<image>"),
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Idefics3ForConditionalGeneration(config), processor


FAMILIES = {"gemma": gemma, "qwen": qwen, "idefics": idefics}


def picture(red: bool, width: int = 8, height: int = 8) -> Image.Image:
    values = np.zeros((height, width, 3), np.uint8)
    values[..., 0 if red else 2] = 250
    return Image.fromarray(values)


def rows(number: int = 8) -> list[dict[str, Any]]:
    """Conversations about one picture each, of two sizes, and about two pictures in every fourth row."""
    found = []
    for index in range(number):
        red = index % 2 == 0
        size = (8, 8) if index % 3 else (16, 8)
        asked: list[dict[str, Any]] = [{"type": "image", "image": picture(red, *size)}]
        asked.append({"type": "text", "text": "colour?" + "?" * (index % 5)})
        messages = [{"role": "user", "content": asked}]
        messages.append({"role": "assistant", "content": [{"type": "text", "text": "red" if red else "blue sky"}]})
        if index % 4 == 3:
            again = [{"type": "text", "text": "and"}, {"type": "image", "image": picture(not red)}]
            messages.append({"role": "user", "content": again})
            messages.append({"role": "assistant", "content": [{"type": "text", "text": "blue sky" if red else "red"}]})
        found.append({"messages": messages})
    return found
