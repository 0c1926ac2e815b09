"""`Plan` and `make_plan`: placements, whether they fit, and the seconds of a step; then the plan in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from html import escape
from itertools import groupby, islice
from textwrap import wrap
from typing import Any

from offloadkit.config import OffloadConfig, Placement, Precision
from offloadkit.errors import DoesNotFitError
from offloadkit.hardware import Hardware
from offloadkit.optim.table import MOMENTS, optimizer_named
from offloadkit.planner.fitted import CROWDED, FEW_CTAS, LOADED_LATER_BYTES
from offloadkit.planner.layout import (
    LayerShape,
    activations,
    choices,
    communicated_bytes,
    outside_bytes,
    possible,
    run_bytes,
)
from offloadkit.planner.phases import Phase, phases_of
from offloadkit.planner.ranks import GPUS_PER_HOST, for_ranks
from offloadkit.planner.search import Search
from offloadkit.planner.seconds import FEW_CORES, Seconds, StepModel, cpu_step_rate
from offloadkit.planner.work import MicroBatch, Rows
from offloadkit.units import format_bytes, format_seconds, parse_bytes, rounded, rounded_up

TIERS = {"vram": "VRAM", "ram": "RAM", "disk": "disk"}
"""The kinds of memory, by the name in messages."""


@dataclass(frozen=True)
class Basis:
    """The inputs of a plan, kept to make changed plans."""

    config: OffloadConfig
    frozen: int
    """Number of parameters outside the flat layers."""
    frozen_bytes: int
    """Bytes of the parameters outside the flat layers, and of buffers."""
    work: MicroBatch | None
    hardware: Hardware | None
    assumed: bool
    """Whether the machine's rates are assumed, not measured."""
    chosen: str = ""
    """The option that keeps this micro-batch if it could depend on the VRAM budget: "batch_size=4"."""
    smaller: tuple[tuple[str, MicroBatch], ...] = ()
    """Smaller micro-batches that the user could choose: (option, its work), such as ("batch_size=2", ...)."""
    with_disk: Hardware | None = None
    """The machine with a folder for states, if the user has named none. The disk's rates are assumed."""
    held_bytes: int = 0
    """RAM of a model in memory, until the engine has taken over all of it."""


@dataclass(frozen=True, repr=False)
class Plan:
    """The memory of a run and the seconds of its steps, computed from shapes alone.

    With several GPUs all bytes are for one rank, with its equal share of the host's RAM.

    Attributes:
        tiers: a training step's bytes by tier ("vram", "ram", "disk") and category. Without a micro-batch to plan for,
            activations and the framework's own memory are not included.
        budgets: bytes that may be used, by tier; {} for an unknown machine. RAM is this rank's share.
        seconds: the predicted step. None without a micro-batch or a machine to plan for.
        large_gpu_seconds: seconds of a step on the same GPU with enough VRAM for everything, or None.
        num_tokens: positions of one step on all GPUs, padding included.
        checkpoint_bytes: size of one checkpoint on disk.
        checkpoint_peak_bytes: peak on disk: two checkpoints, since the old one is deleted after the new one is written,
            and the trained model.
        basis: the inputs of the plan.
    """

    layers: tuple[LayerShape, ...]
    placements: tuple[Placement, ...]
    accumulation: int
    num_parameters: int
    num_trainable_parameters: int
    tiers: dict[str, dict[str, int]]
    checkpoint_bytes: int
    checkpoint_peak_bytes: int
    budgets: dict[str, int] = field(compare=False)
    seconds: Seconds | None = field(compare=False)
    large_gpu_seconds: float | None = field(compare=False)
    num_tokens: int | None
    basis: Basis = field(compare=False)

    def total_bytes(self, tier: str) -> int:
        """Planned bytes of a tier in training steps."""
        return sum(self.tiers[tier].values())

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Peak memory of each phase of a run, from reading the model to closing. Omits the same bytes as `tiers`."""
        work, held = self.basis.work, self.basis.held_bytes
        args = self.layers, self.placements, self.accumulation, self.tiers, work
        return tuple(
            replace(each, ram=each.ram + held) if each.name == "reading" else each
            for each in phases_of(*args, on_cpu=self.on_cpu, reads=not held)
        )

    def needs(self) -> dict[str, int]:
        """Planned bytes by tier, of the phase that takes the most. Without a GPU, VRAM counts as RAM too.

        Generation is left out, because most runs do not generate. So is a model in memory while it is read, because it
        is freed layer by layer, or lies in the page cache.
        """
        phases, beside = [each for each in self.phases if each.name != "generation"], {"reading": self.basis.held_bytes}
        vram = max(phase.vram for phase in phases)
        ram = max(phase.ram - beside.get(phase.name, 0) for phase in phases)
        return {"vram": vram, "ram": ram, "disk": self.total_bytes("disk")}

    def lacking(self) -> dict[str, int]:
        """Missing bytes by tier; {} if the plan fits. Without a GPU, VRAM has a budget only if the config gives one."""
        short = {tier: need - self.budgets[tier] for tier, need in self.needs().items() if tier in self.budgets}
        return {tier: number for tier, number in short.items() if number > 0}

    @property
    def fits(self) -> bool:
        """Whether the plan fits the known budgets."""
        return not self.lacking()

    @property
    def on_cpu(self) -> bool:
        """Whether the plan is for a machine without a GPU."""
        return self.basis.hardware is not None and self.basis.hardware.device == "cpu"

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that train together. A run on the CPU counts its ranks."""
        return self.layers[0].num_ranks

    @property
    def num_on_host(self) -> int:
        """Number of ranks that share a host's RAM."""
        return self.basis.hardware.num_ranks if self.basis.hardware else self.num_gpus

    @cached_property
    def communicated(self) -> dict[str, int]:
        """Bytes that a GPU receives from the other GPUs in an optimizer step, by kind: "exchange" of gradients,
        "gather" of new weights, and "norm". {} with one GPU."""
        return communicated_bytes(self.layers, self.placements, self.accumulation)

    @property
    def rows(self) -> Rows | None:
        """Batch size and lengths of a micro-batch; None without a micro-batch to plan for."""
        return self.basis.work.rows if self.basis.work else None

    @property
    def tokens_per_second(self) -> float | None:
        """Positions per second, padding included."""
        return self.num_tokens / self.seconds.step if self.num_tokens and self.seconds else None

    @property
    def slowdown(self) -> float | None:
        """Seconds of a step relative to a GPU that holds everything."""
        return self.seconds.step / self.large_gpu_seconds if self.seconds and self.large_gpu_seconds else None

    @property
    def verdict(self) -> str:
        """One line: whether the plan fits, on which assumed card or on the CPU; needed and available memory of the
        worst phase, seconds of a step, tokens/s."""
        if not self.fits:
            said, rest = why_not(self).replace("does not fit", "DOES NOT FIT", 1).split(": ", 1)
        else:
            said = "AT LEAST" if self.num_tokens is None else "FITS" if self.budgets else "NEEDS"
            said += f" on {self.num_gpus} GPUs" if self.num_gpus > 1 else ""
            rest = ", ".join(_takes(self))
        card = "" if self.basis.hardware is None else self.basis.hardware.assumed_card
        card = card or ("on the CPU" if self.on_cpu else "")
        return f"{said} ({card}): {rest}" if card else f"{said}: {rest}"

    def explain(self) -> str:
        """Sentences with numbers: the bottleneck of the step and remedies, or plans that would fit if this one does
        not."""
        return "\n".join([*_limit(self), *_help(self)] if self.fits else _would_fit(self))

    def details(self) -> str:
        """Lines of at most 80 columns: all placements, a table of bytes, the seconds and each phase's peak."""
        table = [f"{cells[0]:22}" + "".join(f"{cell:>12}" for cell in cells[1:]) for cells in _rows(self)]
        return "\n".join(f"  {line}" for line in [*_placed(self), *table, *_times(self), *_by_phase(self)])

    def to_dict(self) -> dict[str, Any]:
        """The whole prediction in types that JSON takes."""
        rows, seconds = self.rows, self.seconds
        return {
            "fits": self.fits,
            "num_parameters": self.num_parameters,
            "num_trainable_parameters": self.num_trainable_parameters,
            "batch_size": rows.batch_size if rows else None,
            "input_length": rows.input_length if rows else None,
            "target_length": rows.target_length if rows else None,
            "gradient_accumulation": self.accumulation,
            "bytes": self.tiers,
            "total_bytes": {tier: self.total_bytes(tier) for tier in self.tiers},
            "available_bytes": self.budgets,
            "missing_bytes": self.lacking(),
            "phases": [asdict(phase) for phase in self.phases],
            "checkpoint_bytes": self.checkpoint_bytes,
            "checkpoint_peak_bytes": self.checkpoint_peak_bytes,
            "num_tokens": self.num_tokens,
            "num_gpus": self.num_gpus,
            "communicated_bytes": self.communicated,
            "step_seconds": seconds.step if seconds else None,
            "busy_seconds": dict(seconds.busy) if seconds else None,
            "exposed_seconds": seconds.exposed if seconds else None,
            "tokens_per_second": self.tokens_per_second,
            "slowdown": self.slowdown,
            "rates_are_assumed": self.basis.assumed,
            "assumed": " ".join(_assumed(self)),
            "layers": [
                {"name": layer.name, "num_parameters": layer.num_parameters, **vars(where)}
                for layer, where in zip(self.layers, self.placements, strict=True)
            ],
            "verdict": self.verdict,
            "explanation": self.explain().splitlines(),
        }

    def __repr__(self) -> str:
        needs = of_tiers({tier: self.total_bytes(tier) for tier in ("vram", "ram")})
        parts = [f"{self.num_parameters:,} parameters in {len(self.layers)} flat layers", *_tokens(self), needs]
        if self.seconds is not None:
            parts.append(f"{format_seconds(self.seconds.step)} a step")
        return f"Plan({', '.join(parts if self.fits else [*parts, 'does not fit'])})"

    def __str__(self) -> str:
        return "\n".join([self.verdict, *(f"  {line}" for line in _about(self))])

    def _repr_html_(self) -> str:
        """HTML for notebooks, in the page's colours. The details are folded."""
        header, *rows = _rows(self)
        right = ' style="text-align:right"'
        cells = ["".join(f"<th{right}>{escape(cell)}</th>" for cell in header)]
        cells += [
            f"<td>{escape(name)}</td>" + "".join(f"<td{right}>{escape(c)}</td>" for c in rest) for name, *rest in rows
        ]
        table = "".join(f"<tr>{row}</tr>" for row in cells)
        about, placed, below = (
            "<br>".join(map(escape, lines))
            for lines in (
                [*_about(self), *self.explain().splitlines()],
                _placed(self),
                [*_times(self), *_by_phase(self)],
            )
        )
        folded = f"<summary>where everything lives</summary><p>{placed}</p><table>{table}</table><p>{below}</p>"
        return f"<div><p><b>{escape(self.verdict)}</b><br>{about}</p><details>{folded}</details></div>"


def check_fits(plan: Plan) -> None:
    """Raise an error unless the plan fits.

    Raises:
        DoesNotFitError: the plan does not fit. The message has needed and available memory, and plans that fit.
    """
    if not plan.fits:
        raise DoesNotFitError(f"the plan {why_not(plan)}\n{plan.explain()}\n({_trained(plan)})")


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
    """The plan of a model cut into `layers`. With several ranks, `layers` and `hardware` are one rank's.

    Every layer gets the config's placement as far as possible. Without one, given `work` and a GPU in `hardware`, the
    placements with the fastest predicted step within the budgets are searched; otherwise all states are in RAM. The
    budgets are the config's `vram` and `ram`, or else the free memory. `Basis` describes the other arguments.

    If the link was also measured with few NCCL thread blocks, the plan chooses between few and NCCL's own choice
    (`Hardware.most_ctas`). Few take less VRAM: if a plan fits with few only, few are chosen.
    """
    layers = tuple(
        replace(
            layer,
            kind=replace(layer.kind, optimizer=config.optimizer, precision=config.precision),
            exchanges_sums=config.exchange == "step",
        )
        for layer in layers
    )
    basis = Basis(config, frozen, frozen_bytes, work, hardware, assumed)
    budgets = _budgets(config, hardware, layers[0].num_ranks)
    if work is None or hardware is None or not hardware.few_ctas_link_bytes_per_second:
        return _plan(layers, basis, budgets, _placements(layers, basis, budgets))
    few, own = (
        _plan(layers, each, budgets, _placements(layers, each, budgets))
        for each in (replace(basis, hardware=machine) for machine in _with_ctas(hardware))
    )
    assert few.seconds is not None
    assert own.seconds is not None
    is_fast = few.seconds.step <= CROWDED * own.seconds.step
    return few if not own.fits or (few.fits and is_fast) else own


def _with_ctas(machine: Hardware) -> tuple[Hardware, Hardware]:
    """The machine with `FEW_CTAS`, and with NCCL's own choice."""
    own = replace(machine, few_ctas_link_bytes_per_second=0.0)
    return replace(own, most_ctas=FEW_CTAS, link_bytes_per_second=machine.few_ctas_link_bytes_per_second), own


def placed(plan: Plan, placements: Sequence[Placement]) -> Plan:
    """`plan` with the given placement of each layer, and the bytes and seconds that follow from it."""
    return _plan(plan.layers, plan.basis, plan.budgets, tuple(placements))


def of_rank(plan: Plan, layers: Sequence[LayerShape]) -> Plan:
    """The ranks' common `plan` with one rank's `layers`."""
    return _plan(tuple(layers), plan.basis, plan.budgets, plan.placements)


def wishes(plan: Plan, budgets: Mapping[str, float]) -> dict[str, Any]:
    """`vram` and `ram` of a config that gives each rank of `plan` this many bytes."""
    return {tier: int(size * (plan.num_on_host if tier == "ram" else 1)) for tier, size in budgets.items()}


def _plan(
    layers: tuple[LayerShape, ...], basis: Basis, budgets: dict[str, int], placements: tuple[Placement, ...]
) -> Plan:
    config, work, hardware, frozen, frozen_bytes = (
        basis.config,
        basis.work,
        basis.hardware,
        basis.frozen,
        basis.frozen_bytes,
    )
    held = activations(work, choices(layers, placements, work)) if work else None
    tiers = run_bytes(
        layers,
        placements,
        config.gradient_accumulation,
        frozen_bytes=frozen_bytes,
        held=held,
        context_bytes=outside_bytes(layers, hardware) if hardware else 0,
        device_type="cpu" if hardware and hardware.device == "cpu" else "cuda",
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
        layers[0].num_ranks * config.gradient_accumulation * work.num_tokens if work else None,
        basis,
    )


def _budgets(config: OffloadConfig, hardware: Hardware | None, num_ranks: int) -> dict[str, int]:
    """Available bytes by tier: the config's budgets, or else the free bytes. Ranks of one host share its RAM evenly.

    The CUDA context's VRAM is part of the budget, since the plan counts it as needed.
    """
    found: dict[str, int] = {}
    if hardware is not None:
        found = {"ram": hardware.ram_available_bytes, "disk": hardware.disk_free_bytes}
        if hardware.device != "cpu":
            found["vram"] = hardware.vram_free_bytes + hardware.vram_context_bytes
    for tier, wish in (("vram", config.vram), ("ram", config.ram)):
        if wish is not None:
            found[tier] = parse_bytes(wish)
    on_host = hardware.num_ranks if hardware is not None else num_ranks
    return found | {tier: found[tier] // on_host for tier in ("ram", "disk") if tier in found}


def _placements(layers: Sequence[LayerShape], basis: Basis, budgets: dict[str, int]) -> tuple[Placement, ...]:
    config, work, hardware = basis.config, basis.work, basis.hardware
    if config.placement is None and work is not None and hardware is not None and hardware.device != "cpu":
        return _search(tuple(layers), basis, work, hardware).best(*_room(config, budgets, hardware))
    placement = config.placement or Placement()
    if config.activation_checkpointing and placement.activations == "keep":
        placement = replace(placement, activations="checkpoint")
    return tuple(possible(placement, layer) for layer in layers)


def _search(layers: tuple[LayerShape, ...], basis: Basis, work: MicroBatch, hardware: Hardware) -> Search:
    config = basis.config
    how = config.activation_checkpointing, config.compile_blocks
    return _kept_search(layers, work, hardware, config.gradient_accumulation, basis.frozen_bytes, *how)


@lru_cache(maxsize=2)
def _kept_search(
    layers: tuple[LayerShape, ...],
    work: MicroBatch,
    hardware: Hardware,
    accumulation: int,
    frozen_bytes: int,
    all_recomputed: bool,
    compiled: bool,
) -> Search:
    options: dict[str, Any] = {"all_recomputed": all_recomputed, "compiled": compiled}
    return Search(layers, work, hardware, accumulation, frozen_bytes=frozen_bytes, **options)


def _room(config: OffloadConfig, budgets: Mapping[str, int], hardware: Hardware) -> tuple[int, int, int]:
    """The search's bytes of VRAM, RAM and disk. With a `vram` budget, some VRAM is held back at first."""
    held_back = LOADED_LATER_BYTES if config.vram is not None and hardware.vram_context_bytes > 0 else 0
    disk = budgets["disk"] if hardware.disk_read_bytes_per_second else 0
    return budgets["vram"] - held_back, budgets["ram"], disk


# ---- a plan in words -----------------------------------------------------------------------------

_KEPT = "\N{NO-BREAK SPACE}"
_TO_GPU, _TO_RAM = "RAM -> GPU", "GPU -> RAM"
_WHERE = {"vram": "in VRAM", "ram": "in RAM", "disk": "on disk"}
_STEPPERS = {
    ("vram", "gpu"): "the GPU",
    ("ram", "gpu"): "the GPU through VRAM",
    ("ram", "cpu"): "the CPU",
    ("disk", "cpu"): "the CPU",
}


def of_tiers(num_bytes: Mapping[str, int]) -> str:
    """ "1.23 GiB of VRAM and 4.56 GiB of RAM"."""
    return " and ".join(f"{format_bytes(number)} of {TIERS[tier]}" for tier, number in num_bytes.items())


def does_not_fit(lacking: Mapping[str, tuple[int, int]], *, at_least: bool = False) -> str:
    """ "does not fit: needs 38 GiB of VRAM, has 11 GiB", of {tier: (needs, has)} in bytes."""
    least = "at least " if at_least else ""
    wants = (f"{least}{of_tiers({tier: needs})}, has {format_bytes(has)}" for tier, (needs, has) in lacking.items())
    return f"does not fit: needs {', and needs '.join(wants)}"


def why_not(plan: Plan) -> str:
    """ "does not fit: needs 38 GiB of VRAM, has 11 GiB". The need is rounded up."""
    needs = {tier: rounded_up(size) for tier, size in _of_all(plan, plan.needs()).items()}
    has = _of_all(plan, plan.budgets)
    why = does_not_fit({tier: (needs[tier], has[tier]) for tier in plan.lacking()})
    return why if plan.num_gpus == 1 else why.replace("fit", f"fit on {plan.num_gpus} GPUs", 1)


def _of_all(plan: Plan, num_bytes: Mapping[str, int]) -> dict[str, int]:
    """A rank's bytes by tier, as shown to users: VRAM for each GPU, RAM and disk for all ranks of a host."""
    return {tier: size * (1 if tier == "vram" else plan.num_on_host) for tier, size in num_bytes.items()}


def _tiers_to_say(plan: Plan) -> dict[str, int]:
    """Planned bytes by tier, without VRAM if it is RAM and has no budget, and without an unused disk."""
    said = {tier: need for tier, need in plan.needs().items() if tier == "ram" or need}
    return {tier: need for tier, need in said.items() if tier != "vram" or not plan.on_cpu or "vram" in plan.budgets}


def _of_budget(plan: Plan, tier: str, need: int) -> str:
    """ "7.9 of 8 GiB VRAM": both rounded alike, so that a need that fits never looks larger than its budget."""
    need = _of_all(plan, {tier: need})[tier]
    budget = _of_all(plan, plan.budgets).get(tier)
    whose = "" if plan.num_gpus == 1 else " each" if tier == "vram" else " in all"
    if whose == " in all" and plan.num_on_host < plan.num_gpus:
        whose = " a host"
    unit, size = ("GiB", 1 << 30) if max(need, budget or 0) >= 1 << 30 else ("MiB", 1 << 20)
    of = "" if budget is None else f" of {rounded(budget / size, 2)}"
    return f"{rounded(need / size, 2)}{of} {unit} {TIERS[tier]}{whose}"


def _speed(plan: Plan) -> list[str]:
    """ "3,359 tokens/s", if known."""
    rate = plan.tokens_per_second
    return [] if rate is None else [f"{rate:,.0f} tokens/s" if rate >= 99.5 else f"{rounded(rate, 2)} tokens/s"]


def _about(plan: Plan) -> list[str]:
    lines = [*(line for sentence in _assumed(plan) for line in _wrapped(sentence)), _trained(plan)]
    if plan.num_tokens is None:
        lines.append("(activations and the framework's own memory come on top)")
    if plan.on_cpu:
        lines.append('(VRAM is RAM there. For another machine: offloadkit plan ... --gpu "RTX 4090")')
    return lines


def _assumed(plan: Plan) -> list[str]:
    machine = plan.basis.hardware
    return [] if machine is None else [each for each in (machine.assumed, machine.link_assumed) if each]


def _trained(plan: Plan) -> str:
    frozen = plan.num_parameters - plan.num_trainable_parameters
    first = f"{plan.num_parameters:,} parameters" + (f" ({frozen:,} frozen)" if frozen else "")
    config, kinds = plan.basis.config, dict.fromkeys(layer.dtype for layer in plan.layers)
    moments = "" if config.precision == "exact" else f", {_optimizer(plan)} moments {config.precision}"
    return ", ".join([f"{first} in {'+'.join(kinds)}{moments}", *_tokens(plan)])


def _optimizer(plan: Plan) -> str:
    name = plan.basis.config.optimizer
    return "Adam" if name == "adamw" else name.capitalize()


def _tokens(plan: Plan) -> list[str]:
    """ "8 x (512+128) tokens a step", if known; with accumulation "4 x 8 x (512+128) tokens a step", with several GPUs
    "2 GPUs x 4 x 8 x (512+128) tokens a step"."""
    if plan.rows is None:
        return []
    several = f"{plan.num_gpus} GPUs x " if plan.num_gpus > 1 else ""
    several += f"{plan.accumulation} x " if plan.accumulation > 1 else ""
    return [f"{several}{plan.rows} tokens a step"]


def _placed(plan: Plan) -> list[str]:
    """Lines on placements that differ from a large GPU."""
    number = len(plan.layers)
    blocks = sum(layer.in_block for layer in plan.layers)

    def share(count: int, of: int) -> str:
        return "" if count == of else f" of {count} of {of} layers"

    states: Counter[tuple[str, str]] = Counter((where.states, where.step) for where in plan.placements)
    lines = [
        f"optimizer states{share(states[place], number)} {_WHERE[place[0]]}, stepped by {stepper}"
        for place, stepper in _STEPPERS.items()
        if states[place]
    ]
    kept = sum(where.gradients == "vram" and where.states != "vram" for where in plan.placements)
    if kept:
        lines.append(f"gradients{share(kept, number)} kept in VRAM for the step")
    streamed = sum(where.weights == "ram" for where in plan.placements)
    placed = zip(plan.layers, plan.placements, strict=True)
    how = Counter(where.activations for layer, where in placed if layer.in_block)
    if streamed:
        lines.append(f"weights{share(streamed, blocks)} in RAM, copied {_TO_GPU} for each pass")
    if how["checkpoint"]:
        lines.append(f"activations{share(how['checkpoint'], blocks)} recomputed in backward")
    if how["offload"]:
        lines.append(f"activations{share(how['offload'], blocks)} recomputed from inputs kept in RAM")
    return lines


def _rows(plan: Plan) -> list[list[str]]:
    tiers = [tier for tier in TIERS if plan.total_bytes(tier) or tier != "disk"]
    rows = [["" if plan.num_gpus == 1 else "of each GPU", *(TIERS[tier] for tier in tiers)]]
    for category in dict.fromkeys(category for tier in tiers for category in plan.tiers[tier]):
        cells = [plan.tiers[tier].get(category, 0) for tier in tiers]
        if any(cells):
            name = f"{_optimizer(plan)} moments" if category == MOMENTS else category
            rows.append([name, *(format_bytes(cell) if cell else "-" for cell in cells)])
    rows.append(["in all", *(format_bytes(plan.total_bytes(tier)) for tier in tiers)])
    for name, of in (("available", plan.budgets), ("missing", plan.lacking())):
        if of:
            rows.append([name, *(format_bytes(of[tier]) if tier in of else "-" for tier in tiers)])
    return rows


def _times(plan: Plan) -> list[str]:
    lines = []
    if plan.seconds is not None and plan.slowdown is not None:
        slowdown = "" if plan.on_cpu else f", {plan.slowdown:.3g}x a GPU that holds everything"
        lines.append(", ".join([f"{format_seconds(plan.seconds.step)} a step", *_speed(plan)]) + slowdown)
        busy = {_busy(plan, name): number for name, number in plan.seconds.busy.items() if number}
        each = (f"{name} {format_seconds(number)}".replace(" ", _KEPT) for name, number in busy.items())
        lines += [line.replace(_KEPT, " ") for line in _wrapped("busy: " + ", ".join(each))]
    if plan.communicated:
        parts = (f"{name} {format_bytes(size)}".replace(" ", _KEPT) for name, size in plan.communicated.items())
        told = "each GPU receives from the others a step: " + ", ".join(parts)
        lines += [line.replace(_KEPT, " ") for line in _wrapped(told)]
    if plan.basis.assumed:
        lines += _wrapped(f"(not measured: seconds are those of an assumed {_rates(plan.basis.hardware)})")
    return lines


def _busy(plan: Plan, name: str) -> str:
    steps = {"GPU step": f"{_optimizer(plan)} on the GPU", "CPU step": f"{_optimizer(plan)} on the CPU"}
    others = {"H2D": _TO_GPU, "D2H": _TO_RAM, "launches": "starting operations", "link": "GPU <-> GPU"}
    return (steps | others).get(name, name)


def _rates(machine: Hardware | None) -> str:
    if machine is None:
        return "machine"
    half = "bf16" if machine.supports_bf16 else "fp16"
    flops = getattr(machine, f"{half}_flops_per_second")
    return (
        f"card with {flops / 1e12:.3g} TFLOP/s in {half} and VRAM of "
        f"{machine.vram_bytes_per_second / 1e9:.3g} GB/s, {machine.h2d_bytes_per_second / 1e9:.3g} GB/s from RAM of "
        f"{machine.dram_bytes_per_second / 1e9:.3g} GB/s, and {machine.num_cores} cores"
    )


def _wrapped(text: str) -> list[str]:
    return wrap(text, 74, break_long_words=False, break_on_hyphens=False)


# ---- the bottleneck of a plan, and remedies ------------------------------------------------------------------------

_LIMITS = {
    "GPU": "the GPU's computing",
    "H2D": f"the bus ({_TO_GPU})",
    "D2H": f"the bus ({_TO_RAM})",
    "disk": "the disk",
    "launches": "starting the GPU's operations, one after the other, from Python",
    "link": "the link between the GPUs",
}
_BOTH_WAYS = "the bus in both directions"
_LARGER_BUDGETS = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Larger budgets to try, as multiples of the present budget."""
_MORE_MICRO_BATCHES = 4
"""Factor of the larger accumulation that is compared."""
_MIN_SPEEDUP = 1.05
"""A change is proposed only if it makes the step at least this many times faster."""
_MIN_SAVED = 0.01
"""A change is said to save memory only if it saves more than this fraction of it."""
_MAX_LACKING = 0.9
"""A smaller micro-batch is proposed only if it lacks less than this fraction of the bytes that the present one
lacks."""
_AS_BUSY = 0.85
"""Resources with more than this fraction of the busiest resource's time limit the step together with it."""
_DRAM_BOUND = 0.6
"""A CPU step above this fraction of the triad's bytes per second is bound by RAM, below it by arithmetic."""


def replanned(
    plan: Plan, *, work: Any = None, hardware: Hardware | None = None, num_gpus: int | None = None, **changes: Any
) -> Plan:
    """The plan made again, with `changes` in its config (vram, ram, precision, ...), another micro-batch or machine.

    Args:
        num_gpus: number of GPUs of the same kind with as much VRAM as now; the host's RAM stays the same.
    """
    basis, layers = plan.basis, plan.layers
    config = replace(basis.config, **changes)
    if num_gpus is not None:
        layers = tuple(layer.shared_by(num_gpus) for layer in layers)
        hardware = basis.hardware and for_ranks(basis.hardware, num_gpus)
    return make_plan(
        layers,
        config,
        frozen=basis.frozen,
        frozen_bytes=basis.frozen_bytes,
        work=work or basis.work,
        hardware=hardware or basis.hardware,
        assumed=basis.assumed,
    )


def exchanged_otherwise(plan: Plan) -> Plan:
    """The plan made again with the other order of gradient exchange between GPUs (`OffloadConfig.exchange`)."""
    return replanned(plan, exchange="micro_batch" if plan.basis.config.exchange == "step" else "step")


def nearest_fits(plan: Plan, most: int = 4) -> list[tuple[str, Plan]]:
    """Up to `most` plans that fit, each with the words for its changes. Smaller changes come first.

    The order: states in fewer bytes, a smaller micro-batch, both; states on disk, alone and with these changes; a
    larger budget; and last a smaller micro-batch, leaner states and both with a smaller increase of the budget. Two
    changes are combined if neither is enough.
    """
    return list(islice(((words, other) for words, other in _others(plan) if other.fits), most))


def _leaner_precisions(config: OffloadConfig) -> tuple[Precision, ...]:
    order = optimizer_named(config.optimizer).precisions
    return order[order.index(config.precision) + 1 :]


def _others(plan: Plan) -> Iterator[tuple[str, Plan]]:
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


def _to_disk(plan: Plan) -> tuple[str, dict[str, Any]]:
    """Words and plan changes for states on the proposed disk; "" and {} without one."""
    machine = plan.basis.with_disk
    if machine is None:
        return "", {}
    folder = machine.disk_folder
    words = f"optimizer states on disk (OffloadConfig(disk={folder!r}), or --disk {folder})"
    return words, {"hardware": machine, "disk": folder}


def _leanest(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plan with a small micro-batch; if RAM is short, also with the leanest states (on disk if possible), and with
    both."""
    smaller = plan.basis.smaller[-2:]
    for words, work in smaller[: 1 if "ram" in plan.lacking() else 2]:
        yield words, replanned(plan, work=work)
    if "ram" not in plan.lacking():
        return
    how, changes = _to_disk(plan)
    leaner = _leaner_precisions(plan.basis.config)[-1:]
    states = [*(f"precision={precision!r}" for precision in leaner), *([how] if how else [])]
    if leaner:
        changes["precision"] = leaner[0]
    if states:
        yield " and ".join(states), replanned(plan, **changes)
        for words, work in smaller[-1:]:
            *others, last = [*words.split(" and "), *states]
            yield f"{', '.join(others)} and {last}", replanned(plan, work=work, **changes)


def _leaner(plan: Plan) -> Iterator[tuple[str, Plan]]:
    leaner, one_is_enough = _leaner_precisions(plan.basis.config), False
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


def _smaller(plan: Plan, **changes: Any) -> Iterator[tuple[str, Plan]]:
    for words, work in plan.basis.smaller:
        other = replanned(plan, work=work, **changes)
        yield words, other
        if other.fits:
            return


def _larger(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plan with budgets that cover its needs, which are the least possible because the plan does not fit."""
    needs, hardware = _of_all(plan, plan.needs()), plan.basis.hardware
    lacking: dict[str, Any] = {tier: rounded_up(needs[tier]) for tier in plan.lacking()}
    budgets = {tier: size for tier, size in lacking.items() if tier != "disk"}
    if "disk" in lacking and hardware is not None:
        hardware = replace(hardware, disk_free_bytes=lacking["disk"])
    if lacking:
        yield of_tiers(lacking), replanned(plan, hardware=hardware, **budgets)


def _would_fit(plan: Plan) -> Iterator[str]:
    by_name = {phase.name: phase for phase in plan.phases}
    if "vram" in plan.lacking() and by_name["evaluation"].vram > by_name["training"].vram:
        yield "evaluation takes the most VRAM: a smaller per_device_eval_batch_size takes less"
    for words, other in nearest_fits(plan):
        needs = _of_all(other, other.needs())
        memory = of_tiers({tier: needs[tier] for tier in _tiers_to_name(plan, other)})
        takes = [*([memory] if memory else []), *_speed(other)]
        yield f"{words} would fit" + (f": {', '.join(takes)}" if takes else "")
    more = _with_another_gpu(plan)
    if more is not None and more.fits:
        yield f"{more.num_gpus} such GPUs would fit: {', '.join(_takes(more))}"


def _tiers_to_name(plan: Plan, other: Plan) -> list[str]:
    """VRAM and RAM (without a GPU only RAM), except tiers whose larger budget in `other` is named already."""
    tiers = ["ram"] if other.on_cpu else ["vram", "ram"]
    return [tier for tier in tiers if other.budgets.get(tier) == plan.budgets.get(tier)]


def _limit(plan: Plan) -> Iterator[str]:
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


def _limiting(plan: Plan, name: str) -> str:
    """The bottleneck in words; for the CPU step, whether RAM or arithmetic bounds it."""
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


def _help(plan: Plan) -> Iterator[str]:
    if plan.seconds is None or not plan.fits or plan.on_cpu:
        return
    step = plan.seconds.step
    for tier in ("vram", "ram"):
        for factor in _LARGER_BUDGETS:
            other = replanned(plan, **wishes(plan, {tier: plan.budgets[tier] * factor}))
            assert other.seconds is not None
            speedup = step / other.seconds.step
            if other.fits and speedup >= _MIN_SPEEDUP:
                more = format_bytes(_of_all(plan, {tier: other.total_bytes(tier) - plan.total_bytes(tier)})[tier])
                on_each = " on each GPU" if tier == "vram" and plan.num_gpus > 1 else ""
                yield f"{more} more {TIERS[tier]}{on_each} would {_changed(plan, other)}: {_faster(other, speedup)}"
                break
            if tier == "ram" and not is_short_of_ram(other):
                break  # larger budgets lead to the same plan
    if plan.basis.config.precision == "exact" and "compact" in _leaner_precisions(plan.basis.config):
        other = replanned(plan, precision="compact")
        assert other.seconds is not None
        if other.fits and step / other.seconds.step >= _MIN_SPEEDUP:
            tier = "disk" if plan.total_bytes("disk") else "ram"
            less = max(0, plan.total_bytes(tier) - other.total_bytes(tier))
            saved = format_bytes(_of_all(plan, {tier: less})[tier])
            saves = "precision='compact'"
            if less > _MIN_SAVED * plan.total_bytes(tier):
                saves += f" would save {saved} of {TIERS[tier]}"
            yield f"{saves}: {_faster(other, step / other.seconds.step)}"
    yield from _help_of_gpus(plan)


def _help_of_gpus(plan: Plan) -> Iterator[str]:
    if plan.seconds is None or plan.tokens_per_second is None:
        return
    other = _with_another_gpu(plan)
    speedup = (other.tokens_per_second or 0.0) / plan.tokens_per_second if other else 0.0
    if other is not None and other.fits and speedup >= _MIN_SPEEDUP:
        faster = _faster(other, speedup)
        takes = ", ".join(_takes(other)[:-1])
        yield f"{other.num_gpus} such GPUs would train {faster} ({takes})"
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


def _in_the_other_order(plan: Plan) -> str:
    other = exchanged_otherwise(plan)
    order = other.basis.config.exchange
    assert other.tokens_per_second is not None
    assert plan.tokens_per_second is not None
    if not other.fits:
        return f"exchange={order!r} {why_not(other)}"
    now, then = (format_bytes(sum(each.communicated.values())) for each in (plan, other))
    ratio = other.tokens_per_second / plan.tokens_per_second
    speed = f"{', '.join(_speed(other))}, {ratio:.3g}x as fast"
    return f"exchange={order!r} would communicate {then} a step instead of {now}: {speed} (it rounds sums otherwise)"


def _with_another_gpu(plan: Plan) -> Plan | None:
    """The plan with one more GPU or, beyond `GPUS_PER_HOST`, one more host; None if the GPU is unknown."""
    if plan.on_cpu or plan.basis.hardware is None or plan.basis.work is None:
        return None
    more = 1 if plan.num_gpus < GPUS_PER_HOST else GPUS_PER_HOST
    return replanned(plan, num_gpus=plan.num_gpus + more)


def _takes(plan: Plan) -> list[str]:
    """ "11.2 of 24 GiB VRAM each", "40 of 120 GiB RAM in all", "about 0.31 s a step" and the speed, if known."""
    takes = [_of_budget(plan, tier, need) for tier, need in _tiers_to_say(plan).items()]
    seconds = [] if plan.seconds is None else [f"about {format_seconds(plan.seconds.step, digits=2)} a step"]
    return [*takes, *seconds, *_speed(plan)]


def _faster(other: Plan, speedup: float) -> str:
    """ "3,594 tokens/s, 1.07x faster"."""
    return ", ".join([*_speed(other), f"{speedup:.3g}x faster"])


def is_short_of_ram(plan: Plan) -> bool:
    work, hardware = plan.basis.work, plan.basis.hardware
    assert work is not None
    assert hardware is not None
    if plan.basis.config.placement is not None:
        return False
    search = _search(plan.layers, plan.basis, work, hardware)
    return search.is_short_of_ram(*_room(plan.basis.config, plan.budgets, hardware))


def _by_phase(plan: Plan) -> Iterator[str]:
    """Table of the phases' peaks. One line stands for consecutive phases with the same figures."""
    if plan.num_tokens is None or not plan.fits:
        return
    yield "peaks by phase:" if plan.num_gpus == 1 else "peaks by phase, of each GPU and its process:"
    for cells, some in groupby(plan.phases, lambda phase: (phase.vram, phase.ram)):
        tiers = {"ram": cells[1]} if plan.on_cpu else {"vram": cells[0], "ram": cells[1]}
        first, *more = _wrapped(f"{of_tiers(tiers)}: {', '.join(phase.name for phase in some)}")
        yield from (f"  {first}", *(f"    {line}" for line in more))


def _changed(plan: Plan, other: Plan) -> str:
    def counts(of: Plan) -> dict[str, int]:
        wheres = of.placements
        return {
            "keep the weights of {} in VRAM": sum(where.weights == "vram" for where in wheres),
            "keep the optimizer states of {} in VRAM": sum(where.states == "vram" for where in wheres),
            "keep the optimizer states of {} in RAM": -sum(where.states == "disk" for where in wheres),
            "keep the activations of {}": sum(where.activations == "keep" for where in wheres),
            "let the GPU step {} through VRAM": sum(where.states == "ram" and where.step == "gpu" for where in wheres),
        }

    before = counts(plan)
    more = {text: number - before[text] for text, number in counts(other).items()}
    words = [text.format(f"{n} more layer{'s' * (n > 1)}") for text, n in more.items() if n > 0]
    return " and ".join(words[:2]) or "change the placement"
