"""Dicts of modules that are compared in every step, if possible without a look at their values.

Python, or torch.compile's guards, count the writes of a dict. To read the counts takes a third of the time that it
takes to compare the values. Python 3.13 counts no write of an attribute, so there values are always compared. On Python
3.12, torch numbers the writes of all dicts that it counts together, so one number shows that none was written.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, compress
from operator import is_
from threading import Lock
from typing import Any

import torch

_untyped: Any = torch._C
_version = getattr(_untyped._dynamo.guards, "dict_version", None)
"""A number of a dict, which each write changes. It is no public function of torch."""
COUNTED = _version is not None and sys.version_info < (3, 13)
_lock, _num_ignored = Lock(), 0


def _num_writes() -> int:
    """Number of writes of all counted dicts, up to a constant. A new dict gets the next number."""
    global _num_ignored
    assert _version is not None
    with _lock:
        _num_ignored += 1
        number: int = _version({}) - _num_ignored
    return number


def _sees_writes_alone() -> bool:
    table = {"first": 0}
    assert _version is not None
    _version(table)
    before, unchanged = _num_writes(), _num_writes()
    table["first"] = 1
    return before == unchanged != _num_writes()


COUNTED_TOGETHER = COUNTED and sys.version_info >= (3, 12) and _sees_writes_alone()


@contextmanager
def _not_counted() -> Iterator[None]:
    global _num_ignored
    before = _num_writes()
    yield
    num = _num_writes() - before
    with _lock:
        _num_ignored += num


class Uncounted(AbstractContextManager[None]):
    """`context`, which begins and ends by writes of counted dicts: in it, they hold the same values each time."""

    def __init__(self, context: AbstractContextManager[None]) -> None:
        self._context = context

    def __enter__(self) -> None:
        with _not_counted() if COUNTED_TOGETHER else nullcontext():
            self._context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        with _not_counted() if COUNTED_TOGETHER else nullcontext():
            return self._context.__exit__(*error)


class UnchangedContainers:
    """Finds dicts, lists, tuples and sets that hold other values than at first. Values are compared by identity, and
    kept, so that no other value gets their identity.

    Attributes:
        values: those of each container at first.
    """

    def __init__(self, containers: Sequence[Any]) -> None:
        self._views = [each if isinstance(each, list | tuple | set) else each.values() for each in containers]
        self.values = list(map(list, self._views))
        # TorchScript's modules have other tables than dicts, and an OrderedDict's order changes without a write.
        are_counted = [COUNTED and type(each) is dict for each in containers]
        counted = list(compress(containers, are_counted))
        self._filled, self._empty = [each for each in counted if each], [each for each in counted if not each]
        self._others = [view for view, is_counted in zip(self._views, are_counted, strict=True) if not is_counted]
        self._lengths, self._in_one = list(map(len, self._others)), list(chain.from_iterable(self._others))
        self._versions = self._versions_now()
        self._num_writes: int | None = None
        """At the last comparison; None: it is not known."""

    def _versions_now(self) -> list[int]:
        return list(map(_version, self._filled)) if self._filled and _version is not None else []

    def first_changed(self) -> int | None:
        """Index of a container that has changed, or None."""
        num_writes = _num_writes() if COUNTED_TOGETHER else None
        if not any(self._empty) and self._others_are_same():
            if num_writes is not None and num_writes == self._num_writes:
                return None
            versions = self._versions_now()
            if versions == self._versions or all(map(_same, self._views, self.values)):
                self._versions, self._num_writes = versions, num_writes
                return None
        pairs = enumerate(zip(self._views, self.values, strict=True))
        return next((at for at, (now, then) in pairs if not _same(now, then)), None)

    def _others_are_same(self) -> bool:
        return list(map(len, self._others)) == self._lengths and all(
            map(is_, chain.from_iterable(self._others), self._in_one)
        )


def _same(one: Collection[Any], other: Collection[Any]) -> bool:
    """Whether two collections hold the same objects in the same order."""
    return len(one) == len(other) and all(map(is_, one, other))
