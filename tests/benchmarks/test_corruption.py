"""A sample of the damaged checkpoints: no damage goes unnoticed."""

from __future__ import annotations

import pytest

from benchmarks import corruption


@pytest.mark.slow(20)
def test_no_damage_of_a_checkpoint_is_silent(one_thread: None) -> None:
    counts = corruption.run(times=2 * len(corruption.DAMAGES), seed=1, say=lambda text: None)
    assert all(count.total() == 2 for count in counts.values())
    assert sum(count["refused"] for count in counts.values()) > 12
