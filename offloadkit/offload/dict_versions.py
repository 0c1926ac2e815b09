"""Dicts of modules that are compared in every step, without a look at their values.

Python, or torch.compile's guards, count the writes of a dict. To read the counts takes a third of the time that it
takes to compare the values.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import is_
from typing import Any

import torch

_untyped: Any = torch._C
_version = _untyped._dynamo.guards.dict_version
"""A number of a dict, which each write changes."""


class UnchangedDicts:
    """Finds dicts that hold other values than at first. Values are compared by identity, and kept, so that no other
    value gets their identity.

    Attributes:
        values: those of each dict at first.
    """

    def __init__(self, dicts: Sequence[dict[str, Any]]) -> None:
        """TorchScript's modules have other tables than dicts, whose values are always compared."""
        self._dicts, self._are_counted = dicts, all(isinstance(each, dict) for each in dicts)
        self._filled, self._empty = [each for each in dicts if each], [each for each in dicts if not each]
        self._versions = self._versions_now()
        self.values = [list(each.values()) for each in dicts]

    def first_changed(self) -> int | None:
        """Index of a dict that has changed, or None."""
        versions = self._versions_now()
        if versions != self._versions or any(self._empty):
            for at, (each, values) in enumerate(zip(self._dicts, self.values, strict=True)):
                if not same(each.values(), values):
                    return at
            self._versions = versions
        return None

    def _versions_now(self) -> list[Any]:
        return list(map(_version, self._filled)) if self._are_counted else [object()]


def same(one: Collection[Any], other: Collection[Any]) -> bool:
    """Whether two collections hold the same objects in the same order."""
    return len(one) == len(other) and all(map(is_, one, other))
