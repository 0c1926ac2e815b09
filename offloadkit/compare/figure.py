"""The charts. matplotlib is imported with this module, which is imported when a chart is asked for.

Colours are Okabe and Ito's, which colour-blind readers tell apart; each engine has a hatching and its name too.
"""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from offloadkit.compare import words
from offloadkit.compare.comparison import LABELS, short_reason

if TYPE_CHECKING:
    from offloadkit.compare.comparison import Comparison

COLOURS = {"baseline": "#8c8c8c", "offloadkit": "#0072b2", "deepspeed": "#e69f00"}
HATCHES = {"baseline": "", "offloadkit": "", "deepspeed": "////"}
INK, QUIET, LIMIT = "#222222", "#666666", "#d55e00"
GIB = 1 << 30
_VALUE_WIDTH = 0.2
"""Of a size's panel: what "9.72" takes."""


class Chart(Figure):
    """A figure that notebooks show without pyplot."""

    def _repr_svg_(self) -> str:
        text = io.StringIO()
        self.savefig(text, format="svg")
        return text.getvalue()


def off_the_edge(figure: Chart) -> None:
    """Leave a tenth of an inch between the figure's edge and its title and remarks."""
    figure.get_layout_engine().set(h_pad=0.1)  # type: ignore[union-attr,call-arg]


def comparison_chart(result: Comparison) -> Chart:
    """A line of three panels for each model: seconds, VRAM and RAM; the reason in the place of a missing bar."""
    models = list(dict.fromkeys(row["model"] for row in result.rows))
    engines = list(dict.fromkeys(row["engine"] for row in result.rows))
    height = 1.3 + len(models) * (0.4 + 0.33 * len(engines))
    figure = Chart(figsize=(12, height), layout="constrained", facecolor="white")
    panels: Any = figure.subplots(len(models), 3, squeeze=False, width_ratios=(2.9, 1, 1))
    for line, model in zip(panels, models, strict=True):
        _times(line[0], model, [result.row(model, engine) for engine in engines])
    panels[0][0].set_title(
        f"time for {result.num_samples:,} samples (each model in its own scale)",
        loc="left",
        fontsize=10,
        color=INK,
        pad=10,
    )
    by_model = [[result.row(model, engine) for engine in engines] for model in models]
    _sizes(panels[:, 1], by_model, "vram_bytes", result.vram, "peak VRAM")
    _sizes(panels[:, 2], by_model, "peak_ram_bytes", result.ram, "peak RAM")
    figure.suptitle("\n".join(textwrap.wrap(result.title, 130)), x=0.01, ha="left", fontsize=10.5, color=INK)
    off_the_edge(figure)
    if result.remarks:
        figure.supxlabel(" ".join(result.remarks), x=0.01, ha="left", fontsize=8.5, color=QUIET)
    return figure


def _bare(axes: Axes, num_rows: int) -> None:
    """No frame; the first row at the top."""
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.spines["left"].set_color("#bbbbbb")
    axes.xaxis.set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=INK)
    axes.set_ylim(num_rows - 0.45, -0.55)


def _times(axes: Axes, model: str, rows: list[dict[str, Any]]) -> None:
    """One bar an engine, as long as its time in this model's own scale."""
    _bare(axes, len(rows))
    longest = max((row["seconds"] for row in rows if row["status"] == "measured"), default=1.0)
    axes.set_xlim(0, 1.75 * longest)
    axes.set_yticks(range(len(rows)), [LABELS[row["engine"]] for row in rows])
    axes.set_ylabel(model, rotation=0, ha="right", va="center", labelpad=12, fontsize=11, fontweight="bold", color=INK)
    for place, row in enumerate(rows):
        if row["status"] == "measured":
            _bar(axes, place, row["seconds"], row["engine"])
            how = f"  ({row['variant']})" if row["variant"] else ""
            text, colour, left = f"{words.duration(row['seconds'])}{how}", INK, row["seconds"]
        else:
            text = textwrap.shorten(f"✕ {_shown_reason(row)}", 96, placeholder=" …")
            colour, left = QUIET, 0.0
        axes.annotate(text, (left, place), (5, 0), textcoords="offset points", va="center", fontsize=9, color=colour)


def _shown_reason(row: dict[str, Any]) -> str:
    text = short_reason(row["reason"])
    if row["status"] != "does not fit":
        return f"no bar: {text}"
    return f"even with {row['variant']}: {text}" if row["variant"] else text


def _bar(axes: Axes, place: int, length: float, engine: str) -> None:
    axes.barh(
        place, length, 0.7, color=COLOURS[engine], hatch=HATCHES[engine], edgecolor="white", linewidth=0, zorder=2
    )


def _sizes(column: Any, by_model: list[list[dict[str, Any]]], key: str, limit_bytes: int | None, title: str) -> None:
    """A column of panels in one scale, and the limit as a line through all of them."""
    sizes = [[row[key] / GIB if row["status"] == "measured" else 0.0 for row in rows] for rows in by_model]
    largest = max(max(each) for each in sizes) or 1.0
    limit = None if limit_bytes is None else limit_bytes / GIB
    if limit is not None and largest <= 0.02 * limit:
        limit = None  # so far away, it would press the bars flat
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
                axes.annotate(f"{size:.3g}", (at, place), **where, fontsize=9, color=INK)
    title += ", GiB" if limit is None else f", limit {limit:.3g} GiB"
    column[0].set_title(title, loc="left", fontsize=10, color=INK, pad=10)


def _beside(size: float, limit: float | None, width: float) -> float:
    """Where a bar's value of this width begins: at its end, or past the limit's line where that would cross it."""
    return limit if limit is not None and size < limit < size + width else size
