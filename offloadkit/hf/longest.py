"""Find the largest micro-batch of a Trainer before training.

Rows are read and collated in a forked process, as in a DataLoader worker, so random states, files and the collator of
the training process do not change.
"""

from __future__ import annotations

import os
import random
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from offloadkit.engine.tracing import Call
from offloadkit.engine.values import keeps_values
from offloadkit.hf import packed
from offloadkit.hf.masks import Padding, padding_of

MOST_ROWS = 4096
"""Maximum number of measured rows, spread evenly over the dataset."""
_MOST_LENGTHS = 64
"""With one row for each micro-batch, at most this many rows of different lengths are collated to read their masks."""
SECONDS = 60
MEDIA_SECONDS = 20
"""Rows with images or sound are collated one by one, to measure them, for at most so long."""
_COLUMNS = ("input_ids", "labels")
"""Columns to measure; without these, all columns with a length."""
_OWN_LOSSES = ("transformers.", "trl.trainer.sft_trainer", "offloadkit.")
"""Modules whose `compute_loss` passes the collated batch unchanged to the model."""


class NotReadableError(Exception):
    """The rows cannot be read before training. The message gives the reason."""


def longest_batch(trainer: Any) -> tuple[Call, Padding, str, torch.Tensor | None]:
    """A micro-batch as large, in every dimension, as the largest micro-batches of `trainer`, evaluation included.

    Returns:
        The call of the model's forward, with tensors on the meta device. With images or sound, its alternatives are the
            largest micro-batches by tokens, by pixels or samples, and by both, with the values of their integers.
        The padding of all micro-batches; `Padding.READ` if it is not known.
        A note if only a part of the training rows was measured, else "".
        `packed.planned_boundaries` if the collator packs rows.

    Raises:
        NotReadableError: custom loss or batches, no rows, a stream, or an error in the forked process.
    """
    _check_standard(trainer)
    sets = [(trainer.train_dataset, "training"), *((rows, "evaluation") for rows in _evaluated(trainer))]
    read, said = [], ""
    for rows, description in sets:
        if rows is None:
            raise NotReadableError("there are no training rows")
        if isinstance(rows, IterableDataset) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
            raise NotReadableError("the rows are a stream")
        if not len(rows):
            continue
        rows, collate = _as_trained(trainer, rows, description)
        size, evaluated = trainer.args.per_device_train_batch_size, trainer.args.per_device_eval_batch_size
        together = size if description == "training" else evaluated
        read.append(_read_elsewhere(_Longest(rows, collate, size, together)))
        if read[-1].number < len(rows) and description == "training":
            said = f"lengths of {read[-1].number:,} of the {len(rows):,} rows were read, evenly spaced"
    if not read:
        raise NotReadableError("there are no rows")
    padding = _worst(found.padding for found in read)
    if any(found.has_media for found in read):
        calls = [Call((), _largest([batch]), padding is Padding.NONE) for found in read for batch in found.batches]
        return replace(calls[0], alternatives=tuple(calls[1:])), padding, said, None
    largest = _largest([shapes for found in read for shapes in found.batches])
    row, positions, boundaries = largest.pop(packed.NOTE, None), largest.get("position_ids"), None
    if row is not None and positions is not None:
        boundaries = packed.planned_boundaries(len(positions), positions.shape[1], row)
    return Call((), largest, padding is Padding.NONE), padding, said, boundaries


def evaluation_rows(trainer: Any) -> int:
    """Largest batch size of evaluation during training; 0 if the Trainer does not evaluate."""
    size = trainer.args.per_device_eval_batch_size
    sets = _evaluated(trainer)
    return max((min(size, len(rows)) if hasattr(rows, "__len__") else size for rows in sets), default=0)


def _evaluated(trainer: Any) -> list[Any]:
    if str(getattr(trainer.args.eval_strategy, "value", trainer.args.eval_strategy)) == "no":
        return []
    rows = trainer.eval_dataset
    return [each for each in (rows.values() if isinstance(rows, dict) else [rows]) if each is not None]


def _check_standard(trainer: Any) -> None:
    if getattr(trainer, "compute_loss_func", None) is not None:
        raise NotReadableError("compute_loss_func computes the loss outside the model")
    if trainer.label_smoother is not None:
        raise NotReadableError("label_smoothing_factor computes the loss outside the model")
    kind = type(trainer)
    for name, what in (("compute_loss", "computes the loss"), ("get_train_dataloader", "makes the batches")):
        if not is_standard(getattr(kind, name)):
            raise NotReadableError(f"{kind.__name__}.{name} {what} in a custom way")


def is_standard(method: Any) -> bool:
    return f"{method.__module__}.".startswith(_OWN_LOSSES)


def _as_trained(trainer: Any, rows: Any, description: str) -> tuple[Any, Callable[[Any], Any]]:
    collate = trainer.widths.widest_collator(trainer)
    if hasattr(rows, "remove_columns"):
        return trainer._remove_unused_columns(rows, description=description), collate
    return rows, trainer._get_collator_with_removed_columns(collate, description=description)


@dataclass(frozen=True)
class _Found:
    """The largest micro-batches of some rows.

    Attributes:
        batches: micro-batches as `{name: (shape, dtype) of a tensor, or a value}`, one for each measured column.
        padding: of all micro-batches.
        number: of measured rows.
        has_media: the batches have images or sound, and their integers are tensors.
    """

    batches: list[dict[str, Any]]
    padding: Padding
    number: int
    has_media: bool = False


class _Longest(Dataset[Any]):
    """A dataset of one item: a `_Found`, or the reason why the rows cannot be read. An error in a worker would keep the
    process alive until Python's garbage collector ends it, after five seconds.
    """

    def __init__(self, rows: Any, collate: Callable[[Any], Any], batch_size: int, together: int) -> None:
        """`together`: number of rows that are padded to one length. It differs from `batch_size` in evaluation."""
        self.rows, self.collate, self.batch_size, self.together = rows, collate, min(batch_size, len(rows)), together

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> _Found | str:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the forked process has no tokenizer threads
        try:
            return self._found()
        except Exception as error:  # user code: any exception is possible
            return _in_a_line(error)

    def _found(self) -> _Found:
        if _has_media(self._collated(range(self.batch_size))):
            return self._of_media()
        number = len(self.rows)
        indices = range(0, number, -(-number // MOST_ROWS))
        lengths, are_full = [], number <= MOST_ROWS
        for index, row in zip(indices, self._columns(indices), strict=True):
            lengths.append((index, _lengths(row)))
            are_full = are_full and not _is_padded(row)
        names = dict.fromkeys(name for _, own in lengths for name in own)
        batches, found, measured = [], [], [each for each in _COLUMNS if each in names] or list(names) or [""]
        for name in measured:
            longest = sorted(lengths, key=lambda item: -item[1].get(name, 0))[: self.batch_size]
            chosen = [index for index, _ in longest]
            chosen += [index for index in range(number) if index not in chosen][: self.batch_size - len(chosen)]
            batch = self._collated(chosen)
            batches.append({key: _form(value) for key, value in batch.items()})
            positions = batch.get("position_ids")
            if isinstance(positions, torch.Tensor) and positions.dim() == 2 and batch.get("attention_mask") is None:
                batches[-1][packed.NOTE] = packed.planned_row_of(positions)
            found.append(_padding(batch))
        if not are_full or "input_ids" not in names:
            return _Found(batches, Padding.READ, len(lengths))
        of_length = {tuple(own.get(name) for name in measured): index for index, own in lengths}
        if self.together == 1 and len(of_length) <= _MOST_LENGTHS:
            found += [_padding(self.collate([self.rows[index]])) for index in of_length.values()]
        elif len(of_length) > 1:  # a collator pads all rows on the same side
            ends = (pick(lengths, key=lambda item: item[1].get("input_ids", 0))[0] for pick in (min, max))
            found += [Padding.UNREAD, _padding(self._collated(ends))]
        return _Found(batches, _worst(found), len(lengths))

    def _collated(self, indices: Iterable[int]) -> dict[str, Any]:
        return dict(self.collate([self.rows[index] for index in indices]))

    def _of_media(self) -> _Found:
        """A row has tokens, and pixels or samples, in numbers that only its collator knows: each row is collated."""
        number, are_full, began = len(self.rows), True, time.monotonic()
        sizes: list[_Size] = []
        order = list(range(0, number, -(-number // MOST_ROWS)))
        random.Random(0).shuffle(order)
        for index in order:
            if len(sizes) >= self.batch_size and time.monotonic() - began > MEDIA_SECONDS:
                break
            batch = self._collated([index])
            are_full = are_full and _padding(batch) is Padding.NONE
            sizes.append((index, _num_elements(batch, floats=False), _num_elements(batch, floats=True)))
        batches = [self._collated(indices) for indices in _largest_by_size(sizes, self.batch_size)]
        found = [_padding(batch) for batch in batches]
        if self.together > 1:  # a collator pads all rows on the same side
            ends = (pick(sizes, key=lambda each: each[1])[0] for pick in (min, max))
            found += [Padding.UNREAD, _padding(self._collated(dict.fromkeys(ends)))]
        padding = _worst(found) if are_full else Padding.READ
        return _Found(
            [{name: _small(value) for name, value in batch.items()} for batch in batches], padding, len(sizes), True
        )

    def _columns(self, indices: Iterable[int]) -> Iterable[Any]:
        rows = self.rows
        known = [name for name in _COLUMNS if name in getattr(rows, "column_names", ())]
        if known and hasattr(rows, "select_columns"):
            masks = filter(_is_attention_mask, rows.column_names) if len(rows) <= MOST_ROWS else ()
            rows = rows.select_columns([*known, *masks])
        return (rows[index] for index in indices)


_Size = tuple[int, int, int]
"""A row's index, tokens, and pixels or samples."""


def _largest_by_size(sizes: Sequence[_Size], batch_size: int) -> list[tuple[int, ...]]:
    """Rows of the largest micro-batches by tokens, by pixels or samples, and by both."""
    tokens, values = (max(1, *(each[at] for each in sizes)) for at in (1, 2))
    keys: list[Callable[[_Size], float]] = [
        lambda each: each[1],
        lambda each: each[2],
        lambda each: each[1] / tokens + each[2] / values,
    ]
    by_size = (sorted(sizes, key=key, reverse=True)[:batch_size] for key in keys)
    return list(dict.fromkeys(tuple(sorted(index for index, *_ in rows)) for rows in by_size))


def longest_of_sizes(sets: Sequence[tuple[Any, Callable[[Any], Any]]], batch_size: int) -> Call:
    """The largest micro-batches of rows with images by tokens, by pixels and by both, as alternatives, for a plan.

    Args:
        sets: rows, whose `sizes` are the tokens and the pixel values of each, and their collator.
    """
    calls = []
    for rows, collate in sets:
        for chosen in _largest_by_size([(index, *size) for index, size in enumerate(rows.sizes)], batch_size):
            batch = collate([rows[index] for index in chosen])
            calls.append(Call((), _largest([{name: _small(value) for name, value in batch.items()}])))
    return replace(calls[0], alternatives=tuple(calls[1:]))


def _lengths(row: Any) -> dict[str, int]:
    if not isinstance(row, Mapping):
        return {}
    return {
        name: len(value)
        for name, value in row.items()
        if (isinstance(value, torch.Tensor) and value.dim()) or isinstance(value, Sequence)
    }


def _is_attention_mask(name: Any) -> bool:
    return str(name).endswith("attention_mask")


def _is_padded(row: Any) -> bool:
    masks = [value for name, value in row.items() if _is_attention_mask(name)] if isinstance(row, Mapping) else []
    return not all(_is_full(mask) for mask in masks)


def _is_full(mask: Any) -> bool:
    if isinstance(mask, torch.Tensor):
        return bool(mask.all())
    return isinstance(mask, Sequence) and mask.count(1) == len(mask)


def _padding(batch: Any) -> Padding:
    """The padding of a collated batch, by all its masks; `Padding.READ` if it is not known."""
    masks = [value for name, value in batch.items() if str(name).endswith("mask") and value is not None]
    if not all(isinstance(mask, torch.Tensor) and mask.dim() == 2 for mask in masks):
        return Padding.READ
    return _worst(padding_of(mask, batch.get("labels") if len(masks) == 1 else None) for mask in masks)


def _worst(found: Iterable[Padding]) -> Padding:
    return max(found, key=list(Padding).index, default=Padding.NONE)


def _form(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _small(value: Any) -> Any:
    return value if isinstance(value, torch.Tensor) and keeps_values(value) else _form(value)


def _has_media(batch: dict[str, Any]) -> bool:
    """Whether a batch has floating-point inputs, such as pixels, samples or spectra."""
    named = (value for name, value in batch.items() if name != "labels" and isinstance(value, torch.Tensor))
    return any(value.is_floating_point() and value.dim() > 1 for value in named)


def _num_elements(batch: dict[str, Any], *, floats: bool) -> int:
    tensors = (value for value in batch.values() if isinstance(value, torch.Tensor))
    return sum(tensor.numel() for tensor in tensors if tensor.is_floating_point() == floats)


def _read_elsewhere(longest: _Longest) -> _Found:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about forks
            loader = DataLoader(
                longest,
                batch_size=None,
                collate_fn=lambda item: item,
                num_workers=1,
                timeout=SECONDS,
                multiprocessing_context="fork",
                generator=torch.Generator(),
            )
            (found,) = loader
    except Exception as error:  # the process was killed, or takes too long
        raise NotReadableError(_in_a_line(error)) from error
    if isinstance(found, str):
        raise NotReadableError(found)
    return found  # type: ignore[no-any-return]


def _in_a_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def _largest(batches: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, first in batches[0].items():
        forms = [batch.get(name) for batch in batches]
        if not _is_form(first):
            found[name] = first
            continue
        shapes = [form[0] for form in forms if form is not None and _is_form(form) and len(form[0]) == len(first[0])]
        largest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
        found[name] = unknown_pixels(largest, first[1]) if name == "pixel_values" else _on_meta(largest, first[1])
    return found


def _on_meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def unknown_pixels(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Pixel values for a plan, without memory. Of [rows, images, channels, height, width] Idefics 2 and 3 and SmolVLM
    leave out images of zeros, which pad a row: here no image is padding.
    """
    return torch.ones((), dtype=dtype).expand(shape) if len(shape) == 5 else _on_meta(shape, dtype)


def _is_form(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype)
