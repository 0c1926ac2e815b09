"""Rows of conversations with images (`messages`, with images in them or in a column `images`) for decoders that see
images.

The model's own processor makes tokens and pixel values of a whole micro-batch, in the collator. Before training, only
texts are tokenized and headers of images read: an image costs the tokens and pixel values of a blank one of its size.
"""

from __future__ import annotations

import copy
import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from offloadkit.errors import ConfigError, DataError, ModelError, cut, shown
from offloadkit.facts.changes import longest_of_model
from offloadkit.facts.units import counted
from offloadkit.hf.columns import FOR_TEMPLATES, IMAGES, ColumnOptions
from offloadkit.hf.conversations import ASSISTANT, conversation
from offloadkit.hf.data import PreparedData, with_evaluation
from offloadkit.hf.read import is_stream, load_dataset_like
from offloadkit.hf.streams import NUM_FIRST, Rows
from offloadkit.hf.tokenize import (
    IGNORED,
    NO_TEMPLATE,
    UNWRITTEN_TOOLS,
    lacks_tools,
    messages_of,
    parsed,
    parts_of,
    template_options,
    type_of,
)
from offloadkit.hf.widths import PadToWidths, Widths, rounded_up, width_step

if TYPE_CHECKING:
    from datasets import Features
    from PIL.Image import Image
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

_MESSAGES = "messages"
_VALUES = ("image", "path", "url")
"""Keys of a part of a message that may hold its image."""
_MOST_OPENING = 8
"""A message of the assistant is found again by so many tokens before it."""
_TRANSPOSED = range(5, 9)
"""Orientations of EXIF that exchange height and width."""
_ORIENTATION = 0x0112
_AT_A_TIME = 32

Learned = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens that the assistant wrote, after the tokens that open them."""


# -- rows as the user gave them


class GivenRows:
    """Rows by index, as dicts whose images are not decoded.

    Attributes:
        messages: the column of conversations.
        names: of all columns.
    """

    def __init__(self, data: Any, split: str, messages: str | None) -> None:
        """
        Args:
            data: rows of any kind that `data.prepare_both` takes, but for streams.
            messages: name of the column; None: "messages".

        Raises:
            DataError: the rows cannot be read.
        """
        messages = messages or _MESSAGES
        self.messages, self._rows, self._table = messages, _in_memory(data), None
        if self._rows is None:
            self._table = load_dataset_like(data, split=split, columns=(messages, *FOR_TEMPLATES, *IMAGES))
            self._json = _of_json(self._table.features, (messages, *FOR_TEMPLATES))
            self._table = self._table.with_format("arrow")
        names = (name for row in self._rows or () for name in row) if self._table is None else self._table.column_names
        self.names = tuple(dict.fromkeys(names))

    def __len__(self) -> int:
        return len(self._rows or self._table or ())

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self._table is None:
            return dict((self._rows or ())[index])
        return self._decoded(self._table[index].to_pylist()[0])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Rows of messages, images and arguments of the chat template."""
        if self._table is None:
            yield from map(dict, self._rows or ())
            return
        read = (self.messages, *FOR_TEMPLATES, *IMAGES)
        kept = self._table.select_columns([name for name in self.names if name in read])
        for table in kept.iter(batch_size=_AT_A_TIME):
            yield from map(self._decoded, table.to_pylist())

    def _decoded(self, row: dict[str, Any]) -> dict[str, Any]:
        return row | dict(self._json.decode_example({name: row[name] for name in self._json}))

    def has_images(self) -> bool:
        is_possible = {self.messages, *IMAGES} & {*self.names}
        return bool(is_possible) and any(_has_image(row, self.messages) for row in self)


def _of_json(features: Features, names: Sequence[str]) -> Features:
    """Those of `names` that hold JSON, such as the arguments of tools, and no images, which are not to be decoded."""
    from datasets import Features

    written = {name: repr(features[name]) for name in names if name in features}
    return Features(
        {name: features[name] for name, said in written.items() if "Json(" in said and "Image(" not in said}
    )


def stream_has_images(data: Any, messages: str | None) -> bool:
    """Whether the first rows of a stream have images. Raises `DataError` if they are no rows."""
    rows = list(islice(Rows(data).of_pass(0), NUM_FIRST))
    return bool(rows) and GivenRows(rows, "train", messages).has_images()


def _in_memory(data: Any) -> Sequence[Mapping[str, Any]] | None:
    """Rows that are dicts in RAM, which may hold decoded images; None for other data."""
    import datasets

    if isinstance(data, datasets.Dataset | datasets.DatasetDict | str | os.PathLike):
        return None
    if hasattr(data, "columns") and hasattr(data, "iloc"):
        data = data.astype(object).where(data.notna(), None).to_dict("records")
    if isinstance(data, Mapping):
        columns = {name: list(column) for name, column in data.items() if isinstance(column, Sequence)}
        if len(columns) < len(data) or len(set(map(len, columns.values()))) != 1:
            return None
        data = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if isinstance(data, Dataset) and hasattr(data, "__len__"):
        data = [data[index] for index in range(len(data))]
    if not isinstance(data, Sequence) or not data or not all(isinstance(row, Mapping) for row in data):
        return None
    return data


def _has_image(row: Mapping[str, Any], messages: str) -> bool:
    if any(_listed(row.get(name)) for name in IMAGES):
        return True
    value = row.get(messages)
    if isinstance(value, str):
        value = parsed(value) if '"image' in value else None
    if not isinstance(value, list | tuple):
        return False
    said = (each.get("content") for each in value if isinstance(each, Mapping))
    return any(type_of(part) == "image" for content in said if isinstance(content, list) for part in content)


def _listed(value: Any) -> list[Any]:
    """The images of a column's value, which may be JSON text."""
    if isinstance(value, str) and value.startswith("["):
        value = parsed(value)
    if isinstance(value, list | tuple):
        return [each for each in value if each is not None]
    return [] if value is None or (isinstance(value, float) and value != value) else [value]


def check_without_images(data: Any, config: PreTrainedConfig) -> None:
    """Raise `DataError` if conversations for a model of text are a list with an image, or a table with a column of
    images. (`tokenize` finds the images in messages of other rows.)
    """
    rows = data if isinstance(data, list | tuple) else ()
    names = getattr(data, "column_names", ())
    has_column = isinstance(names, list) and _MESSAGES in names and {*IMAGES} & {*names}
    if has_column or any(isinstance(row, dict) and _MESSAGES in row and _has_image(row, _MESSAGES) for row in rows):
        raise DataError(
            f"the rows have images, and {config.model_type} takes text alone: pass a model that sees images, such as "
            "Qwen/Qwen2.5-VL-3B-Instruct, or rows without a column of images"
        )


@dataclass(frozen=True)
class _Conversation:
    index: int
    messages: list[dict[str, Any]]
    """Up to the assistant's last one, with a list of parts in each, and without the images themselves."""
    images: list[Any]
    options: dict[str, Any]
    """Arguments of the chat template."""


def _conversation(row: Mapping[str, Any], column: str, index: int) -> _Conversation:
    """Raises `DataError` if the row has no messages, or images and their places differ in number."""
    messages, images, number = [], [image for name in IMAGES for image in _listed(row.get(name))], 0
    in_column = bool(images)
    value = row.get(column)
    plain = list(value) if isinstance(value, tuple) else value
    for message in messages_of(plain, column, index, with_images=True):
        parts: list[dict[str, Any]] = []
        for part in parts_of(message):
            kind = type_of(part)
            if kind == "text":
                text = part.get("text") if isinstance(part, dict) else part
                parts.append({"type": "text", "text": "" if text is None else str(text)})
                continue
            if kind != "image":
                raise DataError(
                    f"row {index} has a part of the type {shown(kind)} in {column!r}: text and image are possible"
                )
            number += 1
            own = next((part[name] for name in _VALUES if part.get(name) is not None), None)
            if own is not None and in_column:
                raise DataError(f"row {index} has images in {column!r} and in a column of their own: leave one out")
            images += [] if own is None else [own]
            parts.append({"type": "image"})
        messages.append({**message, "content": parts})
    users = [message for message in messages if message["role"] == "user"]
    if in_column and not number and users and all(isinstance(each["content"], str) for each in _plain(plain)):
        users[0]["content"] = [{"type": "image"}] * len(images) + users[0]["content"]
        number = len(images)
    if number != len(images):
        raise DataError(
            f"row {index} has {counted(len(images), 'image')} and {counted(number, 'place')} for them in {column!r}: "
            'write {"type": "image"} into the content of a message for each image'
        )
    end = max((at for at, each in enumerate(messages, 1) if each["role"] in ASSISTANT), default=len(messages))
    later = (part for message in messages[end:] for part in message["content"] if part["type"] == "image")
    return _Conversation(index, messages[:end], images[: number - len(list(later))], template_options(row, index))


def _plain(value: Any) -> list[Any]:
    return [{"content": each.get("content", each.get("value"))} for each in parsed(value)]


# -- images


def _opened(value: Any, row: int) -> Image:
    """An RGB image. Raises `DataError` if it cannot be opened."""
    import datasets
    from PIL import Image

    feature = datasets.Image()
    try:
        found = value if isinstance(value, Image.Image) else feature.decode_example(feature.encode_example(value))
        return found if found.mode == "RGB" else found.convert("RGB")
    except Exception as error:  # Pillow's formats have their own errors
        raise DataError(_unreadable(value, row, error)) from error


def _unreadable(value: Any, row: int, error: Exception) -> str:
    name = value.get("path") if isinstance(value, dict) else value
    which = f" ({name})" if isinstance(name, str | os.PathLike) else ""
    return f"row {row} has an image that cannot be opened{which}: {cut(str(error))}. Correct it or drop the row"


def _size(value: Any, row: int) -> tuple[int, int]:
    """Width and height of an image, by its header where it has one. Raises `DataError` if it cannot be opened."""
    import datasets
    from PIL import Image

    if isinstance(value, Image.Image):
        return value.size
    try:
        encoded = datasets.Image().encode_example(value)
        data, path = encoded.get("bytes"), encoded.get("path")
        if data is None and "://" in str(path):
            return _opened(value, row).size
        with Image.open(path if data is None else io.BytesIO(data)) as image:
            width, height = image.size
            return (height, width) if image.getexif().get(_ORIENTATION) in _TRANSPOSED else (width, height)
    except DataError:
        raise
    except Exception as error:  # as in `_opened`
        raise DataError(_unreadable(value, row, error)) from error


# -- tokens


class _Texts:
    """Writes conversations by the processor's chat template."""

    def __init__(self, processor: Any) -> None:
        """Raises `ModelError` if the processor has no token for an image or no chat template."""
        self.processor = processor
        self.image: str | None = getattr(processor, "image_token", None)
        tokenizer = self.tokenizer = copy.copy(processor.tokenizer)
        tokenizer.chat_template = getattr(processor, "chat_template", None) or tokenizer.chat_template
        if tokenizer.chat_template is None:
            raise DataError(NO_TEMPLATE.format(column=_MESSAGES))
        if not isinstance(self.image, str):
            raise ModelError(
                f"finetune finds the places of images by the image_token of the processor, and a "
                f"{type(processor).__name__} has none: train with offloadkit.OffloadTrainer and your own collator"
            )
        ids = [tokenizer.convert_tokens_to_ids(self.image), *(getattr(processor, "image_token_ids", None) or ())]
        self.image_ids = frozenset(int(token) for token in ids if token is not None)
        self._marks = frozenset(tokenizer.added_tokens_decoder)
        self._costs: dict[tuple[int, int], tuple[int, int]] = {}

    def of(self, row: _Conversation) -> tuple[str, list[Learned], int]:
        """The text, what is learned of it, and the number of tokens, with one for each image.

        Raises `DataError` if the template cannot write the messages, or does not show the images.
        """
        template: Any = self.tokenizer.apply_chat_template
        tokens, learned = conversation(self.tokenizer, row.messages, row.index, **row.options)
        text = str(template(row.messages, tokenize=False, **row.options))
        if text.count(str(self.image)) != len(row.images):
            raise DataError(
                f"row {row.index} has {counted(len(row.images), 'image')}, and the chat template of the processor "
                f"writes {counted(text.count(str(self.image)), 'place')} for them ({self.image}): set "
                "processor.chat_template to one that writes each image, and leave the token out of texts"
            )
        return text, list(self._runs(tokens, learned)), len(tokens)

    def _runs(self, tokens: list[int], learned: list[bool]) -> Iterator[Learned]:
        flags = [flag and token not in self.image_ids for flag, token in zip(learned, tokens, strict=True)]
        begin = before = 0
        for flag, run in groupby(flags):
            end = begin + len(list(run))
            if flag:
                yield self._opening(tokens[before:begin]), tuple(tokens[begin:end])
                before = end
            begin = end

    def _opening(self, tokens: list[int]) -> tuple[int, ...]:
        """The end of `tokens`, from the last special token on, and after the last image."""
        found: list[int] = []
        for token in reversed(tokens[-_MOST_OPENING:]):
            if token in self.image_ids:
                break
            found.insert(0, token)
            if token in self._marks:
                break
        return tuple(found)

    def cost(self, size: tuple[int, int], row: int) -> tuple[int, int]:
        """Tokens, and pixel values, of an image of this width and height.

        Raises `DataError` if the processor refuses it.
        """
        from PIL import Image

        if size not in self._costs:
            try:
                made = made_by(self.processor, [str(self.image)], [[Image.new("RGB", size)]])
            except Exception as error:  # every processor has its own
                raise DataError(
                    f"row {row} has an image of {size[0]} x {size[1]} pixels, which the processor refuses: "
                    f"{cut(str(error))}"
                ) from error
            values = (value.numel() for value in made.values() if value.is_floating_point())
            self._costs[size] = made["input_ids"].shape[1], sum(values)
        return self._costs[size]


def made_by(processor: Any, texts: list[str], images: list[list[Image]], **options: Any) -> dict[str, torch.Tensor]:
    """Tokens and pixel values of texts and the images of each, padded on the right."""
    given = images if any(images) else None
    how = {"add_special_tokens": False, "padding": True, "padding_side": "right", "return_tensors": "pt"} | options
    return dict(processor(text=texts, images=given, **how))


# -- rows to train on


@dataclass(frozen=True)
class ImageRow:
    """Not a dict: a Trainer removes a dict's keys that are no arguments of the model."""

    index: int
    text: str
    images: list[Image]
    learned: list[Learned]


class ImageRows(Dataset[ImageRow]):
    """Rows whose images are decoded when they are read.

    Attributes:
        sizes: tokens and pixel values of each row.
        lengths: tokens of each row.
    """

    def __init__(self, given: GivenRows, rows: Sequence[_Text]) -> None:
        self._given, self._rows = given, rows
        self.sizes = [(row.num_tokens, row.num_values) for row in rows]
        self.lengths = [row.num_tokens for row in rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> ImageRow:
        """Raises `DataError` if an image cannot be decoded."""
        row = self._rows[index]
        images = _conversation(self._given[row.index], self._given.messages, row.index).images
        return ImageRow(row.index, row.text, [_opened(image, row.index) for image in images], row.learned)

    def select(self, rows: Sequence[int]) -> ImageRows:
        return ImageRows(self._given, [self._rows[row] for row in rows])


@dataclass(frozen=True)
class _Text:
    """A row without its images."""

    index: int
    text: str
    learned: list[Learned]
    num_tokens: int
    num_values: int


@dataclass(frozen=True)
class _Collator:
    processor: Any
    image_ids: frozenset[int]
    step: int
    dtype: torch.dtype

    def __call__(self, rows: list[ImageRow]) -> dict[str, torch.Tensor]:
        """The processor's batch, padded to a multiple of `step`, and labels, int64 [rows, width]."""
        texts, images = [row.text for row in rows], [row.images for row in rows]
        step = {} if self.step == 1 else {"pad_to_multiple_of": self.step}
        batch = made_by(self.processor, texts, images, **step)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        labels = torch.full_like(ids, IGNORED)
        for at, row in enumerate(rows):
            own = ids[at][mask[at].bool()].tolist()
            labels[at, : len(own)] = torch.tensor(labels_of(own, row.learned, row.index))
        for token in self.image_ids:
            labels.masked_fill_(ids == token, IGNORED)
        pixels = {name: value.to(self.dtype) for name, value in batch.items() if name.startswith("pixel_values")}
        return batch | pixels | {"labels": labels}


def labels_of(tokens: list[int], learned: Sequence[Learned], row: int) -> list[int]:
    """Labels of a row's tokens, images and all: -100 but for what is `learned`, in order.

    Raises `DataError` if a learned part is not among the tokens.
    """
    labels, at = [IGNORED] * len(tokens), 0
    data = np.array(tokens, np.int64).tobytes()
    for opening, part in learned:
        sought = np.array([*opening, *part], np.int64).tobytes()
        found = data.find(sought, 8 * at)
        while found % 8 and found > 0:  # within a token
            found = data.find(sought, found + 1)
        if found < 0:
            raise DataError(
                f"row {row}: the processor writes a message of the assistant in other tokens than its tokenizer, so "
                "its place is unknown: train with offloadkit.OffloadTrainer and your own collator"
            )
        begin = found // 8 + len(opening)
        at = begin + len(part)
        labels[begin:at] = part
    return labels


def prepare_images(
    train_dataset: Any,
    eval_dataset: Any,
    processor: Any,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    *,
    max_input_length: int | None,
    column_options: ColumnOptions,
) -> tuple[PreparedData, PreparedData | None]:
    """A training set and, unless it is None, an evaluation set of conversations with images.

    Args:
        train_dataset, eval_dataset: as in `data.prepare_both`, but no streams; or `GivenRows`.
        dtype: of the pixel values.
        max_input_length: longer rows, with the tokens of their images, are left out, because a cut row may lack a part
            of an image. None: the model's limit.

    Raises:
        ConfigError: a template or a target column is given.
        DataError: a row has no messages, its images and their places differ in number, an image cannot be opened, or no
            row teaches anything.
        ModelError: the processor has no token for an image.
    """
    if column_options.template is not None or column_options.target is not None:
        raise ConfigError(
            "rows with images are learned from `messages`: leave out template= and target_column=, and name the column "
            "by input_column="
        )
    texts = _Texts(processor)

    def prepared(data: Any, split: str) -> PreparedData:
        if is_stream(data):
            raise DataError("streams of images are not supported: pass a datasets.Dataset or a list of rows")
        given = data if isinstance(data, GivenRows) else GivenRows(data, split, column_options.input)
        return _prepared(given, texts, config, dtype, max_input_length)

    data = prepared(train_dataset, "train")
    return with_evaluation(data, eval_dataset, lambda rows: prepared(rows, "validation"))


def _prepared(
    given: GivenRows, texts: _Texts, config: PreTrainedConfig, dtype: torch.dtype, max_input_length: int | None
) -> PreparedData:
    if given.messages not in given.names:
        raise DataError(
            f"rows with images need a column of {given.messages!r}. Columns found: {cut(', '.join(given.names))}. Name "
            "yours by input_column="
        )
    limit = longest_of_model(config)
    most = min(each for each in (max_input_length, limit, np.inf) if each is not None)
    rows, longer, silent, without_tools = [], [], 0, 0
    for index, row in enumerate(given):
        found = _conversation(row, given.messages, index)
        text, learned, number = texts.of(found)
        without_tools += lacks_tools(texts.tokenizer, found.options)
        costs = [texts.cost(_size(image, index), index) for image in found.images]
        number += sum(tokens - 1 for tokens, _ in costs)
        if not learned:
            silent += 1
        elif number > most:
            longer.append(number)
        else:
            rows.append(_Text(index, text, learned, number, sum(values for _, values in costs)))
    name = f"max_input_length={max_input_length}" if most == max_input_length else f"the model's {limit:,} positions"
    if not rows:
        why = "no message has the role 'assistant', whose messages are learned"
        if longer:
            why = f"with their images they have at least {min(longer):,} tokens, and {name} allows fewer"
        raise DataError(f"none of the {len(given)} rows teaches anything: {why}")
    if longer:
        logger.warning(
            f"{len(longer):,} of {len(given):,} rows left out: with the tokens of their images they are longer than "
            f"{name} (the longest has {max(longer):,})"
        )
    if without_tools:
        logger.warning(UNWRITTEN_TOOLS, without_tools, len(given))
    if silent:
        logger.warning(f"{silent:,} of {len(given):,} rows left out: they have nothing to learn")
    lengths = [row.num_tokens for row in rows]
    step = width_step(sum(lengths) / len(lengths), max(lengths), limit)
    collator = PadToWidths(_Collator(texts.processor, texts.image_ids, step, dtype), Widths((step,)), {}, {})
    longest = rounded_up(max(lengths), step)
    return PreparedData(ImageRows(given, rows), collator, "causal", None, longest, longest, "unread")
