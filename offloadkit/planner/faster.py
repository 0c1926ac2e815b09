"""A faster plan for a run that is under way, on a machine that is faster or slower than it was planned with.

What is compared are rates, not seconds: how many bytes a resource moved in the seconds in which it worked. Seconds of
a step say less, because layers change the processor (`StepBalancer`), and micro-batches are shorter than planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

from offloadkit.config import Placement
from offloadkit.hardware import CPU_STEP_RATES, Hardware
from offloadkit.optim.table import DTYPES
from offloadkit.planner.plan import Plan, replanned, wishes
from offloadkit.planner.seconds import FEW_CORES, StepModel
from offloadkit.telemetry import StepRecord

TOLERANCE = 1.25
"""A rate is as planned if it is within this factor, either way. On H200s the CPU's steps took 0.95 to 1.15 times the
seconds planned in most of benchmarks/results.csv, so a smaller factor would correct the model's error instead."""
MIN_GAIN = 0.05
"""A plan is faster if its step takes less than the present one's by more than this fraction."""
MIN_SECONDS = 1e-3
"""What works for less than this in a step, by the measurement or by the plan, is not judged: waits for the clock and
for Python would count as its work."""
COMPUTE = "compute"
"""Forward and backward with nothing waited for: its rate is in steps per second."""
PYTHON = "Python"
"""The same of shorter micro-batches than planned, where Python's launches bound those planned: Python's time is that of
a micro-batch of any length."""
_PHASES = {"H2D": "h2d", "D2H": "d2h", "CPU step": "cpu_step"}
_ROUNDS, _CLOSE = 20, 0.01
_AT_ONCE = 1e30
"""Bytes per second of what must not be waited for."""


@dataclass(frozen=True)
class Rate:
    """What a resource does in a second while it works, in bytes (`COMPUTE` and `PYTHON`: in steps)."""

    measured: float
    planned: float

    @property
    def differs(self) -> bool:
        return not 1 / TOLERANCE <= self.measured / self.planned <= TOLERANCE


def judged(
    plan: Plan, machine: Hardware, placements: Sequence[Placement], records: Sequence[StepRecord]
) -> dict[str, Rate]:
    """The medians of the steps' rates by resource ("H2D", "D2H", "CPU step", `COMPUTE` or `PYTHON`), beside those
    planned.

    Left out is what works too little to be judged, and the CPU's step where states are on disk. With few cores, Python
    and the CPU's step share them, and neither has seconds of its own. Forward and backward are left out on several
    ranks, whose exchange is in the plan's seconds of them and not in those measured; and for micro-batches of other
    sizes than planned, unless they are shorter, each is a step of its own, and Python bounds those planned.

    Args:
        plan: of a micro-batch on a machine.
        machine: how fast the plan's machine is thought to be.
        placements: where the layers are, with the processors that step them now.
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
    """What the seconds of forward and backward tell: `COMPUTE`, `PYTHON` or nothing."""
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
    """The machine with which the plan expects what was measured; None where no rate differs.

    Rates that do not differ stay as they are. A direction of the bus that was not judged is as wrong as the other one.
    """
    differing = {name for name, rate in rates.items() if rate.differs}
    if not differing:
        return None
    for _ in range(_ROUNDS):  # the resources share DRAM and the bus, so each correction changes the others' rates
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
    """The fastest plan of the same run on `machine`; None if it is no faster than `placements` there.

    Args:
        budgets: bytes that the plan may take, of "vram" and "ram".
    """
    now = _model(plan, machine).seconds(placements).step
    other = replanned(plan, hardware=machine, **wishes(plan, budgets))
    assert other.seconds is not None
    return other if other.fits and other.seconds.step < (1 - MIN_GAIN) * now else None


def _model(plan: Plan, machine: Hardware) -> StepModel:
    assert plan.basis.work is not None
    compiled = plan.basis.config.compile_blocks
    return StepModel(plan.layers, plan.basis.work, machine, plan.accumulation, compiled=compiled)


def _planned_rates(plan: Plan, machine: Hardware, placements: Sequence[Placement]) -> dict[str, float]:
    seconds, _ = _computing(plan, machine, placements)
    return _model(plan, machine).rates(placements) | dict.fromkeys((COMPUTE, PYTHON), 1 / seconds)


def _computing(plan: Plan, machine: Hardware, placements: Sequence[Placement]) -> tuple[float, bool]:
    """Seconds of a step's forward and backward with nothing waited for, and whether Python bounds them.

    What the update's threads take from Python counts, though nothing waits for them.
    """
    names = [name.name for name in fields(Hardware) if name.name.endswith("_bytes_per_second")]
    at_once: dict[str, Any] = dict.fromkeys(names, _AT_ONCE) | {"vram_bytes_per_second": machine.vram_bytes_per_second}
    found = _model(plan, replace(machine, **at_once)).seconds(placements)
    launches = _model(plan, machine).seconds(placements).busy["launches"]
    by_python = launches > found.busy["forward"] + found.busy["backward"]
    slowed = launches - found.busy["launches"] if by_python else 0.0
    return found.step - found.busy["GPU step"] + slowed, by_python


def _with_compute(plan: Plan, machine: Hardware, placements: Sequence[Placement], part: str, factor: float) -> Hardware:
    """The machine with `factor` times the rate of what bounds forward and backward: Python's launches, or the GPU, of
    which shorter micro-batches say nothing."""
    if _computing(plan, machine, placements)[1]:
        return replace(machine, launch_seconds=machine.launch_seconds / factor)
    if part == PYTHON:
        return machine
    flops = [f"{dtype}_flops_per_second" for dtype in DTYPES]
    return _times(machine, factor, [*flops, "vram_bytes_per_second"])


def _with_copies_and_steps(machine: Hardware, factors: Mapping[str, float]) -> Hardware:
    """The machine with other rates of copies and of the CPU's step.

    Where they are slower, what DRAM serves at once falls in proportion: each slows the others as before.
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
