"""`compare`: seconds that each engine takes to train each model, within memory limits that stand for a machine.

result = offloadkit.compare(("t5-base", "t5-3b"), vram="11GiB", ram="64GiB")
print(result)
result.chart()

Arguments of `compare`:

- `models`: presets ("t5-3b"), folders with a config.json, hub names, or "t5-tiny" to try it on a CPU.
- `engines`: from `ENGINES`.
- `num_samples`: number of rows to report seconds for, computed from the measured seconds per step.
- `batch_size`, `max_input_length`, `max_target_length`: rows per micro-batch and tokens per row, without padding.
- `gradient_accumulation`: micro-batches per step.
- `precision`: of offloadkit's optimizer states; other engines keep fp32.
- `vram`, `ram`: limits of a process ("11GiB"), including CUDA's context; None: all memory. offloadkit plans with the
  limits, torch enforces `vram` for every engine, and a process above `ram` is killed.
- `steps`: timed steps, after four warm-up steps; None: 6, or as many as fit in 3 seconds.
- `timeout`: seconds per process; None: 600 plus ten times the planned seconds of its steps.
- `output_dir`: gets comparison.json, .png and .svg, and the rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offloadkit.checkpoint.folder import writable
from offloadkit.deepspeed import process as deepspeed_process
from offloadkit.doors.comparing import words
from offloadkit.doors.engines import forecast
from offloadkit.doors.engines.baseline import forecasts_of
from offloadkit.doors.engines.forecast import Forecast
from offloadkit.doors.engines.runner import Row, Runs, write_whole
from offloadkit.doors.engines.timing import BY_LEANER_PLAN
from offloadkit.doors.engines.work import SIZES, Work, config_of, full_work
from offloadkit.errors import ConfigError, shown
from offloadkit.facts.config import Precision, check_counts
from offloadkit.facts.units import format_bytes

if TYPE_CHECKING:
    from offloadkit.doors.comparing.figures import Chart

T5_MODELS = ("t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b")
ENGINES = ("baseline", "offloadkit", "deepspeed")
"""Plain HuggingFace on the GPU; offloadkit; ZeRO-2 with offload, or ZeRO-3 if ZeRO-2 does not fit."""

_VARIANTS: dict[str, tuple[tuple[str, bool, str], ...]] = {
    "baseline": (("baseline", False, ""), ("baseline", True, "activations recomputed")),
    "offloadkit": (("offloadkit", False, ""),),
    "deepspeed": (
        ("zero2", False, "ZeRO-2"),
        ("zero2", True, "ZeRO-2, activations recomputed"),
        ("zero3", True, "ZeRO-3, activations recomputed"),
    ),
}
"""Variants (engine name, recompute activations, label) by engine, from the fastest to the one with the least memory."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """Result of `compare`: a table for text and notebooks, a chart, and the rows."""

    rows: list[Row]
    """One row per model and engine: model, engine, variant, status ("measured", "does not fit", "failed"), reason.
    Measured rows also have seconds (for `num_samples`), step_seconds, vram_bytes, peak_ram_bytes, and more."""
    num_samples: int
    work: dict[str, Any]
    vram: int | None
    ram: int | None
    environment: dict[str, str]
    output_dir: Path
    remarks: list[str] = field(default_factory=list)

    def row(self, model: str, engine: str) -> Row:
        """The row of a model and an engine. Raises `KeyError` if the pair was not requested."""
        for row in self.rows:
            if (row["model"], row["engine"]) == (model, engine):
                return row
        raise KeyError(f"{model}, {engine}")

    @property
    def title(self) -> str:
        """The workload and the machine."""
        shape = f"{self.work['batch_size']} x ({self.work['max_input_length']}+{self.work['max_target_length']}) tokens"
        if self.work["gradient_accumulation"] > 1:
            shape = f"{self.work['gradient_accumulation']} x {shape}"
        where = words.place(self.environment, self.vram, self.ram)
        return f"{self.num_samples:,} samples, {shape} a step, {where}"

    def __str__(self) -> str:
        return "\n".join([self.title, *words.text_table(_HEADER, _cells(self), 3), *self.remarks])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return words.html_table(_HEADER, _cells(self), 3, "\n".join([self.title, *self.remarks]))

    def label(self, engine: str) -> str:
        """The engine's name in the table and the chart."""
        return words.label(engine, self.environment)

    def chart(self) -> Chart:
        """Draw seconds, VRAM and RAM by model and engine, with a reason in place of a missing bar."""
        from offloadkit.doors.comparing.figures import comparison_chart

        return comparison_chart(self)

    def to_dict(self) -> dict[str, Any]:
        """The result in JSON types."""
        return asdict(self) | {"output_dir": str(self.output_dir)}


_HEADER = ("model", "engine", "how", "time", "a step", "VRAM", "RAM", "x baseline")


def _cells(result: Comparison) -> list[list[str]]:
    cells = []
    for row in result.rows:
        first = [row["model"], result.label(row["engine"]), row["variant"]]
        if row["status"] != "measured":
            cells.append([*first, row["reason"]])
            continue
        baseline = [other for other in result.rows if (other["model"], other["engine"]) == (row["model"], "baseline")]
        ratio = row["seconds"] / baseline[0]["seconds"] if baseline and "seconds" in baseline[0] else None
        times = [words.duration(row["seconds"]), words.duration(row["step_seconds"])]
        sizes = [words.size_or_dash(row["vram_bytes"]), words.size_or_dash(row["peak_ram_bytes"])]
        cells.append([*first, *times, *sizes, f"{ratio:.2f}" if ratio else "-"])
    return cells


def compare(
    models: Sequence[str] = T5_MODELS,
    engines: Sequence[Literal["baseline", "offloadkit", "deepspeed"] | str] = ENGINES,
    *,
    num_samples: int = 1000,
    batch_size: int = 8,
    max_input_length: int = 512,
    max_target_length: int = 128,
    gradient_accumulation: int = 1,
    precision: Precision = "exact",
    vram: int | str | None = None,
    ram: int | str | None = None,
    steps: int | None = None,
    timeout: float | None = None,
    output_dir: str | os.PathLike[str] = "offloadkit-compare",
) -> Comparison:
    """Measure some steps of each model and engine in a fresh process; draw and save the chart.

    Weights and tokens are random; only configs are read. Variants that cannot fit by arithmetic are skipped. Engines
    other than offloadkit run first as they are, then with activations recomputed, DeepSpeed last as ZeRO-3. If
    offloadkit runs out of memory, it continues with a plan that needs less, as `finetune` does; the row then says so
    and has the time of that plan. A second call with the same `output_dir` reuses its rows and retries failed ones. See
    the top of this module for the arguments.

    Raises:
        ConfigError: an argument is invalid.
        ModelNotFoundError, ModelAccessError, ModelError: a model's config cannot be found or read.
        OutputError: `output_dir` cannot be written.
    """
    given = {**locals()}
    check_counts({"num_samples": num_samples})
    work, told = full_work("", given), {name: given[name] for name in ("num_samples", *SIZES, "precision")}
    _check_names(models, engines)
    runs = Runs(folder := writable(output_dir), timeout)
    works = [replace(work, model=model) for model in models]
    forecasts = forecasts_of(works, runs)
    pairs = [(each, made, engine) for each, made in zip(works, forecasts, strict=True) for engine in engines]
    rows: list[Row] = []
    for number, (each, made, engine) in enumerate(pairs, start=1):
        say = progress(f"[{number}/{len(pairs)}] {each.model}, {words.label(engine, runs.environment)}")
        row: Row = {"model": each.model, "engine": engine} | _row(runs, each, engine, made, say)
        if row["status"] == "measured":
            row["seconds"] = row["step_seconds"] * num_samples / each.rows
        rows.append(row)
    remarks = list(_remarks(work, rows, runs.environment))
    result = Comparison(rows, num_samples, told, work.vram, work.ram, runs.environment, folder, remarks)
    save(folder / "comparison", result.to_dict(), result.chart)
    return result


def _check_names(models: Any, engines: Any) -> None:
    for name, given, example in (("models", models, "('t5-base', 't5-3b')"), ("engines", engines, str(ENGINES))):
        some = isinstance(given, Sequence) and all(isinstance(each, str) for each in given)
        if isinstance(given, str) or not some or not given or len(set(given)) < len(given):
            raise ConfigError(f"{name} must be one or more different names, such as {example}; got {shown(given)}")
    for engine in engines:
        if engine not in ENGINES:
            raise ConfigError(f"no engine {shown(engine)}: choose one of {', '.join(map(repr, ENGINES))}")
    for model in models:
        config_of(model)


def _row(runs: Runs, work: Work, engine: str, made: Forecast | Row, say: Callable[[str], None]) -> Row:
    row: Row = {"variant": "", "tried": []}
    if isinstance(made, dict):
        row |= made
    elif engine == "deepspeed" and not deepspeed_process.is_installed():
        row |= {"status": "failed", "reason": deepspeed_process.NOT_INSTALLED}
    else:
        for name, recomputed, called in _VARIANTS[engine]:
            row |= {"variant": called} | _tried(runs, replace(work, recomputed=recomputed), name, made)
            if row["status"] != "does not fit":
                break
            row["tried"].append({"variant": called, "reason": row["reason"]})
    if row.get("moves"):
        row["variant"] = BY_LEANER_PLAN
    say(summary(row))
    return row


def _tried(runs: Runs, work: Work, name: str, made: Forecast) -> Row:
    reason = made.reason if name == "offloadkit" else forecast.why_cannot_fit(name, made, recomputed=work.recomputed)
    if reason is not None:
        return {"status": "does not fit", "reason": reason, "tried_for_real": False}
    return runs.measured(name, work, made.steps_seconds(work)) | {"tried_for_real": True}


def summary(row: Row) -> str:
    if row["status"] != "measured":
        return str(row["reason"])
    sizes = f"VRAM {words.size_or_dash(row['vram_bytes'])}, RAM {words.size_or_dash(row['peak_ram_bytes'])}"
    called = f"{row['variant']}: " if row.get("variant") else ""
    return f"{called}{words.duration(row['step_seconds'])} a step, {sizes}{' (kept)' if row.get('kept') else ''}"


def progress(title: str) -> Callable[[str], None]:
    print(f"{title} ...", end=" ", flush=True)
    return lambda text: print(text, flush=True)


def _remarks(work: Work, rows: Sequence[Row], environment: dict[str, str]) -> Iterator[str]:
    for row in rows:
        if row["status"] == "measured" and work.vram is not None and row["vram_bytes"] > work.vram:
            over = format_bytes(row["vram_bytes"] - work.vram)
            who = f"{row['model']}, {words.label(row['engine'], environment)}"
            yield f"{who}: {over} over the limit, used by CUDA's libraries outside torch."
    if environment["gpu"] == "none" and work.vram is not None:
        yield f"There is no GPU here, so the limit of {format_bytes(work.vram)} of VRAM has no effect."


def save(stem: Path, content: dict[str, Any], chart: Callable[[], Any]) -> None:
    """Write `stem`.json first, in case drawing fails, then .svg and .png. Raises `OutputError`."""
    text = json.dumps(content, indent=1) + "\n"
    write_whole(stem.with_suffix(".json"), lambda new: new.write_text(text))
    figure = chart()
    write_whole(stem.with_suffix(".svg"), lambda new: figure.savefig(new, format="svg"))
    write_whole(stem.with_suffix(".png"), lambda new: figure.savefig(new, format="png", dpi=150))
    print(f"saved in {stem.parent}: {stem.name}.json, {stem.name}.svg, {stem.name}.png", flush=True)
