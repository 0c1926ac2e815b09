"""The demo: a T5 of a million random weights learns to write dates through `finetune`, and the costs are shown."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offloadkit.checkpoint.folder import writable
from offloadkit.doors.demo.dates import date_pairs
from offloadkit.doors.finetuning import NUM_PREDICTED, FinetuneResult, finetune
from offloadkit.facts import hardware
from offloadkit.facts.telemetry import mean_seconds
from offloadkit.facts.units import format_bytes, format_seconds
from offloadkit.hf.data import load_dataset_like, prepare
from offloadkit.hf.evaluate import predict, share_correct
from offloadkit.hf.quiet import bars_where_live

NUM_STEPS = 700
NUM_TRAIN = 20_000

_PHASES = {
    "forward": "forward",
    "backward": "backward, gradients to RAM",
    "gradient_wait": "waiting for the last gradients",
    "norm": "gradient norm",
    "cpu_step": "AdamW in RAM, weights back",
    "forward_wait": "forward waiting for weights",
    "other": "data, logging",
}


@bars_where_live()
def run_demo(
    output: str | os.PathLike[str] = "offloadkit-demo", *, num_steps: int = NUM_STEPS, seed: int = 0
) -> dict[str, Any]:
    """Train, show the result, and write `model/` and `summary.json` to `output`.

    Returns:
        The content of summary.json: exact_match_before and exact_match_after (0 to 1, on `NUM_PREDICTED` dates that
            training never saw), final losses, predictions. Also seconds, steps, mean seconds of a step by phase,
            peak_ram_bytes, peak_vram_bytes, machine and versions.
    """
    from transformers import ByT5Tokenizer

    began = time.perf_counter()
    folder = writable(output)
    device = hardware.default_device()
    machine = hardware.describe_machine(device)
    where = machine["gpu"] if machine["gpu"] != "none" else f"{machine['num_cores']} CPU cores (no GPU)"
    where = f"{where}, {format_bytes(hardware.ram_limit_bytes())} RAM"
    print(f"offloadkit demo: a small T5 learns to write dates in ISO format, on {where}\n", flush=True)
    train, held_out = date_pairs(NUM_TRAIN, NUM_PREDICTED, seed=seed)
    print(f"{len(train):,} made-up examples, such as")
    for pair in train[:4]:
        print(f"  {pair.input:45} -> {pair.target}")
    print(flush=True)

    model, tokenizer = small_t5(seed), ByT5Tokenizer()
    rows = [pair._asdict() for pair in held_out]
    evaluation = prepare(load_dataset_like(rows), tokenizer, model.config)
    before = share_correct(
        predict(model.to(device), tokenizer, evaluation, num_rows=NUM_PREDICTED, batch_size=NUM_PREDICTED)
    )
    print(f"before training {before:.1%} of {len(rows)} held-out dates are right\n", flush=True)

    result = finetune(
        model,
        [pair._asdict() for pair in train],
        eval_dataset=rows,
        tokenizer=tokenizer,
        output_dir=folder,
        overwrite=(folder / "summary.json").is_file(),  # an earlier demo
        seed=seed,
        save_strategy="no",
        eval_strategy="no",
        per_device_eval_batch_size=NUM_PREDICTED,
        **recipe(num_steps),
    )
    summary = _summary(result, before, time.perf_counter() - began, machine)
    _show(summary, result)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def recipe(num_steps: int) -> dict[str, Any]:
    return {
        "max_steps": num_steps,
        "batch_size": 64,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": round(0.4 * num_steps), "decay_type": "linear"},
        "warmup_steps": round(0.15 * num_steps),
        "train_sampling_strategy": "random",  # by length, a batch would hold dates of one form, and less is learned
    }


def small_t5(seed: int, width: int = 128, num_layers: int = 2) -> Any:
    """A T5 of random fp32 parameters over bytes, as many as 968,704 by default. `num_layers`: of the encoder, and again
    of the decoder."""
    from transformers import T5Config, T5ForConditionalGeneration, set_seed

    set_seed(seed)
    shape: dict[str, Any] = {"d_model": width, "d_kv": width // 8, "num_heads": 8, "d_ff": 4 * width}
    shape |= {"num_layers": num_layers, "num_decoder_layers": num_layers, "attn_implementation": "eager"}
    tokens: dict[str, Any] = {"vocab_size": 384, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(dropout_rate=0.0, **shape, **tokens))


def _summary(result: FinetuneResult, before: float, seconds: float, machine: dict[str, Any]) -> dict[str, Any]:
    import transformers

    return {
        "exact_match_before": before,
        "exact_match_after": result.metrics["exact_match"],
        "seconds": round(seconds, 1),
        "train_seconds": result.metrics["train_seconds"],
        "steps": len(result.steps),
        "num_parameters": result.plan.num_parameters,
        "train_loss": result.metrics["train_loss"],
        "eval_loss": result.metrics["eval_loss"],
        "peak_ram_bytes": hardware.process_peak_ram_bytes(),
        "peak_vram_bytes": max((peak.get("vram", 0) for peak in result.peaks.values()), default=0),
        "planned_bytes": result.plan.tiers,
        "mean_step_seconds": mean_seconds(result.steps[len(result.steps) // 10 :]),  # the first tenth warms up
        "predictions": [asdict(sample) for sample in result.samples],
        "model": str(result.model_dir),
        "machine": machine | {"transformers": transformers.__version__},
    }


def _show(summary: dict[str, Any], result: FinetuneResult) -> None:
    step = summary["mean_step_seconds"]
    print(f"\none step takes {format_seconds(step['step'])}; its phases overlap:")
    for phase, name in _PHASES.items():
        if phase in step:
            print(f"  {name:32} {step[phase] * 1e3:8.2f} ms")
    print(f"\npeak RAM {format_bytes(summary['peak_ram_bytes'])}", end="")
    print(f", peak VRAM {format_bytes(summary['peak_vram_bytes'])}" if summary["peak_vram_bytes"] else "", end="")
    print(", including Python and torch")
    print(
        f"exact match on held-out dates: {summary['exact_match_before']:.1%} before, "
        f"{summary['exact_match_after']:.1%} after {summary['steps']} steps, {summary['seconds']:.0f} s in total"
    )
    print(f"the model is in {result.model_dir}, the numbers in {Path(result.output_dir) / 'summary.json'}")
    print(_NEXT, flush=True)


_NEXT = """
what next:
  offloadkit plan t5-3b --vram 24GiB              what a model takes; --gpu "RTX 4090" for a card by name
  offloadkit train t5-small rows.jsonl            your rows, one {"input": "...", "target": "..."} a line
  offloadkit recipes ls                           summarization, translation, chat, ...: a file to start from
  offloadkit doctor                               what this machine has, and what would make it faster"""
