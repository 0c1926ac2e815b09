"""All ranks move to another plan together, with the numbers of a run that did not move."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offloadkit.facts.config import OffloadConfig, Placement
from tests.distributed.doors import trained
from tests.distributed.moves import (
    NO_ROOM,
    evaluating,
    late_after_a_move,
    measured,
    moves_apart,
    moving,
    planned,
    with_less_free,
)
from tests.distributed.pool import RankPool
from tests.distributed.runs import CPU_STEP, GPU_STEP, RESIDENT, STREAMED, STREAMED_TO_GPU, model
from tests.distributed.test_doors import assert_same
from tests.planner.machines import H200

pytestmark = pytest.mark.usefixtures("one_thread")


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """All ranks have the same plans, and the weights of a run without a move."""
    assert [run["error"] for run in found] == [""] * len(found)
    for rank, run in enumerate(found):
        assert run["moves"] == found[0]["moves"]
        assert run["placements"] == found[0]["placements"]
        assert run["steps"] == expected[rank]["steps"]
        for name, weight in expected[rank]["weights"].items():
            assert torch.equal(run["weights"][name], weight), (rank, name)


@pytest.fixture(scope="module")
def lean(ranks: RankPool) -> Any:
    """Runs of two ranks by a lean plan, cached by options."""
    known: dict[str, Any] = {}

    def run(**options: Any) -> Any:
        if repr(options) not in known:
            known[repr(options)] = ranks.run(2, moving, begins=CPU_STEP, **options)
        return known[repr(options)]

    return run


@pytest.mark.slow
def test_where_one_rank_is_full_all_give_up_graphs_and_keep_the_plan(ranks: RankPool) -> None:
    """Rank 1 has none."""
    found = ranks.run(2, moving, where="backward", full=[(1, 2)], graphed=(0,), steps=4)
    expected = ranks.run(2, moving, steps=4)
    assert found[0]["moves"] == []
    assert found[0]["begun"] == 5
    assert_alike(found, expected)


@pytest.mark.parametrize(
    ("where", "full", "options"),
    [
        ("backward", [(1, 1)], {}),
        ("forward", [(1, 1), (0, 3)], {"micro_batches": 2}),
        pytest.param("backward", [(0, 2)], {"micro_batches": 2, "exchange": "micro_batch"}, marks=pytest.mark.slow),
        pytest.param(
            "exchange", [(1, 3), (0, 4)], {"micro_batches": 2, "exchange": "micro_batch"}, marks=pytest.mark.slow
        ),
        pytest.param(
            "backward", [(1, 2), (1, 4)], {"micro_batches": 3, "working_dtype": "bf16"}, marks=pytest.mark.slow
        ),
    ],
)
def test_where_one_rank_is_full_all_repeat_the_window_by_a_leaner_plan(
    ranks: RankPool, lean: Any, where: str, full: list[tuple[int, int]], options: dict[str, Any]
) -> None:
    found = ranks.run(2, moving, where=where, full=full, **options)
    assert_alike(found, lean(**options))
    assert found[0]["moves"]
    assert all(why.startswith("the memory of rank ") for why in found[0]["moves"])
    assert [run["alive"] for run in found] == [[False] * len(found[0]["moves"])] * 2
    assert {*found[0]["placements"]} != {RESIDENT}


@pytest.mark.parametrize(
    ("full", "options"),
    [
        ([(1, 0)], {}),
        pytest.param([(0, 1), (1, 1)], {"working_dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param([(0, 1)], {"begins": STREAMED, "to": CPU_STEP}, marks=pytest.mark.slow),
    ],
)
def test_where_one_rank_is_full_in_an_evaluation_all_move_and_it_evaluates_again(
    ranks: RankPool, full: list[tuple[int, int]], options: dict[str, Any]
) -> None:
    found, expected = (ranks.run(2, evaluating, full=where, **options) for where in (full, ()))
    assert_alike(found, expected)
    for rank, (run, whole) in enumerate(zip(found, expected, strict=True)):
        assert run["evaluated"] == whole["evaluated"]
        assert run["begun"] == 2 + sum(rank == where for where, _ in full)
    assert len({*expected[0]["evaluated"]}) == 2  # dropout
    assert all("'s GPU was full in an evaluation" in why for why in found[0]["moves"])
    assert len(found[0]["moves"]) == 1
    assert found[0]["placements"] != expected[0]["placements"]


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        ({"together": False, "begins": STREAMED}, "", "OutOfVramError: the GPU's memory is full"),
        pytest.param(
            {"placement": RESIDENT}, "OutOfVramError: the memory of rank 1's GPU was full in an evaluation: its error",
            "OutOfVramError: the GPU's memory is full", marks=pytest.mark.slow,
        ),
        pytest.param(
            {"placement": RESIDENT, "nested": True},
            "OutOfVramError: the memory of rank 1's GPU was full in an evaluation: its error",
            "OutOfVramError: the GPU's memory is full", marks=pytest.mark.slow,
        ),
        pytest.param(
            {"is_open": True}, "An accumulation window is open", "An accumulation window is open",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_where_nothing_can_move_for_an_evaluation_training_goes_on(
    ranks: RankPool, options: dict[str, Any], first: str, second: str
) -> None:
    found, expected = (ranks.run(2, evaluating, full=where, **options) for where in ([(1, 0)], ()))
    assert [run["moves"] for run in found] == [[], []]
    for run, whole, error in zip(found, expected, (first, second), strict=True):
        assert error in run["error"]
        assert bool(error) == bool(run["error"])
        assert run["evaluated"] == (whole["evaluated"][1:] if error else whole["evaluated"])
        assert all(torch.equal(run["weights"][name], weight) for name, weight in whole["weights"].items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "begins", "to", "options"),
    [
        ("forward", CPU_STEP, STREAMED_TO_GPU, {"micro_batches": 2}),
        ("backward", STREAMED, RESIDENT, {}),
        ("exchange", STREAMED_TO_GPU, CPU_STEP, {"micro_batches": 2, "exchange": "micro_batch"}),
    ],
)
def test_three_ranks_repeat_windows_with_weights_and_sums_in_shared_ram(
    ranks: RankPool, where: str, begins: Placement, to: Placement, options: dict[str, Any]
) -> None:
    expected = ranks.run(3, moving, begins=CPU_STEP, **options)
    full = [(2, 1), (0, 1), (1, 4)]
    found = ranks.run(3, moving, where=where, full=full, begins=begins, to=to, **options)
    assert_alike(found, expected)
    assert found[0]["begun"] > expected[0]["begun"]


def test_where_ram_is_scarce_on_one_rank_all_move_after_the_step(ranks: RankPool, lean: Any) -> None:
    found = ranks.run(2, moving, scarce=[(1, 1)], begins=CPU_STEP, to=GPU_STEP)
    assert_alike(found, lean())
    assert found[0]["moves"] == ["RAM was running out"]
    assert {where.step for where in found[0]["placements"]} == {"gpu"}


def test_where_no_plan_is_leaner_all_ranks_get_the_error(ranks: RankPool) -> None:
    first, second = ranks.answers(2, moving, scarce=[(1, 0)], begins=CPU_STEP, placement=CPU_STEP)
    assert first["error"].startswith("OutOfRamError: RAM is running out on rank 1")
    assert second["error"] == f"OutOfRamError: {NO_ROOM}"
    first, second = ranks.answers(2, moving, full=[(0, 1)], where="backward", begins=CPU_STEP, placement=CPU_STEP)
    assert first["error"].startswith("OutOfVramError: the GPU's memory is full: torch used")
    assert second["error"].startswith("OutOfVramError: the memory of rank 0's GPU was full")
    assert first["is_open"]
    assert second["is_open"]


@pytest.mark.parametrize(
    ("how", "errors"),
    [
        ("window", ["RankError: calling move() failed on rank 1", "EngineStateError: move() was called inside"]),
        ("fails", ["EngineStateError: a move failed, on this rank or another", "EngineStateError: a move failed, on"]),
        (
            "connects",
            ["RankError: comparing notes was not begun: rank 1 has died", "RankError: connecting the GPUs failed"],
        ),
        ("ends", ["RankError: comparing notes with the other ranks failed", "OffloadkitError: no move here"]),
    ],
)
def test_all_ranks_move_or_none(ranks: RankPool, how: str, errors: list[str]) -> None:
    found = ranks.answers(2, moves_apart, how=how)
    for run, error in zip(found, errors, strict=True):
        assert run["error"].startswith(error)
        assert run["is_open"] == (how not in ("fails", "connects"))
    assert all(where == CPU_STEP for run in found for where in run["placements"])


def test_weights_that_moved_to_shared_ram_are_waited_for(ranks: RankPool, lean: Any) -> None:
    """Otherwise a rank would read weights that a slower rank has not stepped yet."""
    found = ranks.run(2, late_after_a_move)
    assert len(found[0]["moves"]) <= 1
    assert {where.weights for where in found[0]["placements"]} == {"ram"}
    assert_alike(found, lean())


def test_where_one_rank_is_slower_than_planned_all_move_once(ranks: RankPool) -> None:
    found, expected = (ranks.run(2, measured, card=H200, slow=factor) for factor in (20.0, 1.0))
    assert [run["moves"] for run in expected] == [[], []]
    assert_alike(found, expected)
    ((step, why),) = found[0]["moves"]
    assert step in (4, 5)
    assert "the CPU's optimizer step runs at" in why
    before, after = found[0]["by the CPU"]
    assert after < before


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["step", "micro_batch"])
def test_trainers_repeat_the_window_together(ranks: RankPool, tmp_path: Path, exchange: str) -> None:
    """One rank is full in its second micro-batch of the second update. The other rank learns of it there, or in the
    optimizer's step if gradients are exchanged once a step."""
    options: dict[str, Any] = {"kind": "llama", "accumulation": 4, "eval_strategy": "no", "exchange": exchange}
    expected = ranks.run(2, trained, folder=tmp_path / "room", **options)
    found = ranks.run(2, trained, folder=tmp_path / "full", full=(1, 4), **options)
    assert [run.pop("moves") for run in found] == [["the memory of rank 1's GPU was full"]] * 2
    for rank in range(2):
        assert_same(found[rank : rank + 1], expected[rank])


def test_less_free_vram_on_one_rank_makes_the_plan_of_all_leaner(ranks: RankPool) -> None:
    plan = replace(planned(model(), OffloadConfig(), RESIDENT), budgets={"ram": 1 << 30})
    assert ranks.run(2, with_less_free, plan=plan, free=0) == [(plan.total_bytes("vram"),) * 2] * 2
    (total, first), (_, second) = ranks.run(2, with_less_free, plan=plan, free=plan.total_bytes("vram") // 4)
    assert first == second <= 0.75 * total
