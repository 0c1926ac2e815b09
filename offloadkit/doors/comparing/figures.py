"""Charts of `compare` and `sweep`."""

from __future__ import annotations

import io
import re
import textwrap
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from offloadkit.doors.comparing import words
from offloadkit.facts.units import rounded

COLOURS = {"baseline": "#8c8c8c", "offloadkit": "#0072b2", "deepspeed": "#e69f00"}
HATCHES = {"baseline": "", "offloadkit": "", "deepspeed": "////"}
INK, QUIET, LIMIT = "#222222", "#666666", "#d55e00"
GIB = 1 << 30
_VALUE_WIDTH = 0.2
"""Width of a value such as "9.72", as a share of its panel."""


Result = Any
"""A `Comparison` or a `Sweep`, whose modules import this one."""


class Chart(Figure):
    """A figure that notebooks show without pyplot, as wide as the page at most, in light or dark colours."""

    def __init__(self, width: float, height: float, table: str) -> None:
        """`width`, `height`: in inches. `table`: the drawn figures as plain text."""
        super().__init__(figsize=(width, height), layout="constrained", facecolor="white")
        self._table = table
        self.panels: list[Axes | Chart] = []
        self._words: list[str] = []
        # 0.1 inch between the edge and the title or remarks
        self.get_layout_engine().set(h_pad=0.1)  # type: ignore[union-attr,call-arg]

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {
            "text/html": self._html(),
            "image/svg+xml": self._written("svg").decode(),
            "image/png": b64encode(self._written("png")).decode("ascii"),
            "text/plain": self._table,
        }

    def wraps(self, panels: Sequence[Axes | Chart], words: Sequence[str]) -> None:
        """On a page the panels may stand below each other; `words` are then paragraphs, in place of the title and the
        remarks. A panel is cropped from this figure, or a chart of its size on the page.
        """
        self.panels, self._words = list(panels), list(words)

    def _html(self) -> str:
        """Images, which pages that are not trusted show too; SVG's own style chooses light or dark colours."""
        drawn = [self._cropped(panel) for panel in self.panels] or [self._written("svg")]
        images = " ".join(map(_image, drawn))
        head, *rest = (f"<p>{escape(line)}</p>" for line in self._words or [""])
        return f"{head if self._words else ''}<div>{images}</div>{''.join(rest)}"

    def _cropped(self, panel: Axes | Chart) -> bytes:
        if isinstance(panel, Chart):
            return panel._written("svg")
        self.draw_without_rendering()
        layout, others = self.get_layout_engine(), [each for each in self.get_children() if each is not panel]
        visible = [each for each in others if each.get_visible() and each is not self.patch]
        self.set_layout_engine("none")
        for each in visible:
            each.set_visible(False)
        try:
            inches = panel.get_tightbbox().transformed(self.dpi_scale_trans.inverted())  # type: ignore[union-attr]
            return self._written("svg", bbox_inches=inches.padded(0.08))
        finally:
            for each in visible:
                each.set_visible(True)
            self.set_layout_engine(layout)

    def _written(self, format: str, **options: Any) -> bytes:
        written = io.BytesIO()
        self.savefig(written, format=format, dpi=100, **options)
        return written.getvalue()


_DARK = {"#ffffff": "#1b1f24", INK: "#e6e8eb", QUIET: "#a9b1ba", "#bbbbbb": "#57606a", "#eeeeee": "#30363d"}
_DARK |= {"#000000": "#a9b1ba", COLOURS["offloadkit"]: "#56b4e9"}


def _image(svg: bytes) -> str:
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in _DARK.items()
        for kind in ("fill", "stroke")
    )
    style = f"<style>@media(prefers-color-scheme:dark){{{rules}}}</style></svg>"
    data = b64encode(style.join(svg.decode().rsplit("</svg>", 1)).encode()).decode("ascii")
    return f'<img style="max-width:100%" alt="chart" src="data:image/svg+xml;base64,{data}">'


def comparison_chart(result: Result) -> Chart:
    models = list(dict.fromkeys(row["model"] for row in result.rows))
    engines = list(dict.fromkeys(row["engine"] for row in result.rows))
    bars = [_Bars(model, [result.row(model, engine) for engine in engines]) for model in models]
    labels = [result.label(engine) for engine in engines]
    num_rows = len(models) * (0.4 + 0.33 * len(engines))
    figure = Chart(12, 1.3 + num_rows, str(result))
    panels: Any = figure.subplots(len(models), 3, squeeze=False, width_ratios=(2.9, 1, 1))
    _draw_times(panels[:, 0], bars, labels, result.num_samples, widest=96)
    _draw_sizes(panels[:, 1:], bars, result)
    # the same bars on a page, which may be narrow: both charts have the names, and may stand below each other
    times, sizes = (Chart(_PAGE_INCHES, 0.5 + num_rows, "") for _ in range(2))
    _draw_times(times.subplots(len(models), 1, squeeze=False)[:, 0], bars, labels, result.num_samples, widest=56)
    panels = sizes.subplots(len(models), 2, squeeze=False)
    _draw_sizes(panels, bars, result)
    for axes, each in zip(panels[:, 0], bars, strict=True):
        _name(axes, each, labels)
    figure.wraps([times, sizes], [result.title, *result.remarks])
    figure.suptitle("\n".join(textwrap.wrap(result.title, 130)), x=0.01, ha="left", fontsize=10.5, color=INK)
    if result.remarks:
        figure.supxlabel(" ".join(result.remarks), x=0.01, ha="left", fontsize=8.5, color=QUIET)
    return figure


_PAGE_INCHES = 5.9
"""Width of a chart on a page: two stand side by side in a notebook on a screen of 1280 pixels."""


class _Bars(NamedTuple):
    model: str
    rows: list[dict[str, Any]]
    """Of each engine."""


def _draw_times(column: Any, bars: Sequence[_Bars], labels: list[str], num_samples: int, widest: int) -> None:
    for axes, each in zip(column, bars, strict=True):
        _times(axes, each.rows, widest)
        _name(axes, each, labels)
    _title(column[0], f"time for {num_samples:,} samples (each model in its own scale)", pad=10)


def _draw_sizes(columns: Any, bars: Sequence[_Bars], result: Result) -> None:
    by_model = [each.rows for each in bars]
    _sizes(columns[:, 0], by_model, "vram_bytes", result.vram, "peak VRAM")
    _sizes(columns[:, 1], by_model, "peak_ram_bytes", result.ram, "peak RAM")


def _name(axes: Axes, bars: _Bars, labels: list[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    place: dict[str, Any] = {"rotation": 0, "ha": "right", "va": "center", "labelpad": 12}
    axes.set_ylabel(bars.model, **place, fontsize=11, fontweight="bold", color=INK)


def _title(axes: Axes, text: str, pad: float | None = None) -> None:
    axes.set_title(text, loc="left", fontsize=10, color=INK, pad=pad)


def _bare(axes: Axes, num_rows: int) -> None:
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color("#bbbbbb")
    axes.xaxis.set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=INK)
    axes.set_ylim(num_rows - 0.45, -0.55)


def _times(axes: Axes, rows: list[dict[str, Any]], widest: int) -> None:
    """`widest`: characters of a line of text."""
    _bare(axes, len(rows))
    longest = max((row["seconds"] for row in rows if row["status"] == "measured"), default=1.0)
    axes.set_xlim(0, 1.75 * longest)
    for place, row in enumerate(rows):
        if row["status"] == "measured":
            _bar(axes, place, row["seconds"], row["engine"])
            how = f"  ({row['variant']})" if row["variant"] else ""
            text = textwrap.fill(f"{words.duration(row['seconds'])}{how}", widest // 2 - 4)
            colour, left = INK, row["seconds"]
        else:
            text = textwrap.fill(textwrap.shorten(f"✕ {_shown_reason(row)}", 96, placeholder=" …"), widest)
            colour, left = QUIET, 0.0
        axes.annotate(text, (left, place), (5, 0), textcoords="offset points", va="center", fontsize=9, color=colour)


def _shown_reason(row: dict[str, Any]) -> str:
    text = re.sub(r": pip install.*", "", row["reason"]).removeprefix("does not fit: ")
    if row["status"] != "does not fit":
        return f"no bar: {text}"
    return f"even with {row['variant']}: {text}" if row["variant"] else text


def _bar(axes: Axes, place: int, length: float, engine: str) -> None:
    axes.barh(
        place, length, 0.7, color=COLOURS[engine], hatch=HATCHES[engine], edgecolor="white", linewidth=0, zorder=2
    )


def _sizes(column: Any, by_model: list[list[dict[str, Any]]], key: str, limit_bytes: int | None, title: str) -> None:
    sizes = [[row[key] / GIB if row["status"] == "measured" else 0.0 for row in rows] for rows in by_model]
    largest = max(max(each) for each in sizes) or 1.0
    limit = None if limit_bytes is None else limit_bytes / GIB
    if limit is not None and largest <= 0.02 * limit:
        limit = None  # a distant limit would flatten the bars
    end = 1.3 * max(largest, limit or 0.0)
    for axes, rows, each in zip(column, by_model, sizes, strict=True):
        _bare(axes, len(rows))
        axes.set_yticks([])
        axes.set_xlim(0, end)
        if limit is not None:
            axes.axvline(limit, color=LIMIT, linestyle="--", linewidth=1.2, zorder=1)
        for place, (row, size) in enumerate(zip(rows, each, strict=True)):
            if size:
                _bar(axes, place, size, row["engine"])
                at = _beside(size, limit, _VALUE_WIDTH * end)
                where: dict[str, Any] = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
                axes.annotate(rounded(size), (at, place), **where, fontsize=9, color=INK)
    title += ", GiB" if limit is None else f", limit {rounded(limit)} GiB"
    _title(column[0], title, pad=10)


def _beside(size: float, limit: float | None, width: float) -> float:
    """Position of a bar's label: at the bar's end, or after the limit's line if that would cross the label."""
    return limit if limit is not None and size < limit < size + width else size


SERIES = (("#0072b2", "o"), ("#e69f00", "s"), ("#009e73", "^"), ("#cc79a7", "D"), ("#56b4e9", "v"))


def sweep_chart(result: Result) -> Chart:
    learns = any("eval_loss" in row for row in result.rows)
    sentences = [line for text in result.explain().splitlines() for line in textwrap.wrap(text, 165 + 55 * learns)]
    figure = Chart(4 * (3 + learns), 4.1 + 0.19 * len(sentences), str(result))
    panels: Any = figure.subplots(1, 3 + learns, squeeze=False)[0]
    for axes in panels:
        _dress(axes, result.sizes)
    _steps(panels[0], result)
    _lines(panels[1], result, "epoch_seconds")
    _title(panels[1], f"time for {result.num_samples:,} samples")
    _vram(panels[2], result)
    if learns:
        samples = next(row["num_samples"] for row in result.rows if "eval_loss" in row)
        _title(panels[3], f"held-out loss after {samples:,} samples")
        _lines(panels[3], result, "eval_loss")
    for axes in panels:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False, labelcolor=INK)
    figure.suptitle(result.title, x=0.01, ha="left", fontsize=11, color=INK)
    figure.supxlabel("\n".join(sentences), x=0.01, ha="left", fontsize=9, color=INK)
    figure.wraps(panels, [result.title, *result.explain().splitlines()])
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
    """A logarithmic axis that spans at least a factor of three, so that small differences look small."""
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
    no_curve = line.get_label().startswith(("knee", "predicted:")) or line.get_marker() == "x"
    return [] if no_curve else [float(value) for value in line.get_ydata()]


def _steps(axes: Axes, result: Result) -> None:
    _title(axes, "time of a step")
    _lines(axes, result, "step_seconds")
    for times in result.accumulations:
        made = sorted(result.forecasts.get(times, {}).items())
        points = [(size, each.step_seconds) for size, each in made if not each.lacking]
        if points:
            name = "predicted" if times == result.accumulations[0] else None
            axes.plot(*zip(*points, strict=True), color=QUIET, linestyle=":", linewidth=1.3, label=name, zorder=2)
    knee, predicted = result.knee(), result.predicted_knee()
    if knee is not None and knee.where == "within":
        axes.axvspan(axes.get_xlim()[0], knee.size, color="#0072b2", alpha=0.07, linewidth=0, zorder=0)
        axes.axvline(knee.size, color="#0072b2", linewidth=1, linestyle="--", label=f"knee: {round(knee.size)}")
    if predicted is not None and predicted.where == "within":
        label = f"predicted: {round(predicted.size)}"
        axes.axvline(predicted.size, color=QUIET, linewidth=1, linestyle=":", label=label)
    for row in result.rows:
        if row["status"] != "measured":
            _cross(axes, row["batch_size"])
    _in_durations(axes)


def _lines(axes: Axes, result: Result, key: str, *, scale: float = 1.0) -> None:
    scalings = list(dict.fromkeys(row["scaling"] for row in result.rows)) if key == "eval_loss" else ["none"]
    series = [(times, scaling) for times in result.accumulations for scaling in scalings]
    for number, (times, scaling) in enumerate(series):
        rows = result.measured(times, scaling)
        if scaling != "none" and rows:  # the smallest step has no scaled runs: start the line at its unscaled one
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


def _label(result: Result, times: int, scaling: str, key: str) -> str | None:
    parts = []
    if len(result.accumulations) > 1:
        parts.append(f"{times} micro-batch{'es' if times > 1 else ''} a step")
    if key == "eval_loss":
        parts.append("learning rate not scaled" if scaling == "none" else f"learning rate scaled ({scaling})")
    if not parts and key == "step_seconds":
        parts.append("measured")
    return ", ".join(parts) or None


def _vram(axes: Axes, result: Result) -> None:
    key, name, limit = "vram_bytes", "VRAM", result.vram
    if not any(row.get("vram_bytes") for row in result.rows):
        key, name, limit = "peak_ram_bytes", "RAM", result.ram
    _title(axes, f"peak {name}, GiB")
    _lines(axes, result, key, scale=1 / GIB)
    highest = max((row[key] / GIB for row in result.rows if row.get(key)), default=0.0) or 1.0
    axes.set_ylim(0, 1.1 * highest)
    if limit is not None and highest > 0.2 * limit / GIB:
        axes.set_ylim(0, 1.1 * max(highest, limit / GIB))
        axes.axhline(limit / GIB, color=LIMIT, linestyle="--", linewidth=1.2, label=f"limit {rounded(limit / GIB)}")
    for row in result.rows:
        if row["status"] == "does not fit":
            _cross(axes, row["batch_size"])
            at: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}
            axes.annotate("does not fit", (row["batch_size"], 0.07), **at, rotation=90, fontsize=8, color=LIMIT)


def _cross(axes: Axes, size: int) -> None:
    axes.plot(size, 0.03, "x", color=LIMIT, transform=axes.get_xaxis_transform(), clip_on=False)
