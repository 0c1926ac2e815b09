"""Agreement between ranks: common values, refusals, and the files they write."""

from __future__ import annotations

import json
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from offloadkit.checkpoint.run import SummationOrder
from offloadkit.distributed import ranks as ranks_module
from offloadkit.distributed.ranks import Group
from offloadkit.engine import engine as engine_module
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import ConfigError, EngineStateError, OffloadkitError, RankError
from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.offload import gradient_buffers, gradients, states
from offloadkit.offload import model as model_module
from offloadkit.offload.layers import flat_layers
from offloadkit.offload.shards import GradientExchange
from offloadkit.offload.weight_ring import WeightRing
from offloadkit.optim.norm import norm_blocks
from tests.distributed.mirrored import MirroredRanks
from tests.distributed.pool import RankPool
from tests.distributed.runs import (
    CPU_STEP,
    GPU_ALONE,
    GPU_STEP,
    LATE_GRADIENTS,
    LEAST,
    RESIDENT,
    STREAMED,
    STREAMED_TO_GPU,
    Choosy,
    joined,
    logged,
    model,
    patched_hosts,
    traced,
    train,
)
from tests.distributed.test_equal import assert_equal
from tests.messages import check_says
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
        pytest.param((2, 1, 3), {"placement": LEAST, "working_dtype": "bf16"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks(
    ranks: RankPool, tmp_path: Path, sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Twelve micro-batches a step on any number of ranks."""
    folder = tmp_path / "checkpoint"
    for at, size in enumerate(sizes):
        more = {"steps": 1, "first_step": at, "save": folder, "resume": folder if at else None, **options}
        more["exchange"] = "micro_batch"
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
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:the checkpoint has the weights alone")
@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_precision": "compact", "working_dtype": "bf16", "placement": LEAST},
        {"save_only_model": True, "working_dtype": "bf16", "precision": "tiny", "placement": LEAST},
        {"save_only_model": True, "working_dtype": "fp16", "placement": RESIDENT},
    ],
    ids=["compact moments", "weights alone", "weights alone, fp16"],
)
def test_smaller_checkpoints_do_not_depend_on_the_number_of_ranks(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Six micro-batches a step, saved by one to three ranks and resumed by others."""
    options = {"exchange": "micro_batch", **options}
    found = []
    for saved, now in ((1, 3), (2, 1), (3, 2), (1, 1)):
        folder = tmp_path / f"by {saved} for {now}"
        ranks.run(saved, train, micro_batches=6 // saved, steps=2, save=folder, **options)
        assert len(list(folder.glob("states-*"))) == ("save_only_model" not in options) * saved
        more = {"steps": 1, "first_step": 2, "resume": folder, **options}
        found.append(ranks.run(now, train, micro_batches=6 // now, **more))
    states = joined(found[0])
    for each in found[1:]:
        assert joined(each).keys() == states.keys()
        assert all(torch.equal(values, states[name]) for name, values in joined(each).items())
        assert all(torch.equal(each[-1]["weights"][name], value) for name, value in found[0][0]["weights"].items())


def resumed(folder: Path, **options: Any) -> list[str]:
    """The warnings of a resumed rank about the order of summation."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(steps=1, first_step=1, resume=folder, **options)
    return [str(each.message) for each in caught if "gradients were summed" in str(each.message)]


@pytest.mark.slow
def test_going_on_with_another_order_of_addition_says_so(ranks: RankPool, one_thread: None, tmp_path: Path) -> None:
    """Rank 0 warns once, and only if the order differs."""
    ranks.run(2, train, micro_batches=2, steps=1, save=tmp_path)
    (said,) = resumed(tmp_path, micro_batches=4)
    check_says(said, "2 ranks x 2 micro-batches", "exchange='step'", "1 rank", "last bits")
    assert ranks.run(2, resumed, folder=tmp_path, micro_batches=2) == [[], []]
    first, second = ranks.run(2, resumed, folder=tmp_path, micro_batches=2, exchange="micro_batch")
    assert (len(first), second) == (1, [])


@pytest.mark.parametrize(
    ("saved", "now", "same"),
    [
        ((2, 1, "step"), (1, 2, "step"), True),
        ((2, 2, "step"), (3, 2, "step"), False),
        ((2, 2, "micro_batch"), (1, 4, "step"), True),
        ((1, 4, "step"), (4, 1, "step"), True),
        ((1, 4, "step"), (2, 2, "step"), False),
    ],
)
def test_which_ranks_add_in_one_order(saved: Any, now: Any, same: bool) -> None:
    assert (SummationOrder(*saved).order_warning(SummationOrder(*now)) is None) == same


@pytest.mark.slow
def test_dropout_goes_on_where_it_was_on_each_rank(ranks: RankPool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model_options": {"dropout": 0.3}}
    whole = ranks.run(2, train, steps=2, **options)
    ranks.run(2, train, steps=1, save=tmp_path / "saved", **options)
    resumed = ranks.run(2, train, steps=1, first_step=1, resume=tmp_path / "saved", **options)
    for name, weights in whole[1]["weights"].items():
        assert torch.equal(resumed[1]["weights"][name], weights), name


def apart(how: str) -> str:
    """The error on a rank when rank 1 deviates from rank 0."""
    is_first = dist.get_rank() == 0
    options: dict[str, Any] = {"learning_rate": 1e-3 if is_first or how != "config" else 2e-3}
    config = OffloadConfig(gradient_accumulation=2, exchange="micro_batch", **options)
    if how == "placement":
        config = OffloadConfig(placement=Placement(weights="vram" if is_first else "ram"))
    if how == "written":
        config = OffloadConfig(placement=STREAMED)
    first, second = tokens(2)
    engine = None
    try:
        engine = OffloadEngine(model(hidden=1100 if is_first or how != "model" else 900), config, device="cpu")
        engine.backward(engine(first))
        if how == "dropped" and not is_first:
            engine.drop_gradients()
        if how == "gone" and not is_first:
            return "gone"
        if config.gradient_accumulation > 1:
            engine.backward(engine(second))
        if how == "written" and not is_first:
            engine.module.blocks[1].load_state_dict(engine.module.blocks[0].state_dict())
        engine.step(boundary=True)
    except (ConfigError, EngineStateError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if engine is not None:
            engine.close()
    return "nothing"


@pytest.mark.parametrize(
    ("how", "facts"),
    [
        ("model", [("RankError", "models")] * 2),
        ("config", [("RankError", "configs")] * 2),
        ("placement", [("ConfigError", "'blocks.0'", "VRAM on rank 0", "RAM on rank 1")] * 2),
        ("written", [("EngineStateError", "'blocks.1'", "rank 1", "written")] * 2),
        ("dropped", [("EngineStateError", "micro-batches", "rank 0: 2 in step 0")] * 2),
        ("gone", [("RankError", "exchanging gradients", "other ranks"), ("gone",)]),
    ],
)
def test_ranks_that_go_apart_get_an_error(ranks: RankPool, how: str, facts: list[tuple[str, ...]]) -> None:
    for found, (kind, *said) in zip(ranks.run(2, apart, how=how), facts, strict=True):
        assert found.startswith(kind)
        check_says(found, *said)


def test_a_gradient_that_comes_too_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "joined_ranks", MirroredRanks)
    with OffloadEngine(Twice(27, 27, 3), OffloadConfig(), device="cpu") as engine:
        loss = engine(tokens(1)[0])
        with pytest.raises(EngineStateError, match="got a second gradient after the layer's gradients were sent"):
            engine.backward(loss)


def sums(short: bool) -> tuple[int, int, str]:
    """(exchanges in backward, exchanges in step(), error of a fourth backward) in a window of three micro-batches, or
    of two if `short`."""
    log, error = list[tuple[str, int]](), ""
    config = OffloadConfig(placement=RESIDENT, gradient_accumulation=3, working_dtype="bf16")
    with pytest.MonkeyPatch.context() as patch, OffloadEngine(model(), config, device="cpu") as engine:
        patch.setattr(Group, "exchange", logged("exchange", Group.exchange, log))
        batches = tokens(4)
        for batch in batches[: 2 if short else 3]:
            engine.backward(engine(batch))
            engine.step(boundary=False)
        in_backward = len(log)
        if not short:
            try:
                engine.backward(engine(batches[3]))
            except EngineStateError as raised:
                error = str(raised)
        engine.step(boundary=True)
        return in_backward, len(log) - in_backward, error


def test_sums_are_exchanged_in_the_last_backward_and_at_the_end_of_a_shorter_window(ranks: RankPool) -> None:
    number = len(flat_layers(model(), OffloadConfig()))
    for in_backward, in_step, error in ranks.run(2, sums, short=False):
        assert (in_backward, in_step) == (number, 0)
        check_says(error, "backward()", "gradient_accumulation=3")
    for in_backward, in_step, _ in ranks.run(2, sums, short=True):
        assert in_backward == 0 < in_step <= number


def written_after_closing() -> bool:
    """Whether a rank writes only to its own weights after closing."""
    made, factor = model(), 2.0 + dist.get_rank()
    with OffloadEngine(made, OffloadConfig(placement=STREAMED), device="cpu") as engine:
        engine.backward(engine(tokens(1)[0]))
        engine.step()
    weight = made.blocks[0].up.weight
    before = weight.detach().clone()
    dist.barrier()
    with torch.no_grad():
        weight.mul_(factor)
    dist.barrier()
    return torch.equal(weight, before * factor)


def test_closing_gives_each_rank_weights_of_its_own(ranks: RankPool) -> None:
    assert ranks.run(2, written_after_closing) == [True, True]


def failing() -> str:
    """The error on rank 0 when rank 1 fails to step shared weights in RAM."""
    made = model()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(states, "optimizer_step", lambda *args: 1 / 0)
        engine = OffloadEngine(made, OffloadConfig(placement=STREAMED), device="cpu")
        try:
            engine.backward(engine(tokens(1)[0]))
            engine.step()
            assert engine.newest_update is not None
            engine.newest_update.done.wait()
            if dist.get_rank() == 0:
                made.blocks[0].state_dict()
        except RankError as error:
            return str(error)
        finally:
            with suppress(EngineStateError, RankError):
                engine.close()
    return ""


def test_nobody_waits_for_a_rank_that_failed(ranks: RankPool) -> None:
    first, second = ranks.run(2, failing)
    check_says(first, "rank 1", "stepped all weights")
    assert second == ""


def failing_at(placement: Placement) -> str:
    """This rank's error when rank 1 fails to step its part, and all ranks go on training."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(states, "optimizer_step", lambda *args: 1 / 0)
        try:
            with OffloadEngine(model(), OffloadConfig(placement=placement), device="cpu") as engine:
                for batch in tokens(2):
                    engine.backward(engine(batch))
                    engine.step()
        except OffloadkitError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("placement", [RESIDENT, CPU_STEP, STREAMED])
def test_a_rank_whose_step_failed_says_so_before_it_exchanges_gradients(ranks: RankPool, placement: Placement) -> None:
    """The other ranks wait for its weights, so no rank would ever come."""
    first, second = ranks.run(2, failing_at, placement=placement)
    check_says(first, "rank 1")
    check_says(second, "the optimizer step failed")


def on_two_hosts() -> str:
    with patched_hosts():
        try:
            OffloadEngine(model(), OffloadConfig(placement=STREAMED), device="cpu")
        except ConfigError as error:
            return str(error)
    return ""


def test_ranks_on_several_hosts_share_no_weights(ranks: RankPool) -> None:
    for found in ranks.run(2, on_two_hosts):
        check_says(found, "several hosts", "weights='vram'", "gradients='vram'", "exchange='micro_batch'")


def alone() -> list[str]:
    """Calls of torch.distributed by an engine in a group of one."""
    called = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("new_group", "all_to_all_single", "broadcast", "all_gather", "all_reduce", "barrier"):
            patch.setattr(ranks_module.dist, name, lambda *args, name=name, **options: called.append(name))
        patch.setattr(gradients, "Reduction", None)
        patch.setattr(model_module, "WeightGathers", None)
        with OffloadEngine(model(), OffloadConfig(), device="cpu") as engine:
            assert all(state.shard is state.layer for state in engine.placed.states)
            assert all(state.weights.own is state.weights.flat for state in engine.placed.states)
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
                assert piece.numel > 0, "an empty range is in a parameter"
                whole = next(view for view in layer.views if view.parameter is piece.parameter)
                assert shard.begin + piece.start == whole.start + piece.first
                for at, length in blocks_of(piece):
                    assert blocks.pop((piece.name, at)) == length
        assert not blocks
        assert sum(numels) == layer.numel
        assert max(numels) - layer.numel / num_ranks <= 2**16


def blocks_of(view: Any) -> list[tuple[int, int]]:
    """(first element in the parameter, length) of the norm blocks of a view."""
    return [(view.first + at, length) for at, length in norm_blocks([(0, view.numel)]).tolist()]


def shared_buffers(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[int, int]]:
    """Bytes of the buffers shared by the layers of the next engine, by use and address."""
    found: dict[str, dict[int, int]] = {use: {} for use in ("buckets", "staging", "exchange", "weights")}
    give_back, arrange = gradient_buffers.BucketPool.give_back, gradients.Gradients.arrange
    exchange, ring = GradientExchange.__init__, WeightRing.__init__

    def add(use: str, *tensors: Any) -> None:
        found[use] |= {each.data_ptr(): each.nbytes for each in tensors if isinstance(each, torch.Tensor)}

    def gives_back(self: gradient_buffers.BucketPool, buffer: torch.Tensor, busy: Any) -> None:
        add("buckets", buffer)
        give_back(self, buffer, busy)

    def arranges(self: gradients.Gradients, layers: Any, staging: Any) -> None:
        add("staging", staging)
        arrange(self, layers, staging)

    def exchanges(self: GradientExchange, *args: Any) -> None:
        exchange(self, *args)
        add("exchange", *vars(self).values())

    def streams(self: WeightRing, *args: Any) -> None:
        ring(self, *args)
        add("weights", *vars(self).values())

    monkeypatch.setattr(gradient_buffers.BucketPool, "give_back", gives_back)
    monkeypatch.setattr(gradients.Gradients, "arrange", arranges)
    monkeypatch.setattr(GradientExchange, "__init__", exchanges)
    monkeypatch.setattr(WeightRing, "__init__", streams)
    return found


@pytest.mark.parametrize(
    ("micro_batches", "exchange", "placement"),
    [
        *((1, "step", place) for place in (CPU_STEP, GPU_STEP, LATE_GRADIENTS, GPU_ALONE, RESIDENT, STREAMED_TO_GPU)),
        *((2, "micro_batch", place) for place in (CPU_STEP, GPU_STEP, LATE_GRADIENTS, GPU_ALONE, RESIDENT, LEAST)),
        *((2, "step", place) for place in (CPU_STEP, LATE_GRADIENTS, STREAMED)),
    ],
)
def test_a_rank_takes_what_was_planned(
    monkeypatch: pytest.MonkeyPatch, placement: Placement, micro_batches: int, exchange: Literal["step", "micro_batch"]
) -> None:
    monkeypatch.setattr(engine_module, "joined_ranks", lambda device: MirroredRanks(device, rank=1, size=3))
    config = OffloadConfig(
        placement=placement, gradient_accumulation=micro_batches, exchange=exchange, working_dtype="bf16"
    )
    shared = shared_buffers(monkeypatch)
    with OffloadEngine(TinyLM(tied=False, depth=3), config, device="cpu") as engine:
        engine.backward(engine(tokens(1)[0]))
        placed, plan = engine.placed, engine.plan
        layers = placed.gradients.layers
        sums = sum(layer.sums_bytes() for layer in plan.layers)
        in_vram = sum(shared["buckets"].values()) + sum(shared["exchange"].values())
        in_vram += sum(each.own_buffer.numel() for each in layers if each.own_buffer is not None)
        in_vram += sum(each.accumulated.nbytes for each in layers if each.accumulated is not None)
        autograds = max(layer.bucket_bytes() for layer in plan.layers)
        vram, ram = plan.tiers["vram"], plan.tiers["ram"]
        assert in_vram + autograds + sums == vram["gradients"]
        there = [each for each in placed.states if each.memory.weights is None]
        assert sum(each.weights.flat.nbytes for each in there) == vram["working weights"]
        assert sum(shared["weights"].values()) == vram.get("weight buffers", 0)
        where, states = plan.tiers[placement.states], ("master weights", "moments")
        taken = sum(sum(array.nbytes for array in each.flat.arrays.values()) for each in placed.states)
        assert taken == sum(where[name] for name in states)
        copies = [each.flat.weights for each in placed.states if each.flat.weights is not each.weights.own]
        copies += [each.weights.own for each in placed.states if each.memory.weights is not None]  # shared weights
        assert sum(copy.nbytes for copy in copies) == ram.get("working weights", 0)
        host = sum(each.gradient.window_in_ram.nbytes for each in placed.states if each.gradient.host is not None)
        host += sum(shared["staging"].values())
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
        for kind, phase in (("exchange", "backward "), ("gather", "forward ")):
            spans = [(each["ts"], each["ts"] + each["dur"]) for each in events if each["name"].startswith(phase)]
            of_blocks = [event for event in moved if event["name"].startswith(f"{kind} blocks.")]
            assert len(of_blocks) == 8
            for event in of_blocks:  # the other layer comes first in forward and last in backward
                assert any(begin <= event["ts"] < end for begin, end in spans), event
