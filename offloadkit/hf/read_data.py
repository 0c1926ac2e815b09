"""Anything that a user may call a dataset, as a `datasets.Dataset`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from offloadkit.errors import DataError
from offloadkit.hf.hub import hub_answers, readable_hub_errors, unreachable
from offloadkit.hf.quiet import no_loader_messages
from offloadkit.hf.read_json import dataset_from_json

if TYPE_CHECKING:
    from datasets import Dataset

_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_ACCEPTED = (
    "a datasets.Dataset, a list of dicts, a pandas frame, a path to a .jsonl, .json, .csv or .parquet file, "
    "or a dataset's hub name"
)


def load_dataset_like(data: object, *, split: str = "train") -> Dataset:
    """The rows of `data`, not yet looked into.

    Args:
        data: a `datasets.Dataset`, a list of dicts (one a row), a pandas frame, the path of a .jsonl, .json, .csv or
            .parquet file, or a dataset's hub name.
        split: which part of a hub dataset or of a `DatasetDict`.

    Raises:
        DataError: `data` is none of these, the file is missing or broken, or there is not one row.
        DownloadError: the connection to the hub broke.
    """
    dataset = _load(data, split)
    if len(dataset) == 0:
        raise DataError("the dataset is empty: training needs at least one row")
    return dataset


def check_there(data: object, prefix: str = "") -> None:
    """Raise `DataError`, which begins with `prefix`, for a path without a file; what may be a hub name passes."""
    if not isinstance(data, str | os.PathLike):
        return
    text, path = os.fspath(data), Path(data).expanduser()
    is_path = isinstance(data, os.PathLike) or text.startswith((".", "~", "/")) or text.count("/") > 1
    if not text or (not path.exists() and (is_path or path.suffix.lower() in _BUILDERS)):
        raise DataError(f"{prefix}there is no file {text!r} (looked in {Path.cwd()})")


def on_hub(data: object) -> bool:
    """Whether `data` can only be a dataset's name on the hub: reading it may be a download."""
    return isinstance(data, str | os.PathLike) and not Path(data).expanduser().exists()


def _load(data: object, split: str) -> Dataset:
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
        return _from_name(data, split)
    if hasattr(data, "columns") and hasattr(data, "iloc"):
        return _as_table(lambda: datasets.Dataset.from_pandas(data, preserve_index=False))
    if isinstance(data, Sequence):
        return _from_rows(data)
    raise DataError(f"a {type(data).__name__} is no dataset: pass {_ACCEPTED}")


def _from_rows(rows: Sequence[Any]) -> Dataset:
    import datasets

    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DataError(f"row {index} is a {type(row).__name__}, not a dict: pass {_ACCEPTED}")
    columns = dict.fromkeys(name for row in rows for name in row)
    values = {name: [row.get(name) for row in rows] for name in columns}
    for name, column in values.items():
        types = sorted({type(value).__name__ for value in column if value is not None})
        if len(types) > 1 and set(types) != {"int", "float"}:
            raise DataError(f"column {name!r} mixes {' and '.join(types)}: give every row the same type")
    return _as_table(lambda: datasets.Dataset.from_dict(values))


def _as_table(make: Callable[[], Any]) -> Dataset:
    """What `make` returns; values that have no common column type are a `DataError`."""
    try:
        return cast("Dataset", make())
    except (TypeError, ValueError, OverflowError) as error:  # pyarrow's are of these
        raise DataError(f"the rows do not make a table: {error}") from error


def _from_name(name: str | os.PathLike[str], split: str) -> Dataset:
    check_there(name)
    text = os.fspath(name)
    path = Path(text).expanduser()
    if path.is_file():
        return _from_file(path)
    if path.is_dir():
        raise DataError(
            f"{text!r} is a folder: pass one file of it ({', '.join(_BUILDERS)}), or datasets.load_from_disk({text!r}) "
            "if save_to_disk wrote it"
        )
    return _from_hub(text, split)


def _from_file(path: Path) -> Dataset:
    import datasets

    builder = _BUILDERS.get(path.suffix.lower())
    if builder is None:
        raise DataError(f"the extension of {path.name!r} says nothing about its form: use {', '.join(_BUILDERS)}")
    if path.stat().st_size == 0:
        raise DataError(f"{str(path)!r} is empty: training needs at least one row")
    if builder == "json":
        return dataset_from_json(path)
    options: dict[str, Any] = {}
    if builder == "csv":  # texts as they were written, were they numbers or "None"; an empty cell holds nothing
        options = {"converters": dict.fromkeys(("input", "target", "text"), str)}
        options |= {"keep_default_na": False, "na_values": [""]}
    try:
        with no_loader_messages():
            return cast("Dataset", datasets.load_dataset(builder, data_files=str(path), split="train", **options))
    except Exception as error:  # each of the builders has its own classes
        if "corresponds to no data" in str(error):
            raise DataError(f"{str(path)!r} has no rows: training needs at least one") from error
        raise DataError(f"{str(path)!r} cannot be read as {builder}: {_innermost(error)}") from error


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
                f"the hub's dataset {name!r} cannot be taken as it is ({error}): load the part you want with "
                f"datasets.load_dataset({name!r}, ...) and pass that"
            ) from error


def _innermost(error: BaseException) -> str:
    """What the deepest cause of an error says."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error)
