"""Counting what a model does on the meta device: operations, bytes that are alive, as they would be on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from offloadkit.plan.work import Pass

META = torch.device("meta")
_FLASH = (
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_backward,
)
_ALLOCATION = 512
"""Bytes to which torch's CUDA allocator rounds a tensor up."""


class AsOnGpu(TorchFunctionMode):
    """Take the operations that a GPU would take where torch decides by the device: fused attention, dropout, norms."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is nn.functional.scaled_dot_product_attention:
            return _fused_attention(*args, **kwargs)
        if function in (nn.functional.dropout, torch.dropout):
            x, p, training = _dropout_arguments(*args, **kwargs)
            return torch.native_dropout(x, p, True)[0] if training and p > 0 else x
        if function is nn.functional.rms_norm:
            return _fused_norm(*args, **kwargs)
        return function(*args, **kwargs)


def _dropout_arguments(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> tuple[torch.Tensor, float, bool]:
    return input, p, training and train


def _fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` by the kernels that keep no attention weights: flash, or with a mask or in fp32
    the memory-efficient one."""
    if attn_mask is None and query.dtype != torch.float32:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:  # torch makes a bias of a mask
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def _fused_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """`rms_norm` where it is one kernel; with a weight of another dtype it is several."""
    if weight is None:
        weight = input.new_empty(tuple(normalized_shape))
    if weight.dtype != input.dtype:
        return nn.functional.rms_norm(input, normalized_shape, weight, eps)
    apply: Any = _FusedNorm.apply
    output: torch.Tensor = apply(input, weight)
    return output


class _FusedNorm(torch.autograd.Function):
    """Reads, writes and keeps what the kernels do: beside the input an fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight, input.new_empty(input.shape[: -weight.dim()], dtype=torch.float32))
        return input * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gradient,), (input, weight, _) = gradients, ctx.saved_tensors
        return torch.addcmul(gradient, input, weight), gradient.sum(tuple(range(input.dim() - weight.dim())))


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations and the bytes of tensors that are alive.

    Attributes:
        live: bytes of storages made since the start that still exist.
        peak: highest `live` since `reset_peak`.
    """

    def __init__(self, known: Sequence[torch.Tensor], *, mask_is_full: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.total = Pass()
        self._mask_is_full = mask_is_full
        self._storages: dict[int, weakref.ref[Any]] = {}
        for tensor in known:
            self._remember(tensor, 0)

    def reset_peak(self) -> None:
        self.peak = self.live

    def _remember(self, tensor: torch.Tensor, num_bytes: int) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._storages:
            return
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

        def freed(_: Any, key: int = key, num_bytes: int = num_bytes) -> None:
            self.live -= num_bytes
            self._storages.pop(key, None)

        self._storages[key] = weakref.ref(storage, freed)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            return self._mask_is_full if args[0].dtype == torch.bool else 0
        output = function(*args, **kwargs)
        made = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, torch.Tensor)]
        read = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        storages = {id(tensor.untyped_storage()) for tensor in read}
        is_view = not function._schema.is_mutable and all(id(t.untyped_storage()) in storages for t in made)
        if made and not is_view and not function.__name__.startswith(("empty", "new_empty")):
            self._count(function, args, kwargs, output, sum(tensor.nbytes for tensor in [*read, *made]))
        for tensor in made:
            if tensor.device == META:
                self._remember(tensor, allocated_bytes(tensor.untyped_storage().nbytes()))
        return output

    def _count(self, function: Any, args: Any, kwargs: Any, output: Any, moved: int) -> None:
        flops = flop_registry.get(function.overloadpacket)
        if flops is None:
            self.total += Pass(moved_bytes=moved, num_operations=1)
        else:
            if function.overloadpacket in _FLASH:
                args = _with_a_key_for_each_query(args)
            number = flops(*args, **kwargs, out_val=output)
            own = function.namespace == "offloadkit"
            products = {"own_flops": number, "num_own": 1} if own else {"flops": number}
            self.total += Pass(**products, matmul_bytes=moved, num_operations=1)


def _with_a_key_for_each_query(args: Sequence[Any]) -> list[Any]:
    """The arguments with as many heads in all: torch 2.11 counts no attention whose queries share keys and values."""
    heads = max(one.shape[1] for one in args if _is_by_heads(one))
    return [one.new_empty(one.shape[0], heads, *one.shape[2:]) if _is_by_heads(one) else one for one in args]


def _is_by_heads(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.dim() == 4


def allocated_bytes(num_bytes: int) -> int:
    return -(-num_bytes // _ALLOCATION) * _ALLOCATION
