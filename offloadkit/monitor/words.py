"""Figures as text, and the colours of their parts, for notebooks and terminals."""

from __future__ import annotations

import re

from offloadkit.facts.units import format_bytes, format_range, format_seconds, rounded
from offloadkit.monitor.figures import Figures, Memory, RankFigures

STATES = {
    "waiting": "waiting for the first step",
    "running": "training",
    "stopping": "stopping after this step",
    "finished": "finished",
    "closed": "closed before the end",
    "stopped": "stopped",
    "failed": "failed",
}


def duration(seconds: float) -> str:
    """ "1:02:03", "2:03" or "45 s"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def unbroken(words: str) -> str:
    """Put no-break spaces before numbers and units, so that "D2H", "65.2" and "ms" stay on one line."""
    return re.sub(r" (?=[+−]?\d|(?:ms|s|[KMG]iB)\b)", "\N{NO-BREAK SPACE}", words)


def progress(figures: Figures) -> str:
    """ "step 320 of 1,000"."""
    of = f" of {figures.total_steps:,}" if figures.total_steps else ""
    return f"step {figures.steps_done:,}{of}"


def tiles(figures: Figures) -> list[tuple[str, str, str]]:
    """(name, value, note) of the key figures, the most wanted first; unknown values are "–"."""
    ended = figures.state in ("finished", "closed", "stopped", "failed")
    rate, left, norm = figures.tokens_per_second, figures.eta_seconds, figures.grad_norm
    skipped = f"{figures.num_skipped} skipped" if figures.num_skipped else ""
    found = [
        (
            "loss",
            _number(figures.loss, 4),
            _evaluation(figures) or ("running mean" if figures.loss_trend else "newest"),
        ),
        ("took", duration(figures.elapsed_seconds), "wall time")
        if ended
        else ("time left", "–" if left is None else duration(left), f"{duration(figures.elapsed_seconds)} so far"),
        ("step", "–" if figures.step_seconds is None else format_seconds(figures.step_seconds), "wall time"),
        ("tokens/s", "–" if rate is None else f"{rate:,.0f}", _padding(figures)),
        ("learning rate", _number(figures.learning_rate), "newest"),
        ("gradient norm", _number(norm), skipped or "before clipping"),
    ]
    if figures.epoch is not None:
        of = f"of {figures.num_epochs}" if figures.num_epochs else "of the data"
        found.append(("epoch", f"{figures.epoch:.2f}", of))
    slow = figures.shown_slowdown
    if slow is not None:
        found.append(
            ("slowdown", f"{slow.factor:.2f}×", "as planned" if slow.is_planned else f"{slow.baseline} baseline")
        )
    return found


def _number(number: float | None, digits: int = 3) -> str:
    return "–" if number is None else rounded(number, digits)


def _evaluation(figures: Figures) -> str:
    return f"evaluation {rounded(figures.evaluations[-1][1], 4)}" if figures.evaluations else ""


def slowdown(figures: Figures) -> str:
    """The slowdown against a step without offloading, its basis and its causes; "" where nothing is offloaded."""
    slow = figures.shown_slowdown
    if slow is None and not figures.is_offloaded:
        return ""
    if slow is None:
        return f"Slowdown not known: {figures.why_no_slowdown}."
    here, there = format_seconds(slow.step_seconds), format_seconds(slow.baseline_seconds)
    if slow.is_planned:
        here = here if slow.step_range is None else f"{format_range(*slow.step_range)}, about {here},"
        return f"Planned: {here} a step, {slow.factor:.2f}× the {there} without offloading."
    basis = "measured" if slow.baseline == "measured" else "predicted: the computing measured here, and AdamW in VRAM"
    more = ", ".join(f"{name} {_signed(seconds)}" for name, seconds in slow.parts) or "nothing that could be measured"
    return f"{here} a step, {slow.factor:.2f}× the {there} without offloading ({basis}). The difference: {more}."


def received(figures: Figures) -> str:
    parts = [f"{name} {format_bytes(size)}" for name, size in figures.received.items() if size]
    return f"From the other GPUs in a step: {', '.join(parts)}." if parts else ""


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "−") + format_seconds(abs(seconds))


def memory(tier: Memory, planned_mark: str = "", budget_mark: str = "") -> str:
    """ "5.87 GiB used, 5.61 GiB planned, budget 6 GiB", with marks of a chart before the numbers."""
    words = [] if tier.used is None else [f"{format_bytes(tier.used)} used"]
    words.append(planned(tier, f"{planned_mark}{format_bytes(tier.planned)} planned"))
    if tier.budget is not None:
        words.append(f"{budget_mark}budget {format_bytes(tier.budget)}")
    return ", ".join(words)


def planned(tier: Memory, words: str) -> str:
    return words if tier.planned_whole else f"{words} without activations and framework"


def _padding(figures: Figures) -> str:
    share = figures.padding_share
    return "padding included" if share is None else f"{share:.0%} is padding"


def rank(of: RankFigures) -> str:
    """For example "GPU 1: 5.87 GiB VRAM, 12 GiB RAM, 0.42 s a step"."""
    words = [f"{format_bytes(size)} {tier}" for size, tier in ((of.vram, "VRAM"), (of.ram, "RAM")) if size is not None]
    words += [] if of.step_seconds is None else [f"{format_seconds(of.step_seconds)} a step"]
    return f"{of.name}: {', '.join(words)}"


def line(figures: Figures) -> str:
    words = [progress(figures)]
    if figures.loss is not None:
        words.append(f"loss {rounded(figures.loss, 4)}")
    if figures.step_seconds is not None:
        words.append(f"{format_seconds(figures.step_seconds)} a step")
    if figures.tokens_per_second is not None:
        padding = f" ({_padding(figures)})" if figures.padding_share else ""
        words.append(f"{figures.tokens_per_second:,.0f} tokens/s{padding}")
    slow = figures.shown_slowdown
    if slow is not None and not slow.is_planned:
        words.append(f"slowdown {slow.factor:.2f}× ({slow.baseline} baseline)")
    words += [f"{tier.name} {format_bytes(tier.used)}" for tier in figures.memory if tier.used is not None]
    if figures.eta_seconds is not None and figures.state == "running":
        words.append(f"{duration(figures.eta_seconds)} left")
    return "  ".join(words)


def summary(figures: Figures) -> str:
    """A heading and a table of names, values and notes; sentences are below it."""
    ended = "closed at " if figures.state == "closed" else f"{STATES[figures.state]}: "
    rows = [(name, value, note) for name, value, note in tiles(figures) if value != "–"]
    rows += [(tier.name, memory(tier), "") for tier in figures.memory]
    width, wide = (max((len(row[column]) for row in rows if row[2]), default=0) for column in (0, 1))
    lines = [ended + progress(figures)]
    lines += [f"  {name:{width}}  {value:{wide}}  {note}".rstrip() for name, value, note in rows]
    if figures.split:
        shown = [f"{name} {format_seconds(seconds)}" for name, seconds in figures.split if seconds > 0]
        lines.append(f"  {'a step':{width}}  {', '.join(shown)}")
    lines += [f"  {rank(each)}" for each in figures.ranks]
    lines += filter(None, [slowdown(figures), received(figures)])
    return "\n".join(lines)


# ---- colours that colour-blind people can distinguish (Okabe and Ito), on light and dark backgrounds ---------------

BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILION, PURPLE, YELLOW = "#D55E00", "#CC79A7", "#F0E442"
GREY, PALE = "#8C8C8C", "#BDBDBD"

_NAMES = {
    BLUE: ("working weights", "forward"),
    SKY: ("weight buffers", "backward"),
    GREEN: ("master weights", "step on the GPU", "GPU step"),
    ORANGE: ("moments", "wait for CPU step", "CPU step"),
    VERMILION: ("gradients", "wait for bus", "RAM -> GPU", "GPU -> RAM"),
    PURPLE: ("activations", "CUDA graphs"),
    YELLOW: ("state buffers",),
    GREY: ("frozen weights", "other"),
    PALE: ("framework", "data and the rest"),
}
COLOURS = {name: shade for shade, names in _NAMES.items() for name in names}
"""Colours of memory categories and of a step's parts. A resource has the same colour as waits for it."""

_WHITE_ON = {BLUE, GREEN, VERMILION, GREY}


def colour(name: str) -> str:
    return COLOURS.get(name, GREY)


def ink_on(background: str) -> str:
    return "#FFFFFF" if background in _WHITE_ON else "#000000"
