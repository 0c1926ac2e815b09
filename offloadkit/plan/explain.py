"""A plan in sentences: whether it fits, what limits it, what would help. The numbers come from planning again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from offloadkit.plan.costs import cpu_step_rate
from offloadkit.plan.queues import FEW_CORES
from offloadkit.plan.text import does_not_fit, format_bytes, format_seconds, of_tiers

if TYPE_CHECKING:
    from offloadkit.hardware import Hardware
    from offloadkit.plan.plan import Plan

_NAMES = {"vram": "VRAM", "ram": "RAM", "disk": "disk"}
_LIMITS = {
    "GPU": "the GPU's computing",
    "H2D": "the bus to the GPU",
    "D2H": "the bus from the GPU",
    "disk": "the disk",
    "launches": "starting the GPU's operations, one after the other, from Python",
}
_BOTH_WAYS = "the bus in both directions"
_MORE = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Budgets to try, as shares of the present one."""
_WORTHWHILE = 1.05
"""Less than this times faster is not worth a sentence."""
_SMALLER = 0.9
"""A smaller micro-batch that still lacks more than this share of what the present one does is not worth a sentence."""
_AS_BUSY = 0.85
"""What works for more than this share of the time of what works longest limits the step with it."""
_DRAM_BOUND = 0.6
"""A CPU step that moves more than this share of what the cores' triad does waits for RAM, else for arithmetic."""


def explained(plan: Plan) -> str:
    """Sentences, one a line."""
    return "\n".join([*_fit(plan), *_limit(plan), *_help(plan)])


def replanned(plan: Plan, *, work: Any = None, hardware: Hardware | None = None, **changes: Any) -> Plan:
    """The plan with fields of its config (vram, ram, precision, ...), its micro-batch or its machine changed."""
    from offloadkit.plan.plan import make_plan

    assert plan.basis is not None
    basis = plan.basis
    config = replace(basis.config, **changes)
    return make_plan(
        [replace(layer, precision=config.precision) for layer in plan.layers],
        config,
        frozen=basis.frozen,
        frozen_bytes=basis.frozen_bytes,
        work=work or basis.work,
        hardware=hardware or basis.hardware,
        assumed=basis.assumed,
    )


def nearest_fits(plan: Plan, most: int = 3) -> list[tuple[str, Plan]]:
    """Up to `most` plans that fit, each with what to ask for: those that change the least come first.

    Tried in this order: states in fewer bytes, smaller micro-batches, both, states on disk, a larger budget, then
    smaller micro-batches in a budget that is enlarged by less.
    """
    found: list[tuple[str, Plan]] = []
    for words, other in _others(plan):
        if other.fits:
            found.append((words, other))
        if len(found) == most:
            break
    return found


def _others(plan: Plan) -> Iterator[tuple[str, Plan]]:
    basis = plan.basis
    if basis is None or basis.hardware is None:
        return
    order = ("exact", "compact", "tiny")
    leaner = order[order.index(basis.config.precision) + 1 :]
    for precision in leaner:
        yield f"precision={precision!r}", replanned(plan, precision=precision)
    for words, work in basis.smaller:
        yield words, replanned(plan, work=work)
    for precision in leaner:
        for words, work in basis.smaller:
            yield f"precision={precision!r}, {words}", replanned(plan, precision=precision, work=work)
    if basis.with_disk is not None:
        folder = basis.with_disk.disk_folder
        on_disk = replanned(plan, hardware=basis.with_disk, disk=folder)
        yield f"optimizer states on disk (OffloadConfig(disk={folder!r}), or --disk {folder})", on_disk
    yield from _larger(plan)
    for words, work in basis.smaller[-2:]:  # the leanest: less of a budget has to be added
        lean = replanned(plan, work=work)
        if sum(lean.lacking().values()) < _SMALLER * sum(plan.lacking().values()):
            for budgets, other in _larger(lean):
                yield f"{words} with {budgets}", other


def _larger(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The budgets that the plan itself asks for, which is the leanest there is."""
    needs = plan.needs()
    lacking: dict[str, Any] = {tier: needs[tier] for tier in plan.lacking() if tier in ("vram", "ram")}
    if lacking:
        yield of_tiers(lacking), replanned(plan, **lacking)


def _fit(plan: Plan) -> Iterator[str]:
    if plan.fits:
        return
    yield does_not_fit({tier: (plan.needs()[tier], plan.budgets[tier]) for tier in plan.lacking()})
    for words, other in nearest_fits(plan):
        memory = of_tiers({tier: other.needs()[tier] for tier in _tiers_to_name(plan, other)})
        takes = [memory] if memory else []
        if other.seconds is not None:
            takes.append(f"{format_seconds(other.seconds.step)} a step")
        yield f"{words} would fit" + (f": {', '.join(takes)}" if takes else "")


def _tiers_to_name(plan: Plan, other: Plan) -> list[str]:
    """Those of VRAM and RAM of which `other` was not given more, which is named already; without a GPU all is RAM."""
    tiers = ["ram"] if other.on_cpu else ["vram", "ram"]
    return [tier for tier in tiers if other.budgets.get(tier) == plan.budgets.get(tier)]


def _shares(plan: Plan) -> list[tuple[str, float]]:
    """What is busy, and for which share of the step; what is busy longest first."""
    if plan.seconds is None:
        return []
    busy, step = plan.seconds.busy, plan.seconds.step
    seconds = {"GPU": busy["forward"] + busy["backward"] + busy["GPU step"]}
    seconds |= {name: busy[name] for name in ("CPU step", "H2D", "D2H", "disk", "launches")}
    return sorted(((name, number / step) for name, number in seconds.items()), key=lambda item: -item[1])


def _limit(plan: Plan) -> Iterator[str]:
    shares = _shares(plan)
    if not shares or plan.on_cpu:
        return
    longest = shares[0][1]
    together = {name: share for name, share in shares if share > _AS_BUSY * longest}
    if {"H2D", "D2H"} <= together.keys():
        del together["D2H"]
        names = [_BOTH_WAYS if name == "H2D" else _limiting(plan, name) for name in together]
    else:
        names = [_limiting(plan, name) for name in together]
    if len(names) == 1:
        yield f"{names[0]} limits the step: it is busy for {longest:.0%} of it"
    else:
        busy = " and ".join(f"{share:.0%}" for share in together.values())
        yield f"{', '.join(names[:-1])} and {names[-1]} limit the step: they are busy for {busy} of it"


def _limiting(plan: Plan, name: str) -> str:
    """A resource, and for the CPU's step what of it is short."""
    if name != "CPU step":
        return _LIMITS[name]
    assert plan.basis is not None
    assert plan.basis.hardware is not None
    machine = plan.basis.hardware
    if machine.num_cores <= FEW_CORES:
        what = f"{machine.num_cores} cores"
    else:
        rate = cpu_step_rate(plan.basis.config.precision, machine)
        what = "RAM's bandwidth" if rate > _DRAM_BOUND * machine.dram_bytes_per_second else "the cores' arithmetic"
    return f"the CPU's AdamW step ({what})"


def _help(plan: Plan) -> Iterator[str]:
    """The smallest larger budget that makes the step noticeably faster, and leaner states where they do."""
    if plan.seconds is None or not plan.fits or plan.on_cpu or plan.basis is None:
        return
    step = plan.seconds.step
    for tier in ("vram", "ram"):
        for factor in _MORE:
            larger: dict[str, Any] = {tier: int(plan.budgets[tier] * factor)}
            other = replanned(plan, **larger)
            assert other.seconds is not None
            if other.fits and step / other.seconds.step >= _WORTHWHILE:
                more, speed = format_bytes(other.total_bytes(tier) - plan.total_bytes(tier)), step / other.seconds.step
                yield f"{more} more {_NAMES[tier]} would {_changed(plan, other)}: {speed:.3g}x faster"
                break
    if plan.basis.config.precision == "exact":
        other = replanned(plan, precision="compact")
        assert other.seconds is not None
        if other.fits and step / other.seconds.step >= _WORTHWHILE:
            tier = "disk" if plan.total_bytes("disk") else "ram"
            saved = format_bytes(max(0, plan.total_bytes(tier) - other.total_bytes(tier)))
            yield f"precision='compact' would save {saved} of {_NAMES[tier]}: {step / other.seconds.step:.3g}x faster"


def _changed(plan: Plan, other: Plan) -> str:
    """What another plan does with more memory."""

    def counts(of: Plan) -> dict[str, int]:
        wheres = of.placements
        return {
            "keep the weights of {} in VRAM": sum(where.weights == "vram" for where in wheres),
            "keep the optimizer states of {} in VRAM": sum(where.states == "vram" for where in wheres),
            "keep the optimizer states of {} in RAM": -sum(where.states == "disk" for where in wheres),
            "keep the activations of {}": sum(where.activations == "keep" for where in wheres),
            "let the GPU step {} through VRAM": sum(where.states == "ram" and where.step == "gpu" for where in wheres),
        }

    before, after = counts(plan), counts(other)
    more = {text: after[text] - before[text] for text in before}
    words = [text.format(f"{n} more layer{'s' * (n > 1)}") for text, n in more.items() if n > 0]
    return " and ".join(words[:2]) or "change the placement"
