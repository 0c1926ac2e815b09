"""Rows of a .jsonl or .json file as they were written: the loaders of datasets and pandas make dates of texts that look
like one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from offloadkit.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, Features

_READ = {"input", "target", "text", "label", "messages"}
_READ |= {"input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "labels"}
"""Of other columns only the names are kept: their values are not learned from, and may have no common type."""


def dataset_from_json(path: Path) -> Dataset:
    """The rows of a file with one JSON object a line, or with one list of them; they lie in the cache, not in RAM.

    Raises:
        DataError: it is not that, has no rows, or a column's values have no common type.
    """
    import datasets

    features = _features(path)
    told = {"path": str(path), "columns": tuple(features), "changed": path.stat().st_mtime_ns}
    try:
        return cast("Dataset", datasets.Dataset.from_generator(_rows, features=features, gen_kwargs=told))
    except datasets.exceptions.DatasetGenerationError as error:
        raise DataError(f"{str(path)!r} cannot be read as json: {error.__cause__ or error}") from error


def _rows(path: str, columns: tuple[str, ...], changed: int) -> Iterator[dict[str, Any]]:
    """Every row with every column. `changed` tells the cache that a file is not the one it knows."""
    for row in _objects(Path(path)):
        yield {name: _value(name, row) for name in columns}


def _value(column: str, row: dict[str, Any]) -> Any:
    """What is kept of a field: of messages their text, since calls of tools differ in type from one to the next."""
    value = row.get(column) if column in _READ else None
    return json.dumps(value) if column == "messages" and isinstance(value, list) else value


def _features(path: Path) -> Features:
    """The columns of all the rows, and their types."""
    from datasets import Features, Sequence, Value

    found: dict[str, set[type]] = {}
    for row in _objects(path):
        for column in row:
            found.setdefault(column, set()).add(type(_value(column, row)))
    if not found:
        raise DataError(f"{str(path)!r} has no rows: training needs at least one")
    known: dict[type, Any] = {str: Value("string"), bool: Value("bool"), int: Value("int64"), float: Value("float64")}
    known[list] = Sequence(Value("int64"))
    features = {}
    for column, types in found.items():
        types -= {type(None)} | ({int} if float in types else set())
        if len(types) > 1 or not types <= set(known):
            names = " and ".join(sorted(each.__name__ for each in types))
            raise DataError(f"{str(path)!r}: column {column!r} holds {names}: give every row text")
        features[column] = known[types.pop()] if types else Value("null")
    return Features(features)


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """What the file holds."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            while (first := file.read(1)).isspace():
                pass
            file.seek(0)
            if first == "[":
                yield from (_checked(value, f"item {index}") for index, value in enumerate(json.load(file)))
            else:
                yield from (_of_line(line, number) for number, line in enumerate(file, start=1) if line.strip())
    except UnicodeDecodeError as error:
        raise DataError(f"{str(path)!r} cannot be read as json: it is not saved as UTF-8 ({error})") from error
    except ValueError as error:
        raise DataError(f"{str(path)!r} cannot be read as json: {error}") from error


def _of_line(line: str, number: int) -> dict[str, Any]:
    try:
        return _checked(json.loads(line), f"line {number}")
    except json.JSONDecodeError as error:
        column = error.colno if error.lineno == 1 else len(line)
        raise ValueError(f"line {number}, column {column}: {error.msg}") from error


def _checked(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is no JSON object but a {type(value).__name__}")
    return value
