"""Class names and ids: what a `label` column holds, and which id each label gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offloadkit.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig


def label_names(dataset: Dataset, column: str, config: PreTrainedConfig) -> dict[int, str]:
    """The name of each class id, ids counted from 0.

    A `ClassLabel` column keeps its names. A model that was trained on all labels of the column keeps its own ids. Else
    the labels get ids in sorted order, so that the integers 0 ... n-1 stay what they are.

    Raises:
        DataError: a label is missing, no string or whole number, or there is only one.
    """
    from datasets import ClassLabel

    values = dataset[column][:]
    found = _distinct(values, column)
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
    """The id of each label.

    Args:
        values: labels of one batch.
        indices: the rows they stand in.
        feature: the column's feature; a `ClassLabel` says what its numbers mean.
        id2label: name of each id.

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


def _distinct(values: list[Any], column: str) -> list[Any]:
    """The different labels in sorted order."""
    for row, value in enumerate(values):
        if value is None:
            raise DataError(f"row {row} has no {column!r}: fill it in or drop the row")
        if not isinstance(value, str | int):
            raise DataError(
                f"row {row} has the {column} {value!r}: a label is a string or a whole number (there is no regression)"
            )
    return sorted(set(values))
