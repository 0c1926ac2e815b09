"""Bytes and seconds of many placements at once equal those computed one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.kernels import cpu
from offloadkit.planner import LayerShape, MicroBatch, Pass, make_plan, remedies
from offloadkit.planner.counts import Counts
from offloadkit.planner.layout import activations, choices, outside_bytes, run_bytes
from offloadkit.planner.make import generating_in_vram, replanned
from offloadkit.planner.prediction import FrozenModel
from offloadkit.planner.search import Room, Search
from offloadkit.planner.work import Cheap
from tests.planner.machines import GIB, T4, TWO_CORES, shape, stage

WITH_DISK = replace(
    TWO_CORES,
    disk_folder="/",
    disk_free_bytes=100 * GIB,
    disk_read_bytes_per_second=3e9,
    disk_write_bytes_per_second=2e9,
)


def unlike_layers() -> tuple[list[LayerShape], MicroBatch]:
    """Blocks of two sizes: one with two dtypes, one used twice, one with a tied weight; layers outside of blocks."""
    layers = [shape("embedding", 2**25, in_block=False, shared=True), shape("outside", 2**14, in_block=False)]
    layers += [shape(f"block.{index}", 2**23 * (1 + index % 2)) for index in range(9)]
    layers += [shape("block.4", 2**10, dtype="fp32"), shape("block.9", 2**22, shared=True), shape("head", 2**25 + 256)]
    layers[-1] = replace(layers[-1], in_block=False)
    work = Pass(flops=10**12, matmul_bytes=10**8, moved_bytes=10**9, num_operations=40, num_attention=1)
    options = {"forward": work, "backward": replace(work, flops=2 * 10**12), "input_bytes": 2**24, "shared_bytes": 77}
    options["cheap"] = Cheap(2**26, 2**27, Pass(moved_bytes=5 * 10**8, num_operations=30))
    names = ["", *(f"block.{index}" for index in range(10)), "block.3", ""]
    return layers, MicroBatch(tuple(stage(name, kept=2**27, **options) for name in names), 640)


def adapted_layers() -> tuple[list[LayerShape], MicroBatch]:
    """Frozen blocks: nine with small trained layers, one of half its size, one alone."""
    layers, work = unlike_layers()
    frozen: dict[str, Any] = {"trains": "frozen", "num_norm_blocks": 0}
    layers = [shape("first", 2**25, in_block=False), shape("outside", 2**14, in_block=False, dtype="fp32")]
    for index in range(9):
        layers += [shape(f"block.{index}", 2**23, **frozen), shape(f"block.{index}", 2**12, dtype="fp32")]
    layers += [shape("block.8", 2**20, dtype="fp32", **frozen), shape("block.7", 2**22)]
    layers += [shape("block.9", 2**24, **frozen), shape("embedding", 2**26, in_block=False, looked_up=True, **frozen)]
    return [*layers, shape("head", 2**25, in_block=False)], work


def some_counts(number: int, seed: int = 5) -> list[Counts]:
    draw = random.Random(seed)
    kinds = ("none", "gpu", "all")

    def one() -> Counts:
        again = draw.randint(0, 10)
        numbers = [draw.randint(0, most) for most in (again, 10, 14, 14, 14)]
        return Counts(again, *numbers, draw.choice(kinds), draw.randint(0, 10 - again))

    return [Counts(0, 0, 0, 0), Counts(10, 10, 10, 14), *(one() for _ in range(number))]


@pytest.mark.parametrize(
    ("num_ranks", "once", "by_bus"),
    [(1, False, False), (3, False, False), (3, True, False), (3, False, True), (3, True, True), (8, True, False)],
)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("machine", [WITH_DISK, replace(WITH_DISK, num_cores=16)], ids=["2 cores", "16 cores"])
@pytest.mark.parametrize("made", [unlike_layers, adapted_layers])
def test_many_at_once_are_as_one_by_one(
    made: Any, machine: Any, accumulation: int, num_ranks: int, once: bool, by_bus: bool
) -> None:
    """`once`: sums are exchanged. `by_bus`: the link is the bus. Eight ranks are on two hosts."""
    layers, work = made()
    layers = [replace(layer, exchanges_sums=once).shared_by(num_ranks) for layer in layers]
    work = replace(work, evaluation=MicroBatch((stage("block.0", forward_peak_bytes=2**32),), 640))
    machine = replace(machine, link_bytes_per_second=2e10, num_ranks=min(num_ranks, 4), link_is_bus=by_bus)
    seed = 100 * machine.num_cores + 10 * num_ranks + accumulation + 7 * once + 3 * by_bus
    search, counts = Search(layers, work, machine, accumulation, frozen_bytes=123), some_counts(12, seed)
    search.learn(counts)
    search.simulate(counts)
    plan = make_plan(layers, OffloadConfig(placement=Placement(), gradient_accumulation=accumulation), work=work)
    context = outside_bytes(layers, machine)
    for each in counts:
        needs, seconds = search.needs(each), search.phases(each)
        placements = search.placements(each)
        held = activations(work, choices(layers, placements, work))
        tiers = run_bytes(layers, placements, accumulation, frozen_bytes=123, held=held, context_bytes=context)
        one = replace(plan, layers=tuple(layers), placements=placements, tiers=tiers)
        assert vars(needs) == one.needs()
        found = search.model.seconds(placements)
        busy = found.busy["forward"], found.busy["CPU step"]
        assert (*seconds, seconds.step) == (found.update_phase, found.backward_phase, *busy, found.step)


@pytest.mark.parametrize("made", [unlike_layers, adapted_layers])
def test_room_for_a_generation_is_that_of_its_phase(made: Any) -> None:
    """All weights are in VRAM, but for those of a frozen model beside the one that generates."""
    (layers, work), cached, counts = made(), 3 * GIB, some_counts(12)
    beside = FrozenModel("reference", 0, (3, 4), 0)
    search = Search(layers, work, WITH_DISK, 1, generating=cached, beside=beside.layers)
    plan = make_plan(layers, OffloadConfig(placement=Placement()), work=work)
    plan = replace(plan, basis=replace(plan.basis, frozen_models=(beside,)))
    for each in counts:
        placements = search.placements(each)
        held = activations(work, choices(layers, placements, work))
        tiers = run_bytes(layers, placements, 1, held=held, context_bytes=outside_bytes(layers, WITH_DISK))
        one = replace(plan, layers=tuple(layers), placements=placements, tiers=tiers)
        room = next(phase for phase in one._phases(cached + one._streamed_bytes) if phase.name == "generation")
        assert search.needs(each).vram == max(room.vram, one.needs()["vram"])


def test_a_plan_leaves_room_for_all_weights_while_text_is_generated() -> None:
    layers, work = unlike_layers()
    seen = set()
    for vram in ("2GiB", "2600MiB", "4GiB"):
        plan = make_plan(layers, OffloadConfig(vram=vram, ram="200GiB"), work=work, hardware=WITH_DISK)
        known = replace(plan, basis=replace(plan.basis, cache_bytes=700 * 2**20))
        assert plan.fits
        assert generating_in_vram(known) is None  # generated in evaluations only
        found = generating_in_vram(replace(known, basis=replace(known.basis, generates=True)))
        seen.add((known.generates_in_vram, found is not None))
        if found is not None:
            assert found.fits
            assert found.generates_in_vram
            assert replanned(found).placements == found.placements
    assert seen == {(False, False), (False, True), (True, False)}


def test_without_the_library_the_simulation_itself_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    search, counts = Search(*unlike_layers(), WITH_DISK, 1), some_counts(3)
    in_c = [search.phases(each) for each in counts]
    monkeypatch.setattr(cpu, "c_library", lambda: None)
    again = Search(*unlike_layers(), WITH_DISK, 1)
    assert [again.phases(each) for each in counts] == in_c


@pytest.mark.parametrize("disk", [0, 2, 900])
def test_where_ram_is_short_the_fewest_layers_change(disk: int) -> None:
    """Compared with a search that tries one layer more at a time."""
    layers, work = unlike_layers()
    search, given = Search(layers, work, WITH_DISK, 1), some_counts(200)
    needs = [search.needs(counts) for counts in given]
    room = Room(max(each.vram for each in needs), sorted(each.ram for each in needs)[50], disk * GIB)

    def first(counts: Counts, name: str) -> Counts | None:
        numbers = range(getattr(counts, name) + 1, len(layers) + 1)
        leaner = (counts._replace(**{name: number}) for number in numbers)
        lean = next((each for each in leaner if search.needs(each).ram <= room.ram), None)
        return lean if lean and room.holds(search.needs(lean)) else None

    kinds = set()
    for counts, need, found in zip(given, needs, search.fitting(given, room), strict=True):
        lean = counts if counts.gradients_in_vram != "none" else counts._replace(gradients_in_vram="gpu")
        options = [first(lean, "gpu_steps"), *([first(counts, "states_on_disk")] if disk else [])]
        expected = [counts] if need.ram <= room.ram else [option for option in options if option]
        assert found == expected
        kinds.add((need.ram <= room.ram, len(expected)))
    assert len(kinds) > 2, "the sample must have fitting, replaceable and hopeless counts"


def test_a_last_layer_whose_buffers_are_larger_than_itself_need_not_go_to_disk() -> None:
    layers, work = unlike_layers()
    layers[0] = shape("embedding", 2**28, in_block=False, shared=True)
    search, counts = Search(layers, work, WITH_DISK, 1), Counts(10, 0, 0, 0)
    lean, every = (counts._replace(states_on_disk=len(layers) - number) for number in (1, 0))
    assert search.needs(lean).ram < search.needs(every).ram
    (found,) = search.fitting([counts], Room(100 * GIB, search.needs(lean).ram, 100 * GIB))
    assert lean in found


def test_a_search_that_is_kept_finds_what_a_new_one_finds() -> None:
    kept = Search(*unlike_layers(), TWO_CORES, 1)
    for vram in (2, 3, 6):
        assert kept.best(vram * GIB, 4 * GIB) == Search(*unlike_layers(), TWO_CORES, 1).best(vram * GIB, 4 * GIB)


@pytest.mark.slow
def test_more_ram_is_tried_only_where_some_was_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's text equals a search that tries every larger budget."""
    layers, work = unlike_layers()
    budgets = [int(3.7 * GIB), 4 * GIB, 64 * GIB]
    plans = [make_plan(layers, OffloadConfig(vram="3GiB", ram=ram), work=work, hardware=T4) for ram in budgets]
    assert [remedies.is_short_of_ram(made) for made in plans] == [True, True, False]
    said = [made.explain() for made in plans]
    monkeypatch.setattr(remedies, "is_short_of_ram", lambda made: True)
    assert [made.explain() for made in plans] == said
