"""The planned tables of docs/several-gpus.md equal the current plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import scaling


def rows(text: str) -> Iterator[tuple[str, str, str, float]]:
    """GPUs, micro-batches, bytes received and tokens/s of each row in the page's tables."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 9 and cells[0].isdigit():
            yield cells[0], cells[1], cells[4], float(cells[6].replace(",", ""))


@pytest.mark.slow
def test_the_tables_are_those_of_todays_plan() -> None:
    """Speeds may differ slightly, because versions of torch and transformers launch slightly different operations."""
    written, found = list(rows(scaling.PAGE.read_text())), list(rows(scaling.page()))
    assert len(found) == 7 * 3 + 3 * 2 + 3 * 2
    assert [row[:3] for row in written] == [row[:3] for row in found]
    assert [row[3] for row in written] == pytest.approx([row[3] for row in found], rel=0.03)
