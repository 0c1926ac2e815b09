"""Attention within the rows of packed batches: several rows in one row of tensors, where `position_ids` begin again.

A forward with such positions and no attention mask is packed. transformers makes a mask for it if the model passes its
positions on; in further models rows would see each other. Here the model's mask is one small tensor of row boundaries
(`boundaries`), and transformers' `sdpa` attention computes each row by itself: with `torch.nn.attention.varlen` on a
GPU, row by row on the CPU. If that kernel does not run (fp32 on a GPU, dropout in attention), or the model has eager
attention or an attention function of its own, the mask is block-diagonal. A model that asks transformers for no mask is
refused.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offloadkit.device.streams import Event, record_compute
from offloadkit.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOTE = "boundaries_of_packed_rows"
"""Key under which a collator adds the batch's `boundaries` or a `NotPacked`. No model has an argument of this name."""


class NotPacked(Enum):
    """What a collator has found in positions that need no boundaries."""

    APART = "apart"
    """No row begins within a row."""
    MASKED = "masked"
    """There is an attention mask, under which no rows cross (`check_mask`)."""


LEAST_CAPABILITY = (8, 0)
_MOST_HEAD_DIM = 256
_LEAST_NUMBER = 64
"""Rows that a tensor of boundaries has room for at least, so that most batches are alike for CUDA graphs."""
_OF_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_WITHOUT_POSITIONS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")
_ANSWERED = ("sdpa", "eager")
"""Attention implementations whose masks are made here. Flash and flex attention read the positions themselves."""
_FLASH = "flash"
"""In the names of implementations that read the positions of a batch of one row only."""
_OF_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention", "global", "local"}
"""Layer types of configs whose layers mix tokens by masked attention alone."""
_OTHERWISE = ("blt",)
"""`model_type` of further models whose layers mix tokens otherwise."""
_TOWERS = ("audio", "vision", "speech", "image")
"""Parts of the names of modules that see no text."""
_MASKS = "create_causal_mask"
"""transformers' function that modeling files import if it makes their masks."""


# -- boundaries


def row_begins(position_ids: Tensor) -> Tensor:
    """bool [rows, length]: the first place, and each place whose position does not follow the position before it.

    Args:
        position_ids: [rows, length].
    """
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff(dim=1) != 1
    return begins


def boundaries(position_ids: Tensor) -> Tensor | None:
    """Places at which the rows of a packed batch begin. Waits for the device.

    Args:
        position_ids: [rows, length].

    Returns:
        int32 [bits, number + 1], all lines equal: places of the flattened batch where a packed row begins, and then
            the number of places as often as needed (rows without tokens). No row has more than 2 ** bits tokens, so the
            shape alone bounds the length. None if no row begins within a row of the tensor.
    """
    begins = row_begins(position_ids)
    found = begins.flatten().nonzero().flatten()
    if len(found) == len(position_ids):
        return None
    total = position_ids.numel()
    lengths = torch.diff(found, append=found.new_tensor([total]))
    return _lines(found, total, longest=int(lengths.max()))


def _lines(found: Tensor, total: int, longest: int) -> Tensor:
    number = max(_LEAST_NUMBER, 1 << (len(found) - 1).bit_length())
    line = F.pad(found, (0, number + 1 - len(found)), value=total)
    return line.to(torch.int32).repeat(max(7, (longest - 1).bit_length()), 1)


def planned_boundaries(num_packs: int, length: int, row: int) -> Tensor:
    """A tensor on the meta device that stands for packs of `length` tokens in equal rows of at least `row` tokens."""
    row = next(each for each in range(row, length + 1) if length % each == 0)
    shape = max(1, (row - 1).bit_length()), num_packs * length // row + 1
    return torch.empty(shape, dtype=torch.int32, device="meta")


def planned_row(lengths: Iterable[int]) -> int:
    """Tokens of equal rows whose attention takes as long as that of rows of these lengths, of as many tokens."""
    lengths = list(lengths)
    return -(-sum(each * each for each in lengths) // sum(lengths))


def planned_row_of(position_ids: Tensor) -> int | None:
    """`planned_row` of a batch; None if it is not packed."""
    lines = boundaries(position_ids)
    return None if lines is None else planned_row(lines[0].diff().tolist())


# -- the present forward


class _Now(threading.local):
    noted: Tensor | NotPacked | None = None
    """The collator's note of the batch."""
    noted_positions: Any = None
    """`position_ids` of that batch. A loss function may call the model with another one, such as half of it."""
    rows: Tensor | None = None
    """Boundaries of the forward's batch; None if it is not packed or transformers makes its masks."""
    positions: Tensor | None = None
    are_apart: bool = False
    """Rows are computed apart, not under a block-diagonal mask."""
    was_asked: bool = False
    """The model has asked for a mask."""


_now = _Now()


@contextmanager
def known_boundaries(rows: Tensor | NotPacked | None, position_ids: Any = None) -> Iterator[None]:
    """Forwards with this tensor of `position_ids`, or on the meta device, believe `rows` and do not ask the GPU."""
    before = _now.noted, _now.noted_positions
    _now.noted, _now.noted_positions = rows, position_ids
    try:
        yield
    finally:
        _now.noted, _now.noted_positions = before


def keep_rows_apart(
    model: PreTrainedModel, *, on_gpu: bool, capability: tuple[int, int] | None = None
) -> Callable[[], None]:
    """Keep the rows of packed batches apart in forwards of `model`; returns a function that undoes it.

    Args:
        on_gpu: what a model on the meta device is planned for.
        capability: compute capability of the GPU to plan for, if not the present GPU.
    """
    undo, is_fit, answers = ExitStack(), False, _Answers()

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        nonlocal is_fit
        after()
        answers.read()
        if torch.compiler.is_compiling():
            return None
        kind: Any = type(module)
        kwargs = dict(zip(parameters_of(kind), args, strict=False)) | kwargs
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if positions is None:
            _check_positions_given(kwargs)
            return None
        if not isinstance(positions, Tensor) or positions.dim() != 2:
            return None
        if mask is not None:
            if positions is not _now.noted_positions or _now.noted is not NotPacked.MASKED:
                answers.ask(positions, mask)
            return None
        rows = _boundaries_of(kwargs)
        if rows is None:
            return None
        if not is_fit and (why := why_not_packed(module)):
            raise DataError(f"the batch is packed, and {why}. Take a collator that pads rows instead")
        is_fit = True
        if (attention := module.config._attn_implementation) not in _ANSWERED:
            if _FLASH in str(attention) and len(positions) > 1:
                raise DataError(
                    f"a batch of {len(positions)} packed rows, and attn_implementation={attention!r} keeps rows apart "
                    "in a batch of one packed row alone: load the model with attn_implementation='sdpa', or train with "
                    "batch_size=1 (per_device_train_batch_size) and more gradient accumulation"
                )
            return None
        _now.rows, _now.positions = rows, positions
        weight = module.get_input_embeddings().weight
        is_half = weight.dtype in (torch.bfloat16, torch.float16)
        on_cpu = positions.is_cpu or (positions.is_meta and not on_gpu)
        by_kernel = on_cpu or (is_half and kernel_runs(capability if positions.is_meta else None))
        own = module.config._attn_implementation == "sdpa" and module._supports_attention_backend
        _now.are_apart = by_kernel and own
        return (), {name: value for name, value in kwargs.items() if name not in _OF_FLASH}

    def check(module: Any, *_: Any) -> None:
        if _now.rows is not None and not _now.was_asked:
            raise ModelError(
                f"{type(module).__name__} makes its attention masks by itself, so the rows of a packed batch would see "
                "each other: train without packing"
            )

    def after(*_: Any) -> None:
        _now.rows = _now.positions = None
        _now.are_apart = _now.was_asked = False

    undo.callback(after)  # torch runs no hook after an interrupted forward
    undo.callback(model.register_forward_pre_hook(before, with_kwargs=True).remove)
    undo.callback(model.register_forward_hook(check).remove)
    undo.callback(model.register_forward_hook(after, always_call=True).remove)
    return undo.close


@cache
def parameters_of(kind: type[nn.Module]) -> tuple[str, ...]:
    """Names of forward's parameters."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _boundaries_of(kwargs: Mapping[str, Any]) -> Tensor | None:
    positions, noted = kwargs["position_ids"], _now.noted
    inputs = kwargs.get("input_ids")
    inputs = kwargs.get("inputs_embeds") if inputs is None else inputs
    if inputs is None or inputs.shape[:2] != positions.shape:
        return None
    is_noted = positions is _now.noted_positions
    if is_noted and noted is NotPacked.APART:
        return None
    if isinstance(noted, Tensor):
        is_planned = positions.is_meta and positions.numel() % (noted.shape[1] - 1) == 0
        if is_planned or is_noted:
            return noted.to(positions.device, non_blocking=True)
    if positions.is_meta:  # planned as rows of full length
        return planned_boundaries(len(positions), positions.shape[1], row=positions.shape[1])
    return boundaries(positions)


def is_packed() -> bool:
    """Whether the masks of this thread's forward are made here."""
    return _now.rows is not None


# -- what is refused


def why_not_packed(model: Any) -> str | None:
    """Why rows cannot be packed for a causal language model of transformers; None if they can.

    Args:
        model: may be on the meta device.
    """
    config, name = model.config, type(model).__name__
    text = config.get_text_config()
    if config.is_encoder_decoder:
        return (
            f"{name} is an encoder-decoder: attention from the decoder reaches all inputs of a packed row, so targets "
            "would see the inputs of other rows"
        )
    if mixing := _mixing_layers(model):
        return (
            f"{name} has {', '.join(mixing)} layers, which mix tokens by more than masked attention, such as a "
            "state or a convolution that goes on from row to row"
        )
    kind: Any = type(model)
    if "position_ids" not in parameters_of(kind) or getattr(text, "alibi", False):
        return f"{name} takes no position_ids, so positions cannot begin again with each row"
    if begin := max(map(_first_position, model.modules())):
        return f"positions of {name} begin at {begin}, not at 0"
    if not any(hasattr(sys.modules[file], _MASKS) for file in {type(module).__module__ for module in model.modules()}):
        return f"{name} makes its attention masks by itself"
    if getattr(text, "output_router_logits", False):
        return (
            f"the router's loss of {name} counts the padding of packed rows (model.config.output_router_logits = False "
            "leaves it out)"
        )
    return None


def _mixing_layers(model: Any) -> list[str]:
    text = model.config.get_text_config()
    found = {*(getattr(text, "layer_types", None) or ())} - _OF_ATTENTION
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d) and not any(part in name for part in _TOWERS):
            found.add("convolution")
    if not found and (getattr(model, "_is_stateful", False) or model.config.model_type in _OTHERWISE):
        found.add(f"{model.config.model_type}'s")
    return sorted(found)


def _first_position(module: nn.Module) -> int:
    """The first position of RoBERTa's embeddings, which follows the padding's."""
    table = getattr(module, "position_embeddings", None)
    padding = table.padding_idx if isinstance(table, nn.Embedding) else None
    return 0 if padding is None else padding + 1


def _check_positions_given(kwargs: Mapping[str, Any]) -> None:
    given = [name for name in _WITHOUT_POSITIONS if kwargs.get(name) is not None]
    if given and kwargs.get("attention_mask") is None:
        raise DataError(
            f"the collator packs rows and gives {', '.join(given)} without position_ids, so positions would count on "
            "from row to row, and attention would cross rows: let the collator give position_ids that begin again at 0 "
            "with each row (DataCollatorWithFlattening(return_position_ids=True))"
        )


def check_mask(positions: Tensor, mask: Any) -> None:
    """Raise `DataError` if positions begin again at a token that follows a token, and a mask is given: it says nothing
    of rows, and transformers ignores such positions then.
    """
    crossing = _crossing(positions, mask)
    if crossing is not None and bool(crossing):
        raise _crossed()


def _crossed() -> DataError:
    return DataError(
        "position_ids begin again within a row (rows are packed), and the batch has an attention_mask, so attention "
        "would cross rows: let the collator leave attention_mask out"
    )


def _crossing(positions: Tensor, mask: Any) -> Tensor | None:
    """A bool on the device; None if the mask is not one of tokens."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape != positions.shape or mask.is_meta:
        return None
    seen = mask.bool()
    return ((positions[:, 1:] == 0) & seen[:, 1:] & seen[:, :-1]).any()


class _Answers:
    """`check_mask` without waiting for the GPU: an answer is read by the first forward after it has arrived."""

    def __init__(self) -> None:
        self._asked = deque[tuple[Tensor, Event]]()

    def ask(self, positions: Tensor, mask: Any) -> None:
        if (crossing := _crossing(positions, mask)) is not None:
            self._asked.append((crossing.to("cpu", non_blocking=True), record_compute(positions.device)))
            self.read()

    def read(self) -> None:
        while self._asked and self._asked[0][1].done():
            if bool(self._asked.popleft()[0]):
                self._asked.clear()
                raise _crossed()


def check_labels(position_ids: Tensor, labels: Any, ignored: int) -> None:
    """Raise `DataError` if the first token of a packed row has a label: the last token of the row before it would learn
    to predict it.
    """
    if not isinstance(labels, Tensor) or labels.shape != position_ids.shape:
        return
    if bool((row_begins(position_ids)[:, 1:] & (labels[:, 1:] != ignored)).any()):
        raise DataError(
            f"rows are packed, and the first token of a row has a label, which the last token of the row before it "
            f"would learn to predict: let the collator set the label of each row's first token to {ignored}"
        )


# -- masks and attention


def answer(undo: ExitStack) -> None:
    """Replace transformers' functions that make masks and compute attention; `undo` restores them."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in _ANSWERED:
        replace(ALL_MASK_ATTENTION_FUNCTIONS, name, _mask_of, undo)
    replace(ALL_ATTENTION_FUNCTIONS, "sdpa", _attention_of, undo)


def replace(functions: Any, name: str, replacement: Callable[[Any], Any], undo: ExitStack) -> None:
    """Replace a function of transformers' table `functions` by `replacement(function)`; `undo` restores it."""
    local = functions._local_mapping
    before, new = local.get(name), replacement(functions[name])
    functions[name] = new

    def restore() -> None:
        if local.get(name) is not new:
            return  # another package has replaced it since
        if before is None:
            del functions[name]
        else:
            functions[name] = before

    undo.callback(restore)


def _mask_of(own: Callable[..., Any]) -> Callable[..., Any]:
    from transformers import masking_utils

    def mask(*args: Any, **given: Any) -> Any:
        rows, positions = _now.rows, _now.positions
        if rows is None or positions is None or args or given["q_length"] != positions.shape[1]:
            return own(*args, **given)
        _now.was_asked = True
        window, function = given.get("local_size"), given["mask_function"]
        is_windowed = window is not None and window < positions.shape[1]
        is_causal = function is masking_utils.causal_mask_function or window is not None
        is_chunked = getattr(given["config"], "attention_chunk_size", None) is not None
        # transformers allows the skip if it has added nothing to the mask
        if _now.are_apart and is_causal and not is_chunked and given.get("allow_is_causal_skip"):
            return rows.expand(2 if is_windowed else 1, 1, -1, -1)  # models may slice it like a mask
        given["mask_function"] = _within_rows(function, positions)
        given |= {name: False for name in ("allow_is_causal_skip", "allow_is_bidirectional_skip") if name in given}
        return own(**given)

    return mask


def _within_rows(function: Callable[..., Any], positions: Tensor) -> Callable[..., Any]:
    """A mask function of transformers for places in rows, made one for places in a packed batch."""
    of_row = row_begins(positions).cumsum(-1)

    def within(row: Any, head: Any, query: Any, key: Any) -> Any:
        is_seen = function(row, head, positions[row, query], positions[row, key])
        return is_seen & (of_row[row, query] == of_row[row, key])

    return within


def _attention_of(own: Callable[..., Any]) -> Callable[..., Any]:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **given: Any
    ) -> Any:
        if not isinstance(attention_mask, Tensor) or attention_mask.dtype != torch.int32:
            return own(module, query, key, value, attention_mask, **given)
        rows = attention_mask[0, 0]
        window = _window(module, given) if len(attention_mask) == 2 else None
        fits = has_kernel(query, value) and given.get("position_bias") is None
        if query.is_cpu and not torch.compiler.is_compiling():
            return _row_by_row(own, module, query, key, value, rows, window, given), None
        if not fits or given.get("dropout") or (query.dtype == torch.float32 and not query.is_meta):
            return own(module, query, key, value, _block_diagonal(rows, query, window), **given)
        if query.is_meta:
            return as_planned(query, key, value, rows.shape[1] - 1, given.get("scaling")), None
        return _by_varlen(query, key, value, rows, window, given.get("scaling")), None

    return attend


def _window(module: Any, given: Mapping[str, Any]) -> int:
    found = given.get("sliding_window") or getattr(module.config, "sliding_window", None)
    if not isinstance(found, int):
        raise ModelError(f"{type(module).__name__} does not say its sliding window: train without packing")
    return found


def _row_by_row(
    own: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    window: int | None,
    given: dict[str, Any],
) -> Tensor:
    """The same operations as for each row without packing. Returns [rows, length, heads, dim]."""
    length = query.shape[2]
    outputs: list[list[Tensor]] = [[] for _ in query]
    places = rows[0].tolist()
    for begin, end in pairwise(places):
        if begin == end:
            continue
        at, part = begin // length, slice(begin % length, begin % length + end - begin)
        parts = (each[at : at + 1, :, part] for each in (query, key, value))
        seen = None if window is None or end - begin <= window else _banded(end - begin, window)
        outputs[at].append(own(module, *parts, seen, **given)[0])
    return torch.cat([torch.cat(each, dim=1) for each in outputs])


def _banded(length: int, window: int) -> Tensor:
    """bool [1, 1, length, length]: the last `window` keys of each query, its own included."""
    places = torch.arange(length)
    back = places[:, None] - places
    return ((back >= 0) & (back < window))[None, None]


def _by_varlen(
    query: Tensor, key: Tensor, value: Tensor, rows: Tensor, window: int | None, scale: float | None
) -> Tensor:
    """Returns [rows, length, heads, dim]."""
    seen = (-1, 0) if window is None else (window - 1, 0)
    return by_varlen(query, key, value, rows[0], min(1 << rows.shape[0], query.shape[2]), seen, scale)


def has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether `by_varlen` takes heads of these widths."""
    return query.shape[-1] == value.shape[-1] <= _MOST_HEAD_DIM and query.shape[-1] % 8 == 0


def by_varlen(
    query: Tensor, key: Tensor, value: Tensor, begins: Tensor, most: int, seen: tuple[int, int], scale: float | None
) -> Tensor:
    """Attention within parts of the flattened batch.

    Args:
        query, key, value: [rows, heads, length, dim], bf16 or fp16, on a GPU.
        begins: int32 [number + 1], places where parts begin, and the number of tokens.
        most: at least the tokens of the longest part.
        seen: keys before and after its own that a query sees, -1 for all.

    Returns:
        [rows, length, heads, dim].
    """
    from torch.nn.attention.varlen import varlen_attn

    num_rows, num_heads, length, _ = query.shape
    query, key, value = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    options: dict[str, Any] = {"scale": scale, "window_size": seen}
    if num_heads != key.shape[1] and "enable_gqa" in _varlen_options():  # torch 2.11 has no such option and needs none
        options["enable_gqa"] = True
    output: Any = varlen_attn(query, key, value, begins, begins, most, most, **options)
    return output.unflatten(0, (num_rows, length))  # type: ignore[no-any-return]


def as_planned(
    query: Tensor, key: Tensor, value: Tensor, number: int, scale: float | None, *, is_causal: bool = True
) -> Tensor:
    """Attention within `number` equal parts, for the plan: the operations, bytes and FLOPs of `by_varlen`."""
    num_rows, num_heads, length, _ = query.shape

    def apart(each: Tensor) -> Tensor:
        return each.transpose(1, 2).reshape(number, num_rows * length // number, *each.shape[1::2]).transpose(1, 2)

    enable_gqa = num_heads != key.shape[1]
    query, key, value = map(apart, (query, key, value))
    found = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return found.transpose(1, 2).reshape(num_rows, length, num_heads, -1)


def _block_diagonal(rows: Tensor, query: Tensor, window: int | None) -> Tensor:
    """bool [rows, 1, length, length]."""
    num_rows, _, length, _ = query.shape
    places = torch.arange(num_rows * length, device=query.device, dtype=torch.int32)
    of_row = torch.searchsorted(rows[0], places, right=True).view(num_rows, 1, length)
    back = places[:length, None] - places[:length]
    seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    return (seen & (of_row.unsqueeze(-1) == of_row.unsqueeze(-2))).view(num_rows, 1, length, length)


def kernel_runs(capability: tuple[int, int] | None) -> bool:
    """Whether `by_varlen` runs on a GPU of `capability` (None: the present GPU)."""
    if capability is None:
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    return capability >= LEAST_CAPABILITY and {"window_size", "scale"} <= _varlen_options()


@cache
def _varlen_options() -> frozenset[str]:
    """Names of the parameters of torch's `varlen_attn`; empty before torch 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)
