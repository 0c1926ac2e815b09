"""Docstrings under the fields of a dataclass, read from its source, as help."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from textwrap import dedent, indent
from typing import TypeVar

Record = TypeVar("Record", bound=type)


def field_docs(record: type) -> dict[str, str]:
    """The docstrings under the fields of a dataclass, by name."""
    (definition,) = ast.parse(dedent(inspect.getsource(record))).body
    docs = {}
    for each in pairwise(getattr(definition, "body", [])):
        match each:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = inspect.cleandoc(text)
    return docs


class _WithFields:
    """A class's `__doc__` that is completed when it is read, because reading the source takes milliseconds."""

    def __init__(self, doc: str) -> None:
        self._doc = doc

    def __get__(self, instance: object, owner: type) -> str:
        try:
            docs = field_docs(owner)
        except (OSError, SyntaxError, ValueError):  # without the source, as in a frozen program
            return self._doc
        fields = (f"    {name}:\n{indent(text, ' ' * 8)}" for name, text in docs.items())
        return "\n".join([inspect.cleandoc(self._doc), "", "Attributes:", *fields])


def helps_with_fields(record: Record) -> Record:
    """A class decorator: `help` and a notebook's `?` show the docstrings under the fields."""
    record.__doc__ = _WithFields(record.__doc__ or "")  # type: ignore[assignment]
    return record
