"""How a step grows: seconds at 1,280 to 81,920 tokens a step, on the GPU alone and with offloadkit by its own plan.

    python -m benchmarks.growth --out growth.json                               # every model, size and engine
    python -m benchmarks.growth --out growth.json --engine planned --compile    # more rows into the same file
    python -m benchmarks.growth --chart growth.json growth.png

A step has 2, 8 or 32 samples of 512+128 tokens, as one micro-batch, or 128 as four of 32. "reached" is the bound over
the traced steps; in it, what Python takes to start operations counts as computing.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.run import Row, git_commit, run_aloud, write_results
from offloadkit.comparing import words

T5 = {"tokens": 512, "target_tokens": 128}
SHAPES = {"t5-large": T5, "t5-3b": T5, "t5-tiny": {"tokens": 16, "target_tokens": 8}}
VRAM_GIB = {"t5-large": 8.0, "t5-3b": 24.0, "t5-tiny": 2.0}
"""offloadkit's budget."""
MICRO_BATCH = 32
"""Most samples of one; a larger step has several."""
CHECKPOINTED = {("gpu", "t5-3b", 32)}
"""Baseline, model and micro-batch where activations are recomputed: kept, they would take all of a card of 140 GiB."""
ENGINES = ("gpu", "gpu-ours", "planned")
SERIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpu": ("on the GPU, plain HuggingFace", {"color": "#8c8c8c", "marker": "s", "linestyle": "--"}),
    "gpu-ours": ("on the GPU, offloadkit's compute", {"color": "#e69f00", "marker": "^", "linestyle": "--"}),
    "planned": ("offloadkit", {"color": "#0072b2", "marker": "o", "linestyle": "-"}),
    "planned compiled": ("offloadkit, compiled blocks", {"color": "#009e73", "marker": "D", "linestyle": "-"}),
}
"""Of the chart: name and looks. Colours are Okabe and Ito's."""
BLOCKS = {"planned": "eager", "planned compiled": "compiled"}


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run what is asked for, writing the result file after each run, or draw one; print the table, return the rows."""
    options = parse(arguments)
    if options.chart:
        draw(rows := read_rows(options.chart[0]), options.chart[1])
    else:
        rows = read_rows(options.out) if options.out and options.out.exists() else []
        options.commit = options.commit or git_commit()  # now: the result file itself makes the tree dirty
        for task in tasks(options):
            row = run_aloud(f"{task['engine']}: {task['work']}", task, options)
            row |= {"commit": options.commit, "gpu": row.get("machine", {}).get("gpu")}
            rows = [other for other in rows if key_of(other) != key_of(row)] + [row]
            options.out = write_results(options, rows)
    print(*table(rows), sep="\n")
    return rows


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["t5-large", "t5-3b"])
    of_a_step = "of a step (default: %(default)s)"
    parser.add_argument("--samples", nargs="+", type=int, default=[2, 8, 32, 128], help=of_a_step)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--compile", action="store_true", help="compile offloadkit's repeated blocks")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one run")
    parser.add_argument("--out", type=Path, help="result file; its other rows stay (default: a new one in results)")
    parser.add_argument("--commit", help="commit to write down where git is missing")
    parser.add_argument("--verbose", action="store_true", help="show what the engines print")
    parser.add_argument("--chart", nargs=2, type=Path, metavar=("FILE", "PICTURE"), help="draw a result file instead")
    options = parser.parse_args(arguments)
    for samples in options.samples:
        if samples < 1 or (samples > MICRO_BATCH and samples % MICRO_BATCH):
            parser.error(f"--samples are 1 to {MICRO_BATCH} or a multiple of {MICRO_BATCH}, got {samples}")
    options.mode, options.model = "growth", "-".join(options.models)
    return options


def tasks(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs, small steps first."""
    found = []
    for model in options.models:
        for samples in options.samples:
            batch_size = min(samples, MICRO_BATCH)
            work = {"model": model, **SHAPES[model], "batch_size": batch_size, "accumulation": samples // batch_size}
            work |= {"cores": 0, "steps": options.steps}
            ours = {"vram_budget_gib": VRAM_GIB[model], "compile_blocks": options.compile}
            for name in options.engine:
                alone = {"checkpointing": (name, model, batch_size) in CHECKPOINTED}
                found.append({"mode": "growth", "engine": name, "work": work | (ours if name == "planned" else alone)})
    return found


def read_rows(path: Path) -> list[Row]:
    """The rows of a result file, each with the file's machine and versions.

    Raises:
        SystemExit: it is no result file of this benchmark.
    """
    if not path.is_file():
        raise SystemExit(f"there is no file {path}: name a result file of benchmarks.growth")
    result: Any = None
    with suppress(OSError, ValueError):
        result = json.loads(path.read_text())
    if not isinstance(result, dict) or result.get("mode") != "growth":
        raise SystemExit(f"{path} is no result file of benchmarks.growth: name one that it wrote")
    return [{key: result[key] for key in ("machine", "versions")} | row for row in result["rows"]]


def key_of(row: Row) -> tuple[str, str, int]:
    """A key of `SERIES`, model and tokens a step: a run that has them replaces the one before."""
    work = row["work"]
    tokens = work["accumulation"] * work["batch_size"] * (work["tokens"] + work["target_tokens"])
    return row["engine"] + " compiled" * bool(work.get("compile_blocks")), work["model"], tokens


def table(rows: list[Row]) -> list[str]:
    """A line for each model, step and way of offloading; what failed below."""
    measured = {key_of(row): row for row in rows if "failed" not in row}
    lines, header = [], ["model", "tokens", "GPU plain, s", "our compute, s", "offloadkit, s", "blocks"]
    header += ["x plain", "x our compute", "bound, s", "reached"]

    def said(row: Row | None) -> str:
        return "-" if row is None else "*" * bool(row["work"].get("checkpointing")) + f"{row['step_seconds']:.3f}"

    for model, tokens in sorted({key[1:] for key in measured}):
        alone = [measured.get((name, model, tokens)) for name in ("gpu", "gpu-ours")]
        offloaded = [(blocks, measured.get((name, model, tokens))) for name, blocks in BLOCKS.items()]
        for blocks, row in [pair for pair in offloaded if pair[1]] or [("-", None)]:
            cells = [model, f"{tokens:,}", *map(said, (*alone, row)), blocks]
            if row:
                seconds, least = row["step_seconds"], row.get("bound_seconds")
                cells += [f"{seconds / baseline['step_seconds']:.2f}" if baseline else "-" for baseline in alone]
                cells += [f"{least:.3f}", f"{least / row['traced_step_seconds']:.0%}"] if least else ["-", "-"]
            lines.append(cells + ["-"] * (len(header) - len(cells)))
    failed = [f"{' '.join(map(str, key_of(row)))}: {row['failed']}" for row in rows if "failed" in row]
    starred = ["* with activation checkpointing"] * any(row["work"].get("checkpointing") for row in measured.values())
    return [*words.text_table(header, lines, 1), *starred, *failed]


def draw(rows: list[Row], path: Path) -> None:
    """A panel a model: seconds a step against its tokens, both logarithmic; beside them the slowdown.

    Raises:
        SystemExit: nothing was measured, or the picture cannot be written.
    """
    from offloadkit.comparing.figures import INK, QUIET, Chart

    measured = [row for row in rows if "failed" not in row]
    if not measured:
        raise SystemExit("no row of the file was measured, so there is nothing to draw: run the benchmark again")
    models = list(dict.fromkeys(row["work"]["model"] for row in measured))
    figure = Chart(figsize=(max(6.4, 1 + 3.1 * len(models)), 4.2), layout="constrained", facecolor="white")
    panels: Any = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        _panel(axes, model, [row for row in measured if row["work"]["model"] == model])
    low, high = panels[0].get_ylim()
    ticks = [seconds for seconds in words.ROUND_SECONDS if low <= seconds <= high]
    panels[0].set_ylabel("time a step", fontsize=9, color=QUIET)
    panels[0].set_yticks(ticks, [words.duration(seconds) for seconds in ticks])
    shown = {text: line for axes in panels for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown, loc="outside upper left", ncols=2, fontsize=9, frameon=False, labelcolor=INK)
    gpus = ", ".join(sorted({str(row["gpu"]) for row in measured}))
    note = f"tokens a step, {gpus}\n×: times as long as on the GPU with offloadkit's compute"
    if any(row["work"].get("checkpointing") for row in measured):
        note += "; *: activations recomputed"
    figure.supxlabel(note, fontsize=9, color=QUIET)
    try:
        figure.savefig(path, dpi=200)
    except (OSError, ValueError) as error:  # no such folder; a kind of picture that matplotlib does not know
        raise SystemExit(f"the chart cannot be written to {path}: {error}") from None


def _panel(axes: Any, model: str, rows: list[Row]) -> None:
    found = {key_of(row)[::2]: row for row in rows}
    sizes = sorted({tokens for _, tokens in found})
    axes.set(xscale="log", yscale="log")
    axes.margins(x=0.17, y=0.13)
    for name, (label, looks) in SERIES.items():
        points = [(tokens, found[name, tokens]["step_seconds"]) for tokens in sizes if (name, tokens) in found]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, markersize=5, linewidth=1.8, zorder=3, **looks)
        for tokens, seconds in points:
            if found[name, tokens]["work"].get("checkpointing"):
                axes.annotate("*", (tokens, seconds), (6, -3), textcoords="offset points", color=looks["color"])
            elif name in BLOCKS and (baseline := found.get(("gpu-ours", tokens))):
                heights = [row["step_seconds"] for (_, where), row in found.items() if where == tokens]
                text = f"{seconds / baseline['step_seconds']:.2f}×"
                _beside(axes, text, tokens, heights, looks["color"], above=name == "planned")
    axes.set_title(model, loc="left", fontsize=11)
    axes.set_xticks(sizes, [f"{tokens:,}" for tokens in sizes], fontsize=9)
    axes.tick_params(axis="y", labelsize=9)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee", zorder=0)


def _beside(axes: Any, text: str, tokens: int, heights: list[float], colour: str, *, above: bool) -> None:
    """Above every curve, or below, where rising curves leave room."""
    place, offset = (tokens, max(heights) if above else min(heights)), (3, 6) if above else (-3, -6)
    sides = {"ha": "right", "va": "bottom"} if above else {"ha": "left", "va": "top"}
    axes.annotate(text, place, offset, textcoords="offset points", fontsize=9, color=colour, **sides)


if __name__ == "__main__":
    main()
