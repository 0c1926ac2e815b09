"""Choose the columns to learn from, by their names or by the user's arguments.

| columns | kind |
|---|---|
| `input_ids` (`labels`, or TRL's `completion_mask` and `assistant_masks`; `attention_mask`, ...) | tokenized |
| `input` + `target`, `prompt` + `completion` | pairs |
| `messages` (a list of role/content dicts; `images`, for models that see them) | messages |
| `text` + `label` | labelled text |
| a name in `_QUESTIONS`, one in `_CONTEXTS` or both, and one in `_TARGETS` | pairs |
| `text` | text |
| `conversations` (a list of from/value dicts: ShareGPT) | messages |

The first match wins. Pairs win over `text`, because a `text` column next to a pair often repeats the whole row, and
training on it would include the prompt. Ambiguous names are an error. Rows of messages may have `FOR_TEMPLATES` too.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any, Literal

from offloadkit.errors import ConfigError, DataError, cut, shown
from offloadkit.facts.units import kind_of

Kind = Literal["tokenized", "pairs", "messages", "labelled text", "text"]

_QUESTIONS = ("instruction", "question", "prompt", "query", "document", "article", "dialogue", "text")
_CONTEXTS = ("input", "context")
"""Text after the question (Alpaca's `input`, Dolly's `context`), or the whole input."""
_TARGETS = ("target", "completion", "output", "response", "answer", "summary", "highlights")
_PARTS = ("system", "system_prompt", "history", "choices", "options", "passage")
"""Parts of the input whose place in the prompt is unknown."""
LEARNED = ("completion_mask", "assistant_masks")
"""TRL's columns that say which tokens are learned, where there are no labels."""
_TOKENIZED = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "labels", *LEARNED)
TEXTS = (*_QUESTIONS, *_CONTEXTS, *_TARGETS)
CONVERSATIONS = ("messages", "conversations", "prompt", "completion")
FOR_TEMPLATES = ("tools", "chat_template_kwargs")
"""TRL's columns of the chat template's arguments: a list of JSON schemas, and a dict of other arguments."""
IMAGES = ("images", "image")
"""Columns with the images of `messages`: a list, or one image."""

ACCEPTED = "input + target, prompt + completion, text, messages, text + label, or input_ids"


@dataclass(frozen=True)
class Columns:
    kind: Kind
    inputs: tuple[str, ...]
    """Joined by blank lines; after the first column, empty values are skipped."""
    target: str = ""
    """Target (pairs) or label (labelled text)."""
    template: str = ""
    otherwise: str = ""
    """Hint on how to choose other columns that the user may have meant."""

    def texts(self, batch: dict[str, list[Any]], indices: list[int]) -> list[str]:
        """The input of each row; `indices` are row numbers for messages.

        Raises:
            DataError: an input is missing or not a string, or the template cannot be filled.
        """
        if self.template:
            for name in self.inputs:
                for index, value in zip(indices, batch[name], strict=True):
                    if value is None:
                        raise DataError(_no_value(index, name))
            rows = zip(*(batch[name] for name in self.inputs), strict=True)
            return [
                self._filled(dict(zip(self.inputs, row, strict=True)), index)
                for index, row in zip(indices, rows, strict=True)
            ]
        first, *others = self.inputs
        texts = strings(batch[first], first, indices)
        for name in others:
            more = strings(["" if value is None else value for value in batch[name]], name, indices)
            texts = [f"{text}\n\n{value}" if value.strip() else text for text, value in zip(texts, more, strict=True)]
        return texts

    def _filled(self, row: dict[str, Any], index: int) -> str:
        try:
            return self.template.format_map(row)
        except (LookupError, TypeError, ValueError) as error:
            raise DataError(f"template {self.template!r} cannot be filled with row {index}: {error}") from error

    def in_words(self, names: Iterable[str]) -> str:
        """Describe the choice to the user; "" if the names are documented ones and no text column is left out."""
        used = {*self.inputs, self.target}
        left_out = [name for name in names if name in (*TEXTS, *_PARTS) and name not in used]
        by_name = {("input", "target"), ("prompt", "completion"), ("text", "label"), ("text", ""), ("messages", "")}
        plain = not self.template and (*self.inputs, self.target) in by_name
        if self.kind == "tokenized" or (plain and not left_out):
            return ""
        first, second = {
            "pairs": ("input", "target"),
            "labelled text": ("text", "label"),
            "messages": ("conversation", ""),
            "text": ("text", ""),
        }[self.kind]
        what = repr(self.template) if self.template else " + ".join(self.inputs)
        to = f", the {second} is {self.target}" if self.target else ""
        out = f" (not read: {', '.join(left_out)})" if left_out else ""
        otherwise = f"; {self.otherwise}" if self.otherwise else ""
        return f"of each row the {first} is {what}{to}{out}{otherwise}"


@dataclass(frozen=True)
class ColumnOptions:
    """`finetune`'s `input_column`, `target_column` and `template`."""

    input: str | None = None
    target: str | None = None
    template: str | None = None

    def __post_init__(self) -> None:
        """Raises `ConfigError` if a value is no string, input and template are both given, or the template is
        invalid.
        """
        given = {"input_column": self.input, "target_column": self.target, "template": self.template}
        for name, value in given.items():
            if value is not None and (not isinstance(value, str) or not value):
                what = "a text with {column}s in it" if name == "template" else "the name of a column"
                raise ConfigError(f"{name} must be {what}, got {reprlib.repr(value)}")
        if self.input is not None and self.template is not None:
            raise ConfigError("input_column and template both define the input: pass one of them")
        if self.template is not None and (not self.inputs or not all(self.inputs)):
            raise ConfigError(
                f"template {self.template!r} must contain column names in braces, such as "
                "'Question: {question}'; double the braces of the text itself: {{ }}"
            )

    @property
    def inputs(self) -> tuple[str, ...]:
        """The input columns without duplicates. Raises `ConfigError` if the template is invalid."""
        if self.template is None:
            return () if self.input is None else (self.input,)
        try:
            fields = [field for _, field, _, _ in Formatter().parse(self.template) if field is not None]
        except ValueError as error:
            raise ConfigError(
                f"template {self.template!r} cannot be read ({error}): braces of the text itself are doubled: {{{{ }}}}"
            ) from error
        return tuple(dict.fromkeys(fields))

    @property
    def named(self) -> tuple[str, ...]:
        return self.inputs if self.target is None else (*self.inputs, self.target)


_TEXT = Columns("text", ("text",))

BY_NAME = ColumnOptions()
"""The column names decide."""


def choose(names: Sequence[str], kinds: Collection[Kind], column_options: ColumnOptions) -> Columns:
    """Choose the columns to learn from, among kinds that the model and the task support. Raises `DataError` if a named
    column is missing, no column set fits, or names are ambiguous.
    """
    if column_options.named:
        return _wished(names, kinds, column_options)
    found = [*_exact(names), *_recognised(names)]
    fitting = [columns for columns in found if columns.kind in kinds]
    if not fitting:
        raise DataError(f"no column set fits: {_unclear(names)}. {_how_to_say(names)}")
    return replace(fitting[0], otherwise=_otherwise(fitting[0], names)) if "text" in kinds else fitting[0]


def columns_to_read(names: Collection[str], named: Collection[str]) -> set[str]:
    """The columns to read. Values of other columns may have no common type."""
    base = {"input", "target", "text", "label", "messages", "prompt", "completion", *_TOKENIZED, *named}
    if not {*CONVERSATIONS}.isdisjoint(names):
        base |= {*FOR_TEMPLATES}
    if not named and any(columns.kind in ("tokenized", "pairs", "labelled text") for columns in _exact(names)):
        return base
    return {*base, *TEXTS, *CONVERSATIONS}


def _no_value(index: int, column: str) -> str:
    return f"row {index} has no value in {column!r}: correct or drop the row (the first is row 0)"


def strings(values: list[Any], column: str, indices: list[int]) -> list[str]:
    """Check that all values are strings, and return them."""
    for index, value in zip(indices, values, strict=True):
        if value is None:
            raise DataError(_no_value(index, column))
        if not isinstance(value, str):
            text = str(value, "utf-8", "replace") if isinstance(value, bytes) else str(value)
            raise DataError(
                f"row {index} has {kind_of(value)} instead of a string in {column!r}: write it as text, such as "
                f"{reprlib.repr(text)}"
            )
    return values


def _exact(names: Collection[str]) -> list[Columns]:
    sets = [
        Columns("tokenized", ("input_ids",)),
        Columns("pairs", ("input",), "target"),
        Columns("pairs", ("prompt",), "completion"),
        Columns("messages", ("messages",)),
        Columns("labelled text", ("text",), "label"),
    ]
    if "instruction" in names:
        del sets[1]  # Alpaca: `input` is only a part of the input
    return [columns for columns in sets if {*columns.inputs, columns.target} - {""} <= set(names)]


def _recognised(names: Collection[str]) -> list[Columns]:
    found = []
    inputs, targets = _inputs(names), [name for name in _TARGETS if name in names]
    if inputs and len(targets) == 1:
        found.append(Columns("pairs", inputs, targets[0]))
    if "text" in names:
        found.append(_TEXT)
    if "conversations" in names:
        found.append(Columns("messages", ("conversations",)))
    return found


def _otherwise(chosen: Columns, names: Sequence[str]) -> str:
    if "text" not in names:
        return ""
    if chosen.kind == "pairs" and "text" in chosen.inputs:
        return f"to learn `text` as a whole, leave {chosen.target!r} out of the rows"
    if chosen.kind == "pairs":
        return "to learn `text` as a whole, pass input_column='text' (--input-column text)"
    if chosen.kind == "text" and any(name in names for name in _TARGETS):
        return "to learn a target alone, pass input_column= and target_column= (--input-column, --target-column)"
    return ""


def _is_written_out(names: Sequence[str]) -> bool:
    pairs = (columns for columns in (*_exact(names), *_recognised(names)) if columns.kind == "pairs")
    return "text" in names and any("text" not in columns.inputs for columns in pairs)


def _inputs(names: Collection[str]) -> tuple[str, ...]:
    questions = [name for name in _QUESTIONS if name in names]
    if len(questions) > 1 and questions[-1] == "text":
        questions.pop()  # `text` often repeats the whole row
    contexts = [name for name in _CONTEXTS if name in names]
    doubt = len(questions) > 1 or len(contexts) > 1 or any(name in names for name in _PARTS)
    return () if doubt or (questions == ["text"] and contexts) else (*questions, *contexts)


def _wished(names: Sequence[str], kinds: Collection[Kind], column_options: ColumnOptions) -> Columns:
    for name in column_options.named:
        if name not in names:
            raise DataError(f"there is no column {shown(name)}. Columns found: {cut(', '.join(names)) or 'none'}")
    inputs = column_options.inputs or _inputs([name for name in names if name != column_options.target])
    if not inputs:
        others = ", ".join(name for name in names if name != column_options.target) or "none"
        raise DataError(
            f"the target is {column_options.target!r}, but no name of the other columns ({others}) says which is the "
            "input: pass input_column= or template= (--input-column, --template)"
        )
    if inputs == _TEXT.inputs and column_options.target is None and "text" in kinds and _is_written_out(names):
        return replace(_TEXT, template=column_options.template or "")
    labelled = "labelled text" in kinds
    known = [name for name in (("label",) if labelled else _TARGETS) if name in names and name not in inputs]
    target = column_options.target or (known[0] if len(known) == 1 else "")
    if target in column_options.inputs and target:
        raise DataError(f"column {target!r} cannot be both input and target")
    if not target and "text" not in kinds:
        raise DataError(
            f"the input is {' + '.join(inputs)}, and the target is missing: pass target_column= (--target-column). "
            f"Columns found: {cut(', '.join(names))}"
        )
    if not target and known:
        raise DataError(f"{_listed(known)} could each be the target: pass target_column= (--target-column) for one")
    kind: Kind = "labelled text" if labelled else "pairs" if target else "text"
    return Columns(kind, inputs, target, column_options.template or "")


def _unclear(names: Sequence[str]) -> str:
    targets = [name for name in _TARGETS if name in names]
    if len(targets) > 1:
        return f"{_listed(targets)} could each be the target"
    if targets and not _inputs(names):
        return f"{targets[0]!r} can be the target, but the names leave open which columns are the input"
    return "no column name says which is the input and which the target"


def _how_to_say(names: Sequence[str]) -> str:
    return (
        f"Columns found: {cut(', '.join(names)) or 'none'}. Accepted: {ACCEPTED}. Name your columns: input_column= and "
        "target_column=, or template= if several columns form the input, with their names in braces (--input-column, "
        "--target-column, --template)"
    )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names))
