"""The planned tables of docs/several-gpus.md: how they are made, and that they equal the current plan."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import scaling
from tests.planner.test_ranks import plan


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
    assert len(found) == 7 * 3 + 3 * 2 + 3 * 2 + 6
    assert [row[:3] for row in written] == [row[:3] for row in found]
    assert [row[3] for row in written] == pytest.approx([row[3] for row in found], rel=0.03)


def test_a_run_grows_with_its_gpus() -> None:
    made = plan(vram="14GiB", ram="100GiB")
    found = list(scaling.scaled_plans(made, (1, 2, 16), (1, 4), network=1e8))
    assert [(each.plan.num_gpus, each.plan.accumulation) for each in found] == [
        (number, accumulation) for accumulation in (1, 4) for number in (1, 2, 16)
    ]
    assert [each.efficiency for each in found if each.plan.num_gpus == 1] == [1.0, 1.0]
    assert found[1].efficiency > 1, "fewer inputs must be offloaded"
    assert found[2].efficiency < 0.5, "the network must bound the step"
    assert found[5].received_bytes < found[2].received_bytes
    assert [each.otherwise is None for each in found] == [True, True, True, True, False, False]
    assert found[5].otherwise is not None
    assert found[5].otherwise.basis.config.exchange == "micro_batch"
    table = scaling.scaling_table(made, (1, 2), (1, 4)).splitlines()
    assert table[0].startswith("| GPUs | micro-batches |")
    assert table[2].startswith("| 1 | 1 | ")
    assert len({line.count("|") for line in table}) == 1
