"""What ranks plan together, and that they send each other what was planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import offloadkit
from offloadkit.config import OffloadConfig, Placement
from offloadkit.device import measure as measuring
from offloadkit.distributed import machine
from offloadkit.distributed.ranks import Ranks
from offloadkit.engine import OffloadEngine
from offloadkit.errors import OffloadkitError
from offloadkit.hardware import Hardware
from offloadkit.offload.layers import flat_layers
from offloadkit.planner.layout import communicated_bytes
from offloadkit.telemetry import Telemetry
from tests.distributed.pool import RankPool
from tests.distributed.runs import CPU_STEP, GPU_STEP, RESIDENT, model
from tests.models import TinyLM, tokens
from tests.planner.machines import H200

CPU = torch.device("cpu")


def unlike(*_: Any, **__: Any) -> Hardware:
    """Rank 1's copies are slow, and all else is slow on rank 0."""
    slow = {"h2d_bytes_per_second": 5e9} if dist.get_rank() else {"vram_bytes_per_second": 4e11, "launch_seconds": 1e-5}
    return replace(H200, **slow, vram_free_bytes=H200.vram_free_bytes >> dist.get_rank())  # type: ignore[arg-type]


def all_used(**options: Any) -> TinyLM:
    """A model whose every parameter gets a gradient."""
    made = TinyLM(**options)
    del made.unused
    return made


def counted(micro_batches: int, placement: Placement, **options: Any) -> tuple[dict[str, int], list[dict[str, int]]]:
    """What a rank's plan says that it receives in a step, and what it received in three steps."""
    telemetry = Telemetry()
    config = OffloadConfig(placement=placement, gradient_accumulation=micro_batches, working_dtype="bf16")
    with OffloadEngine(all_used(**options), config, device="cpu", telemetry=telemetry) as engine:
        for batch in tokens(3 * micro_batches):
            engine.backward(engine(batch))
            engine.step()
        engine.synchronize()
        return engine.plan.communicated, [record.received for record in telemetry.records]


@pytest.mark.parametrize(
    ("size", "micro_batches", "options"),
    [
        (2, 1, {"placement": RESIDENT, "tied": True, "hidden": 1100}),
        (3, 2, {"placement": CPU_STEP, "tied": False, "depth": 3}),
        pytest.param(4, 1, {"placement": GPU_STEP, "width": 70, "hidden": 5000, "tied": True}, marks=pytest.mark.slow),
    ],
)
def test_ranks_receive_what_was_planned(
    ranks: RankPool, size: int, micro_batches: int, options: dict[str, Any]
) -> None:
    whole = 0
    for planned, found in ranks.run(size, counted, micro_batches=micro_batches, **options):
        agreed = [each.pop("agreement") for each in found]
        assert agreed[0] == agreed[1] == agreed[2] > 0
        assert found[0] == {kind: planned[kind] for kind in ("exchange", "norm")}, "no new weights before an update"
        assert found[1] == found[2] == planned
        whole += planned["exchange"]
    shape = {name: value for name, value in options.items() if name != "placement"}
    layers = [layer.shape() for layer in flat_layers(all_used(**shape), OffloadConfig(working_dtype="bf16"))]
    assert whole == micro_batches * (size - 1) * sum(layer.bucket_bytes() for layer in layers)
    assert communicated_bytes(layers, [options["placement"]] * len(layers), micro_batches) == {}


def planned_together(*, long: int = 0, **wishes: Any) -> dict[str, Any]:
    """What a rank plans and does. Rank 1's micro-batches are `long` times as long, if that is given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "measure", unlike)
        patch.setattr(machine, "is_measured", lambda *_: True)
        batches = tokens(2)
        if long and dist.get_rank():
            batches = [batch.repeat(1, long) for batch in batches]
        example = None if long else batches[0]
        with OffloadEngine(model(tied=False), OffloadConfig(**wishes), device="cpu", example=example) as engine:
            begun = engine.plan
            for batch in batches:
                engine.backward(engine(batch))
                engine.step()
            engine.synchronize()
            plan = engine.plan
            assert list(plan.layers) == [state.layer.shape() for state in engine._placed.states]
    return {
        "machine": plan.basis.hardware,
        "placements": plan.placements,
        "seconds": plan.large_gpu_seconds,
        "begun": begun.placements,
        "moves": [move.why for move in engine.telemetry.moves],
        "activations": plan.tiers["vram"].get("activations"),
        "num_gpus": plan.num_gpus,
        "ram": plan.budgets["ram"],
        "threads": offloadkit.kernels.cpu.num_threads(),
    }


def test_all_ranks_have_one_plan_though_they_measure_other_rates(ranks: RankPool) -> None:
    first, second = ranks.run(2, planned_together, vram="40GiB", ram="20GiB")
    for name in ("machine", "placements"):
        assert first[name] == second[name]
    found = first["machine"]
    assert (found.num_ranks, found.num_cores) == (2, max(1, machine.hardware.num_cores() // 2))
    assert (found.h2d_bytes_per_second, found.vram_bytes_per_second, found.launch_seconds) == (5e9, 4e11, 1e-5)
    assert found.vram_free_bytes < H200.vram_free_bytes * 0.51
    assert found.link_bytes_per_second > 1e6
    assert found.ram_available_bytes > H200.ram_available_bytes, "what the model takes now is free then, on both ranks"
    assert first["num_gpus"] == 2
    assert first["ram"] == 10 << 30, "the half of what both may take"


def test_after_the_first_window_all_ranks_move_to_the_plan_of_the_longest_micro_batch(ranks: RankPool) -> None:
    short, long = (ranks.run(2, planned_together, long=times, vram="40GiB")[0] for times in (1, 3))
    assert [each["moves"] for each in (short, long)] == [[short["moves"][0]]] * 2
    assert "first window" in short["moves"][0]
    assert long["activations"] > short["activations"], "rank 1's, whose micro-batches are longer"


def apart() -> str:
    """Only rank 1 has something to choose."""
    wishes: Any = {"vram": "40GiB"} if dist.get_rank() else {}
    try:
        OffloadEngine(model(), OffloadConfig(**wishes), device="cpu").close()
    except OffloadkitError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_ranks_of_which_only_some_plan_get_an_error(ranks: RankPool) -> None:
    for found in ranks.run(2, apart):
        assert "something to choose are there on all ranks or on none" in found


def told() -> list[Any]:
    """What rank 1 tells, and the error of what fails there."""
    group = Ranks(CPU)
    try:
        found: list[Any] = [group.told(lambda: dist.get_rank(), by=1)]
        try:
            group.told(lambda: 1 // 0, by=1)
        except Exception as error:
            found.append(type(error).__name__)
        return found
    finally:
        group.close()


def test_what_a_rank_tells_is_told_to_all_and_so_is_its_failure(ranks: RankPool) -> None:
    assert ranks.run(2, told) == [[1, "RankError"], [1, "ZeroDivisionError"]]


def measured() -> tuple[Hardware, int, list[str]]:
    """The machine, measured together where one rank knows its rates, and what was measured when asked again."""
    with pytest.MonkeyPatch.context() as patch:
        asked: list[str] = []
        rates = {name: getattr(H200, name) for name in measuring._RATES}
        patch.setattr(measuring, "machine_rates", lambda device: asked.append(str(device)) or rates)
        patch.setattr(measuring, "_of_this_process", {})
        patch.setattr(measuring, "_read_cache", dict)
        patch.setattr(measuring, "_store", lambda key, found: measuring._of_this_process.update({key: found}))
        group = Ranks(CPU)
        try:
            if dist.get_rank():
                measuring.measure(CPU, num_ranks=2)
                asked.clear()
            found = [machine.measured_together(group, CPU) for _ in range(2)]
        finally:
            group.close()
        assert found[0].link_bytes_per_second == found[1].link_bytes_per_second == machine.known_link(CPU, 2)
        assert not measuring.is_measured(CPU, 1), "one rank alone has other rates"
        return found[0], int(np.log2(found[0].link_bytes_per_second)), asked


def test_all_ranks_measure_if_one_has_to_and_keep_what_they_found(ranks: RankPool) -> None:
    first, second = ranks.run(2, measured)
    assert first[0].dram_bytes_per_second == second[0].dram_bytes_per_second == H200.dram_bytes_per_second
    assert first[2] == second[2] == ["cpu"]
