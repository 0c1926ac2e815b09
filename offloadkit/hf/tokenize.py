"""Turns rows of text into rows of token ids, batch by batch. Every error names its row."""

from __future__ import annotations

import json
import logging
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any, cast

from offloadkit.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

IGNORED = -100
"""The label that no loss is computed for."""

_Columns = dict[str, list[Any]]
"""One batch of rows, by column."""


# -- labels


def label_names(dataset: Dataset, column: str, config: PreTrainedConfig) -> dict[int, str]:
    """The name of each class id, ids counted from 0.

    A `ClassLabel` column keeps its names. A model that knows all labels of the column keeps its own ids. Otherwise
    labels get ids in sorted order, so that the integers 0 ... n-1 stay as they are.

    Raises:
        DataError: a label is missing, is no string or whole number, or there is only one.
    """
    from datasets import ClassLabel

    values = dataset[column][:]
    for row, value in enumerate(values):
        if value is None:
            raise DataError(f"row {row} has no {column!r}: fill it in or drop the row")
        if not isinstance(value, str | int):
            raise DataError(
                f"row {row} has the {column} {value!r}: a label is a string or a whole number (there is no regression)"
            )
    found = sorted(set(values))
    if len(found) < 2:
        raise DataError(f"every row has the {column} {found[0]!r}: there is nothing to tell apart")
    feature = dataset.features[column]
    if isinstance(feature, ClassLabel):
        return dict(enumerate(feature.names))
    known = getattr(config, "label2id", None) or {}
    if all(str(value) in known for value in found):
        return {int(index): str(name) for index, name in (config.id2label or {}).items()}
    return {index: str(value) for index, value in enumerate(found)}


def label_ids(values: list[Any], indices: list[int], feature: Any, id2label: dict[int, str]) -> list[int]:
    """The id of each label in a batch.

    Args:
        indices: the rows that the labels stand in.
        feature: the column's feature; a `ClassLabel` names its numbers.

    Raises:
        DataError: a label that `id2label` does not know.
    """
    from datasets import ClassLabel

    label2id = {name: index for index, name in id2label.items()}
    ids = []
    for row, value in zip(indices, values, strict=True):
        name = str(value)
        if isinstance(feature, ClassLabel) and value in range(len(feature.names)):
            name = feature.names[value]
        if name not in label2id:
            raise DataError(f"row {row} has the label {name!r}; the model learns only {', '.join(list(label2id)[:20])}")
        ids.append(label2id[name])
    return ids


# -- token ids


@dataclass
class Tokenizing:
    """One pass over the rows: its inputs and its counts."""

    dataset: Dataset
    tokenizer: PreTrainedTokenizerBase
    task: str
    vocab_size: int
    max_input_length: int
    max_target_length: int
    id2label: dict[int, str] | None
    num_skipped: int = 0
    """Rows without a target (empty text, all labels -100), which are left out."""
    num_truncated: int = 0
    """Inputs and targets that were cut."""
    longest_input: int = 1
    longest_target: int = 1
    """Tokens, after cutting."""
    num_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens by column, without begin, end and padding."""
    num_unknown: Counter[str] = field(default_factory=Counter)
    """Those of `num_tokens` that are the unknown token."""

    def warn_of_losses(self) -> None:
        """Log how many rows were left out or cut, if any."""
        if self.num_skipped:
            logger.warning("%d of %d rows left out: they teach nothing", self.num_skipped, len(self.dataset))
        if self.num_truncated:
            lengths = f"max_input_length {self.max_input_length}, max_target_length {self.max_target_length}"
            logger.warning("%d inputs or targets cut (%s): raise these to keep them whole", self.num_truncated, lengths)

    def check_known(self) -> None:
        """Raise `DataError` if half of the tokens or more are the unknown one: nothing would be learned."""
        for column, number in self.num_unknown.items():
            if 2 * number >= self.num_tokens[column]:
                raise DataError(
                    f"the tokenizer does not know {number / self.num_tokens[column]:.0%} of the tokens in {column!r} "
                    f"(they became {self.tokenizer.unk_token!r}). Pass tokenizer= the one that the model was trained "
                    "with, or a model made for this text and these characters"
                )


def tokenize(run: Tokenizing, kind: str) -> Dataset:
    """The rows of `run.dataset` as token ids, without rows that have no target.

    A dataset in RAM stays there. One in files is written to a temporary folder, never beside its own files. The random
    fingerprint saves hashing the tokenizer.

    Args:
        run: its counts are filled in. Its dataset gives plain Python values.
        kind: the column set, a key of `_TOKENIZERS`.

    Raises:
        DataError: a field is missing or has the wrong type, or a token id lies beyond the vocabulary.
    """
    from datasets.fingerprint import generate_random_fingerprint

    def rows_that_teach(batch: _Columns, indices: list[int]) -> _Columns:
        tokens = _TOKENIZERS[kind](run, batch, indices)
        _check_token_ids(run, tokens, indices)
        if kind != "tokenized":
            _count_unknown(run, tokens)
        keep = [_num_learned(run.task, labels) > 0 for labels in tokens["labels"]]
        run.num_skipped += keep.count(False)
        run.longest_input = max(run.longest_input, *map(len, tokens["input_ids"]))
        if run.task != "classification":
            run.longest_target = max(run.longest_target, *map(len, tokens["labels"]))
        return {name: list(compress(column, keep)) for name, column in tokens.items()}

    with _temporary_files():
        tokenized = run.dataset.map(
            rows_that_teach,
            batched=True,
            with_indices=True,
            remove_columns=run.dataset.column_names,
            new_fingerprint=generate_random_fingerprint(),
            desc="Tokenizing",
        )
        return cast("Dataset", tokenized)


def _pairs(run: Tokenizing, batch: _Columns, indices: list[int]) -> _Columns:
    tokens = _encode(run, _strings(batch, "input", indices), run.max_input_length)
    tokens["labels"] = _encode(run, _strings(batch, "target", indices), run.max_target_length, target=True)["input_ids"]
    return tokens


def _text(run: Tokenizing, batch: _Columns, indices: list[int]) -> _Columns:
    """Each row ends with the end token if it fits, so that the model learns to stop."""
    rows = _encode(run, _strings(batch, "text", indices), run.max_input_length)["input_ids"]
    eos = run.tokenizer.eos_token_id
    for row in rows:
        if eos is not None and 0 < len(row) < run.max_input_length and row[-1] != eos:
            row.append(eos)
    return _causal_columns(rows)


def _messages(run: Tokenizing, batch: _Columns, indices: list[int]) -> _Columns:
    if run.tokenizer.chat_template is None:
        raise DataError(
            "the tokenizer has no chat template, so `messages` cannot become text: use the instruct version, set "
            "tokenizer.chat_template, or write the conversation into a `text` column"
        )
    rows = []
    for index, messages in zip(indices, batch["messages"], strict=True):
        messages = _parsed(messages)
        if not isinstance(messages, list) or not messages:
            raise DataError(f"row {index} has no messages: fill them in or drop the row")
        for message in messages:
            if not isinstance(message, dict) or not message.get("role") or message.get("content") is None:
                raise DataError(f"row {index} has a message without role or content: {message!r}")
        text = run.tokenizer.apply_chat_template(messages, tokenize=False)
        row = run.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        run.num_truncated += len(row) > run.max_input_length
        rows.append(row[: run.max_input_length])
    return _causal_columns(rows)


def _parsed(messages: Any) -> Any:
    """Messages that were read as JSON text are parsed; anything else is returned as it is."""
    try:
        return json.loads(messages) if isinstance(messages, str) else messages
    except json.JSONDecodeError:
        return messages


def _labelled_text(run: Tokenizing, batch: _Columns, indices: list[int]) -> _Columns:
    tokens = _encode(run, _strings(batch, "text", indices), run.max_input_length)
    tokens["labels"] = label_ids(batch["label"], indices, run.dataset.features["label"], run.id2label or {})
    return tokens


def _already_tokenized(run: Tokenizing, batch: _Columns, indices: list[int]) -> _Columns:
    """Token ids are taken as they are, not cut."""
    for name in ("input_ids", "labels"):
        for index, value in zip(indices, batch.get(name, []), strict=False):
            if value is None:
                raise DataError(f"row {index} has no {name!r}: fill it in or drop the row")
    known = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "labels")
    tokens = {name: batch[name] for name in known if name in batch}
    tokens.setdefault("attention_mask", _all_ones(tokens["input_ids"]))
    if run.task == "classification":
        tokens["labels"] = label_ids(batch["labels"], indices, run.dataset.features["labels"], run.id2label or {})
    elif "labels" not in tokens:
        tokens["labels"] = [list(row) for row in tokens["input_ids"]]
    return tokens


_TOKENIZERS: dict[str, Callable[[Tokenizing, _Columns, list[int]], _Columns]] = {
    "pairs": _pairs,
    "text": _text,
    "messages": _messages,
    "labelled text": _labelled_text,
    "tokenized": _already_tokenized,
}


def _causal_columns(rows: list[list[int]]) -> _Columns:
    return {"input_ids": rows, "attention_mask": _all_ones(rows), "labels": [list(row) for row in rows]}


def _all_ones(rows: list[list[int]]) -> list[list[int]]:
    return [[1] * len(row) for row in rows]


def _encode(run: Tokenizing, texts: list[str], max_length: int, *, target: bool = False) -> _Columns:
    """Token ids cut to `max_length` by the tokenizer, which keeps special tokens."""
    where = {"text_target": texts} if target else {"text": texts}
    tokens = dict(run.tokenizer(**where, truncation=True, max_length=max_length, verbose=False))
    for text, row in zip(texts, tokens["input_ids"], strict=True):
        if len(row) == max_length:
            again = {"text_target": text} if target else {"text": text}
            run.num_truncated += len(run.tokenizer(**again, verbose=False)["input_ids"]) > max_length
    return tokens


def _strings(batch: _Columns, column: str, indices: list[int]) -> list[str]:
    for index, value in zip(indices, batch[column], strict=True):
        if value is None:
            raise DataError(f"row {index} has no value in {column!r}: correct or drop the row")
        if not isinstance(value, str):
            name = type(value).__name__
            article = "an" if name[0] in "aeiou" else "a"
            raise DataError(
                f"row {index} has {article} {name} instead of a string in {column!r}: write it as text, such as "
                f"{reprlib.repr(str(value))}"
            )
    return batch[column]


def _num_learned(task: str, labels: Any) -> int:
    """Number of labels in a row that have a loss. A causal model never predicts a row's first token."""
    if task == "classification":
        return 1
    return sum(label != IGNORED for label in (labels[1:] if task == "causal" else labels))


def _check_token_ids(run: Tokenizing, tokens: _Columns, indices: list[int]) -> None:
    """Raise `DataError` for an id without an embedding: a GPU would fail without saying where."""
    for column in ["input_ids"] + (["labels"] if run.task != "classification" else []):
        for index, row in zip(indices, tokens[column], strict=True):
            ids = [token for token in row if token != IGNORED] if column == "labels" else row
            if ids and (max(ids) >= run.vocab_size or min(ids) < 0):
                worst = max(ids) if max(ids) >= run.vocab_size else min(ids)
                raise DataError(
                    f"row {index} has the token id {worst} in {column!r}, and the model's vocabulary is 0 ... "
                    f"{run.vocab_size - 1}: is the tokenizer the model's own?"
                )


def _count_unknown(run: Tokenizing, tokens: _Columns) -> None:
    """Add to the run's counts. If the unknown token has another role too (GPT-2), nothing is counted."""
    tokenizer = run.tokenizer
    special = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")
    marks = {getattr(tokenizer, name) for name in special}
    if tokenizer.unk_token_id is None or tokenizer.unk_token_id in marks:
        return
    for column in ["input_ids"] + (["labels"] if run.task == "seq2seq" else []):
        for row in tokens[column]:
            if unknown := row.count(tokenizer.unk_token_id):
                run.num_unknown[column] += unknown
            run.num_tokens[column] += len(row) - sum(row.count(mark) for mark in marks)


@contextmanager
def _temporary_files() -> Iterator[None]:
    """Let `map` write its files to a folder that is removed when Python exits, by a switch of `datasets`."""
    import datasets

    was_enabled = datasets.is_caching_enabled()
    datasets.disable_caching()
    try:
        yield
    finally:
        if was_enabled:
            datasets.enable_caching()
