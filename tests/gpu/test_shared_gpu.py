"""Another process takes VRAM while this one trains: training continues with the same bits."""

from __future__ import annotations

import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import T5Config, T5ForConditionalGeneration

from offloadkit import OffloadConfig, OffloadEngine, OffloadSeq2SeqTrainer, Placement
from offloadkit.device import process_memory
from offloadkit.engine import outline, start
from offloadkit.facts import hardware, nvml
from offloadkit.facts.fitted import LOADED_LATER_BYTES
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
_HOLDS = """
import sys, torch
taken = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("here", flush=True)
sys.stdin.read()
"""
"""Takes the given bytes of VRAM until its input ends."""


@contextmanager
def _neighbour(program: str, *arguments: int) -> Iterator[None]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            yield
        finally:
            process.kill()
            process.wait()


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
    with _neighbour(_NEIGHBOUR, half, 1):
        found, moves = _trained(tmp_path / "beside", rows, OffloadConfig())
    del blocker
    print(f"the plan moved {moves} times")
    assert moves
    assert [name for name, weight in expected.items() if not torch.equal(weight, found[name])] == []


def _losses_in_a_small_budget(budget: int, between: Callable[[int, OffloadEngine], None]) -> list[float]:
    """The losses of 12 steps; `between` is called before each."""
    torch.manual_seed(0)
    shape: Any = {"d_model": 512, "d_ff": 2048, "d_kv": 64, "num_heads": 8, "num_layers": 6, "vocab_size": 512}
    model = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0, dropout_rate=0.1)).bfloat16()
    batch = {"input_ids": torch.randint(3, 500, (2, 128)).cuda(), "labels": torch.randint(3, 500, (2, 32)).cuda()}
    losses = []
    with OffloadEngine(model, OffloadConfig(vram=budget), example=batch) as engine:
        for step in range(12):
            between(step, engine)
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        engine.synchronize()
        assert not engine.telemetry.moves, "the plan has kept its budget"
    return losses


@pytest.mark.parametrize("has_nvml", [True, False], ids=["NVML", "no NVML"])
@pytest.mark.parametrize("arrives", [1, 6], ids=["while kernels load", "later"])
def test_a_neighbour_takes_nothing_of_a_small_budget(
    arrives: int, has_nvml: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The neighbour's VRAM is no CUDA context of this process."""
    device, budget = hardware.default_device(), 3 * GIB // 2
    if not has_nvml:
        monkeypatch.setattr(nvml, "process_bytes", lambda _: None)
    torch.cuda.empty_cache()
    expected = _losses_in_a_small_budget(budget, lambda *_: None)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    fractions: list[float] = []
    with ExitStack() as opened:

        def between(step: int, engine: OffloadEngine) -> None:
            if step == arrives:
                before, context = hardware.vram_of_others_bytes(device), hardware.vram_context_bytes(device)
                opened.enter_context(_neighbour(_HOLDS, GIB))
                assert hardware.vram_of_others_bytes(device) >= before + GIB
                assert hardware.vram_context_bytes(device) - context <= LOADED_LATER_BYTES
            fractions.append(torch.cuda.get_per_process_memory_fraction(device))

        found = _losses_in_a_small_budget(budget, between)
        seen = hardware.vram_context_bytes(device)
    own = hardware.vram_context_bytes(device)
    print(f"context {seen} beside the neighbour, {own} alone; torch reserved {torch.cuda.max_memory_reserved()}")
    assert found == expected
    assert torch.cuda.max_memory_reserved() + own <= budget
    total = torch.cuda.get_device_properties(device).total_memory
    assert min(fractions) * total >= budget - own - LOADED_LATER_BYTES - (1 << 20), "no VRAM of the budget was lost"


@pytest.mark.usefixtures("alone")
def test_nvml_counts_this_process_as_the_device_does_when_it_is_alone() -> None:
    device = hardware.default_device()
    process_memory.load_libraries(device)
    outside, own = hardware.vram_outside_bytes(device), nvml.process_bytes(device)
    if own is None:
        pytest.skip("NVML does not tell this process's VRAM here")
    context = own - torch.cuda.memory_reserved(device)
    print(f"NVML says {context}, mem_get_info {outside}")
    assert 0 <= outside - context <= 64 << 20
    assert hardware.vram_context_bytes(device) == context
