"""What Python takes to start a step's operations, by placement: for the constants in offloadkit/plan/seconds.py.

    python -m benchmarks.launches

Blocks so small that the GPU always waits for Python, everything waited for before forward and before backward. Seconds
are given for an operation as the plan counts them: as a multiple of the time in which a bare kernel is started.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.run import Row, write_results

NUM_BLOCKS, NUM_STEPS, NUM_WARM = 16, 12, 4
WHERE: dict[str, dict[str, Any]] = {
    "kept": {},
    "streamed": {"weights": "ram"},
    "recomputed": {"activations": "checkpoint"},
    "streamed and recomputed": {"weights": "ram", "activations": "checkpoint"},
}


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure each placement, eager and compiled; print them, write the result file, return the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS, help="of each stack")
    parser.add_argument("--eager", action="store_true", help="not compiled")
    parser.add_argument("--out", type=Path, help="result file (default: a new one in benchmarks/results)")
    parser.add_argument("--commit", help="commit to write down where git is missing")
    options = parser.parse_args(arguments)
    import torch

    from benchmarks.measure import describe_machine, versions
    from offloadkit import hardware

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    launch = hardware.measure(device).launch_seconds
    about = {"machine": describe_machine(device), "versions": versions(), "launch_seconds": launch}
    options.mode, options.model = "launches", f"{options.blocks}-blocks"
    rows: list[Row] = []
    for model in ("t5", "llama"):
        for compiled in (False,) if options.eager else (False, True):
            how = {"fused": device.type == "cuda", "compiled": compiled}
            operations = num_operations(model, options.blocks, **how)
            for where, placement in WHERE.items():
                row = {"model": model, "compiled": compiled, "where": where, "num_operations": operations}
                row |= measure(model, options.blocks, placement, device, **how)
                for name, number in operations.items():
                    row[f"{name}_launches"] = row[f"{name}_seconds"] / (number * launch)
                rows.append(about | row)
                print(words(row), flush=True)
    write_results(options, rows)
    return rows


def words(row: Row) -> str:
    """A row in a line."""
    name = f"{row['model']}{' compiled' if row['compiled'] else ''}, {row['where']}"
    parts = (
        f"{part} {1000 * row[f'{part}_seconds']:6.2f} ms, {row[f'{part}_launches']:5.2f} an operation"
        for part in ("forward", "backward")
    )
    return f"{name:40}{'; '.join(parts)}"


def build(model: str, num_blocks: int, *, fused: bool, compiled: bool) -> Any:
    """The model in bf16 on torch's default device, with the compute that `finetune` gives it."""
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    from offloadkit.hf.loss import compute_loss_in_chunks
    from offloadkit.hf.patches import fuse

    if model == "t5":
        shape = {"d_model": 256, "d_kv": 64, "num_heads": 4, "d_ff": 1024, "num_layers": num_blocks}
        made: Any = T5ForConditionalGeneration(
            T5Config(**shape, decoder_start_token_id=0, dropout_rate=0.0, use_cache=False, attn_implementation="eager")
        )
    else:
        shape = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}
        made = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=num_blocks, vocab_size=32000, use_cache=False))
    made = made.bfloat16().train()
    compute_loss_in_chunks(made)
    if fused:
        fuse(made, compiled=compiled)
    return made


def num_operations(model: str, num_blocks: int, *, fused: bool, compiled: bool) -> dict[str, int]:
    """Of forward and of backward, as the plan counts them."""
    import torch

    from offloadkit.tracing import trace_micro_batch

    with torch.device("meta"):
        made = build(model, num_blocks, fused=fused, compiled=compiled)
        tokens = torch.zeros((1, 64), dtype=torch.int64)
    stages = trace_micro_batch(made, {"input_ids": tokens, "labels": tokens}).stages
    return {part: sum(getattr(stage, part).num_operations for stage in stages) for part in ("forward", "backward")}


def measure(model: str, num_blocks: int, placement: dict[str, Any], device: Any, *, fused: bool, compiled: bool) -> Row:
    """The shortest and the median seconds until forward and backward return, each begun with nothing under way."""
    import torch

    import offloadkit
    from offloadkit.config import OffloadConfig, Placement

    torch.manual_seed(0)
    config = OffloadConfig(placement=Placement(**placement), compile_blocks=compiled)
    tokens = torch.randint(3, 32000, (1, 64), device=device)
    seconds: dict[str, list[float]] = {"forward": [], "backward": []}
    with offloadkit.OffloadEngine(
        build(model, num_blocks, fused=fused, compiled=compiled), config, device=device
    ) as engine:
        for _ in range(NUM_WARM + NUM_STEPS):
            engine.synchronize()
            began = time.perf_counter()
            loss = engine(input_ids=tokens, labels=tokens).loss
            seconds["forward"].append(time.perf_counter() - began)
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            engine.backward(loss)
            seconds["backward"].append(time.perf_counter() - began)
            engine.step()
    row: Row = {}
    for name, all_seconds in seconds.items():
        row[f"{name}_seconds"] = min(all_seconds[NUM_WARM:])
        row[f"median_{name}_seconds"] = statistics.median(all_seconds[NUM_WARM:])
    return row


if __name__ == "__main__":
    main()
