"""LoRA's adapters through PEFT: chosen, added to a model whose weights may be unread, compared with a checkpoint's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offloadkit.checkpoint.folder import read_object
from offloadkit.errors import ConfigError, ModelError, cut, did_you_mean, shown
from offloadkit.hf.load import Task
from offloadkit.hf.options import check_lora
from offloadkit.offload.unread import become, is_unread, make_real

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTERS = "adapter_config.json"
"""Name of PEFT's file of an adapter's options."""
RANK = 16
"""The rank of `lora=True`."""
_TASKS: dict[Task, str] = {"seq2seq": "SEQ_2_SEQ_LM", "causal": "CAUSAL_LM", "classification": "SEQ_CLS"}
_READ_THE_BASE = (
    "use_dora",
    "use_qalora",
    "arrow_config",
    "loftq_config",
    "eva_config",
    "corda_config",
    "layer_replication",
)
"""Options of `LoraConfig` that compute adapters from the base's weights, or copy whole layers."""
_NAMED = dict.fromkeys(("target_modules", "modules_to_save", "exclude_modules"), "module")
_NAMED |= {"target_parameters": "parameter"}
"""Options of `LoraConfig` that may be lists of names, and what they name."""
_HEADS = ("classifier", "score")
"""PEFT appends both to `modules_to_save` of classifiers, which have one of them, whether they are in it or not."""
_DRAWN = (True, False, "gaussian")
"""Values of `init_lora_weights` that read no weight of the base."""


def lora_config(lora: bool | int | LoraConfig | None, task: Task | None) -> LoraConfig | None:
    """The adapters to add, as PEFT describes them; None for full fine-tuning.

    Args:
        lora: True is rank `RANK`. A rank adapts all linear layers but the head, with `lora_alpha` of twice the rank. A
            `LoraConfig` is used unchanged, but for a missing task type.
        task: None: PEFT's model of no task.

    Raises:
        ConfigError: as `check_lora`.
    """
    check_lora(lora)
    if lora is None or lora is False:
        return None
    from peft import LoraConfig

    task_type = None if task is None else _TASKS[task]
    if not isinstance(lora, LoraConfig):
        rank = RANK if lora is True else lora
        return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type=task_type)
    found = copy.deepcopy(lora)
    found.task_type = found.task_type or task_type
    return found


def add_adapters(model: Any, config: LoraConfig) -> Any:
    """`model` as a `PeftModel`, with new adapters and everything else frozen.

    Weights may be unread or on the meta device. The adapters of unread weights are drawn now, as PEFT draws them;
    weights that are copied or that the adapters begin from are read before.

    Raises:
        ConfigError: `config` names a module or parameter that the model lacks.
        ModelError: PEFT cannot adapt the model in this way. The model is as before either error.
    """
    from peft import get_peft_model

    given = copy.deepcopy(config)
    if given.task_type == _TASKS["classification"] and (listed := _listed(given, "modules_to_save")):
        given.modules_to_save = sorted(listed - {*_HEADS})
    config = copy.deepcopy(given)
    modules = {name: each for name, each in model.named_modules() if name}
    parameters = dict(model.named_parameters())
    if is_unread(model):
        make_real(_needed(model, config))
    waits = is_unread(model)
    is_empty = not waits and all(each.is_meta for each in model.parameters())
    with _unchanged_if_refused(model):
        try:
            with warnings.catch_warnings(), _kept_draws() if waits else nullcontext():
                warnings.simplefilter("ignore", FutureWarning)  # PEFT reads an old name of transformers
                adapted: Any = get_peft_model(model, config, low_cpu_mem_usage=is_empty)
        except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
            linear = [name.rpartition(".")[2] for name, each in modules.items() if isinstance(each, nn.Linear)]
            names = cut(", ".join(dict.fromkeys(linear)))
            raise ModelError(
                f"PEFT cannot adapt a {type(model).__name__} so: {cut(str(error)).rstrip('.')}. Its linear layers: "
                f"{names}"
            ) from error
        for option, kind in _NAMED.items():
            # PEFT translates names that transformers has changed, and silently leaves out other unknown names.
            for name in sorted(_listed(given, option) & _listed(adapted.active_peft_config, option)):
                known = modules if kind == "module" else parameters
                end = name if option == "modules_to_save" else f".{name}"
                if not any(f".{each}".endswith(end) for each in known):
                    raise ConfigError(
                        f"{option} of the LoraConfig has {name!r}, which matches no {kind} of the "
                        f"{type(model).__name__}: correct or drop it{did_you_mean(name, _ends(known, name))}"
                    )
    return adapted


@contextmanager
def _unchanged_if_refused(model: nn.Module) -> Iterator[None]:
    """After an error, `model` has its own modules again, and trains the same parameters."""
    modules = {each: dict(each._modules) for each in model.modules()}
    trains = {each: each.requires_grad for each in model.parameters()}
    try:
        yield
    except (ConfigError, ModelError):
        for module, children in modules.items():
            module._modules.clear()
            module._modules.update(children)
        for parameter, is_trained in trains.items():
            parameter.requires_grad_(is_trained)
        raise


def _ends(names: Iterable[str], name: str) -> Iterable[str]:
    """The ends of `names` that have as many parts as `name`."""
    return dict.fromkeys(".".join(each.split(".")[-1 - name.count(".") :]) for each in names)


def _listed(config: LoraConfig, option: str) -> set[str]:
    """The names of a list; none if there is a regular expression, "all-linear" or nothing."""
    names = getattr(config, option, None)
    return set() if names is None or isinstance(names, str) else {*names}


def _needed(model: nn.Module, config: Any) -> list[nn.Parameter]:
    """The weights that PEFT reads or copies when it adds the adapters."""
    if config.init_lora_weights not in _DRAWN or any(getattr(config, name, None) for name in _READ_THE_BASE):
        return list(model.parameters())
    copied = {*(config.modules_to_save or ()), *(_HEADS if config.task_type == "SEQ_CLS" else ())}
    if getattr(config, "trainable_token_indices", None):
        copied |= {"embed_tokens", "wte", "shared", "embedding", "embeddings", "lm_head"}
    return [parameter for name, parameter in model.named_parameters() if copied & set(name.split("."))]


@contextmanager
def _kept_draws() -> Iterator[None]:
    """PEFT draws adapters on the CPU and then moves them beside their weights, for unread ones to the meta device. The
    adapters have PEFT's numbers again at the end.
    """
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    drawn: dict[nn.Module, dict[str, torch.Tensor]] = {}

    def keep(module: Any, move: Any, adapter: str, *args: Any) -> None:
        def own() -> Iterator[tuple[str, nn.Parameter]]:
            names = [*module.adapter_layer_names]
            return ((name, each) for name, each in module.named_parameters() if name.partition(".")[0] in names)

        values = {name: each.detach() for name, each in own() if not each.is_meta}
        move(module, adapter, *args)
        dtypes = {name: each.dtype for name, each in own()}
        drawn.setdefault(module, {}).update({name: value.to(dtypes[name]) for name, value in values.items()})

    name = "_move_adapter_to_device_of_base_layer"
    moves = {kind: vars(kind)[name] for kind in (BaseTunerLayer, ParamWrapper) if name in vars(kind)}
    try:
        for kind, move in moves.items():
            setattr(kind, name, lambda self, *args, move=move: keep(self, move, *args))
        yield
    finally:
        for kind, move in moves.items():
            setattr(kind, name, move)
    for module, values in drawn.items():
        for name, parameter in module.named_parameters():
            if parameter.is_meta and name in values:
                become(parameter, values[name].to(parameter.dtype))


def has_adapters(model: Any) -> bool:
    """Whether `model` is a `PeftModel`."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapters_of(model: Any) -> Any:
    """PEFT's config of the adapters that are trained; None if the model has none."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping) or not configs:
        return None
    active = getattr(model, "active_adapter", None)  # a method of transformers' own models
    return configs.get(active) if isinstance(active, str) else next(iter(configs.values()))


def base_of(model: Any) -> Any:
    """The HuggingFace model inside a `PeftModel`; other models are returned unchanged."""
    return model.get_base_model() if has_adapters(model) else model


def without_adapters(model: Any) -> Any:
    """The base of a `PeftModel` on the meta device, with all weights trained. `model` is used up."""
    return model.unload().requires_grad_(True)


def check_adapters(model: Any) -> None:
    """Raise `ModelError` if a `PeftModel` trains nothing, or lengthens the rows (prompt tuning)."""
    kind = type(model).__name__
    if getattr(model.active_peft_config, "is_prompt_learning", False):
        raise ModelError(
            f"this {kind} adds tokens to each row ({model.active_peft_config.peft_type}), which finetune and plan do "
            "not count: train it with offloadkit.OffloadTrainer (a T5 with OffloadSeq2SeqTrainer)"
        )
    if not any(each.requires_grad for each in model.parameters()):
        raise ModelError(
            f"the adapters of this {kind} are frozen: load them with PeftModel.from_pretrained(..., is_trainable=True)"
        )


def check_same_adapters(checkpoint: Path, config: Any, *, is_added: bool = True) -> str | None:
    """Compare the checkpoint's adapters with this run's.

    Args:
        config: None: this run has no adapters.
        is_added: PEFT has filled in what `config` leaves to it, such as the names for "all-linear".

    Returns:
        A line that names options that differ and change training alone, such as `lora_dropout`; None: there are none.

    Raises:
        ConfigError: the checkpoint has adapters of other shapes or places, or only one of both has adapters.
    """
    path = checkpoint / ADAPTERS
    if config is None and not path.is_file():
        return None
    if config is None:
        raise ConfigError(
            f"{checkpoint} is from a run with LoRA: resume with its lora= (rank {read_object(path).get('r')}), or pass "
            "another output_dir"
        )
    if not path.is_file():
        raise ConfigError(f"{checkpoint} is from a run without LoRA: leave lora out, or pass another output_dir")
    saved, own = _as_saved(read_object(path)), _as_saved(config.to_dict())
    drawn_alike = {str(each.get("init_lora_weights")) for each in (saved, own)} <= set(map(str, _DRAWN))
    said = []
    for name, now in own.items():
        before = saved.get(name)
        if name in _NOT_COMPARED or before == now or name not in saved or (name in _BY_PEFT and not is_added):
            continue
        if name == "init_lora_weights" and drawn_alike:
            continue
        if name not in _OF_TRAINING:
            raise ConfigError(
                f"{checkpoint} has adapters with {name} {shown(before)}, and this run has {shown(now)}: resume with "
                "the adapters of that run (finetune: lora=), or pass another output_dir"
            )
        said.append(f"{name} {before} (now {now})")
    return f"the adapters in {checkpoint} differ from this run's: {', '.join(said)}" if said else None


_NOT_COMPARED = ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type")
_BY_PEFT = ("modules_to_save", "target_modules", "target_parameters", "layers_pattern")
"""Options that PEFT completes when it adds adapters."""
_OF_TRAINING = ("lora_dropout", "total_step", "orth_reg_weight", "tinit", "tfinal", "deltaT", "beta1", "beta2")
"""Options that change neither the adapters nor what they compute in evaluation. The latter ones are AdaLoRA's."""


def _as_saved(options: Any) -> Any:
    """`options` as PEFT writes them in JSON, with lists of names in order."""
    if isinstance(options, Mapping):
        return {str(getattr(name, "value", name)): _as_saved(value) for name, value in options.items()}
    if isinstance(options, list | tuple | set):
        items = [_as_saved(each) for each in options]
        return sorted(items) if all(isinstance(each, str) for each in items) else items
    return getattr(options, "value", options)
