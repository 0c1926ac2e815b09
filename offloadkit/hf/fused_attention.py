"""T5's attention in one kernel: a model's own writes the scores of each head and pair of tokens, reads them again some
eight times forward and as often backward, and keeps them.

`fuse_attention(model)` has attention that is eager run so on a GPU, in bf16 and fp16. Elsewhere, where Triton is
missing or cannot compile, and where weights are asked for or a text is generated, the model's own runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from offloadkit.hf import attention_op

KINDS = ("cuda", "meta")
"""Of devices: the meta device stands for a GPU."""
NAME = "offloadkit"
"""Of this attention, among those of transformers."""


def fuse_attention(model: nn.Module) -> Callable[[], None]:
    """Have eager attention of `model`'s T5 stacks run as one kernel where it can; returns what undoes it."""
    configs, replaced = list[Any](), list[tuple[nn.Module, MethodType]]()
    usable = attention_op.available() or not torch.cuda.is_available()  # without a GPU: a plan's shapes alone
    for module in model.modules() if usable else ():
        config: Any = getattr(module, "config", None)
        if not hasattr(module, "relative_attention_num_buckets"):
            continue
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
    if asked or position_bias is None or not _takes(query, key, value, position_bias, attention_mask):
        own: Any = sys.modules[type(module).__module__]
        found: tuple[Tensor, Tensor] = own.eager_attention_forward(
            module, query, key, value, attention_mask, scaling, dropout, position_bias, **options
        )
        return found
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is not None:
        attention_mask = attention_mask.expand(query.shape[0], 1, query.shape[2], key.shape[2])
    bias = position_bias.contiguous()
    dropout = dropout if module.training else 0.0
    return attention_op.attend(query, key, value, bias, attention_mask, scaling, dropout), None


def _takes(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None) -> bool:
    _, heads, queries, width = query.shape
    return (
        query.device.type in KINDS
        and query.dtype in attention_op.DTYPES
        and query.dtype == key.dtype == value.dtype
        and width in attention_op.WIDTHS
        and queries >= attention_op.LEAST_QUERIES
        and bias.shape == (1, heads, queries, key.shape[2])
        and (mask is None or (mask.is_floating_point() and mask.shape[1] == 1 and mask.shape[3] == key.shape[2]))
    )
