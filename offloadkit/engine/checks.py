"""Checks whether an engine can be built for a model; keeps track of models with an open engine."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from offloadkit.errors import ConfigError, EngineStateError, ModelError, forget_last_error, shown
from offloadkit.facts.config import OffloadConfig
from offloadkit.offload.layers import check_is_plan
from offloadkit.optim.table import DTYPES

_open_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def engine_opened(model: nn.Module, engine: Any) -> None:
    """Register that `engine` trains `model`, until it is closed or collected."""
    _open_engines[model] = weakref.ref(engine)


def engine_closed(model: nn.Module) -> None:
    _open_engines.pop(model, None)


def is_trained(model: nn.Module) -> bool:
    return _other(model) is not None


def check_arguments(config: object, plan: object, evaluation_rows: object) -> None:
    """Raise `ConfigError` for an argument of `OffloadEngine` of another type than documented."""
    if config is not None and not isinstance(config, OffloadConfig):
        given = shown(config)
        raise ConfigError(f"config must be an OffloadConfig, such as OffloadConfig(vram='8GiB'), got {given}")
    if plan is not None:
        check_is_plan(plan)
    if type(evaluation_rows) is not int or not 0 <= evaluation_rows < 2**31:
        raise ConfigError(f"evaluation_rows must be a whole number >= 0, got {shown(evaluation_rows)}")


_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")


def check_not_wrapped(model: nn.Module) -> None:
    """Check that the engine can train `model` itself.

    Raises:
        ModelError: the model is wrapped for training on several ranks, has DTensors, has a trained part that was
            compiled or scripted, is quantised without adapters, or by another library than bitsandbytes.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {shown(model)}")
    for path, module in model.named_modules():
        name = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule) and any(each.requires_grad for each in module.parameters()):
            where = f"its module {path!r}" if path else "the model"
            raise ModelError(
                f"{where} is scripted (torch.jit.script or trace), so it has no hooks, which the engine needs to wait "
                "for weights: pass the module as it was before scripting, or freeze its parameters"
            )
        if name == "OptimizedModule" and any(parameter.requires_grad for parameter in module.parameters()):
            raise ModelError(
                "torch.compile() made this model, or a part of it: compiled as a whole, its numbers would depend on "
                "the plan. Pass the model that was given to torch.compile(); OffloadConfig(compile_blocks=True) "
                "compiles its blocks"
            )
        if name in _WRAPPERS:
            raise ModelError(
                f"the model is wrapped in {name}, which is not needed: pass the module inside it (its `.module`). The "
                "engines of all ranks reduce gradients themselves. In a loop with accelerate, pass only the DataLoader "
                "to `accelerator.prepare`"
            )
    for parameter_name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise ModelError(
                f"the parameter {parameter_name!r} is a DTensor, sharded by FSDP or tensor parallelism: pass the model "
                "before sharding; the engines of all ranks share the states themselves"
            )
    _check_not_quantised(model)


_QUANTISERS = ("bitsandbytes", "torchao", "quanto", "optimum")


def _check_not_quantised(model: nn.Module) -> None:
    """Raise `ModelError` if weights are quantised and there are no adapters (PEFT): only the other weights would be
    trained. bitsandbytes' weights alone were compared with PEFT's training.
    """
    modules = dict(model.named_modules())
    if any(getattr(module, "peft_config", None) for module in modules.values()):
        _check_base(model)
        return
    what = None
    for path, module in modules.items():
        if getattr(module, "is_quantized", False) is True or ".quantized." in type(module).__module__:
            what = f"its module {path!r} ({type(module).__name__})" if path else f"the model ({type(module).__name__})"
    for name, parameter in model.named_parameters():
        if type(parameter).__module__.partition(".")[0] in _QUANTISERS:
            what = f"its parameter {name!r} ({type(parameter).__name__})"
    if what is not None:
        raise ModelError(
            f"{what} is quantised, and quantised weights cannot be trained: only the remaining weights would be. Load "
            "the model without quantization_config (a GGUF file with GgufConfig(dequantize=True)), or call its "
            "dequantize() first; or, with weights of bitsandbytes, add adapters by peft.get_peft_model and pass that"
        )


def _check_base(model: nn.Module) -> None:
    for module in model.modules():
        method = getattr(module, "quantization_method", None)
        if getattr(module, "is_quantized", False) is True and method not in (None, "bitsandbytes"):
            method = getattr(method, "value", method)
            raise ModelError(
                f"the {type(module).__name__} under the adapters is quantised by {method}, which is not supported: "
                "load it without quantization_config or with dequantize=True there, or quantise it by bitsandbytes"
            )
    for name, parameter in model.named_parameters():
        if parameter.dtype.is_floating_point and parameter.dtype.itemsize == 1:
            raise ModelError(
                f"the parameter {name!r} is {parameter.dtype}, and adapters on weights of 8-bit floating point are not "
                "supported: load the model in bf16 (quantization_config with dequantize=True)"
            )


def check_free(model: nn.Module, config: OffloadConfig) -> None:
    """Raise `EngineStateError` if an open engine trains parameters of the model, has its frozen parameters in RAM, or
    computes with frozen parameters that would be cast.
    """
    if _other(model) is not None:
        forget_last_error()  # the engine may be held only by an interrupt's frames or a reference cycle
    if (other := _other(model)) is not None:
        which = "this model" if other is model else f"a {type(other).__name__} with parameters of this model"
        raise EngineStateError(
            f"{which} already has an open engine: call close() of that engine or of its Trainer first"
        )
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    for engine in filter(None, (each() for each in list(_open_engines.values()))):
        for state in engine.placed.states:
            name = next((own[id(view.parameter)] for view in state.layer.views if id(view.parameter) in own), None)
            if name is not None and state.placement.weights == "ram":
                raise EngineStateError(
                    f"the frozen parameter {name!r} is in RAM, where the open engine of another model has it: close "
                    "that engine first, or open it with OffloadConfig(placement=Placement(weights='vram'))"
                )
    if config.working_dtype == "auto":
        return
    dtype, theirs = DTYPES[config.working_dtype], used_elsewhere(model)
    for name, parameter in model.named_parameters():
        if parameter in theirs and parameter.dtype.is_floating_point and parameter.dtype != dtype:
            raise EngineStateError(
                f"the frozen parameter {name!r} is {parameter.dtype}, and another model with an open engine uses it: "
                f"working_dtype={config.working_dtype!r} would cast it. Train both with one working dtype"
            )


def used_elsewhere(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of `model` that another model with an open engine has too."""
    others = [other for other, engine in list(_open_engines.items()) if engine() is not None and other is not model]
    theirs = {id(parameter) for other in others for parameter in other.parameters()}
    return {parameter for parameter in model.parameters() if id(parameter) in theirs}


def _other(model: nn.Module) -> nn.Module | None:
    trained = _trained(model)
    for other, engine in list(_open_engines.items()):
        if engine() is not None and not trained.isdisjoint(_trained(other)):
            return other
    return None


def _trained(model: nn.Module) -> set[int]:
    """Ids, because operations on parameters may be watched."""
    return {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
