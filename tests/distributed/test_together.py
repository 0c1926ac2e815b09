"""What ranks agree on, what they refuse, and what they leave on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offloadkit import engine as engine_module
from offloadkit.config import OffloadConfig, Placement
from offloadkit.distributed import ranks as ranks_module
from offloadkit.engine import OffloadEngine
from offloadkit.errors import ConfigError, EngineStateError, RankError
from offloadkit.offload.layers import flat_layers
from offloadkit.optim.norm import norm_blocks
from tests.distributed.mirrored import MirroredRanks
from tests.distributed.pool import RankPool
from tests.distributed.runs import (
    CPU_STEP,
    GPU_ALONE,
    GPU_STEP,
    LATE_GRADIENTS,
    RESIDENT,
    Choosy,
    joined,
    model,
    traced,
    train,
)
from tests.distributed.test_equal import assert_equal
from tests.models import TinyLM, tokens
from tests.offload.test_waits import Twice


@pytest.mark.usefixtures("one_thread")
def test_a_nan_on_one_rank_skips_the_step_on_all(ranks: RankPool) -> None:
    options: dict[str, Any] = {"on_nonfinite": "skip", "nan_in": 3, "working_dtype": "bf16"}
    found = ranks.run(2, train, **options)
    assert_equal(found, train(2, **options))
    assert sum(norm != norm for norm in found[0]["norms"]) == 1


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 2, 3, 1), {"working_dtype": "bf16", "precision": "tiny"}),
        pytest.param((3, 4, 2), {"placement": RESIDENT, "working_dtype": "fp16"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks(
    ranks: RankPool, tmp_path: Path, sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Twelve micro-batches a step, whoever computes them."""
    folder = tmp_path / "checkpoint"
    for at, size in enumerate(sizes):
        more = {"steps": 1, "first_step": at, "save": folder, "resume": folder if at else None, **options}
        found = ranks.run(size, train, micro_batches=12 // size, **more)
        assert len(list(folder.glob("states-*"))) == size
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    expected = train(12, steps=len(sizes), **options)
    for each in (*found, expected):
        del each["norms"], each["log"]
    assert found[0]["num_updates"] == len(sizes)
    states = joined([expected])
    for name, values in joined(found).items():
        assert torch.equal(values, states[name]), name
    assert all(torch.equal(found[-1]["weights"][name], value) for name, value in expected["weights"].items())


@pytest.mark.slow
def test_dropout_goes_on_where_it_was_on_each_rank(ranks: RankPool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model_options": {"dropout": 0.3}}
    whole = ranks.run(2, train, steps=2, **options)
    ranks.run(2, train, steps=1, save=tmp_path / "saved", **options)
    resumed = ranks.run(2, train, steps=1, first_step=1, resume=tmp_path / "saved", **options)
    for name, weights in whole[1]["weights"].items():
        assert torch.equal(resumed[1]["weights"][name], weights), name


def apart(how: str) -> str:
    """The error of a rank where rank 1 does something else than rank 0."""
    is_first = dist.get_rank() == 0
    config = OffloadConfig(gradient_accumulation=2, learning_rate=1e-3 if is_first or how != "config" else 2e-3)
    if how == "placement":
        config = OffloadConfig(placement=Placement(weights="ram"))
    first, second = tokens(2)
    engine = None
    try:
        engine = OffloadEngine(model(hidden=1100 if is_first or how != "model" else 900), config, device="cpu")
        engine.backward(engine(first))
        if how == "dropped" and not is_first:
            engine.drop_gradients()
        if how == "gone" and not is_first:
            return "gone"
        engine.backward(engine(second))
        engine.step(boundary=True)
    except (ConfigError, EngineStateError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if engine is not None:
            engine.close()
    return "nothing"


@pytest.mark.parametrize(
    ("how", "messages"),
    [
        ("model", ["RankError: the ranks build engines for other models"] * 2),
        ("config", ["RankError: the ranks build engines for other models"] * 2),
        ("placement", ["ConfigError: weights='ram' and states='disk' with 2 ranks"] * 2),
        ("dropped", ["EngineStateError: the ranks have gone apart in their micro-batches (rank 0: 2 in step 0"] * 2),
        ("gone", ["RankError: exchanging gradients with the other ranks failed", "gone"]),
    ],
)
def test_ranks_that_go_apart_get_an_error(ranks: RankPool, how: str, messages: list[str]) -> None:
    for found, message in zip(ranks.run(2, apart, how=how), messages, strict=True):
        assert found.startswith(message)


def test_a_gradient_that_comes_too_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "joined_ranks", MirroredRanks)
    with OffloadEngine(Twice(27, 27, 3), OffloadConfig(), device="cpu") as engine:
        loss = engine(tokens(1)[0])
        with pytest.raises(EngineStateError, match="got a second gradient after the layer's were sent"):
            engine.backward(loss)


def alone() -> list[str]:
    """What a group of one does of torch.distributed while an engine trains."""
    called = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("new_group", "all_to_all_single", "broadcast", "all_gather", "all_reduce", "barrier"):
            patch.setattr(ranks_module.dist, name, lambda *args, name=name, **options: called.append(name))
        with OffloadEngine(model(), OffloadConfig(), device="cpu") as engine:
            assert engine._placed.gradients._exchange is engine._placed._gathers is None
            assert all(state.shard is state.layer for state in engine._placed.states)
            assert all(state.weights.own is state.weights.flat for state in engine._placed.states)
            engine.backward(engine(tokens(1)[0]))
            engine.step()
    return called


def test_a_world_of_one_calls_nothing(ranks: RankPool) -> None:
    assert ranks.run(1, alone) == [[]]


@pytest.mark.parametrize("num_ranks", [2, 3, 64])
def test_layers_are_cut_between_norm_blocks(num_ranks: int) -> None:
    layers = flat_layers(Choosy(depth=2, width=70, hidden=5000), OffloadConfig())
    for layer in layers:
        blocks = {(view.name, at): length for view in layer.views for at, length in blocks_of(view)}
        numels = []
        for rank in range(num_ranks):
            layer.cut_for(rank, num_ranks)
            shard = layer.shard
            assert shard.begin == sum(numels)
            numels.append(shard.numel)
            for piece in shard.views:
                whole = next(view for view in layer.views if view.parameter is piece.parameter)
                assert shard.begin + piece.start == whole.start + piece.first
                for at, length in blocks_of(piece):
                    assert blocks.pop((piece.name, at)) == length
        assert not blocks
        assert sum(numels) == layer.numel
        assert max(numels) - layer.numel / num_ranks <= 2**16


def blocks_of(view: Any) -> list[tuple[int, int]]:
    """(first element in the parameter, length) of the norm blocks of a piece of it."""
    return [(view.first + at, length) for at, length in norm_blocks([(0, view.numel)]).tolist()]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("placement", [CPU_STEP, GPU_STEP, LATE_GRADIENTS, GPU_ALONE, RESIDENT])
def test_a_rank_takes_what_was_planned(
    monkeypatch: pytest.MonkeyPatch, placement: Placement, micro_batches: int
) -> None:
    monkeypatch.setattr(engine_module, "joined_ranks", lambda device: MirroredRanks(device, rank=1, size=3))
    config = OffloadConfig(placement=placement, gradient_accumulation=micro_batches, working_dtype="bf16")
    with OffloadEngine(TinyLM(tied=False, depth=3), config, device="cpu") as engine:
        engine.backward(engine(tokens(1)[0]))
        placed, plan = engine._placed, engine.plan
        gradients, exchange = placed.gradients, placed.gradients._exchange
        assert exchange is not None
        sums = sum(layer.sums_bytes() for layer in plan.layers)
        in_vram = sum(buffer.numel() for buffer, _ in gradients._pool._free)
        in_vram += sum(each.own_buffer.numel() for each in gradients.layers if each.own_buffer is not None)
        in_vram += sum(each.accumulated.nbytes for each in gradients.layers if each.accumulated is not None)
        in_vram += exchange._received.numel() + exchange._summed.numel()
        autograds = max(layer.bucket_bytes() for layer in plan.layers)
        vram, ram = plan.tiers["vram"], plan.tiers["ram"]
        assert in_vram + autograds + sums == vram["gradients"]
        assert sum(each.weights.flat.nbytes for each in placed.states) == vram["working weights"]
        where, states = (vram if placement.states == "vram" else ram), ("master weights", "moments")
        taken = sum(sum(array.nbytes for array in each.flat.arrays.values()) for each in placed.states)
        assert taken == sum(where[name] for name in states)
        copies = [each.flat.weights for each in placed.states if each.flat.weights is not each.weights.own]
        assert sum(copy.nbytes for copy in copies) == ram.get("working weights", 0)
        host = sum(each.gradient.host.nbytes for each in placed.states if each.gradient.host is not None)
        host += sum(gradients._staging.get().nbytes for _ in range(gradients._staging.qsize()))
        assert host + sums == ram["gradients"]


def test_a_trace_shows_what_is_exchanged_beside_backward_and_gathered_beside_forward(
    ranks: RankPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for rank, (received, layers) in enumerate(ranks.run(2, traced, folder=tmp_path)):
        text = (tmp_path / ("trace-rank1.json" if rank else "trace.json")).read_text()
        events = json.loads(text)["traceEvents"]
        tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
        moved = [event for event in events if event["ph"] == "X" and tracks[event["tid"]] == "ranks"]
        for kind in ("exchange", "gather"):
            own = [event for event in moved if event["name"].startswith(kind)]
            assert sorted(event["name"] for event in own) == sorted(2 * [f"{kind} {name}" for name in layers])
            assert sum(event["args"]["bytes"] for event in own) == sum(each[kind] for each in received)
        phases = [event for event in events if event["name"].startswith("backward ")]
        first = next(event for event in moved if event["name"].startswith("exchange"))
        assert min(event["ts"] for event in phases) <= first["ts"] < max(event["ts"] + event["dur"] for event in phases)
