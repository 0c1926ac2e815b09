"""Changes to how transformers' models compute during training, by model family (`FAMILIES`).

For every family, the loss over a large vocabulary is computed in chunks from fp32 logits, masks do not synchronise with
the GPU, or are left out (`masks.py`), rows of packed batches do not see each other (`packed.py`), and towers for images
and sound attend to all segments at once (`segments.py`).
"""

from __future__ import annotations

import inspect
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offloadkit.facts.changes import claim, configs_of, unclaimed
from offloadkit.facts.config import OffloadConfig
from offloadkit.hf.loss import autocasts, compute_loss_in_chunks, give_method
from offloadkit.hf.masks import added_mask, avoid_mask_syncs
from offloadkit.hf.packed import keep_rows_apart
from offloadkit.hf.segments import attend_to_all_segments
from offloadkit.hf.trl_loss import plan_fused_head
from offloadkit.kernels import attention as attention_kernel
from offloadkit.kernels import decoder as decoder_kernel
from offloadkit.kernels import feed_forward as feed_forward_kernel
from offloadkit.kernels import linear_cross_entropy as loss_kernel
from offloadkit.offload.layers import hooks_of

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

    caching_attention: str | None = None
    """Class of the attention modules of a model that makes a cache of keys and values although `use_cache` is off."""


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
    # A recomputed block would add its keys to the cache again.
    Family(model_types=("xlm",), caching_attention="MultiHeadAttention"),
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
        config: `attention` "keep" leaves attention unchanged; `compile_blocks` leaves norms, gated activations and
            rotary embeddings to the compiler.
        kernels: use our kernels.
    """
    changes = ExitStack()
    fused = kernels and _kernels_run(loss_kernel.LEAST_CAPABILITY, loss_kernel.available, capability)
    for whole in _pretrained(model):
        changes.callback(compute_loss_in_chunks(whole, fused=fused))
        changes.callback(_take_loss_in_fp32(whole))
        changes.callback(avoid_mask_syncs(whole, leave_out=config.attention == "ours"))
        changes.callback(keep_rows_apart(whole, on_gpu=kernels, capability=capability))
        if kernels:
            changes.callback(attend_to_all_segments(whole, capability))
        changes.callback(_leave_out_caches(whole))
    changes.callback(plan_fused_head())
    if config.attention == "ours":
        for own in (own for own in configs_of(model) if hasattr(own, "model_type")):
            changes.callback(choose_attention(own))
        if kernels:
            changes.callback(fuse_attention(model, capability))
    if not config.compile_blocks:
        changes.callback(_fuse_blocks(model, capability) if kernels else change_feed_forwards(model, kernels=False))
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


def _leave_out_caches(model: PreTrainedModel) -> Callable[[], None]:
    """Do not pass the cache that forward makes for itself to attention while gradients are enabled."""
    changes, model_type = ExitStack(), getattr(model.config, "model_type", None)
    name = next((each.caching_attention for each in FAMILIES if model_type in each.model_types), None)
    for module in model.modules():
        if name is not None and type(module).__name__ == name and "forward" not in vars(module):
            changes.callback(give_method(module, "forward", _without_cache))
    return changes.close


def _without_cache(self: Any, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, cache=None if torch.is_grad_enabled() else cache, **kwargs)


def fuse(model: nn.Module, *, compiled: bool = False) -> Callable[[], None]:
    """Run attention with a position bias on our kernels, and unless `compiled` also norms, gated activations and rotary
    embeddings; returns a function that undoes it.
    """
    changes = ExitStack()
    changes.callback(fuse_attention(model))
    if not compiled:
        changes.callback(_fuse_blocks(model))
    return changes.close


def _fuse_blocks(model: nn.Module, capability: tuple[int, int] | None = None) -> Callable[[], None]:
    changes = ExitStack()
    changes.callback(fuse_norms(model))
    changes.callback(fuse_decoders(model, capability))
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
        if "forward" not in vars(module) and _is_norm(kind, ("RMSNorm", "LayerNorm"), "variance_epsilon", 0.0):
            changes.callback(give_method(module, "forward", _normalize))
    return changes.close


def _normalize(self: Any, hidden_states: Tensor) -> Tensor:
    kind = hidden_states.device.type
    if kind == "cpu" or hidden_states.dtype != self.weight.dtype or autocasts(kind) or torch.compiler.is_compiling():
        own: Tensor = type(self).forward(self, hidden_states)
        return own
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


@cache
def _is_norm(kind: Any, names: tuple[str, ...], epsilon_name: str, offset: float) -> bool:
    """Whether `kind(width)` computes (weight + offset) * x / sqrt(mean(x^2) + epsilon), tested on an example, because
    transformers has one class per family, and some differ in a detail.

    Args:
        names: ends of the classes' names.
        epsilon_name: name of the attribute with epsilon.
    """
    if not kind.__name__.endswith(names) or kind.__module__.startswith("torch."):
        return False
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        x, factors, epsilon = torch.linspace(-1.0, 2.0, 96).view(3, 32), torch.linspace(0.5, 1.5, 32), 0.5
        try:
            norm: Any = kind(32)
            norm.weight.copy_(factors - offset)
            setattr(norm, epsilon_name, epsilon)
            return torch.allclose(norm(x), F.rms_norm(x, factors.shape, factors, epsilon))
        except Exception:  # unknown class: other arguments or attributes
            return False


# -- gated activations and rotary embeddings

KINDS = ("cuda", "meta")
"""Device types that the kernels accept; "meta" stands for a GPU."""

_ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh"}
"""Classes of torch and transformers, and the kernels' names of their functions."""

_ROTARY = "apply_rotary_pos_emb"
"""Function that the modeling files of transformers define or import."""


def fuse_decoders(model: nn.Module, capability: tuple[int, int] | None = None) -> Callable[[], None]:
    """Run activation(gate) * up, the rotary embedding of query and key, and norms with a weight of 1 + w as one kernel
    each if possible; returns a function that undoes it.

    The rotary embedding is a function of a modeling file, so it changes for all models of that file. Its bits on a GPU
    stay the same.

    Args:
        capability: compute capability of the GPU to plan for, if not the present GPU.
    """
    changes, files = ExitStack(), dict[int, Any]()
    kernels = _kernels_run(decoder_kernel.LEAST_CAPABILITY, decoder_kernel.available, capability)
    changes.callback(change_feed_forwards(model, kernels=kernels))
    if not kernels:
        return changes.close
    for module in model.modules():
        kind: Any = type(module)
        if "forward" not in vars(module) and _is_norm(kind, ("RMSNorm",), "eps", 1.0):
            changes.callback(give_method(module, "forward", _normalize_by_one_plus_weight))
        file = sys.modules.get(kind.__module__)
        if hasattr(file, _ROTARY):
            files[id(file)] = file
    for file in files.values():
        own = unclaimed(file, _ROTARY)
        if _is_rotary(own):
            changes.callback(claim(file, _ROTARY, _rotary_by_kernel(own)))
    return changes.close


def change_feed_forwards(model: nn.Module, *, kernels: bool) -> Callable[[], None]:
    """Compute experts and gated feed-forward layers of long rows in tiles, and such layers of all other rows by one
    kernel if `kernels`; returns a function that undoes it.
    """
    changes = ExitStack()
    for module in model.modules():
        kind: Any = type(module)
        for forward in (_feed_forward, _joint_feed_forward):
            if "forward" not in vars(module) and _computes(kind, forward):
                changes.callback(give_method(module, "forward", partial(forward, kernels=kernels)))
        if "forward" not in vars(module) and _is_experts(module):
            weights = {name: each.shape for name, each in module.named_parameters(remove_duplicate=False)}
            changes.callback(give_method(module, "forward", partial(_experts, kind=kind, weights=weights)))
    return changes.close


def _feed_forward(self: Any, hidden_states: Tensor, *, kernels: bool) -> Tensor:
    into = self.gate_proj, self.up_proj
    whole = partial(_whole_feed_forward, kernels=kernels)
    return _tiled(self, hidden_states, into, self.down_proj, self.act_fn, whole, kernels=kernels)


def _whole_feed_forward(self: Any, hidden_states: Tensor, *, kernels: bool) -> Tensor:
    if not kernels or not _runs_gated(self.act_fn, hidden_states):
        own: Tensor = type(self).forward(self, hidden_states)
        return own
    gate, up = self.gate_proj(hidden_states), self.up_proj(hidden_states)
    if gate.dtype == up.dtype in decoder_kernel.DTYPES and gate.shape == up.shape:
        product = decoder_kernel.gated(gate, up, _ACTIVATIONS[type(self.act_fn).__name__])
    else:
        product = self.act_fn(gate) * up
    output: Tensor = self.down_proj(product)
    return output


def _joint_feed_forward(self: Any, hidden_states: Tensor, *, kernels: bool) -> Tensor:
    """`_feed_forward` with one matrix for gate and up."""
    into = (self.gate_up_proj,)
    whole = partial(_whole_joint_feed_forward, kernels=kernels)
    return _tiled(self, hidden_states, into, self.down_proj, self.activation_fn, whole, kernels=kernels)


def _whole_joint_feed_forward(self: Any, hidden_states: Tensor, *, kernels: bool) -> Tensor:
    if not kernels or not _runs_gated(self.activation_fn, hidden_states):
        own: Tensor = type(self).forward(self, hidden_states)
        return own
    both = self.gate_up_proj(hidden_states)
    if both.dtype in decoder_kernel.DTYPES:
        product = decoder_kernel.gated(both, None, _ACTIVATIONS[type(self.activation_fn).__name__])
    else:
        gate, up = both.chunk(2, dim=-1)
        product = up * self.activation_fn(gate)
    output: Tensor = self.down_proj(product)
    return output


def _tiled(
    self: nn.Module,
    x: Tensor,
    into: tuple[Any, ...],
    back: Any,
    activation: Any,
    whole: Callable[[Any, Tensor], Tensor],
    *,
    kernels: bool,
) -> Tensor:
    """The layer in tiles if the rows of `x` are long. It is computed by `whole` if they are not, or if a projection, or
    the base of LoRA's adapters, is no plain linear layer in the dtype of `x`, such as one with hooks.
    """
    features = getattr(back, "in_features", 0)
    if not feed_forward_kernel.is_long(x, features) or not _is_known(activation) or autocasts(x.device.type):
        return whole(self, x)
    matrices = *into, back
    bases = [each.get_base_layer() if _has_lora(each) else each for each in matrices]
    if not all(map(_is_plain, bases)):
        return whole(self, x)
    weights, biases = [each.weight for each in bases], [each.bias for each in bases]
    if not all(each is None or each.dtype == x.dtype in feed_forward_kernel.DTYPES for each in (*weights, *biases)):
        return whole(self, x)
    if bases == list(matrices):
        name = _ACTIVATIONS[type(activation).__name__]
        return feed_forward_kernel.gated_feed_forward(x, weights[:-1], weights[-1], biases, name, kernels=kernels)
    names, tensors = zip(*self.named_parameters(remove_duplicate=False), strict=True)
    size = feed_forward_kernel.tile_size(x.numel() // x.shape[-1], features, feed_forward_kernel.TILE)

    def bind(given: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        return partial(whole, _with_parameters(self, type(self), dict(zip(names, given, strict=True))))

    rows = x.reshape(-1, x.shape[-1])
    output = feed_forward_kernel.in_tiles(bind, [rows], tensors, len(weights[-1]), size)
    return output.view(*x.shape[:-1], -1)


def _has_lora(projection: Any) -> bool:
    """Whether `projection` is a linear layer with LoRA's adapters that computes each token by itself, without random
    numbers.
    """
    file = sys.modules.get("peft.tuners.lora.layer")
    if file is None or type(projection) is not file.Linear or projection.merged or projection.lora_variant:
        return False
    adapters = [projection, *(each for name in ("lora_A", "lora_B") for each in getattr(projection, name).values())]
    return (
        all(_is_plain(each) for each in adapters[1:])
        and not any("forward" in vars(each) or any(hooks_of(each)) for each in projection.modules())
        and not any(each.training and getattr(each, "p", 0.0) for each in projection.lora_dropout.values())
    )


def _with_parameters(module: nn.Module, kind: type[nn.Module], tensors: Mapping[str, Tensor]) -> Any:
    """A copy of `module` of the class `kind`, with copies of the modules inside, that has `tensors`, by name, as its
    parameters.
    """
    copy: Any = object.__new__(kind)
    vars(copy).update(vars(module))
    own = {name: tensor for name, tensor in tensors.items() if "." not in name}
    inside = {name: tensor for name, tensor in tensors.items() if "." in name}
    parts = {}
    for name, part in module._modules.items():
        given = {key[len(name) + 1 :]: tensor for key, tensor in inside.items() if key.startswith(f"{name}.")}
        parts[name] = part if part is None or not given else _with_parameters(part, type(part), given)
    vars(copy).update(_parameters={**module._parameters, **own}, _modules=parts)
    return copy


# -- experts


def _is_experts(module: nn.Module) -> bool:
    """Whether `module` has the weights of all experts in 3-D parameters, and transformers chooses its forward."""
    draws = any(isinstance(each, nn.Dropout) for each in module.modules())
    return hasattr(module, "is_concatenated") and not draws and any(True for _ in module.parameters())


def _experts(
    self: Any,
    hidden_states: Tensor,
    *routing: Any,
    kind: type[nn.Module],
    weights: Mapping[str, torch.Size],
    **named: Any,
) -> Tensor:
    """The experts in tiles of tokens if there are many.

    Args:
        routing: each [number of tokens, experts of a token]: the experts' numbers and weights.
        kind: the class of `self`; PEFT gives it another one while adapted weights are used.
        weights: shapes by name.
    """
    given = (hidden_states, *routing)
    is_usual = not named and len(given) == 3 and all(isinstance(each, Tensor) and each.dim() == 2 for each in given)
    is_parallel = getattr(self, "_is_expert_parallel", False)  # older versions of transformers have no such attribute
    is_usual &= not (autocasts(hidden_states.device.type) or torch.compiler.is_compiling() or is_parallel)

    @cache
    def tensors() -> list[Tensor]:
        return [operator.attrgetter(name)(self) for name in weights]

    size, (tokens, width) = 0, hidden_states.shape[-2:]
    if is_usual:
        of_an_expert = sum(math.prod(shape[1:]) for shape in weights.values() if len(shape) == 3) // width
        size = feed_forward_kernel.tile_of_experts(tokens, routing[0].shape[-1] * (2 * width + of_an_expert), tensors)
    if not 0 < size < tokens:
        own: Tensor = type(self).forward(self, *given, **named)
        return own

    def bind(values: Sequence[Tensor]) -> Callable[..., Tensor]:
        copy = _with_parameters(self, kind, dict(zip(weights, values, strict=True)))
        return partial(type(copy).forward, copy)

    return feed_forward_kernel.in_tiles(bind, given, tensors(), width, size)


# -- what layers compute


def _is_plain(projection: Any) -> bool:
    is_linear = isinstance(projection, nn.Linear) and type(projection).forward is nn.Linear.forward
    return is_linear and "forward" not in vars(projection) and not any(hooks_of(projection))


def _runs_gated(activation: Any, hidden_states: Tensor) -> bool:
    return hidden_states.device.type in KINDS and _is_known(activation)


def _is_known(activation: Any) -> bool:
    kind = type(activation)
    return (
        kind.__name__ in _ACTIVATIONS
        and kind.__module__.startswith(("torch.", "transformers."))
        and not any(hooks_of(activation))
        and not torch.compiler.is_compiling()
    )


@cache
def _computes(kind: Any, forward: Callable[..., Tensor]) -> bool:
    """Whether `kind.forward` computes what `forward` does, with the same rounding of bf16, tested on an object with the
    same projections.
    """
    if kind.__module__.startswith("torch.") or kind.forward is nn.Module.forward:
        return False
    projections = {"gate_proj": _doubled, "up_proj": _raised, "down_proj": _lowered, "act_fn": torch.tanh}
    if forward is _joint_feed_forward:
        projections = {"gate_up_proj": _both, "down_proj": _lowered, "activation_fn": torch.tanh}
    x = torch.linspace(-2.0, 2.0, 12, device="cpu").bfloat16().view(1, 3, 4)
    try:
        found = kind.forward(SimpleNamespace(**projections), x)
    except Exception:  # unknown class: other arguments or attributes
        return False
    return isinstance(found, Tensor) and torch.equal(found, _lowered(torch.tanh(_doubled(x)) * _raised(x)))


def _doubled(x: Tensor) -> Tensor:
    return 2 * x


def _raised(x: Tensor) -> Tensor:
    return x + 1


def _lowered(x: Tensor) -> Tensor:
    return x - 0.5


def _both(x: Tensor) -> Tensor:
    return torch.cat((_doubled(x), _raised(x)), dim=-1)


def _normalize_by_one_plus_weight(self: Any, x: Tensor) -> Tensor:
    takes = x.dtype in decoder_kernel.DTYPES and self.weight.numel() <= decoder_kernel.WIDEST_NORM
    if x.device.type not in KINDS or not takes or torch.compiler.is_compiling():
        own: Tensor = type(self).forward(self, x)
        return own
    return decoder_kernel.normed(x, self.weight, self.eps, 1.0)


def _rotary_by_kernel(own: Callable[..., Any]) -> Callable[..., Any]:
    is_partial = _is_partial_rotary(own)

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not _rotates(q, k, cos, sin, is_partial):
            return own(q, k, cos, sin, *args, **kwargs)
        return decoder_kernel.rotated(q, k, cos, sin)

    return rotate


def _rotates(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, is_partial: bool) -> bool:
    if query.device.type not in KINDS or query.dim() != 4:
        return False
    batch, _, length, width = query.shape
    return (
        query.dtype == key.dtype == cos.dtype == sin.dtype
        and query.dtype in decoder_kernel.DTYPES
        and cos.dim() == 3
        and cos.shape == sin.shape
        and cos.shape[0] in (1, batch)
        and cos.shape[1] == length
        and (cos.shape[2] == width or (is_partial and cos.shape[2] < width))
        and key.shape == (batch, key.shape[1], length, width)
        and not (cos.requires_grad or sin.requires_grad)
        and not torch.compiler.is_compiling()
    )


@cache
def _is_rotary(function: Callable[..., Any]) -> bool:
    """Whether `function(q, k, cos, sin)` rotates the two halves of each head in the dtype of `q`, tested on an example,
    because the files of transformers define different functions under this name.
    """
    return _rotates_example(function, 8)


@cache
def _is_partial_rotary(function: Callable[..., Any]) -> bool:
    """Whether `function` keeps the rest of each head where `cos` is narrower."""
    return _rotates_example(function, 6)


def _rotates_example(function: Callable[..., Any], rotated: int) -> bool:
    with torch.device("cpu"):
        numbers = torch.linspace(-1.0, 2.0, 600).bfloat16()
        query, key = numbers[:240].view(2, 3, 5, 8), numbers[240:400].view(2, 2, 5, 8)
        cos, sin = (numbers[start : start + 10 * rotated].view(2, 5, rotated) for start in (400, 500))
        try:
            found = function(query, key, cos, sin)
        except Exception:  # unknown function: other arguments or shapes
            return False

        def expected(x: Tensor) -> Tensor:
            first, second = x[..., :rotated].chunk(2, dim=-1)
            turned = torch.cat((-second, first), dim=-1)
            return torch.cat((x[..., :rotated] * cos[:, None] + turned * sin[:, None], x[..., rotated:]), dim=-1)

        return len(found) == 2 and torch.equal(found[0], expected(query)) and torch.equal(found[1], expected(key))


# -- attention with a learned position bias

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
        available = partial(attention_kernel.available, width)
        if not _kernels_run(attention_kernel.LEAST_CAPABILITY, available, capability):
            break
        if config._attn_implementation in ("eager", NAME) and id(config) not in claimed:
            _register()
            claimed.add(id(config))
            changes.callback(claim(config, "_attn_implementation", NAME))
        if config._attn_implementation == NAME and "compute_bias" not in vars(module):
            changes.callback(give_method(module, "compute_bias", _compute_bias))
    return changes.close


def _kernels_run(least: tuple[int, int], available: Callable[[], bool], capability: tuple[int, int] | None) -> bool:
    """Whether kernels run on a GPU of `capability`, or on the present GPU. True without a GPU, where only shapes count.

    Args:
        least: the lowest capability of the kernels.
        available: whether the kernels run on the present GPU.
    """
    if capability is not None:
        return capability >= least
    return not torch.cuda.is_available() or available()


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
