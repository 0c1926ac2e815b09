"""Changes to how transformers' models compute during training, by model family (`FAMILIES`).

For every family, the loss over a large vocabulary is computed in chunks from fp32 logits, and masks do not synchronise
with the GPU (`masks.py`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offloadkit.facts.changes import claim, configs_of, unclaimed
from offloadkit.facts.config import OffloadConfig
from offloadkit.hf.loss import autocasts, compute_loss_in_chunks, give_method
from offloadkit.hf.masks import added_mask, avoid_mask_syncs
from offloadkit.kernels import attention as attention_kernel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Family:
    model_types: tuple[str, ...] = ()
    """`model_type` of configs that get `attention` if they have transformers' default, `sdpa`."""

    attention: str | None = None
    """`attn_implementation`; None keeps transformers' choice."""

    biased_attention: tuple[str, ...] = ()
    """Classes whose eager attention, with a learned position bias, can run on our kernels; subclasses too.

    The module of the class must define `eager_attention_forward`.
    """


_DEFAULT = "sdpa"
"""transformers' `attn_implementation` if the user chose none."""

FAMILIES = (
    # With a learned attention bias, `sdpa` is slower and larger than eager attention (T5-3B, 8x(512+128) tokens, H200:
    # forward and backward 0.238 s and 26.8 GiB against 0.227 s and 21.5 GiB). Its backward is not deterministic and
    # gave NaN gradients on padded batches.
    Family(
        model_types=("t5", "mt5", "umt5"),
        attention="eager",
        biased_attention=("T5Attention", "MT5Attention", "UMT5Attention"),
    ),
    # The same attention with `attn_implementation` unchanged.
    Family(
        biased_attention=(
            "LongT5Attention",
            "LongT5LocalAttention",
            "LongT5TransientGlobalAttention",
            "Pix2StructTextAttention",
            "Pop2PianoAttention",
            "SwitchTransformersAttention",
            "UdopAttention",
        ),
    ),
)


def choose_attention(config: Any) -> Callable[[], None]:
    attention = next((family.attention for family in FAMILIES if config.model_type in family.model_types), None)
    if attention is None or unclaimed(config, "_attn_implementation") not in (None, _DEFAULT):
        return lambda: None
    return claim(config, "_attn_implementation", attention)


def patched(
    model: nn.Module, config: OffloadConfig, *, kernels: bool = True, capability: tuple[int, int] | None = None
) -> Callable[[], None]:
    """Apply the training changes to the transformers models in `model`; returns a function that undoes them.

    Args:
        config: `attention` "keep" leaves attention unchanged; `compile_blocks` leaves the norms to the compiler.
        kernels: use our kernels for attention and norms.
    """
    changes = ExitStack()
    for whole in _pretrained(model):
        changes.callback(compute_loss_in_chunks(whole))
        changes.callback(_take_loss_in_fp32(whole))
        changes.callback(avoid_mask_syncs(whole))
    if config.attention == "ours":
        for own in (own for own in configs_of(model) if hasattr(own, "model_type")):
            changes.callback(choose_attention(own))
        if kernels:
            changes.callback(fuse_attention(model, capability))
    if kernels and not config.compile_blocks:
        changes.callback(fuse_norms(model))
    return changes.close


def _pretrained(module: nn.Module) -> Iterator[PreTrainedModel]:
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from _pretrained(child)


def _take_loss_in_fp32(model: PreTrainedModel) -> Callable[[], None]:
    """Convert logits to fp32: bf16 has three digits, and the gradient of a scaled loss overflows fp16."""
    untyped: Any = model
    head: nn.Module | None = untyped.get_output_embeddings()
    if head is None:
        return lambda: None

    def to_fp32(module: nn.Module, args: Any, logits: Any) -> Any:
        half = isinstance(logits, Tensor) and logits.dtype in (torch.bfloat16, torch.float16)
        return logits.float() if half else logits

    return head.register_forward_hook(to_fp32).remove


def fuse(model: nn.Module, *, compiled: bool = False) -> Callable[[], None]:
    """Run attention with a position bias, and each norm unless `compiled`, on our kernels; returns a function that
    undoes it.
    """
    changes = ExitStack()
    changes.callback(fuse_attention(model))
    if not compiled:
        changes.callback(fuse_norms(model))
    return changes.close


# -- norms


def fuse_norms(model: nn.Module) -> Callable[[], None]:
    """Run each RMS norm of `model` as one kernel if possible; returns a function that undoes it.

    A norm stays unchanged if its class computes something else, its forward was replaced, or its input's dtype differs
    from its weight's.
    """
    changes = ExitStack()
    for module in model.modules():
        kind: Any = type(module)
        if "forward" not in vars(module) and _is_rms_norm(kind):
            changes.callback(give_method(module, "forward", _normalize))
    return changes.close


def _normalize(self: Any, hidden_states: Tensor) -> Tensor:
    kind = hidden_states.device.type
    if kind == "cpu" or hidden_states.dtype != self.weight.dtype or autocasts(kind) or torch.compiler.is_compiling():
        own: Tensor = type(self).forward(self, hidden_states)
        return own
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


@cache
def _is_rms_norm(kind: type[nn.Module]) -> bool:
    """Whether `kind(width)` computes weight * x / sqrt(mean(x^2) + variance_epsilon), tested on an example, because
    transformers has one class per family, and some differ in a detail.
    """
    if not kind.__name__.endswith(("RMSNorm", "LayerNorm")) or kind.__module__.startswith("torch."):
        return False
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        x, weight, epsilon = torch.linspace(-1.0, 2.0, 96).view(3, 32), torch.linspace(0.5, 1.5, 32), 0.5
        try:
            norm: Any = kind(32)
            norm.weight.copy_(weight)
            norm.variance_epsilon = epsilon
            return torch.allclose(norm(x), F.rms_norm(x, weight.shape, weight, epsilon))
        except Exception:  # unknown class: other arguments or attributes
            return False


# -- attention with a learned position bias

KINDS = ("cuda", "meta")
"""Device types that the kernels accept; "meta" stands for a GPU."""
MOST_ROWS = 65535
"""Largest batch x heads: CUDA's grid limit."""
NAME = "offloadkit"


def fuse_attention(model: nn.Module, capability: tuple[int, int] | None = None) -> Callable[[], None]:
    """Run eager attention with a position bias on our kernels if possible; returns a function that undoes it.

    Args:
        capability: compute capability of the GPU to plan for, if not the present GPU.
    """
    changes, claimed = ExitStack(), set[int]()
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        width: Any = getattr(module, "key_value_proj_dim", None)
        kind: Any = type(module)
        if config is None or width not in attention_kernel.WIDTHS or _own_attention(kind) is None:
            continue
        if not _kernels_run(width, capability):
            break
        if config._attn_implementation in ("eager", NAME) and id(config) not in claimed:
            _register()
            claimed.add(id(config))
            changes.callback(claim(config, "_attn_implementation", NAME))
        if config._attn_implementation == NAME and "compute_bias" not in vars(module):
            changes.callback(give_method(module, "compute_bias", _compute_bias))
    return changes.close


def _kernels_run(width: int, capability: tuple[int, int] | None) -> bool:
    """Whether our attention runs on a GPU of `capability`, or on the present GPU. True without a GPU, where only shapes
    count.
    """
    if capability is not None:
        return capability >= attention_kernel.LEAST_CAPABILITY
    return not torch.cuda.is_available() or attention_kernel.available(width)


@cache
def _own_attention(kind: Any) -> Any:
    names = {name for family in FAMILIES for name in family.biased_attention}
    for one in kind.__mro__:
        found = getattr(sys.modules[one.__module__], "eager_attention_forward", None)
        if one.__name__ in names and found is not None and "position_bias" in inspect.signature(found).parameters:
            return found
    return None


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, added_mask)


def _compute_bias(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """One contiguous bias; otherwise each block would keep its own copy."""
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
    """Attention like the model's own `eager_attention_forward`, without attention weights unless requested.

    Args:
        query: [batch, heads, queries, width].
        key, value: [batch, heads, keys, width].
        attention_mask: added to the scores, [batch or 1, 1, queries or 1, keys].
        position_bias: added to the scores, [1, heads, queries, keys].

    Returns:
        [batch, queries, heads, width], and the attention weights or None.
    """
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
        and (mask is None or (mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[3] == key.shape[2]))
        and (mask is None or (mask.is_floating_point() and not mask.requires_grad))
    )
