"""The figures as a piece of HTML with inline SVG: no script, nothing fetched, light and dark as the notebook is."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from offloadkit.monitor import words
from offloadkit.monitor.colours import colour, ink_on
from offloadkit.monitor.figures import Figures, Memory
from offloadkit.monitor.svg import loss_chart, memory_chart, step_chart
from offloadkit.plan import format_bytes
from offloadkit.plan.text import format_seconds

_LIGHT = "--okm-ink:#1f2328;--okm-faint:#57606a;--okm-page:#ffffff;--okm-edge:#d0d7de;--okm-line:#0072B2"
_DARK = "--okm-ink:#e6e8eb;--okm-faint:#a9b1ba;--okm-page:#1b1f24;--okm-edge:#3d444d;--okm-line:#56B4E9"
_IS_LIGHT = ('[data-jp-theme-light="true"]', "body.vscode-light", 'html[theme="light"]')
_IS_DARK = ('[data-jp-theme-light="false"]', "body.vscode-dark", "body.vscode-high-contrast", 'html[theme="dark"]')


def _themed(themes: Iterable[str], colours: str) -> str:
    return ",".join(f"{theme} .okm" for theme in themes) + "{" + colours + "}"


# JupyterLab, VS Code and Colab say which theme they have; elsewhere the system does.
STYLE = "".join(
    [
        ".okm{" + _LIGHT + "}@media(prefers-color-scheme:dark){.okm{" + _DARK + "}}",
        _themed(_IS_LIGHT, _LIGHT),
        _themed(_IS_DARK, _DARK),
        (
            ".okm{color:var(--okm-ink);background:var(--okm-page);border:1px solid var(--okm-edge);"
            "border-radius:8px;box-sizing:border-box;max-width:760px;padding:12px 16px 14px;"
            "font:13px/1.45 system-ui,sans-serif}"
        ),
        ".okm *{box-sizing:border-box}",
        ".okm svg{margin:5px 0 0;overflow:visible}",
        ".okm .okm-line{stroke:var(--okm-line)}",
        ".okm .okm-dot{fill:var(--okm-line)}",
        ".okm .okm-head{display:flex;flex-wrap:wrap;gap:2px 14px;align-items:baseline}",
        ".okm .okm-head b{font-size:15px}",
        ".okm .okm-faint{color:var(--okm-faint)}",
        ".okm .okm-way{height:6px;border-radius:3px;background:var(--okm-edge);margin:6px 0 10px;overflow:hidden}",
        ".okm .okm-done{height:100%;background:var(--okm-line)}",
        (
            ".okm .okm-tiles{display:flex;flex-wrap:wrap;gap:8px 0;border-bottom:1px solid var(--okm-edge);"
            "padding-bottom:10px}"
        ),
        ".okm .okm-tile{flex:1 1 105px;min-width:105px;padding-right:8px}",
        ".okm .okm-tile b{display:block;font-size:20px;line-height:1.3;font-variant-numeric:tabular-nums}",
        ".okm .okm-tile span{display:block;font-size:12px;color:var(--okm-faint)}",
        ".okm .okm-title{margin:14px 0 2px}",
        ".okm .okm-title b{margin-right:8px}",
        ".okm .okm-legend{display:flex;flex-wrap:wrap;gap:3px 14px;font-size:12px;margin-top:4px}",
        ".okm .okm-legend span{white-space:nowrap}",
        (
            ".okm .okm-key{display:inline-block;min-width:16px;height:16px;line-height:16px;border-radius:3px;"
            "margin-right:5px;text-align:center;font-size:11px;font-weight:600}"
        ),
        ".okm .okm-words{margin:4px 0 0}",
    ]
)


def page(figures: Figures, ident: str, note: str = "") -> str:
    """Everything, as one HTML element with its style in it.

    Args:
        ident: unique among the monitors on the page: letters and digits.
        note: plain text below all else.
    """
    sections = [_head(figures), _tiles(figures)]
    sections += [_memory(tier, f"{ident}-m{number}") for number, tier in enumerate(figures.memory)]
    if figures.split:
        sections.append(_step(figures, f"{ident}-s"))
    sections.append(f'<div class="okm-words">{escape(words.unbroken(words.slowdown(figures)))}</div>')
    if len(figures.loss_curve) > 1:
        newest = "" if figures.loss is None else f"{figures.loss:.4g}"
        sections.append(
            _title("Loss", f"{newest}, running mean in bold" if figures.loss_trend else f"{newest} by step")
        )
        sections.append(loss_chart(figures, f"{ident}-l"))
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
