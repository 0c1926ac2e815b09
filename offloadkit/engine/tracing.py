"""Traces the operations, saved tensors and allocations of one micro-batch on the meta device, without weights or GPU.

Only one repeated block of each kind (class, parameter shapes, inputs) is traced in detail. Its result is copied for the
rest, so eighty layers take as long as two.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_map_only, tree_unflatten
from torch.utils.flop_counter import flop_registry

from offloadkit.device.host_random import HostRandom
from offloadkit.engine.values import META, NOTHING, Values, is_constant, is_dynamic, keeps_values, tensors_of
from offloadkit.errors import ModelError
from offloadkit.kernels.attention import OPERATIONS as FUSED_ATTENTION
from offloadkit.offload.graphs import waits_for_values
from offloadkit.offload.layers import repeated_blocks
from offloadkit.offload.recompute import cheaply_recomputed_in_backward
from offloadkit.offload.records import num_tokens
from offloadkit.planner.work import Cheap, MicroBatch, Pass, Stage

_CPU = torch.device("cpu")
_FLASH = (
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_backward,
)
_SDPA = (
    *_FLASH,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward,
)
_ITEM, _UNIQUE = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.unique_consecutive.default
_COPY, _INDEX = torch.ops.aten._to_copy.default, torch.ops.aten.index.Tensor
_GROUPED_MM = getattr(torch.ops.aten._grouped_mm, "default", None) if hasattr(torch.ops.aten, "_grouped_mm") else None
_INDEXING = tuple(getattr(torch.ops.aten, name) for name in ("index", "index_put", "_index_put_impl_"))
_UNLIKE_THE_FIRST_RUN = (ModelError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
"""Errors of a block that cannot run again with the same arguments, because they changed: a cache of keys and values."""
_ALLOCATION = 512
"""torch's CUDA allocator rounds tensors up to multiples of this many bytes."""


_MOST_RESULTS = 10_000
_results: dict[Any, tuple[Pass, list[tuple[torch.Size, tuple[int, ...], torch.dtype]], Any]] = {}
"""Counts and layouts of the outputs by operation and arguments. A trace adds some hundreds."""


class AsOnGpu(TorchFunctionMode):
    """Use the operations that torch would choose on a GPU: fused attention, dropout and norms."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _ON_GPU.get(function, function)(*args, **(kwargs or {}))


def _dropout(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> torch.Tensor:
    return torch.native_dropout(input, p, True)[0] if training and train and p > 0 else input


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
    """`scaled_dot_product_attention` by kernels that save no attention weights: flash attention, or, with a mask, in
    fp32 or if values have another width than queries (MLA), memory-efficient attention.
    """
    if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:  # torch converts a mask to a bias
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def _fused_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """`rms_norm` as one kernel, or as several if the weight has another dtype."""
    if weight is None:
        weight = input.new_empty(tuple(normalized_shape))
    if weight.dtype != input.dtype:
        return nn.functional.rms_norm(input, normalized_shape, weight, eps)
    return _FusedNorm.apply(input, weight)  # type: ignore[no-any-return, no-untyped-call]


class _FusedNorm(torch.autograd.Function):
    """Reads, writes and saves the same tensors as the kernels: the input, and one fp32 number for each row."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight, input.new_empty(input.shape[: -weight.dim()], dtype=torch.float32))
        return input * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gradient,), (input, weight, _) = gradients, ctx.saved_tensors
        return torch.addcmul(gradient, input, weight), gradient.sum(tuple(range(input.dim() - weight.dim())))


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    rows = log_probs.shape[1] if log_probs.dim() == 3 else 1
    longest = targets.shape[-1] if targets.dim() == 2 else -(-targets.numel() // rows)
    return _CtcLoss.apply(log_probs, rows, longest, reduction == "none")  # type: ignore[no-any-return, no-untyped-call]


class _CtcLoss(torch.autograd.Function):
    """torch has no `ctc_loss` on the meta device. The kernel saves its input, and a number for each place of each row
    and each label with the blanks around it.
    """

    @staticmethod
    def forward(ctx: Any, log_probs: torch.Tensor, rows: int, longest: int, each: bool) -> torch.Tensor:
        ctx.save_for_backward(log_probs, log_probs.new_empty(rows, log_probs.shape[0], 2 * longest + 1))
        return log_probs.new_empty(rows) if each else log_probs.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.saved_tensors[0].clone(), None, None, None


def _tensor(data: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> torch.Tensor:
    """`torch.tensor`, from a CPU tensor where a number comes from the meta device or goes there."""
    numbers = tree_map_only(torch.Tensor, lambda each: each.item() if each.dim() == 0 else each.tolist(), data)
    made = torch.tensor(numbers, dtype=dtype, **options)
    return made if device is None else made.to(device)


_ON_GPU: dict[Any, Callable[..., Any]] = {
    torch.tensor: _tensor,
    nn.functional.ctc_loss: _ctc_loss,
    nn.functional.scaled_dot_product_attention: _fused_attention,
    nn.functional.dropout: _dropout,
    torch.dropout: _dropout,
    nn.functional.rms_norm: _fused_norm,
}


@contextmanager
def _autocast_as_on_gpu() -> Iterator[None]:
    """While open, `torch.autocast` takes the device type "meta", for which it raises otherwise."""
    kind: Any = torch.autocast
    own = kind.__init__

    def initialize(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        own(self, "cuda" if device_type == META.type else device_type, *args, **kwargs)

    kind.__init__ = initialize
    try:
        yield
    finally:
        kind.__init__ = own


class OpCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations and the bytes of live tensors.

    Attributes:
        live: bytes of the storages that were created since the start and still exist.
        peak: highest `live` since it was last set.
        num_waits: operations for which the host waits on a GPU.
    """

    def __init__(self, known: Sequence[torch.Tensor], values: Values | None = None, *, mask_is_full: bool) -> None:
        """`values`: the known values of tensors; None: no value is known."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.values = values or Values()
        self.live = self.peak = self.num_waits = 0
        self.total = Pass()
        self._mask_is_full = mask_is_full
        self._alike: torch.Size | None = (
            None  # shape of the counts that the model requires to be equal: end tokens in each row
        )
        self._storages: dict[int, weakref.ref[Any]] = {}
        for tensor in known:
            self._remember(tensor, 0)

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
        read = tensors_of((args, kwargs))
        is_copy = function is _COPY and kwargs.get("device") == _CPU
        self.num_waits += (waits_for_values(function, args) or is_copy) and any(
            tensor.device == META for tensor in read
        )
        if is_dynamic(function) or is_copy or (function._schema.is_mutable and _is_on_cpu(args[0])):
            found = self.values.computed(function, args, kwargs, read)
            if found is not NOTHING:
                return self._known(found, read, stays=is_copy or function._schema.is_mutable)
        if function is _ITEM and args[0].device == META:
            return self._mask_is_full if args[0].dtype == torch.bool else 0
        if function is _UNIQUE and args[0].device == META:
            self._alike = args[0].shape
            inverse, counts = (args[0].new_empty(shape, dtype=torch.int64) for shape in (self._alike, 1))
            return args[0].new_empty(1), inverse, counts
        used = args
        if function.overloadpacket in _INDEXING:
            used = args[0], self._indices(args[1], selects=function is _INDEX), *args[2:]
        if function.is_view:
            output = function(*used, **kwargs)
            made = [output] if isinstance(output, torch.Tensor) else tensors_of(output)
        else:
            output, made = self._counted(function, used, kwargs)
        on_meta = [tensor for tensor in made if tensor.device == META]
        for tensor in on_meta:
            self._remember(tensor, allocated_bytes(tensor.untyped_storage().nbytes()))
        if function.overloadpacket is _FLASH[1]:
            self.peak = max(self.peak, self.live + _scratch_bytes(*args[1:3]))
        if on_meta and not is_dynamic(function) and self.values.are_small(made, read):
            found = self.values.computed(function, args, kwargs, read)
            if found is not NOTHING:
                self.values.give(made, found, read)
        return output

    def _known(self, found: Any, read: Sequence[torch.Tensor], *, stays: bool) -> Any:
        """A result that was computed from values: of tensors on the meta device unless it `stays` on the CPU."""
        values = tensors_of(found)
        if stays or not values or all(tensor.device == _CPU for tensor in read):
            return found
        made = [torch.empty_like(value, device=META) for value in values]
        self.total += Pass(moved_bytes=sum(tensor.nbytes for tensor in [*read, *made]), num_operations=1)
        for tensor in made:
            self._remember(tensor, allocated_bytes(tensor.untyped_storage().nbytes()))
        self.values.give(made, found, read)
        return tree_unflatten(made, tree_flatten(found)[1])

    def _counted(self, function: Any, args: Any, kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
        """Run an operation, and count it. Returns its output, and the tensors of the output.

        torch's functions for the meta device are written in Python and take 0.3 ms a call. An operation that is
        repeated with equal shapes, in this trace or a later one, gets empty tensors like those of the first time.
        """
        key = function, torch.get_default_dtype(), _described_arguments(args), _described_arguments(kwargs)
        if key in _results:
            counts, layouts, spec = _results[key]
            self.total += counts
            made = [_empty(layout) for layout in layouts]
            return made[0] if spec is None else tree_unflatten(made, spec), made
        output = _grouped_output(*args, **kwargs) if function is _GROUPED_MM else function(*args, **kwargs)
        leaves, spec = tree_flatten(output)
        made, read = tensors_of(leaves), tensors_of((args, kwargs))
        storages = {id(tensor.untyped_storage()) for tensor in read}
        own = {id(tensor.untyped_storage()) for tensor in made}
        counts = Pass()
        is_view = not function._schema.is_mutable and own <= storages
        written = made or _written(function, args)
        if written and not is_view and not function.__name__.startswith(("empty", "new_empty")):
            counts = _counts(function, args, kwargs, output, sum(tensor.nbytes for tensor in [*read, *written]))
        self.total += counts
        layouts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in made]
        is_new = len(own) == len(leaves) and own.isdisjoint(storages)
        if is_new and not function._schema.is_mutable and all(map(_is_empty_like, made, layouts)):
            if len(_results) == _MOST_RESULTS:
                _results.clear()
            _results[key] = counts, layouts, None if isinstance(output, torch.Tensor) else spec
        return output, made

    def _indices(self, given: Sequence[torch.Tensor | None], *, selects: bool) -> list[torch.Tensor | None]:
        """The indices on the meta device. A mask becomes an index for each element that it selects.

        A mask without known values that `selects` elements is taken to select all, or one in each row if the model has
        asked whether it selects equally many in all rows.
        """
        found: list[torch.Tensor | None] = []
        for index in given:
            if index is not None and index.dtype == torch.bool:
                value = self.values.of(index)
                is_alike = index.shape[:-1] == self._alike
                if value is None and not is_alike and not selects:
                    found.append(index)
                    continue
                number = self._alike.numel() if is_alike and self._alike is not None else index.numel()
                number = number if value is None else int(value.sum())
                found += [torch.empty(number, dtype=torch.int64, device=META)] * index.dim()
            else:
                found.append(index if index is None or index.device == META else torch.empty_like(index, device=META))
        return found


def _is_on_cpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device == _CPU and value.dim() > 0


def _written(function: Any, args: Any) -> list[torch.Tensor]:
    """The arguments that an operation writes."""
    written = [given for each, given in zip(function._schema.arguments, args, strict=False) if each.is_write]
    return tensors_of(written)


def _counts(function: Any, args: Any, kwargs: Any, output: Any, moved: int) -> Pass:
    flops = _grouped_flops if function is _GROUPED_MM else flop_registry.get(function.overloadpacket)
    if flops is None:
        return Pass(moved_bytes=moved, num_operations=1)
    given = args
    if function.overloadpacket in _FLASH:
        args = _with_a_key_for_each_query(args)
    number = flops(*args, **kwargs, out_val=output)
    if function.overloadpacket in FUSED_ATTENTION:
        counted = {"fused_attention_flops": number, "num_attention": 1}
        counted |= _read_keys(function, args, kwargs)
    elif function.overloadpacket in _SDPA:
        counted = _sdpa_flops(function, args, kwargs, number) | _read_keys(function, given, kwargs)
    else:
        counted = {"flops": number}
    return Pass(**counted, matmul_bytes=moved, num_operations=1)


def _grouped_output(
    input: torch.Tensor, weight: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """An output of torch's grouped matmul, whose own function for the meta device takes bf16 alone."""
    shape = [input.shape[-2], weight.shape[-1]]
    if input.dim() == weight.dim():
        shape = [input.shape[0] if input.dim() == 3 else len(offs), *shape]
    return input.new_empty(shape, dtype=out_dtype or input.dtype)


def _grouped_flops(input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> int:
    """Each row is multiplied with the weights of one group. torch counts none of these matmuls."""
    groups = input.shape[0] if input.dim() > weight.dim() else 1
    return 2 * input.numel() * weight.shape[-1] // groups


def _described_arguments(value: Any) -> Any:
    """A hashable description of arguments. Operations with equal descriptions have outputs of equal shapes."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(_described_arguments, value))
    if isinstance(value, dict):
        return tuple((name, _described_arguments(each)) for name, each in value.items())
    return type(value), value


def _empty(layout: tuple[torch.Size, tuple[int, ...], torch.dtype]) -> torch.Tensor:
    shape, stride, dtype = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device=META)


def _is_empty_like(tensor: torch.Tensor, layout: tuple[torch.Size, tuple[int, ...], torch.dtype]) -> bool:
    """Whether `_empty(layout)` would have the tensor's device and bytes."""
    return tensor.device == META and tensor.untyped_storage().nbytes() == _empty(layout).untyped_storage().nbytes()


def _by_name(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [each.name for each in function._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _read_keys(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int]:
    given = _by_name(function, args, kwargs)
    return {"read_key_bytes": given["key"].nbytes + given["value"].nbytes}


def _sdpa_flops(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], number: int) -> dict[str, int]:
    """The FLOPs of queries and the keys that they see. `number`: FLOPs if every query sees every key."""
    given = _by_name(function, args, kwargs)
    queries, keys = given["query"].shape[-2], given["key"].shape[-2]
    seen = queries * keys
    if given.get("is_causal"):
        whole = min(queries, keys)  # each of these queries sees one key more than the one before
        seen = whole * (whole + 1) // 2 + (queries - whole) * keys
    return {"sdpa_flops": number * seen // (queries * keys), "sdpa_flops_of_a_key": number // keys}


def _scratch_bytes(query: torch.Tensor, key: torch.Tensor) -> int:
    """Memory of the backward of flash attention: the queries' gradient in fp32, for each row and head in tiles of 128
    queries by 32 numbers, and, if queries share keys, gradients of keys and values for each query's head.
    """
    batch, heads, length, width = query.shape
    shared = 0 if key.shape[1] == heads else 2 * batch * heads * key.shape[2] * width * query.element_size()
    return 4 * batch * heads * (-(-length // 128) * 128) * (-(-width // 32) * 32) + shared


def _with_a_key_for_each_query(args: Sequence[Any]) -> list[Any]:
    """The arguments with equal numbers of heads, because torch 2.11 cannot count grouped-query attention."""
    heads = max(one.shape[1] for one in args if _is_by_heads(one))
    return [one.new_empty(one.shape[0], heads, *one.shape[2:]) if _is_by_heads(one) else one for one in args]


def _is_by_heads(one: Any) -> bool:
    return isinstance(one, torch.Tensor) and one.dim() == 4


def allocated_bytes(num_bytes: int) -> int:
    return -(-num_bytes // _ALLOCATION) * _ALLOCATION


@dataclass(frozen=True)
class Call:
    """One call of a model's forward."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    masks_nothing: bool = False
    """Whether the attention masks of all planned micro-batches are known to mask no token."""
    alternatives: tuple[Call, ...] = ()
    """Other micro-batches: the plan is made for the one that needs the most VRAM."""

    @staticmethod
    def of(batch: Any) -> Call:
        """The call for a micro-batch: a mapping gives keyword arguments, a tuple or list positional arguments."""
        if isinstance(batch, Call):
            return batch
        if isinstance(batch, Mapping) or hasattr(batch, "keys"):
            return Call((), dict(batch))
        return Call(tuple(batch) if isinstance(batch, tuple | list) else (batch,), {})

    def without_memory(self) -> Call:
        """Large floating-point tensors on the meta device, and copies of the rest, whose values a model may read."""
        args, kwargs = tree_map_only(torch.Tensor, _light, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    def without_values(self) -> Call:
        args, kwargs = tree_map_only(torch.Tensor, _on_meta, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    def tensors(self) -> list[torch.Tensor]:
        return tensors_of((self.args, dict(self.kwargs)))


def _masks(model: nn.Module, call: Call) -> list[torch.Tensor]:
    """The masks among forward's arguments, also by position. One of several unnamed arguments may be a mask."""
    signature = inspect.signature(model.forward)
    given = signature.bind(*call.args, **call.kwargs).arguments
    unnamed = [each.name for each in signature.parameters.values() if each.kind is each.VAR_POSITIONAL]
    found = [each for name in unnamed if len(given.get(name, ())) > 1 for each in tensors_of(given[name])]
    for path, leaf in tree_flatten_with_path(given)[0]:
        names = (str(getattr(key, "key", "")) for key in path)
        if leaf is not None and any(name.endswith("mask") for name in names):
            found += tensors_of(leaf)
    return found


def _light(tensor: torch.Tensor) -> torch.Tensor:
    if is_constant(tensor):
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad) if keeps_values(tensor) else _on_meta(tensor)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device=META, requires_grad=tensor.requires_grad)


def trace_micro_batch(model: nn.Module, batch: Any, loss_of: Callable[[Any], torch.Tensor] | None = None) -> MicroBatch:
    """Trace one forward and backward of `model` over `batch`.

    No random generator of the process advances, although the model may draw numbers (to drop whole layers).

    Args:
        model: on the meta device, in its computing dtype and in training mode.
        batch: as for `Call.of`. Shapes and dtypes of tensors matter, and values of integers (such as grids of patches
            and lengths) that the model reads. If it fails with these values, it is traced without them. An attention
            mask counts as one that masks tokens, unless the call's `masks_nothing` is set: later micro-batches may be
            padded.
        loss_of: computes the loss from the model's output; None: `_loss_of`.
    """
    call = Call.of(batch).without_memory()
    try:
        return _traced(model, call, loss_of)
    except Exception as error:
        try:
            return _traced(model, call.without_values(), loss_of)
        except Exception:
            raise error from None


def _traced(model: nn.Module, given: Call, loss_of: Callable[[Any], torch.Tensor] | None) -> MicroBatch:
    values, masks = Values(), _masks(model, given)
    is_mask = {id(mask) for mask in masks}

    def on_meta(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta else values.on_meta(tensor, is_mask=id(tensor) in is_mask)

    args, kwargs = tree_map_only(torch.Tensor, on_meta, (given.args, dict(given.kwargs)))
    call = replace(given, args=args, kwargs=kwargs)
    known = [*model.parameters(), *model.buffers(), *call.tensors()]
    stages = _Stages(OpCounter(known, values, mask_is_full=call.masks_nothing or not masks))
    with _counted(model, dict(repeated_blocks(model)), stages):
        output = model(*call.args, **call.kwargs)
        loss = (loss_of or _loss_of)(output)
        stages.end_of_forward()
        del output
        loss.backward()  # type: ignore[no-untyped-call]
        stages.end_of_backward()
    return MicroBatch(stages.in_order(), num_tokens(model, dict(call.kwargs)) or 0)


@contextmanager
def _counted(model: nn.Module, blocks: Mapping[str, nn.Module], stages: _Stages) -> Iterator[None]:
    """Inside, operations count as those of stages, as on a GPU. Gradients are dropped."""
    with ExitStack() as undo:
        undo.callback(HostRandom().restore)
        for parameter in model.parameters():
            if parameter.requires_grad:
                undo.callback(parameter.register_post_accumulate_grad_hook(_drop_gradient).remove)  # type: ignore[no-untyped-call]
        for name, block in blocks.items():
            undo.enter_context(_followed(name, block, stages))
        undo.enter_context(AsOnGpu())
        undo.enter_context(_autocast_as_on_gpu())
        undo.enter_context(stages.counter)
        undo.enter_context(torch.enable_grad())
        yield


def trace_blocks(model: nn.Module, calls: Sequence[tuple[str, Call]], tokens: int) -> MicroBatch:
    """Trace each block by itself, in the order of `calls`: (name of the block, its call).

    Args:
        model: as for `trace_micro_batch`.
        tokens: positions of the micro-batch.

    Returns:
        A micro-batch of these blocks, without operations between them.
    """
    values = Values()
    stages = _Stages(OpCounter([*model.parameters(), *model.buffers()], values, mask_is_full=False))

    def on_meta(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta else values.on_meta(tensor, is_mask=False)

    with _counted(model, {name: model.get_submodule(name) for name, _ in calls}, stages):
        for name, call in calls:
            args, kwargs = tree_map_only(torch.Tensor, on_meta, (call.args, dict(call.kwargs)))
            model.get_submodule(name)(*args, **kwargs)
    return MicroBatch(tuple(stage for stage in stages.in_order() if stage.block), tokens)


def _loss_of(output: Any) -> torch.Tensor:
    """The output's `.loss`, or a scalar output itself. Otherwise the loss is computed outside the model, and an fp32
    log-softmax of the output's first tensor with a gradient replaces it.
    """
    loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        loss = output
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    values = list(output.values()) if isinstance(output, Mapping) else tree_flatten(output)[0]
    for part in tensors_of(values):
        if part.requires_grad and part.is_floating_point():
            return part.float().log_softmax(-1).mean()
    raise ModelError("no tensor of the model's output has a gradient")


class _Stages:
    def __init__(self, counter: OpCounter) -> None:
        self.counter = counter
        self._found: list[Stage] = []
        self._kinds: dict[Any, _Kind] = {}
        self.begin()

    def in_order(self) -> tuple[Stage, ...]:
        return tuple(stage for stage in self._found if stage.block or stage.forward.num_operations)

    def begin(self) -> None:
        self.counter.peak = self.counter.live
        self._before, self._counted = self.counter.live, self.counter.total

    def _end_outside(self) -> None:
        counter = self.counter
        stage = Stage(
            forward=counter.total - self._counted,
            kept_bytes=counter.live - self._before,
            forward_peak_bytes=counter.peak - self._before,
        )
        self._found.append(stage)

    def end_of_forward(self) -> None:
        self._end_outside()
        self._at = len(self._found) - 1
        self.begin()

    def before_block_backward(self, index: int) -> None:
        """End backward of the outside stage that follows block number `index`."""
        self.end_of_backward()
        self._at = index - 1

    def end_of_backward(self) -> None:
        passed, peak = self.counter.total - self._counted, self.counter.peak - self._before
        self._found[self._at] = replace(self._found[self._at], backward=passed, backward_peak_bytes=peak)

    def run(self, name: str, block: nn.Module, forward: Callable[..., Any], arguments: Any) -> Any:
        """A block's outputs. If a block of its kind was traced before, they are made from the first trace."""
        self._end_outside()
        leaves, spec = tree_flatten(arguments)
        key, tensors = (kind_of(block, leaves, spec), *self._lengths(leaves)), tensors_of(leaves)
        if key not in self._kinds:
            self._kinds[key] = self._follow(forward, leaves, spec)
        kind = self._kinds[key]
        self._found.append(replace(kind.stage, block=name))
        trained = any(isinstance(output, _Made) and output.requires_grad for output in kind.outputs)
        anchor = torch.empty(0, device=META, requires_grad=trained)
        index = len(self._found) - 1
        made = iter(_Block.apply(self, index, kind.outputs, anchor, *tensors))  # type: ignore[no-untyped-call]
        given = [next(made) if isinstance(output, _Made) else output for output in kind.outputs]
        given = [tensors[output.input] if isinstance(output, _Handed) else output for output in given]
        self.begin()
        return tree_unflatten(given, kind.spec)

    def _lengths(self, leaves: Sequence[Any]) -> list[Any]:
        """Known integers in one dimension among a block's arguments: it may cut its input at these lengths."""
        rows = (leaf for leaf in tensors_of(leaves) if leaf.dim() == 1 and not leaf.is_floating_point())
        values = (self.counter.values.of(leaf) for leaf in rows)
        return [tuple(value.tolist()) for value in values if value is not None]

    def _follow(self, forward: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> _Kind:
        """Run one block forward and backward by itself, and again with only matmuls and attention kept."""

        def as_on_gpu(*args: Any, **kwargs: Any) -> Any:
            with AsOnGpu():  # backward leaves modes of functions
                return forward(*args, **kwargs)

        kind = self._passes(forward, leaves, spec)
        try:
            other = self._passes(partial(cheaply_recomputed_in_backward, _CPU, as_on_gpu), leaves, spec).stage
        except _UNLIKE_THE_FIRST_RUN:
            self.begin()
            return kind
        again = other.backward - kind.stage.backward
        return replace(kind, stage=replace(kind.stage, cheap=Cheap(other.kept_bytes, other.backward_peak_bytes, again)))

    def _passes(self, forward: Callable[..., Any], leaves: Sequence[Any], spec: Any) -> _Kind:
        counter = self.counter
        inputs = tensors_of(leaves)
        for leaf in leaves:
            if isinstance(leaf, MutableMapping):
                _cut_off(leaf)
        own = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in inputs]
        unused = iter(own)
        arguments = [next(unused) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(arguments, spec)
        self.begin()
        waits = counter.num_waits
        result = forward(*args, **kwargs)
        waits = counter.num_waits - waits
        forward_pass, forward_peak = counter.total - self._counted, counter.peak - self._before
        kept = counter.live - self._before
        outputs, output_spec = tree_flatten(result)
        described = [_described(output, own) for output in outputs]
        made = [output for output, form in zip(outputs, described, strict=True) if isinstance(form, _Made)]
        storages = {id(output.untyped_storage()): output.untyped_storage().nbytes() for output in made}
        self.begin()
        roots = [output for output in made if output.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
        differentiated = [tensor for tensor in inputs if tensor.requires_grad]
        stage = Stage(
            block="",
            forward=forward_pass,
            backward=counter.total - self._counted,
            kept_bytes=kept,
            output_bytes=sum(map(allocated_bytes, storages.values())),
            input_bytes=sum(tensor.nbytes for tensor in inputs[:1]),
            shared_bytes=sum(tensor.nbytes for tensor in differentiated[1:]),
            forward_peak_bytes=forward_peak,
            backward_peak_bytes=counter.peak - self._before,
            waits=waits > 0,
        )
        return _Kind(stage, described, output_spec)


@dataclass(frozen=True)
class _Kind:
    stage: Stage
    outputs: list[Any]
    """A `_Made` or a `_Handed` for each tensor; other values unchanged."""
    spec: Any


@dataclass(frozen=True)
class _Made:
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class _Handed:
    """An input tensor that a block returns, by its index among the inputs."""

    input: int


def _cut_off(holder: MutableMapping[Any, Any]) -> None:
    """Take what earlier blocks left here, such as the keys of layers that share them, out of their graphs: the backward
    of each block runs by itself.
    """
    for name, value in holder.items():
        holder[name] = tree_map_only(torch.Tensor, lambda each: each.detach().requires_grad_(each.requires_grad), value)


def _described(output: Any, inputs: Sequence[torch.Tensor]) -> Any:
    if not isinstance(output, torch.Tensor):
        return output
    for index, tensor in enumerate(inputs):
        if tensor.untyped_storage() is output.untyped_storage() and tensor.shape == output.shape:
            return _Handed(index)
    return _Made(output.shape, output.dtype, output.requires_grad)


def kind_of(block: nn.Module, leaves: Sequence[Any], spec: Any) -> Any:
    """A key that is equal for blocks with the same computation over the same shapes."""

    def form(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.shape, leaf.dtype, leaf.requires_grad
        return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf)

    return type(block), block.training, repr(spec), *map(form, leaves), *map(form, block.parameters())


class _Block(torch.autograd.Function):
    """Stands in for a block in the autograd graph: outputs and gradients of the right shapes.

    The anchor requires a gradient if a weight of the block does.
    """

    @staticmethod
    def forward(
        ctx: Any, stages: _Stages, index: int, outputs: Sequence[Any], anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> Any:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.stages, ctx.index, ctx.needs = stages, index, [tensor.requires_grad for tensor in inputs]
        forms = [output for output in outputs if isinstance(output, _Made)]
        made = [torch.empty(form.shape, dtype=form.dtype, device=META) for form in forms]
        pairs = zip(made, forms, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, form in pairs if not form.requires_grad))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> Any:
        ctx.stages.before_block_backward(ctx.index)
        needs = zip(ctx.saved_tensors, ctx.needs, strict=True)
        gradients = [torch.empty_like(tensor) if needed else None for tensor, needed in needs]
        ctx.stages.begin()
        return None, None, None, None, *gradients


@contextmanager
def _followed(name: str, block: nn.Module, stages: _Stages) -> Iterator[None]:
    """Route calls of `block` through `stages` inside this context."""
    own, forward = vars(block).get("forward"), block.forward
    block.forward = lambda *args, **kwargs: stages.run(name, block, forward, (args, kwargs))
    try:
        yield
    finally:
        del block.forward
        if own is not None:
            block.forward = own


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
