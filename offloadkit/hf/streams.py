"""Rows without a length, tokenized while they are trained on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from offloadkit.errors import DataError
from offloadkit.facts.units import kind_of
from offloadkit.hf.columns import FOR_TEMPLATES
from offloadkit.hf.read import as_row, load_dataset_like
from offloadkit.hf.tokenize import Tokenizing, rows_that_teach

if TYPE_CHECKING:
    from datasets import Dataset

NUM_FIRST = 64
"""Rows read before training, for columns, task and widths."""
_NUM_TOGETHER = 16
"""Rows tokenized at a time."""
_MOST_SILENT = 10_000
"""So many rows without a target end the training, which an endless stream of them would not."""


class Rows:
    """The rows of a stream as dicts. Each iteration begins again at the first row."""

    def __init__(self, data: Any) -> None:
        """Raises `DataError` if `data` is an `IterableDatasetDict` without the split "train"."""
        if isinstance(data, dict):
            if "train" not in data:
                raise DataError(f"the IterableDatasetDict has no split 'train', it has {', '.join(data)}: pass one")
            data = data["train"]
        self._data = data

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = self._data() if callable(self._data) else self._data
        if not hasattr(rows, "__iter__"):
            raise DataError(f"the function of rows returned {kind_of(rows)}: write it with `yield`")
        return (as_row(row, index) for index, row in enumerate(rows))

    def of_pass(self, number: int) -> Iterator[dict[str, Any]]:
        """The rows, shuffled for this pass if the stream shuffles."""
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(number)
        return iter(self)

    def first(self) -> Dataset:
        """The first `NUM_FIRST` rows. Raises `DataError` if there are none, or they do not form a table."""
        from datasets import ClassLabel

        rows = load_dataset_like(list(islice(self.of_pass(0), NUM_FIRST)))
        for name, feature in (getattr(self._data, "features", None) or {}).items():
            if isinstance(feature, ClassLabel) and name in rows.column_names:
                rows = rows.cast_column(name, feature)
        return rows


class EndlessRows(IterableDataset[dict[str, Any]]):
    """Rows without an end, which all ranks read alike; each trains on its micro-batches."""


class TokenizedStream(EndlessRows):
    """Tokenized rows of a stream, which begins again where it ends, so that a resumed run skips what it has learned."""

    def __init__(self, rows: Rows, run: Tokenizing) -> None:
        """`run`: how the rows are tokenized; its dataset is the stream's first rows."""
        self._rows, self._run = rows, run

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Raises `DataError` if the rows cannot be tokenized, are longer than planned, or cannot be read again, or many
        of them have nothing to learn.
        """
        worker = get_worker_info()
        number, begun, silent = 0, -1, 0
        while worker is None or worker.id == 0:  # else each worker would read all rows
            rows, begun, before = self._rows.of_pass(begun + 1), begun + 1, number
            while batch := list(islice(rows, _NUM_TOGETHER)):
                found = list(self._tokenized(batch, number))
                yield from found
                number += len(batch)
                silent = 0 if found else silent + len(batch)
                if silent >= _MOST_SILENT:
                    raise DataError(
                        f"the last {silent:,} rows of the stream have nothing to learn, as far as row {number - 1:,}: "
                        "their text or target is empty, or fills max_input_length"
                    )
            if number == before:
                raise DataError(
                    f"the stream of rows ended after {number} rows and cannot be read again: pass a function that "
                    "begins again each time it is called"
                )

    def _tokenized(self, batch: list[dict[str, Any]], begin: int) -> Iterator[dict[str, Any]]:
        run, indices = self._run, list(range(begin, begin + len(batch)))
        names = dict.fromkeys((*run.dataset.column_names, *FOR_TEMPLATES))  # the first rows may have no tools
        columns = {name: [row.get(name) for row in batch] for name in names}
        tokens = rows_that_teach(run, columns, indices)
        run.cut_off.clear()
        for values in zip(*tokens.values(), strict=True):
            row = dict(zip(tokens, values, strict=True))
            _check_length(row["input_ids"], run.max_input_length, "max_input_length", begin)
            if run.task == "seq2seq":
                _check_length(row["labels"], run.max_target_length, "max_target_length", begin)
            yield row


def _check_length(tokens: list[int], most: int, option: str, begin: int) -> None:
    if len(tokens) > most:
        raise DataError(
            f"one of the rows from {begin} on has {len(tokens):,} tokens, and the plan is for {option}={most:,}: raise "
            f"{option}, or cut the rows"
        )
