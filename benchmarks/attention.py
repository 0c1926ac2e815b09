"""T5's attention alone, forward and backward: our kernels beside the model's own operations, eager and compiled.

    python -m benchmarks.attention

Seconds are the median of runs that each begin with nothing under way; a share is of bf16's largest rate of products.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.run import Row, write_results

SHAPES = {
    "t5-3b encoder, 8 rows": (8, 32, 512, 512, 128),
    "t5-3b encoder, 32 rows": (32, 32, 512, 512, 128),
    "t5-3b decoder, 32 rows": (32, 32, 128, 128, 128),
    "t5-3b cross, 32 rows": (32, 32, 128, 512, 128),
    "t5-large encoder, 32 rows": (32, 16, 512, 512, 64),
    "t5-3b encoder, 4 rows of 2,048": (4, 32, 2048, 2048, 128),
}
"""Batch, heads, queries, keys, width."""
NUM_WARM, NUM_RUNS = 3, 15


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure each shape with each attention; print them, write the result file, return the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--out", type=Path, help="result file (default: a new one in benchmarks/results)")
    parser.add_argument("--commit", help="commit to write down where git is missing")
    options = parser.parse_args(arguments)
    import torch

    from benchmarks.measure import describe_machine, versions
    from offloadkit import hardware

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: the kernels run on one alone")
    device = torch.device("cuda")
    rate = hardware.measure(device).bf16_flops_per_second
    about = {"machine": describe_machine(device), "versions": versions()}
    options.mode, options.model = "attention", "t5"
    rows: list[Row] = []
    for name, shape in SHAPES.items():
        for kind, attend in attentions(options.dropout).items():
            row = about | {"shape": name, "attention": kind, "dropout": options.dropout} | measure(attend, shape)
            rows.append(row)
            shares = [
                number * 4 * shape[0] * shape[1] * shape[2] * shape[3] * shape[4] / (row[f"{part}_seconds"] * rate)
                for part, number in (("forward", 1), ("backward", 2))
            ]
            parts = (f"{part} {1e3 * row[f'{part}_seconds']:7.3f} ms" for part in ("forward", "backward"))
            print(f"{name:31} {kind:9}", *parts, *(f"{share:4.0%}" for share in shares), flush=True)
    write_results(options, rows)
    return rows


def attentions(dropout: float) -> dict[str, Callable[..., Any]]:
    """(query, key, value, bias) to (batch, queries, heads, width)."""
    import torch
    import torch.nn.functional as F

    from offloadkit.kernels import attention as attention_op

    def own(query: Any, key: Any, value: Any, bias: Any) -> Any:
        """transformers' `eager_attention_forward` of T5."""
        scores = torch.matmul(query, key.transpose(2, 3)) * 1.0 + bias
        weights = F.dropout(F.softmax(scores, dim=-1), p=dropout)
        return torch.matmul(weights, value).transpose(1, 2).contiguous()

    def fused(query: Any, key: Any, value: Any, bias: Any) -> Any:
        return attention_op.attend(query, key, value, bias, None, 1.0, dropout)

    return {"own": own, "compiled": torch.compile(own, dynamic=False), "fused": fused}


def measure(attend: Callable[..., Any], shape: tuple[int, int, int, int, int]) -> Row:
    """Seconds of forward and backward, and the bytes that forward keeps."""
    import torch

    batch, heads, queries, keys, width = shape

    def normal(*sizes: int) -> Any:
        return torch.randn(sizes, device="cuda", dtype=torch.bfloat16)

    leaves = [normal(batch, length, heads, width).transpose(1, 2) for length in (queries, keys, keys)]
    leaves[0] *= width**-0.5
    leaves = [one.requires_grad_() for one in (*leaves, normal(1, heads, queries, keys))]
    into = normal(batch, queries, heads, width)
    seconds: dict[str, list[float]] = {"forward": [], "backward": []}
    kept = 0
    for _ in range(NUM_WARM + NUM_RUNS):
        before = torch.cuda.memory_allocated()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)  # about a millisecond, in which Python gets ahead
        events[0].record()
        output = attend(*leaves)
        events[1].record()
        kept = torch.cuda.memory_allocated() - before
        torch.autograd.grad(output, leaves, into)
        events[2].record()
        torch.cuda.synchronize()
        for name, first, second in (("forward", *events[:2]), ("backward", *events[1:])):
            seconds[name].append(first.elapsed_time(second) / 1000)
        del output
    found = {f"{name}_seconds": statistics.median(all_seconds[NUM_WARM:]) for name, all_seconds in seconds.items()}
    return found | {"kept_bytes": kept}


if __name__ == "__main__":
    main()
