"""Loads a user's dataset, in any accepted form, as a `datasets.Dataset`."""

from __future__ import annotations

import csv
import functools
import inspect
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from offloadkit.errors import DataError, DataNotFoundError, cut, shown
from offloadkit.facts.files import check_depth, is_pattern, matching, parse_json, why_no_name, why_not_plain
from offloadkit.facts.units import kind_of
from offloadkit.hf.columns import CONVERSATIONS, FOR_TEMPLATES, IMAGES, TEXTS, columns_to_read
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
        why = _why_one_object(path) or cut(str(error.__cause__ or error))
        raise DataError(f"{str(path)!r} cannot be read as json: {why}") from error


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
    """Messages and tools are stored as JSON text, because the types of their arguments vary; names of images too."""
    value = row.get(column)
    return json.dumps(value) if column in (*_AS_JSON, *IMAGES) and isinstance(value, list | dict) else value


_AS_JSON = (*CONVERSATIONS, *FOR_TEMPLATES)


def _without_structs(name: Any, column: list[Any]) -> list[Any]:
    """Messages and tools as JSON text. In a table, each dict would get the keys of all dicts, with values of None."""
    if name not in _AS_JSON or not any(_has_dicts(value) for value in column):
        return column
    with suppress(TypeError):  # a value that JSON does not have
        return [json.dumps(value) if isinstance(value, list | tuple | dict) else value for value in column]
    return column


def _has_dicts(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list | tuple) and any(isinstance(each, dict) for each in value)
    )


def _features(path: Path, named: Collection[str]) -> Features:
    from datasets import Features, Sequence, Value

    found: dict[str, dict[type, int]] = {}  # by column: each type and its first row
    for number, row in enumerate(_objects(path)):
        for column in row:
            found.setdefault(column, {}).setdefault(type(_value(column, row)), number)
    if not found:
        raise DataError(f"{str(path)!r} has no rows: at least one is needed")
    read = columns_to_read(found, named)
    if read.isdisjoint(found) and (why := _why_one_object(path)) is not None:
        raise DataError(f"{str(path)!r} cannot be read as json: {why}")
    known: dict[type, Any] = {str: Value("string"), bool: Value("bool"), int: Value("int64"), float: Value("float64")}
    known[list] = Sequence(Value("int64"))
    features = {}
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
        why = _not_utf8(error) if isinstance(error, UnicodeDecodeError) else _why_one_object(path) or str(error)
        raise DataError(f"{str(path)!r} cannot be read as json: {why}") from error


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"it is not saved as UTF-8 ({error})"


_LARGEST_READ = 1 << 28
"""Bytes of a file that is read whole for a better message."""


def _why_one_object(path: Path) -> str | None:
    """Why a file is no rows if it is one object around the rows or columns."""
    if path.stat().st_size > _LARGEST_READ:
        return None
    try:
        whole = parse_json(path.read_text(encoding="utf-8-sig"))
    except ValueError:
        return None
    lists = {name: value for name, value in whole.items() if isinstance(value, list)} if isinstance(whole, dict) else {}
    around = next((name for name, value in lists.items() if value and isinstance(value[0], dict)), None)
    if around is not None:
        return f"it is one object, with rows in {shown(around)}: save that list alone, or one row a line"
    return "it is one object of columns: save one object a line, or pass a dict of lists in Python" if lists else None


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
        raise ValueError(f"{place} is not a JSON object but {kind_of(value)}")
    return value


_COMPRESSED = (".gz", ".zip", ".bz2", ".xz", ".zst", ".tar", ".tgz", ".7z")
_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_ACCEPTED = (
    "a datasets.Dataset, a list of dicts, a pandas DataFrame, a path to a .jsonl, .json, .csv or .parquet file, a "
    "pattern such as 'rows/*.jsonl', a dict of lists, a list of texts, a torch dataset, or a hub dataset name"
)


def load_dataset_like(data: object, *, split: str = "train", columns: Collection[str] = ()) -> Dataset:
    """Load the rows of `data` without checking their content.

    Args:
        data: a `datasets.Dataset`, a list of dicts (rows), a dict of lists (columns), a list of texts (the column
            "text"), a pandas DataFrame, a path to a .jsonl, .json, .csv or .parquet file, a pattern such as
            "rows/*.jsonl" or a list of paths, whose rows follow each other by name, a hub dataset name, or a torch
            dataset with a length, which is read into RAM.
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


def is_stream(data: object) -> bool:
    """Whether `data` is an `IterableDataset` of `datasets` or torch, or a function that returns an iterator."""
    bases = {base.__name__ for base in type(data).__mro__}
    is_function = inspect.isroutine(data) or isinstance(data, functools.partial)
    return is_function or not bases.isdisjoint({"IterableDataset", "IterableDatasetDict"})


_VALIDATION = ("validation", "valid", "val", "dev", "eval")


def with_validation(train_dataset: object, eval_dataset: object) -> object:
    """`eval_dataset`, or if it is None the validation split of a `DatasetDict`, which is printed."""
    import datasets

    if eval_dataset is not None or not isinstance(train_dataset, datasets.DatasetDict):
        return eval_dataset
    found = next((name for name in _VALIDATION if name in train_dataset), None)
    if found is None:
        return None
    rows = train_dataset[found]
    print(
        f"evaluating on the {found!r} split of the DatasetDict ({len(rows):,} rows); pass its 'train' split alone to "
        "train without",
        flush=True,
    )
    return rows


def check_there(data: object, prefix: str = "") -> None:
    """Raise `DataNotFoundError`, beginning with `prefix`, if a path has no file. Possible hub names pass."""
    if are_paths(data):
        for each in data:
            check_there(each, prefix)
    if not isinstance(data, str | os.PathLike):
        return
    text = os.fspath(data)
    if (why := why_no_name(text)) is not None:
        raise DataError(f"{prefix}there can be no file {shown(text)}: {why}. Pass another name")
    path = Path(text).expanduser()
    if is_pattern(path):
        if not matching(path):
            raise DataNotFoundError(f"{prefix}no file matches {text!r} (looked in {Path.cwd()})")
        return
    is_path = isinstance(data, os.PathLike) or text.startswith((".", "~", "/")) or text.count("/") > 1
    if not text or (not path.exists() and (is_path or path.suffix.lower() in _BUILDERS)):
        raise DataNotFoundError(f"{prefix}there is no file {text!r} (looked in {Path.cwd()})")


def on_hub(data: object) -> bool:
    if not isinstance(data, str | os.PathLike):
        return False
    path = Path(data).expanduser()
    return not path.exists() and not is_pattern(path)


def are_paths(data: object) -> TypeGuard[Sequence[str | os.PathLike[str]]]:
    """Whether `data` is a list of file names: paths, or texts that all end as files of rows do."""
    if not isinstance(data, list | tuple) or not data:
        return False
    return all(
        isinstance(each, os.PathLike) or (isinstance(each, str) and each.lower().endswith(tuple(_BUILDERS)))
        for each in data
    )


def _load(data: object, split: str, columns: Collection[str]) -> Dataset:
    import datasets

    if isinstance(data, datasets.Dataset):
        return data
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise DataError(f"the DatasetDict has no split {split!r}, it has {', '.join(data)}: pass one of them")
        return cast("Dataset", data[split])
    if is_stream(data):
        raise DataError("a stream has no length: pass a list of its rows, or load it without streaming=True")
    if isinstance(data, str | os.PathLike):
        return _from_name(data, split, columns)
    if hasattr(data, "columns") and hasattr(data, "iloc"):
        frame = cast(Any, data)
        _check_distinct(frame.columns, "the DataFrame")
        for name in frame.columns:
            if str(frame[name].dtype) in ("object", "str", "string"):
                cells = list(frame[name])
                _check_cells(name, cells)
                if (texts := _without_structs(name, cells)) is not cells:
                    frame = frame.assign(**{name: texts})
        return _as_table(lambda: datasets.Dataset.from_pandas(frame, preserve_index=False))
    if are_paths(data):
        return _joined([(os.fspath(each), _from_name(each, split, columns)) for each in data])
    if isinstance(data, Mapping):
        return _from_columns(data)
    if isinstance(data, Sequence):
        return _from_rows(data)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        rows = cast(Any, data)
        return _from_rows([as_row(rows[index], index) for index in range(len(rows))])
    if isinstance(data, Iterator):
        kind = type(data).__name__
        raise DataError(f"a {kind} can be read only once: pass the function that makes it, or a list of its rows")
    raise DataError(f"{kind_of(data)} is not a dataset: pass {_ACCEPTED}")


def as_row(row: Any, index: int) -> dict[str, Any]:
    """A row of a stream or of a torch dataset, with tensors and arrays as lists. A text is the column "text"."""
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, Mapping):
        raise DataError(f"row {index} is {kind_of(row)}, not a dict of columns or a text")
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}


def _from_rows(rows: Sequence[Any]) -> Dataset:
    if rows and all(isinstance(row, str) for row in rows):
        return _from_columns({"text": list(rows)})
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"row {index} is {kind_of(row)}, not a dict: pass {_ACCEPTED}")
    columns = dict.fromkeys(name for row in rows for name in row)
    return _from_columns({name: [row.get(name) for row in rows] for name in columns})


def _from_columns(columns: Mapping[Any, Any]) -> Dataset:
    """Raises `DataError` if a column is no list, or columns have different lengths or mixed types."""
    import datasets

    values: dict[str, list[Any]] = {}
    for name, column in columns.items():
        if isinstance(column, datasets.Dataset):
            raise DataError(
                f"{shown(name)} is a Dataset in a dict: pass that split alone, or datasets.DatasetDict(...)"
            )
        if isinstance(column, str | bytes | Mapping) or not isinstance(column, Iterable):
            raise DataError(f"{shown(name)} is {shown(column)}, not the list of a column's values: pass {_ACCEPTED}")
        values[name] = list(column)
    lengths = {name: len(column) for name, column in values.items()}
    if len(set(lengths.values())) > 1:
        said = cut(", ".join(f"{name} {length:,}" for name, length in lengths.items()))
        raise DataError(f"the columns have different numbers of values ({said}): each row needs one in every column")
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
    values = {name: _without_structs(name, column) for name, column in values.items()}
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
    if is_pattern(path):
        return _joined([(str(each), _from_name(each, split, columns)) for each in matching(path)])
    if path.is_file():
        return _from_file(path, columns)
    if (other := why_not_plain(path)) is not None and not path.is_dir():
        raise DataError(f"{text!r} is {other}, not a file: copy its content to a file, and pass that")
    if path.is_dir():
        raise DataError(
            f"{text!r} is a folder: pass one of its files ({', '.join(_BUILDERS)}), all of them by a pattern "
            f"({text.rstrip('/') + '/*.jsonl'!r}), or "
            f"datasets.load_from_disk({text!r}) if save_to_disk wrote it"
        )
    return _from_hub(text, split)


def _joined(parts: Sequence[tuple[str, Dataset]]) -> Dataset:
    """The rows of files, one after the other. Raises `DataError` if a column has another type in another file."""
    import datasets

    large, null = datasets.Value("large_string"), datasets.Value("null")
    known: dict[str, tuple[str, Any]] = {}  # by column: the first file with values, and their type
    for file, rows in parts:
        for name, feature in rows.features.items():
            of = datasets.Value("string") if feature == large else feature
            first, other = known.setdefault(name, (file, of))
            if other == null:
                known[name] = file, of
            elif of not in (other, null):
                types = f"{_type_name(other)} in {first!r} and {_type_name(of)} in {file!r}"
                raise DataError(f"column {name!r} is {types}: give it one type")
    alike = []
    for _, rows in parts:
        common = datasets.Features({name: known[name][1] for name in rows.features})
        alike.append(rows if rows.features == common else rows.cast(common))
    print(f"{sum(map(len, alike)):,} rows from {len(alike)} files", flush=True)
    return cast("Dataset", datasets.concatenate_datasets(alike))


def _type_name(feature: Any) -> str:
    return str(getattr(feature, "dtype", feature))


def _from_file(path: Path, columns: Collection[str]) -> Dataset:
    import datasets

    builder = _BUILDERS.get(path.suffix.lower())
    if builder is None:
        if path.suffix.lower() in _COMPRESSED:
            raise DataError(f"{path.name!r} is compressed: unpack it, and pass the {', '.join(_BUILDERS)} file")
        raise DataError(f"the extension of {path.name!r} does not tell its format: use {', '.join(_BUILDERS)}")
    if path.stat().st_size == 0:
        raise DataError(f"{str(path)!r} is empty: at least one row is needed")
    if builder == "json":
        return dataset_from_json(path, columns)
    _check_header(path, columns)
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
        cause = list(causes(error))[-1]
        why = _not_utf8(cause) if isinstance(cause, UnicodeDecodeError) else cut(str(cause))
        raise DataError(f"{str(path)!r} cannot be read as {builder}: {why}") from error


def _check_header(path: Path, columns: Collection[str]) -> None:
    """Raise `DataError` for two columns of one name, and for CSV that pandas reads without an error: with other
    separators, or with more values in rows than names in the header, which it shifts by one column.
    """
    names: list[str] = []
    if path.suffix.lower() != ".csv":
        import pyarrow.parquet

        with suppress(Exception):  # the builder says what is wrong with the file
            names = pyarrow.parquet.read_schema(path).names
        _check_distinct(names, repr(str(path)))
        return
    first: list[str] = []
    with suppress(UnicodeDecodeError, csv.Error), path.open(encoding="utf-8-sig", newline="") as file:
        lines = (line for line in csv.reader(file) if len(line) > 1 or "".join(line).strip())
        names = next(lines, [])
        first = next(lines, [])
    if len(names) == 1 and (other := next((each for each in ";\t|" if each in names[0]), None)) is not None:
        raise DataError(
            f"{str(path)!r} has its columns separated by {other!r}: separate them by commas, or in Python pass "
            f"pandas.read_csv({str(path)!r}, sep={other!r})"
        )
    read = columns_to_read(names, columns)
    _check_distinct([name for name in names if name in read], repr(str(path)))
    if len(first) > len(names):
        what_to_do = 'write values that contain commas in quotes, as "one, two", and name every column'
        if not any(first[len(names) :]):
            what_to_do = "drop the comma at the end of each row, or end the header with a comma too"
        raise DataError(
            f"row 0 of {str(path)!r} has {len(first)} values, but the header has {len(names)}: {what_to_do}"
        )


def _check_distinct(names: Iterable[Any], of: str) -> None:
    """Raise `DataError` if two columns have the same name."""
    if (twice := next((name for name, number in Counter(names).items() if number > 1), None)) is not None:
        raise DataError(f"{of} has two columns {str(twice)!r}: rename one of them, or leave it out")


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
