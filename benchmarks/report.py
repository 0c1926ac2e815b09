"""docs/results.md, the README's figures and the charts, from the table."""

from __future__ import annotations


def write() -> None: ...
