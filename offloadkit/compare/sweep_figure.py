"""The chart of a sweep, in the colours and with the habits of `figure`."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from offloadkit.compare import words
from offloadkit.compare.figure import GIB, INK, LIMIT, QUIET, Chart, off_the_edge

if TYPE_CHECKING:
    from offloadkit.compare.sweeping import Sweep

SERIES = (("#0072b2", "o"), ("#e69f00", "s"), ("#009e73", "^"), ("#cc79a7", "D"), ("#56b4e9", "v"))
"""Colour and marker of each line; after the last comes the first."""


def sweep_chart(result: Sweep) -> Chart:
    """Step, epoch and VRAM against the batch size; the held-out loss where it was measured; what it means below."""
    learns = any("eval_loss" in row for row in result.rows)
    sentences = [line for text in result.explain().splitlines() for line in textwrap.wrap(text, 165 + 55 * learns)]
    figure = Chart(figsize=(4 * (3 + learns), 4.1 + 0.19 * len(sentences)), layout="constrained", facecolor="white")
    panels: Any = figure.subplots(1, 3 + learns, squeeze=False)[0]
    for axes in panels:
        _dress(axes, result.sizes)
    _steps(panels[0], result)
    _lines(panels[1], result, "epoch_seconds")
    panels[1].set_title(f"time for {result.num_samples:,} samples", loc="left", fontsize=10, color=INK)
    _vram(panels[2], result)
    if learns:
        _losses(panels[3], result)
    for axes in panels:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False, labelcolor=INK)
    off_the_edge(figure)
    figure.suptitle(result.title, x=0.01, ha="left", fontsize=11, color=INK)
    figure.supxlabel("\n".join(sentences), x=0.01, ha="left", fontsize=9, color=INK)
    return figure


def _dress(axes: Axes, sizes: list[int]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlim(min(sizes) / 1.4, max(sizes) * 1.4)
    axes.set_xlabel("rows of a micro-batch", fontsize=9, color=QUIET)
    axes.tick_params(labelsize=9, labelcolor=INK, color="#bbbbbb")
    axes.grid(axis="y", color="#eeeeee", zorder=0)


def _in_durations(axes: Axes) -> None:
    """A logarithmic axis of at least a factor of three, lest small differences look large."""
    axes.set_yscale("log")
    values = [value for line in axes.get_lines() for value in _seconds_of(line)]
    if not values:
        return
    middle = (min(values) * max(values)) ** 0.5
    low, high = min(min(values) * 0.8, middle / 2.2), max(max(values) * 1.3, middle * 2.2)
    axes.set_ylim(low, high)
    axes.yaxis.set_minor_locator(NullLocator())
    ticks = [seconds for seconds in words.ROUND_SECONDS if low <= seconds <= high]
    axes.set_yticks(ticks, [words.duration(seconds) for seconds in ticks])


def _seconds_of(line: Any) -> list[float]:
    """The heights of a curve; vertical lines and marks below the axis have none."""
    heights = [float(value) for value in line.get_ydata()]
    return [] if line.get_label().startswith(("knee", "predicted:")) or line.get_marker() == "x" else heights


def _steps(axes: Axes, result: Sweep) -> None:
    """Measured and predicted steps, and the knee of the first accumulation."""
    axes.set_title("time of a step", loc="left", fontsize=10, color=INK)
    _lines(axes, result, "step_seconds")
    for times in result.accumulations:
        made = result.forecasts.get(times, {})
        points = [(size, each.step_seconds) for size, each in sorted(made.items()) if not each.lacking]
        if points:
            label = "predicted" if times == result.accumulations[0] else None
            axes.plot(*zip(*points, strict=True), color=QUIET, linestyle=":", linewidth=1.3, label=label, zorder=2)
    knee, predicted = result.knee(), result.predicted_knee()
    if knee is not None and knee.where == "within":
        axes.axvspan(axes.get_xlim()[0], knee.size, color="#0072b2", alpha=0.07, linewidth=0, zorder=0)
        axes.axvline(knee.size, color="#0072b2", linewidth=1, linestyle="--", label=f"knee: {round(knee.size)}")
    if predicted is not None and predicted.where == "within":
        axes.axvline(
            predicted.size, color=QUIET, linewidth=1, linestyle=":", label=f"predicted: {round(predicted.size)}"
        )
    for row in result.rows:
        if row["status"] != "measured":
            axes.plot(row["batch_size"], 0.03, "x", color=LIMIT, transform=axes.get_xaxis_transform(), clip_on=False)
    _in_durations(axes)


def _lines(axes: Axes, result: Sweep, key: str, *, scale: float = 1.0) -> None:
    """One line for each accumulation, and, where several were tried, each scaling of the learning rate."""
    scalings = list(dict.fromkeys(row["scaling"] for row in result.rows)) if key == "eval_loss" else ["none"]
    series = [(times, scaling) for times in result.accumulations for scaling in scalings]
    for number, (times, scaling) in enumerate(series):
        rows = result.measured(times, scaling)
        if scaling != "none" and rows:  # the smallest step is one run, whatever the scaling
            rows = result.measured(times, "none") | rows if len(rows) < len(result.sizes) else rows
            rows = {size: rows[size] for size in rows if size in result.measured(times, scaling) or size == min(rows)}
        points = [(size, rows[size][key] * scale) for size in sorted(rows) if rows[size].get(key)]
        if not points:
            continue
        colour, marker = SERIES[number % len(SERIES)]
        label = _label(result, times, scaling, key)
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, label=label, zorder=3)
    if key.endswith("seconds"):
        _in_durations(axes)


def _label(result: Sweep, times: int, scaling: str, key: str) -> str | None:
    parts = []
    if len(result.accumulations) > 1:
        parts.append(f"{times} micro-batch{'es' if times > 1 else ''} a step")
    if key == "eval_loss":
        parts.append("learning rate as it is" if scaling == "none" else f"learning rate scaled ({scaling})")
    if not parts and key == "step_seconds":
        parts.append("measured")
    return ", ".join(parts) or None


def _vram(axes: Axes, result: Sweep) -> None:
    """Peak VRAM, or, without a GPU, RAM."""
    key, name, limit = "vram_bytes", "VRAM", result.vram
    if not any(row.get("vram_bytes") for row in result.rows):
        key, name, limit = "peak_ram_bytes", "RAM", result.ram
    axes.set_title(f"peak {name}, GiB", loc="left", fontsize=10, color=INK)
    _lines(axes, result, key, scale=1 / GIB)
    highest = max((row[key] / GIB for row in result.rows if row.get(key)), default=0.0) or 1.0
    axes.set_ylim(0, 1.1 * highest)
    if limit is not None and highest > 0.2 * limit / GIB:
        axes.set_ylim(0, 1.1 * max(highest, limit / GIB))
        axes.axhline(limit / GIB, color=LIMIT, linestyle="--", linewidth=1.2, label=f"limit {limit / GIB:.3g}")
    for row in result.rows:
        if row["status"] == "does not fit":
            axes.plot(row["batch_size"], 0.03, "x", color=LIMIT, transform=axes.get_xaxis_transform(), clip_on=False)
            axes.annotate(
                "does not fit",
                (row["batch_size"], 0.07),
                xycoords=axes.get_xaxis_transform(),
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=8,
                color=LIMIT,
            )


def _losses(axes: Axes, result: Sweep) -> None:
    samples = next(row["num_samples"] for row in result.rows if "eval_loss" in row)
    axes.set_title(f"held-out loss after {samples:,} samples", loc="left", fontsize=10, color=INK)
    _lines(axes, result, "eval_loss")
