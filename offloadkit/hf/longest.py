"""The largest micro-batch that a Trainer will see, read before training without touching anything of it.

Rows are read and collated in a forked process, as a DataLoader's worker does it. So no random state, generator, file or
collator of the training process advances, whatever the rows and the collator do.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

MOST_ROWS = 4096
"""Rows of a dataset whose lengths are read. Of a longer dataset they are spread evenly over it."""
SECONDS = 60
"""What reading them may take."""
_COLUMNS = ("input_ids", "labels")
"""Columns whose lengths count; without these, all columns that have a length do."""
_OWN_LOSSES = ("transformers.", "trl.trainer.sft_trainer", "offloadkit.")
"""Modules whose `compute_loss` calls the model with the collated rows as they are."""


class NotReadableError(Exception):
    """The rows cannot be read before training; says why."""


def longest_batch(trainer: Any) -> tuple[dict[str, Any], str]:
    """A micro-batch with every size that the largest ones have, for `trainer`'s rows and collator.

    Evaluation rows count if the Trainer evaluates while it trains.

    Returns:
        Arguments of the model's forward, tensors on the meta device; and what to say of rows that were not read, or "".

    Raises:
        NotReadableError: the loss or the batches are not made as the Trainer makes them, the rows are a stream, or
            they cannot be read in another process.
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
        read.append(_read_elsewhere(_Longest(rows, collate, trainer.args.per_device_train_batch_size)))
        if len(rows) > MOST_ROWS and description == "training":
            said = f"lengths of {MOST_ROWS:,} of the {len(rows):,} rows were read, spread evenly"
    if not read:
        raise NotReadableError("there are no rows")
    return _largest([shapes for found in read for shapes in found]), said


def evaluation_rows(trainer: Any) -> int:
    """Rows of the largest micro-batch of the evaluations while `trainer` trains; 0 if it does not evaluate then."""
    size = trainer.args.per_device_eval_batch_size
    sets = _evaluated(trainer)
    return max((min(size, len(rows)) if hasattr(rows, "__len__") else size for rows in sets), default=0)


def _evaluated(trainer: Any) -> list[Any]:
    """The sets of rows that are evaluated while it trains."""
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
        method = getattr(kind, name)
        if not (method.__module__ + ".").startswith(_OWN_LOSSES):
            raise NotReadableError(f"{kind.__name__}.{name} {what} in its own way")


def _as_trained(trainer: Any, rows: Any, description: str) -> tuple[Any, Callable[[Any], Any]]:
    """The rows and the collator as the Trainer's own DataLoader has them. (By private methods of the Trainer.)"""
    if hasattr(rows, "remove_columns"):  # a datasets.Dataset
        return trainer._remove_unused_columns(rows, description=description), trainer.data_collator
    return rows, trainer._get_collator_with_removed_columns(trainer.data_collator, description=description)


class _Longest(Dataset[Any]):
    """One item: the shapes of micro-batches that hold the longest rows by each column that counts.

    An item is a list of `{name: (shape, dtype) of a tensor, or a value}`.
    """

    def __init__(self, rows: Any, collate: Callable[[Any], Any], batch_size: int) -> None:
        self.rows, self.collate, self.batch_size = rows, collate, min(batch_size, len(rows))

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> list[dict[str, Any]]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # of this process: its threads are gone
        number = len(self.rows)
        indices = range(0, number, -(-number // MOST_ROWS))
        lengths = [(index, _lengths(row)) for index, row in zip(indices, self._columns(indices), strict=True)]
        names = dict.fromkeys(name for _, own in lengths for name in own)
        batches = []
        for name in [each for each in _COLUMNS if each in names] or list(names) or [""]:
            longest = sorted(lengths, key=lambda item: -item[1].get(name, 0))[: self.batch_size]
            chosen = [index for index, _ in longest]
            chosen += [index for index in range(number) if index not in chosen][: self.batch_size - len(chosen)]
            batch = self.collate([self.rows[index] for index in chosen])
            batches.append({key: _form(value) for key, value in dict(batch).items()})
        return batches

    def _columns(self, indices: Iterable[int]) -> Iterable[Any]:
        """The rows, of a `datasets.Dataset` only the columns that count."""
        rows = self.rows
        known = [name for name in _COLUMNS if name in getattr(rows, "column_names", ())]
        if known and hasattr(rows, "select_columns"):
            rows = rows.select_columns(known)
        return (rows[index] for index in indices)


def _lengths(row: Any) -> dict[str, int]:
    """Length of each column of a row that has one."""
    if not isinstance(row, Mapping):
        return {}
    return {
        name: len(value)
        for name, value in row.items()
        if (isinstance(value, torch.Tensor) and value.dim()) or isinstance(value, Sequence)
    }


def _form(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _read_elsewhere(longest: _Longest) -> list[dict[str, Any]]:
    """The item of `longest`, read in a forked process."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks
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
    except Exception as error:  # anybody's dataset and collator
        reason = str(error).strip().splitlines()
        raise NotReadableError(f"{type(error).__name__}: {reason[-1] if reason else ''}") from error
    return found  # type: ignore[no-any-return]


def _largest(batches: list[dict[str, Any]]) -> dict[str, Any]:
    """One micro-batch whose every size is the largest among `batches`."""
    found: dict[str, Any] = {}
    for name, first in batches[0].items():
        forms = [batch.get(name) for batch in batches]
        if not _is_form(first):
            found[name] = first
            continue
        shapes = [form[0] for form in forms if form is not None and _is_form(form) and len(form[0]) == len(first[0])]
        found[name] = torch.empty([max(sizes) for sizes in zip(*shapes, strict=True)], dtype=first[1], device="meta")
    return found


def _is_form(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype)
