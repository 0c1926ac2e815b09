"""Time one decoder block, forward and backward, and torch's attention backends, in alternating turns.

    python -m benchmarks.blocks                             # a minute on an H100
    python -m benchmarks.blocks --parts attention
    python -m benchmarks.blocks --tiny --out /tmp/rows.csv  # a try without a GPU

Parts, and the rows that they append:

- `blocks`: "block, ..." by own (transformers' operations), norms (torch's kernel for norms), fused (all our kernels),
  compiled (torch.compile) and matmuls (the block's matrix products alone). Seconds, and bytes that forward keeps.
- `ragged`: "block, ragged, ..." of rows of a quarter to all of the length, by mask (as transformers calls it), no mask
  (as we call it, if no label reads the padding) and varlen (FlashAttention, which computes no padding). The attention
  alone is "attention, ragged, ...".
- `attention`: "attention, causal, ..." by torch's choice, flash and cudnn. Seconds, and whether two backward passes
  give equal bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
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

PARTS = ("blocks", "ragged", "attention")
QWEN = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_3B = {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8}
GEMMA = {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4}
BLOCKS: dict[str, tuple[str, dict[str, int], tuple[int, int]]] = {
    "qwen2.5-7b": ("qwen2", QWEN, (16, 1024)),
    "llama-3.2-3b": ("llama", LLAMA_3B, (8, 1024)),
    "gemma-2-2b": ("gemma2", GEMMA | {"head_dim": 256}, (8, 1024)),
}
"""Model type, sizes, and rows x length."""
RAGGED: dict[str, tuple[dict[str, int], tuple[int, int]]] = {
    "llama-3.2-1b": (LLAMA_1B, (8, 1024)),
    "llama-3.1-8b": (LLAMA_8B, (4, 2048)),
}
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
    if "ragged" in options.parts:
        ragged = {"tiny": (TINY, (2, 16))} if options.tiny else RAGGED
        for name, (sizes, shape) in ragged.items():
            rows += time_ragged(f"{name}, {shape[0]} x {shape[1]:,}", sizes, shape, options.turns)
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


def time_ragged(case: str, sizes: dict[str, int], shape: tuple[int, int], turns: int) -> list[Row]:
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    (rows, length), heads, key_heads = shape, sizes["num_attention_heads"], sizes["num_key_value_heads"]
    width, generator = sizes["hidden_size"] // heads, torch.Generator().manual_seed(0)
    lengths = torch.randint(length // 4, length + 1, (rows,), generator=generator)
    seen = (torch.arange(length) < lengths[:, None]).to(_device())
    masks = {"mask": torch.ones(length, length, dtype=torch.bool, device=_device()).tril() & seen[:, None, None]}
    none, rest = torch.zeros_like(lengths), length - lengths
    starts = [
        F.pad(torch.stack(parts, dim=1).flatten().cumsum(0), (1, 0)).int().to(_device())
        for parts in (
            (lengths, rest, none),
            (lengths, none, rest),
        )  # queries at padding see no key, and its keys no query
    ]

    def varlen(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        flat = [each.transpose(1, 2).reshape(rows * length, -1, width) for each in (query, key, value)]
        flash = torch.ops.aten._flash_attention_forward
        output = flash(*flat, *starts, length, length, 0.0, True, False)[0]
        return output.view(rows, length, heads, width), None

    AttentionInterface.register("varlen", varlen)
    config = AutoConfig.for_model("llama", **sizes, num_hidden_layers=1, vocab_size=512, use_cache=False)
    with torch.device(_device()):
        model = AutoModelForCausalLM.from_config(config).bfloat16().train().model
        x = torch.randn(*shape, sizes["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
        positions = torch.arange(length)[None]
        into = torch.randn(*shape, sizes["hidden_size"], dtype=torch.bfloat16) * seen[..., None]
        number = {"query": heads, "key": key_heads, "value": key_heads}
        leaves = [torch.randn(rows, length, each, width, dtype=torch.bfloat16) for each in number.values()]
    given = {"position_ids": positions, "position_embeddings": model.rotary_emb(x, positions)}
    block: Any = model.layers[0]
    parts = [each.transpose(1, 2).requires_grad_() for each in leaves]
    undo = fuse(block)

    def step(name: str) -> list[Tensor]:
        config._attn_implementation = "varlen" if name == "varlen" else "sdpa"
        block(x, attention_mask=masks.get(name), **given).backward(into)
        found = [each.grad for each in (x, *block.parameters())]
        x.grad = None
        block.zero_grad()
        return found

    def attend(name: str) -> None:
        attention: Any = varlen if name == "varlen" else AttentionInterface()["sdpa"]
        output = attention(block.self_attn, *parts, masks.get(name), is_causal=True)[0]
        torch.autograd.grad(output, parts, into.view_as(output))

    names = ["mask", "no mask", *(["varlen"] if _device() == "cuda" else [])]
    alone, whole = ({name: list[float]() for name in names} for _ in range(2))
    gradients = {name: step(name) for name in names}
    apart = {
        name: max(float((a - b).norm() / b.norm()) for a, b in zip(found, gradients["mask"], strict=True))
        for name, found in gradients.items()
    }
    for _ in range(turns):
        for name in names:
            whole[name].append(_seconds(partial(step, name)))
            alone[name].append(_seconds(partial(attend, name)))
    undo()
    share = {"share_of_padding": float((~seen).float().mean())}
    found = [
        _row(f"block, ragged, {case}", name, whole[name], share | {"gradients_apart": apart[name]}) for name in names
    ]
    return found + [_row(f"attention, ragged, {case}", name, alone[name], share) for name in names]


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
