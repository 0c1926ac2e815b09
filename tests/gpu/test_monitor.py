"""The monitor on a GPU: its figures against NVML, /proc and the wall clock, and the leftovers of ten cell runs."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import offloadkit
from offloadkit.device.measure import measure, vram_rate
from offloadkit.doors.demo.dates import date_pairs
from offloadkit.doors.demo.run import small_t5
from tests.gpu.conftest import card

MIB = 1 << 20


def device_bytes() -> int:
    """Bytes in use on the whole GPU, by NVML."""
    pynvml, handle = card()
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def others_bytes() -> int:
    """Bytes that NVML counts and `mem_get_info` does not: the driver's own."""
    free, total = torch.cuda.mem_get_info()
    return device_bytes() - (total - free)


@pytest.mark.usefixtures("alone")
def test_its_figures_are_what_nvml_proc_and_the_clock_say() -> None:
    reserved = others_bytes()  # the driver's own, which mem_get_info does not count
    shape = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 384}
    config = T5Config(**shape, decoder_start_token_id=0)
    tokens = torch.randint(3, 384, (8, 256), device="cuda")
    with offloadkit.OffloadEngine(T5ForConditionalGeneration(config)) as engine:
        monitor = offloadkit.Monitor(engine.plan, engine.telemetry, total_steps=60, display="none").start()

        def steps(number: int) -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(number):
                engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                engine.step()
            engine.synchronize()
            return time.perf_counter() - began

        steps(20)
        wall = steps(20) / 20
        rss = psutil.Process().memory_info().rss
        vram_now = device_bytes() - reserved
        figures = monitor.figures()
        monitor.close()
    memory = {tier.name: tier for tier in figures.memory}
    assert memory["VRAM"].used == pytest.approx(vram_now, rel=0.03, abs=32 * MIB)
    assert sum(size for _, size in memory["VRAM"].parts) == memory["VRAM"].used
    assert memory["RAM"].used == pytest.approx(rss, rel=0.03)
    assert figures.step_seconds == pytest.approx(wall, rel=0.1)
    assert figures.tokens_per_second == pytest.approx(2 * tokens.numel() / wall, rel=0.1)
    assert figures.steps_done == 40
    assert figures.eta_seconds == pytest.approx(20 * wall, rel=0.5)  # at the mean of all steps, the slow first ones too


@pytest.mark.usefixtures("alone")  # rates are measured
def test_a_loop_of_ones_own_is_set_against_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # an empty cache of measurements
    config = T5Config(d_model=256, d_ff=1024, num_layers=2, vocab_size=384, decoder_start_token_id=0)
    tokens = torch.randint(3, 384, (8, 64), device="cuda")
    with offloadkit.OffloadEngine(T5ForConditionalGeneration(config)) as engine:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        engine.synchronize()
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
        began = time.perf_counter()
        quick = vram_rate(torch.device("cuda"))
        took = time.perf_counter() - began
        assert torch.cuda.memory_reserved() == reserved
        with offloadkit.Monitor(engine.plan, engine.telemetry, total_steps=10, display="none") as monitor:
            for _ in range(10):
                engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                engine.step()
            engine.synchronize()
    figures = monitor.figures()
    assert took < 0.25
    assert quick == pytest.approx(measure("cuda").vram_bytes_per_second, rel=0.2)
    assert figures.slowdown is not None, figures.why_no_slowdown
    assert (figures.slowdown.baseline, figures.slowdown.is_planned) == ("predicted", False)
    budgets = {tier.name: tier.budget for tier in figures.memory}
    assert budgets["VRAM"] == pytest.approx(torch.cuda.get_device_properties(0).total_memory, rel=0.05)
    assert budgets["RAM"] is not None


def finetune(folder: Path, **options: Any) -> None:
    train, _ = date_pairs(64 * 4, 16)
    rows = [pair._asdict() for pair in train]
    fixed: dict[str, Any] = {
        "tokenizer": "byte",
        "max_steps": 8,
        "batch_size": 32,
        "save_strategy": "no",
        "overwrite": True,
    }
    offloadkit.finetune(small_t5(seed=0), rows, output_dir=folder, **fixed, **options)


class _BrokenError(Exception):
    pass


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("with_an_error", [False, True])
def test_ten_runs_of_a_cell_end_with_the_memory_of_the_first(
    with_an_error: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_an_error:
        step = offloadkit.OffloadEngine.step

        def breaks(engine: offloadkit.OffloadEngine, **options: Any) -> bool:
            if engine.num_updates == 5:
                raise _BrokenError
            return step(engine, **options)

        monkeypatch.setattr(offloadkit.OffloadEngine, "step", breaks)
    after, kept = [], None
    for _ in range(10):
        try:
            finetune(tmp_path)
        except _BrokenError as error:
            kept = error  # like a notebook, which keeps the last error
        gc.collect()
        torch.cuda.synchronize()
        after.append((torch.cuda.memory_allocated(), device_bytes(), psutil.Process().memory_info().rss))
    assert (kept is not None) is with_an_error
    first, last = after[0], after[-1]
    assert last[0] <= first[0] + MIB, after
    assert last[1] <= first[1] + 32 * MIB, after
    assert last[2] <= first[2] + 48 * MIB, after
