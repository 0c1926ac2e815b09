"""Figures as HTML with inline SVG: without scripts or downloads, for light and dark notebook themes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from offloadkit.facts.units import format_bytes, format_seconds
from offloadkit.monitor import words
from offloadkit.monitor.figures import OTHER, Figures, Memory, Parts
from offloadkit.monitor.words import BLUE, colour, ink_on

WIDTH = 600
_LEFT = 84
"""x of the step's bars, right of their names."""
_FAR = 3.0
"""A budget above this multiple of the used bytes is written at the edge; drawn, it would squeeze the bar."""


def chart(height: int, title: str, description: str, content: str, ident: str) -> str:
    """An SVG element; `ident` is unique on the page."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="100%" role="img" '
        f'aria-labelledby="{ident}-t {ident}-d" style="display:block;height:auto" font-size="12" '
        f'font-family="system-ui,sans-serif" fill="currentColor"><title id="{ident}-t">{escape(title)}</title>'
        f'<desc id="{ident}-d">{escape(description)}</desc>{content}</svg>'
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def stack(x: float, y: float, scale: float, height: float, parts: Sequence[tuple[str, float, str]], hatch: str) -> str:
    """Adjacent segments, numbered from 1 if the number fits. `scale`: SVG units per unit of the parts; `parts`: name,
    size, and formatted size; `hatch`: id of the pattern for `OTHER`.
    """
    drawn = []
    for number, (name, size, label) in enumerate(parts, 1):
        width = size * scale
        fill = colour(name)
        box = f'<rect x="{x:.1f}" y="{y}" width="{max(0.0, width - 1):.1f}" height="{height}"'
        drawn.append(f'{box} fill="{fill}"><title>{escape(f"{name}: {label}")}</title></rect>')
        if name == OTHER:
            drawn.append(f'{box} fill="url(#{hatch})"/>')
        if width >= 14:
            extra = f' font-size="12" font-weight="600" fill="{ink_on(fill)}" pointer-events="none"'
            drawn.append(text(x + width / 2, y + height / 2 + 4, f"{number}", anchor="middle", extra=extra))
        x += width
    return "".join(drawn)


def memory_chart(tier: Memory, ident: str) -> str:
    most = max(tier.used or 0, tier.planned, 1) * 1.1
    far = tier.budget is not None and tier.budget > _FAR * most
    full = most if tier.budget is None or far else max(most, tier.budget * 1.02)
    scale = WIDTH / full
    top = 3 if tier.budget is None else 18
    hatching = (
        f'<defs><pattern id="{ident}-h" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="2" height="6" fill="#FFFFFF" opacity="0.45"/></pattern></defs>'
    )
    drawn = [hatching, f'<rect y="{top}" width="{WIDTH}" height="26" opacity="0.08"/>']
    drawn.append(stack(0, top, scale, 26, [(n, s, format_bytes(s)) for n, s in tier.parts], f"{ident}-h"))
    if tier.budget is not None:
        label = f"budget {format_bytes(tier.budget)}"
        if far:
            drawn.append(text(WIDTH, 12, f"{label} →", anchor="end"))
        else:
            at = tier.budget * scale
            drawn += [_mark(at, 5, 49, ' stroke-dasharray="4 3"'), _beside(at, 12, label)]
    at = tier.planned * scale
    drawn += [_mark(at, top - 2, top + 32), f'<path d="M{at - 5:.1f} {top + 35}h10l-5 -8z"/>']
    drawn.append(_beside(at, top + 42, words.planned(tier, f"planned {format_bytes(tier.planned)}")))
    description = f"{words.memory(tier)}. " + ", ".join(f"{name} {format_bytes(size)}" for name, size in tier.parts)
    return chart(top + 48, f"{tier.name} by category", description, "".join(drawn), ident)


def _mark(x: float, top: float, bottom: float, dash: str = "") -> str:
    return f'<path d="M{x:.1f} {top}V{bottom}" stroke="currentColor" stroke-width="2" fill="none"{dash}/>'


def _beside(x: float, foot: float, label: str) -> str:
    return text(x - 8, foot, label, anchor="end") if x > WIDTH / 2 else text(x + 8, foot, label)


def step_chart(split: Parts, beside: Parts, ident: str) -> str:
    total = sum(seconds for _, seconds in split)
    scale = (WIDTH - _LEFT) / max(total, 1e-12)
    timed = [(name, seconds, format_seconds(seconds)) for name, seconds in split]
    bold = ' font-weight="600"'
    drawn = [text(_LEFT - 8, 18, "step", anchor="end", extra=bold), stack(_LEFT, 1, scale, 26, timed, "")]
    y = 34
    for name, seconds in beside:
        width = min(seconds, total) * scale
        drawn.append(text(_LEFT - 8, y + 10, name, anchor="end"))
        drawn.append(f'<rect x="{_LEFT}" y="{y}" width="{WIDTH - _LEFT}" height="12" opacity="0.08"/>')
        drawn.append(f'<rect x="{_LEFT}" y="{y}" width="{max(1.0, width):.1f}" height="12" fill="{colour(name)}"/>')
        label, extra = f"{format_seconds(seconds)} busy", ' font-size="11"'
        if width > (WIDTH - _LEFT) * 0.75:  # put the label inside the bar
            extra += f' fill="{ink_on(colour(name))}"'
            drawn.append(text(_LEFT + width - 6, y + 10, label, anchor="end", extra=extra))
        else:
            drawn.append(text(_LEFT + width + 6, y + 10, label, extra=extra))
        y += 17
    said = ", ".join(f"{name} {label}" for name, _, label in timed)
    meanwhile = "".join(f"; {name} busy for {format_seconds(seconds)}" for name, seconds in beside)
    return chart(y, "Where a step's time went", f"{said}{meanwhile}", "".join(drawn), ident)


def loss_chart(figures: Figures, ident: str, height: int = 150) -> str:
    points = figures.loss_curve
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    room = (high - low or abs(high) or 1.0) * 0.06
    low, high = low - room, high + room
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    left, top, right, bottom = 44, 6, WIDTH - 6, height - 20
    across, down = (right - left) / (last - first), (bottom - top) / (high - low)

    def x_of(step: float) -> float:
        return left + (step - first) * across

    def y_of(loss: float) -> float:
        return bottom - (loss - low) * down

    drawn = []
    for tick in ticks(low, high, 4):
        drawn.append(f'<path d="M{left} {y_of(tick):.1f}H{right}" stroke="currentColor" opacity="0.15"/>')
        drawn.append(text(left - 6, y_of(tick) + 4, f"{tick:.4g}", anchor="end"))
    drawn += [
        text(x_of(tick), height - 5, f"{int(tick):,}", anchor="middle" if tick > first else "start")
        for tick in ticks(first, last, 6)
        if tick == int(tick)
    ]
    trend = figures.loss_trend
    for line, style in ((points, ' opacity="0.45" stroke-width="1"' if trend else ' stroke-width="2"'), (trend, "")):
        path = " ".join([f"{left + (s - first) * across:.1f},{bottom - (y - low) * down:.1f}" for s, y in line])
        width = style or ' stroke-width="2.5"'
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{BLUE}" class="okm-line"{width}/>' if path else "")
    at, newest = (trend or points)[-1]
    drawn.append(f'<circle cx="{x_of(at):.1f}" cy="{y_of(newest):.1f}" r="4" fill="{BLUE}" class="okm-dot"/>')
    lowest = min(loss for _, loss in points)
    described = f"from {points[0][1]:.4g} at step {first:,} to {newest:.4g} at step {at:,}; lowest {lowest:.4g}"
    return chart(height, "Training loss by step", described, "".join(drawn), ident)


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` + 1 round numbers from `low` to `high`."""
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough * (1 - 1e-9))
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


_LIGHT = "{--okm-ink:#1f2328;--okm-faint:#57606a;--okm-page:#ffffff;--okm-edge:#d0d7de;--okm-line:#0072B2}"
_DARK = "{--okm-ink:#e6e8eb;--okm-faint:#a9b1ba;--okm-page:#1b1f24;--okm-edge:#3d444d;--okm-line:#56B4E9}"
_IS_LIGHT = ('[data-jp-theme-light="true"]', "body.vscode-light", 'html[theme="light"]')
_IS_DARK = ('[data-jp-theme-light="false"]', "body.vscode-dark", "body.vscode-high-contrast", 'html[theme="dark"]')


def _themed(themes: Iterable[str], colours: str) -> str:
    return ",".join(f"{theme} .okm" for theme in themes) + colours


# JupyterLab, VS Code and Colab name their theme; elsewhere the system's theme applies.
STYLE = (
    f".okm{_LIGHT}@media(prefers-color-scheme:dark){{.okm{_DARK}}}"
    f"{_themed(_IS_LIGHT, _LIGHT)}{_themed(_IS_DARK, _DARK)}"
    ".okm{color:var(--okm-ink);background:var(--okm-page);border:1px solid var(--okm-edge);border-radius:8px;"
    "box-sizing:border-box;max-width:760px;padding:12px 16px 14px;font:13px/1.45 system-ui,sans-serif}"
    ".okm *{box-sizing:border-box}"
    ".okm svg{margin:5px 0 0;overflow:visible}"
    ".okm .okm-line{stroke:var(--okm-line)}"
    ".okm .okm-dot{fill:var(--okm-line)}"
    ".okm .okm-head{display:flex;flex-wrap:wrap;gap:2px 14px;align-items:baseline}"
    ".okm .okm-head b{font-size:15px}"
    ".okm .okm-faint{color:var(--okm-faint)}"
    ".okm .okm-way{height:6px;border-radius:3px;background:var(--okm-edge);margin:6px 0 10px;overflow:hidden}"
    ".okm .okm-done{height:100%;background:var(--okm-line)}"
    ".okm .okm-tiles{display:flex;flex-wrap:wrap;gap:8px 0;border-bottom:1px solid var(--okm-edge);"
    "padding-bottom:10px}"
    ".okm .okm-tile{flex:1 1 105px;min-width:105px;padding-right:8px}"
    ".okm .okm-tile b{display:block;font-size:20px;line-height:1.3;font-variant-numeric:tabular-nums}"
    ".okm .okm-tile span{display:block;font-size:12px;color:var(--okm-faint)}"
    ".okm .okm-title{margin:14px 0 2px}"
    ".okm .okm-title b{margin-right:8px}"
    ".okm .okm-legend{display:flex;flex-wrap:wrap;gap:3px 14px;font-size:12px;margin-top:4px}"
    ".okm .okm-legend span{white-space:nowrap}"
    ".okm .okm-key{display:inline-block;min-width:16px;height:16px;line-height:16px;border-radius:3px;"
    "margin-right:5px;text-align:center;font-size:11px;font-weight:600}"
    ".okm .okm-words{margin:4px 0 0}"
)


def page(figures: Figures, ident: str, note: str = "") -> str:
    """All figures as one HTML element that contains its style. `ident`: letters and digits, unique among the monitors
    on the page; `note`: plain text at the end.
    """
    sections = [_head(figures), _tiles(figures)]
    sections += [_memory(tier, f"{ident}-m{number}") for number, tier in enumerate(figures.memory)]
    sections += [f'<div class="okm-words">{escape(words.unbroken(words.rank(each)))}</div>' for each in figures.ranks]
    if figures.split:
        sections.append(_step(figures, f"{ident}-s"))
    for said in filter(None, (words.slowdown(figures), words.received(figures))):
        sections.append(f'<div class="okm-words">{escape(words.unbroken(said))}</div>')
    if len(figures.loss_curve) > 1:
        newest = "" if figures.loss is None else f"{figures.loss:.4g}"
        what = ", running mean in bold" if figures.loss_trend else " by step"
        sections += [_title("Loss", newest + what), loss_chart(figures, f"{ident}-l")]
    if note:
        sections.append(f'<div class="okm-words okm-faint">{escape(note)}</div>')
    label = f"offloadkit monitor: {words.STATES[figures.state]}, {words.progress(figures)}"
    return f'<div class="okm" role="group" aria-label="{escape(label)}"><style>{STYLE}</style>{"".join(sections)}</div>'


def _head(figures: Figures) -> str:
    way = ""
    if figures.total_steps:
        share = min(100.0, 100 * figures.steps_done / figures.total_steps)
        way = (
            f'<div class="okm-way" role="progressbar" aria-label="steps done" aria-valuemin="0" aria-valuemax="100" '
            f'aria-valuenow="{share:.0f}"><div class="okm-done" style="width:{share:.1f}%"></div></div>'
        )
    return (
        f'<div class="okm-head"><b>{escape(words.progress(figures))}</b>'
        f'<span class="okm-faint">{escape(words.STATES[figures.state])}</span></div>{way}'
    )


def _tiles(figures: Figures) -> str:
    tiles = [
        f'<div class="okm-tile"><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(note)}</span></div>'
        for name, value, note in words.tiles(figures)
    ]
    return f'<div class="okm-tiles">{"".join(tiles)}</div>'


def _title(name: str, value: str) -> str:
    said = escape(words.unbroken(value))
    return f'<div class="okm-title"><b>{escape(name)}</b><span class="okm-faint">{said}</span></div>'


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    keys = []
    for number, (name, value) in enumerate(entries, 1):
        back = colour(name)
        swatch = f'<i class="okm-key" style="font-style:normal;background:{back};color:{ink_on(back)}">{number}</i>'
        keys.append(f"<span>{swatch}{escape(name)} <b>{escape(value)}</b></span>")
    return f'<div class="okm-legend">{"".join(keys)}</div>'


def _memory(tier: Memory, ident: str) -> str:
    legend = _legend((name, format_bytes(size)) for name, size in tier.parts)
    return _title(tier.name, words.memory(tier)) + memory_chart(tier, ident) + legend


def _step(figures: Figures, ident: str) -> str:
    step = "" if figures.step_seconds is None else format_seconds(figures.step_seconds)
    shown = tuple(part for part in figures.split if part[1] > 0)
    legend = _legend((name, format_seconds(seconds)) for name, seconds in shown)
    return (
        _title("Step", f"{step}: computing, waiting, and what was busy meanwhile")
        + legend
        + step_chart(shown, figures.beside, ident)
    )
