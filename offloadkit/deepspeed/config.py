"""Reads a ds_config.json by the table `KEYS`, which says for each key what it becomes or why it is not needed.

docs/from-deepspeed.md shows the table.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from offloadkit.errors import ConfigError, did_you_mean, shown
from offloadkit.facts.config import DynamicLossScale, OffloadConfig, Placement
from offloadkit.facts.files import path_of, read_json

logger = logging.getLogger(__name__)

SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""DeepSpeed's own schedules; classes of torch.optim.lr_scheduler are accepted too."""


@dataclass(frozen=True)
class Key:
    kind: Literal["read", "ignored", "refused"]
    """ "refused" raises an error unless the value is false, null, 0, 1 or a section that is not enabled."""
    what: str
    value: str = ""
    """ "count": a whole number >= 1, "number": a number >= 0, "flag": true or false, "": anything."""


_read, _ignored, _refused = (partial(Key, kind) for kind in ("read", "ignored", "refused"))
_count, _number, _flag = (partial(_read, value=value) for value in ("count", "number", "flag"))


def _alike(key: Key, section: str, names: str) -> dict[str, Key]:
    return {section + name: key for name in names.split()}


_STAY = "it changes what is trained; use DeepSpeed for it"
_PLAN = "the plan decides where tensors live; the placement changes no number"
_BUCKETS = "layers move as a whole, through buffers that the plan sizes"
_OVERLAP = "copies always overlap with compute"
_FP32_SUMS = "gradients are always added in fp32"
_CUTS = "with several GPUs states and gradients are always shared between them"
_NOT_ROUNDED = "nothing is quantised: training is exact"
_LOGS = "Telemetry and Monitor record every step"

KEYS: dict[str, Key] = {
    "train_batch_size": _count("rows of an update: micro-batch x accumulation x GPUs; wrong products are an error"),
    "train_micro_batch_size_per_gpu": _count("rows that training_data is loaded in"),
    "gradient_accumulation_steps": _count("OffloadConfig(gradient_accumulation=...)"),
    "managed_gradient_accumulation": _flag("false: every step() ends the accumulation window"),
    "optimizer.type": _read("Adam and AdamW: optimizer='adamw'; Lion: optimizer='lion'. Others are refused"),
    "optimizer.params.lr": _number("OffloadConfig(learning_rate=...); 0.001 where it is left out, as in DeepSpeed"),
    "optimizer.params.betas": _read("OffloadConfig(betas=...); (0.9, 0.999) where they are left out, for Lion too"),
    "optimizer.params.eps": _number("OffloadConfig(eps=...)"),
    "optimizer.params.weight_decay": _number("OffloadConfig(weight_decay=...), decoupled"),
    "optimizer.params.adam_w_mode": _flag(
        "for Adam: false is refused with a weight decay in the config, a group or a Trainer, since decay is decoupled"
    ),
    "optimizer.params.torch_adam": _flag("the step is exact fp32 AdamW anyway; true: weight_decay is 0.01 by default"),
    **_alike(_ignored("the step is one pass over each layer"), "", "optimizer.params.foreach optimizer.params.fused"),
    **_alike(
        _ignored("moments are fp32; precision='compact' keeps them in bf16"),
        "",
        "optimizer.params.fp32_optimizer_states bf16.bf16_optimizer_states",
    ),
    "optimizer.params.set_grad_none": _ignored("gradients are gone after each step"),
    "optimizer.params.bias_correction": _flag("false is refused: AdamW corrects its bias"),
    "optimizer.params.amsgrad": _refused("leave it out: AdamW is stepped without amsgrad"),
    "optimizer.params.max_grad_norm": _refused("write gradient_clipping at the top level instead, as DeepSpeed says"),
    "optimizer.legacy_fusion": _ignored("there is one step"),
    "scheduler.type": _read(", ".join(SCHEDULES) + ", or a class of torch.optim.lr_scheduler; `initialize` steps it"),
    "scheduler.params": _read("the schedule's own arguments"),
    "gradient_clipping": _number("OffloadConfig(max_grad_norm=...); 0 clips nothing; 1.0 where it is left out"),
    "fp16.enabled": _flag("OffloadConfig(working_dtype='fp16'), with fp32 master weights"),
    "fp16.auto_cast": _flag("true: floating-point inputs are cast to fp16"),
    "fp16.loss_scale": _number("0: dynamic; else OffloadConfig(loss_scale=...)"),
    "fp16.initial_scale_power": _number("DynamicLossScale(start=2**...)"),
    "fp16.loss_scale_window": _count("DynamicLossScale(window=...)"),
    "fp16.hysteresis": _count("DynamicLossScale(hysteresis=...)"),
    "fp16.consecutive_hysteresis": _flag("DynamicLossScale(consecutive_hysteresis=...)"),
    "fp16.min_loss_scale": _number("DynamicLossScale(minimum=...)"),
    "fp16.fp16_master_weights_and_grads": _ignored("master weights stay fp32"),
    "bf16.enabled": _flag("OffloadConfig(working_dtype='bf16'), with fp32 master weights"),
    "bf16.check_grad_overflow": _flag("true, the default: OffloadConfig(on_nonfinite='skip'); false: an error"),
    "bf16.immediate_grad_update": _ignored("gradients are gathered while backward computes them"),
    "bf16.bf16_master_weights_and_grads": _ignored(
        "master weights stay fp32; they need 2 bytes in addition to a bf16 weight"
    ),
    "zero_optimization.stage": _ignored(f"{_PLAN}. Below stage 3 DeepSpeed ignores offload_param; the plan does not"),
    "zero_optimization.offload_optimizer.device": _read(f'"nvme": OffloadConfig(disk=nvme_path); else {_PLAN}'),
    "zero_optimization.offload_optimizer.nvme_path": _read("OffloadConfig(disk=...), used if RAM has no room"),
    **_alike(
        _ignored("memory that is copied from is always pinned"),
        "zero_optimization.",
        "offload_optimizer.pin_memory offload_param.pin_memory cpu_offload_use_pin_memory",
    ),
    **_alike(
        _ignored(_BUCKETS),
        "zero_optimization.",
        "offload_optimizer.buffer_count offload_param.buffer_count offload_param.buffer_size "
        "reduce_bucket_size use_multi_rank_bucket_allreduce allgather_bucket_size sub_group_size "
        "stage3_prefetch_bucket_size stage3_module_granularity_threshold stage3_allgather_sequential",
    ),
    **_alike(
        _ignored(_OVERLAP),
        "zero_optimization.",
        "offload_optimizer.pipeline_read offload_optimizer.pipeline_write offload_optimizer.super_offload "
        "overlap_comm round_robin_gradients",
    ),
    "zero_optimization.offload_optimizer.fast_init": _ignored("states are never written before they are needed"),
    "zero_optimization.offload_optimizer.ratio": _ignored("CPU and GPU share the step for the highest speed"),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": _ignored("the step uses all cores"),
    "zero_optimization.offload_param.device": _read(
        f'{_PLAN}. A warning for "nvme", since RAM must hold the weights, and for stages below 3'
    ),
    **_alike(
        _ignored("weights are never on disk: RAM must hold them"),
        "zero_optimization.",
        "offload_param.nvme_path offload_param.max_in_cpu",
    ),
    "zero_optimization.contiguous_gradients": _ignored("a layer's gradients are always in one buffer"),
    "zero_optimization.reduce_scatter": _ignored("a gradient always goes to the GPU that steps it"),
    **_alike(
        _ignored(_CUTS),
        "zero_optimization.",
        "allgather_partitions stage3_use_all_reduce_for_fetch_params zero_hpz_partition_size",
    ),
    "zero_optimization.compute_grad_norm": _ignored("computing the norm takes no extra pass"),
    "zero_optimization.load_from_fp32_weights": _ignored("checkpoints hold the fp32 master weights"),
    "zero_optimization.elastic_checkpoint": _ignored("any number of GPUs can resume from any checkpoint"),
    **_alike(
        _ignored(_PLAN),
        "zero_optimization.",
        "stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters "
        "stage3_max_reuse_distance cpu_offload cpu_offload_param",
    ),
    **_alike(
        _ignored("models are always saved whole"),
        "zero_optimization.",
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
    ),
    "zero_optimization.ignore_unused_parameters": _ignored("parameters without a gradient are not stepped"),
    "zero_optimization.legacy_stage1": _ignored("one engine covers all stages"),
    "zero_optimization.parameter_alignment": _ignored("parameters begin at multiples of 256 elements"),
    **_alike(
        _ignored(_NOT_ROUNDED),
        "zero_optimization.",
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
    ),
    "zero_optimization.memory_efficient_linear": _ignored("a linear layer never keeps a copy of its weight"),
    "zero_optimization.pipeline_loading_checkpoint": _ignored("checkpoints are read in pieces"),
    "zero_optimization.override_module_apply": _ignored("weights are whole wherever they are read"),
    "zero_optimization.log_trace_cache_warnings": _ignored(_LOGS),
    "zero_optimization.enable_sanity_checks": _ignored("the engine always checks its calls"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": _ignored("DeepSpeed's Muon is not supported"),
    "zero_optimization.leaf_module": _ignored("blocks are found by the model's structure"),
    "zero_optimization.zenflow": _ignored("every step uses all its gradients"),
    "zero_allow_untested_optimizer": _ignored("unknown optimizers are refused"),
    "zero_force_ds_cpu_optimizer": _ignored("the client's AdamW provides the groups; the engine steps them itself"),
    "activation_checkpointing": _ignored("the plan recomputes blocks if memory is short, or moves inputs to RAM"),
    "steps_per_print": _count("`initialize` prints a line every so many updates; Infinity: never"),
    "wall_clock_breakdown": _flag("`initialize` prints the seconds of each update's phases"),
    "dataloader_drop_last": _flag("drop_last of the DataLoader of training_data"),
    "offloadkit": _read("fields of OffloadConfig, such as vram, ram, precision; DeepSpeed ignores the section"),
    "communication_data_type": _ignored(f"{_FP32_SUMS}, of gradients as computed by backward"),
    **_alike(_ignored(_FP32_SUMS), "", "seq_parallel_communication_data_type data_types.grad_accum_dtype"),
    "data_types.param_dtype": _ignored("fp16.enabled and bf16.enabled decide it"),
    "data_types.buffer_dtype": _ignored("buffers keep their dtypes"),
    "data_types.keep_in_fp32_modules": _ignored("modules that a transformers model lists for this stay fp32 in fp16"),
    **_alike(_ignored(f"{_FP32_SUMS}, which do not overflow"), "", "prescale_gradients gradient_predivide_factor"),
    "gradient_allreduce_op": _read('"sum" is refused: gradients are the mean over GPUs'),
    "disable_allgather": _ignored(_CUTS),
    "checkpoint": _ignored("a checkpoint gets its name once it is complete, on any number of GPUs"),
    "aio": _ignored("states on disk are read and written with O_DIRECT"),
    **_alike(
        _ignored(_LOGS), "", "dump_state memory_breakdown timers comms_logger tensorboard wandb comet csv_monitor"
    ),
    "log_level": _ignored("Python's logging says it"),
    "disable_python_gc": _ignored("Python's garbage collection is unchanged"),
    "flops_profiler": _ignored("engine.profile() traces steps and names the bottleneck"),
    "autotuning": _ignored("the plan is searched at every start"),
    "datastates_ckpt": _ignored("checkpoints are read and written in pieces"),
    "compile": _ignored("OffloadConfig(compile_blocks=True) compiles"),
    "vocabulary_size": _ignored("the model knows it"),
    "use_data_before_expert_parallelism": _ignored("expert parallelism is not supported"),
    **_alike(
        _refused(_STAY),
        "",
        "weight_quantization tensor_parallel expert_parallel sequence_parallel_size hybrid_engine "
        "data_efficiency curriculum_learning progressive_layer_drop compression_training quantize_training "
        "eigenvalue sparse_attention",
    ),
    **_alike(
        _refused('leave it out: "bf16" or "fp16" with {"enabled": true} keeps fp32 master weights'),
        "",
        "torch_autocast amp",
    ),
    "pipeline": _ignored("it is for DeepSpeed's PipelineModule, which offloadkit does not train"),
    "data_parallel_size": _ignored("all processes share the data"),
    "sparse_gradients": _refused("leave it out: gradients are dense"),
    "elasticity": _refused(
        "leave it out, and write the batch sizes: any number of GPUs can resume from any checkpoint"
    ),
    "nebula": _refused("leave it out: checkpoints are written to a folder"),
}
"""Keys by dotted name. A section without keys in this table, such as "tensorboard", is treated as a whole."""

_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "lion": "lion"}
_SECTIONS = {name[:at] for name in KEYS for at, letter in enumerate(name) if letter == "."}
_OTHER_NAMES = {"bfloat16": "bf16"}


@dataclass(frozen=True)
class DeepSpeedConfig:
    options: dict[str, Any]
    """Fields of `OffloadConfig`, without a dynamic loss scale. Missing keys have DeepSpeed's defaults."""
    written: dict[str, Any]
    """Raw values of the keys that have an effect, by dotted name, without "auto"."""
    dynamic_loss_scale: dict[str, Any] | None
    train_batch_size: int | None
    """Rows per update; None if unknown."""
    micro_batch_size: int | None
    accumulation: int | None
    managed_accumulation: bool
    """Whether `step()` counts micro-batches; False: every `step()` ends an accumulation window."""
    decay_is_coupled: bool
    """Whether DeepSpeed's Adam would add weight decay to the gradient (`adam_w_mode` is false)."""
    schedule: tuple[str, dict[str, Any]] | None
    casts_inputs: bool
    stage: int
    steps_per_print: int | None
    wall_clock_breakdown: bool
    drop_last: bool
    auto: tuple[str, ...] = ()
    ignored: dict[str, str] = field(default_factory=dict)
    where: str = "the DeepSpeed config"

    @property
    def has_optimizer(self) -> bool:
        return "optimizer.type" in self.written

    def check_decay(self, weight_decay: float, by: str) -> None:
        """Raise `ConfigError` if the config asks for coupled decay: decay is decoupled here. `by`: who set
        `weight_decay`.
        """
        if self.decay_is_coupled and weight_decay:
            raise ConfigError(
                f"adam_w_mode is false with weight_decay {weight_decay} by {by}: weight decay is decoupled here "
                "(AdamW). Set adam_w_mode to true, or weight_decay to 0"
            )


def read_deepspeed(source: str | Path | dict[str, Any], *, num_gpus: int | None = None) -> DeepSpeedConfig:
    """Read a ds_config.json. Rank 0 logs ignored keys as a warning and the reasons as INFO.

    Args:
        source: the file, or its content.
        num_gpus: for the product of the batch sizes; None: torchrun's WORLD_SIZE, else 1.

    Raises:
        ConfigError: the file is unreadable, a known section has an unknown key, a value is invalid, the batch sizes do
            not multiply, or a requested feature is not supported.
    """
    if num_gpus is None:
        num_gpus = int(os.environ.get("WORLD_SIZE") or 1)
    where, content = _content(source)
    _check_optimizer(content, where)
    said: dict[str, Any] = {}
    ignored: dict[str, str] = {}
    auto: list[str] = []
    for name, value in _leaves(content, "", where):
        key = KEYS[name]
        if key.kind == "refused":
            if _asks(value):
                raise ConfigError(f"{where}: {name} cannot be trained here: {key.what}")
        elif key.kind == "ignored":
            ignored[name] = key.what
        elif isinstance(value, str) and value == "auto":
            auto.append(name)
        elif value is not None:
            said[name] = _checked(name, value, where)
    schedule: tuple[str, dict[str, Any]] | None = None
    if "scheduler.type" in said:
        schedule = (said["scheduler.type"], said.get("scheduler.params", {}))
        auto += [
            f"scheduler.params.{name}"
            for name, value in schedule[1].items()
            if isinstance(value, str) and value == "auto"
        ]
    stage = _stage(content)
    if ignored:
        logger.info(f"{where}: these change nothing: " + "; ".join(f"{name} ({why})" for name, why in ignored.items()))
        _warn(f"{where}: these have no effect here, for the reasons in docs/from-deepspeed.md: {', '.join(ignored)}")
    _warn_of_weights(said.get("zero_optimization.offload_param.device"), stage, where)
    if auto:
        _warn(
            f"{where} leaves {', '.join(auto)} open ('auto'): a Trainer's arguments set them; otherwise "
            "OffloadConfig's defaults apply"
        )
    if said.get("steps_per_print") == math.inf:
        del said["steps_per_print"]
    train, micro, accumulation = _batch_sizes(said, auto, num_gpus, where)
    options = _options(said, auto, where)
    if accumulation is not None:
        options["gradient_accumulation"] = accumulation
    own = said.get("offloadkit", {})
    if "on_nonfinite" in own and "bf16.check_grad_overflow" not in said:
        options.pop("on_nonfinite", None)  # DeepSpeed's default, not written in the file
    if clashing := sorted(own.keys() & options.keys()):
        raise ConfigError(
            f'{where}: the section "offloadkit" repeats {", ".join(clashing)}, which DeepSpeed\'s own keys already set'
        )
    found = DeepSpeedConfig(
        options=options | own,
        written=said,
        dynamic_loss_scale=_dynamic_loss_scale(said) if options.get("working_dtype") == "fp16" else None,
        train_batch_size=train,
        micro_batch_size=micro,
        accumulation=accumulation,
        managed_accumulation=said.get("managed_gradient_accumulation", True),
        decay_is_coupled=_adds_decay(said),
        schedule=schedule,
        casts_inputs=said.get("fp16.auto_cast", False),
        stage=stage,
        steps_per_print=said.get("steps_per_print"),
        wall_clock_breakdown=said.get("wall_clock_breakdown", False),
        drop_last=said.get("dataloader_drop_last", False),
        auto=tuple(auto),
        ignored=ignored,
        where=where,
    )
    found.check_decay(options.get("weight_decay", 0.0), where)
    return found


def offload_config(source: str | Path | dict[str, Any] | DeepSpeedConfig, num_gpus: int | None = None) -> OffloadConfig:
    read = source if isinstance(source, DeepSpeedConfig) else read_deepspeed(source, num_gpus=num_gpus)
    if read is not source and read.schedule is not None:
        logger.warning(
            f"the schedule {read.schedule[0]} is not part of OffloadConfig: offloadkit.initialize steps it; with a "
            "Trainer use lr_scheduler_type and warmup_steps, in your own loop a torch scheduler"
        )
    options, where = dict(read.options), read.where
    if read.dynamic_loss_scale is not None:
        options["loss_scale"] = _made(DynamicLossScale, read.dynamic_loss_scale, f"{where}, fp16")
    section = f'{where}, the section "offloadkit"'
    if isinstance(options.get("placement"), dict):
        options["placement"] = _made(Placement, options["placement"], section)
    return _made(OffloadConfig, options | {"deepspeed": read}, section if read.written.get("offloadkit") else where)


_Made = TypeVar("_Made")


def _made(kind: type[_Made], options: dict[str, Any], where: str) -> _Made:
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            which = ", ".join(known)
            raise ConfigError(
                f"{where}: it contains fields of {kind.__name__}, and {shown(name)} is not one of {which}"
            )
    try:
        return kind(**options)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _warn(message: str) -> None:
    if (os.environ.get("RANK") or "0") == "0":
        logger.warning(message)


def _warn_of_weights(device: str | None, stage: int, where: str) -> None:
    name = "zero_optimization.offload_param.device"
    if device not in (None, "none", "cpu", "nvme"):
        raise ConfigError(f"{where}: {name} must be 'none', 'cpu' or 'nvme', got {shown(device)}")
    if device == "nvme":
        _warn(
            f"{where}: {name} is 'nvme', but weights are never on disk here: RAM must hold the weights that VRAM does "
            "not"
        )
    if device in ("cpu", "nvme") and stage < 3:
        _warn(
            f"{where}: DeepSpeed ignores offload_param below stage 3, and the stage is {stage}; here the plan puts "
            "weights into RAM if VRAM is short, at any stage"
        )


def _check_optimizer(content: dict[str, Any], where: str) -> None:
    section = content.get("optimizer")
    name = section.get("type") if isinstance(section, dict) else None
    if name not in (None, "auto") and str(name).lower() not in _OPTIMIZERS:
        raise ConfigError(
            f"{where}: the optimizer {shown(name)} cannot be offloaded: 'AdamW', 'Adam' and 'Lion' can. Use DeepSpeed "
            "for other optimizers"
        )


def _content(source: str | Path | dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(source, dict):
        return "the DeepSpeed config", source
    if not isinstance(source, str | Path):
        raise ConfigError(f"a DeepSpeed config is a dict or the path of a .json file, got {shown(source)}")
    path = path_of(source, "the DeepSpeed config")
    try:
        found = read_json(path, _without_doubles)
    except OSError as error:
        raise ConfigError(f"the DeepSpeed config {source} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{source} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{source} must hold one JSON object, as ds_config.json does")
    return str(source), found


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{shown(next(name for name in names if names.count(name) > 1))} is there twice")
    return found


def _leaves(section: dict[str, Any], prefix: str, where: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name as in `KEYS`, value) of every key.

    Raises:
        ConfigError: a section has an unknown key, or an unknown top-level key resembles a known one. Other unknown
            top-level keys are only logged, because DeepSpeed ignores them.
    """
    for given, value in section.items():
        name = prefix + _OTHER_NAMES.get(given, given)
        if name == "zero_optimization" and isinstance(value, bool):  # deprecated form
            continue
        if name not in KEYS and f"{prefix}stage3_{given}" in KEYS:
            name = f"{prefix}stage3_{given}"
        if name in _SECTIONS:
            if isinstance(value, dict):
                yield from _leaves(value, f"{name}.", where)
            elif value is not None:
                raise ConfigError(f"{where}: {name} must be a section ({{...}}), got {shown(value)}")
        elif name in KEYS:
            yield name, value
        else:
            near = did_you_mean(name, {*KEYS, *_SECTIONS}, cutoff=0.8)
            if prefix or near:
                raise ConfigError(f"{where}: no key {shown(name)}{near}")
            _warn(f"{where}: {shown(name)} is not a key of DeepSpeed, and is ignored")


def _asks(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value["enabled"]) if "enabled" in value else any(map(_asks, value.values()))
    if isinstance(value, int) and not isinstance(value, bool):
        return value > 1
    return bool(value)


def _checked(name: str, value: Any, where: str) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63
    if name == "steps_per_print" and value == math.inf:
        return value
    if KEYS[name].value == "count":
        if not number or value != int(value) or value < 1:
            raise ConfigError(f"{where}: {name} must be a whole number >= 1, got {shown(value)}")
        return int(value)
    if KEYS[name].value == "number" and not (number and value >= 0):
        raise ConfigError(f"{where}: {name} must be a number >= 0, got {shown(value)}")
    if name == "fp16.initial_scale_power" and value > _LARGEST_POWER:
        raise ConfigError(f"{where}: {name} must be at most {_LARGEST_POWER}, got {shown(value)}")
    if KEYS[name].value == "flag" and not isinstance(value, bool):
        raise ConfigError(f"{where}: {name} must be true or false, got {shown(value)}")
    if name in ("optimizer.type", "scheduler.type") and not isinstance(value, str):
        raise ConfigError(f"{where}: {name} must be a name, got {shown(value)}")
    if name in ("offloadkit", "scheduler.params") and not isinstance(value, dict):
        raise ConfigError(f"{where}: {name} must be a section ({{...}}), got {shown(value)}")
    return value


_LARGEST_POWER = 127
"""Exponent of the largest power of two in fp32."""


def _batch_sizes(
    said: dict[str, Any], auto: list[str], num_gpus: int, where: str
) -> tuple[int | None, int | None, int | None]:
    """Rows per update, rows per micro-batch and micro-batches per GPU, None if unknown.

    Two of them determine the third; accumulation defaults to 1 (DeepSpeed's `_set_batch_related_parameters`). Raises
    `ConfigError` if they do not multiply.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    train, micro, accumulation = (said.get(name) for name in names)
    if any(name in auto for name in names) or (train is None and micro is None):
        return train, micro, accumulation
    if accumulation is None:
        accumulation = 1 if train is None or micro is None else max(train // (micro * num_gpus), 1)
    if micro is None:
        assert train is not None
        micro = train // (accumulation * num_gpus)
    product = micro * accumulation * num_gpus
    if train is not None and train != product:
        raise ConfigError(
            f"{where}: train_batch_size must be train_micro_batch_size_per_gpu x gradient_accumulation_steps x GPUs, "
            f"but {train} is not {micro} x {accumulation} x {num_gpus} = {product}: change one of them, or leave one "
            "out to have it computed"
        )
    return product, micro, accumulation


def _options(said: dict[str, Any], auto: list[str], where: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if "optimizer.type" in said:
        options |= _optimizer(said, where)
        if "optimizer.params.lr" not in auto:
            options.setdefault("learning_rate", 1e-3)
    elif params := [name for name in said if name.startswith("optimizer.params")]:
        raise ConfigError(f"{where}: {params[0]} is given, but no optimizer.type: write 'AdamW'")
    if "gradient_clipping" in said:
        options["max_grad_norm"] = said["gradient_clipping"] or None
    if said.get("fp16.enabled") and said.get("bf16.enabled"):
        raise ConfigError(f"{where}: fp16 and bf16 are both enabled: enable one of them")
    if said.get("fp16.enabled"):
        options["working_dtype"] = "fp16"
        if scale := said.get("fp16.loss_scale"):
            options |= {"loss_scale": float(scale), "on_nonfinite": "skip"}
    elif said.get("bf16.enabled"):
        options["working_dtype"] = "bf16"
        if said.get("bf16.check_grad_overflow", True):
            options["on_nonfinite"] = "skip"
    if str(said.get("gradient_allreduce_op", "mean")).lower() != "mean":
        raise ConfigError(
            f"{where}: gradient_allreduce_op {said['gradient_allreduce_op']!r}: gradients are the mean over GPUs here; "
            "leave it out, and multiply the loss by the number of GPUs for a sum"
        )
    offload = "zero_optimization.offload_optimizer"
    device = said.get(f"{offload}.device", "none")
    if device not in ("none", "cpu", "nvme"):
        raise ConfigError(f"{where}: {offload}.device must be 'none', 'cpu' or 'nvme', got {shown(device)}")
    if device == "nvme":
        if not said.get(f"{offload}.nvme_path"):
            raise ConfigError(f"{where}: {offload}.device is 'nvme': write the folder too, as {offload}.nvme_path")
        options["disk"] = str(said[f"{offload}.nvme_path"])
        if not Path(options["disk"]).expanduser().is_dir():
            _warn(
                f"{where}: {offload}.nvme_path is not a folder on this machine: {options['disk']}. Create it, or "
                "training ends if RAM has no room for the states"
            )
    return options


def _optimizer(said: dict[str, Any], where: str) -> dict[str, Any]:
    optimizer = _OPTIMIZERS[str(said["optimizer.type"]).lower()]
    params = {key.rpartition(".")[2]: value for key, value in said.items() if key.startswith("optimizer.params.")}
    if not params.get("bias_correction", True):
        raise ConfigError(f"{where}: bias_correction is false: AdamW corrects its bias here. Leave it out")
    is_torchs = params.get("torch_adam", False) and not _adds_decay(said)
    options = {"optimizer": optimizer, "weight_decay": params.get("weight_decay", 0.01 if is_torchs else 0.0)}
    options |= {own: params[name] for name, own in (("lr", "learning_rate"), ("eps", "eps")) if name in params}
    betas = params.get("betas", (0.9, 0.999) if optimizer == "lion" else None)
    if betas is not None:
        options["betas"] = tuple(betas) if isinstance(betas, list | tuple) else betas
    return options


def _adds_decay(said: dict[str, Any]) -> bool:
    is_adam = str(said.get("optimizer.type")).lower() == "adam"
    return is_adam and not said.get("optimizer.params.adam_w_mode", True)


def _dynamic_loss_scale(said: dict[str, Any]) -> dict[str, Any] | None:
    if said.get("fp16.loss_scale"):
        return None
    names = {
        "loss_scale_window": "window",
        "hysteresis": "hysteresis",
        "consecutive_hysteresis": "consecutive_hysteresis",
        "min_loss_scale": "minimum",
    }
    found = {own: said[f"fp16.{name}"] for name, own in names.items() if f"fp16.{name}" in said}
    if "fp16.initial_scale_power" in said:
        found["start"] = 2.0 ** said["fp16.initial_scale_power"]
    return found


def _stage(content: dict[str, Any]) -> int:
    zero = content.get("zero_optimization") or {}
    stage = zero.get("stage", 0) if isinstance(zero, dict) else int(zero)
    return stage if isinstance(stage, int) else 0
