"""The plan's text about the processor of each step, and about the bound of the step."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from offloadkit.facts.config import OffloadConfig, Placement
from offloadkit.facts.fitted import LOADED_LATER_BYTES
from offloadkit.facts.hardware import Hardware
from offloadkit.facts.units import format_bytes, format_rate, format_seconds, parse_bytes, rounded_up
from offloadkit.planner import MicroBatch, Plan, make_plan
from offloadkit.planner.remedies import nearest_fits
from tests.messages import has_facts
from tests.planner.machines import GIB, H200, TWO_CORES, shape, stage

IN_RAM = Placement()
THROUGH_VRAM = Placement(gradients="vram", step="gpu")


def plan(machine: Hardware = H200, num_layers: int = 20, **options: Any) -> Plan:
    optimizer = options.get("optimizer", "adamw")
    layers = [shape(f"block.{index}", 1 << 26, optimizer=optimizer) for index in range(num_layers)]
    work = MicroBatch(tuple(stage(layer.name, kept=1 << 20) for layer in layers), 640)
    return make_plan(layers, OffloadConfig(**options), work=work, hardware=machine)


def test_the_verdict_is_one_line_and_rounds_need_and_budget_alike() -> None:
    made = plan(vram="8GiB", ram="120GiB")
    assert made.seconds is not None
    assert made.tokens_per_second is not None
    seconds, rate = format_seconds(made.seconds.step, digits=2), f"{made.tokens_per_second:,.0f}"
    vram, ram = (f"{made.needs()[tier] / GIB:.2g}" for tier in ("vram", "ram"))
    assert made.verdict.startswith("FITS")
    facts = (f"{vram} of 8 GiB VRAM", f"{ram} of 120 GiB RAM", f"{seconds} a step", f"{rate} tokens/s")
    assert has_facts(made.verdict, *facts)
    verdict, rest = str(made).splitlines()
    assert verdict == made.verdict
    assert has_facts(rest, "1,342,177,280 parameters", "bf16")
    tight = replace(made, budgets=made.needs())
    assert has_facts(tight.verdict, f"{vram} of {vram} GiB VRAM", f"{ram} of {ram} GiB RAM")
    short = replace(made, budgets={"vram": 1 << 30, "ram": 1 << 30})
    vram, ram = (format_bytes(rounded_up(made.needs()[tier])) for tier in ("vram", "ram"))
    assert short.verdict.startswith("DOES NOT FIT")
    assert has_facts(short.verdict, f"{vram} of VRAM", "1 GiB", f"{ram} of RAM", "1 GiB")


DISK: Any = {"disk_read_bytes_per_second": 1e9, "disk_write_bytes_per_second": 1e9, "disk_folder": "/disk"}
ON_DISK = "optimizer states on disk (OffloadConfig(disk='/disk'), or --disk /disk)"


def with_proposals(short: Plan, free_bytes: int, *smaller: tuple[str, ...]) -> Plan:
    """`short` with proposals of a disk and of micro-batches that are named smaller but take as much."""
    machine, work = replace(H200, disk_free_bytes=free_bytes, **DISK), short.basis.work
    assert work is not None
    works = tuple((options, work) for options in smaller)
    return replace(short, basis=replace(short.basis, with_disk=machine, smaller=works))


def test_changes_are_tried_together_where_neither_is_enough() -> None:
    """A smaller micro-batch changes nothing here; smaller states or a small disk alone are not enough."""
    short = plan(vram="2GiB", ram="10GiB")
    made = with_proposals(short, 6 * GIB, ("batch_size=1",))
    words, other = nearest_fits(made, most=1)[0]
    assert words == f"precision='compact' and {ON_DISK}"
    assert other.fits
    assert 0 < other.total_bytes("disk") <= 6 * GIB
    roomy = with_proposals(short, 600 * GIB, ("batch_size=1",))
    assert nearest_fits(roomy, most=1)[0][0] == ON_DISK, "a sufficient single change must be named alone"


def test_where_nothing_fits_the_leanest_settings_are_named_with_what_they_need() -> None:
    """More RAM for the present settings is not the only proposal: with a disk far less is enough."""
    short = plan(vram="2GiB", ram="200MiB")
    made = with_proposals(short, 600 * GIB, ("batch_size=1",), ("batch_size=1", "max_input_length=9"))
    (more, whole), (lean, less), (leanest, least) = nearest_fits(made)
    assert re.fullmatch(r"\S+ GiB of RAM", more)
    assert re.fullmatch(re.escape(f"precision='tiny' and {ON_DISK} with ") + r"\S+ GiB of RAM", lean)
    assert leanest.startswith(f"batch_size=1, max_input_length=9, precision='tiny' and {ON_DISK} with ")
    assert less.fits
    assert least.fits
    assert less.budgets["ram"] < whole.budgets["ram"] / 2


def test_who_steps_is_said_where_states_are_in_ram() -> None:
    made = plan(placement=THROUGH_VRAM)
    text = made.details()
    assert "optimizer states in RAM, stepped by the GPU through VRAM" in text
    assert "gradients kept in VRAM for the step" in text
    assert "state buffers" in text
    assert "stepped by the CPU" not in text
    one, peak = map(format_bytes, (made.checkpoint_bytes, made.checkpoint_peak_bytes))
    assert f"  a checkpoint takes {one} of disk; two, and the model, {peak}\n" in text
    assert "gradients" not in plan(placement=IN_RAM).details().split("working weights  ")[0]


@pytest.mark.slow
def test_both_steppers_have_a_line_each() -> None:
    """If DRAM gives more than the cores take, both step; otherwise the CPU steps all layers."""
    made = plan(replace(H200, cpu_and_bus_bytes_per_second=300e9), vram="8GiB", ram="120GiB")
    wheres = made.placements
    on_gpu = sum(where.step == "gpu" and where.states == "ram" for where in wheres)
    on_cpu = sum(where.step == "cpu" for where in wheres)
    assert 0 < on_gpu < on_cpu
    text, html = made.details(), made._repr_html_()
    for words in (
        f"optimizer states of {on_gpu} of 20 layers in RAM, stepped by the GPU through VRAM",
        f"optimizer states of {on_cpu} of 20 layers in RAM, stepped by the CPU",
    ):
        assert words in text
        assert words in html
    assert max(map(len, text.splitlines())) <= 80
    facts = made.to_dict()
    assert sum((layer["states"], layer["step"]) == ("ram", "gpu") for layer in facts["layers"]) == on_gpu
    assert facts["bytes"]["vram"]["state buffers"] >= 3 * 10 * 2**23
    assert facts["explanation"] == made.explain().splitlines()


@pytest.mark.parametrize(
    ("machine", "options", "facts"),
    [
        (H200, {"placement": IN_RAM}, ("CPU", "RAM's bandwidth")),
        (TWO_CORES, {"placement": IN_RAM}, ("CPU", "2 cores")),
        (H200, {"placement": IN_RAM, "precision": "tiny"}, ("CPU", "cores' arithmetic")),
        (H200, {"placement": THROUGH_VRAM}, ("bus in both directions",)),
    ],
)
def test_what_limits_is_named(machine: Hardware, options: Any, facts: tuple[str, ...]) -> None:
    assert has_facts(plan(machine, **options).explain().splitlines()[0], *facts, "limit")


def test_what_limits_together_is_named_together() -> None:
    """With the GPU's share, the CPU step and the bus finish at the same time."""
    roomy = replace(H200, cpu_and_bus_bytes_per_second=300e9)
    first = plan(roomy, vram="12GiB", ram="120GiB").explain().splitlines()[0]
    assert has_facts(first, "RAM's bandwidth", "limit")
    assert has_facts(first, "bus in both directions", "limit")


def test_more_vram_lets_the_gpu_step_more() -> None:
    """All weights are streamed, and no room is left for the buffers that states pass through."""
    made = plan(TWO_CORES, num_layers=8, vram=(19 << 30) // 10 + LOADED_LATER_BYTES, ram="120GiB")
    assert made.fits
    assert {where.step for where in made.placements} == {"cpu"}
    assert "more VRAM would let the GPU step " in made.explain()
    assert "more layers through VRAM: " in made.explain()


def test_one_layer_is_one() -> None:
    """More and more VRAM, hint by hint."""
    said = [plan(TWO_CORES, num_layers=4, vram=f"{mib}MiB", ram="120GiB").explain() for mib in range(800, 2600, 100)]
    assert any(" 1 more layer " in text or " 1 more layer:" in text for text in said)
    assert not any(" 1 more layers" in text for text in said)


def test_a_machine_without_contention_is_not_said_to_be_slow() -> None:
    fast = replace(H200, cpu_adamw_bytes_per_second=1e15, dram_bytes_per_second=1e15)
    assert "AdamW" not in plan(fast, placement=IN_RAM).explain()


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(1023 * 1024, "1023 KiB"), (2**20 - 1, "1 MiB"), (1_048_261_000, "1000 MiB"), (2**30, "1 GiB")],
)
def test_bytes_are_never_said_in_powers_of_ten(num_bytes: int, words: str) -> None:
    assert format_bytes(num_bytes) == words


@pytest.mark.parametrize(
    ("rate", "words"), [(52.46e9, "52.5 GB/s"), (999.4e9, "999 GB/s"), (999.9e9, "1 TB/s"), (1.234e15, "1234 TB/s")]
)
def test_rates_are_never_said_in_powers_of_ten(rate: float, words: str) -> None:
    assert format_rate(rate) == words


@pytest.mark.parametrize("num_bytes", [70_001, 2**20 - 1, 4_776_543_210, 2**30 - 1, 38_400_400 * 1024, 1234 * GIB + 1])
def test_what_is_asked_for_can_be_read_back_and_is_enough(num_bytes: int) -> None:
    up = rounded_up(num_bytes)
    assert num_bytes <= up <= 1.01 * num_bytes
    assert parse_bytes(format_bytes(up)) == up


def test_larger_budgets_are_enough_as_they_are_written() -> None:
    """Also for a disk that the user has named and that is too small."""
    short = plan(replace(H200, disk_free_bytes=GIB, **DISK), vram="2GiB", ram="3GiB", disk="/disk")
    assert set(short.lacking()) == {"ram", "disk"}
    words, other = next(each for each in nearest_fits(short) if each[0][0].isdigit())
    of_ram, of_disk = words.split(" and ")
    assert other.fits
    assert other.budgets["ram"] == parse_bytes(of_ram.removesuffix(" of RAM"))
    assert of_disk.endswith(" of disk")


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.9996, "1 s"), (0.9994, "999 ms"), (1234.5, "1234 s"), (0.0123, "12.3 ms")]
)
def test_seconds_are_never_said_in_powers_of_ten(seconds: float, words: str) -> None:
    assert format_seconds(seconds) == words


@pytest.mark.slow
def test_a_plan_with_lion_proposes_no_precision_that_lion_does_not_have() -> None:
    for ram in ("120GiB", "1GiB"):
        made = plan(optimizer="lion", vram="8GiB", ram=ram)
        told = made.explain() + made._repr_html_()
        assert "precision=" not in told
        assert made.fits == (ram == "120GiB")
    assert not made.fits


def test_a_plan_names_what_other_processes_hold_where_that_matters() -> None:
    def said(made: Plan) -> str:
        return " ".join((str(made) if made.fits else made.explain()).split())

    crowded = replace(H200, vram_free_bytes=6 * GIB, vram_of_others_bytes=100 * GIB)
    there = format_bytes(crowded.vram_free_bytes + crowded.vram_context_bytes)
    assert has_facts(
        said(plan(crowded, vram="8GiB")), "budget of 8 GiB", there, "other processes hold 100 GiB", "leaner plan"
    )
    small = said(plan(crowded, num_layers=2, vram="8GiB"))
    assert has_facts(small, "budget of 8 GiB", there, "other processes hold 100 GiB")
    assert "leaner plan" not in small, "it needs less than there is"
    assert has_facts(said(plan(crowded)), "VRAM: what is free", "other processes hold 100 GiB")
    short = plan(replace(crowded, vram_free_bytes=1 << 20))
    assert not short.fits
    assert "other processes hold 100 GiB" in said(short)
    for silent in (plan(crowded, vram="4GiB"), plan(H200), plan(replace(H200, vram_of_others_bytes=1 << 20))):
        assert "other processes" not in said(silent)
