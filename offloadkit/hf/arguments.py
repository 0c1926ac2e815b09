"""Build and check `transformers.TrainingArguments`, and merge them into an `OffloadConfig`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from fractions import Fraction
from functools import cache
from inspect import signature
from multiprocessing import get_all_start_methods
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from transformers import Seq2SeqTrainingArguments, Trainer, TrainingArguments
from transformers.integrations import integration_utils
from transformers.training_args import trainer_log_levels
from transformers.utils import logging

from offloadkit.distributed import world
from offloadkit.errors import ConfigError, cut, did_you_mean, shown
from offloadkit.facts import hardware
from offloadkit.facts.config import OffloadConfig
from offloadkit.hf.options import LEARNING_RATES, FinetuneOptions
from offloadkit.hf.read import is_stream
from offloadkit.optim.table import trainer_names

logger = logging.get_logger(__name__)

_FROM_DEEPSPEED = "pass offload=OffloadConfig.from_deepspeed('ds_config.json'), which reads the same file"
_DEEPSPEED_KEYS = {
    "optimizer": "optimizer.type",
    "learning_rate": "optimizer.params.lr",
    "betas": "optimizer.params.betas",
    "eps": "optimizer.params.eps",
    "weight_decay": "optimizer.params.weight_decay",
    "max_grad_norm": "gradient_clipping",
    "gradient_accumulation": "gradient_accumulation_steps",
}
_ACCELERATE = {
    "ACCELERATE_USE_FSDP": "offloadkit does the offloading",
    "ACCELERATE_USE_DEEPSPEED": _FROM_DEEPSPEED,
    "ACCELERATE_USE_MEGATRON_LM": "the engines share the work between ranks",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "the engines share the work between ranks",
    "ACCELERATE_DYNAMO_BACKEND": "OffloadConfig(compile_blocks=True) compiles",
    "ACCELERATE_MIXED_PRECISION": "",
}
"""Variable of `accelerate launch` for an unsupported feature -> advice."""
_RECOMPUTATION = {"use_reentrant": False, "every_n_layers": 1, "offload": False}
"""Key of gradient_checkpointing_kwargs -> its only supported value."""

_OPTIM_ADVICE = f"use one of {', '.join(trainer_names())}: the engine steps with its own optimizers"


def argument_names() -> list[str]:
    return [field.name for field in fields(Seq2SeqTrainingArguments) if field.init]


INSTEAD = {
    "train_batch_size": "batch_size",
    "per_device_batch_size": "batch_size",
    "per_gpu_train_batch_size": "batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "epochs",
    "max_length": "max_input_length",
    "max_seq_length": "max_input_length",
    "max_source_length": "max_input_length",
    "text_column": "input_column",
    "label_column": "target_column",
    "validation_dataset": "eval_dataset",
    "test_size": "eval_dataset=0.1",
    "overwrite_output_dir": "overwrite=True",
    "no_cuda": "use_cpu=True",
    "evaluation_strategy": "eval_strategy",
    "group_by_length": "train_sampling_strategy='group_by_length'",
    "warmup_ratio": "warmup_steps",
}
"""Name in other libraries or versions -> argument of `finetune` to suggest."""


LISTED = ": help(offloadkit.finetune) lists them; arguments of transformers' Seq2SeqTrainingArguments work too"
"""What to do if no argument has a similar name."""


def argument_meant(name: str, known: Iterable[str]) -> str:
    """`did_you_mean` for an argument of `finetune`."""
    return f"; did you mean {INSTEAD[name]}?" if name in INSTEAD else did_you_mean(name, known)


def _order(options: FinetuneOptions) -> str:
    if is_stream(options.train_dataset):
        return "sequential"
    return "random" if options.packing else "group_by_length"  # packs have one length


def arguments_of_finetune(options: FinetuneOptions) -> Seq2SeqTrainingArguments:
    """Build the Trainer's arguments; `options.training_arguments` take precedence. Batch size and working dtype must be
    decided.

    Raises `ConfigError` if an argument is unknown or unsupported, or `accelerate launch` enables a feature that the
    engine lacks.
    """
    known, given, evaluates = argument_names(), options.training_arguments, options.eval_dataset is not None
    dtype = options.engine_config.working_dtype
    if given.get("deepspeed"):  # transformers would ask for the deepspeed package
        raise ConfigError(f"deepspeed={given['deepspeed']!r}: leave it out, and {_FROM_DEEPSPEED}")
    for name in given:
        if name in known:
            continue
        if name in signature(Trainer.__init__).parameters:
            raise ConfigError(f"finetune has no {name}: offloadkit.OffloadTrainer and OffloadSeq2SeqTrainer take it")
        ours = (field.name for field in fields(FinetuneOptions))
        raise ConfigError(f"no argument {shown(name)}{argument_meant(name, [*known, *ours]) or LISTED}")
    if given.get("resume_from_checkpoint"):  # the Trainer ignores this argument
        why = "resume=True (--resume) goes on from the newest checkpoint in output_dir"
        raise ConfigError(f"finetune does not take resume_from_checkpoint: {why}")
    given = {name: value for name, value in given.items() if name != "resume_from_checkpoint"}
    given |= {name: value.item() for name, value in given.items() if isinstance(value, np.generic)}
    _check_values(given)
    given |= {
        name: float(value) for name, value in given.items() if isinstance(value, Fraction) and _type_of(name) is float
    }
    on_gpu = hardware.default_device().type == "cuda"
    defaults = {
        "bf16": dtype == "bf16",
        "fp16": dtype == "fp16",
        "use_cpu": not on_gpu,  # otherwise transformers refuses bf16
        "dataloader_pin_memory": on_gpu,
        "warmup_steps": 0.05,
        "logging_steps": 0.05,
        "eval_strategy": ("steps" if "eval_steps" in given else "epoch") if evaluates else "no",
        "per_device_eval_batch_size": options.batch_size,
        "train_sampling_strategy": _order(options),
        "save_strategy": "steps" if "save_steps" in given else "epoch",
        "save_total_limit": 1,
        "save_only_model": options.engine_config.save_only_model,
        "report_to": "none",
        "output_dir": str(options.output_dir),
        "num_train_epochs": options.epochs,
        "max_steps": options.max_steps or -1,
        "seed": options.seed,
        "gradient_accumulation_steps": options.gradient_accumulation,
        "per_device_train_batch_size": options.batch_size,
        "learning_rate": options.learning_rate or LEARNING_RATES["lora" if options.lora else options.init],
        "prediction_loss_only": options.compute_metrics is None,
    }
    chosen: dict[str, Any] = defaults | given
    precision = _precision(bf16=chosen["bf16"], fp16=chosen["fp16"])
    if problems := _asked_by_the_environment(precision):  # before transformers asks for packages
        raise _cannot_train_with(problems)
    try:
        args = Seq2SeqTrainingArguments(**chosen)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, ImportError, OSError) as error:
        said = ", ".join(f"{name}={shown(value)}" for name, value in given.items())
        why = f"{type(error).__name__}: {cut(str(error))}"
        raise ConfigError(f"transformers refuses these training arguments ({said}): {why}") from error
    if args.eval_strategy != "no" and not evaluates:
        raise ConfigError("eval_strategy needs eval_dataset: pass rows, or a share of the training rows such as 0.1")
    _check_best(args, evaluates=evaluates)
    _check_reports(args.report_to or ())
    return args


_KINDS: dict[Any, tuple[type, str]] = {
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
}
"""Annotation -> (class for `isinstance`, words for messages)."""
_LEFT_TO_OTHERS = ("fsdp", "fsdp_config", "hub_token", "ddp_timeout", "accelerator_config", "deepspeed")
"""Arguments that accept more than their annotation, or are always refused."""
_POSITIVE = ("eval_accumulation_steps", "generation_max_length", "generation_num_beams")


def _check_values(given: dict[str, Any]) -> None:
    """Raise `ConfigError` for a value of a wrong type, except None. transformers would take "no" for True."""
    for name, value in given.items():
        wanted = _type_of(name)
        if name in ("log_level", "log_level_replica"):
            levels = ", ".join(map(repr, trainer_log_levels))
            if not isinstance(value, str) or value not in trainer_log_levels:
                raise ConfigError(f"{name} must be one of {levels}; got {shown(value)}")
        if value is None or name in _LEFT_TO_OTHERS:
            continue
        if wanted not in _KINDS:
            kinds = get_args(_types()[name]) or (_types()[name],)
            if not any(_is_of(value, each) for each in kinds):
                named = " or ".join(getattr(each, "__name__", str(each)) for each in kinds if each is not NoneType)
                raise ConfigError(f"{name} must be of type {named}, got {shown(value)}")
            continue
        kind, words = _KINDS[wanted]
        fits = isinstance(value, kind) and (wanted is bool or not isinstance(value, bool))
        if not fits or (wanted in (int, float) and abs(value) >= 2**63 and abs(value) != float("inf")):
            raise ConfigError(f"{name} must be {words}, got {shown(value)}")
        if name in _POSITIVE and given[name] < 1:
            raise ConfigError(f"{name} must be a whole number >= 1, got {shown(value)}")


def _is_of(value: Any, hint: Any) -> bool:
    kind = get_origin(hint) or hint
    if kind is Literal:
        return any(value is each for each in get_args(hint))
    if kind is not list:
        return isinstance(value, kind)
    return isinstance(value, list | tuple) and all(_is_of(each, of) for each in value for of in get_args(hint))


def is_text(name: str) -> bool:
    return _type_of(name) is str


def _type_of(name: str) -> Any:
    wanted = _types()[name]
    choices = set(get_args(wanted) if get_origin(wanted) in (Union, UnionType) else (wanted,)) - {NoneType}
    return choices.pop() if len(choices) == 1 else None


@cache
def _types() -> dict[str, Any]:
    return get_type_hints(Seq2SeqTrainingArguments)


def _check_best(args: Seq2SeqTrainingArguments, *, evaluates: bool) -> None:
    by_strategy = str(getattr(args.save_strategy, "value", args.save_strategy)) == "best"
    if not by_strategy and not args.load_best_model_at_end:
        return
    what = "save_strategy='best'" if by_strategy else "load_best_model_at_end=True"
    metric = args.metric_for_best_model
    if not evaluates:
        raise ConfigError(f"{what} needs eval_dataset: pass rows, or a share of the training rows such as 0.1")
    if metric is None:
        raise ConfigError(f"{what} needs metric_for_best_model, such as 'loss'")
    if args.prediction_loss_only and metric.removeprefix("eval_") != "loss":
        raise ConfigError(f"metric_for_best_model={shown(metric)}: without compute_metrics there is 'loss' alone")


def _check_reports(names: Iterable[str]) -> None:
    reporting: Any = integration_utils
    usable = {*reporting.get_available_reporting_integrations(), "flyte"}  # missing in transformers' list
    for name in names:
        if name not in reporting.INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(reporting.INTEGRATION_TO_CALLBACK))
            raise ConfigError(f"report_to={shown(name)} is not known: transformers has {known}, and 'none'")
        if name not in usable:
            raise ConfigError(f"report_to={name!r}: its package is not installed. Install it, or leave report_to out")


def engine_config(offload: OffloadConfig, args: TrainingArguments) -> OffloadConfig:
    """Copy the values of `args` into `offload`.

    Raises `ConfigError` if betas or epsilon are out of range, or `args` contradict the ds_config.json or a field of
    `offload` that the user has set.
    """
    read = offload.deepspeed
    for name in ("adam_beta1", "adam_beta2"):
        if (beta := getattr(args, name)) is None or not 0 <= beta < 1:
            raise ConfigError(f"{name} must be a number in [0, 1), got {shown(beta)}")
    if args.adam_epsilon is None or not 0 <= args.adam_epsilon < float("inf"):
        raise ConfigError(f"adam_epsilon must be a number >= 0, got {shown(args.adam_epsilon)}")
    told: dict[str, Any] = {
        "learning_rate": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "max_grad_norm": args.max_grad_norm or None,
        "gradient_accumulation": args.gradient_accumulation_steps,
    }
    optimizer = trainer_names().get(_optim(args), "adamw")
    if optimizer != "adamw":  # "adamw" is the default, so the user may not have chosen it
        told["optimizer"] = optimizer
    if args.bf16 or args.fp16:
        told["working_dtype"] = "bf16" if args.bf16 else "fp16"
    if args.gradient_checkpointing:
        told["activation_checkpointing"] = True
    if args.save_only_model:
        told["save_only_model"] = True
    usual = {field.name: field.default for field in fields(OffloadConfig)}
    written: dict[str, Any] = {}
    if read is not None:
        usual |= {name: value for name, value in read.options.items() if name in _DEEPSPEED_KEYS}
        written = read.written
    own = written.get("offloadkit", {})
    clashes = []
    for name, value in told.items():
        key = _DEEPSPEED_KEYS.get(name)
        is_said = key in written or name in own or getattr(offload, name) != usual[name]
        if is_said and getattr(offload, name) != value:
            where = f"OffloadConfig ({key})" if key in written else "OffloadConfig"
            clashes.append(f"\n  {name}: {getattr(offload, name)!r} in {where}, {value!r} by TrainingArguments")
    for key, value in _only_in_deepspeeds(args).items():
        if written.get(key, value) != value:
            clashes.append(f"\n  {key}: {written[key]!r} in the DeepSpeed config, {value!r} by TrainingArguments")
    if clashes:
        problem = "TrainingArguments say these, and OffloadConfig says otherwise; leave them out of OffloadConfig:"
        if read is not None:
            problem = (
                "TrainingArguments and the DeepSpeed config must say the same, so change one of them, or write "
                '"auto" into the file:'
            )
        raise ConfigError(problem + "".join(clashes))
    if read is not None:
        read.check_decay(args.weight_decay, "TrainingArguments")
    return replace(offload, **told)


def _only_in_deepspeeds(args: TrainingArguments) -> dict[str, Any]:
    rows = args.per_device_train_batch_size
    found: dict[str, Any] = {"train_micro_batch_size_per_gpu": rows}
    found["train_batch_size"] = rows * args.gradient_accumulation_steps * args.world_size
    return found | {f"{dtype}.enabled": True for dtype in ("bf16", "fp16") if getattr(args, dtype)}


def _optim(args: TrainingArguments) -> str:
    return str(getattr(args.optim, "value", args.optim))


@contextmanager
def left_to_the_engine(args: TrainingArguments) -> Iterator[None]:
    """Context without the Trainer's activation checkpointing, which would override the engine's."""
    names = [name for name in ("activation_checkpointing", "gradient_checkpointing") if getattr(args, name, False)]
    for name in names:
        setattr(args, name, False)
    try:
        yield
    finally:
        for name in names:
            setattr(args, name, True)


def _asked_by_the_environment(own: str) -> list[str]:
    """Unsupported settings in the environment of `accelerate launch`, with advice. `own`: "bf16", "fp16" or "no"."""
    given = {name: os.environ.get(name, "") for name in _ACCELERATE}
    leave = "leave it out of accelerate's config (or start with `python`)"
    problems = []
    for name, value in given.items():
        advice = f"{leave}: {_ACCELERATE[name]}"
        wanted = value.lower() not in ("", "0", "n", "no", "f", "false", "off")
        if name == "ACCELERATE_MIXED_PRECISION":
            wanted = wanted and value.lower() != own
            do = f"pass {value.lower()}=True" if value.lower() in ("bf16", "fp16") else "leave it out"
            advice = f"TrainingArguments say {shown(own)}: {do}"
        if wanted:
            problems.append(f"{name}={shown(value)} (set by `accelerate launch`): {advice}")
    return problems


def _cannot_train_with(problems: list[str]) -> ConfigError:
    return ConfigError("TrainingArguments that offloadkit cannot train with:\n  " + "\n  ".join(problems))


def _precision(*, bf16: bool, fp16: bool) -> str:
    return "bf16" if bf16 else "fp16" if fp16 else "no"


def check_optim(args: TrainingArguments) -> None:
    if _optim(args) not in trainer_names():
        raise ConfigError(f"optim={shown(_optim(args))}: {_OPTIM_ADVICE}")


def check_arguments(args: TrainingArguments) -> None:
    """Refuse arguments that the engine does not support, all in one `ConfigError`; use one GPU per process.

    `average_tokens_across_devices` is switched off, because the engine weights micro-batches by their targets.
    """
    refused = {
        "fp16_full_eval=True": (args.fp16_full_eval, "leave it out"),
        "bf16_full_eval=True": (args.bf16_full_eval and not args.bf16, "use it with bf16=True only"),
        f"optim={shown(_optim(args))}": (_optim(args) not in trainer_names(), _OPTIM_ADVICE),
        "deepspeed": (args.deepspeed, f"leave it out: {_FROM_DEEPSPEED}"),
        "fsdp": (args.fsdp, "leave it out: offloadkit does the offloading"),
        "parallelism_config": (
            args.parallelism_config,
            "leave it out: the engines share the work between ranks",
        ),
        "torch_compile=True": (args.torch_compile, "leave it out: OffloadConfig(compile_blocks=True) compiles"),
        "auto_find_batch_size=True": (args.auto_find_batch_size, "set per_device_train_batch_size"),
    }
    options: Any = getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs or {}
    if not isinstance(options, dict):
        raise ConfigError(
            f"activation_checkpointing_kwargs (gradient_checkpointing_kwargs) must be a dict, got {shown(options)}"
        )
    for name, usual in _RECOMPUTATION.items():
        refused[f"gradient_checkpointing_kwargs: {name}={shown(options.get(name))}"] = (
            options.get(name, usual) != usual,
            "leave it out: the engine recomputes every block, not reentrantly, and the plan may send its input to RAM",
        )
    problems = [f"{name}: {advice}" for name, (given, advice) in refused.items() if given]
    problems += _asked_by_the_environment(_precision(bf16=args.bf16, fp16=args.fp16))
    world.join()
    if args.world_size != world.size():
        problems.append(
            f"world_size={args.world_size}, and torch.distributed has {world.size()} ranks: start the processes by "
            "torchrun or `accelerate launch`, and pass use_cpu=True where there is no GPU"
        )
    context = getattr(args, "dataloader_multiprocessing_context", None)
    if context is not None and (args.dataloader_num_workers == 0 or context not in get_all_start_methods()):
        problems.append(
            f"dataloader_multiprocessing_context={shown(context)}: pass one of {', '.join(get_all_start_methods())}, "
            "with dataloader_num_workers of at least 1, or leave it out"
        )
    if args.world_size > 1 and args.save_on_each_node:
        problems.append("save_on_each_node=True: leave it out; all ranks write into one folder, which all of them see")
    if problems:
        raise _cannot_train_with(problems)
    if args.n_gpu > 1:
        logger.warning(f"offloadkit trains on one GPU ({args.device}); the other {args.n_gpu - 1} stay idle")
        args._n_gpu = 1  # as the Trainer does for models that it does not wrap in DataParallel
    if args.world_size > 1:
        args.average_tokens_across_devices = False  # otherwise the Trainer multiplies losses by the number of ranks
