"""Machines, layers and micro-batches for the tests of the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.cases import SHAPES
from offloadkit.engine.tracing import trace_micro_batch
from offloadkit.facts.config import OffloadConfig
from offloadkit.facts.hardware import Hardware
from offloadkit.offload.layers import flat_layers
from offloadkit.optim.table import LayerKind
from offloadkit.planner import LayerShape, MicroBatch, Stage

GIB = 1 << 30

H200 = Hardware(
    device="cuda:0",
    gpu_name="NVIDIA H200",
    compute_capability=(9, 0),
    supports_bf16=True,
    can_pin=True,
    vram_total_bytes=139 * GIB,
    vram_free_bytes=138 * GIB,
    vram_context_bytes=int(0.79 * GIB),
    ram_total_bytes=125 * GIB,
    ram_available_bytes=120 * GIB,
    cpu_name="16 cores",
    num_cores=16,
    h2d_bytes_per_second=55e9,
    d2h_bytes_per_second=55e9,
    both_bytes_per_second=99e9,
    dram_bytes_per_second=191e9,
    cpu_adamw_bytes_per_second=208e9,
    cpu_compact_bytes_per_second=203e9,
    cpu_tiny_bytes_per_second=51.7e9,
    cpu_and_bus_bytes_per_second=227e9,
    vram_bytes_per_second=4.05e12,
    launch_seconds=5.1e-6,
    bf16_flops_per_second=870e12,
    fp16_flops_per_second=855e12,
    fp32_flops_per_second=51e12,
)
"""The host of the first rows of benchmarks/results.csv, as measured by `measure()`."""

TWO_CORES = replace(H200, num_cores=2, cpu_adamw_bytes_per_second=58.7e9 * 208 / 191)
"""The same host with the process bound to two cores (case cpu-adamw of benchmarks/results.csv)."""

T4 = Hardware(
    device="cuda:0",
    gpu_name="Tesla T4",
    compute_capability=(7, 5),
    supports_bf16=False,
    can_pin=True,
    vram_total_bytes=15 * GIB,
    vram_free_bytes=int(14.8 * GIB),
    vram_context_bytes=int(0.12 * GIB),
    ram_total_bytes=int(12.7 * GIB),
    ram_available_bytes=12 * GIB,
    cpu_name="2 cores",
    num_cores=2,
    h2d_bytes_per_second=6e9,
    d2h_bytes_per_second=6e9,
    both_bytes_per_second=10e9,
    dram_bytes_per_second=15e9,
    cpu_adamw_bytes_per_second=12e9,
    cpu_compact_bytes_per_second=12e9,
    cpu_tiny_bytes_per_second=6e9,
    cpu_and_bus_bytes_per_second=15e9,
    vram_bytes_per_second=240e9,
    launch_seconds=8e-6,
    bf16_flops_per_second=2e12,
    fp16_flops_per_second=25e12,
    fp32_flops_per_second=4e12,
)
"""Colab's free machine. Its rates are guesses."""


def shape(name: str = "block.0", numel: int = 1024, **changes: Any) -> LayerShape:
    """A flat layer of a repeated block, bf16, nothing tied. `changes`: fields of the shape or of its kind."""
    of_kind = [key for key in ("dtype", "precision", "optimizer", "trains") if key in changes]
    kind = LayerKind(**{"dtype": "bf16"} | {key: changes.pop(key) for key in of_kind})
    layer = LayerShape(name, numel, numel, kind, num_norm_blocks=1, shared=False, in_block=True)
    return replace(layer, **changes)


def stage(block: str, kept: int = 100, **changes: Any) -> Stage:
    """A stage without costs except the bytes it keeps."""
    made = Stage(block, kept_bytes=kept, output_bytes=10, input_bytes=10, forward_peak_bytes=kept)
    return replace(made, **changes)


def t5_3b(
    batch_size: int, tokens: int = 512, targets: int = 128, *, fused: bool = False
) -> tuple[list[LayerShape], MicroBatch]:
    """Layers and work of T5-3B in bf16 as in the benchmarks: eager attention, no dropout, no padding. `fused`: norms of
    one kernel, as in `finetune`."""
    from transformers import T5Config, T5ForConditionalGeneration

    from offloadkit.hf.loss import compute_loss_in_chunks
    from offloadkit.hf.patches import fuse_norms
    from offloadkit.hf.presets import PRESETS

    config = T5Config(**PRESETS["t5-3b"].values, dropout_rate=0.0, use_cache=False)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config).bfloat16().train()
    compute_loss_in_chunks(model)
    if fused:
        fuse_norms(model)
    return _shapes(model), trace_micro_batch(
        model, _tokens(input_ids=(batch_size, tokens), labels=(batch_size, targets))
    )


def llama(batch_size: int, tokens: int, **values: Any) -> tuple[list[LayerShape], MicroBatch]:
    """Layers and work of a Llama in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from offloadkit.hf.loss import compute_loss_in_chunks

    config = LlamaConfig(max_position_embeddings=8192, use_cache=False, **values)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16().train()
    compute_loss_in_chunks(model)
    ids = (batch_size, tokens)
    return _shapes(model), trace_micro_batch(model, _tokens(input_ids=ids, labels=ids))


LLAMA_8B = {
    name: value
    for name, value in SHAPES["llama-3.1-8b"].items()
    if name not in ("model_type", "max_position_embeddings", "pad_token_id", "head_dim")
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


def _shapes(model: torch.nn.Module) -> list[LayerShape]:
    return [layer.shape() for layer in flat_layers(model, OffloadConfig())]


def _tokens(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(size, dtype=torch.int64, device="meta") for name, size in shapes.items()}
