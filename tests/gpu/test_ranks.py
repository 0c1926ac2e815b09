"""Two ranks train as one, bit for bit, over NCCL and through shared RAM; they measure and plan together.

With two GPUs, each rank gets one. Otherwise the ranks share a GPU, and the speed of the exchange is not checked.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadkit.device.process_memory import DeviceMemory
from offloadkit.distributed.machine import measured_together
from offloadkit.distributed.ranks import Group
from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts import graphs as facts_graphs
from offloadkit.facts import hardware
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.fitted import FEW_CTAS, NCCL_BYTES, NCCL_FEW_BYTES
from offloadkit.facts.hardware import Hardware
from offloadkit.facts.telemetry import Telemetry
from tests.distributed.doors import finetuned, pairs
from tests.distributed.moves import moving
from tests.distributed.planning import all_used
from tests.distributed.pool import RankPool
from tests.distributed.runs import CPU_STEP, GPU_STEP, RESIDENT, STREAMED, STREAMED_TO_GPU, train, train_by_graphs
from tests.distributed.test_doors import assert_same
from tests.distributed.test_equal import assert_equal
from tests.distributed.test_moves import assert_alike
from tests.models import tokens


def two_equal_one(micro_batches: int, runs: list[dict[str, Any]], **of_one: Any) -> None:
    """Each of `runs` is the same on two ranks as in VRAM on one rank with twice the micro-batches."""
    pool = RankPool("nccl")
    try:
        for run in runs:
            options: dict[str, Any] = {"working_dtype": "bf16", "steps": 5, "device": "cuda", **run}
            found = pool.run(2, train, micro_batches=micro_batches, **options)
            alone = {**options, "placement": RESIDENT, "move_to": None, **of_one}
            assert_equal(found, train(2 * micro_batches, **alone))
    finally:
        pool.close()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_two_ranks_equal_one(micro_batches: int) -> None:
    places = (RESIDENT, CPU_STEP, GPU_STEP, STREAMED, STREAMED_TO_GPU)
    two_equal_one(micro_batches, [{"placement": place, "exchange": "micro_batch"} for place in places])


def test_two_ranks_train_by_graphs() -> None:
    """The bits of one rank whose blocks run eagerly."""
    pool = RankPool("nccl")
    options: dict[str, Any] = {"working_dtype": "bf16", "steps": 6, "device": "cuda"}
    try:
        for place in (RESIDENT, CPU_STEP, STREAMED, Placement(activations="checkpoint")):
            found = pool.run(2, train_by_graphs, placement=place, **options)
            assert all(num > 0 for _, num in found)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(facts_graphs, "device_types", set())
                assert_equal([each for each, _ in found], train(2, placement=RESIDENT, **options))
    finally:
        pool.close()


def test_sums_that_are_exchanged_once_a_step_are_added_rank_by_rank() -> None:
    places = (RESIDENT, CPU_STEP, STREAMED, STREAMED_TO_GPU)
    two_equal_one(2, [{"placement": place} for place in places], simulate_ranks=2)


def test_muon_on_two_ranks_is_that_on_one() -> None:
    run: dict[str, Any] = {"optimizer": "muon", "exchange": "micro_batch", "model_options": {"spare": True}}
    two_equal_one(1, [{"placement": place, **run} for place in (RESIDENT, GPU_STEP, STREAMED_TO_GPU)])


def test_shared_weights_are_written_between_steps_and_move() -> None:
    """A layer that was written stays unpinned until the next step."""
    runs: list[dict[str, Any]] = [{"placement": STREAMED, "halves": True}]
    runs.append({"placement": STREAMED_TO_GPU, "halves": True, "move_to": RESIDENT})
    runs.append({"placement": RESIDENT, "halves": True, "move_to": STREAMED})
    two_equal_one(1, runs)


def test_where_one_gpu_is_full_both_repeat_the_window() -> None:
    """The rest of the backward is exchanged over NCCL; nothing hangs, and the numbers equal a run with room."""
    pool = RankPool("nccl")
    each: dict[str, Any] = {"micro_batches": 2, "exchange": "micro_batch"}
    try:
        for where, full, more in (
            ("backward", [(1, 1)], {}),
            ("exchange", [(0, 1), (1, 3)], {}),
            ("forward", [(1, 1), (0, 3)], {"micro_batches": 2}),
            ("backward", [(0, 2)], each),
        ):
            options: dict[str, Any] = {"device": "cuda", "working_dtype": "bf16", **more}
            room = pool.run(2, moving, begins=CPU_STEP, **options)
            found = pool.run(2, moving, where=where, full=full, **options)
            assert found[0]["moves"]
            assert_alike(found, room)
    finally:
        pool.close()


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_finetune_on_two_ranks_is_that_on_one(tmp_path: Path, name: str) -> None:
    pool = RankPool("nccl")
    options: dict[str, Any] = {"accumulation": 4, "eval_dataset": pairs(16, 11), "on_gpu": True, "monitor": False}
    try:
        found = pool.run(2, finetuned, name=name, folder=tmp_path / "two", **options)
    finally:
        pool.close()
    assert_same(found, finetuned(name, tmp_path / "one", **options))


def measured() -> tuple[Hardware, int, int]:
    """(the machine as both GPUs measure it, VRAM of NCCL with its own number of thread blocks, VRAM with few)."""
    device = hardware.default_device()
    group = Group(device)
    try:
        found = measured_together(group, device)
        taken = []
        for most in (FEW_CTAS, 0, FEW_CTAS):
            group.connect(most)
            taken.append(hardware.library_bytes[device.index])
        return found, *taken[1:]
    finally:
        group.close()
        assert hardware.library_bytes[device.index] == 0


def counted(micro_batches: int) -> tuple[Any, dict[str, int], list[dict[str, int]], int, int]:
    """(placements planned for an example, bytes to receive, bytes received by step, number of GPUs, peak VRAM of the
    process)."""
    device, telemetry = hardware.default_device(), Telemetry()
    memory = DeviceMemory(device)
    options: dict[str, Any] = {"gradient_accumulation": micro_batches, "exchange": "micro_batch"}
    config = OffloadConfig(working_dtype="bf16", vram="8GiB", **options)
    made, batches = all_used(tied=False, hidden=4000), tokens(3 * micro_batches, str(device))
    with OffloadEngine(made, config, device=device, telemetry=telemetry, example=batches[0]) as engine:
        for batch in batches:
            engine.backward(engine(batch))
            engine.step()
            memory.sample()
        engine.synchronize()
        plan, received = engine.plan, [record.received for record in telemetry.records]
        return plan.placements, plan.communicated, received, plan.num_gpus, memory.peak_bytes


def test_two_ranks_measure_and_plan_together() -> None:
    pool = RankPool("nccl")
    try:
        (first, own, few), (second, *_) = pool.run(2, measured)
        assert replace(first, device=second.device) == second
        assert first.num_ranks == 2
        rates = [rate / 1e9 for rate in (first.link_bytes_per_second, first.few_ctas_link_bytes_per_second)]
        print("link {:.1f} GB/s, {:.1f} by few".format(*rates), f"NCCL took {own >> 20} MiB, {few >> 20} by few")
        if torch.cuda.device_count() > 1:  # on one GPU, the VRAM of the two ranks cannot be told apart
            assert first.link_bytes_per_second > first.few_ctas_link_bytes_per_second > 2e9
            assert own <= NCCL_BYTES
            assert few <= NCCL_FEW_BYTES
        for micro_batches in (1, 2):
            one, other = pool.run(2, counted, micro_batches=micro_batches)
            assert one[0] == other[0]
            for _, planned, found, num_gpus, vram in (one, other):
                assert num_gpus == 2
                assert vram <= 8 << 30, "including NCCL's memory"
                assert {kind: size for kind, size in found[-1].items() if kind != "agreement"} == planned
    finally:
        pool.close()
