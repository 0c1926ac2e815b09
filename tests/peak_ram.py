"""Runs for tests of peak RAM, each in a fresh process.

`python -m tests.peak_ram train FOLDER folder|memory`, `head WAY`, or
`checkpoint FOLDER all|compact|weights large|small ram|disk`.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 1280,
    "intermediate_size": 4096,
    "num_hidden_layers": 5,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
"""A Llama of 0.14 billion parameters."""
NUM_STEPS, NUM_TOKENS = 2, 64
VOCABULARY, WIDTH, NUM_ROWS = 128_256, 64, 256


def save(folder: str) -> None:
    """An fp32 checkpoint of random weights in `folder`/checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(Path(folder) / "checkpoint")


def train(folder: str, where: str) -> None:
    """Print planned and measured bytes of a few steps of `finetune`; then [planned, measured] by phase.

    Args:
        where: "folder": the model is read from `folder`/checkpoint. "memory": it was made before.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    import offloadkit
    from offloadkit.facts import hardware

    result = offloadkit.finetune(
        Path(folder) / "checkpoint" if where == "folder" else LlamaForCausalLM(LlamaConfig(**SHAPE)),
        [{"text": "a" * NUM_TOKENS}] * NUM_STEPS,
        tokenizer="byte",
        output_dir=Path(folder) / "output",
        batch_size=1,
        max_input_length=NUM_TOKENS,
        offload=offloadkit.OffloadConfig(working_dtype="fp32"),
        use_cpu=True,
        save_strategy="no",
        monitor=False,
    )
    planned = result.plan.total_bytes("ram") + result.plan.total_bytes("vram")
    phases = {
        phase.name: (phase.ram, result.peaks[phase.name]["ram"])
        for phase in result.plan.phases
        if phase.name in result.peaks
    }
    print(json.dumps([planned, hardware.process_peak_ram_bytes(), result.plan.num_parameters, phases]))


def checkpoint(folder: str, contents: str, size: str, states: Any) -> None:
    """Print the bytes that saving a checkpoint with these contents and loading it add to peak RAM, its size, and the
    number of parameters, in bf16.

    Args:
        size: "large": 0.2 billion parameters. "small": 0.02 billion, and pieces of 1 MiB.
        states: "ram" or "disk".
    """
    import torch
    from torch import nn

    from offloadkit import OffloadConfig, OffloadEngine, Placement
    from offloadkit.checkpoint import arrays
    from offloadkit.facts import hardware

    number, width = (13, 4096) if size == "large" else (5, 2000)
    if size == "small":
        arrays.PIECE_BYTES = 2**20
    options: dict[str, dict[str, Any]] = {
        "all": {},
        "compact": {"checkpoint_precision": "compact"},
        "weights": {"save_only_model": True},
    }
    layer = partial(nn.utils.skip_init, nn.Linear, width, width, dtype=torch.bfloat16)
    model = nn.Sequential(*[layer() for _ in range(number)])
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1e-4)
    saved = Path(folder) / "saved"
    config = OffloadConfig(placement=Placement(states=states), disk=folder, **options[contents])
    with OffloadEngine(model, config, device="cpu") as engine:
        engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)).sum())
        engine.step()
        engine.synchronize()
        before = hardware.process_ram_bytes()
        engine.save_checkpoint(saved)
        engine.load_checkpoint(saved)
        added = [engine.telemetry.peaks[name]["ram"] - before for name in ("saving", "resuming")]
        num_parameters = engine.plan.num_parameters
    print(json.dumps([*added, sum(path.stat().st_size for path in saved.iterdir()), num_parameters]))


def head(way: str) -> None:
    """Print the bytes that forward and backward of a large head add to peak RAM, and the loss."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from offloadkit.facts import hardware
    from offloadkit.hf.loss import compute_loss_in_chunks

    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 1}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **shape)).train()
    if way == "in chunks":
        compute_loss_in_chunks(model)
    few, many = (torch.randint(VOCABULARY, (1, number)) for number in (8, NUM_ROWS))
    model(input_ids=few, labels=few).loss.backward()  # allocates gradients and loads kernels
    before = hardware.process_ram_bytes()
    loss = model(input_ids=many, labels=many).loss
    loss.backward()
    print(json.dumps([hardware.process_peak_ram_bytes() - before, loss.item()]))


if __name__ == "__main__":
    {"save": save, "train": train, "checkpoint": checkpoint, "head": head}[sys.argv[1]](*sys.argv[2:])
