"""Blocks that keep only matmuls and attention on the GPU: bytes, seconds, and equal gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.hf.patches import fuse
from offloadkit.offload.recompute import cheaply_recomputed_in_backward, recomputed_in_backward
from tests.hf.tiny import llama_config

SHAPE: dict[str, Any] = {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 28, "num_key_value_heads": 4, "attn_implementation": "sdpa"}
"""A block of Qwen2.5-7B."""
RESULTS = 3584 + 2 * 512 + 3584 + 3584 + 2 * 18_944 + 3584
"""Elements of the results of its matmuls and attention, for each token."""
ROWS, TOKENS = 8, 1024
Run = Callable[..., Any]


def keep(_: torch.device, function: Run, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def block_and_inputs(device: str) -> tuple[Run, torch.Tensor, Any]:
    config = Qwen2Config(**SHAPE)
    block = Qwen2DecoderLayer(config, 0).to(device, torch.bfloat16).train()
    fuse(block)
    x = torch.randn(ROWS, TOKENS, SHAPE["hidden_size"], device=device, dtype=torch.bfloat16, requires_grad=True)
    return block, x, Qwen2RotaryEmbedding(config).to(device)(x, torch.arange(TOKENS, device=device)[None])


def kept_bytes(run: Run, block: Run, x: torch.Tensor, positions: Any) -> int:
    """Bytes that are alive after forward."""
    before = torch.cuda.memory_allocated()
    output = run(x.device, block, x, position_embeddings=positions)
    alive = torch.cuda.memory_allocated() - before
    output.sum().backward()
    return alive


def seconds(run: Run, block: Run, x: torch.Tensor, positions: Any) -> float:
    """The fastest of several rounds of forward and backward."""
    best = float("inf")
    for _ in range(8):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(3):
            run(x.device, block, x, position_embeddings=positions).backward(x.detach())
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / 3)
    return best


def test_a_block_keeps_the_results_of_its_matmuls_and_attention() -> None:
    given = block_and_inputs("cuda")
    kept_bytes(keep, *given)  # cuBLAS's workspaces
    cheap = kept_bytes(cheaply_recomputed_in_backward, *given)
    assert 2 * RESULTS <= cheap / (ROWS * TOKENS) <= 1.05 * 2 * RESULTS
    assert kept_bytes(recomputed_in_backward, *given) < 0.1 * cheap < 0.1 * kept_bytes(keep, *given)


@pytest.mark.usefixtures("alone")
def test_a_block_is_about_as_fast_as_with_everything_kept() -> None:
    given = block_and_inputs("cuda")
    kept, cheap, recomputed = (
        seconds(run, *given) for run in (keep, cheaply_recomputed_in_backward, recomputed_in_backward)
    )
    assert cheap <= 1.05 * kept
    assert cheap <= 0.9 * recomputed


def trained(placement: Placement, device: str, accumulation: int) -> list[torch.Tensor]:
    """Losses and weights of a Llama whose matmuls are kept, after some steps."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = LlamaForCausalLM(llama_config(num_hidden_layers=4, attention_dropout=0.1, **shape))
    config = OffloadConfig(
        learning_rate=1e-2, placement=placement, gradient_accumulation=accumulation, working_dtype="bf16"
    )
    found = []
    with OffloadEngine(model, config, device=device) as engine:
        engine.train()
        torch.manual_seed(2)
        for _ in range(3 * accumulation):
            ids = torch.randint(3, 64, (2, 48)).to(device)
            loss = engine(input_ids=ids, labels=ids).loss
            found.append(loss.detach().float().cpu())
            engine.backward(loss)
            engine.step()
        return [*found, *(weight.cpu().clone() for weight in engine.state_dict()["module"].values())]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_no_placement_changes_a_number(accumulation: int) -> None:
    expected = trained(Placement(), "cuda", accumulation)
    in_vram: Any = {"states": "vram", "gradients": "vram", "step": "gpu"}
    for placement in (
        Placement(activations="cheap"),
        Placement("ram", activations="cheap"),
        Placement(**in_vram, activations="cheap"),
    ):
        found = trained(placement, "cuda", accumulation)
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True)), placement
