"""Loads a user's dataset, in any accepted form, as a `datasets.Dataset`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from offloadkit.errors import DataError, cut, shown
from offloadkit.facts.files import check_depth, parse_json, why_no_name, why_not_plain
from offloadkit.hf.columns import CONVERSATIONS, TEXTS, columns_to_read
from offloadkit.hf.hub import causes, hub_answers, readable_hub_errors, unreachable
from offloadkit.hf.quiet import no_loader_messages

if TYPE_CHECKING:
    from datasets import Dataset, Features


def dataset_from_json(path: Path, columns: Collection[str] = ()) -> Dataset:
    """Read a file with one JSON object per line, or one list of objects. Rows are stored on disk, not in RAM.

    Of columns whose names are neither known nor in `columns`, only the names are kept, because their values may have no
    common type.

    Raises:
        DataError: the file is not such JSON, has no rows, or has a column without a common type.
    """
    import datasets

    features = _features(path, columns)
    told = {"path": str(path), "columns": tuple(features), "read": tuple(sorted(columns_to_read(features, columns)))}
    try:
        made = datasets.Dataset.from_generator(_rows, features=features, gen_kwargs=told, cache_dir=_private_folder())
        return cast("Dataset", made)
    except datasets.exceptions.DatasetGenerationError as error:
        raise DataError(f"{str(path)!r} cannot be read as json: {cut(str(error.__cause__ or error))}") from error


_folders: list[tempfile.TemporaryDirectory[str]] = []
"""Folders removed when Python exits; rows are read from their files until then."""


def _private_folder() -> str:
    import datasets

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _folders.append(tempfile.TemporaryDirectory(prefix="offloadkit-", dir=cache, ignore_cleanup_errors=True))
    except OSError as error:
        raise DataError(
            f"the folder {str(cache)!r}, where rows of files are stored while they are used, cannot be written "
            f"({error.strerror or error}): set HF_DATASETS_CACHE to another one"
        ) from error
    return _folders[-1].name


def _rows(path: str, columns: tuple[str, ...], read: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for row in _objects(Path(path)):
        yield {name: _value(name, row) if name in read else None for name in columns}


def _value(column: str, row: dict[str, Any]) -> Any:
    """Messages are stored as JSON text, because the types of their tool calls vary."""
    value = row.get(column)
    return json.dumps(value) if column in CONVERSATIONS and isinstance(value, list) else value


def _features(path: Path, named: Collection[str]) -> Features:
    from datasets import Features, Sequence, Value

    found: dict[str, dict[type, int]] = {}  # by column: each type and its first row
    for number, row in enumerate(_objects(path)):
        for column in row:
            found.setdefault(column, {}).setdefault(type(_value(column, row)), number)
    if not found:
        raise DataError(f"{str(path)!r} has no rows: at least one is needed")
    known: dict[type, Any] = {str: Value("string"), bool: Value("bool"), int: Value("int64"), float: Value("float64")}
    known[list] = Sequence(Value("int64"))
    features, read = {}, columns_to_read(found, named)
    for column, first_rows in found.items():
        types = set(first_rows) if column in read else set()
        types -= {type(None)} | ({int} if float in types else set())
        if len(types) > 1 or not types <= set(known):
            named_types = sorted((each.__name__, first_rows[each]) for each in types)
            names = " and ".join(f"{name} (row {number})" for name, number in named_types)
            raise DataError(f"{str(path)!r}: column {column!r} has values of types {names}: give every row text")
        features[column] = known[types.pop()] if types else Value("null")
    return Features(features)


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            while (first := file.read(1)).isspace():
                pass
            file.seek(0)
            if first == "[":
                rows = parse_json(file.read())
                yield from (_checked(value, f"item {index}") for index, value in enumerate(rows))
            else:
                yield from (_of_line(line, number) for number, line in enumerate(file, start=1) if line.strip())
    except ValueError as error:
        why = f"it is not saved as UTF-8 ({error})" if isinstance(error, UnicodeDecodeError) else str(error)
        raise DataError(f"{str(path)!r} cannot be read as json: {why}") from error


def _of_line(line: str, number: int) -> dict[str, Any]:
    try:
        return _checked(parse_json(line), f"line {number}")
    except json.JSONDecodeError as error:
        column = error.colno if error.lineno == 1 else len(line)
        raise ValueError(f"line {number}, column {column}: {error.msg}") from error
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith("line ") else f"line {number}: {error}") from error


def _checked(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is not a JSON object but a {type(value).__name__}")
    return value


_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_ACCEPTED = (
    "a datasets.Dataset, a list of dicts, a pandas DataFrame, a path to a .jsonl, .json, .csv or .parquet file, or a "
    "hub dataset name"
)


def load_dataset_like(data: object, *, split: str = "train", columns: Collection[str] = ()) -> Dataset:
    """Load the rows of `data` without checking their content.

    Args:
        data: a `datasets.Dataset`, a list of dicts (rows), a pandas DataFrame, a path to a .jsonl, .json, .csv or
            .parquet file, or a hub dataset name.
        split: split of a hub dataset or a `DatasetDict`.
        columns: columns to read in addition to those with known names.

    Raises:
        DataError: `data` is none of these, the file is missing or broken, or there are no rows.
        DownloadError: the connection to the hub broke.
    """
    dataset = _load(data, split, columns)
    if len(dataset) == 0:
        raise DataError("the dataset is empty: at least one row is needed")
    return dataset


def check_there(data: object, prefix: str = "") -> None:
    """Raise `DataError`, beginning with `prefix`, if a path has no file. Possible hub names pass."""
    if not isinstance(data, str | os.PathLike):
        return
    text = os.fspath(data)
    if (why := why_no_name(text)) is not None:
        raise DataError(f"{prefix}there can be no file {shown(text)}: {why}. Pass another name")
    path = Path(text).expanduser()
    is_path = isinstance(data, os.PathLike) or text.startswith((".", "~", "/")) or text.count("/") > 1
    if not text or (not path.exists() and (is_path or path.suffix.lower() in _BUILDERS)):
        raise DataError(f"{prefix}there is no file {text!r} (looked in {Path.cwd()})")


def on_hub(data: object) -> bool:
    return isinstance(data, str | os.PathLike) and not Path(data).expanduser().exists()


def _load(data: object, split: str, columns: Collection[str]) -> Dataset:
    import datasets

    if isinstance(data, datasets.Dataset):
        return data
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise DataError(f"the DatasetDict has no split {split!r}, it has {', '.join(data)}: pass one of them")
        return cast("Dataset", data[split])
    if isinstance(data, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise DataError("a streaming dataset has no length: load it without streaming=True")
    if isinstance(data, str | os.PathLike):
        return _from_name(data, split, columns)
    if hasattr(data, "columns") and hasattr(data, "iloc"):
        frame = cast(Any, data)
        for name in frame.columns:
            if str(frame[name].dtype) in ("object", "str", "string"):
                _check_cells(name, frame[name])
        return _as_table(lambda: datasets.Dataset.from_pandas(frame, preserve_index=False))
    if isinstance(data, Sequence):
        return _from_rows(data)
    raise DataError(f"a {type(data).__name__} is not a dataset: pass {_ACCEPTED}")


def _from_rows(rows: Sequence[Any]) -> Dataset:
    import datasets

    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"row {index} is a {type(row).__name__}, not a dict: pass {_ACCEPTED}")
    columns = dict.fromkeys(name for row in rows for name in row)
    values = {name: [row.get(name) for row in rows] for name in columns}
    for name, column in values.items():
        types: dict[str, int] = {}
        for number, value in enumerate(column):
            if value is not None:
                types.setdefault(type(value).__name__, number)
        if len(types) > 1 and set(types) != {"int", "float"}:
            mixed = " and ".join(f"{each} (row {number})" for each, number in sorted(types.items()))
            raise DataError(f"column {name!r} mixes {mixed}: give every row the same type")
    for name, column in values.items():
        _check_cells(name, column)
    return _as_table(lambda: datasets.Dataset.from_dict(values))


def _check_cells(name: Any, column: Iterable[Any]) -> None:
    """Raise `DataError` for values that pyarrow cannot write without naming their row, or that crash the process."""
    for number, value in enumerate(column):
        try:
            if isinstance(value, str) and not value.isascii():
                value.encode()
            elif isinstance(value, list | dict):
                check_depth(value)
        except ValueError as error:
            why = "half of a character (a lone surrogate)" if isinstance(value, str) else str(error)
            raise DataError(f"row {number} has a value in {shown(name)} that cannot be written: {why}") from error


def _as_table(make: Callable[[], Any]) -> Dataset:
    try:
        return cast("Dataset", make())
    except (TypeError, ValueError, OverflowError) as error:  # pyarrow's errors are subclasses of these
        raise DataError(f"the rows do not form a table: {cut(str(error))}. A column has one type") from error


def _from_name(name: str | os.PathLike[str], split: str, columns: Collection[str]) -> Dataset:
    check_there(name)
    text, path = os.fspath(name), Path(name).expanduser()
    if path.is_file():
        return _from_file(path, columns)
    if (other := why_not_plain(path)) is not None and not path.is_dir():
        raise DataError(f"{text!r} is {other}, not a file: copy its content to a file, and pass that")
    if path.is_dir():
        raise DataError(
            f"{text!r} is a folder: pass one of its files ({', '.join(_BUILDERS)}), or "
            f"datasets.load_from_disk({text!r}) if save_to_disk wrote it"
        )
    return _from_hub(text, split)


def _from_file(path: Path, columns: Collection[str]) -> Dataset:
    import datasets

    builder = _BUILDERS.get(path.suffix.lower())
    if builder is None:
        raise DataError(f"the extension of {path.name!r} does not tell its format: use {', '.join(_BUILDERS)}")
    if path.stat().st_size == 0:
        raise DataError(f"{str(path)!r} is empty: at least one row is needed")
    if builder == "json":
        return dataset_from_json(path, columns)
    options: dict[str, Any] = {}
    if builder == "csv":  # keep text as written, even numbers or "None"; an empty cell is missing
        options = {"converters": dict.fromkeys((*TEXTS, *columns), str)}
        options |= {"keep_default_na": False, "na_values": [""]}
    options |= {"data_files": str(path), "split": "train", "cache_dir": _private_folder()}
    try:
        with no_loader_messages():
            return cast("Dataset", datasets.load_dataset(builder, **options))
    except Exception as error:  # every builder has its own error classes
        if "corresponds to no data" in str(error):
            raise DataError(f"{str(path)!r} has no rows: at least one is needed") from error
        why = cut(str(list(causes(error))[-1]))
        raise DataError(f"{str(path)!r} cannot be read as {builder}: {why}") from error


def _from_hub(name: str, split: str) -> Dataset:
    import datasets

    in_cache = Path(datasets.config.HF_DATASETS_CACHE, name.replace("/", "___")).is_dir()
    if not in_cache and not hub_answers():
        raise unreachable(name, "dataset")
    with readable_hub_errors(name, kind="dataset"):
        try:
            return cast("Dataset", datasets.load_dataset(name, split=split))
        except ValueError as error:
            raise DataError(
                f"the hub dataset {name!r} cannot be loaded directly ({error}): load the part you want with "
                f"datasets.load_dataset({name!r}, ...) and pass that"
            ) from error
