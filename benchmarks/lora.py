"""Compare LoRA by offloadkit and PEFT with LoRA by PEFT alone, which has everything on the GPU.

    python -m benchmarks.lora                             # less than four minutes on an H100
    python -m benchmarks.lora --cases lora-llama-8b-6 --engines offloadkit-lora --steps 12
    python -m benchmarks.lora --tiny --out /tmp/rows.csv  # a try without a GPU

The base is a Llama of 8 billion random bf16 weights, frozen. All linear layers of its blocks have adapters of rank 16.
Each engine runs in its own process and appends one row: seconds, VRAM and RAM of a training step, for offloadkit
measured and planned. offloadkit is limited to 6, 10 and 24 GiB of VRAM and 20 GiB of RAM, PEFT alone is not. Beside the
tokens/s of offloadkit stands their share of PEFT's for the same rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks import run
from benchmarks.cases import CASES, ENGINES, LORA
from benchmarks.table import Row
from offloadkit.facts.units import format_bytes


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure, append the rows to the table, print them, and return them."""
    rows = run.by_options(parse(arguments))
    for row in rows:
        print(line_of(row) + beside_peft(row, rows))
    return rows


def parse(arguments: list[str] | None) -> argparse.Namespace:
    options = run.parser_for("lora", __doc__, LORA).parse_args(arguments)
    of_claim = [name for name, case in CASES.items() if case.claim == "lora"]
    options.cases = options.cases or (["tiny-lora"] if options.tiny else of_claim)
    return options


def line_of(row: Row) -> str:
    """ "lora-llama-8b-6, offloadkit, PEFT's LoRA: 6,203 tokens/s, 0.6600 s a step (planned 0.6553), VRAM ..."."""
    recomputed = ", activations recomputed" if row["recomputed"] else ""
    first = f"{row['case']}, {ENGINES[row['engine']].title}{recomputed}"
    if row["status"] != "measured":
        return f"{first}: {row['status']}, {row['reason']}"
    told = [f"{row['tokens'] / row['seconds']:,.0f} tokens/s"]
    by_plan = row["planned_seconds"]
    told.append(f"{row['seconds']:.4f} s a step" + (f" (planned {by_plan:.4f})" if by_plan else ""))
    for name, measured, planned in (
        ("VRAM", "vram_bytes", "planned_vram_bytes"),
        ("RAM", "ram_peak_bytes", "planned_ram_bytes"),
    ):
        size = row[planned]
        told.append(f"{name} {format_bytes(row[measured])}" + (f" (planned {format_bytes(size)})" if size else ""))
    return f"{first}: {', '.join(told)}"


def beside_peft(row: Row, rows: Sequence[Row]) -> str:
    """ ", 0.87x of PEFT alone" for a row of offloadkit, if PEFT was measured with the same model and lengths."""
    keys = ("model", "batch_size", "input_length", "status")
    same = (each for each in rows if each["engine"] == "peft" and all(each[key] == row[key] for key in keys))
    peft = next(same, None)
    if row["engine"] != "offloadkit-lora" or row["status"] != "measured" or peft is None:
        return ""
    return f", {peft['seconds'] / row['seconds']:.2f}x of PEFT alone"


if __name__ == "__main__":
    main()
