"""A plan as text, as HTML, and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offloadkit.hardware import Hardware
    from offloadkit.plan.plan import Plan

_TIERS = {"vram": "VRAM", "ram": "RAM", "disk": "disk"}
_WHERE = {"vram": "in VRAM", "ram": "in RAM", "disk": "on disk"}
_STEPPERS = {
    ("vram", "gpu"): "the GPU",
    ("ram", "gpu"): "the GPU through VRAM",
    ("ram", "cpu"): "the CPU",
    ("disk", "cpu"): "the CPU",
}


def format_bytes(num_bytes: int) -> str:
    """ "1.23 GiB", "45.6 MiB" or "789 KiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= 0.9995 * size:
            return f"{_three_digits(num_bytes / size)} {unit}"
    return f"{_three_digits(num_bytes / 1024)} KiB"


def _three_digits(number: float) -> str:
    """At least: 1.23, 12.3, 123, 1234."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def format_seconds(seconds: float) -> str:
    """ "1.23 s" or "45.6 ms"."""
    return f"{_three_digits(seconds)} s" if seconds >= 0.9995 else f"{1000 * seconds:.3g} ms"


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
