"""One run of `benchmarks.rss` in this process: `python -m benchmarks.rss_run save|train CASE FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NUM_STEPS = 3


def save(case: dict[str, Any], folder: Path) -> None:
    """An fp32 checkpoint of random weights in `folder`/checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    model: Any
    values: dict[str, Any] = {**case["shape"], "pad_token_id": 0}
    if "d_model" in values:
        values["decoder_start_token_id"] = 0
        model = T5ForConditionalGeneration(T5Config(**values, dropout_rate=0.0))
    else:
        model = LlamaForCausalLM(LlamaConfig(**values))
    model.save_pretrained(folder / "checkpoint")


def train(case: dict[str, Any], folder: Path) -> None:
    """A few steps of `finetune`; what was planned and measured goes to `folder`/row.json."""
    import torch

    import offloadkit
    from benchmarks.measure import describe_machine, versions
    from offloadkit import hardware
    from offloadkit.hf.models import load_model

    inputs, targets = case["tokens"]
    dtype = case.get("dtype", "fp32")
    model: Any = folder / "checkpoint"
    if case.get("loaded_first"):
        model = load_model(model, progress=False)
    row = {"input": "a" * inputs, "target": "b" * targets} if targets else {"text": "a" * inputs}
    result = offloadkit.finetune(
        model,
        [row] * case["rows"] * NUM_STEPS,
        tokenizer="byte",
        output_dir=folder / "output",
        batch_size=case["rows"],
        max_input_length=inputs,
        max_target_length=targets,
        offload=offloadkit.OffloadConfig(working_dtype=dtype),
        use_cpu=True,
        save_strategy="no",
    )
    sizes = result.plan
    (folder / "row.json").write_text(
        json.dumps(
            {
                "planned_bytes": sizes.total_bytes("ram") + sizes.total_bytes("vram"),
                "peak_ram_bytes": hardware.process_peak_ram_bytes(),
                "num_parameters": sizes.num_parameters,
                "tiers": sizes.tiers,
                "num_steps": len(result.steps),
                "machine": describe_machine(torch.device("cpu")),
                "versions": versions(),
            }
        )
    )


if __name__ == "__main__":
    {"save": save, "train": train}[sys.argv[1]](json.loads(sys.argv[2]), Path(sys.argv[3]))
