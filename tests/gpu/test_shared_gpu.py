"""Another process takes VRAM at random times, and micro-batches grow: training continues with the same bits."""

from __future__ import annotations

import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import T5Config, T5ForConditionalGeneration

from offloadkit import OffloadConfig, OffloadSeq2SeqTrainer, Placement
from offloadkit.engine import outline, start
from offloadkit.facts import hardware
from tests.hf.training import arguments

GIB = 1 << 30
_NEIGHBOUR = """
import random, sys, time, torch
most, seed = int(sys.argv[1]), int(sys.argv[2])
draw = random.Random(seed)
print("here", flush=True)
while True:
    taken = []
    try:
        for _ in range(draw.randint(1, 8)):
            taken.append(torch.empty(most // 8, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        pass
    time.sleep(draw.uniform(0.05, 0.6))
    taken.clear()
    torch.cuda.empty_cache()
    time.sleep(draw.uniform(0.05, 0.6))
"""
"""Takes up to the given bytes of VRAM, and releases them."""


def _rows(number: int, short: int) -> list[dict[str, Any]]:
    """The first half has `short` tokens, the second half three times as many."""
    draw = random.Random(0)
    lengths = [short if at < number // 2 else 3 * short for at in range(number)]
    return [
        {
            "input_ids": [draw.randrange(3, 500) for _ in range(length)],
            "labels": [draw.randrange(3, 500) for _ in range(length // 4)],
        }
        for length in lengths
    ]


def _model() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    shape: Any = {"d_model": 1024, "d_ff": 4096, "d_kv": 64, "num_heads": 16, "num_layers": 12, "vocab_size": 512}
    return T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0, dropout_rate=0.1))


def _trained(folder: Path, rows: list[dict[str, Any]], config: OffloadConfig) -> tuple[dict[str, torch.Tensor], int]:
    options: dict[str, Any] = {"bf16": True, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}
    options |= {"use_cpu": False, "max_steps": len(rows) // 16, "logging_steps": 1000, "seed": 3}
    trainer = OffloadSeq2SeqTrainer(
        model=_model(),
        args=arguments(folder, **options),
        train_dataset=Dataset.from_list(rows).to_iterable_dataset(),  # a stream does not reveal its longest row
        offload=config,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about the move
        trainer.train()
    moves = len(trainer.telemetry.moves)
    trainer.close()
    return {name: weight.cpu() for name, weight in trainer.model.state_dict().items()}, moves


def test_a_neighbour_that_takes_half_of_the_gpu_changes_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "needs_plan", outline.needs_plan)  # plan as outside of tests
    device = hardware.default_device()
    rows = _rows(16 * 30, 96)
    lean = Placement(weights="ram", activations="checkpoint")
    expected, _ = _trained(tmp_path / "lean", rows, OffloadConfig(placement=lean))
    torch.cuda.empty_cache()
    half = hardware.vram_bytes(device)[0] // 2
    spare = 2 * GIB  # VRAM left to training by the other process
    blocker = torch.empty(hardware.vram_bytes(device)[0] - half - spare, dtype=torch.uint8, device=device)
    command = [sys.executable, "-c", _NEIGHBOUR, str(half), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as neighbour:
        try:
            assert neighbour.stdout is not None
            assert neighbour.stdout.readline() == "here\n"
            found, moves = _trained(tmp_path / "beside", rows, OffloadConfig())
        finally:
            neighbour.kill()
    del blocker
    print(f"the plan moved {moves} times")
    assert moves
    assert [name for name, weight in expected.items() if not torch.equal(weight, found[name])] == []
