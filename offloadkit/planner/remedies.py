"""The bottleneck of a plan, and remedies: other plans that are faster, or that fit if this one does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from offloadkit.facts.calls import in_words_here
from offloadkit.facts.config import Precision
from offloadkit.facts.fitted import GRAPHS_DRIVER_BYTES
from offloadkit.facts.starting import said_if_long
from offloadkit.facts.units import (
    format_bytes,
    format_range,
    format_rate,
    format_seconds,
    parse_bytes,
    rounded,
    rounded_up,
)
from offloadkit.optim.table import optimizer_named
from offloadkit.planner.layout import TIERS
from offloadkit.planner.make import P, budget_options, is_short_of_ram, replanned, with_other_exchange
from offloadkit.planner.prediction import Prediction
from offloadkit.planner.ranks import GPUS_PER_HOST
from offloadkit.planner.seconds import FEW_CORES, cpu_step_rate
from offloadkit.planner.words import TO_GPU, TO_RAM, beside_others, host_totals, misfit_message, of_tiers, speed
from offloadkit.planner.words import takes as takes_of

_LIMITS = {
    "GPU": "the GPU's computing",
    "H2D": f"the bus ({TO_GPU})",
    "D2H": f"the bus ({TO_RAM})",
    "disk": "the disk",
    "launches": "starting the GPU's operations, one after the other, from Python",
    "link": "the link between the GPUs",
}
_BOTH_WAYS = "the bus in both directions"
_LARGER_BUDGETS = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
_MORE_MICRO_BATCHES = 4
_MIN_SPEEDUP = 1.05
"""A change is proposed only if it makes the step at least this many times faster."""
_MIN_SAVED = 0.01
"""A change is said to save memory only if it saves more than this fraction of it."""
_MAX_LACKING = 0.9
"""A smaller micro-batch is proposed only if it lacks less than this fraction of the bytes that the present one
lacks.
"""
_AS_BUSY = 0.85
"""Resources with more than this fraction of the busiest resource's time limit the step together with it."""
_DRAM_BOUND = 0.6
"""A CPU step above this fraction of the triad's bytes per second is bound by RAM, below it by arithmetic."""


def explain(plan: Prediction) -> str:
    """See `Plan.explain`."""
    if not plan.fits:
        return "\n".join(_would_fit(plan))
    with said_if_long("searching for faster plans"):
        return "\n".join([*_limit(plan), *_range(plan), *_bound(plan), *_graphs(plan), *_help(plan)])


def nearest_fits(plan: P, most: int = 4) -> list[tuple[str, P]]:
    """For a plan that does not fit: up to `most` plans that do, each with the words for its changes, small ones first.

    The order: states in fewer bytes, a smaller micro-batch, both; states on disk, alone and with these changes; a
    larger budget; and last a smaller micro-batch, leaner states and both with a smaller increase of the budget.
    """
    return list(islice(((words, other) for words, other in _others(plan) if other.fits), most))


def _leaner_precisions(plan: Prediction) -> tuple[Precision, ...]:
    names = {layer.kind.optimizer for layer in plan.layers if layer.kind.is_trained}
    order = min((optimizer_named(name).precisions for name in names), key=len)
    return order[order.index(plan.basis.config.precision) + 1 :]


def _others(plan: P) -> Iterator[tuple[str, P]]:
    basis = plan.basis
    if basis.hardware is None:
        return
    yield from _leaner(plan)
    how, on_disk = _to_disk(plan)
    if on_disk:
        other = replanned(plan, **on_disk)
        yield how, other
        if not other.fits:
            both = _leaner(replace(other, basis=replace(other.basis, smaller=basis.smaller)))
            yield from ((f"{words} and {how}", each) for words, each in both if each.total_bytes("disk"))
    for budgets, other in _larger(plan):
        chosen = basis.chosen if "vram" in plan.lacking() else ""
        yield f"{chosen} with {budgets}" if chosen else budgets, other
    for words, lean in _leanest(plan):  # these need the least additional memory
        if sum(lean.lacking().values()) < _MAX_LACKING * sum(plan.lacking().values()):
            for budgets, other in _larger(lean):
                yield f"{words} with {budgets}", other


def _to_disk(plan: Prediction) -> tuple[str, dict[str, Any]]:
    machine = plan.basis.with_disk
    if machine is None:
        return "", {}
    folder = machine.disk_folder
    words = f"optimizer states on disk (OffloadConfig(disk={folder!r}), or --disk {folder})"
    return words, {"hardware": machine, "disk": folder}


def _leanest(plan: P) -> Iterator[tuple[str, P]]:
    """The plan with a small micro-batch; if RAM is short, also with the leanest states (on disk if possible), and with
    both.
    """
    smaller = plan.basis.smaller[-2:]
    for options, work in smaller[: 1 if "ram" in plan.lacking() else 2]:
        yield " and ".join(options), replanned(plan, work=work)
    if "ram" not in plan.lacking():
        return
    how, changes = _to_disk(plan)
    leaner = _leaner_precisions(plan)[-1:]
    states = [*(f"precision={precision!r}" for precision in leaner), *([how] if how else [])]
    if leaner:
        changes["precision"] = leaner[0]
    if states:
        yield " and ".join(states), replanned(plan, **changes)
        for options, work in smaller[-1:]:
            *others, last = [*options, *states]
            yield f"{', '.join(others)} and {last}", replanned(plan, work=work, **changes)


def _leaner(plan: P) -> Iterator[tuple[str, P]]:
    leaner, one_is_enough = _leaner_precisions(plan), False
    for precision in leaner:
        other = replanned(plan, precision=precision)
        one_is_enough |= other.fits
        yield f"precision={precision!r}", other
    for words, other in _smaller(plan):
        one_is_enough |= other.fits
        yield words, other
    for precision in () if one_is_enough else leaner:
        for words, other in _smaller(plan, precision=precision):
            yield f"precision={precision!r} and {words}", other


def _smaller(plan: P, **changes: Any) -> Iterator[tuple[str, P]]:
    for options, work in plan.basis.smaller:
        other = replanned(plan, work=work, **changes)
        yield " and ".join(options), other
        if other.fits:
            return


def _larger(plan: P) -> Iterator[tuple[str, P]]:
    needs, hardware = host_totals(plan, plan.needs()), plan.basis.hardware
    lacking: dict[str, Any] = {tier: rounded_up(needs[tier]) for tier in plan.lacking()}
    budgets = {tier: size for tier, size in lacking.items() if tier != "disk"}
    if "disk" in lacking and hardware is not None:
        hardware = replace(hardware, disk_free_bytes=lacking["disk"])
    if lacking:
        yield of_tiers(lacking), replanned(plan, hardware=hardware, **budgets)


@dataclass(frozen=True)
class Remedy:
    """Another plan, which fits.

    Attributes:
        words: the changes.
        call: the user's call or command with these changes, which can be copied; None if it has no such options, or
            this machine is too small.
        takes: the memory that was not named in `words`, and the speed.
    """

    words: str
    call: str | None
    takes: str

    def __str__(self) -> str:
        fits = f"{self.call}  # would fit" if self.call else f"{self.words} would fit"
        return fits + (f": {self.takes}" if self.takes else "")


def remedies(plan: Prediction) -> list[Remedy]:
    """Plans that fit, for a plan that does not, as in `nearest_fits`."""
    found = []
    with said_if_long("searching for plans that fit"):
        fitting = nearest_fits(plan)
    for words, other in fitting:
        needs, options = host_totals(other, other.needs()), _options(plan, other)
        memory = of_tiers({tier: needs[tier] for tier in _tiers_to_name(plan, other)})
        takes = ", ".join([*([memory] if memory else []), *speed(other)])
        found.append(Remedy(in_words_here(words), plan.basis.call.changed(options) if options else None, takes))
    more = _with_another_gpu(plan)
    if more is not None and more.fits:
        found.append(Remedy(f"{more.num_gpus} such GPUs", None, ", ".join(takes_of(more))))
    return found


def notes(plan: Prediction) -> list[str]:
    """Further sentences about a plan that does not fit."""
    by_name = {phase.name: phase for phase in plan.phases}
    if "vram" not in plan.lacking():
        return []
    found = beside_others(plan)
    if by_name["evaluation"].vram > by_name["training"].vram:
        found.append("evaluation takes the most VRAM: a smaller per_device_eval_batch_size takes less")
    return found


def _would_fit(plan: Prediction) -> Iterator[str]:
    yield from notes(plan)
    yield from (f"{number}. {remedy}" for number, remedy in enumerate(remedies(plan), start=1))


def _options(plan: Prediction, other: Prediction) -> dict[str, str | int] | None:
    """The options that turn `plan` into `other`; None if some change is no option on this machine."""
    basis, now, then = plan.basis, plan.basis.config, other.basis.config
    found: dict[str, str | int] = {}
    if other.basis.work is not basis.work:
        options = next(options for options, work in basis.smaller if work is other.basis.work)
        found |= {name: int(value) for name, _, value in (each.partition("=") for each in options)}
    found |= {name: getattr(then, name) for name in ("precision", "disk") if getattr(then, name) != getattr(now, name)}
    for tier in ("vram", "ram"):
        if (budget := getattr(then, tier)) != getattr(now, tier):
            if not _has(plan, tier, parse_bytes(budget)):
                return None
            found[tier] = format_bytes(parse_bytes(budget)).replace(" ", "")
    if "vram" in found and basis.chosen and "batch_size" not in found:
        name, _, value = basis.chosen.partition("=")
        found[name] = int(value)
    machine = basis.with_disk if then.disk != now.disk else basis.hardware
    assert machine is not None
    assert other.basis.hardware is not None
    return found if other.basis.hardware.disk_free_bytes <= machine.disk_free_bytes else None


def _has(plan: Prediction, tier: str, num_bytes: int) -> bool:
    """Whether a budget of `num_bytes` can be given: the machine has them and the user's own budget is what lacks."""
    machine = plan.basis.hardware
    assert machine is not None
    if plan.basis.assumed and (tier == "ram" or machine.assumed_card):
        return True  # planned for another machine
    total = machine.vram_total_bytes if tier == "vram" and not plan.on_cpu else machine.ram_total_bytes
    return getattr(plan.basis.config, tier) is not None and num_bytes <= total


def _tiers_to_name(plan: Prediction, other: Prediction) -> list[str]:
    """VRAM and RAM (without a GPU only RAM), except tiers whose larger budget in `other` is named already."""
    tiers = ["ram"] if other.on_cpu else ["vram", "ram"]
    return [tier for tier in tiers if other.budgets.get(tier) == plan.budgets.get(tier)]


def _limit(plan: Prediction) -> Iterator[str]:
    if plan.seconds is None or plan.on_cpu:
        return
    busy, step = plan.seconds.busy, plan.seconds.step
    seconds = {"GPU": busy["forward"] + busy["backward"] + busy["GPU step"]}
    seconds |= {name: busy[name] for name in ("CPU step", "H2D", "D2H", "disk", "launches", "link") if name in busy}
    shares = sorted(((name, number / step) for name, number in seconds.items()), key=lambda item: -item[1])
    longest = shares[0][1]
    together = {name: share for name, share in shares if share > _AS_BUSY * longest}
    both_ways = {"H2D", "D2H"} <= together.keys()
    if both_ways:
        del together["D2H"]
    names = [_BOTH_WAYS if both_ways and name == "H2D" else _limiting(plan, name) for name in together]
    if len(names) == 1:
        yield f"{names[0]} limits the step: it is busy for {longest:.0%} of it"
    else:
        for_so_long = " and ".join(f"{share:.0%}" for share in together.values())
        yield f"{', '.join(names[:-1])} and {names[-1]} limit the step: they are busy for {for_so_long} of it"


def _range(plan: Prediction) -> Iterator[str]:
    if plan.step_range is not None:
        assert plan.seconds is not None
        yield (
            f"Python's time varies: a step takes {format_range(*plan.step_range)}, and every other figure here is of a "
            f"step of {format_seconds(plan.seconds.step)}"
        )


def _bound(plan: Prediction) -> Iterator[str]:
    bound, seconds, machine = plan.bound, plan.seconds, plan.basis.hardware
    if bound is None or seconds is None or machine is None:
        return
    ram = f"RAM at {format_rate(machine.cpu_and_bus_bytes_per_second)}"
    names = {"GPU": "computing", "DRAM": ram, "bus": "the bus", "disk": "the disk"}
    parts = [f"{each.name} {format_seconds(each.seconds)} ({names[each.slowest]})" for each in bound.phases]
    longer = rounded(seconds.step / bound.step)
    planned = "the plan takes as long" if longer == "1" else f"the plan takes {longer}x as long"
    yield f"the bound of a step is {format_seconds(bound.step)}: {', '.join(parts)}; {planned}"


def _graphs(plan: Prediction) -> Iterator[str]:
    if plan.graphs is None:
        return
    size, of_driver = format_bytes(plan.graphs.num_bytes), format_bytes(GRAPHS_DRIVER_BYTES)
    if plan.is_graphed:
        taken = f"{size} of VRAM, the driver's {of_driver} included"
        yield f"blocks run as {plan.graphs.number:,} CUDA graphs, which take {taken}"
    else:
        yield f"blocks run eagerly, because their CUDA graphs would take {size} of VRAM more"


def _limiting(plan: Prediction, name: str) -> str:
    if name != "CPU step":
        return _LIMITS[name]
    assert plan.basis.hardware is not None
    machine = plan.basis.hardware
    if machine.num_cores <= FEW_CORES:
        what = f"{machine.num_cores} cores"
    else:
        rate = cpu_step_rate(plan.basis.config.precision, machine)
        what = "RAM's bandwidth" if rate > _DRAM_BOUND * machine.dram_bytes_per_second else "the cores' arithmetic"
    return f"the CPU's optimizer step ({what})"


def _help(plan: Prediction) -> Iterator[str]:
    if plan.seconds is None or not plan.fits or plan.on_cpu:
        return
    step = plan.seconds.step
    for tier in ("vram", "ram"):
        for factor in _LARGER_BUDGETS:
            other = replanned(plan, **budget_options(plan, {tier: plan.budgets[tier] * factor}))
            assert other.seconds is not None
            speedup = step / other.seconds.step
            if other.fits and speedup >= _MIN_SPEEDUP:
                more = format_bytes(host_totals(plan, {tier: other.total_bytes(tier) - plan.total_bytes(tier)})[tier])
                on_each = " on each GPU" if tier == "vram" and plan.num_gpus > 1 else ""
                yield f"{more} more {TIERS[tier]}{on_each} would {_changed(plan, other)}: {_faster(other, speedup)}"
                break
            if tier == "ram" and not is_short_of_ram(other):
                break  # larger budgets lead to the same plan
    if plan.basis.config.precision == "exact" and "compact" in _leaner_precisions(plan):
        other = replanned(plan, precision="compact")
        assert other.seconds is not None
        if other.fits and step / other.seconds.step >= _MIN_SPEEDUP:
            tier = "disk" if plan.total_bytes("disk") else "ram"
            less = max(0, plan.total_bytes(tier) - other.total_bytes(tier))
            saved = format_bytes(host_totals(plan, {tier: less})[tier])
            saves = in_words_here("precision='compact'")
            if less > _MIN_SAVED * plan.total_bytes(tier):
                saves += f" would save {saved} of {TIERS[tier]}"
            yield f"{saves}: {_faster(other, step / other.seconds.step)}"
    if plan.basis.config.compile_blocks:
        other = replanned(plan, compile_blocks=False)  # of the compiled model's trace, which lacks our kernels
        assert other.seconds is not None
        if other.is_graphed and step / other.seconds.step >= _MIN_SPEEDUP:
            faster = _faster(other, step / other.seconds.step)
            yield f"without compile_blocks, blocks would run as CUDA graphs: at least {faster}"
    yield from _help_of_gpus(plan)


def _help_of_gpus(plan: Prediction) -> Iterator[str]:
    if plan.seconds is None or plan.tokens_per_second is None:
        return
    other = _with_another_gpu(plan)
    speedup = (other.tokens_per_second or 0.0) / plan.tokens_per_second if other else 0.0
    if other is not None and other.fits and speedup >= _MIN_SPEEDUP:
        faster = _faster(other, speedup)
        memory_and_seconds = ", ".join(takes_of(other)[:-1])
        yield f"{other.num_gpus} such GPUs would train {faster} ({memory_and_seconds})"
    if not plan.communicated:
        return
    number = _MORE_MICRO_BATCHES * plan.accumulation
    rarely = replanned(plan, gradient_accumulation=number)
    speedup = (rarely.tokens_per_second or 0.0) / plan.tokens_per_second
    if rarely.fits and speedup >= _MIN_SPEEDUP:
        now, then = (format_bytes(sum(each.communicated.values()) // each.accumulation) for each in (plan, rarely))
        faster = _faster(rarely, speedup)
        yield f"gradient_accumulation={number} would communicate {then} a micro-batch instead of {now}: {faster}"
    if plan.accumulation > 1:
        yield _in_the_other_order(plan)


def _in_the_other_order(plan: Prediction) -> str:
    other = with_other_exchange(plan)
    order = other.basis.config.exchange
    assert other.tokens_per_second is not None
    assert plan.tokens_per_second is not None
    if not other.fits:
        return f"exchange={order!r} {misfit_message(other)}"
    now, then = (format_bytes(sum(each.communicated.values())) for each in (plan, other))
    ratio = other.tokens_per_second / plan.tokens_per_second
    faster = f"{', '.join(speed(other))}, {rounded(ratio)}x as fast"
    return f"exchange={order!r} would communicate {then} a step instead of {now}: {faster} (it rounds sums otherwise)"


def _with_another_gpu(plan: P) -> P | None:
    """The plan with one more GPU or, beyond `GPUS_PER_HOST`, one more host; None if the GPU is unknown."""
    if plan.on_cpu or plan.basis.hardware is None or plan.basis.work is None:
        return None
    if any(layer.matrices for layer in plan.layers):
        return None
    more = 1 if plan.num_gpus < GPUS_PER_HOST else GPUS_PER_HOST
    return replanned(plan, num_gpus=plan.num_gpus + more)


def _faster(other: Prediction, speedup: float) -> str:
    return ", ".join([*speed(other), f"{rounded(speedup)}x faster"])


def _changed(plan: Prediction, other: Prediction) -> str:
    def counts(of: Prediction) -> dict[str, int]:
        wheres = of.placements
        return {
            "keep the weights of {} in VRAM": sum(where.weights == "vram" for where in wheres),
            "keep the optimizer states of {} in VRAM": sum(where.states == "vram" for where in wheres),
            "keep the optimizer states of {} in RAM": -sum(where.states == "disk" for where in wheres),
            "keep the activations of {}": sum(where.activations == "keep" for where in wheres),
            "keep the matmuls of {}": sum(where.activations in ("keep", "cheap") for where in wheres),
            "let the GPU step {} through VRAM": sum(where.states == "ram" and where.step == "gpu" for where in wheres),
        }

    before = counts(plan)
    more = {text: number - before[text] for text, number in counts(other).items()}
    words = [text.format(f"{n} more layer{'s' * (n > 1)}") for text, n in more.items() if n > 0]
    return " and ".join(words[:2]) or "change the placement"
