"""Figures as HTML with inline SVG: without scripts or downloads, for light and dark notebook themes."""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from html import escape

from offloadkit.facts.units import format_bytes, format_seconds, rounded
from offloadkit.monitor import words
from offloadkit.monitor.figures import OTHER, Figures, Memory, Parts
from offloadkit.monitor.words import BLUE, VERMILION, colour, ink_on

WIDTH = 480
"""Width of a chart in units of its view box; half of a wide page."""
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


def as_image(svg: str) -> str:
    """The SVG as an `img` in its own colours, light or dark: pages that are not trusted lose SVG, but keep images."""
    alternative = ": ".join(re.findall(r"<(?:title id|desc)[^>]*>(.*?)</(?:title|desc)>", svg)[:2])
    alone = svg.replace("<svg ", f'<svg class="okm" width="{WIDTH}" ', 1).replace(' width="100%"', "", 1)
    alone = alone.replace("<title", f"<style>{_PICTURE_STYLE}</style><title", 1)
    data = b64encode(alone.encode()).decode("ascii")
    return f'<img class="okm-image" width="{WIDTH}" alt="{alternative}" src="data:image/svg+xml;base64,{data}"/>'


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


def loss_chart(figures: Figures, ident: str, *, logarithmic: bool = False) -> str:
    """Training loss and its running mean, and the evaluation losses, by step."""
    points, trend, evaluations = figures.loss_curve, figures.loss_trend, figures.evaluations
    losses = [loss for _, loss in (*points, *evaluations)]
    low, high = min(losses), max(losses)
    if logarithmic:
        low, high = math.log10(low), math.log10(high)
    room = (high - low or abs(high) or 1.0) * 0.06
    low, high = low - room, high + room
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1, *(step for step, _ in evaluations))
    height = 225
    left, top, right, bottom = 58, 8, WIDTH - 8, height - 36
    across, down = (right - left) / (last - first), (bottom - top) / (high - low)

    def x_of(step: float) -> float:
        return left + (step - first) * across

    def y_of(loss: float) -> float:
        return bottom - ((math.log10(loss) if logarithmic else loss) - low) * down

    def anchor(x: float) -> str:
        return "middle" if x < right - 20 else "end"  # a number there would be cut off

    drawn = []
    for tick in log_ticks(low, high) if logarithmic else ticks(low, high, 4):
        drawn.append(f'<path d="M{left} {y_of(tick):.1f}H{right}" stroke="currentColor" opacity="0.15"/>')
        drawn.append(text(left - 6, y_of(tick) + 4, _short(tick), anchor="end"))
    drawn += [
        text(x_of(tick), height - 20, f"{int(tick):,}", anchor="start" if tick <= first else anchor(x_of(tick)))
        for tick in ticks(first, last, 6)
        if tick == int(tick)
    ]
    middle = (top + bottom) / 2
    scale = "loss, logarithmic" if logarithmic else "loss"
    drawn.append(text((left + right) / 2, height - 4, "step", anchor="middle"))
    drawn.append(text(12, middle, scale, anchor="middle", extra=f' transform="rotate(-90 12 {middle:.1f})"'))
    for line, style, kind in (
        (points, ' opacity="0.45" stroke-width="1"' if trend else ' stroke-width="2"', "line"),
        (trend, ' stroke-width="2.5"', "line"),
        (evaluations, ' stroke-width="1.5"', "evaluation"),
    ):
        path = " ".join([f"{x_of(step):.1f},{y_of(loss):.1f}" for step, loss in line])
        drawn.append(f'<polyline points="{path}" fill="none" class="okm-{kind}"{style}/>' if path else "")
    at, newest = (trend or points)[-1]
    for kind, marked in (("dot", [(at, newest)]), ("mark", evaluations)):
        drawn += [f'<circle cx="{x_of(s):.1f}" cy="{y_of(y):.1f}" r="3.5" class="okm-{kind}"/>' for s, y in marked]
    lowest = rounded(min(loss for _, loss in points), 4)
    described = (
        f"from {rounded(points[0][1], 4)} at step {first:,} to {rounded(newest, 4)} at step {at:,}; lowest {lowest}"
    )
    if evaluations:
        described += f"; evaluation {rounded(evaluations[-1][1], 4)} after step {evaluations[-1][0]:,}"
    return chart(height, "Loss by step", described, "".join(drawn), ident)


def _short(tick: float) -> str:
    """A number that fits beside the axis: 20000, 2.5e5."""
    if abs(tick) < 1e5:
        return rounded(tick, 4)
    power = math.floor(math.log10(abs(tick)) + 1e-9)
    return f"{rounded(tick / 10**power)}e{power}"


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` + 1 round numbers from `low` to `high`; two or more if `most` is 4 or more."""
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * (1 - 1e-9))
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between 10^`low` and 10^`high`: powers of ten if there are three, else 1, 2, 5, ...; in a narrow
    range evenly spaced ones.
    """
    decades = range(math.floor(low), math.ceil(high) + 1)
    for digits in ((1,), (1, 2, 5)):
        found = [digit * 10.0**power for power in decades for digit in digits]
        found = [tick for tick in found if low <= math.log10(tick) <= high]
        if len(found) > 2:
            return found[:: -(-len(found) // 6)]
    return [tick for tick in ticks(10.0**low, 10.0**high, 4) if tick > 0]


_LIGHT = (
    "{color-scheme:light;--okm-ink:#1f2328;--okm-faint:#57606a;--okm-page:#ffffff;--okm-edge:#d0d7de;"
    "--okm-line:#0072B2;--okm-evaluation:#D55E00}"
)
_DARK = (
    "{color-scheme:dark;--okm-ink:#e6e8eb;--okm-faint:#a9b1ba;--okm-page:#1b1f24;--okm-edge:#3d444d;"
    "--okm-line:#56B4E9;--okm-evaluation:#E69F00}"
)
_IS_LIGHT = ('[data-jp-theme-light="true"]', "body.vscode-light", 'html[theme="light"]')
_IS_DARK = ('[data-jp-theme-light="false"]', "body.vscode-dark", "body.vscode-high-contrast", 'html[theme="dark"]')


def _themed(themes: Iterable[str], colours: str) -> str:
    return ",".join(f"{theme} .okm" for theme in themes) + colours


_COLOURS = f".okm{_LIGHT}@media(prefers-color-scheme:dark){{.okm{_DARK}}}"
_LINES = (
    ".okm-line{stroke:var(--okm-line)}.okm-dot{fill:var(--okm-line)}"
    ".okm-evaluation{stroke:var(--okm-evaluation)}.okm-mark{fill:var(--okm-evaluation)}"
)
_PICTURE_STYLE = f"{_COLOURS}.okm{{color:var(--okm-ink);background:var(--okm-page)}}{_LINES}"

# JupyterLab, VS Code and Colab name their theme; elsewhere the system's theme applies.
STYLE = (
    f"{_COLOURS}{_themed(_IS_LIGHT, _LIGHT)}{_themed(_IS_DARK, _DARK)}{_LINES}"
    ".okm{color:var(--okm-ink);background:var(--okm-page);border:1px solid var(--okm-edge);border-radius:8px;"
    "box-sizing:border-box;max-width:1080px;padding:10px 16px 12px;font:13px/1.4 system-ui,sans-serif;"
    "container-type:inline-size}"
    ".okm *{box-sizing:border-box}"
    ".okm svg{margin:3px 0 0;overflow:visible}"
    ".okm .okm-image{display:block;width:100%;height:auto;margin:3px 0 0}"
    ".okm .okm-head{display:flex;flex-wrap:wrap;gap:2px 14px;align-items:baseline}"
    ".okm .okm-head b{font-size:15px}"
    ".okm .okm-faint{color:var(--okm-faint)}"
    ".okm .okm-way{height:6px;border-radius:3px;background:var(--okm-edge);margin:5px 0 8px;overflow:hidden}"
    ".okm .okm-done{height:100%;background:var(--okm-line)}"
    ".okm table.okm-tiles{display:block;width:100%;margin:0;border:0;border-bottom:1px solid var(--okm-edge);"
    "padding:0 0 8px;font:inherit;color:inherit;background:none}"
    ".okm .okm-tiles tbody{display:grid;gap:8px 10px;grid-template-columns:repeat(var(--okm-wide),1fr)}"
    ".okm .okm-tiles tr{display:block;background:none!important;border:0}"
    ".okm .okm-tiles td{display:block;padding:0!important;border:0;text-align:left;font-size:12px;line-height:1.35;"
    "color:var(--okm-faint);background:none;white-space:nowrap;max-width:none}"
    ".okm .okm-tiles td:nth-child(2){font-size:19px;font-weight:600;color:var(--okm-ink);"
    "font-variant-numeric:tabular-nums}"
    "@container(max-width:880px){.okm .okm-tiles tbody{grid-template-columns:repeat(var(--okm-half),1fr)}}"
    ".okm .okm-tiles td:nth-child(3){white-space:normal}"
    "@container(max-width:370px){.okm .okm-tiles tbody{grid-template-columns:repeat(2,1fr)}}"
    ".okm .okm-panels{display:grid;gap:2px 28px;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr))}"
    ".okm .okm-panel{min-width:0;max-width:680px;margin-top:8px}"
    ".okm .okm-title{margin:0 0 2px}"
    ".okm .okm-panel .okm-legend+.okm-title{margin-top:12px}"
    ".okm .okm-title b{margin-right:8px}"
    ".okm .okm-legend{display:flex;flex-wrap:wrap;gap:3px 14px;font-size:12px;margin-top:3px}"
    ".okm .okm-legend span{white-space:nowrap}"
    ".okm .okm-key{display:inline-block;min-width:16px;height:16px;line-height:16px;border-radius:3px;"
    "margin-right:5px;text-align:center;font-size:11px;font-weight:600}"
    ".okm .okm-stroke{color:var(--okm-line)!important}"
    ".okm .okm-stroke.okm-other{color:var(--okm-evaluation)!important}"
    ".okm .okm-words{margin:4px 0 0}"
    ".okm .okm-step{max-width:680px;margin-top:8px}"
    ".okm-fold summary{cursor:pointer;color:var(--okm-faint);font-size:12px}"
    ".okm .okm-fold{margin-top:8px}"
    ".okm-switches{border:0;display:flex;gap:20px;padding:0 16px;background:none}"
    ".okm-switches .okm-fold{margin:0}"
    ".okm .okm-panel .okm-fold{margin-top:3px}"
    ".okm .okm-log{display:none}"
    ".okm .okm-panel:has(.okm-fold[open])>.okm-linear{display:none}"
)
_SWITCHES = (("log", "log scale of the loss"), ("phases", "phases of a step"))


def switches(ident: str) -> str:
    """Unfold parts of a redrawn page, by a separate element that is not redrawn and so keeps its state."""
    folds = (
        f'<details class="okm-fold" id="{ident}-{name}"><summary>{words}</summary></details>'
        for name, words in _SWITCHES
    )
    return f'<div class="okm okm-switches">{"".join(folds)}</div>'


def _switched(ident: str) -> str:
    """CSS rules that unfold the page's parts with `switches(ident)`."""
    log, phases = (f"body:has(#{ident}-{name}[open]) #{ident}" for name, _ in _SWITCHES)
    return (
        f"{log} .okm-log{{display:block}}{log} .okm-linear{{display:none}}"
        f"#{ident} .okm-phases{{display:none}}{phases} .okm-phases{{display:block}}"
    )


def page(figures: Figures, ident: str, note: str = "", *, is_last: bool = False) -> str:
    """All figures as one HTML element that contains its style.

    Args:
        ident: letters and digits, unique among the monitors on the page.
        note: plain text at the end.
        is_last: the page is not redrawn. It folds parts itself, instead of by `switches`, and its charts are images, so
            that it can also be read where neither styles nor SVG are trusted.
    """
    drawn = as_image if is_last else str
    panels = [_loss(figures, f"{ident}-l", drawn, is_last=is_last)] if len(figures.loss_curve) > 1 else []
    tiers = [_memory(tier, f"{ident}-m{number}", drawn) for number, tier in enumerate(figures.memory)]
    tiers += [f'<div class="okm-words">{escape(words.unbroken(words.rank(each)))}</div>' for each in figures.ranks]
    panels += ["".join(tiers)] if tiers else []
    sections = [_head(figures), _tiles(figures)]
    inner = "".join(f'<div class="okm-panel">{panel}</div>' for panel in panels)
    sections.append(f'<div class="okm-panels">{inner}</div>' if inner else "")
    phases = _phases(figures, f"{ident}-s", drawn)
    if phases and is_last:
        sections.append(f'<details class="okm-fold"><summary>{escape(_SWITCHES[1][1])}</summary>{phases}</details>')
    elif phases:
        sections.append(f'<div class="okm-phases">{phases}</div>')
    if note:
        sections.append(f'<div class="okm-words okm-faint">{escape(note)}</div>')
    label = f"offloadkit monitor: {words.STATES[figures.state]}, {words.progress(figures)}"
    style = STYLE if is_last else STYLE + _switched(ident)
    return (
        f'<div class="okm" id="{ident}" role="group" aria-label="{escape(label)}"><style>{style}</style>'
        f"{''.join(sections)}</div>"
    )


def _head(figures: Figures) -> str:
    way = ""
    if figures.total_steps:
        share = min(100.0, 100 * figures.steps_done / figures.total_steps)
        way = (
            f'<div class="okm-way" role="progressbar" aria-label="steps done" aria-valuemin="0" aria-valuemax="100" '
            f'aria-valuenow="{share:.0f}"><div class="okm-done" style="width:{share:.1f}%"></div></div>'
        )
    return (
        f'<div class="okm-head"><b>{escape(words.progress(figures))}</b> '
        f'<span class="okm-faint">{escape(words.STATES[figures.state])}</span></div>{way}'
    )


def _tiles(figures: Figures) -> str:
    tiles = words.tiles(figures)
    rows = [
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td><td>{escape(note)}</td></tr>"
        for name, value, note in tiles
    ]
    columns = f"--okm-wide:{len(tiles)};--okm-half:{-(-len(tiles) // 2)}"
    return f'<table class="okm-tiles" style="{columns}"><tbody>{"".join(rows)}</tbody></table>'


def _title(name: str, value: str) -> str:
    said = escape(words.unbroken(value))
    return f'<div class="okm-title"><b>{escape(name)}</b> <span class="okm-faint">{said}</span></div>'


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    keys = []
    for number, (name, value) in enumerate(entries, 1):
        back = colour(name)
        swatch = f'<i class="okm-key" style="font-style:normal;background:{back};color:{ink_on(back)}">{number}</i>'
        keys.append(f"<span>{swatch} {escape(name)} <b>{escape(value)}</b></span>")
    return f'<div class="okm-legend">{" ".join(keys)}</div>'


def _loss(figures: Figures, ident: str, drawn: Callable[[str], str], *, is_last: bool) -> str:
    names = [("", BLUE, "training, running mean in bold" if figures.loss_trend else "training")]
    names += [(" okm-other", VERMILION, "evaluation")] if figures.evaluations else []
    keys = (f'<span><b class="okm-stroke{kind}" style="color:{ink}">━</b> {name}</span>' for kind, ink, name in names)
    legend = f'<div class="okm-legend">{" ".join(keys)}</div>'
    linear = f'<div class="okm-linear">{drawn(loss_chart(figures, ident))}</div>'
    title = _title("Loss", "by step")
    if min(loss for _, loss in (*figures.loss_curve, *figures.evaluations)) <= 0:
        return title + legend + linear
    other = drawn(loss_chart(figures, f"{ident}g", logarithmic=True))
    if is_last:
        return f'{title}{legend}{linear}<details class="okm-fold"><summary>{_SWITCHES[0][1]}</summary>{other}</details>'
    return f'{title}{legend}{linear}<div class="okm-log">{other}</div>'


def _memory(tier: Memory, ident: str, drawn: Callable[[str], str]) -> str:
    legend = _legend((name, format_bytes(size)) for name, size in tier.parts)
    return _title(tier.name, words.memory(tier)) + drawn(memory_chart(tier, ident)) + legend


def _phases(figures: Figures, ident: str, drawn: Callable[[str], str]) -> str:
    said = filter(None, (words.slowdown(figures), words.received(figures)))
    sentences = "".join(f'<div class="okm-words">{escape(words.unbroken(sentence))}</div>' for sentence in said)
    if not figures.split:
        return sentences
    step = "" if figures.step_seconds is None else format_seconds(figures.step_seconds)
    shown = tuple(part for part in figures.split if part[1] > 0)
    legend = _legend((name, format_seconds(seconds)) for name, seconds in shown)
    title = _title("Step", f"{step}: computing, waiting, and what was busy meanwhile")
    return f'<div class="okm-step">{title}{legend}{drawn(step_chart(shown, figures.beside, ident))}</div>{sentences}'
