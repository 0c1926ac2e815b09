"""The monitor on a terminal, as a few redrawn lines; without a terminal, a log line at intervals."""

from __future__ import annotations

import logging
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from offloadkit.facts.units import format_bytes, format_seconds, rounded
from offloadkit.monitor import words
from offloadkit.monitor.figures import Figures, Memory
from offloadkit.monitor.words import colour, ink_on

_NAME = 6
_PLANNED, _BUDGET, _FAR = "▲", "┃", "→"
_SPARKS = "▁▂▃▄▅▆▇█"
_LINE_SECONDS = 30.0


class TerminalDisplay:
    """A view that is redrawn in place; other output appears above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False)
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []

    def open(self, figures: Figures) -> None:
        before = sys.stdout, sys.stderr
        self._live.start()
        for log in _logs():
            if (
                log.stream in before
            ):  # else its lines would move the cursor, and the last view would stay above the next
                self._moved.append((log, log.setStream(sys.stderr)))
        self.update(figures, is_polled=True)

    def update(self, figures: Figures, *, is_polled: bool) -> None:
        width, height = self._console.size
        self._live.update(view(figures, width, height - 1), refresh=True)

    def close(self, figures: Figures) -> None:
        try:
            self.update(figures, is_polled=True)
        finally:
            for log, stream in self._moved:
                log.setStream(stream)
            self._moved.clear()
            self._live.stop()


def _logs() -> Iterator[logging.StreamHandler[Any]]:
    loggers = (each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger))
    for logger in (logging.root, *loggers):
        yield from (each for each in logger.handlers if isinstance(each, logging.StreamHandler))


class LogLines:
    """Prints a line at intervals, where redrawing is impossible."""

    def __init__(self) -> None:
        self._next = 0.0

    def open(self, figures: Figures) -> None:
        """Do nothing yet."""

    def update(self, figures: Figures, *, is_polled: bool) -> None:
        if figures.steps_done and time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_SECONDS
            print(words.line(figures), flush=True)

    def close(self, figures: Figures) -> None:
        print(words.summary(figures), flush=True)


def view(figures: Figures, width: int, height: int = 60) -> Group:
    """At most `height` lines of at most `width` columns: the most wanted parts that fit."""
    room, whole = max(20, min(width, 100) - _NAME), min(width, 100)
    parts = [[_head(figures), *_key_figures(figures, width)], _loss(figures, room)]
    parts += [_memory(tier, room) for tier in figures.memory]
    parts += [[Text(line) for line in _wrapped(words.rank(each), whole)] for each in figures.ranks]
    if figures.split:
        timed = [(name, seconds, format_seconds(seconds)) for name, seconds in figures.split if seconds > 0]
        total = sum(seconds for _, seconds, _ in timed)
        parts.append([_named("step", _bar(timed, total, room)), *_legend(timed, room)])
        busy = [Text(f"{name} {format_seconds(seconds)}") for name, seconds in figures.beside]
        parts.append([_named("" if number else "busy", line) for number, line in enumerate(_in_lines(busy, room))])
    for said in (words.slowdown(figures), words.received(figures)):
        parts.append([Text(line) for line in _wrapped(said, whole)])
    lines: list[Text] = []
    for part in parts:
        lines += part if len(lines) + len(part) <= height else []
    return Group(*lines)


def _loss(figures: Figures, room: int) -> list[Text]:
    """The training losses as bars, and the lowest and the highest."""
    if len(figures.loss_curve) < 2:
        return []
    losses = [loss for _, loss in figures.loss_curve]
    span = f" {rounded(min(losses), 4)} to {rounded(max(losses), 4)}"
    bars = Text(sparks(losses, room - len(span)), style="bright_blue")
    return [_named("loss", bars.append(span, "not bold default"))]


def _head(figures: Figures) -> Text:
    text = Text.assemble((words.progress(figures), "bold"), f"  {words.STATES[figures.state]}  ")
    if figures.total_steps:
        done = round(20 * min(1.0, figures.steps_done / figures.total_steps))
        text.append("━" * done, "bright_blue").append("━" * (20 - done), "dim")
    return text


def _key_figures(figures: Figures, width: int) -> list[Text]:
    parts = []
    for name, value, note in words.tiles(figures):
        said = f" ({note})" if name == "slowdown" or note.startswith("evaluation") or "skipped" in note else ""
        parts.append(Text.assemble((f"{name} ", "dim"), (value, "bold"), said))
    return _in_lines(parts, width)


def _memory(tier: Memory, room: int) -> list[Text]:
    most = max(tier.used or 0, tier.planned, 1)
    far = tier.budget is not None and tier.budget > 3 * most
    full = most if tier.budget is None or far else max(most, tier.budget)
    parts = [(name, size, format_bytes(size)) for name, size in tier.parts]
    bar = _bar(parts, full, room)
    marks = {_column(tier.planned, full, room): _PLANNED}
    mark = _FAR if far else _BUDGET
    if tier.budget is not None:
        at = _column(full if far else tier.budget, full, room)
        if at in marks:  # move the plan's mark
            marks = {at - 1 if at else 1: _PLANNED}
        marks[at] = mark
        if not far and not bar.plain[at].isdigit():
            bar = Text.assemble(bar[:at], (_BUDGET, "bold"), bar[at + 1 :])
    said = words.memory(tier, f"{_PLANNED} ", f"{mark} ")
    below = Text("".join(marks.get(column, " ") for column in range(room)).rstrip(), "bold")
    told = [_named("", Text(line, "dim")) for line in _wrapped(said, room)]
    return [_named(tier.name, bar), _named("", below), *told, *_legend(parts, room)]


def _wrapped(said: str, room: int) -> list[str]:
    """Break lines before a name, never between a name and its number."""
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in textwrap.wrap(words.unbroken(said), room)]


def _column(size: int, full: int, room: int) -> int:
    return max(1, min(room, round(room * size / full))) - 1


def _named(name: str, content: Text) -> Text:
    return Text.assemble((f"{name:{_NAME}}", "bold"), content)


def _bar(parts: Iterable[tuple[str, float, str]], full: float, room: int) -> Text:
    text, filled, drawn = Text(), 0.0, 0
    for number, (name, size, _) in enumerate(parts, 1):
        filled += size
        width = round(room * min(1.0, filled / full)) - drawn
        label = f"{number}" if width > 1 else ""
        text.append(f"{label:^{width}}" if width > 0 else "", f"{ink_on(colour(name))} on {colour(name)}")
        drawn += width
    return text.append("·" * (room - drawn), "dim")


def _legend(parts: Iterable[tuple[str, float, str]], room: int) -> list[Text]:
    entries = [
        Text.assemble((f" {number} ", f"{ink_on(colour(name))} on {colour(name)}"), f" {name} {label}")
        for number, (name, _, label) in enumerate(parts, 1)
    ]
    return [_named("", line) for line in _in_lines(entries, room)]


def _in_lines(entries: Iterable[Text], room: int) -> list[Text]:
    lines: list[Text] = []
    for entry in entries:
        if lines and len(lines[-1]) + 3 + len(entry) <= room:
            lines[-1].append("   ").append_text(entry)
        else:
            lines.append(entry)
    return lines


def sparks(values: list[float], room: int) -> str:
    """One line of bars; the lowest value has the flattest bar."""
    values = values[:: max(1, -(-len(values) // room))]
    low, high = min(values), max(values)
    return "".join(_SPARKS[int(7 * (value - low) / (high - low or 1.0))] for value in values)
