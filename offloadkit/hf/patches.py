"""What of a model is computed otherwise where offloadkit trains it: attention, norms, and caches switched off."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offloadkit.kernels import attention as attention_kernel


def without_caches(model: nn.Module) -> Callable[[], None]:
    """Have no part of `model` keep any; returns what undoes it."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    changed: list[Any] = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in changed:
        config.use_cache = False

    def undo() -> None:
        for config in changed:
            config.use_cache = True

    return undo


def fuse_norms(model: nn.Module) -> Callable[[], None]:
    """Have the RMS norms of `model` run as one kernel where they can; returns what undoes it.

    A norm whose class computes something else, whose forward was replaced by others, or whose input is of another dtype
    than its weight, computes as before.
    """
    replaced: list[tuple[nn.Module, MethodType]] = []
    for module in model.modules():
        kind: Any = type(module)
        if "forward" not in vars(module) and _is_rms_norm(kind):
            method = MethodType(_forward, module)  # a method: a deepcopy of the model binds it to its own norm
            setattr(module, "forward", method)  # noqa: B010  # mypy lets no method be assigned to
            replaced.append((module, method))

    def undo() -> None:
        for module, method in replaced:
            if vars(module).get("forward") is method:
                del module.forward

    return undo


def _forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    kind = hidden_states.device.type
    if kind == "cpu" or hidden_states.dtype != self.weight.dtype or _autocasts(kind) or torch.compiler.is_compiling():
        own: torch.Tensor = type(self).forward(self, hidden_states)
        return own
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def _autocasts(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


@functools.cache
def _is_rms_norm(kind: type[nn.Module]) -> bool:
    """Whether `kind(width)` computes weight * x / sqrt(mean(x^2) + variance_epsilon), which is tried: transformers has
    a class for each family, most of them copies of one another, and some that differ in a detail."""
    if not kind.__name__.endswith(("RMSNorm", "LayerNorm")) or kind.__module__.startswith("torch."):
        return False
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        x, weight, epsilon = torch.linspace(-1.0, 2.0, 96).view(3, 32), torch.linspace(0.5, 1.5, 32), 0.5
        try:
            norm: Any = kind(32)
            norm.weight.copy_(weight)
            norm.variance_epsilon = epsilon
            return torch.allclose(norm(x), F.rms_norm(x, weight.shape, weight, epsilon))
        except Exception:  # anybody's class: other arguments, no such weight, no such number
            return False


KINDS = ("cuda", "meta")
"""Of devices: the meta device stands for a GPU."""
MOST_ROWS = 65535
"""Of batch x heads: CUDA's limit of a grid."""
NAME = "offloadkit"
"""Of this attention, among those of transformers."""


def fuse_attention(model: nn.Module) -> Callable[[], None]:
    """Have eager attention of `model`'s T5 stacks run by our kernels where it can; returns what undoes it."""
    configs, replaced = list[Any](), list[tuple[nn.Module, MethodType]]()
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        width: Any = getattr(module, "key_value_proj_dim", None)
        kind: Any = type(module)
        if config is None or width not in attention_kernel.WIDTHS or _own_attention(kind) is None:
            continue
        if torch.cuda.is_available() and not attention_kernel.available(width):  # without a GPU: a plan's shapes alone
            break
        if config._attn_implementation == "eager":
            _register()
            config._attn_implementation = NAME
            configs.append(config)
        if config._attn_implementation == NAME and "compute_bias" not in vars(module):
            method = MethodType(_compute_bias, module)  # a method: a deepcopy of the model binds it to its own module
            setattr(module, "compute_bias", method)  # noqa: B010  # mypy lets no method be assigned to
            replaced.append((module, method))

    def undo() -> None:
        for config in configs:
            if config._attn_implementation == NAME:
                config._attn_implementation = "eager"
        for module, method in replaced:
            if vars(module).get("compute_bias") is method:
                del module.compute_bias

    return undo


@cache
def _own_attention(kind: Any) -> Any:
    """`eager_attention_forward` of the file of a class with a position bias like T5's, or of one that it is made of."""
    if hasattr(kind, "compute_bias"):
        for one in kind.__mro__:
            found = getattr(sys.modules[one.__module__], "eager_attention_forward", None)
            if found is not None and "position_bias" in inspect.signature(found).parameters:
                return found
    return None


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, eager_mask)


def _compute_bias(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Contiguous, once for all blocks that share it: each would keep a copy of its own."""
    bias: Tensor = type(self).compute_bias(self, *args, **kwargs)
    return bias.contiguous()


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """What `eager_attention_forward` of the model's module gives, but for the weights."""
    asked = options.get("output_attentions") or module.config.output_attentions
    if asked or dropout >= 1 or position_bias is None or not _takes(query, key, value, position_bias, attention_mask):
        kind: Any = type(module)
        found: tuple[Tensor, Tensor] = _own_attention(kind)(
            module, query, key, value, attention_mask, scaling, dropout, position_bias, **options
        )
        return found
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is not None:
        attention_mask = attention_mask.expand(query.shape[0], 1, query.shape[2], key.shape[2])
        attention_mask = attention_mask if attention_mask.stride(3) == 1 else attention_mask.contiguous()
    bias = position_bias.contiguous()
    dropout = dropout if module.training else 0.0
    return attention_kernel.attend(query, key, value, bias, attention_mask, scaling, dropout), None


def _takes(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None) -> bool:
    batch, heads, queries, width = query.shape
    return (
        query.device.type in KINDS
        and query.dtype in attention_kernel.DTYPES
        and query.dtype == key.dtype == value.dtype
        and width in attention_kernel.WIDTHS
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and queries >= attention_kernel.LEAST_QUERIES
        and batch * heads <= MOST_ROWS
        and bias.shape == (1, heads, queries, key.shape[2])
        and (mask is None or _takes_mask(mask, key.shape[2]))
    )


def _takes_mask(mask: Tensor, keys: int) -> bool:
    is_of_pairs = mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[3] == keys
    return is_of_pairs and mask.is_floating_point() and not mask.requires_grad


def fuse(model: nn.Module, *, compiled: bool = False) -> Callable[[], None]:
    """Have attention with a position bias run by our kernels, and the norms, but where blocks are `compiled`, as one
    kernel each; returns what undoes it."""
    changes = ExitStack()
    changes.callback(fuse_attention(model))
    if not compiled:
        changes.callback(fuse_norms(model))
    return changes.close
