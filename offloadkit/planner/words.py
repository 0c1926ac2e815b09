"""A plan in words: sentences, lines of at most 80 columns, and HTML. Only numbers of the plan are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from html import escape
from itertools import groupby
from textwrap import wrap

from offloadkit.facts.calls import as_here
from offloadkit.facts.hardware import Hardware
from offloadkit.facts.units import format_bytes, format_range, format_rate, format_seconds, rounded, rounded_up
from offloadkit.optim.table import MOMENTS
from offloadkit.planner.layout import TIERS
from offloadkit.planner.prediction import FrozenModel, Prediction
from offloadkit.planner.work import MicroBatch

_KEPT = "\N{NO-BREAK SPACE}"
TO_GPU, TO_RAM = "RAM -> GPU", "GPU -> RAM"
_LITTLE_VRAM_BYTES = 64 << 20
"""Other processes' VRAM below this is not worth a word."""
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


def of_others(num_bytes: int) -> str:
    """ " (other processes hold 1.2 GiB)", or "" if it is little."""
    return f" (other processes hold {format_bytes(num_bytes)})" if num_bytes >= _LITTLE_VRAM_BYTES else ""


def does_not_fit(lacking: Mapping[str, tuple[int, int]], *, at_least: bool = False) -> str:
    """ "does not fit: needs 38 GiB of VRAM, has 11 GiB", of {tier: (needs, has)} in bytes."""
    return f"does not fit: {_needs(lacking, at_least=at_least)}"


def _needs(lacking: Mapping[str, tuple[int, int]], *, at_least: bool = False) -> str:
    least = "at least " if at_least else ""
    wants = (f"{least}{of_tiers({tier: needs})}, has {format_bytes(has)}" for tier, (needs, has) in lacking.items())
    return f"needs {', and needs '.join(wants)}"


def verdict(plan: Prediction) -> str:
    """See `Plan.verdict`."""
    if not plan.fits:
        fits, rest = "DOES NOT FIT", _lacks(plan)
    else:
        fits = "AT LEAST" if plan.num_tokens is None else "FITS" if plan.budgets else "NEEDS"
        rest = ", ".join(takes(plan))
    card = "" if plan.basis.hardware is None else plan.basis.hardware.assumed_card
    card = card or ("on the CPU" if plan.on_cpu else "")
    return f"{fits}{_on_gpus(plan)} ({card}): {rest}" if card else f"{fits}{_on_gpus(plan)}: {rest}"


def one_line(plan: Prediction) -> str:
    needs = of_tiers({tier: plan.total_bytes(tier) for tier in ("vram", "ram")})
    parts = [f"{plan.num_parameters:,} parameters in {len(plan.layers)} flat layers", *_tokens(plan), needs]
    if plan.seconds is not None:
        parts.append(f"{format_seconds(plan.seconds.step)} a step")
    return ", ".join(parts if plan.fits else [*parts, "does not fit"])


def details(plan: Prediction) -> str:
    """See `Plan.details`."""
    table = [f"{cells[0]:22}" + "".join(f"{cell:>12}" for cell in cells[1:]) for cells in _rows(plan)]
    return "\n".join(f"  {line}" for line in [*_placed(plan), *table, *_times(plan), *_by_phase(plan)])


def card(plan: Prediction, sentences: list[str], remedies: list[tuple[str | None, str, str]]) -> str:
    """HTML of the plan: the verdict, a bar for each memory, seconds, and the rest in words.

    Args:
        remedies: (call to copy, words if there is none, what it takes) of each plan that would fit.
    """
    parts = [f'<div style="font-weight:bold;margin-bottom:6px">{escape(_headline(plan))}</div>']
    if bars := "".join(_bar(plan, tier) for tier in _tiers_to_say(plan)):
        parts.append(f"<table>{bars}</table>")
    if plan.fits and plan.seconds is not None:
        facts = [f"<b>{escape(step_seconds(plan, digits=2))}</b> a step, predicted", *map(escape, speed(plan))]
        parts.append(f'<div style="margin:6px 0">{", ".join(facts)}</div>')
    if remedies:
        items = "".join(f"<li>{_remedy(*each)}</li>" for each in remedies)
        parts.append(f'<div style="margin-top:6px">These would fit:</div><ol>{items}</ol>')
    parts += [f"<div>{escape(each)}</div>" for each in _about(plan)]
    parts.append(f"<ul>{''.join(f'<li>{escape(each)}</li>' for each in sentences)}</ul>" if sentences else "")
    parts.append(f"<details><summary>where everything lives</summary>{_details_html(plan)}</details>")
    return f'<div style="max-width:760px;padding:10px 14px;border:1px solid {_FAINT}">{"".join(parts)}</div>'


_FAINT, _GOOD, _BAD = "rgba(128,128,128,0.35)", "#2f9e6e", "#d0503f"
_BAR_PIXELS = 240


def _headline(plan: Prediction) -> str:
    return verdict(plan).split(": ", 1)[0] if plan.fits else verdict(plan)


def _bar(plan: Prediction, tier: str) -> str:
    """A table row: the name of the memory, a bar of the part of the budget that is needed, and the numbers."""
    need, budget = plan.needs()[tier], plan.budgets.get(tier)
    share = 1.0 if not budget else min(1.0, need / budget)
    full = f"height:12px;background:{_FAINT};width:{_BAR_PIXELS}px"
    part = f"height:12px;background:{_BAD if tier in plan.lacking() else _GOOD};width:{round(_BAR_PIXELS * share)}px"
    drawn = "" if budget is None else f'<div style="{full}"><div style="{part}"></div></div>'
    return f"<tr><td>{TIERS[tier]}</td><td>{drawn}</td><td>{escape(_of_budget(plan, tier, need))}</td></tr>"


def _remedy(call: str | None, words: str, takes: str) -> str:
    first = f'<code style="user-select:all">{escape(call)}</code>' if call else escape(words)
    return f"{first}<br>{escape(takes)}" if takes else first


def _details_html(plan: Prediction) -> str:
    header, *rows = _rows(plan)
    right = ' style="text-align:right"'
    cells = ["".join(f"<th{right}>{escape(cell)}</th>" for cell in header)]
    cells += [
        f"<td>{escape(name)}</td>" + "".join(f"<td{right}>{escape(c)}</td>" for c in rest) for name, *rest in rows
    ]
    table = "".join(f"<tr>{row}</tr>" for row in cells)
    placed, below = ("<br>".join(map(escape, lines)) for lines in (_placed(plan), [*_times(plan), *_by_phase(plan)]))
    return f"<p>{placed}</p><table>{table}</table><p>{below}</p>"


def misfit_message(plan: Prediction) -> str:
    """ "does not fit: needs 38 GiB of VRAM, has 11 GiB". The need is rounded up."""
    return f"does not fit{_on_gpus(plan)}: {_lacks(plan)}"


def _lacks(plan: Prediction) -> str:
    needs = {tier: rounded_up(size) for tier, size in host_totals(plan, plan.needs()).items()}
    has = host_totals(plan, plan.budgets)
    return _needs({tier: (needs[tier], has[tier]) for tier in plan.lacking()})


def _on_gpus(plan: Prediction) -> str:
    return f" on {plan.num_gpus} GPUs" if plan.num_gpus > 1 else ""


def host_totals(plan: Prediction, num_bytes: Mapping[str, int]) -> dict[str, int]:
    """A rank's bytes by tier, as shown to users: VRAM for each GPU, RAM and disk for all ranks of a host."""
    return {tier: size * (1 if tier == "vram" else plan.num_on_host) for tier, size in num_bytes.items()}


def takes(plan: Prediction) -> list[str]:
    """ "11.2 of 24 GiB VRAM each", "40 of 120 GiB RAM in all", "about 0.31 s a step" and the speed, if known."""
    memory = [_of_budget(plan, tier, need) for tier, need in _tiers_to_say(plan).items()]
    seconds = [] if plan.seconds is None else [f"about {step_seconds(plan, digits=2)} a step"]
    return [*memory, *seconds, *speed(plan)]


def step_seconds(plan: Prediction, digits: int = 3) -> str:
    """ "310 ms", or "260 to 360 ms" if Python bounds the step."""
    assert plan.seconds is not None
    if plan.step_range is None:
        return format_seconds(plan.seconds.step, digits=digits)
    return format_range(*plan.step_range, digits=digits)


def _tiers_to_say(plan: Prediction) -> dict[str, int]:
    said = {tier: need for tier, need in plan.needs().items() if tier == "ram" or need}
    return {tier: need for tier, need in said.items() if tier != "vram" or not plan.on_cpu or "vram" in plan.budgets}


def _of_budget(plan: Prediction, tier: str, need: int) -> str:
    """ "7.9 of 8 GiB VRAM": both rounded alike, so that a need that fits never looks larger than its budget."""
    need = host_totals(plan, {tier: need})[tier]
    budget = host_totals(plan, plan.budgets).get(tier)
    whose = "" if plan.num_gpus == 1 else " each" if tier == "vram" else " in all"
    if whose == " in all" and plan.num_on_host < plan.num_gpus:
        whose = " a host"
    unit, size = ("GiB", 1 << 30) if max(need, budget or 0) >= 1 << 30 else ("MiB", 1 << 20)
    of = "" if budget is None else f" of {rounded(budget / size, 2)}"
    return f"{rounded(need / size, 2)}{of} {unit} {TIERS[tier]}{whose}"


def speed(plan: Prediction) -> list[str]:
    """ "3,359 tokens/s", if known."""
    rate = plan.tokens_per_second
    return [] if rate is None else [f"{rate:,.0f} tokens/s" if rate >= 99.5 else f"{rounded(rate, 2)} tokens/s"]


def about(plan: Prediction) -> list[str]:
    """Lines of at most 74 columns: assumptions, the model and a step's tokens."""
    return [line for sentence in _about(plan) for line in _wrapped(sentence)]


def beside_others(plan: Prediction) -> list[str]:
    """What other processes hold of the GPU, where that leaves less VRAM than the budget, or where the budget is the
    free VRAM.
    """
    machine, budget = plan.basis.hardware, plan.budgets.get("vram")
    if machine is None or plan.on_cpu or budget is None:
        return []
    held, there = of_others(machine.vram_of_others_bytes), machine.vram_free_bytes + machine.vram_context_bytes
    if not held or (plan.basis.config.vram is not None and budget <= there):
        return []
    if plan.basis.config.vram is None:
        return [f"VRAM: what is free on this GPU{held}."]
    short = plan.fits and plan.needs()["vram"] > there
    leaner = " Training would begin with a leaner plan, unless they end before." if short else ""
    return [f"Of the budget of {format_bytes(budget)} of VRAM, {format_bytes(there)} are free now{held}.{leaner}"]


def _about(plan: Prediction) -> list[str]:
    sentences = [
        *assumed(plan),
        *(beside_others(plan) if plan.fits else []),
        trained(plan),
        *_by_optimizer(plan),
        *_beside_training(plan),
    ]
    sentences += _beyond_positions(plan.basis.work)
    if plan.basis.beside:
        sentences.append(plan.basis.beside)
    if plan.num_tokens is None:
        sentences.append("(activations and the framework's own memory come on top)")
    ram_is_this_machines = plan.basis.hardware is not None and plan.basis.config.ram is None and "ram" in plan.budgets
    if plan.on_cpu:
        whose = ": this machine's free memory" if ram_is_this_machines else ""
        command = 'offloadkit plan ... --gpu "RTX 4090" --ram 64GiB'
        another = as_here(command, 'offloadkit.plan(..., gpu="RTX 4090", ram="64GiB")')
        sentences.append(f"(On the CPU, VRAM is RAM{whose}. For another machine: {another})")
    elif ram_is_this_machines:
        sentences.append(f"(RAM: what is free on this machine. For another machine: {as_here('--ram', 'ram=')})")
    return sentences


def _beyond_positions(work: MicroBatch | None) -> list[str]:
    if work is None or work.rows is None or not work.num_positions or work.rows.input_length <= work.num_positions:
        return []
    length, limit = work.rows.input_length, work.num_positions
    sentence = (
        f"Rows of {length:,} tokens are longer than the {limit:,} positions of the model's config "
        "(max_position_embeddings), and the model may be bad at the rest: scale its rotary embeddings in the config "
        f"(rope_parameters), or pass shorter rows (max_input_length={limit})."
    )
    return [sentence]


def assumed(plan: Prediction) -> list[str]:
    machine = plan.basis.hardware
    return [] if machine is None else [each for each in (machine.assumed, machine.link_assumed) if each]


def trained(plan: Prediction) -> str:
    frozen = plan.num_parameters - plan.num_trainable_parameters
    first = f"{plan.num_parameters:,} parameters" + (f" ({frozen:,} frozen)" if frozen else "")
    config, kinds = plan.basis.config, dict.fromkeys(layer.dtype for layer in plan.layers)
    moments = "" if config.precision == "exact" else f", {_optimizer(plan)} moments {config.precision}"
    return ", ".join([f"{first} in {'+'.join(kinds)}{moments}", *_tokens(plan)])


def _by_optimizer(plan: Prediction) -> list[str]:
    matrices = [layer for layer in plan.layers if layer.matrices]
    if not matrices:
        return []
    number, of = sum(len(layer.matrices) for layer in matrices), sum(layer.num_parameters for layer in matrices)
    others = {
        layer.kind.optimizer: _NAMES[layer.kind.optimizer]
        for layer in plan.layers
        if layer.kind.is_trained and not layer.matrices
    }
    rest = f", {' and '.join(others.values())} the rest" if others else ""
    return [f"Muon steps {number:,} matrices with {of:,} parameters{rest}"]


_NAMES = {"adamw": "AdamW", "lion": "Lion"}


def _optimizer(plan: Prediction) -> str:
    name = plan.basis.config.optimizer
    return "Adam" if name == "adamw" else name.capitalize()


def _tokens(plan: Prediction) -> list[str]:
    """ "8 x (512+128) tokens a step", if known; with accumulation "4 x 8 x (512+128) tokens a step", with several GPUs
    "2 GPUs x 4 x 8 x (512+128) tokens a step".
    """
    if plan.rows is None:
        return []
    several = f"{plan.num_gpus} GPUs x " if plan.num_gpus > 1 else ""
    several += f"{plan.accumulation} x " if plan.accumulation > 1 else ""
    return [f"{several}{plan.rows} tokens a step"]


def _placed(plan: Prediction) -> list[str]:
    placed = list(zip(plan.layers, plan.placements, strict=True))
    trained = [where for layer, where in placed if layer.kind.is_trained]
    number = len(trained)

    def share(count: int, of: int) -> str:
        return "" if count == of else f" of {count} of {of} layers"

    states: Counter[tuple[str, str]] = Counter((where.states, where.step) for where in trained)
    lines = [
        f"optimizer states{share(states[place], number)} {_WHERE[place[0]]}, stepped by {stepper}"
        for place, stepper in _STEPPERS.items()
        if states[place]
    ]
    kept = sum(where.gradients == "vram" and where.states != "vram" for where in trained)
    if kept:
        lines.append(f"gradients{share(kept, number)} kept in VRAM for the step")
    for is_trained, what in ((True, "weights"), (False, "frozen weights")):
        of = [where for layer, where in placed if layer.in_block and layer.kind.is_trained == is_trained]
        if streamed := sum(where.weights == "ram" for where in of):
            lines.append(f"{what}{share(streamed, len(of))} in RAM, copied {TO_GPU} for each pass")
    if any(where.weights == "ram" for layer, where in placed if layer.looked_up):
        lines.append("frozen embeddings looked up in RAM")
    frozen = {layer.name for layer in plan.layers if not layer.kind.is_trained}
    in_blocks = [  # a block with a frozen part counts once
        where for layer, where in placed if layer.in_block and not (layer.kind.is_trained and layer.name in frozen)
    ]
    how, blocks = Counter(where.activations for where in in_blocks), len(in_blocks)
    if how["cheap"]:
        lines.append(f"element-wise results{share(how['cheap'], blocks)} recomputed in backward")
    if how["checkpoint"]:
        lines.append(f"activations{share(how['checkpoint'], blocks)} recomputed in backward")
    if how["offload"]:
        lines.append(f"activations{share(how['offload'], blocks)} recomputed from inputs kept in RAM")
    if plan.graphs is not None and plan.is_graphed:
        lines.append(f"blocks run as {plan.graphs.number:,} CUDA graphs")
    if plan.num_gpus == 1:
        one, peak = map(format_bytes, (plan.checkpoint_bytes, plan.checkpoint_peak_bytes))
        lines.append(f"a checkpoint takes {one} of disk; two, and the model, {peak}")
    return lines


def _beside_training(plan: Prediction) -> list[str]:
    sentences = [_of_frozen_model(plan, each) for each in plan.basis.frozen_models]
    if plan.basis.cache_bytes is not None:
        where = "in VRAM" if plan.generates_in_vram else f"copied {TO_GPU} for each token"
        sentences.append(f"generation: weights {where}, {format_bytes(plan.basis.cache_bytes)} of keys and values")
    return sentences


def _of_frozen_model(plan: Prediction, model: FrozenModel) -> str:
    """ "frozen ref_model: 3,212,749,824 parameters, 1.5 GiB in VRAM, 4.5 GiB in RAM"."""
    in_tier = {"vram": model.rest_bytes, "ram": 0}
    for at in model.layers:
        in_tier[plan.placements[at].weights] += plan.layers[at].weight_bytes()
    places = (f"{format_bytes(number)} in {tier.upper()}" for tier, number in in_tier.items() if number)
    return ", ".join([f"frozen {model.name}: {model.num_parameters:,} parameters", *places])


def _rows(plan: Prediction) -> list[list[str]]:
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


def _times(plan: Prediction) -> list[str]:
    lines = []
    if plan.seconds is not None and plan.slowdown is not None:
        slowdown = "" if plan.on_cpu else f", {rounded(plan.slowdown)}x a GPU that holds everything"
        lines.append(", ".join([f"{step_seconds(plan)} a step", *speed(plan)]) + slowdown)
        busy = {_busy(plan, name): number for name, number in plan.seconds.busy.items() if number}
        each = (f"{name} {format_seconds(number)}".replace(" ", _KEPT) for name, number in busy.items())
        lines += [line.replace(_KEPT, " ") for line in _wrapped("busy: " + ", ".join(each))]
    if plan.communicated:
        parts = (f"{name} {format_bytes(size)}".replace(" ", _KEPT) for name, size in plan.communicated.items())
        told = "each GPU receives from other GPUs a step: " + ", ".join(parts)
        lines += [line.replace(_KEPT, " ") for line in _wrapped(told)]
    if plan.basis.assumed:
        lines += _wrapped(f"(not measured: seconds are computed for an assumed {_rates(plan.basis.hardware)})")
    return lines


def _busy(plan: Prediction, name: str) -> str:
    steps = {"GPU step": f"{_optimizer(plan)} on the GPU", "CPU step": f"{_optimizer(plan)} on the CPU"}
    others = {"H2D": TO_GPU, "D2H": TO_RAM, "launches": "starting operations", "link": "GPU <-> GPU"}
    return (steps | others).get(name, name)


def _rates(machine: Hardware | None) -> str:
    if machine is None:
        return "machine"
    half = "bf16" if machine.supports_bf16 else "fp16"
    flops = getattr(machine, f"{half}_flops_per_second")
    return (
        f"card with {format_rate(flops, 'FLOP/s')} in {half} and VRAM of "
        f"{format_rate(machine.vram_bytes_per_second)}, {format_rate(machine.h2d_bytes_per_second)} from RAM of "
        f"{format_rate(machine.dram_bytes_per_second)}, and {machine.num_cores} cores"
    )


def _by_phase(plan: Prediction) -> Iterator[str]:
    """Table of the phases' peaks. One line stands for consecutive phases with the same figures."""
    if plan.num_tokens is None or not plan.fits:
        return
    yield "peaks by phase:" if plan.num_gpus == 1 else "peaks by phase, of each GPU and its process:"
    for cells, some in groupby(plan.phases, lambda phase: (phase.vram, phase.ram)):
        tiers = {"ram": cells[1]} if plan.on_cpu else {"vram": cells[0], "ram": cells[1]}
        first, *more = _wrapped(f"{of_tiers(tiers)}: {', '.join(phase.name for phase in some)}")
        yield from (f"  {first}", *(f"    {line}" for line in more))


def _wrapped(text: str) -> list[str]:
    return wrap(text, 74, break_long_words=False, break_on_hyphens=False)
