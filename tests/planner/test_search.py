"""The search for placements: its choice fits, it is fast, more memory never makes it slower, and searching is quick."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.cases import CASES
from benchmarks.plans import layers_and_work
from offloadkit.facts.config import OffloadConfig
from offloadkit.facts.fitted import LOADED_LATER_BYTES
from offloadkit.planner import LayerShape, MicroBatch, Pass, Plan, make_plan
from offloadkit.planner.make import never_cheap, replanned
from offloadkit.planner.search import Counts, Search
from offloadkit.planner.seconds import StepModel
from offloadkit.planner.work import Cheap
from tests.planner.machines import GIB, H200, LLAMA_8B, LLAMA_70B, TWO_CORES, llama, shape, stage, t5_3b

Model = tuple[list[LayerShape], MicroBatch]


@pytest.fixture(scope="module")
def small_batch() -> Model:
    """T5-3B, 1x(512+128)."""
    return t5_3b(1, fused=True)


@pytest.fixture(scope="module")
def llama_8b() -> Model:
    return llama(1, 2048, **LLAMA_8B)


def plan(model: Model, hardware: Any = H200, **options: Any) -> Plan:
    return make_plan(model[0], OffloadConfig(**options), work=model[1], hardware=hardware)


def test_what_fits_is_trained_as_on_a_large_gpu(small_batch: Model) -> None:
    made = plan(small_batch, vram="64GiB")
    assert {where.states for where in made.placements} == {"vram"}
    assert {where.activations for where in made.placements} == {"keep"}
    assert made.slowdown == pytest.approx(1)
    assert made.total_bytes("disk") == 0


def large_activations() -> Model:
    """Blocks whose element-wise operations take a tenth of forward and make half of the activations."""
    forward, backward = Pass(flops=10**13, moved_bytes=10**9), Pass(flops=2 * 10**13, moved_bytes=10**9)
    cheap = Cheap(2**29, 2**30, Pass(moved_bytes=10**9))
    work = {"forward": forward, "backward": backward, "output_bytes": 2**26, "cheap": cheap}
    layers = [shape(f"block.{index}", 2**20) for index in range(12)]
    return layers, MicroBatch(tuple(stage(layer.name, kept=2**30, **work) for layer in layers), 640)


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}, {"compile_blocks": True}])
def test_matmuls_are_kept_if_that_is_faster(options: dict[str, Any]) -> None:
    made = plan(large_activations(), vram="10GiB", ram="64GiB", **options)
    recomputed = plan(large_activations(), vram="10GiB", ram="64GiB", activation_checkpointing=True)
    assert made.fits
    assert made.seconds is not None
    assert recomputed.seconds is not None
    cheap = sum(where.activations == "cheap" for where in made.placements)
    if options:
        assert cheap == 0
    else:
        assert {where.activations for where in made.placements} == {"cheap", "keep"}
        assert 1.1 * made.seconds.step < recomputed.seconds.step
        assert f"element-wise results of {cheap} of 12 layers recomputed in backward" in made.details()


def test_a_block_that_cannot_keep_its_matmuls_is_never_planned_so_again() -> None:
    made = plan(large_activations(), vram="10GiB", ram="64GiB")
    at = next(at for at, where in enumerate(made.placements) if where.activations == "cheap")
    moved = never_cheap(made, [at])
    assert moved.placements[at].activations == "checkpoint"
    assert moved.placements[at + 1 :] == made.placements[at + 1 :]
    assert moved.total_bytes("vram") < made.total_bytes("vram")
    assert "cheap" not in {where.activations for where in replanned(moved).placements}


@pytest.mark.slow
def test_the_benchmark_of_kept_matmuls_is_planned_faster_than_full_recomputation() -> None:
    case = CASES["cheap-llama-3b-64"]
    model = layers_and_work(case.model, case.dtype, case.batch_size, case.input_length, 0)
    made, recomputed = (plan(model, vram=f"{case.vram}GiB", activation_checkpointing=asked) for asked in (False, True))
    assert made.seconds is not None
    assert recomputed.seconds is not None
    assert Counter(where.activations for where in made.placements)["cheap"] >= 14
    assert 1.1 * made.seconds.step < recomputed.seconds.step


@pytest.mark.slow
@pytest.mark.parametrize("vram", [3, 4, 6, 8, 12, 16, 24, 32])
def test_t5_3b_fits_cards_of_every_size(small_batch: Model, vram: int) -> None:
    made = plan(small_batch, vram=vram * GIB, ram="42GiB")
    assert made.fits
    assert made.total_bytes("vram") <= vram * GIB
    assert made.total_bytes("ram") <= 42 * GIB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulation", "precision"),
    [(1, "exact"), (4, "exact"), (1, "compact")],
)
def test_more_vram_is_never_slower(small_batch: Model, accumulation: int, precision: Any) -> None:
    """Except when everything fits into VRAM: then the GPU steps all layers, though one CPU step could be hidden."""
    budgets = [3, 3.5, 5, 8, 12, 20, 36, 64]
    options = {"gradient_accumulation": accumulation, "precision": precision, "ram": "120GiB"}
    made = [plan(small_batch, vram=int(budget * GIB), **options) for budget in budgets]
    steps = [one.seconds.step for one in made if one.fits and one.seconds]
    assert len(steps) >= len(budgets) - 2
    for before, after in itertools.pairwise(steps):
        assert after <= 1.01 * before


@pytest.mark.slow
def test_more_vram_is_never_slower_for_llama(llama_8b: Model) -> None:
    made = [plan(llama_8b, vram=budget * GIB, ram="112GiB") for budget in (10, 12, 16, 20, 24, 32, 48, 64, 96, 128)]
    steps = [one.seconds.step for one in made if one.fits and one.seconds]
    assert len(steps) == len(made)
    assert all(after <= 1.01 * before for before, after in itertools.pairwise(steps))


BY_QUARTERS = {
    ("t5-3b", 1, 512, 128): (1, 4),
    ("t5-3b", 8, 512, 128): (1, 4),
    ("t5-3b", 32, 512, 128): (1,),
    ("t5-large", 8, 512, 128): (1,),
    ("llama-3.2-1b", 2, 1024, 0): (1, 4),
    ("llama-3.2-1b", 8, 1024, 0): (1,),
    ("llama-3.2-3b", 4, 1024, 0): (1,),
    ("llama-3.1-8b", 1, 1024, 0): (1, 4),
    ("llama-3.1-8b", 32, 1024, 0): (1,),
    ("qwen2.5-0.5b", 16, 1024, 0): (1,),
    ("qwen2.5-7b", 1, 1024, 0): (1, 4),
    ("qwen3-4b", 4, 1024, 0): (1,),
}
"""Model, rows, tokens and targets, and numbers of micro-batches."""


def slower_by(budgets: Sequence[float], plan_of: Callable[[float], Plan]) -> list[float]:
    """By what fraction each budget's step is slower than the fastest of the smaller ones; without plans that do not fit
    and plans with everything in VRAM, where the GPU steps all layers though some CPU steps could be hidden.
    """
    found, fastest = [], float("inf")
    for budget in budgets:
        made = plan_of(budget)
        if made.fits and made.seconds and {where.states for where in made.placements} != {"vram"}:
            found.append(max(0.0, made.seconds.step / fastest - 1))
            fastest = min(fastest, made.seconds.step)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("work", "accumulation"), [(work, each) for work, of in BY_QUARTERS.items() for each in of])
def test_a_larger_budget_is_never_slower(work: tuple[str, int, int, int], accumulation: int) -> None:
    """The search is greedy, so a budget may be some percent slower than a smaller one, but few are."""
    name, *shape = work
    model = layers_and_work(name, "bf16", *shape)
    options = {"gradient_accumulation": accumulation}
    vram = slower_by(
        [3 + quarter / 4 for quarter in range(68)],
        lambda budget: plan(model, vram=int(budget * GIB), ram="400GiB", **options),
    )
    size = sum(layer.num_parameters for layer in model[0])
    ram = slower_by(
        [10 + quarter / 4 for quarter in range(32)],
        lambda budget: plan(model, vram="12GiB", ram=int(budget * size) + 4 * GIB, **options),
    )
    assert len(vram) >= 20
    assert max(*vram, *ram) <= 0.04
    assert sum((*vram, *ram)) <= 0.01 * len((*vram, *ram))


def test_a_70b_model_is_planned() -> None:
    made = plan(llama(1, 2048, **LLAMA_70B), vram="80GiB", ram="1200GiB")
    assert made.fits
    assert made.num_parameters == 70_553_706_496
    assert Counter(where.weights for where in made.placements)["ram"] > 40


@pytest.mark.slow
def test_states_go_to_disk_where_ram_is_short(small_batch: Model) -> None:
    disk = {"disk_read_bytes_per_second": 3e9, "disk_write_bytes_per_second": 2e9, "disk_folder": "/"}
    with_disk = replace(H200, disk_free_bytes=100 * GIB, **disk)
    wishes = {"vram": "6GiB", "ram": "24GiB"}
    assert not plan(small_batch, **wishes).fits
    made = plan(small_batch, with_disk, **wishes)
    assert made.fits
    assert 0 < made.total_bytes("disk") < 30 * GIB
    assert made.seconds
    assert made.seconds.busy["disk"] > 1
    assert not plan(small_batch, replace(with_disk, disk_free_bytes=GIB), **wishes).fits


# -- states in RAM that the GPU steps


def on_gpu_from_ram(made: Plan) -> int:
    """Layers whose states are streamed through VRAM."""
    return sum(where.step == "gpu" and where.states == "ram" for where in made.placements)


def with_all_from_ram_on_cpu(made: Plan) -> float:
    """Seconds of a step of the plan if the CPU stepped all states in RAM."""
    assert made.basis is not None
    assert made.basis.work is not None
    placements = [
        replace(where, step="cpu", gradients="ram") if where.states == "ram" else where for where in made.placements
    ]
    return StepModel(made.layers, made.basis.work, made.basis.hardware, 1).seconds(placements).step  # type: ignore[arg-type]


def test_both_processors_step_where_both_are_fast(small_batch: Model) -> None:
    """The gain depends on DRAM, which serves both: here it moves 9 % more for both than for the cores alone."""
    of_the_cores_alone = []
    for dram in (H200.cpu_and_bus_bytes_per_second, 280e9):
        made = plan(small_batch, replace(H200, cpu_and_bus_bytes_per_second=dram), vram=(16 << 30) + LOADED_LATER_BYTES)
        assert made.seconds
        assert made.seconds.busy["CPU step"] == pytest.approx(made.seconds.update_phase, rel=0.15)
        assert 5 < on_gpu_from_ram(made) < sum(where.states == "ram" for where in made.placements) / 2
        of_the_cores_alone.append(made.seconds.step / with_all_from_ram_on_cpu(made))
    assert of_the_cores_alone == [pytest.approx(0.974, abs=0.01), pytest.approx(0.845, abs=0.01)]


def test_the_gpu_steps_most_where_cores_are_few(small_batch: Model) -> None:
    made = plan(small_batch, TWO_CORES, vram="16GiB")
    assert made.seconds
    assert on_gpu_from_ram(made) > 0.6 * sum(where.states == "ram" for where in made.placements)
    assert made.seconds.step < 0.6 * with_all_from_ram_on_cpu(made)


def test_layers_that_the_gpu_steps_are_spread_over_forward(small_batch: Model) -> None:
    steppers = [where.step for where in plan(small_batch, vram="16GiB").placements if where.states == "ram"]
    runs = [len(list(run)) for step, run in itertools.groupby(steppers) if step == "cpu"]
    assert max(runs) - min(runs[1:-1]) <= 1


def test_without_room_for_the_buffers_the_cpu_steps() -> None:
    """A card that holds the leanest placements, and a card that holds the buffers too."""
    layers = [shape(f"block.{index}", 2**24) for index in range(8)]
    work = MicroBatch(tuple(stage(layer.name, kept=2**20) for layer in layers), 640)
    search = Search(layers, work, TWO_CORES, 1)
    need, more = (search.needs(Counts(8, 8, 8, 0, gpu_steps=number)).vram for number in (0, 8))
    assert more - need == 3 * 14 * 2**23
    assert {where.step for where in search.best(need, 120 * GIB)} == {"cpu"}
    assert "gpu" in {where.step for where in search.best(more, 120 * GIB)}


def test_ram_that_is_short_is_saved_by_steps_on_the_gpu() -> None:
    """Gradients and weights of layers stepped only by the GPU are not in RAM: 10 bytes a parameter instead of 14."""
    layers = [shape(f"block.{index}", 2**26, shared=True) for index in range(8)]  # their weights stay in VRAM
    work = MicroBatch(tuple(stage(layer.name, kept=2**20) for layer in layers), 640)
    search = Search(layers, work, H200, 1)
    lean = Counts(0, 0, 0, 0, gpu_steps=8, gradients_in_vram="gpu")
    most, least = (search.needs(counts).ram for counts in (Counts(0, 0, 0, 0), lean))
    assert most - least == 8 * (2 + 4) * 2**26  # a tied weight's gradient is fp32
    made = search.best(search.needs(lean).vram, least)
    assert made == search.placements(lean)
    assert {(where.step, where.gradients) for where in made} == {("gpu", "vram")}


def test_what_fits_nowhere_is_planned_with_what_can_be_had() -> None:
    """A machine can get more RAM, but a card no more VRAM, so the total of missing bytes does not decide."""
    layers = [shape(f"block.{index}", 2**27) for index in range(8)]
    work = MicroBatch(tuple(stage(layer.name, kept=2**28) for layer in layers), 640)

    def short(vram: str, ram: str, **disk: Any) -> Plan:
        return make_plan(layers, OffloadConfig(vram=vram, ram=ram), work=work, hardware=replace(H200, **disk))

    small = short("6GiB", "9GiB")
    assert set(small.lacking()) == {"ram"}
    assert small.total_bytes("vram") > 5 * GIB  # the available room holds states
    assert "needs" in small.verdict
    assert "VRAM" not in small.verdict
    tiny = short("1GiB", "2GiB")
    assert tiny.lacking()["vram"] < GIB * 2
    assert {where.weights for where in tiny.placements} == {"ram"}
    disk: Any = {"disk_free_bytes": GIB, "disk_read_bytes_per_second": 1e9, "disk_write_bytes_per_second": 1e9}
    assert set(short("6GiB", "9GiB", **disk).lacking()) == {"disk"}


def test_asked_for_recomputation_is_given(small_batch: Model) -> None:
    made = plan(small_batch, vram="64GiB", activation_checkpointing=True)
    assert {where.activations for where, layer in zip(made.placements, made.layers, strict=True) if layer.in_block} == {
        "checkpoint"
    }
    leaner = plan(small_batch, vram="6GiB", activation_checkpointing=True)
    assert "keep" not in {
        where.activations for where, layer in zip(leaner.placements, leaner.layers, strict=True) if layer.in_block
    }


def test_accumulated_gradients_stay_in_vram_where_there_is_room(small_batch: Model) -> None:
    made = plan(small_batch, vram="24GiB", gradient_accumulation=8)
    assert {where.gradients for where in made.placements if where.step == "gpu"} == {"vram"}
    assert sum(where.gradients == "ram" for where in made.placements) < len(made.placements) / 3


def test_tied_blocks_keep_their_weights() -> None:
    layers = [shape(f"block.{index}", 2**24, shared=index == 1) for index in range(4)]
    work = MicroBatch(tuple(stage(layer.name, kept=2**28, forward=Pass(10**12)) for layer in layers), 640)
    made = make_plan(layers, OffloadConfig(vram="1.7GiB"), work=work, hardware=H200)
    assert made.placements[1].weights == "vram"


def test_nothing_is_chosen_for_a_model_without_blocks_but_states() -> None:
    layers = [shape(f"piece.{index}", 2**25, in_block=False) for index in range(4)]
    work = MicroBatch((stage("", kept=2**28),), 640)
    made = make_plan(layers, OffloadConfig(vram="2.2GiB", ram="16GiB"), work=work, hardware=H200)
    assert made.fits
    assert {where.weights for where in made.placements} == {"vram"}
    assert {where.activations for where in made.placements} == {"keep"}
    assert {where.step for where in made.placements} == {"cpu", "gpu"}
    assert "ram" in {where.states for where in made.placements}
