"""A sample of the power cuts: no step that was reported as saved is lost."""

from __future__ import annotations

import shutil

import pytest

from benchmarks import power_cut


@pytest.mark.slow(20)
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_power_cut_loses_nothing_that_was_reported_saved() -> None:
    power_cut.start(times=len(power_cut.DOORS), seed=1)
