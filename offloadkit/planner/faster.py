"""Finds a faster plan for a run whose machine is faster or slower than planned.

Compares rates (bytes per second of work), not seconds per step: layers change their processor during a run
(`StepBalancer`), and micro-batches may be shorter than planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

from offloadkit.facts.config import Placement
from offloadkit.facts.hardware import CPU_STEP_RATES, Hardware
from offloadkit.facts.telemetry import StepRecord
from offloadkit.optim.table import DTYPES
from offloadkit.planner.make import budget_options, replanned
from offloadkit.planner.plan import Plan
from offloadkit.planner.seconds import FEW_CORES, StepModel

TOLERANCE = 1.25
"""A rate within this factor of the planned rate counts as planned. CPU steps on H200s took 0.95 to 1.15 times the
planned seconds in most rows of benchmarks/results.csv, so a smaller factor would correct the model's error instead.
"""
MIN_GAIN = 0.05
"""Least saving of step time (fraction) for another plan to count as faster."""
MIN_SECONDS = 1e-3
"""Resources that work less than this per step, measured or planned, are not compared: waits would count as work."""
COMPUTE = "compute"
"""Forward and backward without waits, in steps per second."""
PYTHON = "Python"
"""Like `COMPUTE`, for micro-batches shorter than planned, if Python's launches bound the planned ones: they take the
same time at any length.
"""
_PHASES = {"H2D": "h2d", "D2H": "d2h", "CPU step": "cpu_step"}
_ROUNDS, _CLOSE = 20, 0.01
_AT_ONCE = 1e30
"""Stands for an infinitely fast resource (bytes per second)."""


@dataclass(frozen=True)
class Rate:
    """Bytes per second while a resource works (`COMPUTE` and `PYTHON`: steps per second)."""

    measured: float
    planned: float

    @property
    def differs(self) -> bool:
        return not 1 / TOLERANCE <= self.measured / self.planned <= TOLERANCE


def compared_rates(
    plan: Plan, machine: Hardware, placements: Sequence[Placement], records: Sequence[StepRecord]
) -> dict[str, Rate]:
    """Median measured rate and planned rate of each resource ("H2D", "D2H", "CPU step", `COMPUTE` or `PYTHON`).

    Left out: resources that work too little; the CPU step with states on disk, or with few cores, which it shares with
    Python; forward and backward with several ranks, because only the planned seconds include the exchange, and for
    micro-batches of other sizes, except shorter ones without accumulation if Python bounds the planned step.
    `placements` have the processors that step the layers now.
    """
    planned = _planned_rates(plan, machine, placements)
    found: dict[str, list[tuple[float, float]]] = {
        name: [(record.moved.get(phase, 0), record.seconds.get(phase, 0.0)) for record in records]
        for name, phase in _PHASES.items()
    }
    if any(where.states == "disk" for where in placements):
        del found["CPU step"]
    if machine.num_cores <= FEW_CORES:
        found.pop("CPU step", None)
    elif part := _judged_part(plan, machine, placements, records):
        found[part] = [(1, record.without_waits("forward") + record.without_waits("backward")) for record in records]
    rates: dict[str, Rate] = {}
    for name, steps in found.items():
        seconds = median(each for _, each in steps)
        if name not in planned or seconds < MIN_SECONDS:
            continue
        measured = median(amount / each for amount, each in steps if each)
        if measured and seconds * measured / planned[name] >= MIN_SECONDS:
            rates[name] = Rate(measured, planned[name])
    return rates


def _judged_part(
    plan: Plan, machine: Hardware, placements: Sequence[Placement], records: Sequence[StepRecord]
) -> str | None:
    numbers = {record.num_tokens for record in records}
    if plan.num_tokens is None or plan.layers[0].num_ranks > 1:
        return None
    if numbers == {plan.num_tokens}:
        return COMPUTE
    known = [number for number in numbers if number is not None]
    shorter = plan.accumulation == 1 and len(known) == len(numbers) and max(known) <= plan.num_tokens
    return PYTHON if shorter and _computing(plan, machine, placements)[1] else None


def corrected(
    plan: Plan, machine: Hardware, placements: Sequence[Placement], rates: Mapping[str, Rate]
) -> Hardware | None:
    """The machine on which the plan predicts the measured rates; None if no rate differs.

    If only one direction of the bus was measured, its correction applies to both.
    """
    differing = {name for name, rate in rates.items() if rate.differs}
    if not differing:
        return None
    for _ in range(_ROUNDS):  # resources share DRAM and the bus, so correcting one changes other rates
        planned = _planned_rates(plan, machine, placements)
        differing |= {name for name, rate in rates.items() if replace(rate, planned=planned[name]).differs}
        factors = {name: rates[name].measured / planned[name] for name in sorted(differing)}
        for one, other in (("H2D", "D2H"), ("D2H", "H2D")):
            if one in factors and other not in rates:
                factors[other] = factors[one]
        if part := next((name for name in (COMPUTE, PYTHON) if name in factors), None):
            machine = _with_compute(plan, machine, placements, part, factors[part])
        machine = _with_copies_and_steps(machine, factors)
        if all(abs(factor - 1) < _CLOSE for factor in factors.values()):
            break
    return machine


def faster(plan: Plan, machine: Hardware, placements: Sequence[Placement], budgets: Mapping[str, int]) -> Plan | None:
    """The fastest plan of the same run on `machine`; None if it does not fit or gains less than `MIN_GAIN` on
    `placements`.

    `budgets`: bytes of "vram" and "ram" that the plan may take.
    """
    now = _model(plan, machine).seconds(placements).step
    other = replanned(plan, hardware=machine, **budget_options(plan, budgets))
    assert other.seconds is not None
    return other if other.fits and other.seconds.step < (1 - MIN_GAIN) * now else None


def _model(plan: Plan, machine: Hardware) -> StepModel:
    assert plan.basis.work is not None
    compiled = plan.basis.config.compile_blocks
    return StepModel(
        plan.layers, plan.basis.work, machine, plan.accumulation, compiled=compiled, graphed=plan.is_graphed
    )


def _planned_rates(plan: Plan, machine: Hardware, placements: Sequence[Placement]) -> dict[str, float]:
    seconds, _ = _computing(plan, machine, placements)
    return _model(plan, machine).rates(placements) | dict.fromkeys((COMPUTE, PYTHON), 1 / seconds)


def _computing(plan: Plan, machine: Hardware, placements: Sequence[Placement]) -> tuple[float, bool]:
    """Seconds of forward and backward without waits, and whether Python bounds them.

    Includes Python's slowdown by the update's threads, although nothing waits for the update.
    """
    names = [name.name for name in fields(Hardware) if name.name.endswith("_bytes_per_second")]
    at_once: dict[str, Any] = dict.fromkeys(names, _AT_ONCE) | {"vram_bytes_per_second": machine.vram_bytes_per_second}
    found = _model(plan, replace(machine, **at_once)).seconds(placements)
    launches = _model(plan, machine).seconds(placements).busy["launches"]
    by_python = launches > found.busy["forward"] + found.busy["backward"]
    slowed = launches - found.busy["launches"] if by_python else 0.0
    return found.step - found.busy["GPU step"] + slowed, by_python


def _with_compute(plan: Plan, machine: Hardware, placements: Sequence[Placement], part: str, factor: float) -> Hardware:
    """The machine with the bound of forward and backward (Python's launches or the GPU) `factor` times as fast.

    `PYTHON` never changes the GPU's rates.
    """
    if _computing(plan, machine, placements)[1]:
        return replace(machine, launch_seconds=machine.launch_seconds / factor)
    if part == PYTHON:
        return machine
    flops = [f"{dtype}_flops_per_second" for dtype in DTYPES]
    return _times(machine, factor, [*flops, "vram_bytes_per_second"])


def _with_copies_and_steps(machine: Hardware, factors: Mapping[str, float]) -> Hardware:
    """The machine with the rates of copies and of the CPU step multiplied by `factors`.

    If they fall, the DRAM rate that they share falls in proportion.
    """
    changed = _times(machine, factors.get("CPU step", 1.0), [*CPU_STEP_RATES.values(), "dram_bytes_per_second"])
    changed = _times(changed, factors.get("H2D", 1.0), ["h2d_bytes_per_second"])
    changed = _times(changed, factors.get("D2H", 1.0), ["d2h_bytes_per_second"])
    both = _one_way(changed) / _one_way(machine)
    changed = _times(changed, both, ["both_bytes_per_second"])
    at_once = (changed.cpu_adamw_bytes_per_second + changed.both_bytes_per_second) / (
        machine.cpu_adamw_bytes_per_second + machine.both_bytes_per_second
    )
    changed = _times(changed, min(1.0, at_once), ["cpu_and_bus_bytes_per_second"])
    alone = changed.cpu_adamw_bytes_per_second, changed.both_bytes_per_second
    return replace(changed, cpu_and_bus_bytes_per_second=max(changed.cpu_and_bus_bytes_per_second, *alone))


def _one_way(machine: Hardware) -> float:
    return machine.h2d_bytes_per_second + machine.d2h_bytes_per_second


def _times(machine: Hardware, factor: float, names: Sequence[str]) -> Hardware:
    changes: dict[str, Any] = {name: factor * getattr(machine, name) for name in names}
    return replace(machine, **changes)
