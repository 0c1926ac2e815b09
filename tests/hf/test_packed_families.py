"""Every decoder of the installed transformers either packs rows exactly or is refused by name."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import transformers

from offloadkit import OffloadConfig
from offloadkit.hf import packed
from offloadkit.hf.patches import patched
from tests.hf import families
from tests.hf.test_families import NEEDS, UNTRAINABLE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

NAMES = sorted(name for name, task in families.classes().items() if task == "causal" and name not in UNTRAINABLE)
LENGTHS = (7, 11, 1, 5)
REFUSED = {
    "BltForCausalLM": "layers, which mix tokens",
    "MambaForCausalLM": "layers, which mix tokens",
    "Qwen3NextForCausalLM": "layers, which mix tokens",
    "Lfm2MoeForCausalLM": "layers, which mix tokens",
    "BloomForCausalLM": "takes no position_ids",
    "RobertaForCausalLM": "begin at 1, not at 0",
    "XLMWithLMHeadModel": "makes its attention masks by itself",
    "OpenAIGPTLMHeadModel": "makes its attention masks by itself",
}
"""Some of the refused classes, and a part of the reason."""


def tiny_config(name: str) -> Any:
    """Without a router's loss, which packed batches refuse."""
    config: Any = families.tiny_config(name)
    for each in (config, config.get_text_config()):
        if hasattr(each, "output_router_logits"):
            each.output_router_logits = False
    return config


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_packed_exactly_or_refused(name: str) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{name} needs {NEEDS[name]}")
    torch.manual_seed(0)
    config = tiny_config(name)
    text = config.get_text_config()
    if isinstance(getattr(text, "sliding_window", None), int):
        text.sliding_window = 4
    model = getattr(transformers, name)(config).eval()
    why = packed.why_not_packed(model)
    if name in REFUSED:
        assert REFUSED[name] in str(why)
    if why is not None:
        return
    undo = patched(model, OffloadConfig(), kernels=False)
    rows = [families.tokens((1, length), seed) for seed, length in enumerate(LENGTHS)]
    inputs = {"input_ids": torch.cat(rows, dim=1), "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
    with torch.no_grad():
        own = model(**inputs, use_cache=False).logits
        alone = torch.cat([model(input_ids=row, use_cache=False).logits for row in rows], dim=1)
    undo()
    assert torch.allclose(own, alone, rtol=0, atol=1e-5)


def test_most_classes_are_packed() -> None:
    families_of_issue = (
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Gemma3ForCausalLM",
        "GPT2LMHeadModel",
    )
    for name in (*families_of_issue, "Qwen3MoeForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM"):
        model = getattr(transformers, name)(tiny_config(name))
        assert packed.why_not_packed(model) is None, name
