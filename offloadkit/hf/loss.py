"""Cross-entropy over a large vocabulary in chunks, without materialising the logits.

`compute_loss_in_chunks(model)` makes the output head return `Logits`, a tensor subclass. Views, shifts, slices, scaling
and soft-capping of the logits are recorded, and `F.cross_entropy` then computes chunk by chunk. Any other operation
(argmax, a custom loss, saving) materialises the logits, with gradients. The chunks depend only on shapes. Formulas:
`kernels/linear_cross_entropy.py`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

from offloadkit.errors import EngineStateError
from offloadkit.hf.tokenize import IGNORED
from offloadkit.kernels.linear_cross_entropy import Cast, Step, no_autocast, token_losses


def num_targets(model: Any, batch: Any) -> torch.Tensor | int:
    """Number of positions in the mean loss of a batch: a scalar on the labels' device, or an int."""
    return targets_in(batch, shifted=shifts_labels(model))


def targets_in(batch: Any, *, shifted: bool) -> torch.Tensor | int:
    """`num_targets`, given whether the model `shifts_labels`; 1 for a batch that is not a mapping, such as a list of
    rows.
    """
    if not isinstance(batch, Mapping):
        return 1
    labels = batch.get("shift_labels", batch.get("labels"))
    if not isinstance(labels, torch.Tensor):
        return next((len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()), 1)
    if labels.is_floating_point():
        return labels.numel()
    if "shift_labels" not in batch and shifted:
        labels = labels[..., 1:]
    return (labels != IGNORED).sum()


def shifts_labels(model: Any) -> bool:
    """Whether the model's loss compares position i with label i + 1, as transformers' causal language models do."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    loss_type = getattr(model, "loss_type", None)
    if loss_type in LOSS_MAPPING:
        return LOSS_MAPPING[loss_type] is ForCausalLMLoss
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def with_dummy_target(inputs: Any, count: torch.Tensor | int) -> tuple[Any, torch.Tensor | int]:
    """Set the last label to 0 if all labels are ignored. Returns inputs and `count` without synchronising the device.

    Such a micro-batch has weight 0, and the added target avoids a mean loss of 0 / 0.
    """
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(count, torch.Tensor) or not isinstance(labels, torch.Tensor) or not labels.numel():
        return inputs, count
    last = torch.zeros(labels.shape, dtype=torch.bool, device=labels.device)
    last.view(-1)[-1].fill_(True)  # an assignment would copy a number to the device and synchronise
    return {**inputs, "labels": labels.masked_fill(last & (count == 0), 0)}, count


def on_device(count: torch.Tensor | int, device: torch.device) -> torch.Tensor:
    if isinstance(count, torch.Tensor):
        return count.to(device)
    return torch.full((), count, device=device)


CHUNK_ELEMENTS = 2**24
"""Logits per chunk: 64 MiB in fp32."""

logger = logging.getLogger(__name__)


def compute_loss_in_chunks(
    model: nn.Module, chunk_elements: int = CHUNK_ELEMENTS, *, fused: bool = False
) -> Callable[[], None]:
    """Make the model's output head return lazy `Logits`, so that the loss needs no memory for all logits at once.

    Returns a function that restores the head. `fused`: use the loss's kernels on a GPU and on the meta device.

    Models without `get_output_embeddings()`, and heads that are not a plain `nn.Linear` (quantised, adapted) or have a
    replaced forward, stay unchanged. Up to `chunk_elements` logits are computed as usual.
    """
    untyped: Any = model
    head: Any = untyped.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        return lambda: None

    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or input.shape[:-1].numel() * self.out_features <= chunk_elements:
            return nn.Linear.forward(self, input)
        # The engine's hooks provide `self.weight` while the module runs.
        inputs = map(_as_autocast_would, (input, self.weight, self.bias))
        return Logits(*inputs, chunk_elements=chunk_elements, fused=fused)

    return give_method(head, "forward", forward)


def give_method(module: nn.Module, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one module. Returns a function that restores it, unless it was replaced again since."""
    method = MethodType(function, module)  # bound, so that a deepcopy of the model rebinds it to the copy
    setattr(module, name, method)

    def undo() -> None:
        if vars(module).get(name) is method:
            delattr(module, name)

    return undo


def autocasts(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _as_autocast_would(tensor: Any) -> Any:
    if tensor is None or tensor.dtype == torch.float64 or not autocasts(tensor.device.type):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


class Logits(torch.Tensor):
    """Lazy `hidden @ weight.T + bias` of shape [..., vocabulary], with the same gradients as computed logits."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    steps: tuple[Step, ...]
    chunk_elements: int
    fused: bool
    known: torch.Tensor | None
    origin: tuple[Logits, Callable[[torch.Tensor], torch.Tensor]] | None
    weight_version: int | None

    @staticmethod
    def __new__(
        cls: type[Logits],
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        chunk_elements: int,
        fused: bool = False,
        steps: tuple[Step, ...] = (),
        dtype: torch.dtype | None = None,
        origin: tuple[Logits, Callable[[torch.Tensor], torch.Tensor]] | None = None,
    ) -> Logits:
        """
        Args:
            hidden: [..., width], in the weight's dtype.
            weight: [vocabulary, width].
            bias: [vocabulary].
            steps: operations to apply to the logits, in order.
            dtype: dtype after all steps; None: the weight's.
            origin: for a view, its base and the function that makes the view.
        """
        inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
        untyped: Any = torch.Tensor
        logits: Logits = untyped._make_wrapper_subclass(
            cls,
            (*hidden.shape[:-1], weight.shape[0]),
            dtype=dtype or weight.dtype,
            device=hidden.device,
            requires_grad=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs),
        )
        logits.hidden, logits.weight, logits.bias = hidden, weight, bias
        logits.steps, logits.chunk_elements, logits.fused = steps, chunk_elements, fused
        logits.known, logits.origin = None, origin
        with torch._C.DisableTorchFunctionSubclass():
            if logits.requires_grad:
                untyped.register_post_accumulate_grad_hook(logits, _refuse_gradient)
        # Inference tensors have no version counter, but no optimizer updates them.
        logits.weight_version = None if weight.is_inference() else weight._version
        return logits

    def changed(self) -> bool:
        """Whether these logits or their base were materialised for an in-place write."""
        return self.known is not None or (self.origin is not None and self.origin[0].changed())

    def whole(self, *, keep: bool = False) -> torch.Tensor:
        """Materialise the logits as a plain tensor; `keep` it for later calls if the caller writes to it.

        Raises:
            EngineStateError: the head's weights were updated since the forward.
        """
        if self.known is None and self.origin is not None and (keep or self.origin[0].changed()):
            base, view = self.origin
            self.known = view(base.whole(keep=True))
        if self.known is not None:
            return self.known
        self.check_weights()
        grad_enabled = torch.is_grad_enabled() or (keep and self.requires_grad)
        with torch.set_grad_enabled(grad_enabled), no_autocast(self.hidden):
            logits = F.linear(self.hidden, self.weight, self.bias)
            for step in self.steps:
                logits = step(logits, slice(None))
        if keep:
            self.known = logits
        return logits

    def check_weights(self) -> None:
        if self.weight_version is not None and self.weight_version != self.weight._version:
            raise EngineStateError(
                "the logits of a large vocabulary are computed when they are read, but the weights have been stepped "
                "since this forward: read outputs.logits before engine.step() or optimizer.step()"
            )

    def like(self, **changes: Any) -> Logits:
        fields: dict[str, Any] = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias, "steps": self.steps}
        fields |= {"chunk_elements": self.chunk_elements, "fused": self.fused, "dtype": _plain(self).dtype}
        new = Logits(**{**fields, **changes})
        new.weight_version = self.weight_version
        return new

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _UNCOMPUTED and args and isinstance(args[0], Logits) and not args[0].changed():
            result = _UNCOMPUTED[name](func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if torch.is_grad_enabled():
            _say_whole(name)
        keep = name in _WRITING or (name.endswith("_") and not name.endswith("__"))
        args, kwargs = tree_map_only(Logits, lambda logits: logits.whole(keep=keep), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # an instance method in torch's types
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Logits, lambda logits: logits.whole(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _refuse_gradient(logits: torch.Tensor) -> None:
    raise EngineStateError(
        "a custom autograd function received the logits of a large vocabulary, which are computed when torch functions "
        "need them: its gradient would be lost. Give it a plain tensor: logits.clone()"
    )


@functools.cache
def _say_whole(name: str) -> None:
    logger.warning("the logits are computed as a whole, not in chunks: %s needs them", name)


# ---- operations that do not materialise the logits ----


def _plain(logits: Logits) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty(1, dtype=logits.dtype, device="meta").expand(logits.shape)


def _view(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Any:
    old, new = _plain(logits), func(_plain(logits), *args, **kwargs)
    if not new.dim() or new.shape[-1] != old.shape[-1] or new.dtype != old.dtype:
        return NotImplemented
    hidden = logits.hidden.reshape(*new.shape[:-1], logits.hidden.shape[-1])
    return logits.like(hidden=hidden, origin=(logits, lambda whole: func(whole, *args, **kwargs)))


def _index(func: Any, logits: Logits, key: Any) -> Any:
    keys, num_dims = key if isinstance(key, tuple) else (key,), logits.hidden.dim()
    if not all(isinstance(part, int | slice | torch.Tensor) or part is Ellipsis for part in keys):
        return NotImplemented
    num_indexed = sum(
        part.dim() if isinstance(part, torch.Tensor) and part.dtype == torch.bool else part is not Ellipsis
        for part in keys
    )
    reaches_last = any(part is Ellipsis for part in keys) or num_indexed >= num_dims
    if reaches_last and not (isinstance(keys[-1], slice) and keys[-1] == slice(None)):
        return NotImplemented
    return logits.like(hidden=logits.hidden[key], origin=(logits, lambda whole: whole[key]))


def _cast(func: Any, logits: Logits, *args: Any, **kwargs: Any) -> Any:
    """float(), and to() on the same device, if the cast is exact."""
    plain = _plain(logits)
    dtype = torch.float32 if func.__name__ == "float" else plain.dtype
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.dtype):
            dtype = value
        elif not isinstance(value, torch.device) or value != logits.hidden.device:
            return NotImplemented
    if torch.promote_types(dtype, plain.dtype) != dtype:
        return NotImplemented
    if dtype == plain.dtype:
        return logits
    return logits.like(steps=(*logits.steps, Cast(dtype)), dtype=dtype)


def _pointwise(func: Any, logits: Logits, *operands: Any, **kwargs: Any) -> Any:
    """tanh; and +, -, *, / with a number or with a constant per vocabulary entry."""
    if kwargs:
        return NotImplemented
    plain = _plain(logits)
    for operand in operands:
        if isinstance(operand, torch.Tensor):
            one_row = operand.dim() <= plain.dim() and operand.numel() in (1, plain.shape[-1])
            if not one_row or operand.shape[-1:].numel() != operand.numel() or operand.requires_grad:
                return NotImplemented
        elif not isinstance(operand, int | float):
            return NotImplemented

    def step(chunk: torch.Tensor, columns: slice) -> torch.Tensor:
        return func(chunk, *(_columns(operand, columns) for operand in operands))  # type: ignore[no-any-return]

    one = torch.empty(1, dtype=plain.dtype, device=logits.hidden.device)
    return logits.like(steps=(*logits.steps, step), dtype=step(one, slice(0, 1)).dtype)


def _columns(operand: Any, columns: slice) -> Any:
    if not isinstance(operand, torch.Tensor) or not operand.dim():
        return operand
    return operand.flatten()[columns] if operand.numel() > 1 else operand.flatten()


def _cross_entropy(
    func: Any,
    logits: Logits,
    target: torch.Tensor,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`F.cross_entropy` in chunks and in fp32, without class weights and label smoothing."""
    hidden = logits.hidden
    plain = hidden.dim() == 2 and target.shape == hidden.shape[:1] and target.dtype == torch.int64
    if not plain or target.device != hidden.device or label_smoothing or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    if weight is not None or size_average is not None or reduce is not None:
        return NotImplemented
    logits.check_weights()
    ignored = target == ignore_index
    fused = logits.fused and _plain(logits).dtype != torch.float64  # the kernels compute in fp32
    how = logits.steps, logits.chunk_elements, fused
    losses: torch.Tensor = token_losses(hidden, logits.weight, logits.bias, target.masked_fill(ignored, 0), *how)
    losses = losses.masked_fill(ignored, 0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()


_UNCOMPUTED: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as"), _view),
    **dict.fromkeys(("float", "to"), _cast),
    **dict.fromkeys(("add", "sub", "mul", "div", "true_divide", "tanh"), _pointwise),
    **dict.fromkeys(("__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__"), _pointwise),
    "contiguous": lambda func, logits, **_: logits,
    "__getitem__": _index,
    "cross_entropy": _cross_entropy,
}
"""Function name -> implementation on `Logits`, which returns NotImplemented to materialise them."""

_WRITING = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}
"""Functions that write to their first argument, in addition to names with a trailing underscore."""

_T: Any = torch.Tensor
_QUESTIONS = {
    *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf")),
    *(getattr(_T, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized")),
    *(getattr(_T, name) for name in ("size", "dim", "ndimension", "numel", "nelement", "__len__", "__hash__")),
    *(getattr(_T, name) for name in ("is_floating_point", "is_complex", "is_inference", "get_device", "element_size")),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference),
}
"""Functions that only read metadata."""
