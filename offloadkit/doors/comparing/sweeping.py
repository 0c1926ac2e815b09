"""`sweep`: how step time and held-out loss depend on the batch size.

print(offloadkit.sweep("t5-base", vram="8GiB"))
offloadkit.sweep("t5-base", "pairs.jsonl", eval_dataset="held_out.jsonl", scale_learning_rate=("none", "sqrt")).chart()

Arguments of `sweep`:

- `model`: a preset, folder, hub name, "t5-tiny", or a model, which is not modified.
- `train_dataset`, `eval_dataset`, `tokenizer`, `max_input_length`, `max_target_length`: as in `finetune`; without a
  dataset the lengths are 512 and 128 tokens.
- `batch_sizes`: rows per micro-batch. `gradient_accumulation`: micro-batches per step, combined with every size.
- `precision`, `vram`, `ram`, `steps`: as in `compare`.
- `timeout`: as in `compare`; with a dataset None means no limit.
- `num_samples`: rows per epoch; with a dataset, rows each size trains on. None: 10,000, or the dataset's rows.
- `learning_rate`: for the smallest step; None: `finetune`'s default.
- `scale_learning_rate`: "none", or multiply by the ratio of rows to the smallest step's ("linear") or its square root
  ("sqrt").
- `output_dir`: gets sweep.json, .png and .svg, and the rows.
- other arguments of `finetune` ("init", "seed", "lr_scheduler_type", ...).
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offloadkit import errors
from offloadkit.checkpoint.folder import writable
from offloadkit.doors.comparing import learning, words
from offloadkit.doors.comparing.comparison import progress, save, summary
from offloadkit.doors.comparing.knee import Knee, fixed_seconds, measured_knee, predicted_knee, reads_weights
from offloadkit.doors.engines.baseline import config_folder, forecasts_of
from offloadkit.doors.engines.forecast import Forecast
from offloadkit.doors.engines.runner import Row, Runs
from offloadkit.doors.engines.work import Work, limits_of
from offloadkit.errors import ConfigError, shown
from offloadkit.facts.config import Precision, check_counts
from offloadkit.facts.units import format_bytes, rounded
from offloadkit.hf.columns import ColumnOptions
from offloadkit.hf.data import DEFAULT_TARGET_LENGTH
from offloadkit.hf.quiet import bars_where_live

if TYPE_CHECKING:
    from offloadkit.doors.comparing.figures import Chart

NUM_SAMPLES = 10_000
MOST_TIMES_LARGER = 8
"""The search for the largest batch stops at this multiple of the largest requested size."""


@dataclass(frozen=True, repr=False)
class Sweep:
    """Result of `sweep`: tables, a chart, knees, and sentences about bottlenecks."""

    model: str
    rows: list[Row]
    """One row per size: batch_size, accumulation, scaling, learning_rate, status, reason. Measured rows also have
    step_seconds, sample_seconds, tokens_per_second, epoch_seconds, vram_bytes, peak_ram_bytes; with a dataset also
    eval_loss, train_loss, num_steps and num_samples."""
    forecasts: dict[int, dict[int, Forecast]]
    """The plan's forecasts by accumulation and batch size; {} with a dataset."""
    num_samples: int
    vram: int | None
    ram: int | None
    environment: dict[str, str]
    output_dir: Path
    largest: Row = field(default_factory=dict)
    """Row of the largest batch_size the plan fits, up to `MOST_TIMES_LARGER` times the largest requested size."""

    def measured(self, accumulation: int, scaling: str = "none") -> dict[int, Row]:
        """Measured rows by batch size."""
        return {
            row["batch_size"]: row
            for row in self.rows
            if row["status"] == "measured" and (row["accumulation"], row["scaling"]) == (accumulation, scaling)
        }

    @property
    def accumulations(self) -> list[int]:
        """Micro-batches per step, in the requested order."""
        return list(dict.fromkeys(row["accumulation"] for row in self.rows))

    @property
    def sizes(self) -> list[int]:
        """Rows per micro-batch, in the requested order."""
        return list(dict.fromkeys(row["batch_size"] for row in self.rows))

    def knee(self, accumulation: int | None = None) -> Knee | None:
        """The measured knee, or None for fewer than two sizes. `accumulation` defaults to the first."""
        rows = self.measured(self.accumulations[0] if accumulation is None else accumulation)
        return measured_knee({size: row["step_seconds"] for size, row in rows.items()})

    def predicted_knee(self, accumulation: int | None = None) -> Knee | None:
        """The knee of the plan's step time, over the sizes that fit."""
        made = self.forecasts.get(self.accumulations[0] if accumulation is None else accumulation, {})
        return predicted_knee({size: each for size, each in made.items() if not each.lacking})

    def explain(self) -> str:
        """Describe the bottleneck on both sides of the knee, the largest size, and the held-out loss."""
        return "\n".join(_explained(self))

    @property
    def title(self) -> str:
        """The workload and the machine."""
        return f"{self.model}, {words.place(self.environment, self.vram, self.ram)}"

    def __str__(self) -> str:
        header, cells = self._table()
        return "\n".join([self.title, *words.text_table(header, cells, 0), self.explain()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        header, cells = self._table()
        sentences = "<br>".join(escape(line) for line in self.explain().splitlines())
        return words.html_table(header, cells, 0, self.title) + f"<p>{sentences}</p>"

    def chart(self) -> Chart:
        """Draw step time, time per sample and VRAM by batch size, and with a dataset the held-out loss."""
        from offloadkit.doors.comparing.figures import sweep_chart

        return sweep_chart(self)

    def to_dict(self) -> dict[str, Any]:
        """The result in JSON types."""
        made = asdict(self) | {"output_dir": str(self.output_dir)}
        knees = {
            str(each): {
                "measured": (knee := self.knee(each)) and asdict(knee),
                "predicted": (other := self.predicted_knee(each)) and asdict(other),
            }
            for each in self.accumulations
        }
        return made | {"knees": knees, "explanation": self.explain().splitlines()}

    def _table(self) -> tuple[list[str], list[list[str]]]:
        learns = any("eval_loss" in row for row in self.rows)
        header = ["batch", "accum.", "a step", "a sample", "tokens/s", "VRAM", "RAM", f"{self.num_samples:,} samples"]
        header += ["lr", "held-out loss"] if learns else []
        return header, [self._cells(row, learns) for row in self.rows]

    def _cells(self, row: Row, learns: bool) -> list[str]:
        cells = [str(row["batch_size"]), str(row["accumulation"])]
        if row["status"] != "measured":
            return [*cells, row["reason"]]
        cells += [words.duration(row["step_seconds"]), words.duration(row["sample_seconds"])]
        cells += [f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else "-"]
        cells += [words.size_or_dash(row["vram_bytes"]), words.size_or_dash(row["peak_ram_bytes"])]
        cells += [words.duration(row["epoch_seconds"])]
        if learns:
            scaled = f" ({row['scaling']})" if row["scaling"] != "none" else ""
            loss = f"{row['eval_loss']:.4f}" if "eval_loss" in row else "-"
            cells += [f"{rounded(row['learning_rate'])}{scaled}", loss]
        return cells


@bars_where_live()
def sweep(
    model: Any,
    train_dataset: Any = None,
    *,
    eval_dataset: Any = None,
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    gradient_accumulation: Sequence[int] = (1,),
    precision: Precision = "exact",
    vram: int | str | None = None,
    ram: int | str | None = None,
    max_input_length: int | None = None,
    max_target_length: int | None = None,
    num_samples: int | None = None,
    learning_rate: float | None = None,
    scale_learning_rate: Sequence[Literal["none", "sqrt", "linear"] | str] = ("none",),
    tokenizer: Any = None,
    steps: int | None = None,
    timeout: float | None = None,
    output_dir: str | os.PathLike[str] = "offloadkit-sweep",
    **finetune_arguments: Any,
) -> Sweep:
    """Measure steps of each size in a fresh process; find the knee and the largest size; draw and save the chart.

    Without a dataset, weights and tokens are random. With one, `finetune` trains each size on the same number of rows,
    with the learning rate unscaled and scaled, and evaluates on `eval_dataset`. A failed size becomes a row with a
    reason. A second call with the same `output_dir` reuses its rows. See the top of this module for the arguments.

    Raises:
        ConfigError: an argument is invalid.
        DataError: the dataset is unusable; raised by the first size.
        ModelError, ModelNotFoundError, ModelAccessError: the model is unusable.
        OutputError: `output_dir` cannot be written.
    """
    _check_sizes(batch_sizes, gradient_accumulation)
    _check_learning(train_dataset, eval_dataset, scale_learning_rate, learning_rate, tokenizer, finetune_arguments)
    check_counts({"steps": steps, "num_samples": num_samples}, optional=("steps", "num_samples"))
    limits = limits_of(precision, vram, ram)
    runs = Runs(folder := writable(output_dir), timeout)
    grid = [(size, times) for times in gradient_accumulation for size in batch_sizes]
    name = model if isinstance(model, str) else getattr(model, "name_or_path", "") or type(model).__name__
    lengths = {"max_input_length": max_input_length, "max_target_length": max_target_length}
    forecasts: dict[int, dict[int, Forecast]] = {}
    largest: Row = {}
    if train_dataset is not None:
        given = {**lengths, **limits, **finetune_arguments}
        told, number = _written_down(model, train_dataset, eval_dataset, tokenizer, given, folder)
        num_samples = num_samples or number
        base = learning.base_rate(learning_rate, given.get("init", "pretrained"))
        rates = learning.learning_rates(base, sorted({s * t for s, t in grid}), list(scale_learning_rate))
        rows = list(_trained(told, num_samples, grid, rates, runs))
    else:
        check_counts(lengths, optional=lengths)
        num_samples = num_samples or NUM_SAMPLES
        work = Work(
            model=config_folder(model, folder),
            batch_size=1,
            input_length=max_input_length or 512,
            target_length=max_target_length or DEFAULT_TARGET_LENGTH,
            steps=steps,
            **limits,
        )
        works = [replace(work, batch_size=size, accumulation=times) for size, times in grid]
        rows, forecasts = _timed(name, works, num_samples, runs)
        most = replace(works[0], batch_size=max(batch_sizes))
        largest = _largest(most, forecasts.get(most.accumulation, {}).get(most.batch_size), rows, runs)
    budgets = limits["vram"], limits["ram"]
    result = Sweep(name, rows, forecasts, num_samples, *budgets, runs.environment, folder, largest)
    save(folder / "sweep", result.to_dict(), result.chart)
    return result


def _check_sizes(batch_sizes: Any, accumulations: Any) -> None:
    for name, given in (("batch_sizes", batch_sizes), ("gradient_accumulation", accumulations)):
        numbers = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
        fine = all(type(number) is int and 0 < number < 2**31 for number in numbers)
        if not numbers or not fine or len(set(numbers)) < len(numbers):
            said = shown(given)
            raise ConfigError(f"{name} must be one or more different whole numbers >= 1, such as (1, 2, 4); got {said}")


def _check_learning(
    train: Any, held_out: Any, scalings: Any, learning_rate: Any, tokenizer: Any, others: dict[str, Any]
) -> None:
    known = isinstance(scalings, Sequence) and not isinstance(scalings, str) and len(scalings) > 0
    if not known or any(not isinstance(scaling, str) or scaling not in learning.SCALINGS for scaling in scalings):
        choices, said = ", ".join(map(repr, learning.SCALINGS)), shown(scalings)
        raise ConfigError(f"scale_learning_rate must be one or more of {choices}, such as ('none', 'sqrt'); got {said}")
    learning.check_arguments(others, inspect.signature(sweep).parameters)
    of_learning = {"eval_dataset": held_out, "learning_rate": learning_rate, "tokenizer": tokenizer, **others}
    given = [name for name, value in of_learning.items() if value is not None]
    if train is None and (given or list(scalings) != ["none"]):
        raise ConfigError(
            f"{given[0] if given else 'scale_learning_rate'} needs a train_dataset: without one, sweep times"
        )


def _with_rates(row: Row, num_samples: int) -> Row:
    if row["status"] != "measured":
        return row
    rows = row["batch_size"] * row["accumulation"]
    epoch = row["step_seconds"] * math.ceil(num_samples / rows)
    return row | {"sample_seconds": row["step_seconds"] / rows, "epoch_seconds": epoch}


def _timed(
    name: str, works: list[Work], num_samples: int, runs: Runs
) -> tuple[list[Row], dict[int, dict[int, Forecast]]]:
    made = forecasts_of(works, runs)
    rows: list[Row] = []
    forecasts: dict[int, dict[int, Forecast]] = {}
    for number, (work, planned) in enumerate(zip(works, made, strict=True), start=1):
        say = progress(f"[{number}/{len(works)}] {name}, batch {work.batch_size} x {work.accumulation}")
        if isinstance(planned, Forecast):
            forecasts.setdefault(work.accumulation, {})[work.batch_size] = planned
        rows.append(_with_rates(_timed_row(work, planned, runs), num_samples))
        say(summary(rows[-1]))
    return rows, forecasts


def _timed_row(work: Work, planned: Forecast | Row, runs: Runs) -> Row:
    row: Row = {"batch_size": work.batch_size, "accumulation": work.accumulation, "scaling": "none"}
    if isinstance(planned, dict):
        return row | planned
    if planned.reason:
        return row | {"status": "does not fit", "reason": planned.reason}
    row |= runs.measured("offloadkit", work, planned.steps_seconds(work))
    if row["status"] == "measured":
        row["tokens_per_second"] = planned.num_tokens / row["step_seconds"] if planned.num_tokens else None
    return row


def _largest(work: Work, planned: Forecast | None, rows: list[Row], runs: Runs) -> Row:
    """Find the largest size by the plan, and run it briefly if it was not requested.

    `work` and `planned` belong to the largest requested size.
    """
    if any(row["status"] == "failed" for row in rows) and not any(row["status"] == "measured" for row in rows):
        return {}
    most = MOST_TIMES_LARGER * work.batch_size
    found = runs.row({"mode": "largest", "work": work.to_dict(), "most": most})
    size = found.get("batch_size")
    if size is None:
        return {}
    asked = [row for row in rows if (row["batch_size"], row["accumulation"]) == (size, work.accumulation)]
    if asked:
        row = asked[0]
    else:
        say = progress(f"the largest batch that fits by the plan, {size}")
        tried = replace(work, batch_size=size, steps=1, warmup=0)
        planned_seconds = planned.steps_seconds(tried) * size / work.batch_size if planned else 0.0
        row = runs.measured("offloadkit", tried, planned_seconds)
        say(summary(row))
    kept = ("status", "reason", "step_seconds", "vram_bytes", "peak_ram_bytes")
    return {"batch_size": size, "is_most": size == most} | {key: row[key] for key in kept if key in row}


def _written_down(
    model: Any, train: Any, held_out: Any, tokenizer: Any, given: dict[str, Any], folder: Path
) -> tuple[dict[str, Any], int]:
    """Write `finetune`'s inputs to files for other processes. Returns its arguments and the number of rows."""
    columns = ColumnOptions(*(given.get(name) for name in ("input_column", "target_column", "template"))).named
    path, number = learning.rows_file(train, folder, "train", "train", columns)
    told = given | {"model": learning.weights_folder(model, folder, given.get("init", "pretrained"))}
    told |= {"train_dataset": path, "tokenizer": learning.tokenizer_folder(tokenizer, folder)}
    if held_out is not None:
        told["eval_dataset"] = learning.rows_file(held_out, folder, "held-out", "validation", columns)[0]
    return told, number


def _trained(
    told: dict[str, Any], num_samples: int, grid: list[tuple[int, int]], rates: list[tuple[int, str, float]], runs: Runs
) -> Iterator[Row]:
    tried = [(s, t, scaling, rate) for s, t in grid for rows, scaling, rate in rates if rows == s * t]
    for number, (size, times, scaling, rate) in enumerate(tried, start=1):
        say = progress(f"[{number}/{len(tried)}] batch {size} x {times}, learning rate {rounded(rate)} ({scaling})")
        row: Row = {"batch_size": size, "accumulation": times, "scaling": scaling, "learning_rate": rate}
        of_size = {"batch_size": size, "gradient_accumulation": times, "learning_rate": rate}
        row |= _trained_row(told | of_size, num_samples, runs)
        if "fault" in row:
            say("refused")
            kind, message = row["fault"]
            raise getattr(errors, kind)(message)
        yield _with_rates(row, num_samples)
        loss = f", held-out loss {row['eval_loss']:.4f}" if "eval_loss" in row else ""
        say(summary(row) + loss)


def _trained_row(told: dict[str, Any], num_samples: int, runs: Runs) -> Row:
    rows = told["batch_size"] * told["gradient_accumulation"]
    num_steps = num_samples // rows
    if num_steps == 0:
        reason = f"not trained: {num_samples:,} samples are fewer than the {rows:,} of one step"
        return {"status": "failed", "reason": reason}
    task = {"mode": "finetune", "finetune": told | {"max_steps": num_steps}, "scratch": str(runs.folder.resolve())}
    task["function"] = "offloadkit.doors.comparing.learning:finetuned"
    row = runs.row(task, told["ram"], math.inf)  # only that process knows its planned duration
    if row["status"] == "measured":
        row |= {name: row["metrics"][name] for name in ("eval_loss", "train_loss") if name in row["metrics"]}
        row["num_samples"] = num_steps * rows
    return row


# ---- in sentences ----

_BOUNDS = {
    "CPU step": "the optimizer on the CPU (RAM's bandwidth)",
    "H2D": "the bus to the GPU",
    "D2H": "the bus from the GPU",
    "disk": "the disk",
    "GPU step": "the optimizer on the GPU",
    "launches": "Python, which starts the kernels,",
}


def _explained(result: Sweep) -> Iterator[str]:
    for times in result.accumulations:
        sides = list(_sides(result, times))
        if sides and len(result.accumulations) > 1:
            yield f"With {times} micro-batch{'es' if times > 1 else ''} a step:"
        yield from sides
    yield from _largest_in_words(result)
    yield from _learned(result)


def _sides(result: Sweep, times: int) -> Iterator[str]:
    rows, knee = result.measured(times), result.knee(times)
    if len(rows) == 1:
        yield f"Batch {min(rows)} alone shows no knee: measure several sizes"
    if knee is None:
        return
    sizes = sorted(rows)
    below, above = _bounds(result.forecasts.get(times, {}), sizes)

    def grown(size: int) -> str:
        ratio = rows[size]["step_seconds"] / rows[sizes[0]]["step_seconds"]
        first = f"{sizes[0]} row{'s' if sizes[0] > 1 else ''}"
        return f"a step of {size} rows takes {ratio:.1f} times as long as one of {first}"

    if knee.where == "before":
        yield f"From batch {sizes[0]} on {above} bounds the step: larger batches are not free ({grown(sizes[-1])})"
    elif knee.where == "beyond":
        free = f"larger batches are almost free ({grown(sizes[-1])})"
        yield f"Up to batch {sizes[-1]} {below} bounds the step: {free}, and the knee lies beyond"
    else:
        last = max(size for size in sizes if size <= knee.size)
        free = f" ({grown(last)})" if last > sizes[0] else f" up to there ({grown(sizes[1])})"
        yield f"Until about batch {round(knee.size)} {below} bounds the step: larger batches are almost free{free}"
        each = words.duration(min(row["sample_seconds"] for row in rows.values()))
        yield f"Beyond it {above} does: time grows with the batch, and a sample takes {each} at best"
    yield from _prediction(result, times, knee, sizes)


def _prediction(result: Sweep, times: int, knee: Knee, sizes: list[int]) -> Iterator[str]:
    predicted = result.predicted_knee(times)
    if predicted is None:
        return
    apart = abs(predicted.place(sizes) - knee.place(sizes))
    verdict = "the same size" if apart == 0 else "one size away" if apart == 1 else f"{apart} sizes away"
    rows = round(predicted.size)
    where = {"before": f"{rows} or less", "beyond": f"{rows} or more", "within": f"{rows}"}[predicted.where]
    yield f"The plan, from computing against optimizer and bus, has the knee at batch {where}: {verdict}"


def _bounds(forecasts: dict[int, Forecast], sizes: list[int]) -> tuple[str, str]:
    made = {size: forecasts[size] for size in sizes if size in forecasts and forecasts[size].step_seconds is not None}
    if sizes[0] not in made:
        return "what does not grow with the batch", "computing"
    first = made[sizes[0]]
    name, seconds = fixed_seconds(first)
    below = _BOUNDS[name]
    if first.on_cpu:
        return "starting operations on the CPU", "the CPU's computing"
    if seconds < first.busy["GPU"]:
        below = "reading weights on the GPU" if reads_weights(made) else "the GPU's computing"
    return below, "the GPU's computing"


def _largest_in_words(result: Sweep) -> Iterator[str]:
    found = result.largest
    if found:
        least = "at least " if found["is_most"] else ""
        sentence = f"The largest batch that fits is {least}{found['batch_size']} by the plan"
        if found.get("status") == "measured":
            key, tier = ("vram_bytes", "VRAM") if found["vram_bytes"] else ("peak_ram_bytes", "RAM")
            yield f"{sentence}, and it runs in {format_bytes(found[key])} of {tier}"
        elif "reason" in found:
            yield f"{sentence}; run, it {'' if found['status'] == 'does not fit' else 'failed: '}{found['reason']}"
        else:
            yield f"{sentence}, and was not run"
    for row in result.rows:
        if row["status"] != "measured":
            yield f"Batch {row['batch_size']} x {row['accumulation']}: {row['reason']}"


def _learned(result: Sweep) -> Iterator[str]:
    rows = [row for row in result.rows if "eval_loss" in row]
    if len(rows) < 2:
        return
    count = {id(row): row["batch_size"] * row["accumulation"] for row in rows}
    first = min(rows, key=lambda row: count[id(row)])
    loss = f"the held-out loss is {first['eval_loss']:.4f} at {count[id(first)]} rows a step"
    yield f"After {first['num_samples']:,} samples {loss}"
    most = max(count.values())
    for row in rows:
        if count[id(row)] == most and row is not first:
            scaled = row["scaling"] != "none"
            how = f"the learning rate scaled ({row['scaling']})" if scaled else "the same learning rate"
            change = row["eval_loss"] - first["eval_loss"]
            yield f"At {most} rows and {how} it is {row['eval_loss']:.4f} ({change:+.4f})"
    best = min(rows, key=lambda row: row["eval_loss"])
    scaled = "" if best["scaling"] == "none" else f", scaled ({best['scaling']})"
    where = f"at {count[id(best)]} rows and learning rate {rounded(best['learning_rate'])}{scaled}"
    yield f"The lowest is {best['eval_loss']:.4f}, {where}"
