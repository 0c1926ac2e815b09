"""Peak RAM of whole runs of `finetune` on the CPU beside what their plans say, each in a fresh process.

    python -m benchmarks.rss
    python -m benchmarks.rss --case t5 llama

Without a GPU, what the plan puts in VRAM is in RAM too. A run loads a checkpoint, trains for a few steps on
micro-batches of the planned shape, and saves.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.run import ROOT, Row, write_results

GIB = 1 << 30
T5 = {"vocab_size": 32128, "d_model": 1024, "d_kv": 64, "num_heads": 16, "d_ff": 4096, "num_layers": 16}
LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 1280,
    "intermediate_size": 4096,
    "num_hidden_layers": 20,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
CASES: dict[str, dict[str, Any]] = {
    "t5": {"shape": T5, "rows": 2, "tokens": (256, 64)},
    "llama": {"shape": LLAMA, "rows": 1, "tokens": (256, None)},
    "t5-bf16": {"shape": T5, "rows": 1, "tokens": (64, 16), "dtype": "bf16"},
    "t5-bf16-loaded-first": {"shape": T5, "rows": 1, "tokens": (64, 16), "dtype": "bf16", "loaded_first": True},
    "small": {"shape": {**LLAMA, "num_hidden_layers": 5}, "rows": 1, "tokens": (64, None)},
}
"""Shapes of models, rows of a micro-batch, tokens of a row, and the dtype in which an fp32 checkpoint is trained.
"loaded_first" hands `finetune` the whole model, in fp32, instead of the checkpoint's folder."""


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run the cases; print planned and measured, write the result file, return the rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rss", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--case", nargs="+", choices=CASES, default=[name for name in CASES if name != "small"])
    parser.add_argument("--out", type=Path, help="result file (default: a new one in benchmarks/results)")
    parser.add_argument("--commit", help="commit to write down where git is missing")
    options = parser.parse_args(arguments)
    options.mode, options.model = "rss", "cases"
    rows = []
    for name in options.case:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(name, Path(folder)))
        planned, peak = rows[-1]["planned_bytes"] / GIB, rows[-1]["peak_ram_bytes"] / GIB
        print(f"{name:24}{planned:8.2f} GiB planned{peak:8.2f} measured{rows[-1]['off']:8.1%}", flush=True)
    write_results(options, rows)
    return rows


def measure(name: str, folder: Path) -> Row:
    """The row of a case, run in `folder`: bytes planned and measured, and by how much the plan is off.

    Raises:
        RuntimeError: the run failed; with the last that it said.
    """
    for task in ("save", "train"):
        command = [sys.executable, "-m", "benchmarks.rss_run", task, json.dumps(CASES[name]), str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} could not {task}: {done.stderr.strip().splitlines()[-1:]}")
    row: Row = json.loads((folder / "row.json").read_text())
    return {"case": name, **CASES[name], **row, "off": row["planned_bytes"] / row["peak_ram_bytes"] - 1}


if __name__ == "__main__":
    main()
