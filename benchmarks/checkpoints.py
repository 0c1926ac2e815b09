"""Save a checkpoint of a model with random weights in one process and resume it in another: seconds, bytes, peak RAM.

    python -m benchmarks.checkpoints --vram 40GiB                 # Llama-8B, weights alone: 16 GB of disk
    python -m benchmarks.checkpoints --contents all               # 96 GB: a smaller disk is refused, with remedies
    python -m benchmarks.checkpoints t5-small --contents compact  # a try without a GPU

Each process takes one training step. A second copy in RAM would add at least the bytes of the weights to the peak.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offloadkit.checkpoint.base import Checksums
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import OffloadkitError
from offloadkit.facts import hardware
from offloadkit.facts.config import Contents, OffloadConfig
from offloadkit.facts.units import format_bytes
from offloadkit.hf.source import resolve

OPTIONS: dict[Contents, dict[str, Any]] = {
    "all": {},
    "compact": {"checkpoint_precision": "compact"},
    "weights": {"save_only_model": True},
}
Figures = dict[str, Any]


def main(arguments: list[str] | None = None) -> tuple[Figures, Figures]:
    """Measure both processes, print a line for each, and return their figures."""
    options = parse(arguments)
    if options.part:
        print(json.dumps(PARTS[options.part](options)))
        return {}, {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        given = sys.argv[1:] if arguments is None else arguments
        saved, resumed = (in_a_process(part, [*given, f"--folder={folder}"]) for part in PARTS)
    print(f"weights have {'equal' if saved['xxh3'] == resumed['xxh3'] else 'OTHER'} bits after resuming")
    return saved, resumed


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("model", nargs="?", default="llama-3.1-8b", help="a preset, or a folder with a config.json")
    parser.add_argument("--contents", choices=OPTIONS, default="weights")
    parser.add_argument("--folder", help="folder for the checkpoint; default: the system's temporary folder")
    parser.add_argument("--vram", help="budget, such as 40GiB")
    parser.add_argument("--ram", help="budget, such as 120GiB")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the one row of a step")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def in_a_process(part: str, arguments: list[str]) -> Figures:
    """Print the lines of the part's process as they come, then its figures."""
    command = [sys.executable, "-m", "benchmarks.checkpoints", *arguments, f"--part={part}"]
    began, last = time.perf_counter(), ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(last, end="", flush=True)
            last = line
    if process.returncode:
        print(last, end="", flush=True)
        raise SystemExit(process.returncode)
    figures: Figures = json.loads(last)
    print(f"{part}: {line_of(figures)}; {time.perf_counter() - began:.0f} s in all", flush=True)
    return figures


def line_of(figures: Figures) -> str:
    size, before, peak = (format_bytes(figures[name]) for name in ("bytes", "ram_before", "ram_added"))
    rate = f"{figures['bytes'] / figures['seconds'] / 1e9:.2f} GB/s"
    return f"{size} in {figures['seconds']:.1f} s ({rate}), RAM {before} before, peak {peak} above"


def save(options: argparse.Namespace) -> Figures:
    with engine_of(options, seed=0) as engine:
        step(engine, options.tokens)
        planned = engine.plan.checkpoint_bytes
        print(f"a checkpoint of {format_bytes(planned)} is planned ({options.contents})", flush=True)
        return measured(engine, "saving", engine.save_checkpoint, options)


def resume(options: argparse.Namespace) -> Figures:
    """Another seed draws other weights, which the checkpoint replaces."""
    with engine_of(options, seed=1) as engine:
        found = measured(engine, "resuming", engine.load_checkpoint, options)
        step(engine, options.tokens)
        return found


PARTS: dict[str, Callable[[argparse.Namespace], Figures]] = {"save": save, "resume": resume}


def measured(
    engine: OffloadEngine, name: str, act: Callable[[Path], object], options: argparse.Namespace
) -> dict[str, Any]:
    saved, before, began = Path(options.folder) / "saved", hardware.process_ram_bytes(), time.perf_counter()
    try:
        act(saved)
    except OffloadkitError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    seconds = time.perf_counter() - began
    weights = {name: (weight, None) for name, weight in engine.state_dict()["module"].items()}
    return {
        "seconds": seconds,
        "bytes": sum(path.stat().st_size for path in saved.iterdir()),
        "ram_before": before,
        "ram_added": engine.telemetry.peaks[name]["ram"] - before,
        "xxh3": Checksums().of(weights),
    }


def engine_of(options: argparse.Namespace, seed: int) -> OffloadEngine:
    torch.manual_seed(seed)
    device = hardware.default_device()
    model = resolve(options.model, init="random").load_lazily(dtype=torch.bfloat16).train()
    config = OffloadConfig(working_dtype="bf16", vram=options.vram, ram=options.ram, **OPTIONS[options.contents])
    engine = OffloadEngine(model, config, device=device, example=batch_of(model, options.tokens, device))
    print(engine.plan, flush=True)
    return engine


def batch_of(model: Any, num_tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
    ids = torch.randint(model.config.vocab_size, (1, num_tokens), device=device)
    return {"input_ids": ids, "labels": ids}


def step(engine: OffloadEngine, num_tokens: int) -> None:
    engine.backward(engine(**batch_of(engine.module, num_tokens, engine.device)).loss)
    engine.step()
    engine.synchronize()


if __name__ == "__main__":
    main()
