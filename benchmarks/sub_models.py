"""Train models of any kind by the bare loop within a budget, and by plain AdamW with everything on the GPU.

    python -m benchmarks.sub_models                             # six minutes on an H100
    python -m benchmarks.sub_models --cases whisper-large-10 --engines any
    python -m benchmarks.sub_models --tiny --out /tmp/rows.csv  # a try without a GPU

Whisper-large (sound), Qwen2.5-VL-3B and Gemma3-4B (images), ModernBERT-large (an encoder) and a Qwen3 MoE with 64
experts of 5.8 G parameters, with random weights. Each engine runs in its own process and appends one row: seconds,
VRAM and RAM of a training step, for offloadkit measured and planned from the batch as `OffloadEngine(example=batch)`.
Plain AdamW is not limited.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks import run
from benchmarks.lora import line_of
from benchmarks.ours import Ours
from benchmarks.table import Row
from offloadkit.doors.engines import worker
from offloadkit.doors.engines.engine import LEARNING_RATE, MAX_GRAD_NORM
from offloadkit.doors.engines.plain import Baseline
from offloadkit.doors.engines.work import Batch, Work
from offloadkit.engine.engine import OffloadEngine
from offloadkit.facts import hardware
from offloadkit.facts.config import OffloadConfig
from offloadkit.offload.unread import become, leave_unread
from offloadkit.optim.table import DTYPES
from offloadkit.planner import Dtype


def main(arguments: list[str] | None = None) -> list[Row]:
    """Measure, append the rows to the table, print them, and return them."""
    rows = run.by_options(parse(arguments))
    for row in rows:
        print(line_of(row) + beside_plain(row, rows))
    return rows


def parse(arguments: list[str] | None) -> argparse.Namespace:
    from benchmarks.cases import CASES, SUB_MODELS

    options = run.parser_for("sub_models", __doc__, SUB_MODELS).parse_args(arguments)
    tiny = [name for name in CASES if name.startswith("tiny-any-")]
    of_claim = [name for name, case in CASES.items() if case.claim == "any"]
    options.cases = options.cases or (tiny if options.tiny else of_claim)
    return options


def beside_plain(row: Row, rows: list[Row]) -> str:
    """ ", bound 0.5 s, 1.3x of plain AdamW's seconds" for a row of offloadkit."""
    if row["engine"] != "any" or row["status"] != "measured":
        return ""
    bound = (row["figures"] or {}).get("bound_seconds")
    told = f", {row['seconds'] / bound:.2f}x of the bound of {bound:.4f} s" if bound else ""
    plain = next((each for each in rows if each["engine"] == "any-plain" and each["case"] == row["case"]), None)
    if plain is None or plain["status"] != "measured":
        return told
    return f"{told}, {row['seconds'] / plain['seconds']:.2f}x of plain AdamW's seconds"


def measured(work: Work, engine: str) -> dict[str, Any]:
    """The figures of `engine` ("any" or "any-plain") in this process."""
    device = hardware.default_device()
    steps = [[batch_of(work, DTYPES[work.dtype_on(device)], device)]]
    made = {"any": AnyModel, "any-plain": AnyPlain}[engine]
    return worker.measured(work, made, steps, num_positions(steps[0][0], work))


class AnyModel(Ours):
    """`OffloadEngine` with the batch as its example."""

    def __init__(self, work: Work, dtype: Dtype, device: torch.device) -> None:
        """Raises `DoesNotFitError` if no plan fits."""
        model = lazy_model_of(work, dtype, device)
        config = OffloadConfig(
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
            working_dtype=dtype,
            vram=None if device.type == "cpu" else work.vram,
            ram=work.ram,
        )
        began = time.perf_counter()
        example = batch_of(work, DTYPES[dtype], device)
        self._model = OffloadEngine(model, config, device=device, example=example)
        print(f"placed in {time.perf_counter() - began:.1f} s\n{self._model.plan}", flush=True)


class AnyPlain(Baseline):
    def model_of(self, work: Work, dtype: Dtype, device: torch.device) -> Any:
        model = model_of(work, dtype, device)
        if work.recomputed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model


def config_of(work: Work) -> Any:
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(work.model)
    for each in (config, config.get_text_config()):
        each.use_cache = False
    return config


def model_of(work: Work, dtype: Dtype, device: torch.device) -> Any:
    """The class of the config's architecture; its weights are drawn on `device`."""
    model, draw = _undrawn(work, dtype, device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(draw(parameter))
    return model


def lazy_model_of(work: Work, dtype: Dtype, device: torch.device) -> Any:
    """The same model in RAM with unread weights. The engine draws each weight when it places it."""
    model, draw = _undrawn(work, dtype, torch.device("cpu"), device)
    empty: dict[Any, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                made = nn.Parameter(torch.empty_like(parameter, device="meta"))
                module._parameters[name] = empty.setdefault(parameter, made)

    def materialise(parameters: Any) -> None:
        for parameter in parameters:
            if parameter.is_meta:
                become(parameter, draw(parameter).cpu())

    leave_unread(model.parameters(), materialise)
    return model


def _undrawn(
    work: Work, dtype: Dtype, weights_on: torch.device, draws_on: torch.device | None = None
) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """The model with uninitialized memory, and a function that draws the values of a parameter."""
    import transformers
    from transformers.initialization import no_init_weights

    config = config_of(work)
    kind: Any = getattr(transformers, config.architectures[0])
    with weights_on, no_init_weights():
        model = kind._from_config(config, dtype=DTYPES[dtype])
    model.tie_weights()
    device = draws_on or weights_on
    generator = torch.Generator(device).manual_seed(work.seed)

    def draw(parameter: torch.Tensor) -> torch.Tensor:
        drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        return drawn.normal_(0.0, 0.02, generator=generator) if drawn.ndim > 1 else drawn.fill_(1.0)

    return model.train(), draw


def batch_of(work: Work, dtype: torch.dtype, device: torch.device) -> Batch:
    """A micro-batch as the model's processor makes it; every row has one image, or sound of the full length.

    input_ids and labels are int64 [rows, length], with the places of the image in `length`.
    """
    config, generator, rows = config_of(work), torch.Generator().manual_seed(work.seed), work.batch_size
    text = config.get_text_config()

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def words(length: int) -> torch.Tensor:
        return torch.randint(16, min(text.vocab_size, 2000), (rows, length), generator=generator).to(device)

    if config.model_type == "whisper":
        return {
            "input_features": drawn(rows, config.num_mel_bins, work.input_length),
            "labels": words(work.target_length),
        }
    ids = words(work.input_length)
    if config.model_type == "qwen2_5_vl":
        side = int((work.input_length / 4) ** 0.5)  # a quarter of the tokens are the image's
        vision = config.vision_config
        patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        size = side * vision.spatial_merge_size
        ids[:, 0], ids[:, 1 : 1 + side * side] = config.vision_start_token_id, config.image_token_id
        more = {
            "pixel_values": drawn(rows * size * size, patch),
            "image_grid_thw": torch.tensor([[1, size, size]] * rows, device=device),
            "mm_token_type_ids": (ids == config.image_token_id).long(),
        }
    elif config.model_type == "gemma3":
        size = config.vision_config.image_size
        ids[:, 1 : 1 + config.mm_tokens_per_image] = config.image_token_id
        more = {
            "pixel_values": drawn(rows, 3, size, size),
            "token_type_ids": (ids == config.image_token_id).long(),
        }
    else:
        more = {}
    image = getattr(config, "image_token_id", None)
    labels = ids if image is None else ids.masked_fill(ids == image, -100)
    return {"input_ids": ids, "labels": labels, **more}


def num_positions(batch: Batch, work: Work) -> int:
    """Tokens of all rows, with the places of images; for sound, its frames after the first layers, and the labels."""
    if "input_ids" in batch:
        return batch["input_ids"].numel()
    return work.batch_size * (work.input_length // 2 + work.target_length)


if __name__ == "__main__":
    main()
