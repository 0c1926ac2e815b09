"""Attention masks without asking the GPU whether they mask anything.

transformers asks that in each forward, to leave out masks that mask nothing, and whether positions are those of packed
rows. Python waits for the answers, and the GPU then waits for Python. Whoever collates a batch sees its mask in RAM,
and who gives no positions knows that nothing is packed. `Noted` and `answering` carry that to the place where it is
asked; where nobody knows, the GPU is asked as always. Our own attention takes a mask in any case (`added_mask`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offloadkit.changes import claim

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOTE = "attention_mask_is_full"
"""Key of a batch under which `Noted` says whether its masks mask nothing; no argument of any model."""


class _Known(threading.local):
    """What this thread's forward need not ask."""

    full: bool | None = None
    """Whether the batch's attention masks mask nothing; None: not known."""
    shape: torch.Size | None = None
    """Of the attention mask that the forward was given: masks of other shapes are not those that are known."""
    is_packed: bool | None = None
    """False if each row of the batch is one sequence; None: not known."""


_known = _Known()


@dataclass(frozen=True)
class Around:
    """A collator around another, whose attributes it has too: a Trainer's `get_train_dataloader` may read them."""

    collate: Callable[[Any], Any]

    def __getattr__(self, name: str) -> Any:
        if name == "collate" or name.startswith("__"):  # as it is unpickled it has none
            raise AttributeError(name)
        return getattr(self.collate, name)


class Noted(Around):
    """A collator whose batches say under `NOTE` whether their masks mask nothing, where all of them agree."""

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        if isinstance(batch, MutableMapping):
            masks = [value for name, value in batch.items() if name.endswith("attention_mask")]
            if all(isinstance(mask, Tensor) and mask.dim() == 2 for mask in masks):
                full = {bool(mask.all()) for mask in masks}
                if len(full) == 1:
                    batch[NOTE] = full.pop()
        return batch


def without_note(batch: Any) -> tuple[Any, bool | None]:
    """A batch as its collator made it, and what `Noted` has added; None if it has not."""
    if not isinstance(batch, MutableMapping) or NOTE not in batch:
        return batch, None
    return {name: value for name, value in batch.items() if name != NOTE}, batch[NOTE]


@contextmanager
def answering(full: bool | None) -> Iterator[None]:
    """While it is open, `full` says on this thread whether the batch's masks mask nothing; None: the GPU is asked."""
    before, _known.full = _known.full, full
    try:
        yield
    finally:
        _known.full = before


def ask_nothing(model: PreTrainedModel) -> Callable[[], None]:
    """Have forwards of `model` ask the GPU only what nobody knows; returns what undoes it."""
    undo = ExitStack()
    undo.callback(answers.used())

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given = kwargs.get("position_ids") is not None or len(args) > 2  # it is the third argument of most models
        _known.is_packed = None if given else False
        mask = kwargs.get("attention_mask")
        _known.shape = mask.shape if isinstance(mask, Tensor) else None

    def after(*_: Any) -> None:
        _known.is_packed = _known.shape = None

    undo.callback(after)  # torch runs no hook after a forward that was interrupted
    undo.callback(model.register_forward_pre_hook(before, with_kwargs=True).remove)
    undo.callback(model.register_forward_hook(after, always_call=True).remove)
    return undo.close


class Answers:
    """What stands in the place of transformers' questions while any model uses it.

    Models have one in common: what others have put there since stays, and calls ours or does not.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # Python may collect a model that was dropped while this thread has the lock
        self._num_models, self._undo = 0, ExitStack()

    def used(self) -> Callable[[], None]:
        """Count a model that uses it; returns what is called when the model is done."""
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


answers = Answers()


def _asked_of_us() -> ExitStack:
    """Put ourselves before transformers' questions; returns what undoes it. Where nothing is known they are asked."""
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
        shared = position_ids.shape[0] == 1 or position_ids.stride(0) == 0  # made from a length alone
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
    """transformers' `eager_mask`, which is added to the scores, but a mask that was given is never left out.

    Returns:
        (batch, 1, queries, keys) of `dtype`: 0 where a key is attended to, the least number elsewhere. Where all
        queries attend to the same keys, their one row is stored once. None without a mask if all keys are attended to.
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
