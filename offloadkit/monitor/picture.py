"""The last view of a monitor as a PNG, for places that show neither HTML nor SVG."""

from __future__ import annotations

import io

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from offloadkit.facts.units import format_bytes
from offloadkit.monitor import words
from offloadkit.monitor.figures import Figures, Memory
from offloadkit.monitor.words import BLUE, SKY, VERMILION, colour, ink_on

_INK, _QUIET = "#222222", "#666666"


def png(figures: Figures) -> bytes:
    """The key figures, the loss by step, and the bars of VRAM and RAM, on a white ground."""
    shown = Figure(figsize=(10, 3.6), dpi=100, layout="constrained", facecolor="white")
    has_loss = len(figures.loss_curve) > 1
    panels = shown.subplots(1, has_loss + bool(figures.memory) or 1, squeeze=False)[0]
    if has_loss:
        _loss(panels[0], figures)
    if figures.memory:
        _memory(panels[-1], figures.memory)
    elif not has_loss:
        panels[0].set_axis_off()
    said = [f"{name} {value}" for name, value, _ in words.tiles(figures) if value != "–"]
    head = f"{words.progress(figures)}, {words.STATES[figures.state]}\n{'   '.join(said)}"
    shown.suptitle(head, x=0.01, ha="left", fontsize=10, color=_INK)
    written = io.BytesIO()
    shown.savefig(written, format="png")
    return written.getvalue()


def _loss(axes: Axes, figures: Figures) -> None:
    trend = figures.loss_trend
    shade, width, label = (SKY, 1, "_each step") if trend else (BLUE, 2, "training")
    axes.plot(*zip(*figures.loss_curve, strict=True), color=shade, linewidth=width, label=label)
    if trend:
        axes.plot(*zip(*trend, strict=True), color=BLUE, linewidth=2.2, label="training, running mean")
    if figures.evaluations:
        axes.plot(*zip(*figures.evaluations, strict=True), "o-", color=VERMILION, markersize=4, label="evaluation")
        axes.legend(fontsize=8, frameon=False, labelcolor=_INK)
    axes.set_xlabel("step", fontsize=9, color=_QUIET)
    axes.set_ylabel("loss", fontsize=9, color=_QUIET)
    axes.tick_params(labelsize=9, labelcolor=_INK)
    axes.grid(axis="y", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)


def _memory(axes: Axes, memory: tuple[Memory, ...]) -> None:
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(len(memory) - 0.3, -0.5)
    for place, tier in enumerate(memory):
        most = max(tier.used or 0, tier.planned, 1)
        full = most if tier.budget is None or tier.budget > 3 * most else max(most, tier.budget)
        left = 0.0
        for number, (name, size) in enumerate(tier.parts, 1):
            fill, width = colour(name), size / full
            axes.barh(place, width, 0.36, left, color=fill, edgecolor="white", linewidth=0.5)
            if width > 0.03:
                at = (left + width / 2, place)
                axes.annotate(str(number), at, ha="center", va="center", fontsize=9, color=ink_on(fill))
            left += width
        axes.annotate(f"{tier.name}: {words.memory(tier)}", (0, place - 0.27), fontsize=9.5, color=_INK)
        parts = [f"{number} {name} {format_bytes(size)}" for number, (name, size) in enumerate(tier.parts, 1)]
        lines = [",  ".join(parts[at : at + 3]) for at in range(0, len(parts), 3)]
        axes.annotate("\n".join(lines), (0, place + 0.25), va="top", fontsize=8, color=_QUIET)
