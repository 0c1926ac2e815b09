"""A sweep in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from offloadkit.comparing import words
from offloadkit.comparing.knee import Knee, fixed_seconds, reads_weights
from offloadkit.engines.forecast import Forecast
from offloadkit.units import format_bytes

if TYPE_CHECKING:
    from offloadkit.comparing.sweeping import Sweep

_BOUNDS = {
    "CPU step": "the optimizer on the CPU (RAM's bandwidth)",
    "H2D": "the bus to the GPU",
    "D2H": "the bus from the GPU",
    "disk": "the disk",
    "GPU step": "the optimizer on the GPU",
    "launches": "Python, which starts the kernels,",
}


def explained(result: Sweep) -> Iterator[str]:
    """Sentences, one a line."""
    for times in result.accumulations:
        sides = list(_sides(result, times))
        if sides and len(result.accumulations) > 1:
            yield f"With {times} micro-batch{'es' if times > 1 else ''} a step:"
        yield from sides
    yield from _largest(result)
    yield from _learned(result)


def _sides(result: Sweep, times: int) -> Iterator[str]:
    """What bounds the step below the knee and above it, and where the plan has it."""
    rows, knee = result.measured(times), result.knee(times)
    if len(rows) == 1:
        yield f"Batch {min(rows)} alone shows no knee: measure several sizes"
    if knee is None:
        return
    sizes = sorted(rows)
    below, above = _bounds({size: result.forecasts.get(times, {}).get(size) for size in sizes}, sizes)

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
        free_sizes = [size for size in sizes if size <= knee.size]
        free = f"larger batches are almost free ({grown(free_sizes[-1])})"
        if len(free_sizes) == 1:
            free = f"larger batches are almost free up to there ({grown(sizes[1])})"
        yield f"Until about batch {round(knee.size)} {below} bounds the step: {free}"
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


def _bounds(forecasts: dict[int, Forecast | None], sizes: list[int]) -> tuple[str, str]:
    """What bounds the smallest and the largest step, by the plan."""
    made = {size: each for size, each in forecasts.items() if each is not None and each.step_seconds is not None}
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


def _largest(result: Sweep) -> Iterator[str]:
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
    """The held-out loss of the smallest step, and of the largest with each learning rate."""
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
            how = (
                "the same learning rate" if row["scaling"] == "none" else f"the learning rate scaled ({row['scaling']})"
            )
            change = row["eval_loss"] - first["eval_loss"]
            yield f"At {most} rows and {how} it is {row['eval_loss']:.4f} ({change:+.4f})"
    best = min(rows, key=lambda row: row["eval_loss"])
    scaled = "" if best["scaling"] == "none" else f", scaled ({best['scaling']})"
    where = f"at {count[id(best)]} rows and learning rate {best['learning_rate']:.3g}{scaled}"
    yield f"The lowest is {best['eval_loss']:.4f}, {where}"
