"""A picture of the docs, from a result file of benchmarks, `compare` or `sweep`:

python -m benchmarks.chart benchmarks/results/FILE.json docs/FILE.png
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.table import label
from offloadkit.comparing.comparison import Comparison
from offloadkit.comparing.forecast import from_row
from offloadkit.comparing.sweeping import Sweep

LABELS = {
    "gpu": "all on the GPU",
    "gpu-ours": "all on the GPU, our compute",
    "offloadkit": "offloadkit",
    "planned": "offloadkit",
    "ao-amp": "torchao, fp32 (no clipping)",
    "ao": "torchao, bf16 (no clipping,\nno master weights)",
    "zero2": "DeepSpeed ZeRO-2 offload",
    "zero3": "DeepSpeed ZeRO-3 offload",
}
OURS, OTHERS, BASELINE = "#0b6e99", "#b8bcc2", "#6b7078"
GIB = 2**30


def title_of(row: dict[str, Any], machine: dict[str, Any]) -> str:
    """What was run, and where."""
    work = row["work"]
    shape = f"{work['batch_size']} x ({work['tokens']}+{work['target_tokens']}) tokens a step"
    return f"{work['model']}, {row['num_parameters'] / 1e9:.2f} G parameters, {shape}, {machine['gpu']}"


def label_of(row: dict[str, Any]) -> str:
    """Of a bar: what a plan was made within is part of it."""
    name = row["engine"]
    return label(row).replace(name, LABELS[name]) if name == "planned" else LABELS[name]


def draw(result: dict[str, Any], path: Path) -> None:
    """Three bars an engine, and a budget: seconds a step, VRAM and host RAM."""
    order = list(LABELS)
    known = [row for row in result["rows"] if "step_seconds" in row and row["engine"] in order]
    rows = {label_of(row): row for row in sorted(known, key=lambda row: order.index(row["engine"]))}
    names = list(rows)
    kinds = {"gpu": BASELINE, "gpu-ours": BASELINE, "offloadkit": OURS, "planned": OURS}
    colours = [kinds.get(row["engine"], OTHERS) for row in rows.values()]
    panels = [
        ("seconds a step", lambda row: row["step_seconds"], "{:.2f}"),
        ("VRAM of the process, GiB", lambda row: row["vram_bytes"] / GIB, "{:.0f}"),
        ("peak host RAM, GiB", lambda row: row["peak_ram_bytes"] / GIB, "{:.0f}"),
    ]
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True, layout="constrained")
    for axis, (title, value, form) in zip(axes, panels, strict=True):
        bars = axis.barh(names, [value(rows[name]) for name in names], color=colours)
        axis.bar_label(bars, labels=[form.format(value(rows[name])) for name in names], padding=3, fontsize=9)
        axis.set_title(title, fontsize=10, loc="left")
        axis.margins(x=0.15)
        axis.xaxis.set_visible(False)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    axes[0].invert_yaxis()  # the first on top
    figure.suptitle(title_of(rows[names[0]], result["machine"]), fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=150, facecolor="white")


def draw_again(result: dict[str, Any], path: Path) -> None:
    """What `compare` or `sweep` saved, as they draw it today."""
    kind = Sweep if "forecasts" in result else Comparison
    kept = {field.name: result[field.name] for field in fields(kind) if field.name in result} | {"output_dir": path}
    if kind is Sweep:
        kept["forecasts"] = {
            int(times): {int(size): from_row(row) for size, row in by_size.items()}
            for times, by_size in result["forecasts"].items()
        }
    kind(**kept).chart().savefig(path, dpi=150)


if __name__ == "__main__":
    content = json.loads(Path(sys.argv[1]).read_text())
    (draw_again if "num_samples" in content else draw)(content, Path(sys.argv[2]))
