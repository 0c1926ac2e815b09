"""Time one decoder block, forward and backward, and torch's attention backends, in alternating turns.

    python -m benchmarks.blocks                             # a minute on an H100
    python -m benchmarks.blocks --parts attention
    python -m benchmarks.blocks --tiny --out /tmp/rows.csv  # a try without a GPU

Parts, and the rows that they append:

- `blocks`: "block, ..." by own (transformers' operations), norms (torch's kernel for norms), fused (all our kernels),
  compiled (torch.compile) and matmuls (the block's matrix products alone). Seconds, and bytes that forward keeps.
- `attention`: "attention, causal, ..." by torch's choice, flash and cudnn. Seconds, and whether two backward passes
  give equal bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import run, table
from benchmarks.table import Row
from offloadkit.facts import hardware
from offloadkit.hf.patches import fuse, fuse_norms

PARTS = ("blocks", "attention")
QWEN = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
LLAMA_3B = {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8}
GEMMA = {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4}
BLOCKS: dict[str, tuple[str, dict[str, int], tuple[int, int]]] = {
    "qwen2.5-7b": ("qwen2", QWEN, (16, 1024)),
    "llama-3.2-3b": ("llama", LLAMA_3B, (8, 1024)),
    "gemma-2-2b": ("gemma2", GEMMA | {"head_dim": 256}, (8, 1024)),
}
"""Model type, sizes, and rows x length."""
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
HEADS = {
    "qwen2.5-7b": (16, 28, 4, 1024, 128),
    "llama-3.1-8b": (32, 32, 8, 1024, 128),
    "llama-3.1-8b, long": (1, 32, 8, 32768, 128),
    "llama-3.2-1b": (2, 32, 8, 1024, 64),
}
"""Rows, heads of queries and of keys, length, and width of a head."""
BACKENDS = {"torch's choice": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure the parts that the command line names, append their rows to the table, and return the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blocks", description="Seconds of one decoder block.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a try")
    parser.add_argument("--commit", help="commit to write down where git is missing")
    parser.add_argument("--out", type=Path, default=table.PATH, help="the table (default: benchmarks/results.csv)")
    options = parser.parse_args(arguments)
    rows = []
    if "blocks" in options.parts:
        blocks = {"tiny": ("llama", TINY, (2, 16))} if options.tiny else BLOCKS
        for name, (model_type, sizes, shape) in blocks.items():
            rows += time_block(f"block, {name}, {shape[0]} x {shape[1]:,}", model_type, sizes, shape, options.turns)
    if "attention" in options.parts:
        heads = {"tiny": (2, 4, 2, 16, 8)} if options.tiny else HEADS
        for name, numbers in heads.items():
            rows += time_attention(f"attention, causal, {name}", numbers, options.turns)
    machine = hardware.describe_machine(hardware.default_device())
    commit = options.commit or run.git_commit()
    known = {"status": "measured", "commit": commit, "date": table.now(), "torch": str(torch.__version__)}
    rows = [row | known | table.of_machine(machine) for row in rows]
    table.append(rows, options.out)
    return rows


def time_block(case: str, model_type: str, sizes: dict[str, int], shape: tuple[int, int], turns: int) -> list[Row]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **sizes, num_hidden_layers=1, vocab_size=512, use_cache=False)
    with torch.device(_device()):
        model = AutoModelForCausalLM.from_config(config).bfloat16().train().model
        x = torch.randn(*shape, sizes["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
        positions = torch.arange(shape[1])[None]
    block: nn.Module = model.layers[0]
    given = {"attention_mask": None, "position_ids": positions, "position_embeddings": model.rotary_emb(x, positions)}
    into = torch.randn_like(x)
    compiled = torch.compile(block) if _device() == "cuda" else block

    def forward(run: Any = block) -> Tensor:
        output: Tensor = run(x, **given)
        return output

    def step(run: Any = block) -> None:
        forward(run).backward(into)
        x.grad = None
        block.zero_grad()

    changes: dict[str, Callable[[], Callable[[], None]]] = {
        "own": lambda: lambda: None,
        "norms": lambda: fuse_norms(block),
        "fused": lambda: fuse(block),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*changes, "compiled", "matmuls")}
    kept = {}
    for _ in range(turns):
        for name, change in changes.items():
            undo = change()
            seconds[name].append(_seconds(step))
            before = _allocated()
            output = forward()
            kept[name] = _allocated() - before
            del output
            undo()
        seconds["compiled"].append(_seconds(lambda: step(compiled)))
        seconds["matmuls"].append(_seconds(_matmuls(block, shape[0] * shape[1])))
    return [
        _row(case, name, found, {"kept_bytes": kept[name]} if name in kept else {}) for name, found in seconds.items()
    ]


def _matmuls(block: nn.Module, tokens: int) -> Callable[[], None]:
    """The products of the block's linear layers, forward and backward."""
    weights = [module.weight for module in block.modules() if isinstance(module, nn.Linear)]
    inputs = {width: weights[0].new_empty(tokens, width).normal_() for weight in weights for width in weight.shape}

    def run() -> None:
        with torch.no_grad():
            for weight in weights:
                inputs[weight.shape[1]] @ weight.t()
                inputs[weight.shape[0]] @ weight
                inputs[weight.shape[0]].t() @ inputs[weight.shape[1]]

    return run


def time_attention(case: str, sizes: tuple[int, ...], turns: int) -> list[Row]:
    rows, heads, key_heads, length, width = sizes
    query, key, value, into = (
        torch.randn(rows, length, number, width, device=_device(), dtype=torch.bfloat16).transpose(1, 2)
        for number in (heads, key_heads, key_heads, heads)
    )
    leaves = [each.requires_grad_() for each in (query, key, value)]

    def step(backend: Any) -> tuple[Tensor, ...]:
        if backend is None:
            output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            with sdpa_kernel(backend):
                output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(output, leaves, into)

    seconds: dict[str, list[float]] = {}
    equal, refused = {}, {}
    for name, backend in BACKENDS.items():
        try:
            equal[name] = all(map(torch.equal, step(backend), step(backend)))
            seconds[name] = []
        except RuntimeError as error:  # torch: no available kernel
            refused[name] = str(error).splitlines()[0]
    for _ in range(turns):
        for name, found in seconds.items():
            found.append(_seconds(lambda backend=BACKENDS[name]: step(backend), calls=3))
    for name, reason in refused.items():
        print(f"{case}, {name}: {reason}", flush=True)
    return [_row(case, name, found, {"equal_again": equal[name]}) for name, found in seconds.items()]


def _row(case: str, engine: str, seconds: Sequence[float], figures: dict[str, Any]) -> Row:
    print(f"{case}, {engine}: {1e3 * median(seconds):.2f} ms", flush=True)
    least, most = min(seconds), max(seconds)
    spread = {"seconds": median(seconds), "min_seconds": least, "max_seconds": most, "turns": len(seconds)}
    return {"case": case, "engine": engine, **spread, "figures": figures}


def _seconds(step: Callable[[], Any], calls: int = 8) -> float:
    """Mean seconds of some calls, after a first call."""
    step()
    if _device() == "cpu":
        began = time.perf_counter()
        for _ in range(calls):
            step()
        return (time.perf_counter() - began) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


if __name__ == "__main__":
    main()
