"""`compare`: how long each engine takes for some samples of each model, within limits that stand for a machine.

result = offloadkit.compare(("t5-base", "t5-3b"), vram="11GiB", ram="64GiB")
print(result)
result.chart()

What the arguments of `compare` take:

- `models`: presets ("t5-3b"), folders with a config.json, hub names, or "t5-tiny" for a look on a CPU.
- `engines`: of `ENGINES`.
- `num_samples`: what the seconds are for: measured seconds of a step, by as many steps as that takes.
- `batch_size`, `max_input_length`, `max_target_length`: rows of a micro-batch and tokens of a row, all of them full.
- `gradient_accumulation`: micro-batches a step.
- `precision`: of offloadkit's optimizer states; the others keep fp32.
- `vram`, `ram`: what a process may take ("11GiB"), CUDA's context included; None: what there is. offloadkit plans with
  it; torch refuses to allocate more VRAM in any of them; a process that goes beyond `ram` is killed.
- `steps`: timed, after four that warm up; None: six, or as many as take three seconds.
- `timeout`: seconds for one process; None: 600, and ten times what is planned for its steps.
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
from offloadkit.comparing import words
from offloadkit.comparing.words import LABELS
from offloadkit.config import OffloadConfig, Precision
from offloadkit.deepspeed import process as deepspeed_process
from offloadkit.engines import forecast
from offloadkit.engines.baseline import forecasts_of
from offloadkit.engines.forecast import Forecast
from offloadkit.engines.runner import Row, Runs, write_whole
from offloadkit.engines.timing import BY_LEANER_PLAN
from offloadkit.engines.work import Work, config_of
from offloadkit.errors import ConfigError, shown
from offloadkit.planning import check_counts
from offloadkit.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from offloadkit.comparing.figures import Chart

T5_MODELS = ("t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b")
ENGINES = ("baseline", "offloadkit", "deepspeed")
"""Plain HuggingFace with everything on the GPU; by its plan; ZeRO-2 with offload, or ZeRO-3 where that does not fit."""

_VARIANTS: dict[str, tuple[tuple[str, bool, str], ...]] = {
    "baseline": (("baseline", False, ""), ("baseline", True, "activations recomputed")),
    "offloadkit": (("offloadkit", False, ""),),
    "deepspeed": (
        ("zero2", False, "ZeRO-2"),
        ("zero2", True, "ZeRO-2, activations recomputed"),
        ("zero3", True, "ZeRO-3, activations recomputed"),
    ),
}
"""(what runs, whether it recomputes, what it is called) by engine: the fastest first, the leanest last."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """What `compare` found: a table as text and in a notebook, a chart, and the rows themselves."""

    rows: list[Row]
    """One for each model and engine: model, engine, variant, status ("measured", "does not fit", "failed"), reason;
    where measured: seconds (for `num_samples`), step_seconds, vram_bytes, peak_ram_bytes, and what the run left."""
    num_samples: int
    work: dict[str, Any]
    """Rows and tokens of a step, as `compare` was told."""
    vram: int | None
    ram: int | None
    environment: dict[str, str]
    output_dir: Path
    remarks: list[str] = field(default_factory=list)

    def row(self, model: str, engine: str) -> Row:
        """The row of one bar.

        Raises:
            KeyError: it was not asked for.
        """
        for row in self.rows:
            if (row["model"], row["engine"]) == (model, engine):
                return row
        raise KeyError(f"{model}, {engine}")

    @property
    def title(self) -> str:
        """What was timed, and where."""
        shape = f"{self.work['batch_size']} x ({self.work['max_input_length']}+{self.work['max_target_length']}) tokens"
        if self.work["gradient_accumulation"] > 1:
            shape = f"{self.work['gradient_accumulation']} x {shape}"
        where = words.place(self.environment, self.vram, self.ram)
        return f"{self.num_samples:,} samples, {shape} a step, {where}"

    def __str__(self) -> str:
        return "\n".join([self.title, *words.text_table(_HEADER, _cells(self), 3), *self.remarks])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return words.html_table(_HEADER, _cells(self), 3, " | ".join([self.title, *self.remarks]))

    def chart(self) -> Chart:
        """A matplotlib figure: seconds, VRAM and RAM by model and engine, the reason where there is no bar."""
        from offloadkit.comparing.figures import comparison_chart

        return comparison_chart(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
        return asdict(self) | {"output_dir": str(self.output_dir)}


_HEADER = ("model", "engine", "how", "time", "a step", "VRAM", "RAM", "x baseline")


def _cells(result: Comparison) -> list[list[str]]:
    cells = []
    for row in result.rows:
        first = [row["model"], LABELS[row["engine"]], row["variant"]]
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

    Weights and tokens are random: only configs are read. What arithmetic shows not to fit is not tried; else the other
    engines run as they are, then with activations recomputed, DeepSpeed at last as ZeRO-3. Where offloadkit's memory
    runs out, it goes on by a leaner plan, as `finetune` does. That one is timed, and the row says so. Running again
    with the same `output_dir` takes rows that are there and tries again those that failed. Arguments: see the top of
    this module.

    Raises:
        ConfigError: an argument has no meaning.
        ModelNotFoundError, ModelAccessError, ModelError: there is no config of that name.
        OutputError: `output_dir` cannot be written.
    """
    counts = {"num_samples": num_samples, "batch_size": batch_size, "max_input_length": max_input_length}
    counts |= {"max_target_length": max_target_length, "gradient_accumulation": gradient_accumulation}
    check_counts(counts | {"steps": steps}, optional=("steps",))
    _check_names(models, engines)
    budgets = budgets_of(precision, vram, ram)
    work = Work(
        model="",
        batch_size=batch_size,
        input_length=max_input_length,
        target_length=max_target_length,
        accumulation=gradient_accumulation,
        precision=precision,
        **budgets,
        steps=steps,
    )
    runs = Runs(folder := writable(output_dir), timeout)
    works = [replace(work, model=model) for model in models]
    forecasts = forecasts_of(works, runs)
    pairs = [(each, made, engine) for each, made in zip(works, forecasts, strict=True) for engine in engines]
    rows: list[Row] = []
    for number, (each, made, engine) in enumerate(pairs, start=1):
        say = progress(f"[{number}/{len(pairs)}] {each.model}, {LABELS[engine]}")
        row: Row = {"model": each.model, "engine": engine} | _row(runs, each, engine, made, say)
        if row["status"] == "measured":
            row["seconds"] = row["step_seconds"] * num_samples / each.rows
        rows.append(row)
    remarks = list(_remarks(work, rows, on_cpu=runs.environment["gpu"] == "none"))
    result = Comparison(
        rows, num_samples, counts | {"precision": precision}, work.vram, work.ram, runs.environment, folder, remarks
    )
    save(folder / "comparison", result.to_dict(), result.chart)
    return result


def budgets_of(precision: Any, vram: Any, ram: Any) -> dict[str, Any]:
    """Both budgets in bytes; None: what is available. Raises `ConfigError` for a value that has no meaning."""
    OffloadConfig(precision=precision, vram=vram, ram=ram)
    return {name: None if size is None else parse_bytes(size) for name, size in (("vram", vram), ("ram", ram))}


def _check_names(models: Any, engines: Any) -> None:
    for name, given, example in (("models", models, "('t5-base', 't5-3b')"), ("engines", engines, str(ENGINES))):
        some = isinstance(given, Sequence) and all(isinstance(each, str) for each in given)
        if isinstance(given, str) or not some or not given or len(set(given)) < len(given):
            raise ConfigError(f"{name} must be some different names, such as {example}; got {shown(given)}")
    for engine in engines:
        if engine not in ENGINES:
            raise ConfigError(f"no engine {shown(engine)}: choose of {', '.join(map(repr, ENGINES))}")
    for model in models:
        config_of(model)


def _row(runs: Runs, work: Work, engine: str, made: Forecast | Row, say: Callable[[str], None]) -> Row:
    """The first variant of the engine that fits; else why the leanest does not."""
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
    """The row of one variant: by arithmetic where that is enough, else by running it."""
    reason = made.reason if name == "offloadkit" else forecast.hopeless(name, made, recomputed=work.recomputed)
    if reason is not None:
        return {"status": "does not fit", "reason": reason, "tried_for_real": False}
    return runs.measured(name, work, made.steps_seconds(work)) | {"tried_for_real": True}


def summary(row: Row) -> str:
    """A row in a line."""
    if row["status"] != "measured":
        return str(row["reason"])
    sizes = f"VRAM {words.size_or_dash(row['vram_bytes'])}, RAM {words.size_or_dash(row['peak_ram_bytes'])}"
    called = f"{row['variant']}: " if row.get("variant") else ""
    return f"{called}{words.duration(row['step_seconds'])} a step, {sizes}{' (kept)' if row.get('kept') else ''}"


def progress(title: str) -> Callable[[str], None]:
    """Print what begins; what is returned prints how it ended."""
    print(f"{title} ...", end=" ", flush=True)
    return lambda text: print(text, flush=True)


def _remarks(work: Work, rows: Sequence[Row], *, on_cpu: bool) -> Iterator[str]:
    """What the figures do not say by themselves."""
    for row in rows:
        if row["status"] == "measured" and work.vram is not None and row["vram_bytes"] > work.vram:
            over, who = format_bytes(row["vram_bytes"] - work.vram), f"{row['model']}, {LABELS[row['engine']]}"
            yield f"{who}: {over} over the limit, held by CUDA's libraries beside torch."
    if on_cpu and work.vram is not None:
        yield f"There is no GPU here for {format_bytes(work.vram)} of VRAM to limit."
    if on_cpu:
        yield 'Without a GPU, "all on the GPU" is plain training on the CPU.'


def save(stem: Path, content: dict[str, Any], chart: Callable[[], Any]) -> None:
    """`stem`.json first, whatever drawing does; then .svg and .png.

    Raises:
        OutputError: one of them cannot be written.
    """
    text = json.dumps(content, indent=1) + "\n"
    write_whole(stem.with_suffix(".json"), lambda new: new.write_text(text))
    figure = chart()
    write_whole(stem.with_suffix(".svg"), lambda new: figure.savefig(new, format="svg"))
    write_whole(stem.with_suffix(".png"), lambda new: figure.savefig(new, format="png", dpi=150))
    print(f"saved in {stem.parent}: {stem.name}.json, {stem.name}.svg, {stem.name}.png", flush=True)
