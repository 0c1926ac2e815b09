"""`make_plan` and the `Plan` it gives: what lives where, whether that fits, how long a step takes,
and all of it in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

from offloadkit.config import OffloadConfig, Placement
from offloadkit.hardware import Hardware
from offloadkit.planner.layout import DEFAULT_PLACEMENT, LayerShape, activations, choices, possible, run_bytes
from offloadkit.planner.search import Search
from offloadkit.planner.seconds import FEW_CORES, Seconds, StepModel, cpu_step_rate
from offloadkit.planner.work import MicroBatch, Rows
from offloadkit.units import format_bytes, format_seconds, parse_bytes

_TIERS = {"vram": "VRAM", "ram": "RAM", "disk": "disk"}
_WHERE = {"vram": "in VRAM", "ram": "in RAM", "disk": "on disk"}
_STEPPERS = {
    ("vram", "gpu"): "the GPU",
    ("ram", "gpu"): "the GPU through VRAM",
    ("ram", "cpu"): "the CPU",
    ("disk", "cpu"): "the CPU",
}


def as_text(plan: Plan) -> str:
    """A table of at most 80 columns, what is placed where above it and the prediction below."""
    rows = _rows(plan)
    lines = [*heading(plan)]
    lines += [f"  {cells[0]:22}" + "".join(f"{cell:>12}" for cell in cells[1:]) for cells in rows]
    return "\n".join([*lines, *(f"  {line}" for line in footing(plan))])


def in_short(plan: Plan) -> str:
    """One line: what is trained, on how much a step, and what that takes."""
    needs = of_tiers({tier: plan.total_bytes(tier) for tier in ("vram", "ram")})
    parts = [f"{plan.num_parameters:,} parameters in {len(plan.layers)} flat layers", *_tokens(plan), needs]
    if plan.seconds is not None:
        parts.append(f"{format_seconds(plan.seconds.step)} a step")
    return ", ".join(parts if plan.fits else [*parts, "does not fit"])


def of_tiers(num_bytes: Mapping[str, int]) -> str:
    """ "1.23 GiB of VRAM and 4.56 GiB of RAM"."""
    return " and ".join(f"{format_bytes(number)} of {_TIERS[tier]}" for tier, number in num_bytes.items())


def does_not_fit(lacking: Mapping[str, tuple[int, int]], *, at_least: bool = False) -> str:
    """ "does not fit: needs 38 GiB of VRAM, has 11 GiB", of {tier: (needs, has)} in bytes."""
    least = "at least " if at_least else ""
    wants = [
        f"needs {least}{of_tiers({tier: needs})}, has {format_bytes(has)}" for tier, (needs, has) in lacking.items()
    ]
    return f"does not fit: {', and '.join(wants)}"


def heading(plan: Plan) -> list[str]:
    """What is trained, on how much a step, and where the parts live."""
    frozen = plan.num_parameters - plan.num_trainable_parameters
    kinds = Counter(layer.dtype for layer in plan.layers)
    first = f"{plan.num_parameters:,} parameters" + (f" ({frozen:,} frozen)" if frozen else "")
    first += f" in {len(plan.layers)} flat layers, working weights {'+'.join(kinds)},"
    return [first, *(f"  {line}" for line in _tokens(plan)), *_placed(plan)]


def _tokens(plan: Plan) -> list[str]:
    """ "8 x (512+128) tokens a step", if known; of several micro-batches how many comes first."""
    if plan.rows is None:
        return []
    several = f"{plan.accumulation} x " if plan.accumulation > 1 else ""
    return [f"{several}{plan.rows} tokens a step"]


def _placed(plan: Plan) -> list[str]:
    """Where states, weights and activations are: one line each, and none for what is as on a large GPU."""
    number = len(plan.layers)
    blocks = sum(layer.in_block for layer in plan.layers)

    def share(count: int, of: int) -> str:
        return "" if count == of else f" of {count} of {of} layers"

    states: Counter[tuple[str, str]] = Counter((where.states, where.step) for where in plan.placements)
    lines = [
        f"  optimizer states{share(states[place], number)} {_WHERE[place[0]]}, stepped by {stepper}"
        for place, stepper in _STEPPERS.items()
        if states[place]
    ]
    kept = sum(where.gradients == "vram" and where.states != "vram" for where in plan.placements)
    if kept:
        lines.append(f"  gradients{share(kept, number)} kept in VRAM for the step")
    streamed = sum(where.weights == "ram" for where in plan.placements)
    how = Counter(
        where.activations for layer, where in zip(plan.layers, plan.placements, strict=True) if layer.in_block
    )
    if streamed:
        lines.append(f"  weights{share(streamed, blocks)} in RAM, copied to VRAM for each pass")
    if how["checkpoint"]:
        lines.append(f"  activations{share(how['checkpoint'], blocks)} recomputed in backward")
    if how["offload"]:
        lines.append(f"  activations{share(how['offload'], blocks)} recomputed from inputs kept in RAM")
    return lines


def _rows(plan: Plan) -> list[list[str]]:
    tiers = [tier for tier in _TIERS if plan.total_bytes(tier) or tier != "disk"]
    rows = [["", *(_TIERS[tier] for tier in tiers)]]
    for category in dict.fromkeys(category for tier in tiers for category in plan.tiers[tier]):
        cells = [plan.tiers[tier].get(category, 0) for tier in tiers]
        if any(cells):
            rows.append([category, *(format_bytes(cell) if cell else "-" for cell in cells)])
    rows.append(["in all", *(format_bytes(plan.total_bytes(tier)) for tier in tiers)])
    if plan.budgets:
        rows.append(["available", *(format_bytes(plan.budgets[t]) if t in plan.budgets else "-" for t in tiers)])
    if not plan.fits:
        short = plan.lacking()
        rows.append(["missing", *(format_bytes(short[t]) if t in short else "-" for t in tiers)])
    return rows


def footing(plan: Plan) -> list[str]:
    """What the figures leave out, and the prediction of time."""
    lines = []
    if plan.num_tokens is None:
        lines.append("(activations and the framework's own memory come on top)")
    if plan.on_cpu:
        lines.append("(without a GPU, VRAM is RAM too)")
    if plan.seconds is not None and plan.tokens_per_second is not None and plan.slowdown is not None:
        slowdown = "" if plan.on_cpu else f", {plan.slowdown:.3g}x a GPU that holds everything"
        lines.append(f"{format_seconds(plan.seconds.step)} a step, {plan.tokens_per_second:,.0f} tokens/s{slowdown}")
        busy = [f"{name} {format_seconds(number)}" for name, number in plan.seconds.busy.items() if number]
        lines += _wrapped("busy: " + ", ".join(busy))
    if plan.basis is not None and plan.basis.assumed:
        lines += _wrapped(f"(not measured: seconds are those of an assumed {_rates(plan.basis.hardware)})")
    return lines


def _rates(machine: Hardware | None) -> str:
    """The machine by its rates: it has no name."""
    if machine is None:
        return "machine"
    return (
        f"card with {machine.bf16_flops_per_second / 1e12:.3g} TFLOP/s in bf16 and VRAM of "
        f"{machine.vram_bytes_per_second / 1e9:.3g} GB/s, {machine.h2d_bytes_per_second / 1e9:.3g} GB/s from RAM of "
        f"{machine.dram_bytes_per_second / 1e9:.3g} GB/s, and {machine.num_cores} cores"
    )


def _wrapped(text: str, width: int = 76) -> list[str]:
    """`text` cut at spaces into lines of at most `width`."""
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def as_html(plan: Plan) -> str:
    """The same as a plain table for notebooks, in the colours of the page."""
    header, *rows = _rows(plan)
    right = ' style="text-align:right"'
    cells = ["".join(f"<th{right}>{escape(cell)}</th>" for cell in header)]
    cells += [
        f"<td>{escape(name)}</td>" + "".join(f"<td{right}>{escape(c)}</td>" for c in rest) for name, *rest in rows
    ]
    table = "".join(f"<tr>{row}</tr>" for row in cells)
    above = "<br>".join(map(escape, heading(plan)))
    below = "<br>".join(map(escape, [*footing(plan), *plan.explain().splitlines()]))
    return f"<div><p>{above}</p><table>{table}</table><p>{below}</p></div>"


def as_dict(plan: Plan) -> dict[str, Any]:
    """Everything that was predicted, in plain types."""
    seconds = plan.seconds
    return {
        "fits": plan.fits,
        "num_parameters": plan.num_parameters,
        "num_trainable_parameters": plan.num_trainable_parameters,
        "batch_size": plan.rows.batch_size if plan.rows else None,
        "input_length": plan.rows.input_length if plan.rows else None,
        "target_length": plan.rows.target_length if plan.rows else None,
        "gradient_accumulation": plan.accumulation,
        "bytes": plan.tiers,
        "total_bytes": {tier: plan.total_bytes(tier) for tier in plan.tiers},
        "available_bytes": plan.budgets,
        "missing_bytes": plan.lacking(),
        "checkpoint_bytes": plan.checkpoint_bytes,
        "checkpoint_peak_bytes": plan.checkpoint_peak_bytes,
        "num_tokens": plan.num_tokens,
        "step_seconds": seconds.step if seconds else None,
        "busy_seconds": dict(seconds.busy) if seconds else None,
        "exposed_seconds": seconds.exposed if seconds else None,
        "tokens_per_second": plan.tokens_per_second,
        "slowdown": plan.slowdown,
        "rates_are_assumed": plan.basis.assumed if plan.basis else False,
        "layers": [
            {"name": layer.name, "num_parameters": layer.num_parameters, **vars(where)}
            for layer, where in zip(plan.layers, plan.placements, strict=True)
        ],
        "explanation": plan.explain().splitlines(),
    }


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

    assert plan.basis is not None
    basis = plan.basis
    config = replace(basis.config, **changes)
    return make_plan(
        [replace(layer, precision=config.precision, optimizer=config.optimizer) for layer in plan.layers],
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


TIERS = {"vram": "VRAM", "ram": "RAM", "disk": "disk"}


@dataclass(frozen=True)
class Basis:
    """What a plan was made from: enough to make another one."""

    config: OffloadConfig
    frozen: int
    frozen_bytes: int
    work: MicroBatch | None
    hardware: Hardware | None
    assumed: bool
    """Whether the machine was not measured: its rates are assumptions."""
    smaller: tuple[tuple[str, MicroBatch], ...] = ()
    """Smaller micro-batches that the user could choose, and how: ("batch_size=2", its work)."""
    with_disk: Hardware | None = None
    """The machine with a folder that states could go to, where the user has named none; its rates are assumed."""


@dataclass(frozen=True, repr=False)
class Plan:
    """Sizes of a run and seconds of its steps, computed from shapes alone.

    Attributes:
        tiers: bytes by tier ("vram", "ram", "disk") and category. Without a micro-batch to plan for, activations and
            the framework's own memory come on top.
        budgets: bytes that may be used, by tier; {} where nothing is known of the machine.
        seconds: the step's prediction, and `large_gpu_seconds` a step's on a GPU that holds everything; None without
            a micro-batch or a machine to plan for.
        num_tokens: of one step, padding included.
        checkpoint_bytes: of one checkpoint on disk; `checkpoint_peak_bytes` while a second one is written before the
            first goes, and the trained model beside them.
        basis: what it was made from.
    """

    layers: tuple[LayerShape, ...]
    placements: tuple[Placement, ...]
    accumulation: int
    num_parameters: int
    num_trainable_parameters: int
    tiers: dict[str, dict[str, int]]
    checkpoint_bytes: int
    checkpoint_peak_bytes: int
    budgets: dict[str, int] = field(default_factory=dict, compare=False)
    seconds: Seconds | None = field(default=None, compare=False)
    large_gpu_seconds: float | None = field(default=None, compare=False)
    num_tokens: int | None = None
    basis: Basis | None = field(default=None, compare=False)

    def total_bytes(self, tier: str) -> int:
        """Planned bytes of a tier."""
        return sum(self.tiers[tier].values())

    def needs(self) -> dict[str, int]:
        """Planned bytes by tier. Without a GPU, what would be in VRAM is in RAM, and counts there too."""
        needs = {tier: self.total_bytes(tier) for tier in TIERS}
        if self.on_cpu:
            needs["ram"] += needs["vram"]
        return needs

    def lacking(self) -> dict[str, int]:
        """Bytes that are missing, by tier; {} where the plan fits. Without a GPU VRAM has a wished budget only."""
        short = {tier: need - self.budgets[tier] for tier, need in self.needs().items() if tier in self.budgets}
        return {tier: number for tier, number in short.items() if number > 0}

    @property
    def fits(self) -> bool:
        """Whether it fits the budgets, as far as there are any."""
        return not self.lacking()

    @property
    def on_cpu(self) -> bool:
        """Whether it was made for a machine without a GPU."""
        hardware = self.basis.hardware if self.basis else None
        return hardware is not None and hardware.device == "cpu"

    @property
    def rows(self) -> Rows | None:
        """Batch size and lengths of a micro-batch; None without one to plan for."""
        work = self.basis.work if self.basis else None
        return work.rows if work else None

    @property
    def tokens_per_second(self) -> float | None:
        """Positions a second, padding included."""
        return self.num_tokens / self.seconds.step if self.num_tokens and self.seconds else None

    @property
    def slowdown(self) -> float | None:
        """Seconds of a step over those on a GPU that holds everything and is otherwise the same."""
        return self.seconds.step / self.large_gpu_seconds if self.seconds and self.large_gpu_seconds else None

    def explain(self) -> str:
        """In sentences: whether it fits, what limits the step, and what would help, with numbers."""

        return explained(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything that was predicted, for JSON."""

        return as_dict(self)

    def __repr__(self) -> str:

        return f"Plan({in_short(self)})"

    def __str__(self) -> str:

        return as_text(self)

    def _repr_html_(self) -> str:

        return as_html(self)


def make_plan(
    layers: Sequence[LayerShape],
    config: OffloadConfig,
    *,
    frozen: int = 0,
    frozen_bytes: int = 0,
    work: MicroBatch | None = None,
    hardware: Hardware | None = None,
    assumed: bool = False,
) -> Plan:
    """The plan of a model cut into `layers`.

    With `work` and `hardware` the placements are those with the fastest predicted step within the budgets, unless the
    config names one; the budgets are the config's `vram` and `ram`, else what the machine has free. Without a GPU, and
    without knowing work and machine, every layer has its states in RAM.

    Args:
        frozen, frozen_bytes: number and size of the parameters outside the flat layers, and buffers' bytes.
        assumed: whether `hardware` is an assumption.
    """
    layers = tuple(replace(layer, precision=config.precision, optimizer=config.optimizer) for layer in layers)
    basis = Basis(config, frozen, frozen_bytes, work, hardware, assumed)
    budgets = _budgets(config, hardware)
    placements = _placements(layers, basis, budgets)
    held = activations(work, choices(layers, placements, work)) if work else None
    tiers = run_bytes(
        layers,
        placements,
        config.gradient_accumulation,
        frozen_bytes=frozen_bytes,
        held=held,
        context_bytes=hardware.vram_context_bytes if hardware else 0,
        device_type="cpu" if hardware is not None and hardware.device == "cpu" else "cuda",
    )
    model = None
    if work and hardware:
        model = StepModel(layers, work, hardware, config.gradient_accumulation, compiled=config.compile_blocks)
    weights = frozen_bytes + sum(layer.weight_bytes() for layer in layers)
    checkpoint = weights + sum(sum(layer.state_bytes().values()) for layer in layers)
    num_trainable = sum(layer.num_parameters for layer in layers)
    return Plan(
        layers,
        placements,
        config.gradient_accumulation,
        num_trainable + frozen,
        num_trainable,
        tiers,
        checkpoint,
        2 * checkpoint + weights,
        budgets,
        model.seconds(placements) if model else None,
        model.on_large_gpu() if model else None,
        config.gradient_accumulation * work.num_tokens if work else None,
        basis,
    )


def _budgets(config: OffloadConfig, hardware: Hardware | None) -> dict[str, int]:
    """Bytes that may be used: what the config says, else what is free; this process's CUDA context counts as used."""
    found: dict[str, int] = {}
    if hardware is not None:
        found = {"ram": hardware.ram_available_bytes, "disk": hardware.disk_free_bytes}
        if hardware.device != "cpu":
            found["vram"] = hardware.vram_free_bytes + hardware.vram_context_bytes
    for tier, wish in (("vram", config.vram), ("ram", config.ram)):
        if wish is not None:
            found[tier] = parse_bytes(wish)
    return found


def _placements(layers: Sequence[LayerShape], basis: Basis, budgets: dict[str, int]) -> tuple[Placement, ...]:
    config, work, hardware = basis.config, basis.work, basis.hardware
    free = config.placement is None and work is not None and hardware is not None and hardware.device != "cpu"
    if free and work is not None and hardware is not None:
        search = Search(
            layers,
            work,
            hardware,
            config.gradient_accumulation,
            frozen_bytes=basis.frozen_bytes,
            all_recomputed=config.activation_checkpointing,
            compiled=config.compile_blocks,
        )
        disk = budgets["disk"] if hardware.disk_read_bytes_per_second else 0
        return search.best(budgets["vram"], budgets["ram"], disk)
    placement = config.placement or DEFAULT_PLACEMENT
    if config.activation_checkpointing and placement.activations == "keep":
        placement = replace(placement, activations="checkpoint")
    return tuple(possible(placement, layer) for layer in layers)
