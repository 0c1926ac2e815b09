"""Keeps attention masks from synchronising with the GPU.

In every forward, transformers asks the GPU whether the mask masks anything and whether positions show packed rows. The
collator answers the first question from the mask in RAM; without `position_ids` no rows are packed. Our own attention
keeps every mask (`added_mask`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offloadkit.facts.changes import claim

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOTE = "attention_mask_is_full"
"""Key that `FullMaskCollator` adds to a batch: whether its masks mask nothing. No model has an argument of this
name.
"""


class _Known(threading.local):
    full: bool | None = None
    """Whether the batch's attention masks mask nothing; None: unknown."""
    shape: torch.Size | None = None
    """Shape of the forward's attention mask; `full` does not apply to masks of another shape."""
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


class FullMaskCollator(CollatorWrapper):
    """A collator that stores under `NOTE` whether the batch's masks mask nothing, if all masks agree."""

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        if isinstance(batch, MutableMapping):
            masks = [value for name, value in batch.items() if name.endswith("attention_mask")]
            if all(isinstance(mask, Tensor) and mask.dim() == 2 for mask in masks):
                full = {bool(mask.all()) for mask in masks}
                if len(full) == 1:
                    batch[NOTE] = full.pop()
        return batch


def split_full_mask(batch: Any) -> tuple[Any, bool | None]:
    """Split a batch into the collator's batch and the value under `NOTE` (None if missing)."""
    if not isinstance(batch, MutableMapping) or NOTE not in batch:
        return batch, None
    return {name: value for name, value in batch.items() if name != NOTE}, batch[NOTE]


@contextmanager
def known_full_mask(full: bool | None) -> Iterator[None]:
    before, _known.full = _known.full, full
    try:
        yield
    finally:
        _known.full = before


def avoid_mask_syncs(model: PreTrainedModel) -> Callable[[], None]:
    """Answer transformers' questions in forwards of `model`; returns a function that undoes it."""
    undo = ExitStack()
    undo.callback(answers.used())

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        # `position_ids` is the third argument of most models
        given = kwargs.get("position_ids") is not None or len(args) > 2
        _known.is_packed = None if given else False
        mask = kwargs.get("attention_mask")
        _known.shape = mask.shape if isinstance(mask, Tensor) else None

    def after(*_: Any) -> None:
        _known.is_packed = _known.shape = None

    undo.callback(after)  # torch runs no hook after an interrupted forward
    undo.callback(model.register_forward_pre_hook(before, with_kwargs=True).remove)
    undo.callback(model.register_forward_hook(after, always_call=True).remove)
    return undo.close


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
    ask_packed = asked.find_packed_sequence_indices

    def known(mask: Tensor) -> bool | None:
        return _known.full if mask.shape == _known.shape else None

    def fast_all(mask: Tensor) -> Any:
        full = known(mask)
        return ask_all(mask) if full is None else full

    def ignore_bidirectional(padding_mask: Tensor | None, kv_length: int, local_attention_size: Any = None) -> Any:
        full = None if padding_mask is None else known(padding_mask)
        if full is False:
            return False
        return ask_bidirectional(None if full else padding_mask, kv_length, local_attention_size)

    def find_packed(position_ids: Tensor) -> Any:
        if torch.compiler.is_compiling():
            return ask_packed(position_ids)
        # transformers made the positions from a length alone
        shared = position_ids.shape[0] == 1 or position_ids.stride(0) == 0
        return None if shared and _known.is_packed is False else ask_packed(position_ids)

    undo = ExitStack()
    undo.callback(claim(asked, "fast_all", fast_all))
    undo.callback(claim(asked, "_ignore_bidirectional_mask_sdpa", ignore_bidirectional))
    undo.callback(claim(asked, "find_packed_sequence_indices", find_packed))
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
