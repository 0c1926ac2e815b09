"""Muon on several ranks: N ranks with K micro-batches equal one rank with N * K, bit for bit."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offloadkit
from offloadkit import OffloadConfig, OffloadEngine, Placement
from offloadkit.device import streams
from offloadkit.errors import ConfigError, EngineStateError, RankError
from offloadkit.facts.telemetry import Telemetry
from offloadkit.offload import matrix_exchange
from offloadkit.offload.layers import flat_layers
from offloadkit.optim.muon import newton_schulz_flops
from offloadkit.optim.table import Matrix
from offloadkit.planner.layout import exchange_sizes, workspace_bytes
from offloadkit.planner.owners import matrix_owners
from tests.distributed.doors import finetuned
from tests.distributed.pool import RankPool
from tests.distributed.runs import GPU_ALONE, GPU_STEP, RESIDENT, STREAMED_TO_GPU, joined, model, train
from tests.distributed.test_doors import assert_same
from tests.distributed.test_equal import assert_equal
from tests.models import tokens

EACH = {"exchange": "micro_batch"}
IN_RAM = Placement(weights="ram", step="gpu", activations="checkpoint")
QUICK: list[tuple[int, int, dict[str, Any]]] = [
    (3, 1, {"placement": RESIDENT, "working_dtype": "bf16", "model_options": {"conv1d": True}, "steps": 2}),
    (3, 2, {**EACH, "placement": GPU_STEP, "working_dtype": "bf16", "steps": 2}),
]
SLOW: list[tuple[int, int, dict[str, Any]]] = [
    (2, 1, {"placement": IN_RAM, "working_dtype": "bf16", "late": 1, "steps": 4, "model_options": {"spare": True}}),
    (3, 1, {"placement": RESIDENT, "working_dtype": "bf16", "late": 2, "steps": 4}),
    (3, 2, {**EACH, "placement": IN_RAM, "groups": True, "model_options": {"conv1d": True}}),
    (2, 2, {**EACH, "placement": GPU_ALONE, "working_dtype": "fp16", "loss_scale": 2.0**10}),
    (2, 1, {"placement": GPU_STEP, "move_to": RESIDENT, "working_dtype": "bf16", "model_options": {"spare": True}}),
    (3, 1, {"placement": RESIDENT, "move_to": STREAMED_TO_GPU, "working_dtype": "bf16", "halves": True}),
    (2, 1, {"placement": RESIDENT, "hosts": True, "model_options": {"frozen": True, "tied": False, "depth": 4}}),
    (3, 1, {"placements": [STREAMED_TO_GPU, IN_RAM, STREAMED_TO_GPU], "activation_checkpointing": True}),
    (3, 1, {"placement": GPU_STEP, "working_dtype": "bf16", "nan_in": 4, "on_nonfinite": "skip"}),
    (4, 1, {"placement": IN_RAM, "late": 4, "working_dtype": "bf16", "model_options": {"depth": 5, "hidden": 300}}),
]


@pytest.mark.parametrize(
    ("size", "micro_batches", "options"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_ranks_equal_one_rank_with_all_their_micro_batches(
    ranks: RankPool, one_thread: None, size: int, micro_batches: int, options: dict[str, Any]
) -> None:
    options = {"optimizer": "muon", **options}
    found = ranks.run(size, train, micro_batches=micro_batches, **options)
    assert sum(name == "exchange_parts" for name, _ in found[0]["log"]) > 2
    placed: dict[str, Any] = {"placement": Placement(), "placements": None, "late": None, "move_to": None}
    assert_equal(found, train(micro_batches=size * micro_batches, **{**options, **placed}))


@pytest.mark.parametrize("placement", [RESIDENT, pytest.param(IN_RAM, marks=pytest.mark.slow)])
def test_sums_that_are_exchanged_once_a_step(ranks: RankPool, one_thread: None, placement: Placement) -> None:
    options: dict[str, Any] = {"optimizer": "muon", "working_dtype": "bf16", "steps": 2}
    found = ranks.run(3, train, micro_batches=2, placement=placement, **options)
    assert_equal(found, train(micro_batches=6, placement=RESIDENT, simulate_ranks=3, **options))


@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((1, 3, 2), marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_with_other_numbers_of_ranks(
    ranks: RankPool, one_thread: None, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    options: dict[str, Any] = {"optimizer": "muon", "working_dtype": "bf16", "placement": RESIDENT, **EACH}
    for at, size in enumerate(sizes):
        more = {"steps": 1, "first_step": at, "save": tmp_path, "resume": tmp_path if at else None, **options}
        found = ranks.run(size, train, micro_batches=6 // size, **more)
    whole = train(micro_batches=6, steps=len(sizes), **options)
    assert all(torch.equal(found[0]["weights"][name], weights) for name, weights in whole["weights"].items())
    states = joined([whole])
    assert all(torch.equal(values, states[name]) for name, values in joined(found).items())


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_finetune_on_two_ranks_is_that_on_one(ranks: RankPool, tmp_path: Path) -> None:
    for name in ("t5", "llama"):
        options: dict[str, Any] = {"accumulation": 4, "offload": OffloadConfig(optimizer="muon", **EACH)}
        found = ranks.run(2, finetuned, name=name, folder=tmp_path / f"{name} two", **options)
        assert_same(found, finetuned(name, tmp_path / f"{name} one", **options))


def fails_in_an_update() -> float:
    """The last rank fails when it orthogonalizes its second matrix. Returns the seconds until a rank has an error."""
    calls, orthogonalize = count(1), matrix_exchange.orthogonalize

    def fail(*args: Any) -> None:
        if next(calls) == 2 and dist.get_rank() == dist.get_world_size() - 1:
            raise ZeroDivisionError
        orthogonalize(*args)

    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_exchange, "orthogonalize", fail)
        with pytest.raises((EngineStateError, RankError)):
            train(optimizer="muon", placement=RESIDENT, steps=6)
    return time.monotonic() - began


@pytest.mark.slow
def test_a_rank_that_fails_in_an_update_ends_the_others(ranks: RankPool) -> None:
    assert max(ranks.run(3, fails_in_an_update)) < 20


def received() -> tuple[int, set[int]]:
    """Planned and received bytes of matrices in a step."""
    telemetry = Telemetry()
    config = OffloadConfig(optimizer="muon", placement=RESIDENT, working_dtype="bf16")
    with OffloadEngine(model(tied=False, depth=4), config, device="cpu", telemetry=telemetry) as engine:
        for batch in tokens(3):
            batch[0, 1] = 1  # all blocks are used
            engine.backward(engine(batch))
            engine.step()
        engine.synchronize()
        return engine.plan.communicated["matrices"], {each.received["matrices"] for each in telemetry.records}


def test_ranks_receive_parts_of_matrices_that_their_owners_lack(ranks: RankPool) -> None:
    """Two ranks hold and own one of a block's two matrices each. With three ranks, rank 0 holds 65,536 elements of the
    first matrix, rank 1 holds the other elements, and rank 2 the second matrix.
    """
    for planned, found in ranks.run(2, received):
        assert (planned, found) == (4 * 2 * 71_680, {0})
    by_rank = [of_rank for _, (of_rank,) in ranks.run(3, received)]
    # The owners of a block's matrices are ranks 0 and 1, 2 and 0, 1 and 2, 0 and 1.
    elements = 3 * (71_500 - 65_536) + 65_536 + 2 * 71_500
    assert sum(by_rank) == 2 * 2 * elements, "there and back, in bf16"


def test_the_cpu_steps_no_matrices_of_several_ranks(ranks: RankPool) -> None:
    for answer in ranks.answers(2, train, optimizer="muon", placement=Placement()):
        assert isinstance(answer, ConfigError)
        assert "whose matrices Muon steps" in str(answer)


def test_the_gpu_is_busy_while_pieces_are_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assumed durations: 60 and 80 us for the first and the last part of a piece, 400 us for a matrix."""
    now = ends = busy = 0.0

    class Done:
        def __init__(self) -> None:
            self.at = ends

        def done(self) -> bool:
            return now >= self.at

    class Stream:
        record = staticmethod(Done)

        @staticmethod
        def run(work: Callable[[], float]) -> None:
            nonlocal ends, busy
            ends, busy = max(now, ends) + work(), busy + work()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(streams, "time", SimpleNamespace(sleep=sleep))
    exchange = matrix_exchange.MatrixExchange.__new__(matrix_exchange.MatrixExchange)
    exchange._queued = deque()
    for seconds in [*[60e-6] * 5, *[400e-6] * 5, *[80e-6] * 5] * 24:
        exchange._queue(lambda seconds=seconds: seconds, Stream)  # type: ignore[misc, arg-type]
    assert ends < 1.1 * busy


def test_owners_are_balanced_over_all_layers() -> None:
    block = [Matrix(1024, 4096)] * 4 + [Matrix(1024, 16384), Matrix(16384, 1024)]
    for num_ranks in (1, 2, 3, 4, 8):
        owners = matrix_owners([block] * 24, num_ranks)
        flops = [0] * num_ranks
        for owner in (each for layer in owners for each in zip(layer, block, strict=True)):
            flops[owner[0]] += owner[1].flops
        assert max(flops) <= 1.02 * sum(flops) / num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_the_planned_buffers_fit_every_layer_of_every_rank(num_ranks: int) -> None:
    layers = flat_layers(model(tied=False, depth=3, spare=True), OffloadConfig(optimizer="muon"))
    whole = [layer.shape().shared_by(num_ranks) for layer in layers]
    pieces, matrices = exchange_sizes(whole)
    for rank in range(num_ranks):
        for layer in layers:
            layer.cut_for(rank, num_ranks)
        assert exchange_sizes([layer.shape() for layer in layers]) == (pieces, matrices)
        assert max(2 * layer.shard.numel for layer in layers if layer.kind.step_unit == "matrix") <= pieces
    own = max(matrix.workspace_bytes for shape in whole for matrix in shape.matrices)
    assert workspace_bytes(whole) == own + 3 * pieces + 2 * matrices
    assert matrices >= 2 * 65 * 1100 * -(-3 // num_ranks)


def test_the_plan_divides_flops_and_counts_the_exchange() -> None:
    options: dict[str, Any] = {"gpu": "RTX 4090", "batch_size": 4, "ram": "128GiB", "vram": "20GiB"}
    one = offloadkit.plan("t5-small", **options, offload=OffloadConfig(optimizer="muon"))
    two = offloadkit.plan("t5-small", num_gpus=2, **options, offload=OffloadConfig(optimizer="muon"))
    matrices = [matrix for layer in two.layers for matrix in layer.matrices]
    numel = sum(matrix.rows * matrix.columns for matrix in matrices)
    assert two.communicated["matrices"] == pytest.approx(2 * 2 * numel / 4, rel=1e-3)
    assert "matrices" not in one.communicated
    assert two.seconds is not None
    assert two.basis.hardware is not None
    seconds = sum(newton_schulz_flops(*matrix[:2]) for matrix in matrices) / two.basis.hardware.bf16_flops_per_second
    assert seconds / 2 < two.seconds.busy["GPU step"] < one.seconds.busy["GPU step"]  # type: ignore[union-attr]
