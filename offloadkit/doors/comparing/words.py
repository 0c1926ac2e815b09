"""Format figures and rows as text and HTML tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from offloadkit.facts.units import format_bytes, format_seconds

_LABELS = {"baseline": "all on the GPU", "offloadkit": "offloadkit", "deepspeed": "DeepSpeed"}


def label(engine: str, environment: Mapping[str, str]) -> str:
    """The engine as charts and tables name it."""
    is_on_cpu = engine == "baseline" and environment["gpu"] == "none"
    return "plain, on the CPU" if is_on_cpu else _LABELS[engine]


def duration(seconds: float) -> str:
    """ "45 ms", "8.3 s", "2 min 05 s", "78 min" or "2 h 20 min"."""
    if seconds < 100:
        return format_seconds(seconds)
    if seconds < 600:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min" + (f" {rest:02} s" if rest else "")
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h" + (f" {minutes:02} min" if minutes else "")


ROUND_SECONDS = (
    *(digit * 10.0**power for power in range(-6, 2) for digit in (1, 2, 5)),
    *(60.0 * minutes for minutes in (1, 2, 5, 10, 20, 30)),
    *(3600.0 * hours for hours in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
)


def size_or_dash(num_bytes: float | None) -> str:
    return format_bytes(int(num_bytes)) if num_bytes else "-"


def place(environment: Mapping[str, str], vram: int | None, ram: int | None) -> str:
    """For example "NVIDIA H200, within 11 GiB of VRAM, 64 GiB of RAM"."""
    where = environment["gpu"] if environment["gpu"] != "none" else "CPU, no GPU"
    limits = [f"{format_bytes(size)} of {tier}" for size, tier in ((vram, "VRAM"), (ram, "RAM")) if size]
    return where + (f", within {', '.join(limits)}" if limits else "")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], num_left: int) -> list[str]:
    """Columns two spaces apart, the first `num_left` left-aligned. The last cell of a row shorter than the header is a
    remark, which does not affect column widths.
    """
    whole = [row for row in (header, *rows) if len(row) == len(header)]
    widths = [max(len(row[index]) for row in whole) for index in range(len(header))]
    for row in rows:
        for index, cell in enumerate(row[:num_left]):
            widths[index] = max(widths[index], len(cell))

    def line(row: Sequence[str]) -> str:
        padded = [
            cell if len(row) < len(header) and index == len(row) - 1
            else cell.ljust(width) if index < num_left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]  # fmt: skip
        return "  ".join(padded).rstrip()

    return [line(header), "  ".join("-" * width for width in widths), *map(line, rows)]


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], num_left: int, caption: str) -> str:
    """A plain table in the page's colours; a short row's last cell spans the rest. `caption`: lines."""

    def cell(tag: str, text: str, index: int, span: int) -> str:
        side = "left" if index < num_left or span > 1 else "right"
        wide = f' colspan="{span}"' if span > 1 else ""
        return f'<{tag}{wide} style="text-align:{side}">{escape(text)}</{tag}>'

    body = ""
    for tag, row in [("th", header), *(("td", row) for row in rows)]:
        spans = [1] * (len(row) - 1) + [len(header) - len(row) + 1]
        body += f"<tr>{''.join(cell(tag, text, index, spans[index]) for index, text in enumerate(row))}</tr>"
    lines = "<br>".join(map(escape, caption.splitlines()))
    return f'<table><caption style="text-align:left">{lines}</caption>{body}</table>'
