"""Two commits in alternating turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import turns

ROOT = str(Path(__file__).parents[2])


def test_the_interval_of_equal_ratios_is_their_value_and_holds_the_median_of_others() -> None:
    assert turns.interval([1.25] * 7) == (1.25, 1.25)
    low, high = turns.interval([0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 5.0])
    assert low < 1.2 < high < 5.0


@pytest.mark.slow(40)
@pytest.mark.parametrize("case", ["tiny", "tiny-2"])
def test_a_commit_beside_itself_has_a_ratio_and_equal_losses(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    turns.main([case, ROOT, ROOT, "--turns", "2"])
    old, new, *_, ratio = capsys.readouterr().out.splitlines()
    assert old.partition("losses")[2] == new.partition("losses")[2] != ""
    assert ratio.startswith("new / old: ")
