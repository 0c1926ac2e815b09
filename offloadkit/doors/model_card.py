"""The README.md beside a saved model: how it was trained, from what, and what came out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloadkit.doors.recipes import repeats_the_run
from offloadkit.facts.units import format_bytes, rounded
from offloadkit.facts.version import __version__
from offloadkit.hf.adapters import ADAPTERS
from offloadkit.hf.images import ImageRows
from offloadkit.hf.load import auto_class_name, is_speech, sees_images
from offloadkit.hf.presets import PRESETS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from offloadkit.facts.telemetry import Peaks
    from offloadkit.hf.data import PreparedData
    from offloadkit.planner import Plan

CARD = "README.md"
_REPEATS = "; saved as recipe.yaml, `offloadkit train recipe.yaml` repeats the run."
_IN_PARTS = ", in parts, as in recipe.yaml:"


def model_card(
    folder: Path,
    given: str | None,
    config: PreTrainedConfig,
    plan: Plan,
    sets: Mapping[str, tuple[object, PreparedData | None]],
    *,
    is_drawn: bool,
    recipe: str,
    num_steps: int,
    metrics: Mapping[str, float],
    peaks: Peaks,
) -> str:
    """The card as Markdown, with the header that the hub reads.

    Args:
        folder: of the saved model.
        given: the model's name or folder; None: it was in memory.
        config: the model's.
        sets: by "training" and "evaluation": what the user passed, and the prepared rows.
        is_drawn: training began with random weights.
        recipe: the run's arguments in YAML, as `recipes.with_head` returns them.
        metrics: as in `FinetuneResult`; numbers that are not known yet are left out.
    """
    task = next(data.task for _, data in sets.values() if data is not None)
    with_images = any(data is not None and isinstance(data.dataset, ImageRows) for _, data in sets.values())
    base = PRESETS[given].hub_name if given in PRESETS else given
    library = "peft" if (folder / ADAPTERS).is_file() else "transformers"
    header = ["---", f"library_name: {library}", "tags: [offloadkit]"]
    is_name = base is not None and base.count("/") == 1 and not base.startswith((".", "/", "~"))
    if is_name and not is_drawn and not os.path.isdir(str(given)):
        header.append(f"base_model: {base}")
    figures = {"steps": f"{num_steps:,}", **{key: rounded(value, 4) for key, value in metrics.items()}}
    for tier, words in (("vram", "peak VRAM"), ("ram", "peak RAM")):
        if peak := max((each.get(tier, 0) for each in peaks.values()), default=0):
            figures[words] = format_bytes(peak)
    start = given if given is not None else "A model in memory"
    how = "with random weights was trained" if is_drawn else "was fine-tuned"
    trained = f"{plan.num_trainable_parameters:,} of its {plan.num_parameters:,} parameters"
    if plan.num_trainable_parameters == plan.num_parameters:
        trained = f"all {plan.num_parameters:,} parameters"
    auto_class, is_adapters = auto_class_name(config, task), (folder / ADAPTERS).is_file()
    beside = "processor" if is_speech(config) or with_images else "tokenizer"
    imports = [f"from transformers import {auto_class}, Auto{beside.title()}"]
    if is_adapters:
        of_media = is_speech(config) or (task == "causal" and sees_images(config))
        auto_class = "AutoPeftModel" if of_media else auto_class.replace("AutoModel", "AutoPeftModel")
        imports = [f"from peft import {auto_class}", f"from transformers import Auto{beside.title()}"]
    classes = {"model": auto_class, beside: f"Auto{beside.title()}"}
    load = [f"{name} = {cls}.from_pretrained({str(folder)!r})" for name, cls in classes.items()]
    if is_adapters:
        load.append("whole = model.merge_and_unload()  # an ordinary model, with the adapters in its weights")
    frames = " frames" if is_speech(config) else ""
    lines = [
        "\n".join([*header, "---"]),
        f"# {folder.resolve().parent.name}",
        f"{start} {how} by offloadkit {__version__}: {trained}.",
        "\n".join(["```python", *imports, "", *load, "```"]),
        "## Figures",
        "\n".join(["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in figures.items())]),
        "## Data",
        "\n".join(
            f"- {key}: {_described(rows, data, frames)}" for key, (rows, data) in sets.items() if data is not None
        ),
        "## Plan",
        f"{plan.verdict}",
        "## Arguments",
        "The arguments of `offloadkit.finetune`" + (_REPEATS if repeats_the_run(recipe) else _IN_PARTS),
        f"```yaml\n{recipe.strip()}\n```",
    ]
    return "\n\n".join(lines) + "\n"


def _described(rows: Any, data: PreparedData, frames: str) -> str:
    if isinstance(rows, float):
        source = f"{rounded(100 * rows, 3)} % of the training rows, held out"
    else:
        source = str(rows) if isinstance(rows, str) or hasattr(rows, "__fspath__") else f"a {type(rows).__name__}"
    tokens = f"{data.longest_input:,}{frames}" + (f" + {data.longest_target:,}" if data.task == "seq2seq" else "")
    return f"{source}: {data.rows_in_words} of at most {tokens} tokens"
