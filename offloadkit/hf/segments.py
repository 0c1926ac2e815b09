"""Attention within segments: windows, images, frames and chunks of sound, in transformers' towers.

The attention of such a tower gets the ends of all segments (`cu_seqlens`). With `sdpa` it waits for them in each block
and calls attention for each segment: a block starts hundreds of kernels and cannot become a CUDA graph. Here it calls
attention once, which is `torch.nn.attention.varlen` on a GPU in bf16 and fp16, and transformers' loop otherwise. As for
flash attention, the host asks for the longest segment before a tower's blocks.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from offloadkit.engine.values import noted
from offloadkit.facts.changes import claim, unclaimed
from offloadkit.hf import packed
from offloadkit.hf.loss import give_method

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEVICES = ("cuda", "meta")
"""Device types where attention is called once; "meta" stands for a GPU."""
_ENDS, _LONGEST = "cu_seqlens", "max_seqlen"
_ASK = "get_max_seqlen"
"""transformers' function that asks for the longest segment if a config has flash attention."""


class _Segments(NamedTuple):
    ends: Tensor
    """int32 [number + 1], the first is 0."""
    longest: int
    """No segment has more tokens."""


class _Now(threading.local):
    segments: _Segments | None = None
    """Of the attention module that runs, until it calls attention."""


_now = _Now()


def attend_to_all_segments(model: PreTrainedModel, capability: tuple[int, int] | None = None) -> Callable[[], None]:
    """Call attention once for all segments in the towers of `model`; returns a function that undoes it.

    Args:
        capability: compute capability of the GPU to plan for, if not the present GPU.
    """
    undo, files = ExitStack(), {"transformers.vision_utils"}
    modules: list[Any] = list(model.modules())
    towers = [module for module in modules if "forward" not in vars(module) and cuts(module.__class__)]
    if not towers or not packed.kernel_runs(capability):
        return undo.close
    for module in towers:
        undo.callback(give_method(module, "forward", _attend_once))
        files.add(type(module).__module__)
    for file in (sys.modules[name] for name in sorted(files) if hasattr(sys.modules.get(name), _ASK)):
        undo.callback(claim(file, _ASK, _longest_by(unclaimed(file, _ASK))))
    return undo.close


@cache
def cuts(kind: Any) -> bool:
    """Whether forward of this class calls attention for each segment, by its source."""
    if not kind.__module__.startswith("transformers.") or _ENDS not in inspect.signature(kind.forward).parameters:
        return False
    try:
        source = inspect.getsource(kind.forward)
    except OSError:  # a package without sources
        return False
    return (
        f"lengths = {_ENDS}[1:] - {_ENDS}[:-1]\n" in source and "torch.split(tensor, lengths.tolist(), dim=2)" in source
    )


def _longest_by(own: Callable[..., Any]) -> Callable[..., Any]:
    def longest(cu_seqlens: Tensor, config: Any, kwargs: Any = None, kwarg_name: str = _LONGEST) -> Any:
        found = own(cu_seqlens, config, kwargs=kwargs, kwarg_name=kwarg_name)
        if found is not None or not _is_ours(config, cu_seqlens) or torch.compiler.is_compiling():
            return found
        most = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
        return 1 << max(0, most - 1).bit_length()  # so that most batches are alike for CUDA graphs

    return longest


def _is_ours(config: Any, tensor: Tensor) -> bool:
    return config._attn_implementation == "sdpa" and tensor.device.type in DEVICES


def _attend_once(self: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' forward for one segment of all tokens. Only `_attention_of` sees the real segments."""
    kind: Any = type(self)
    if torch.compiler.is_compiling():
        return kind.forward(self, *args, **kwargs)
    kwargs = dict(zip(packed.parameters_of(kind), args, strict=False)) | kwargs
    hidden, ends = kwargs["hidden_states"], kwargs.get(_ENDS)
    if not isinstance(ends, Tensor) or not _is_ours(self.config, hidden):
        return kind.forward(self, **kwargs)
    length = hidden.shape[-2]
    _now.segments = _Segments(ends, min(length, kwargs.get(_LONGEST) or length))
    try:
        output = kind.forward(self, **kwargs | {_ENDS: np.array([0, length])})  # a tensor in RAM is in no CUDA graph
        is_done = _now.segments is None
    finally:
        _now.segments = None
    return output if is_done else kind.forward(self, **kwargs)  # another package computes `sdpa`


def answer(undo: ExitStack) -> None:
    """Replace transformers' `sdpa` attention; `undo` restores it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    packed.replace(ALL_ATTENTION_FUNCTIONS, "sdpa", _attention_of, undo)


def _attention_of(own: Callable[..., Any]) -> Callable[..., Any]:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **given: Any
    ) -> Any:
        segments = None if torch.compiler.is_compiling() else _now.segments
        if segments is None:
            return own(module, query, key, value, attention_mask, **given)
        _now.segments = None
        is_plain = attention_mask is None and not given.get("dropout") and given.get("is_causal") is False
        is_half = query.dtype == key.dtype == value.dtype in (torch.bfloat16, torch.float16)
        if not (is_plain and is_half and len(query) == 1 and packed.has_kernel(query, value)):
            return _one_by_one(own, module, (query, key, value), attention_mask, segments.ends, given), None
        scale = given.get("scaling")
        if query.is_meta:
            number = _planned_number(segments.ends, query.shape[2])
            return packed.as_planned(query, key, value, number, scale, is_causal=False), None
        ends = segments.ends.to(torch.int32)
        return packed.by_varlen(query, key, value, ends, segments.longest, (-1, -1), scale), None

    return attend


def _one_by_one(
    own: Callable[..., Any],
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    attention_mask: Any,
    ends: Tensor,
    given: Mapping[str, Any],
) -> Tensor:
    """transformers' loop. Returns [1, length, heads, dim]."""
    lengths = (ends[1:] - ends[:-1]).tolist()
    parts = zip(*(torch.split(each, lengths, dim=2) for each in tensors), strict=True)
    return torch.cat([own(module, *part, attention_mask, **given)[0] for part in parts], dim=1)


def _planned_number(ends: Tensor, length: int) -> int:
    """The number of equal segments whose attention takes as long as that of these segments."""
    values = noted(ends)
    row = -(-length // (len(ends) - 1)) if values is None else packed.planned_row(values.diff().tolist())
    return length // min(
        (each for each in range(1, length + 1) if length % each == 0), key=lambda each: abs(each - row)
    )
