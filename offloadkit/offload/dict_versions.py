"""Dicts of modules that are compared in every step, if possible without a look at their values.

Python, or torch.compile's guards, count the writes of a dict. To read the counts takes a third of the time that it
takes to compare the values. Python 3.13 counts no write of an attribute, so there values are always compared.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

_untyped: Any = torch._C
_version = getattr(_untyped._dynamo.guards, "dict_version", None)
"""A number of a dict, which each write changes. It is no public function of torch."""
COUNTED = _version is not None and sys.version_info < (3, 13)


def versions(dicts: Sequence[dict[Any, Any]]) -> list[int] | None:
    """A number of each dict, none empty, that differs after a write; None where Python does not count them."""
    return list(map(_version, dicts)) if COUNTED and _version is not None else None


_WITHOUT_KEYS = (list, tuple, set)


class UnchangedContainers:
    """Finds dicts, lists, tuples and sets that hold other keys or values than at first. These are compared by identity,
    and kept, so that no other object gets their identity.

    Attributes:
        values: those of each container at first.
    """

    def __init__(self, containers: Sequence[Any], *, keys: bool = False) -> None:
        """`keys`: compare keys too where writes are not counted, which takes as long as to compare the values."""
        self._views = [each if isinstance(each, _WITHOUT_KEYS) else each.values() for each in containers]
        self.values = list(map(list, self._views))
        self._lengths, self._in_one = list(map(len, self._views)), list(chain.from_iterable(self._views))
        # TorchScript's modules have other tables than dicts, and an OrderedDict's order changes without a write.
        self._are_counted = COUNTED and all(type(each) is dict for each in containers)
        has_keys = keys or self._are_counted
        self._keyed = [() if isinstance(each, _WITHOUT_KEYS) else each for each in containers] if has_keys else []
        self._keys = list(map(list, self._keyed))
        self._keys_in_one = list(chain.from_iterable(self._keys))
        self._filled, self._empty = [each for each in containers if each], [each for each in containers if not each]
        self._versions = self._versions_now()

    def _versions_now(self) -> list[int]:
        return list(map(_version, self._filled)) if self._are_counted and _version is not None else []

    def first_changed(self) -> int | None:
        """Index of a container that has changed, or None."""
        versions = self._versions_now()
        if self._are_counted and versions == self._versions and not any(self._empty):
            return None
        if (
            list(map(len, self._views)) == self._lengths
            and all(map(is_, chain.from_iterable(self._views), self._in_one))
            and all(map(is_, chain.from_iterable(self._keyed), self._keys_in_one))
        ):
            self._versions = versions
            return None
        pairs = zip(chain(self._views, self._keyed), chain(self.values, self._keys), strict=True)
        return next(at for at, (now, then) in enumerate(pairs) if not _same(now, then)) % len(self._views)


def _same(one: Collection[Any], other: Collection[Any]) -> bool:
    """Whether two collections hold the same objects in the same order."""
    return len(one) == len(other) and all(map(is_, one, other))
