"""Keeps attention masks from synchronising with the GPU, and leaves out masks of padding that no label reads.

In every forward, transformers asks the GPU whether the mask masks anything and whether positions show packed rows. The
collator answers the first question from the mask in RAM; without `position_ids` no rows are packed. Our own attention
keeps every mask (`added_mask`).

A mask over padding makes `scaled_dot_product_attention` choose a kernel that computes every pair of query and key and
keeps a bias of rows x length^2 in each block. Causal attention needs no mask if the padding follows each row's tokens:
no token attends to it. Only outputs at padding differ, which no loss reads if their labels are ignored
(`Padding.UNREAD`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offloadkit.facts.changes import claim
from offloadkit.hf import packed, segments
from offloadkit.hf.loss import shifts_labels
from offloadkit.hf.tokenize import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOTE = "padding_of_attention_mask"
"""Key under which `PaddingCollator` adds the batch's `Padding`. No model has an argument of this name."""


class Padding(Enum):
    """Padding of a batch, by its attention masks."""

    NONE = "none"
    UNREAD = "unread"
    """Padding that follows the tokens of each row and has ignored labels."""
    READ = "read"
    """Anything else."""


def padding_of(mask: Tensor, labels: Any) -> Padding:
    """The padding of a batch, with one synchronisation.

    Args:
        mask: [rows, length], 0 at masked tokens.
        labels: of the tokens, if it is a tensor of the same shape; else no padding is unread.
    """
    seen = mask.bool()
    found = [seen.all()]
    if isinstance(labels, Tensor) and labels.shape == mask.shape:
        follows = (seen[:, 1:] <= seen[:, :-1]).all()
        found.append(follows & ((labels.to(mask.device) == IGNORED) | seen).all())
    is_full, *is_unread = torch.stack(found).tolist()
    return Padding.NONE if is_full else Padding.UNREAD if any(is_unread) else Padding.READ


class _Known(threading.local):
    padding: Padding | None = None
    """Padding of the batch's attention masks; None: unknown."""
    found: Padding | None = None
    """Padding of the forward's attention mask, if it was unknown and the GPU was asked."""
    mask: Tensor | None = None
    """The forward's attention mask; `padding` and `found` do not apply to masks of another shape."""
    labels: Tensor | None = None
    """The forward's labels, if its masks may be left out."""
    is_packed: bool | None = None
    """False if each row of the batch is one sequence; None: unknown."""


_known = _Known()


@dataclass(frozen=True)
class CollatorWrapper:
    """Wraps a collator. Its attributes stay readable, for a Trainer's `get_train_dataloader`."""

    collate: Callable[[Any], Any]

    def __getattr__(self, name: str) -> Any:
        if name == "collate" or name.startswith("__"):  # unpickling reads attributes before `collate` exists
            raise AttributeError(name)
        return getattr(self.collate, name)


@dataclass(frozen=True)
class PaddingCollator(CollatorWrapper):
    """A collator that stores the batch's `Padding` under `NOTE`, if all attention masks agree, and what it finds in
    positions under `packed.NOTE`. Raises `DataError` if packed rows would cross.
    """

    shifted: bool = False
    """Whether the model `shifts_labels`."""

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        if isinstance(batch, MutableMapping):
            positions, mask = batch.get("position_ids"), batch.get("attention_mask")
            if isinstance(positions, Tensor) and positions.dim() == 2 and mask is not None:
                packed.check_mask(positions, mask)
                batch[packed.NOTE] = packed.NotPacked.MASKED
            elif isinstance(positions, Tensor) and positions.dim() == 2:
                boundaries = packed.boundaries(positions)
                batch[packed.NOTE] = packed.NotPacked.APART if boundaries is None else boundaries
                if boundaries is not None and self.shifted:
                    packed.check_labels(positions, batch.get("labels"), IGNORED)
            masks = [value for name, value in batch.items() if name.endswith("attention_mask")]
            if all(isinstance(mask, Tensor) and mask.dim() == 2 for mask in masks):
                labels = batch.get("labels") if len(masks) == 1 else None
                found = {padding_of(mask, labels) for mask in masks}
                if len(found) == 1:
                    batch[NOTE] = found.pop()
        return batch


def split_notes(batch: Any) -> tuple[Any, Padding | None, Tensor | packed.NotPacked | None]:
    """Split a batch into the collator's batch and the values under `NOTE` and `packed.NOTE` (None if missing)."""
    if not isinstance(batch, MutableMapping) or not {NOTE, packed.NOTE} & batch.keys():
        return batch, None, None
    own = {name: value for name, value in batch.items() if name not in (NOTE, packed.NOTE)}
    return own, batch.get(NOTE), batch.get(packed.NOTE)


@contextmanager
def known_padding(padding: Padding | None) -> Iterator[None]:
    before, _known.padding = _known.padding, padding
    try:
        yield
    finally:
        _known.padding = before


def avoid_mask_syncs(model: PreTrainedModel, *, leave_out: bool) -> Callable[[], None]:
    """Answer transformers' questions in forwards of `model`, whose packed rows `packed.keep_rows_apart`; returns a
    function that undoes it.

    Args:
        leave_out: leave out masks of unread padding, if the model has a causal loss.
    """
    undo = ExitStack()
    undo.callback(answers.used())
    leave_out = leave_out and shifts_labels(model)

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        # `position_ids` is the third argument of most models
        given = kwargs.get("position_ids") is not None or len(args) > 2
        _known.is_packed = None if given else False
        mask, labels = kwargs.get("attention_mask"), kwargs.get("labels")
        _known.mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        may = leave_out and kwargs.get("shift_labels") is None and "ignore_index" not in kwargs
        _known.labels = labels if may and isinstance(labels, Tensor) else None

    def after(*_: Any) -> None:
        _known.is_packed = _known.found = _known.mask = _known.labels = None

    undo.callback(after)  # torch runs no hook after an interrupted forward
    undo.callback(model.register_forward_pre_hook(before, with_kwargs=True).remove)
    undo.callback(model.register_forward_hook(after, always_call=True).remove)
    return undo.close


def _padding(mask: Tensor) -> Padding | None:
    """The padding of a mask that transformers made from the forward's; None if it is unknown.

    Asks the GPU once in a forward, if the answer may leave out a mask.
    """
    own, labels = _known.mask, _known.labels
    if own is None or mask.shape != own.shape:
        return None
    if _known.padding is None and _known.found is None and labels is not None:
        if own.is_meta or labels.is_meta or torch.compiler.is_compiling():
            return None
        _known.found = padding_of(own, labels)
    return _known.padding or _known.found


class MaskFunctions:
    """Replaces transformers' question functions while any model uses the replacement.

    A function that another package installed afterwards stays.
    """

    def __init__(self) -> None:
        # reentrant: the garbage collector may close a model on a thread that holds the lock
        self._lock = threading.RLock()
        self._num_models, self._undo = 0, ExitStack()

    def used(self) -> Callable[[], None]:
        """Add a user; returns a function that removes it."""
        with self._lock:
            if not self._num_models:
                self._undo = _asked_of_us()
            self._num_models += 1
        return self._left

    def _left(self) -> None:
        with self._lock:
            self._num_models -= 1
            if not self._num_models:
                self._undo.close()


answers = MaskFunctions()


def _asked_of_us() -> ExitStack:
    from transformers import masking_utils

    asked: Any = masking_utils
    ask_all, ask_bidirectional = asked.fast_all, asked._ignore_bidirectional_mask_sdpa
    ask_packed, ask_causal = asked.find_packed_sequence_indices, asked._ignore_causal_mask_sdpa

    def fast_all(mask: Tensor) -> Any:
        padding = _padding(mask)
        return ask_all(mask) if padding is None else padding is Padding.NONE

    def ignore_causal(padding_mask: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        if padding_mask is not None and _known.labels is not None and _padding(padding_mask) is Padding.UNREAD:
            padding_mask = None
        return ask_causal(padding_mask, *args, **kwargs)

    def ignore_bidirectional(padding_mask: Tensor | None, kv_length: int, local_attention_size: Any = None) -> Any:
        padding = None if padding_mask is None else _padding(padding_mask)
        if padding not in (None, Padding.NONE):
            return False
        return ask_bidirectional(None if padding else padding_mask, kv_length, local_attention_size)

    def find_packed(position_ids: Tensor) -> Any:
        if torch.compiler.is_compiling():
            return ask_packed(position_ids)
        if packed.is_packed():
            return None
        # transformers made the positions from a length alone
        shared = position_ids.shape[0] == 1 or position_ids.stride(0) == 0
        return None if shared and _known.is_packed is False else ask_packed(position_ids)

    undo = ExitStack()
    undo.callback(claim(asked, "fast_all", fast_all))
    undo.callback(claim(asked, "_ignore_causal_mask_sdpa", ignore_causal))
    undo.callback(claim(asked, "_ignore_bidirectional_mask_sdpa", ignore_bidirectional))
    undo.callback(claim(asked, "find_packed_sequence_indices", find_packed))
    packed.answer(undo)
    segments.answer(undo)
    return undo


def added_mask(
    *,
    q_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    allow_is_bidirectional_skip: bool = False,
    allow_is_causal_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    **given: Any,
) -> Tensor | None:
    """transformers' `eager_mask` (added to the scores), except that a given mask is never dropped.

    Returns:
        (batch, 1, queries, keys) of `dtype`: 0 for attended keys, the dtype's minimum elsewhere. In bidirectional masks
            all queries share the memory of one row. None if no mask was given and all keys are attended to.
    """
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

    seen = sdpa_mask(
        q_length=1 if mask_function is bidirectional_mask_function else q_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and attention_mask is None,
        **given,
    )
    if seen is None:
        return None
    mask = seen.new_full(seen.shape, torch.finfo(dtype).min, dtype=dtype).masked_fill_(seen, 0.0)
    return mask.expand(-1, -1, q_length, -1)
