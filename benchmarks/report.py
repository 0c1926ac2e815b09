"""docs/results.md, the README's marked parts and the chart, all from the table: `python -m benchmarks report`.

A marked part of the README stands between `<!-- figures:NAME -->` and `<!-- /figures -->`. NAME is a key of `PARTS`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any

from benchmarks import table
from benchmarks.cases import CASES, ENGINES, GIB, HUB_NAMES, WHOLE_RUN, ZERO2
from benchmarks.rank_cases import RANK_CASES, RANK_ENGINES
from benchmarks.table import BY_WIDTH, Row, latest
from offloadkit.planner.phases import PHASES, Phase, differing

ROOT = Path(__file__).parent.parent
README, RESULTS = ROOT / "README.md", ROOT / "docs" / "results.md"
CHARTS = {"light": ROOT / "docs" / "t5-3b.png", "dark": ROOT / "docs" / "t5-3b-dark.png"}
CHART_CASE, CARD_GIB = "w1", 24
_INK = {"light": ("black", "white"), "dark": ("#e6edf3", "#0d1117")}
"""Text and background of GitHub's pages."""
WITHIN = 0.15
"""Largest relative error of a step that counts as planned right."""
BEFORE_STREAMED_STATES = ("c9fd74b", "d6b17f7", "31ba1b9")
"""Commits whose engine stepped all states in RAM on the CPU, with plans for that engine."""

_TITLES = {
    "W1": "T5-3B on a card of 24 GB",
    "W2": "T5-3B with larger batches on a card of 16 GB",
    "W3": "T5-3B on a card of 6 GB",
    "W4": "T5-3B with gradient accumulation",
    "W5": "T5-3B with two CPU cores",
    "W6": "A Llama of 3.2 G parameters on cards of 24 and 48 GB",
    "W7": "The same Llama with larger batches on a card of 24 GB",
    "rate": "At the card's rate: T5 of middle size, and decoders with many tokens an update",
    "cheap": "Matmuls kept and the rest recomputed, or all recomputed: the same Llama on a card with 64 GiB free",
    "muon": "Muon and AdamW on a card of 24 GB",
    "lora": "LoRA of a Llama of 8 G parameters on cards of 6, 10 and 24 GB",
    "any": "A loop over Whisper, vision-language models, an encoder and experts",
    "long": "One row of 65,536 or 131,072 tokens",
    "largest": "30 and 32 G parameters on one H200 with 128 GiB of RAM, without a disk",
    "doors": "The same work through every door",
    "growth": "How a step grows with the batch",
    "blog": "Every engine within a consumer card",
    "fit": "Will it fit?",
}
GRAPHS = "2026-11-28"
"""Rows of earlier dates ran no blocks as CUDA graphs."""
GRAPHED = "since blocks run as CUDA graphs"
NEWEST = "of these, the newest row of each case, engine and kind of GPU"
STREAMED, OLDER = "since states stream through VRAM", "before the GPU stepped states from RAM"


def write() -> None:
    """Write docs/results.md, the README's marked parts and the charts."""
    rows = table.read()
    RESULTS.write_text(results(rows))
    README.write_text(filled(README.read_text(), rows))
    for theme, path in CHARTS.items():
        draw_chart(rows, path, theme)
    print("written:", *(path.relative_to(ROOT) for path in (RESULTS, README, *CHARTS.values())))


def results(rows: Sequence[Row]) -> str:
    """The text of docs/results.md."""
    parts = (_sections(rows), several_gpus(rows), _score(rows), starts(rows), _others(rows))
    return "\n".join([_INTRODUCTION, *chain.from_iterable(parts)]).rstrip() + "\n"


def filled(text: str, rows: Sequence[Row]) -> str:
    """`text` with each marked part replaced.

    Raises:
        KeyError: a part is none of `PARTS`.
    """

    def part(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in PARTS:
            raise KeyError(f"no figures {name!r}: choose of {', '.join(PARTS)}")
        return f"<!-- figures:{name} -->\n" + "\n".join(PARTS[name](rows)) + "\n<!-- /figures -->"

    return re.sub(MARKED, part, text, flags=re.DOTALL)


MARKED = r"<!-- figures:(?P<name>[\w-]+) -->\n(?P<body>.*?)<!-- /figures -->"


_INTRODUCTION = """# Results

`python -m benchmarks report` writes this page from `benchmarks/results.csv`; `python -m benchmarks run CASE` measures a
case again ([how](../benchmarks/README.md)).

- Every engine runs alone in a fresh process, from random weights, with clipping at 1.0. offloadkit keeps to the budget
  in the heading; the other engines have the whole card. An engine recomputes activations only if it must to fit.
- *turns* is the number of processes. After several turns, the table shows the median, with minimum and maximum.
- *VRAM* is the device memory of the process (NVML), *allocated* the peak of torch's allocator, *RAM* the peak of
  resident memory, all in GiB.
- *x HF* and *x ours* are ratios to everything on the GPU, computed by HuggingFace's code or by offloadkit's kernels;
  "-" if that commit and day has no such row.
- *ragged* rows have a quarter of the full length to all of it, and an attention mask. They are sorted and padded as
  `finetune` does it. Their planned seconds assume full rows.
- Rows up to `e70d484` have fewer warm-up steps, and HF's gradients in fp32.
"""


def _sections(rows: Sequence[Row]) -> Iterator[str]:
    for claim, title in _TITLES.items():
        names = [name for name, case in CASES.items() if case.claim == claim]
        found = [row for name in names for row in rows_of_case(rows, name)]
        if not found:
            continue
        yield f"## {title}\n"
        if claim == "fit":
            yield from fit(rows)
        elif claim == "doors":
            yield _DOORS
            yield from _one_table(found, ("case", "model"))
            yield from phase_table([row for row in found if "peaks" in (row["figures"] or {})])
        elif claim in ("growth", "rate"):
            yield from _one_table(found, ("model",))
        elif claim == "blog":
            for card in dict.fromkeys((CASES[name].vram, CASES[name].ram) for name in names):
                yield f"**On a card of {card[0]:g} GiB with {card[1]:g} GiB of RAM**\n"
                yield from _one_table(
                    [row for row in found if (CASES[row["case"]].vram, CASES[row["case"]].ram) == card], ("model",)
                )
        else:
            for name in names:
                if of_case := rows_of_case(rows, name):
                    yield from _case_table(
                        name, of_case, [row for row in rows if row["case"] == name.removesuffix("-ragged")]
                    )
        yield ""


def rows_of_case(rows: Sequence[Row], case: str) -> list[Row]:
    """The newest row of each engine of a case, in the order of the engines; for ZeRO-2 the fastest bucket size."""
    found = [row for engine in ENGINES if (row := latest(rows, case, engine))]
    refused = [
        row
        for row in rows
        if row["case"] == case and row["status"] == "does not fit" and latest(rows, case, row["engine"]) is None
    ]
    zero2 = [row for row in found if row["engine"] in ZERO2]
    newest = [row for row in zero2 if row["commit"] == max(zero2, key=lambda each: str(each["date"]))["commit"]]
    best = min(newest, key=lambda row: row["seconds"], default=None)
    return [row for row in found if row["engine"] not in ZERO2 or row is best] + refused


_DOORS = """Whole trainings: weights from a folder, rows of text, and a budget. Seconds are the time between updates.
"""

_SAME_RUN = ("engine", "commit", "gpu", "cores")
"""Columns that must be equal in rows that are compared."""


def _case_table(name: str, rows: Sequence[Row], full: Sequence[Row]) -> Iterator[str]:
    """The table of a case.

    Args:
        full: for a case with ragged rows, all rows of the same case with full rows.
    """
    case, first = CASES[name], rows[0]
    budget = f", offloadkit within {case.vram:g} GiB of VRAM" if case.vram else ""
    kind = ", ragged" if case.mask == "ragged" else ""
    cores = f", {case.cores} CPU cores" if case.cores else ""
    size = next((f" ({row['num_parameters'] / 1e9:.2f} G parameters)" for row in rows if row["num_parameters"]), "")
    yield f"**{name}**: {first['model']}{size}, {case.shape} tokens a step{kind}{budget}{cores}.\n"
    yield from _one_table(rows, ())
    yield from width_table([row for row in rows if BY_WIDTH in (row["figures"] or {})], full)


_OF_RANKS = """## Several GPUs

One process per GPU. *rows* and *VRAM* are per GPU, *tokens/s* and *RAM* the sum over all GPUs; shared RAM counts once.
*received* is what one GPU receives from its peers in an optimizer step. *before* lists the seconds of earlier commits,
on other hosts: compare within a run only. "strong": the batch of one GPU, divided. "pcie": NCCL copies through RAM.
"hashed": deterministic kernels, and one GPU takes the micro-batches of both. The peers have the whole cards, except for
LLaMA-7B, where every engine has 80 GiB, or 77 on an H100.
"""

_OF_RUN = """Rows are per GPU. *scaling* is tokens/s divided by the tokens/s of one GPU with the same budget; it exceeds
the number of GPUs if they offload or recompute less. 80 GiB are 77 on an H100.
"""

_OF_TRACES = """Traced steps, in seconds of rank 0's GPU. *computing* is kernels other than NCCL's, *only NCCL* has no
such kernel beside it, *only copies* no kernel, and *idle* nothing. The four add up to the step, which the profiler
makes longer. *NCCL* includes waiting for other ranks. *at the link's rate* is the received bytes divided by the link's
rate, measured on idle GPUs. *main thread* and *all threads* are CPU time of rank 0, measured without the profiler. The
main thread launches forward; autograd's thread launches backward.
"""


_RAM_OF_RANK = 3 << 30
"""RAM that each rank may take beyond one rank's plan."""

_OF_LIMITS = """Limits of a step: the fraction of its time for which it needs each part of the machine, at rates that
the ranks measured together. *link*: received bytes. *bus*: copies of a GPU in the busier direction. *DRAM*: bytes of
the CPU step and of copies. *host cores*: CPU time of all ranks over all cores. *Python*: CPU time of the main thread
and of autograd's thread, which take turns. Forward with its update and backward have different limits, so the largest
fraction may be well below 1.
"""


def several_gpus(rows: Sequence[Row]) -> Iterator[str]:
    """All cases on several GPUs: a table for each GPU name, one for cases that fit nowhere, and one for each run on
    more than two GPUs (`_run_table`). They show the newest row, and the seconds of older rows."""
    named = [name for name, case in RANK_CASES.items() if case.claim != "try"]
    measured = [row for row in rows if row["case"] in named and row["status"] == "measured"]
    runs = dict.fromkeys(_run(row) for row in measured if RANK_CASES[row["case"]].num_gpus > 2)
    tables: dict[str, list[Row]] = {}
    lacking: list[Row] = []
    for case, engine in product(named, RANK_ENGINES):
        its_rows = [row for row in measured if (row["case"], row["engine"]) == (case, engine)]
        for gpu in dict.fromkeys(row["gpu"] for row in its_rows):
            if alone := [row for row in its_rows if row["gpu"] == gpu and _run(row) not in runs]:
                *before, newest = alone
                told = newest | {"before": ", ".join(f"{row['seconds']:.3f}" for row in before)}
                tables.setdefault(gpu.removeprefix("NVIDIA "), []).append(told)
        if not its_rows:
            refused = [row for row in rows if (row["case"], row["engine"]) == (case, engine)]
            lacking += [row for row in refused if row["status"] == "does not fit"][-1:]
    if lacking:
        tables["What did not fit"] = lacking
    if tables or runs:
        yield _OF_RANKS
    for title, found in tables.items():
        yield f"**{title}**\n"
        yield from _rank_table(found)
    for run in runs:
        of_run = {(row["case"], row["engine"]): row for row in measured if _run(row) == run}
        yield from _run_table([of_run[pair] for pair in product(named, RANK_ENGINES) if pair in of_run])


def _run(row: Row) -> tuple[Any, ...]:
    """The machine and commit of a run on several GPUs."""
    return row["gpu"], row["cores"], row["commit"]


def _run_table(found: Sequence[Row]) -> Iterator[str]:
    """A run on one to N GPUs of one machine: the same work side by side, then the bounds of the traced steps."""
    most = max(RANK_CASES[row["case"]].num_gpus for row in found)
    yield f"**1 to {most} GPUs of one machine**: {_origin(found[0])}\n"
    yield _OF_RUN
    titles = ["model and rows", "VRAM for each", "GPUs", "engine", "s/step", "planned s", "tokens/s", "scaling"]
    titles += ["VRAM each", "planned VRAM", "RAM", "planned RAM", "received, GB"]
    yield _line(titles)
    yield _line(["---"] * len(titles))
    works: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        case = RANK_CASES[row["case"]]
        works.setdefault((row["model"], case.shape, case.vram), []).append(row)
    for (model, shape, vram), its_rows in works.items():
        for row in sorted(its_rows, key=lambda each: RANK_CASES[each["case"]].num_gpus):
            number = RANK_CASES[row["case"]].num_gpus
            alone = [other for other in its_rows if other["figures"]["GPUs"] == 1]
            speed, received = row["tokens"] / row["seconds"], sum(row["figures"]["received"].values())
            cells = [f"{model}, {shape}", f"{vram:g} GiB" if vram else "the card", str(number), _rank_engine(row)]
            cells += [seconds_of(row), _planned_seconds(row)]
            cells += [f"{speed:,.0f}", f"{speed * alone[0]['seconds'] / alone[0]['tokens']:.2f}" if alone else "-"]
            sizes = ("vram_bytes", "planned_vram_bytes", "ram_peak_bytes", "planned_ram_bytes")
            cells += [_gib(row[size]) for size in sizes]
            yield _line([*cells, f"{received / 1e9:.2f}" if received else "-"])
    yield ""
    yield from _plan_of_run(works.values())
    yield from _notes(found, lambda row: f"*{row['case']}*")
    yield from _trace_table([row for row in found if "traced" in row["figures"] and row["rates"]])  # peers have none


def _plan_of_run(works: Collection[Sequence[Row]]) -> Iterator[str]:
    """How right the plans of a run were. `works`: the rows of each piece of work, on any number of GPUs."""
    ours = [[row for row in rows if row["planned_seconds"]] for rows in works]
    planned = [row for rows in ours for row in rows]
    if not planned:
        return
    seconds, vram = (
        sum(abs(row[f"planned_{name}"] / row[name] - 1) <= bound for row in planned)
        for name, bound in (("seconds", WITHIN), ("vram_bytes", 0.05))
    )
    said = f"{seconds} of {len(planned)} steps took the planned seconds within 15 %, "
    said += f"{vram} the planned VRAM within 5 %."
    above = [
        row["ram_peak_bytes"] - alone["planned_ram_bytes"] - row["figures"]["GPUs"] * _RAM_OF_RANK
        for rows in ours
        for alone in rows
        for row in rows
        if alone["figures"]["GPUs"] == 1 < row["figures"]["GPUs"]
    ]
    if above:
        most = max(above)
        where = f"at most {_gib(most)} GiB above" if most > 0 else f"at least {_gib(-most)} GiB below"
        said += f" RAM of several ranks was {where} one rank's planned RAM plus 3 GiB a rank."
    yield from (said, "")


def _trace_table(found: Sequence[Row]) -> Iterator[str]:
    if not found:
        return
    yield _OF_TRACES
    shown = ("traced step", "computing", "only NCCL", "only copies", "idle", "NCCL", "H2D", "D2H")
    shown += ("main thread", "all threads")
    titles = [*shown[:6], "at the link's rate", *shown[6:], "H2D, GB"]
    yield _line(["seconds", *titles])
    yield _line(["---"] * (1 + len(titles)))
    for row in found:
        traced = row["figures"]["traced"]
        cells = [f"{traced[name]:.3f}" for name in shown]
        cells.insert(6, f"{_seconds_at_link(row):.3f}")
        yield _line([row["case"], *cells, f"{traced['H2D bytes'] / 1e9:.1f}"])
    yield ""
    yield _OF_LIMITS
    shares = [limits(row) for row in found]
    yield _line(["fraction of the step", *shares[0]])
    yield _line(["---"] * (1 + len(shares[0])))
    for row, share in zip(found, shares, strict=True):
        yield _line([row["case"], *("-" if each is None else f"{each:.2f}" for each in share.values())])
    yield ""


def limits(row: Row) -> dict[str, float | None]:
    """How much of a traced step needs each part of the machine at its measured rate, as a fraction.

    None where a row lacks a figure: rows of 95456de have no CPU time of autograd's thread.
    """
    figures, rates = row["figures"], row["rates"]
    traced, moved = figures["traced"], figures["bytes moved in the last step"]
    step, num_ranks = traced["step"], RANK_CASES[row["case"]].num_gpus
    on_bus = max(traced[f"{way} bytes"] / rates[f"{way.lower()}_bytes_per_second"] for way in ("H2D", "D2H"))
    in_dram = sum(moved[name] for name in ("cpu_step", "h2d", "d2h")) / rates["cpu_and_bus_bytes_per_second"]
    backward = traced.get("autograd's thread")
    return {
        "computing": traced["computing"] / traced["traced step"],
        "link": _seconds_at_link(row) / step,
        "bus": on_bus / step,
        "DRAM": in_dram / step,
        "host cores": num_ranks * traced["all threads"] / (row["cores"] * step),
        "Python": None if backward is None else (traced["main thread"] + backward) / step,
    }


def _seconds_at_link(row: Row) -> float:
    received, rate = sum(row["figures"]["received"].values()), row["rates"]["link_bytes_per_second"]
    return received / rate if received else 0.0


def _rank_engine(row: Row) -> str:
    title = RANK_ENGINES[row["engine"]].title
    return f"{title}, activations recomputed" if row["recomputed"] else title


def _rank_table(found: Sequence[Row]) -> Iterator[str]:
    titles = ["case", "model", "rows", "engine", "s/step", "before", "turns", "tokens/s", "VRAM each", "RAM"]
    titles += ["received, GB", "planned s", "planned VRAM", "planned RAM", "measured by"]
    yield _line(titles)
    yield _line(["---"] * len(titles))
    for row in found:
        case, figures = RANK_CASES[row["case"]], row["figures"] or {}
        shape = replace(case, batch_size=row["batch_size"]).shape
        cells = [row["case"], row["model"], f"{case.num_gpus} x {shape}", _rank_engine(row)]
        if row["status"] == "measured":
            received = sum(figures["received"].values())
            cells += [seconds_of(row), row["before"] or "-", str(row["turns"])]
            cells += [f"{row['tokens'] / row['seconds']:,.0f}", _gib(row["vram_bytes"]), _gib(row["ram_peak_bytes"])]
            cells += [f"{received / 1e9:.2f}" if received else "-"]
            cells += [_planned_seconds(row)]
            cells += [_gib(row["planned_vram_bytes"]), _gib(row["planned_ram_bytes"])]
        else:
            cells += [str(row["reason"]), *[""] * 9]
        yield _line([*cells, _origin(row)])
    yield ""
    yield from _notes(found, lambda row: f"*{row['case']}, {RANK_ENGINES[row['engine']].title}*")
    hashes = {row["case"]: row["figures"]["weights"] for row in found if "weights" in (row["figures"] or {})}
    if len(hashes) > 1:
        verdict = "the same trained weights, bit for bit" if len(set(hashes.values())) == 1 else "DIFFERENT weights"
        yield from (f"{' and '.join(hashes)}: {verdict}.", "")


def width_table(rows: Sequence[Row], full: Sequence[Row]) -> Iterator[str]:
    """Seconds of steps by the width of their inputs. "x full" is the ratio to the engine's step with full rows.

    Args:
        full: all rows of the case with full rows.
    """
    if not rows:
        return
    by_width = [row["figures"][BY_WIDTH] for row in rows]
    widths = sorted({int(name) for found in by_width for name in found if name != "slowest"})
    titles = ["seconds by width", "x full", *map(str, widths), "slowest step"]
    yield _line(titles)
    yield _line(["---"] * len(titles))
    for row, found in zip(rows, by_width, strict=True):
        same = [other for other in full if other["seconds"] and all(other[key] == row[key] for key in _SAME_RUN)]
        shown = [found.get(str(name)) for name in (*widths, "slowest")]
        cells = [f"{row['seconds'] / same[-1]['seconds']:.2f}" if same else "-"]
        yield _line([ENGINES[row["engine"]].title, *cells, *("-" if each is None else f"{each:.3f}" for each in shown)])
    yield ""


def phase_table(rows: Sequence[Row]) -> Iterator[str]:
    """Measured and planned peaks of each phase of whole runs; then the peaks of all rows that the plan missed."""
    whole = [row for row in rows if row["engine"] in WHOLE_RUN]
    names = [name for name in PHASES if any(name in row["figures"]["peaks"] for row in whole)]
    titles = ["peak in GiB, measured / planned", *names]
    yield _line(titles)
    yield _line(["---"] * len(titles))
    for row in whole:
        peaks, planned = row["figures"]["peaks"], row["figures"]["phases"]
        for tier in ("vram", "ram"):
            cells = [
                f"{_gib(peaks[name].get(tier))} / {_gib(planned[name][tier])}" if name in peaks else "-"
                for name in names
            ]
            yield _line([f"{row['case']}, {tier.upper()}", *cells])
    yield ""
    yield "Peaks that are off by more than 5 % and 0.5 GiB:\n"
    for row in rows:
        planned = row["figures"]["phases"]
        phases = [Phase(name, planned[name]["vram"], planned[name]["ram"]) for name in PHASES if name in planned]
        if words := [each.removeprefix("memory: ") for each in differing(phases, row["figures"]["peaks"])]:
            title = ENGINES[row["engine"]].title.removeprefix("offloadkit, ")
            yield f"- *{row['case']}, {title}*: {'; '.join(words)}."
    yield ""


def _one_table(rows: Sequence[Row], more: Sequence[str]) -> Iterator[str]:
    """A table of rows; machine, commit and date stand above it if all rows share them, otherwise in each row."""
    origins = list(dict.fromkeys(_origin(row) for row in rows))
    if len(origins) == 1:
        yield f"{origins[0]}.\n"
    titles = [*more, "engine", "tokens"] if more else ["engine"]
    titles += ["s/step", "tokens/s", "turns", "x HF", "x ours", "VRAM", "allocated", "RAM", "planned s"]
    titles += ["measured by"] if len(origins) > 1 else []
    yield _line(titles)
    yield _line(["---"] * len(titles))
    for row in rows:
        cells = [str(row[name]) for name in more] + [_engine(row)]
        cells += [f"{row['tokens']:,}" if row["tokens"] else "-"] if more else []
        if row["status"] == "does not fit":
            cells += [str(row["reason"]), *[""] * 8]
        else:
            speed = f"{row['tokens'] / row['seconds']:,.0f}" if row["tokens"] else "-"
            cells += [seconds_of(row), speed, str(row["turns"] or "-")]
            cells += [ratio(rows, row, kind) for kind in _BASELINES]
            cells += [_gib(row[name]) for name in ("vram_bytes", "vram_allocated_bytes", "ram_peak_bytes")]
            cells.append(_planned_seconds(row))
        cells += [_origin(row)] if len(origins) > 1 else []
        yield _line(cells)
    yield ""
    named = "case" in more
    yield from _notes(rows, lambda row: f"*{row['case'] + ', ' if named else ''}{ENGINES[row['engine']].title}*")


def _notes(rows: Sequence[Row], name: Callable[[Row], str]) -> Iterator[str]:
    """Each remark once, with the names of its rows; planned rows have none."""
    engines: dict[str, list[str]] = {}
    for row in rows:
        if row.get("notes") and row["status"] != "planned":
            engines.setdefault(row["notes"], []).append(name(row))
    for note, who in engines.items():
        which = "All" if len(who) == len(rows) else ", ".join(dict.fromkeys(who))
        yield f"- {which}: {note}."
    if engines:
        yield ""


def _engine(row: Row) -> str:
    title = ENGINES[row["engine"]].title
    more = []
    if row["recomputed"]:
        more.append("activations recomputed")
    if row["engine"].startswith("offloadkit") and row["vram_budget_bytes"]:
        more.append(f"{row['vram_budget_bytes'] / GIB:g} GiB")
    if row["precision"] not in (None, "exact"):
        more.append(row["precision"])
    if row["mask"] == "ragged":
        more.append("ragged")
    return ", ".join([title, *more])


_BASELINES = ("hf", "ours-on-gpu")


def ratio(rows: Sequence[Row], row: Row, baseline: str) -> str:
    """The step relative to the baseline's; "-" without a baseline of the same work, commit and day."""
    names = [f"{baseline}-compiled", baseline] if "compiled" in row["engine"] else [baseline]
    same = ("case", "commit", "gpu", "cores")
    for name in names:
        for other in rows:
            if other["engine"] == name and other["seconds"] and all(other[key] == row[key] for key in same):
                if str(other["date"])[:10] == str(row["date"])[:10]:
                    return f"{row['seconds'] / other['seconds']:.2f}"
    return "-"


def seconds_of(row: Row) -> str:
    """ "0.337", with "(0.331 to 0.377)" for several turns, and "planned" without a measurement."""
    text = f"{row['seconds']:.3f}"
    if row["status"] == "planned":
        return f"{text} planned"
    if (row["turns"] or 1) > 1:
        return f"{text} ({row['min_seconds']:.3f} to {row['max_seconds']:.3f})"
    return text


def _planned_seconds(row: Row) -> str:
    planned = row["planned_seconds"]
    if planned is None:
        return "-"
    least_and_most = (row["figures"] or {}).get(table.RANGE)
    said = " to ".join(f"{seconds:.3f}" for seconds in least_and_most or [planned])
    return f"{said}{table.beside_bound(row)}"


def _origin(row: Row) -> str:
    """Machine, commit and day."""
    gpu = "no GPU" if row["gpu"] == "none" else str(row["gpu"]).removeprefix("NVIDIA ")
    cores = f"{row['cores']} cores" if row["cores"] else None
    return ", ".join(filter(None, [gpu, cores, row["commit"], (row["date"] or "")[:10]]))


def _gib(number: int | None) -> str:
    return f"{number / GIB:.1f}" if number else "-"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def fit(rows: Sequence[Row]) -> Iterator[str]:
    """The table "Will it fit?": one line for each case of claim "fit"."""
    titles = ["model", "parameters, billions", "precision", "rows x tokens (input+target)", "VRAM", "RAM"]
    titles += ["s/step on an H200", "figures"]
    yield _line(titles)
    yield _line(["---"] * len(titles))
    found = [row for name, case in CASES.items() if case.claim == "fit" and (row := latest(rows, name, "offloadkit"))]
    for row in found:
        measured = row["status"] == "measured"
        vram, ram = ("vram_bytes", "ram_peak_bytes") if measured else ("planned_vram_bytes", "planned_ram_bytes")
        precision = row["precision"] if row["dtype"] == "bf16" else f"{row['precision']}, {row['dtype']}"
        cells = [HUB_NAMES.get(row["model"], row["model"]), f"{row['num_parameters'] / 1e9:.2f}", precision]
        cells += [CASES[row["case"]].shape, f"{row[vram] / GIB:.1f} GiB", f"{row[ram] / GIB:.1f} GiB"]
        yield _line([*cells, f"{row['seconds']:.2f}", row["status"]])
    yield ""
    yield "At the rates of an H200 with 16 cores. *planned*: computed, not run. VRAM is all that the process takes."
    yield from accuracy(rows)


def accuracy(rows: Sequence[Row]) -> Iterator[str]:
    """How well plans meet what was measured."""
    right, known = planned_right(planned_rows(rows)[GRAPHED], "planned_seconds", "seconds", WITHIN)
    yield (
        f"On H100s and H200s, {right} of the {known} planned steps that were also run there were within "
        f"{100 * WITHIN:.0f} %."
    )


def chart(rows: Sequence[Row]) -> Iterator[str]:
    """The README's picture, its figures in words, and their machine."""
    shown = chart_rows(rows)
    if not shown:
        yield "(not measured yet)"
        return
    case = CASES[CHART_CASE]
    bars = "; ".join(
        f"{label} {row['seconds']:.2f} s in {row['vram_bytes'] / GIB:.1f} GiB of VRAM" for label, row in shown
    )
    said = f"T5-3B, {case.shape} tokens a step: {bars}"
    yield "<picture>"
    yield f'<source media="(prefers-color-scheme: dark)" srcset="docs/{CHARTS["dark"].name}">'
    yield f'<img alt="{said}" src="docs/{CHARTS["light"].name}">'
    yield "</picture>\n"
    origins = dict.fromkeys(_origin(row | {"commit": None}) for _, row in shown)
    yield f"{_beside_the_chart(rows, shown)} {'; '.join(origins)}. [All results](docs/results.md)"


def _beside_the_chart(rows: Sequence[Row], shown: Sequence[tuple[str, Row]]) -> str:
    """Facts missing in the chart's bars: the limited engine, the cost without offloading, the number of runs."""
    said = []
    ours = next((row for label, row in shown if label == "offloadkit"), None)
    if ours and ours["vram_budget_bytes"]:
        said.append(f"offloadkit is limited to {ours['vram_budget_bytes'] / GIB:g} GiB; its peers have the whole card.")
    on_gpu = latest(_chart_run(rows), CHART_CASE, "ours-on-gpu")
    if on_gpu:
        said.append(f"Its kernels without offloading: {on_gpu['seconds']:.2f} s.")
    if all(row["turns"] == 1 for _, row in shown):
        said.append("One run each.")
    return " ".join(said)


PARTS: dict[str, Callable[[Sequence[Row]], Iterator[str]]] = {"chart": chart, "accuracy": accuracy}
"""Parts that may stand between markers in the README."""


def chart_rows(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """(label, row) of the chart's bars; for DeepSpeed the fastest bucket size."""
    by_engine = {row["engine"]: row for row in rows_of_case(_chart_run(rows), CHART_CASE) if row["seconds"]}
    zero2 = next((engine for engine in ZERO2 if engine in by_engine), "")
    labels = {"hf": "HF on the GPU", "offloadkit": "offloadkit", zero2: "DeepSpeed ZeRO-2"}
    return [(label, by_engine[engine]) for engine, label in labels.items() if engine in by_engine]


def _chart_run(rows: Sequence[Row]) -> list[Row]:
    """The rows of the newest commit with measurements for all bars, because rows of several hosts cannot be compared.
    Without such a commit, all rows."""
    of_case = [row for row in rows if row["case"] == CHART_CASE and row["status"] == "measured"]
    for commit in dict.fromkeys(row["commit"] for row in reversed(of_case)):
        run = [row for row in of_case if row["commit"] == commit]
        engines = {row["engine"] for row in run}
        if engines >= {"hf", "offloadkit"} and engines.intersection(ZERO2):
            return run
    return of_case


def digest(rows: Sequence[Row]) -> str:
    """A hash of the chart's data, kept inside the picture for the test of its age."""
    shown = [(label, row["seconds"], row["vram_bytes"], row["ram_peak_bytes"]) for label, row in chart_rows(rows)]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def draw_chart(rows: Sequence[Row], path: Path, theme: str) -> None:
    """Draw VRAM against a card of 24 GiB, with the seconds of a step next to each bar. `theme`: "light" or "dark"."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown = chart_rows(rows)
    ink, paper = _INK[theme]
    colours = {"offloadkit": "#2f81f7" if theme == "dark" else "#0072b2", "HF on the GPU": "#8c8c8c"}
    colouring = {f"{what}color": ink for what in ("text.", "axes.label", "axes.edge", "xtick.", "ytick.")}
    with rc_context({**colouring, "font.size": 11}):
        figure = Figure(figsize=(9, 2.8), layout="constrained", facecolor=paper)
        axes: Any = figure.subplots()
        axes.set_facecolor(paper)
        gib = [row["vram_bytes"] / GIB for _, row in shown]
        names = [label for label, _ in shown]
        axes.barh(names, gib, height=0.62, color=[colours.get(name, "#e69f00") for name in names])
        for place, (_, row) in enumerate(shown):
            said = f"{gib[place]:.1f} GiB, {row['seconds']:.2f} s a step"
            ends_at_line = CARD_GIB - 1 < gib[place] < CARD_GIB
            axes.annotate(
                said, (CARD_GIB if ends_at_line else gib[place], place), (6, 0), textcoords="offset points", va="center"
            )
        axes.axvline(CARD_GIB, color=ink, linestyle="--", linewidth=1.2)
        axes.annotate(
            f"{CARD_GIB} GiB",
            (CARD_GIB, 1.0),
            (0, 3),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            ha="center",
            annotation_clip=False,
        )
        axes.set_xlim(0, 1.4 * max(gib))
        axes.invert_yaxis()
        axes.xaxis.set_visible(False)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        title = f"VRAM to train T5-3B: exact AdamW, {CASES[CHART_CASE].shape} tokens a step"
        axes.set_title(title, loc="left", fontsize=12, pad=26)
        figure.savefig(path, dpi=150, metadata={"Source": digest(rows)})


def planned_rows(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Measured rows that were planned before they ran: on all GPUs for the present engine, on an H200 for earlier ones.

    Doors are left out, because one plan would count once for each door. Several GPUs have separate planned figures.
    """
    doors = {name for name, setup in ENGINES.items() if setup.is_door}
    alone = [row for row in rows if row["case"] not in RANK_CASES]
    measured = [row for row in alone if row["status"] == "measured" and row["engine"] not in doors]
    planned = [row for row in measured if row["planned_seconds"]]
    graphed = [row for row in planned if row["date"] >= GRAPHS]
    earlier = [row for row in planned if row["date"] < GRAPHS and "H200" in row["gpu"]]
    older = [row for row in earlier if row["commit"] in BEFORE_STREAMED_STATES]
    newest = list({(row["case"], row["engine"], row["gpu"]): row for row in graphed}.values())
    return {GRAPHED: graphed, NEWEST: newest, STREAMED: [row for row in earlier if row not in older], OLDER: older}


def planned_right(rows: Sequence[Row], planned: str, measured: str, within: float) -> tuple[int, int]:
    """(number of rows that were planned right within `within`, number of rows with both columns).

    Seconds of ragged rows do not count, because planned seconds are for the longest rows. Steps with a planned range
    count apart (`in_range`).
    """
    known = [row for row in rows if row[measured]]
    if measured == "seconds":
        known = [row for row in known if row["mask"] != "ragged" and table.RANGE not in (row["figures"] or {})]
    return sum(abs(row[planned] / row[measured] - 1) <= within for row in known), len(known)


def in_range(rows: Sequence[Row]) -> tuple[int, int]:
    """(number of rows whose seconds are in their planned range, number of rows with one)."""
    ranges = [(row["seconds"], row["figures"][table.RANGE]) for row in rows if table.RANGE in (row["figures"] or {})]
    return sum(least <= seconds <= most for seconds, (least, most) in ranges), len(ranges)


def _score(rows: Sequence[Row]) -> Iterator[str]:
    yield "## How right the plan is\n"
    yield "All rows that were planned before they ran. The constants of the plan were fitted on an H200 and on some of"
    yield "these rows; expect larger errors on other machines.\n"
    yield _line(["", *(f"{name} within {within:.0%}" for name, _, _, within in _PLANNED)])
    yield _line(["---"] * (1 + len(_PLANNED)))
    for name, found in planned_rows(rows).items():
        cells = [name]
        for _, planned, measured, within in _PLANNED:
            right, known = planned_right(found, planned, measured, within)
            cells.append(f"{right} of {known}")
        yield _line(cells)
    yield ""
    inside, number = in_range(planned_rows(rows)[GRAPHED])
    if number:
        yield f"Python bounds {number} other steps, which have a planned range: {inside} of them took as long."
        yield f"Of the newest rows alone, {' of '.join(map(str, in_range(planned_rows(rows)[NEWEST])))} did.\n"


_STARTS = """## Time to the first step

Seconds from the start of a fresh process to the end of the first step of `finetune`, or to the end of a command. The
page cache is emptied before weights are read from a disk. The first turn on a machine also measures its rates and
compiles kernels; the other columns show the last turn. *CPU* is the CPU time of all threads. Goals: 10 s for T5-3B
from a disk, 12 s with random weights, 4 s for a plan on two cores. None of them is reached.
"""


def starts(rows: Sequence[Row]) -> Iterator[str]:
    """The newest row of each start and machine."""
    newest = {(row["case"], row["engine"], row["gpu"], row["cores"]): row for row in rows if _is_start(row)}
    if not newest:
        return
    yield _STARTS
    titles = ["case", "what", "seconds", "CPU", "first turn", "by phase", "measured by"]
    yield _line(titles)
    yield _line(["---"] * len(titles))
    for row in newest.values():
        figures = {**(row["phases"] or {}), **(row["figures"] or {})}
        single = [str(figures.pop(name, "-")) for name in ("CPU", "first turn")]
        shown = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items() if value)
        by = "; ".join(filter(None, [_origin(row), row["notes"]]))
        yield _line([row["case"], row["engine"], f"{row['seconds']:.1f}", *single, shown or "-", by])
    yield ""


def _is_start(row: Row) -> bool:
    return str(row["case"]).startswith("startup-")


_OTHERS = (
    *("block", "attention", "head-and-loss", "cpu-adamw", "disk", "learning", "demo", "same-script", "packing"),
    *("killed", "damaged checkpoints", "two trainings", "soak"),
)
"""Prefixes of the cases in "Other figures". The table holds more cases, which the plan's tests read."""


def _others(rows: Sequence[Row]) -> Iterator[str]:
    """The newest rows of cases without steps of an engine."""
    yield ""
    yield "## Other figures\n"
    titles = ["case", "variant", "seconds", "figures", "measured by"]
    yield _line(titles)
    yield _line(["---"] * len(titles))
    newest = {(row["case"], row["engine"]): row for row in rows if str(row["case"]).startswith(_OTHERS)}
    for (case, engine), row in newest.items():
        figures = {**(row["phases"] or {}), **(row["figures"] or {})}
        if row["ram_peak_bytes"]:
            figures["RAM, GiB"] = round(row["ram_peak_bytes"] / GIB, 2)
        shown = ", ".join(f"{name.replace('_', ' ')} {_rounded(value)}" for name, value in figures.items())
        seconds = f"{row['seconds']:.4g}" if row["seconds"] else "-"
        yield _line([case, engine, seconds, shown, "; ".join(filter(None, [_origin(row), row["notes"]]))])


def _rounded(value: Any) -> str:
    """Fractions rounded to four digits; other values unchanged."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


_PLANNED = (
    ("step", "planned_seconds", "seconds", WITHIN),
    ("VRAM", "planned_vram_bytes", "vram_bytes", 0.05),
    ("RAM", "planned_ram_bytes", "ram_peak_bytes", 0.05),
)
