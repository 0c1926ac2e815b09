"""Packs: rows of a decoder together in rows of a fixed number of tokens, for `packed.py`.

Which rows share a pack follows from the rows' lengths, the length of a pack and the seed alone: rows shuffled by the
seed and sorted by length, longest first, each go into the fullest pack that has room (best fit). A stream is packed in
windows of `_WINDOW` rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from offloadkit.errors import ConfigError, DataError
from offloadkit.facts.units import counted
from offloadkit.hf.adapters import has_adapters
from offloadkit.hf.data import PreparedData, default_input_length
from offloadkit.hf.masks import CollatorWrapper
from offloadkit.hf.packed import planned_row, why_not_packed
from offloadkit.hf.streams import EndlessRows, TokenizedStream
from offloadkit.hf.tokenize import IGNORED
from offloadkit.hf.trained import print_on_rank_0
from offloadkit.hf.widths import row_lengths

if TYPE_CHECKING:
    from datasets import Dataset as Rows

_WINDOW = 128
"""Rows of a stream that are packed together."""
_RECORD = "packing"


def best_fit(lengths: Sequence[int], capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Rows by pack: each row, longest first and then in `order`, goes into the fullest pack that has room."""
    packs: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    """Packs by tokens of room."""
    rooms = 0
    """Bit n is set if packs have room for n tokens."""
    for row in sorted(order, key=lambda row: -lengths[row]):
        length = lengths[row]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            pack = with_room[room].pop()
            rooms ^= 0 if with_room[room] else 1 << room
        else:
            room, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(row)
        with_room[room - length].append(pack)
        rooms |= 1 << (room - length)
    return packs


def _joined(rows: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """One row: input_ids, labels, and position_ids that begin again with each row. A row's first token has no label."""
    return {
        "input_ids": [token for row in rows for token in row["input_ids"]],
        "labels": [label for row in rows for label in (IGNORED, *row["labels"][1:])],
        "position_ids": [place for row in rows for place in range(len(row["input_ids"]))],
    }


class PackedRows(Dataset[dict[str, Any]]):
    """Packs of tokenized rows.

    Attributes:
        share_padding: padding as a share of all tokens.
        planned_length: tokens of equal rows whose attention takes as many FLOPs.
    """

    def __init__(self, rows: Rows, length: int, seed: int) -> None:
        """`length`: tokens of a pack, at least the longest row's."""
        found = row_lengths(rows, ("input_ids",))
        assert found is not None, "the rows are tokenized"
        lengths = found[:, 0].tolist()
        order = np.random.RandomState(seed).permutation(len(lengths)).tolist()  # the same in every version of numpy
        self.rows, self.length = rows, length
        self.packs = best_fit(lengths, length, order)
        total = len(self.packs) * length
        self.share_padding = 1 - sum(lengths) / total
        padding = [length - sum(lengths[row] for row in pack) for pack in self.packs]
        self.planned_length = planned_row([*lengths, *padding])
        self.fingerprint = zlib.crc32(repr(self.packs).encode())

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        columns = self.rows[self.packs[index]]
        return _joined(
            [
                {"input_ids": ids, "labels": labels}
                for ids, labels in zip(columns["input_ids"], columns["labels"], strict=True)
            ]
        )


class PackedStream(EndlessRows):
    """Packs of the rows of a stream, in the stream's order but for the order within a window."""

    def __init__(self, rows: TokenizedStream, length: int) -> None:
        self.rows, self.length = rows, length

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        """Raises `DataError` as the stream does."""
        rows, waiting = iter(self.rows), list[dict[str, Any]]()
        while True:
            error: Exception | None = None
            try:
                while len(waiting) < _WINDOW:
                    waiting.append(next(rows))
            except (StopIteration, DataError) as end:
                error = end
            lengths = [len(row["input_ids"]) for row in waiting]
            packs = best_fit(lengths, self.length, range(len(waiting)))
            left: list[int] = []
            if error is None and len(packs) > 1:  # the emptiest pack waits for rows of the next window
                left = min(packs, key=lambda pack: sum(lengths[row] for row in pack))
            for pack in packs:
                if pack is not left:
                    yield _joined([waiting[row] for row in pack])
            waiting = [waiting[row] for row in sorted(left)]
            if isinstance(error, DataError):
                raise error
            if error is not None:
                return


@dataclass(frozen=True)
class PackingCollator(CollatorWrapper):
    """Pads packs to one length. The padding of a pack is one more row, without labels. Rows without positions go to
    `collate`.
    """

    length: int = field(kw_only=True)

    padding: int = field(kw_only=True)
    """Token id of padding."""

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        """Packs become input_ids, labels and position_ids, int64 [packs, length]."""
        if "position_ids" not in rows[0]:
            return self.collate(rows)
        missing = [self.length - len(row["input_ids"]) for row in rows]
        values = {
            "input_ids": [[self.padding] * number for number in missing],
            "labels": [[IGNORED] * number for number in missing],
            "position_ids": [list(range(number)) for number in missing],
        }
        return {
            name: torch.tensor([[*row[name], *padding] for row, padding in zip(rows, paddings, strict=True)])
            for name, paddings in values.items()
        }


def check_packing(source: Any) -> None:
    """Raise `ConfigError` if rows cannot be packed for the model of `source`, a `ModelSource`."""
    if source.task == "classification":
        raise ConfigError("packing=True needs a decoder: a classifier has one label for each row, and none for a pack")
    model = source.on_meta
    if why := why_not_packed(model.get_base_model() if has_adapters(model) else model):
        raise ConfigError(f"packing=True keeps rows apart by attention and positions, and {why}: leave packing out")


def packed(data: PreparedData, config: Any, tokenizer: Any, *, max_input_length: int | None, seed: int) -> PreparedData:
    """`data` in packs of `max_input_length` tokens (None: the default of `finetune`), or of the longest row's.

    Raises:
        ConfigError: the data is not of a causal language model.
    """
    if data.task != "causal":
        raise ConfigError(f"packing=True needs rows of a causal language model, and these rows are for {data.task}")
    length = max(max_input_length or default_input_length(config, data.task), data.longest_input)
    rows: Any
    if isinstance(data.dataset, TokenizedStream):
        rows = PackedStream(data.dataset, length)
    else:
        rows = PackedRows(data.dataset, length, seed)
        print(
            f"{counted(len(data.dataset), 'row')} packed into {counted(len(rows), 'row')} of {length:,} tokens: "
            f"{rows.share_padding:.1%} of all tokens are padding",
            flush=True,
        )
    padding = tokenizer.pad_token_id
    collator: Any = PackingCollator(data.collator, length=length, padding=0 if padding is None else padding)
    return replace(data, dataset=rows, collator=collator, longest_input=length, longest_target=length)


def planned_length(rows: Any) -> int | None:
    """`PackedRows.planned_length`; None for a stream, whose rows are not known, and rows that are not packed."""
    return rows.planned_length if isinstance(rows, PackedRows) else None


def share_of_padding(rows: Any) -> float | None:
    return rows.share_padding if isinstance(rows, PackedRows) else None


def record(rows: Any) -> dict[str, Any]:
    """For `run.json`; empty if `rows` are not packed."""
    if isinstance(rows, PackedRows):
        found = {"length": rows.length, "packs": len(rows), "rows": len(rows.rows), "crc32": rows.fingerprint}
        return {_RECORD: found}
    return {_RECORD: {"length": rows.length, "window": _WINDOW}} if isinstance(rows, PackedStream) else {}


def compare(trainer: Any, values: dict[str, Any]) -> None:
    """Print a warning if a run with these values of `run.json` had other packs."""
    if values and values.get(_RECORD) != record(trainer.train_dataset).get(_RECORD):
        print_on_rank_0(
            trainer,
            "rows are packed differently than before the checkpoint, because packing, training rows, max_input_length "
            "or seed differ: the rest of the epoch repeats some rows and leaves some out",
        )
