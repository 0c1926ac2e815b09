"""Workloads for timing engines: models with random weights and batches of random tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from offloadkit.doors.planning import default_dtype
from offloadkit.errors import ConfigError, shown
from offloadkit.facts import hardware
from offloadkit.facts.config import OffloadConfig, Precision, check_counts
from offloadkit.facts.units import parse_bytes
from offloadkit.hf.load import auto_class_of, build, completed, draw_lazily, infer_task
from offloadkit.hf.patches import choose_attention, fuse
from offloadkit.hf.source import resolve
from offloadkit.offload.compile import compile_blocks
from offloadkit.offload.unread import become, is_unread, leave_unread
from offloadkit.optim.table import DTYPES
from offloadkit.planner import Dtype

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TINY = "t5-tiny"

NUM_SPECIAL_IDS = 3
"""Special ids from 0 (padding, end, unknown in most vocabularies), which are not drawn."""
IGNORED_LABEL = -100

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Work:
    """A training setup. Sizes are per micro-batch; a step has `accumulation` micro-batches and one update."""

    model: str
    """`TINY`, a preset, a folder with a config.json, or a hub name. Only the config is read."""
    batch_size: int
    input_length: int
    target_length: int
    """Target tokens per row; models without a separate decoder ignore it."""
    accumulation: int = 1
    precision: Precision = "exact"
    """Precision of offloadkit's optimizer states; other engines keep fp32."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Working dtype; None: `finetune`'s default on this device."""
    recomputed: bool = False
    our_compute: bool = False
    """Let the baseline use offloadkit's attention and norms, so that only offloading differs; else HuggingFace's."""
    vram: int | None = None
    """Bytes the process may take, including CUDA's context; None: free VRAM."""
    ram: int | None = None
    steps: int | None = None
    """Timed steps, after 1 + `warmup` untimed steps; None: 6, or as many as fit in 3 seconds."""
    warmup: int = 2
    seed: int = 0
    mask: Literal["full", "ragged"] = "full"
    """"ragged": of several lengths, with a mask that the plan does not know."""
    compiled: bool = False
    """Use `torch.compile` on repeated blocks of offloadkit and the baseline."""
    disk: str | None = None
    """Folder for offloadkit's optimizer states that do not fit in RAM."""
    bucket_elements: int | None = None
    """Elements of DeepSpeed's buckets for gradients and gathered weights; None: DeepSpeed's default."""
    optimizer: str = "adamw"
    """offloadkit's optimizer; other engines use AdamW."""

    def to_dict(self) -> dict[str, Any]:
        """The fields for JSON. Fields after `seed` are left out at their defaults, so that older saved rows still
        match.
        """
        later = ("mask", "compiled", "disk", "bucket_elements", "optimizer")
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in later or getattr(self, field.name) != field.default
        }

    def dtype_on(self, device: torch.device) -> Dtype:
        on_gpu, native = device.type == "cuda", hardware.supports_bf16(device)
        return self.dtype or default_dtype(on_gpu=on_gpu, native_bf16=native)

    @property
    def rows(self) -> int:
        return self.batch_size * self.accumulation


SIZES = ("batch_size", "max_input_length", "max_target_length", "gradient_accumulation")


def full_work(model: str, given: Mapping[str, Any]) -> Work:
    """Work with full rows, from the arguments of `compare` and `measure_slowdown`.

    Raises:
        ConfigError: an argument is invalid.
    """
    check_counts({name: given[name] for name in (*SIZES, "steps")}, optional=("steps",))
    batch_size, input_length, target_length, accumulation = (given[name] for name in SIZES)
    limits = limits_of(given["precision"], given["vram"], given["ram"])
    return Work(model, batch_size, input_length, target_length, accumulation, steps=given["steps"], **limits)


def limits_of(precision: Any, vram: Any, ram: Any) -> dict[str, Any]:
    """`precision`, and both limits in bytes, None for no limit. Raises `ConfigError`."""
    OffloadConfig(precision=precision, vram=vram, ram=ram)
    limits = {name: None if size is None else parse_bytes(size) for name, size in (("vram", vram), ("ram", ram))}
    return {"precision": precision, **limits}


def config_of(model: str) -> PreTrainedConfig:
    """The model's config for training, without a generation cache."""
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model must be a preset, a folder or a hub name, got {shown(model)}")
    if model == TINY:
        from transformers import T5Config

        shape: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
        shape |= {"vocab_size": 384, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        config: PreTrainedConfig = T5Config(**shape, architectures=["T5ForConditionalGeneration"])
    else:
        config = resolve(model, init="random").config
    config.use_cache = False
    return config


def _our_config(model: str) -> PreTrainedConfig:
    config = config_of(model)
    choose_attention(config)
    return config


def model_to_plan(model: str) -> PreTrainedModel:
    config = _our_config(model)
    return build(config, infer_task(config), None, torch.device("meta"))


def lazy_model(work: Work, dtype: Dtype, device: torch.device) -> PreTrainedModel:
    """The model as offloadkit trains it, with unread weights, drawn on `device`, because a CPU takes minutes for
    billions.
    """
    config = _our_config(work.model)
    torch.manual_seed(work.seed)
    model = draw_lazily(config, infer_task(config), DTYPES[dtype])
    generator = torch.Generator(device).manual_seed(work.seed)

    def draw(parameters: Any) -> None:
        for parameter in parameters:
            if parameter.is_meta:
                become(parameter, _drawn(torch.empty_like(parameter, device=device), generator).cpu())

    if is_unread(model):
        leave_unread(model.parameters(), draw)
    return cast("PreTrainedModel", completed(model).train())


def plain_model(work: Work, dtype: Dtype, weights_on: torch.device, device: torch.device) -> PreTrainedModel:
    """HuggingFace's model; its weights are drawn on `device` and put on `weights_on` one by one."""
    from transformers.initialization import no_init_weights

    config = _our_config(work.model) if work.our_compute else config_of(work.model)
    with weights_on, no_init_weights():
        model: Any = auto_class_of(config, infer_task(config)).from_config(config, dtype=DTYPES[dtype])
    if work.our_compute:
        fuse(model, compiled=work.compiled)
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(work.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPES[dtype])
            parameter.copy_(_drawn(torch.empty_like(parameter, device=device), generator))
    if work.recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if work.compiled:
        compile_blocks(model, ())
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trained: PreTrainedModel = model.train()
    return trained


def _drawn(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    with torch.no_grad():
        return weight.normal_(0.0, 0.02, generator=generator) if weight.ndim > 1 else weight.fill_(1.0)


def random_steps(work: Work, device: torch.device) -> list[list[Batch]]:
    """One step of random tokens, a list of micro-batches.

    input_ids and labels are int64 [batch_size, length]; labels of a classifier are [batch_size].
    """
    config = config_of(work.model)
    task, num_words = infer_task(config), config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(work.seed)

    def drawn(first: int, end: int, *shape: int) -> torch.Tensor:
        return torch.randint(first, end, (work.batch_size, *shape), generator=generator)

    def batch() -> Batch:
        ids = labels = drawn(NUM_SPECIAL_IDS, num_words, work.input_length)
        if task == "classification":
            labels = drawn(0, config.num_labels or 2)
        elif task == "seq2seq":
            labels = drawn(NUM_SPECIAL_IDS, num_words, work.target_length)
        return {"input_ids": ids.to(device), "labels": labels.to(device, copy=True)}

    return [[batch() for _ in range(work.accumulation)]]


def width(step: list[Batch]) -> int:
    """The longest row's tokens; of sound, the labels'."""
    return max(batch["input_ids" if "input_ids" in batch else "labels"].shape[1] for batch in step)


def num_tokens(steps: list[list[Batch]]) -> int:
    """Mean number of input and decoder tokens per step, without padding."""
    total = 0
    for batch in (batch for step in steps for batch in step):
        ids, labels, mask = batch["input_ids"], batch["labels"], batch.get("attention_mask")
        total += ids.numel() if mask is None else int(mask.sum())
        written = labels != IGNORED_LABEL
        if labels.ndim == ids.ndim and (labels.shape != ids.shape or bool((labels != ids)[written].any())):
            total += int(written.sum())
    return round(total / len(steps))
