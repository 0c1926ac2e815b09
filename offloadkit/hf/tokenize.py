"""Turns rows of text into rows of token ids, batch by batch. Every error names its row."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import signature
from itertools import compress
from typing import TYPE_CHECKING, Any, cast

from offloadkit.errors import DataError, shown
from offloadkit.facts.files import parse_json
from offloadkit.hf.columns import FOR_TEMPLATES, LEARNED, Columns, strings
from offloadkit.hf.conversations import check_calls, conversation, rendered, template_of

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

IGNORED = -100

_Columns = dict[str, list[Any]]


# -- labels


def label_names(dataset: Dataset, column: str, config: PreTrainedConfig) -> dict[int, str]:
    """Name of each class id.

    A `ClassLabel` column keeps its names, and a model that knows all labels of the column keeps its ids. Other labels
    get ids from 0 in sorted order, so integers 0 ... n-1 stay unchanged.

    Raises:
        DataError: a label is missing or neither string nor whole number, or all labels are equal.
    """
    values = dataset[column][:]
    for row, value in enumerate(values):
        if value is None:
            raise DataError(f"row {row} has no {column!r}: fill it in or drop the row")
        if not isinstance(value, str | int):
            raise DataError(
                f"row {row} has the {column} {value!r}: a label must be a string or a whole number (regression is not "
                "supported)"
            )
    found = sorted(set(values), key=int if all(str(value).isdecimal() for value in values) else None)
    if len(found) < 2:
        raise DataError(f"every row has the {column} {found[0]!r}: at least two labels are needed")
    return known_names(dataset, column, config) or {index: str(value) for index, value in enumerate(found)}


def known_names(dataset: Dataset, column: str, config: PreTrainedConfig) -> dict[int, str] | None:
    """Names that a `ClassLabel` column or the model gives; None if neither knows all labels of the rows."""
    from datasets import ClassLabel

    feature = dataset.features[column]
    if isinstance(feature, ClassLabel):
        return dict(enumerate(feature.names))
    known = getattr(config, "label2id", None) or {}
    if all(str(value) in known for value in dataset[column]):
        return {int(index): str(name) for index, name in (config.id2label or {}).items()}
    return None


def label_ids(values: list[Any], indices: list[int], feature: Any, id2label: dict[int, str]) -> list[int]:
    """Id of each label in a batch; `indices` are row numbers for messages. A `ClassLabel` `feature` has its names."""
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
class Cut:
    """Tokens that a maximum length cuts off."""

    option: str
    """The argument of `finetune` that is the maximum."""
    most: int
    what: str
    """Name of the cut texts in the message."""
    limit: int | None = None
    """The model's positions, if it has no more than these; no option can be larger."""
    num_rows: int = 0
    num_tokens: int = 0
    num_lost: int = 0
    """Tokens cut off, of `num_tokens` in all rows."""
    longest: int = 0

    def add(self, length: int) -> None:
        self.num_tokens += length
        self.longest = max(self.longest, length)
        if length > self.most:
            self.num_rows += 1
            self.num_lost += length - self.most

    def in_words(self, num_rows: int) -> str:
        name, remedy = f"{self.option}={self.most}", f"raise {self.option} to keep them"
        if self.limit is not None and self.most >= self.limit:
            name, remedy = f"the model's {self.limit:,} positions", "write them as several shorter rows"
        return (
            f"{self.num_rows:,} of {num_rows:,} {self.what} are longer than {name} and lose {self.num_lost:,} of all "
            f"{self.num_tokens:,} tokens: {remedy} (the longest has {self.longest:,})"
        )


@dataclass
class Tokenizing:
    dataset: Dataset
    columns: Columns
    tokenizer: PreTrainedTokenizerBase
    task: str
    vocab_size: int
    max_input_length: int
    max_target_length: int
    id2label: dict[int, str] | None
    num_positions: int | None = None
    """The model's learned position embeddings; None: it computes positions."""
    num_without_tools: int = 0
    """Rows with tools that the chat template does not write."""
    num_skipped: int = 0
    """Rows left out because they have no target (empty text, all labels -100)."""
    cut_off: list[int] = field(default_factory=list)
    """Rows left out because their input alone fills the maximum length."""
    longest_input: int = 1
    longest_target: int = 1
    """Tokens, after truncation."""
    total_input: int = 0
    total_target: int = 0
    num_attended: int = 0
    """Input tokens that the rows' attention masks do not mask."""
    num_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens by column, without begin, end and padding tokens."""
    num_unknown: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        inputs = "inputs" if self.task == "seq2seq" else "rows"
        self.inputs_cut = Cut("max_input_length", self.max_input_length, inputs, self.num_positions)
        self.targets_cut = Cut("max_target_length", self.max_target_length, "targets", self.num_positions)

    def warn_of_losses(self) -> None:
        if self.num_skipped:
            logger.warning("%d of %d rows left out: they have nothing to learn", self.num_skipped, len(self.dataset))
        if self.cut_off:
            logger.warning("%d of %d rows left out: %s", len(self.cut_off), len(self.dataset), self.why_cut_off())
        if self.num_without_tools:
            logger.warning(UNWRITTEN_TOOLS, self.num_without_tools, len(self.dataset))
        for each in (self.inputs_cut, self.targets_cut):
            if each.num_rows:
                logger.warning("%s", each.in_words(len(self.dataset)))

    def why_cut_off(self) -> str:
        shown = ", ".join(map(str, self.cut_off[:5])) + (", ..." if len(self.cut_off) > 5 else "")
        return (
            f"their input alone takes all of max_input_length {self.max_input_length}, and nothing of the target is "
            f"left (rows {shown}): raise max_input_length, or shorten their input"
        )

    def check_known(self) -> None:
        """Raise `DataError` if at least half of a column's tokens are unknown."""
        for column, number in self.num_unknown.items():
            if 2 * number >= self.num_tokens[column]:
                raise DataError(
                    f"the tokenizer does not know {number / self.num_tokens[column]:.0%} of the tokens in {column!r} "
                    f"(they became {self.tokenizer.unk_token!r}). Pass tokenizer= the one that the model was trained "
                    "with, or a model made for this text and these characters"
                )


def tokenize(run: Tokenizing) -> Dataset:
    """Tokenize `run.dataset`, leaving out rows without a target, and fill in the counts of `run`.

    A dataset in RAM stays there; a dataset in files is written to a temporary folder, never next to its own files. The
    random fingerprint avoids hashing the tokenizer.

    Raises:
        DataError: a field is missing or has the wrong type, or a token id is outside the vocabulary.
    """
    from datasets.fingerprint import generate_random_fingerprint

    with _temporary_files():
        tokenized = run.dataset.map(
            partial(rows_that_teach, run),
            batched=True,
            with_indices=True,
            remove_columns=run.dataset.column_names,
            new_fingerprint=generate_random_fingerprint(),
            desc="Tokenizing",
        )
        return cast("Dataset", tokenized)


def rows_that_teach(run: Tokenizing, batch: _Columns, indices: list[int]) -> _Columns:
    """Tokenize the columns of a batch, leaving out rows without a target; adds to the counts of `run`.

    Args:
        indices: row numbers, for messages.

    Raises:
        DataError: see `tokenize`.
    """
    kind = run.columns.kind
    tokens = _TOKENIZERS[kind](run, batch, indices)
    _check_token_ids(run, tokens, indices)
    if kind != "tokenized":
        _count_unknown(run, tokens)
    keep = [_num_learned(run.task, labels) > 0 for labels in tokens["labels"]]
    cut_off = set(run.cut_off)
    run.num_skipped += sum(not teaches and index not in cut_off for index, teaches in zip(indices, keep, strict=True))
    run.longest_input = max(run.longest_input, *map(len, tokens["input_ids"]))
    run.total_input += sum(map(len, tokens["input_ids"]))
    run.num_attended += sum(map(sum, tokens["attention_mask"]))
    if run.task != "classification":
        run.longest_target = max(run.longest_target, *map(len, tokens["labels"]))
        run.total_target += sum(map(len, tokens["labels"]))
    return {name: list(compress(column, keep)) for name, column in tokens.items()}


def _pairs(run: Tokenizing, batch: _Columns, indices: list[int]) -> _Columns:
    if run.task == "causal":
        return _prompts(run, batch, indices)
    tokens = _encode(run, run.columns.texts(batch, indices), run.max_input_length)
    targets = strings(batch[run.columns.target], run.columns.target, indices)
    tokens["labels"] = _encode(run, targets, run.max_target_length, target=True)["input_ids"]
    return tokens


def _prompts(run: Tokenizing, batch: _Columns, indices: list[int]) -> _Columns:
    """Input and target joined in one row of at most `max_input_length`; labels of the input are -100."""
    whole = _with_chat_template if run.tokenizer.chat_template is not None else _one_after_the_other
    found = whole(run, batch, indices)
    return _learned_in_part(run, indices, ((row, [IGNORED] * prompt + row[prompt:]) for prompt, row in found))


def _learned_in_part(run: Tokenizing, indices: list[int], found: Iterable[tuple[list[int], list[int]]]) -> _Columns:
    """Cut rows (tokens, labels) to `max_input_length`; rows of which no label is left count in `run.cut_off`."""
    rows, labels = [], []
    for index, (row, row_labels) in zip(indices, found, strict=True):
        length, teaches = len(row), bool(_num_learned(run.task, row_labels))
        row, row_labels = row[: run.max_input_length], row_labels[: run.max_input_length]
        if teaches and length > run.max_input_length and not _num_learned(run.task, row_labels):
            run.cut_off.append(index)
        else:
            run.inputs_cut.add(length)
        rows.append(row)
        labels.append(row_labels)
    return {"input_ids": rows, "attention_mask": _all_ones(rows), "labels": labels}


def _one_after_the_other(run: Tokenizing, batch: _Columns, indices: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Rows without a chat template, as (number of input tokens, tokens): input, target and end token with nothing
    between them.

    The input is tokenized by itself, as it will be when the trained model continues it.
    """
    for name in (*run.columns.inputs, run.columns.target):
        if any(map(_are_messages, batch[name])):
            raise DataError(NO_TEMPLATE.format(column=name))
    prompts = run.columns.texts(batch, indices)
    targets = strings(batch[run.columns.target], run.columns.target, indices)
    eos = run.tokenizer.eos_token_id
    end = [] if eos is None else [eos]

    def ids(texts: list[str], **options: Any) -> list[list[int]]:
        found = run.tokenizer(texts, verbose=False, **options)["input_ids"]
        return [row[:-1] if row[-1:] == end else row for row in found]  # some tokenizers append it themselves

    together = ids([prompt + target for prompt, target in zip(prompts, targets, strict=True)])
    apart = ids(targets, add_special_tokens=False)
    for prompt, row, target in zip(ids(prompts), together, apart, strict=True):
        merged = row[: len(prompt)] != prompt  # a token spans the end of the input and the start of the target
        yield len(prompt), (prompt + target if merged else row) + end


def _with_chat_template(run: Tokenizing, batch: _Columns, indices: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Rows through the chat template, as (number of input tokens, tokens): the input is a user message, the target an
    assistant message with all tokens that the template adds. Lists of messages stay unchanged.
    """
    texts = []
    both, options = _both_messages(run, batch, indices), _template_options(run, batch, indices)
    for index, prompt, target, given in zip(indices, *both, options, strict=True):
        write: Callable[..., str] = partial(rendered, run.tokenizer, **given)
        whole, opened = write(prompt + target, index), write(prompt, index, add_generation_prompt=True)
        if not whole.startswith(opened):  # some templates change the answer's start when it follows
            opened = write(prompt, index)
        if not whole.startswith(opened):
            raise DataError(
                f"row {index}: the tokenizer's chat template writes the input differently if an answer follows, so the "
                f"start of {run.columns.target!r} is unknown: set tokenizer.chat_template to one that does not, or "
                "give the rows as `messages`"
            )
        for at, message in enumerate(target, len(prompt)):
            check_calls(message, whole[len(opened) :], index, at)
        texts.append((opened, whole))
    if not texts:
        return
    begun, rows = (
        run.tokenizer(list(part), add_special_tokens=False, verbose=False)["input_ids"]
        for part in zip(*texts, strict=True)
    )
    for start, row in zip(begun, rows, strict=True):
        differs = (at for at, (one, other) in enumerate(zip(start, row, strict=False)) if one != other)
        yield next(differs, min(len(start), len(row))), row


def _both_messages(run: Tokenizing, batch: _Columns, indices: list[int]) -> tuple[list[Any], list[Any]]:
    both = []
    for columns, role in ((run.columns, "user"), (Columns("text", (run.columns.target,)), "assistant")):
        name, alone = columns.inputs[0], len(columns.inputs) == 1 and not columns.template
        if alone and any(map(_are_messages, batch[name])):
            found = [messages_of(value, name, index) for index, value in zip(indices, batch[name], strict=True)]
        else:
            found = [[{"role": role, "content": text}] for text in columns.texts(batch, indices)]
        both.append(found)
    return both[0], both[1]


def _text(run: Tokenizing, batch: _Columns, indices: list[int]) -> _Columns:
    """Append the end token if it fits, so that the model learns to stop."""
    rows = _encode(run, run.columns.texts(batch, indices), run.max_input_length)["input_ids"]
    eos = run.tokenizer.eos_token_id
    for row in rows:
        if eos is not None and 0 < len(row) < run.max_input_length and row[-1] != eos:
            row.append(eos)
    return _causal_columns(rows)


def _messages(run: Tokenizing, batch: _Columns, indices: list[int]) -> _Columns:
    """Conversations through the chat template. All messages of the assistant have labels, all other messages -100."""
    (column,) = run.columns.inputs
    if run.tokenizer.chat_template is None:
        raise DataError(NO_TEMPLATE.format(column=column))
    conversations = [messages_of(value, column, index) for index, value in zip(indices, batch[column], strict=True)]
    options = _template_options(run, batch, indices)
    found = (
        conversation(run.tokenizer, each, index, **given)
        for index, each, given in zip(indices, conversations, options, strict=True)
    )
    labelled = (
        (row, [token if is_learned else IGNORED for token, is_learned in zip(row, learned, strict=True)])
        for row, learned in found
    )
    return _learned_in_part(run, indices, labelled)


def _template_options(run: Tokenizing, batch: _Columns, indices: list[int]) -> list[dict[str, Any]]:
    """The arguments of the chat template for each row. Rows of texts have none."""
    named = (*run.columns.inputs, run.columns.target)
    if not any(_are_messages(value) for name in named if name in batch for value in batch[name]):
        return [{} for _ in indices]
    columns = {name: batch[name] for name in FOR_TEMPLATES if name in batch}
    found = [template_options({name: columns[name][at] for name in columns}, row) for at, row in enumerate(indices)]
    run.num_without_tools += sum(lacks_tools(run.tokenizer, options) for options in found)
    return found


def template_options(row: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The arguments of the chat template that a row's columns give, as TRL reads them.

    Raises `DataError` if a column holds something else.
    """
    tools, others = (parsed(row.get(name)) or None for name in FOR_TEMPLATES)
    if tools and not (isinstance(tools, list) and all(isinstance(each, dict) or callable(each) for each in tools)):
        raise DataError(
            f"row {index} has {shown(tools)} in 'tools': write a list of JSON schemas, such as "
            '[{"type": "function", "function": {"name": ...}}], or its JSON text'
        )
    if others and not isinstance(others, dict):
        raise DataError(
            f"row {index} has {shown(others)} in 'chat_template_kwargs': write a dict of arguments of the chat template"
        )
    if ours := sorted(_set_by_us().intersection(others or ())):
        raise DataError(
            f"row {index} has {ours[0]!r} in 'chat_template_kwargs', which finetune sets itself: drop it there"
        )
    return {**({"tools": tools} if tools else {}), **(others or {})}


@cache
def _set_by_us() -> set[str]:
    """Arguments of `apply_chat_template` that are not for the template."""
    from transformers import PreTrainedTokenizerBase

    names = {"messages", *signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
    return names - {"chat_template", "documents", "kwargs", "tools"}


def lacks_tools(tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> bool:
    """Whether the chat template writes no tools, and there are some."""
    return "tools" in options and "tools" not in template_of(tokenizer, options)


UNWRITTEN_TOOLS = (
    "%d of %d rows have `tools` that the tokenizer's chat template does not write: set tokenizer.chat_template to one "
    "that does, or drop the column"
)
NO_TEMPLATE = (
    "the tokenizer has no chat template, so `{column}` cannot become text: use the instruct version, set "
    "tokenizer.chat_template, or write the conversation into a `text` column"
)
_MEDIA = ("audio", "audio_url", "image_url", "input_audio", "video", "video_url")
"""Types of a message's parts that are neither text nor an image, by the names of transformers and of web APIs."""
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}


def parts_of(message: dict[str, Any]) -> list[Any]:
    """The parts of a message's content: a text, or dicts with a type."""
    content = message["content"]
    return content if isinstance(content, list) else [content]


def type_of(part: Any) -> str:
    """The type of a part of a message: "text", "image", or another one."""
    return str(part.get("type")) if isinstance(part, dict) else "text"


def messages_of(value: Any, column: str, row: int, *, with_images: bool = False) -> list[dict[str, Any]]:
    """A conversation as role/content dicts; content is None if a message has `tool_calls` alone. Raises `DataError` if
    it is empty, or a message lacks role or content, has sound or a video, or has an image and `with_images` is False.
    """
    messages = parsed(value)
    if not isinstance(messages, list) or not messages:
        raise DataError(f"row {row} has no {column}: fill them in or drop the row")
    found = []
    for message in messages:
        if isinstance(message, dict) and message.get("from") and message.get("role") is None:
            role = str(message["from"])
            message = {"role": _ROLES.get(role, role), "content": message.get("value")}
        has_content = isinstance(message, dict) and (message.get("content") is not None or message.get("tool_calls"))
        if not has_content or not message.get("role"):
            raise DataError(f"row {row} has a message without role or content: {shown(message)}")
        kinds = {type_of(part) for part in parts_of(message)}
        if media := sorted(kinds & {*_MEDIA}):
            raise DataError(
                f"row {row} has a part of the type {media[0]!r} in {column!r}, and finetune learns text and images "
                '({"type": "image"}) alone: drop the row, or train with offloadkit.OffloadTrainer and your own collator'
            )
        if not with_images and "image" in kinds:
            raise DataError(
                f"row {row} has an image in {column!r}, and this model and its tokenizer take text alone: pass a model "
                "that sees images, such as Qwen/Qwen2.5-VL-3B-Instruct, and rows of `messages` that are no stream"
            )
        found.append({"content": None, **message})
    return found


def _are_messages(value: Any) -> bool:
    value = parsed(value) if isinstance(value, str) and value.startswith("[{") else value
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def parsed(messages: Any) -> Any:
    """The value of JSON text; any other value as it is."""
    try:
        return parse_json(messages) if isinstance(messages, str) else messages
    except ValueError:
        return messages


def _labelled_text(run: Tokenizing, batch: _Columns, indices: list[int]) -> _Columns:
    tokens = _encode(run, run.columns.texts(batch, indices), run.max_input_length)
    label = run.columns.target
    tokens["labels"] = label_ids(batch[label], indices, run.dataset.features[label], run.id2label or {})
    return tokens


def _already_tokenized(run: Tokenizing, batch: _Columns, indices: list[int]) -> _Columns:
    for name in ("input_ids", "labels"):
        for index, value in zip(indices, batch.get(name, []), strict=False):
            if value is None:
                raise DataError(f"row {index} has no {name!r}: fill it in or drop the row")
    known = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "labels")
    tokens = {name: batch[name] for name in known if name in batch}
    for name in tokens:
        if name != "labels" or run.task != "classification":
            _check_lists(run, name, tokens, indices)
    tokens.setdefault("attention_mask", _all_ones(tokens["input_ids"]))
    if run.task == "classification":
        tokens["labels"] = label_ids(batch["labels"], indices, run.dataset.features["labels"], run.id2label or {})
    elif "labels" not in tokens:
        tokens["labels"] = _labels_of_masks(run, tokens["input_ids"], batch, indices)
    return tokens


def _labels_of_masks(run: Tokenizing, ids: list[list[int]], batch: _Columns, indices: list[int]) -> list[list[int]]:
    """The tokens that every mask in `LEARNED` has a 1 for; all tokens without masks."""
    labels = [list(row) for row in ids]
    for name in LEARNED:
        if name in batch:
            _check_lists(run, name, {name: batch[name], "input_ids": ids}, indices)
            masked = zip(labels, batch[name], strict=True)
            labels = [
                [label if is_learned else IGNORED for label, is_learned in zip(*both, strict=True)] for both in masked
            ]
    return labels


def _check_lists(run: Tokenizing, name: str, tokens: _Columns, indices: list[int]) -> None:
    of_tokens = name in ("attention_mask", "token_type_ids", *LEARNED) or (name == "labels" and run.task == "causal")
    for index, row, ids in zip(indices, tokens[name], tokens["input_ids"], strict=True):
        if not isinstance(row, list) or not all(type(each) is int for each in row):
            raise DataError(f"row {index} has {shown(row)} in {name!r}, but a list of whole numbers is needed")
        if of_tokens and len(row) != len(ids):
            raise DataError(f"row {index} has {len(row)} numbers in {name!r} but {len(ids)} in 'input_ids'")


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
    where = {"text_target": texts} if target else {"text": texts}
    tokens = dict(run.tokenizer(**where, truncation=True, max_length=max_length, verbose=False))
    cut = run.targets_cut if target else run.inputs_cut
    for text, row in zip(texts, tokens["input_ids"], strict=True):
        length = len(row)
        if length == max_length:
            again = {"text_target": text} if target else {"text": text}
            length = len(run.tokenizer(**again, verbose=False)["input_ids"])
        cut.add(length)
    return tokens


def _num_learned(task: str, labels: Any) -> int:
    """Number of a row's labels that have a loss. A causal model never predicts the first token."""
    if task == "classification":
        return 1
    return sum(label != IGNORED for label in (labels[1:] if task == "causal" else labels))


def _check_token_ids(run: Tokenizing, tokens: _Columns, indices: list[int]) -> None:
    """Raise `DataError` for ids without an embedding, because a GPU's error names no row."""
    for column in ["input_ids"] + (["labels"] if run.task != "classification" else []):
        for index, row in zip(indices, tokens[column], strict=True):
            ids = [token for token in row if token != IGNORED] if column == "labels" else row
            if ids and (max(ids) >= run.vocab_size or min(ids) < 0):
                worst = max(ids) if max(ids) >= run.vocab_size else min(ids)
                raise DataError(
                    f"row {index} has the token id {worst} in {column!r}, but the model's vocabulary is 0 ... "
                    f"{run.vocab_size - 1}: is the tokenizer the model's own?"
                )


def _count_unknown(run: Tokenizing, tokens: _Columns) -> None:
    """Count unknown tokens, unless the unknown token has another role too (GPT-2)."""
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
    import datasets

    was_enabled = datasets.is_caching_enabled()
    datasets.disable_caching()
    try:
        yield
    finally:
        if was_enabled:
            datasets.enable_caching()
