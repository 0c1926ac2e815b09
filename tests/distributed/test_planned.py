"""Ranks plan together, and receive the bytes that were planned."""

from __future__ import annotations

import os
from typing import Any

import pytest

from offloadkit.facts import hardware
from offloadkit.facts.config import OffloadConfig
from offloadkit.kernels import cpu
from offloadkit.offload.layers import flat_layers
from offloadkit.planner.layout import communicated_bytes
from tests.distributed.planning import (
    all_used,
    apart,
    bound,
    cores_within,
    counted,
    least_vram,
    measured,
    planned_together,
    told,
)
from tests.distributed.pool import RankPool
from tests.distributed.runs import CPU_STEP, GPU_STEP, RESIDENT
from tests.planner.machines import H200


@pytest.mark.parametrize(
    ("size", "micro_batches", "exchange", "options"),
    [
        (2, 1, "step", {"placement": RESIDENT, "tied": True, "hidden": 1100}),
        (3, 2, "micro_batch", {"placement": CPU_STEP, "tied": False, "depth": 3}),
        (3, 2, "step", {"placement": RESIDENT, "tied": False, "depth": 3}),
        pytest.param(
            4, 1, "step", {"placement": GPU_STEP, "width": 70, "hidden": 5000, "tied": True}, marks=pytest.mark.slow
        ),
    ],
)
def test_ranks_receive_what_was_planned(
    ranks: RankPool, size: int, micro_batches: int, exchange: str, options: dict[str, Any]
) -> None:
    whole = 0
    for planned, found in ranks.run(size, counted, micro_batches=micro_batches, exchange=exchange, **options):
        agreed = [each.pop("agreement") for each in found]
        assert agreed[0] == agreed[1] == agreed[2] > 0
        assert found[0] == {kind: planned[kind] for kind in ("exchange", "norm")}, "no new weights before an update"
        assert found[1] == found[2] == planned
        whole += planned["exchange"]
    shape = {name: value for name, value in options.items() if name != "placement"}
    layers = [layer.shape() for layer in flat_layers(all_used(**shape), OffloadConfig(working_dtype="bf16"))]
    once = exchange == "step" and micro_batches > 1
    of_all = [4 * layer.numel if once else micro_batches * layer.bucket_bytes() for layer in layers]
    assert whole == (size - 1) * sum(of_all)
    assert communicated_bytes(layers, [options["placement"]] * len(layers), micro_batches) == {}


@pytest.mark.parametrize("exchange", ["step", pytest.param("micro_batch", marks=pytest.mark.slow)])
def test_ranks_search_and_take_weights_in_ram_which_they_share(ranks: RankPool, exchange: str) -> None:
    """Nine blocks; VRAM holds three."""
    found = ranks.run(2, least_vram, card=H200, exchange=exchange)
    layers = flat_layers(all_used(tied=False, depth=9, hidden=900), OffloadConfig(working_dtype="bf16"))
    blocks = [layer.numel * 2 for layer in layers if layer.block is not None]
    for planned, received, weights in found:
        assert weights["planned"] == weights["taken"]
        for kind in ("exchange", "gather", "norm"):
            assert received[-1].get(kind, 0) == planned[kind]
    assert sum(weights["living"] for _, _, weights in found) == sum(blocks), "all blocks, once"


def test_all_ranks_have_one_plan_though_they_measure_other_rates(ranks: RankPool) -> None:
    first, second = ranks.run(2, planned_together, card=H200, vram="40GiB", ram="20GiB")
    for name in ("machine", "placements"):
        assert first[name] == second[name]
    found = first["machine"]
    assert (found.num_ranks, found.num_cores) == (2, max(1, hardware.num_cores() // 2))
    assert (found.h2d_bytes_per_second, found.vram_bytes_per_second, found.launch_seconds) == (5e9, 4e11, 1e-5)
    assert found.vram_free_bytes < H200.vram_free_bytes * 0.51
    assert found.link_bytes_per_second > 1e6
    assert found.ram_available_bytes == H200.ram_available_bytes, "the plan's RAM is pinned beside the model's"
    assert first["num_gpus"] == 2
    share = cpu.default_num_threads(found.num_cores)
    assert first["threads"] == second["threads"] == (share, cpu.default_num_threads()), (
        "the number of threads must be restored"
    )
    assert first["ram"] == 10 << 30, "each rank gets half of the budget"


def test_after_the_first_window_all_ranks_move_to_the_plan_of_the_longest_micro_batch(ranks: RankPool) -> None:
    short, long = (ranks.run(2, planned_together, card=H200, long=times, vram="40GiB")[0] for times in (1, 3))
    assert [each["moves"] for each in (short, long)] == [[short["moves"][0]]] * 2
    assert "first window" in short["moves"][0]
    assert long["activations"] > short["activations"], "the plan must fit rank 1's longer micro-batches"


def test_ranks_of_which_only_some_plan_get_an_error(ranks: RankPool) -> None:
    for found in ranks.run(2, apart):
        assert "all ranks or none must pass a plan" in found


def test_what_a_rank_tells_is_told_to_all_and_so_is_its_failure(ranks: RankPool) -> None:
    assert ranks.run(2, told) == [[1, "RankError"], [1, "ZeroDivisionError"]]


def test_all_ranks_measure_if_one_has_to_and_keep_what_they_found(ranks: RankPool) -> None:
    first, second = ranks.run(2, measured, card=H200)
    assert first[0].dram_bytes_per_second == second[0].dram_bytes_per_second == H200.dram_bytes_per_second
    assert first[2] == second[2] == ["cpu"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_ranks_run_next_to_their_gpus_where_none_loses_cores_by_it(ranks: RankPool) -> None:
    """All threads of a rank are bound to its cores, and released afterwards."""
    one, other = sorted(os.sched_getaffinity(0))[:2]
    both = {one, other}
    assert ranks.run(2, bound, near=[{one}, {other}], own=both) == [
        [{one}] * 2 + [both] * 2,
        [{other}] * 2 + [both] * 2,
    ]
    for near in ([{one}, {one}], [{one}, set()], [both, both], [{one}, both]):
        assert ranks.run(2, bound, near=near, own=both) == [[both] * 4] * 2
    assert ranks.run(3, bound, near=[{one}, {one}, {other}], own=both) == [[both] * 4] * 3, (
        "two ranks would share one core"
    )


def test_ranks_with_cores_of_their_own_share_what_a_container_may_take(ranks: RankPool) -> None:
    for quota, cores in ((None, 16), (64.0, 16), (16.0, 8), (1.0, 1)):
        assert ranks.run(2, cores_within, quota=quota) == [(2, cores)] * 2
