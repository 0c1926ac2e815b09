"""Frozen weights on several ranks: in RAM once for all ranks of a host, never exchanged or gathered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offloadkit.device.host_memory import SharedSlab
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import EngineStateError
from offloadkit.facts.config import OffloadConfig, Placement
from tests.distributed.pool import RankPool
from tests.distributed.runs import RESIDENT, STREAMED, model, train
from tests.distributed.test_equal import assert_equal
from tests.models import tokens

pytestmark = pytest.mark.usefixtures("one_thread")

ADAPTED: dict[str, Any] = {"model_options": {"adapters": True, "tied": False}, "steps": 2}
RECOMPUTED = replace(STREAMED, activations="checkpoint")


@pytest.mark.parametrize(
    ("micro_batches", "options"),
    [
        (1, {"placement": STREAMED, "working_dtype": "bf16"}),
        (1, {"placement": STREAMED, "model_options": {"adapters": True, "tied": True}, "halves": True}),
        (2, {"placement": RECOMPUTED, "exchange": "micro_batch"}),
        (1, {"placement": RESIDENT}),
        pytest.param(1, {"placement": RESIDENT, "move_to": RECOMPUTED}, marks=pytest.mark.slow),
        pytest.param(1, {"placement": STREAMED, "move_to": RESIDENT, "late": 1}, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_equal_one(ranks: RankPool, micro_batches: int, options: dict[str, Any]) -> None:
    options = ADAPTED | options
    found = ranks.run(2, train, micro_batches=micro_batches, **options)
    alone = options | {"placement": RESIDENT, "move_to": None, "late": None}
    assert_equal(found, train(micro_batches=2 * micro_batches, **alone))


def test_a_checkpoint_of_two_ranks_goes_on_on_one(ranks: RankPool, tmp_path: Path) -> None:
    options: dict[str, Any] = ADAPTED | {"exchange": "micro_batch"}
    ranks.run(2, train, micro_batches=1, placement=STREAMED, save=tmp_path / "saved", **options)
    found = train(micro_batches=2, placement=STREAMED, resume=tmp_path / "saved", first_step=2, **options)
    whole = train(micro_batches=2, placement=RESIDENT, **options | {"steps": 4})
    for name, weights in whole["weights"].items():
        assert torch.equal(found["weights"][name], weights), name


def shared(placement: Placement) -> tuple[list[bool], list[int], int, int]:
    """Whether each frozen layer's RAM is shared and this rank sees what rank 0 writes there; planned bytes of frozen
    weights in RAM; bytes gathered in two steps, and those of the trained weights of the other rank."""
    made = model(dist.get_rank(), adapters=True, tied=False)
    with OffloadEngine(made, OffloadConfig(placement=placement), device="cpu") as engine:
        for batch in tokens(4)[dist.get_rank() :: 2]:
            engine.backward(engine(batch))
            engine.step()
        engine.synchronize()
        gathered = sum(record.received.get("gather", 0) for record in engine.telemetry.records)
        others = sum(
            layer.gathered_bytes(where) for layer, where in zip(engine.plan.layers, engine.plan.placements, strict=True)
        )
        frozen = [state for state in engine.placed.states if not state.layer.kind.is_trained]
        seen = []
        for state in frozen:
            is_shared = isinstance(state.memory.weights, SharedSlab)
            dist.barrier()
            if is_shared and dist.get_rank() == 0:
                state.weights.flat.fill_(7)
            dist.barrier()
            seen.append(is_shared and bool((state.weights.flat == 7).all()))
            dist.barrier()
        return seen, [engine.plan.tiers["ram"].get("frozen weights", 0)], gathered, others


def test_frozen_weights_in_ram_are_there_once(ranks: RankPool) -> None:
    in_ram, in_vram = (ranks.run(2, shared, placement=where) for where in (STREAMED, RESIDENT))
    assert [seen for seen, _, _, _ in in_ram] == [[True, True, True]] * 2, "two blocks and the embeddings"
    made = model(adapters=True, tied=False)
    frozen = [made.embed.weight, *made.blocks.parameters()]
    whole = sum(parameter.nbytes for parameter in frozen if not parameter.requires_grad)
    planned = sum(sizes[0] for _, sizes, _, _ in in_ram)
    assert whole <= planned <= 1.1 * whole, "each rank counts its share, padding included"
    for seen, _, gathered, others in in_vram:
        assert seen == [False] * 3
        assert 0 < gathered <= 2 * others
    trained = sum(p.nbytes for p in model(adapters=True, tied=False).parameters() if p.requires_grad)
    assert 0 < sum(others for _, _, _, others in in_vram) <= 1.2 * trained


def written_alone() -> str:
    made = model(adapters=True, tied=False)
    with OffloadEngine(made, OffloadConfig(placement=STREAMED), device="cpu") as engine:
        engine.backward(engine(tokens(1)[0]))
        if dist.get_rank() == 1:
            with torch.no_grad():
                made.blocks[0].up.base_layer.weight.mul_(2)  # type: ignore[union-attr, operator]
        try:
            engine.step()
        except EngineStateError as error:
            engine.drop_gradients()
            return str(error)
    return ""


def written_together() -> str:
    made = model(adapters=True, tied=False)
    with OffloadEngine(made, OffloadConfig(placement=STREAMED), device="cpu"):
        try:
            with torch.no_grad():
                made.embed.weight.mul_(2)
        except EngineStateError as error:
            return str(error)
    return ""


def test_frozen_embeddings_that_ranks_share_cannot_be_written(ranks: RankPool) -> None:
    for error in ranks.run(2, written_together):
        assert "the frozen embeddings 'embed' are in RAM that several ranks share, and cannot be written" in error


def test_a_frozen_weight_written_on_one_rank_is_an_error(ranks: RankPool) -> None:
    for error in ranks.run(2, written_alone):
        assert "weights of 'blocks.0' were written or loaded on rank 1, but not on the other ranks" in error
