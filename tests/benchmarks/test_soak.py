"""A sample of the soak test: memory stays nearly constant while a small model trains."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.run import ROOT


@pytest.mark.slow
def test_memory_does_not_grow_with_the_steps() -> None:
    # With fewer steps the allocator's noise would hide a leak: step records that were kept cost 2.5 KiB a step.
    command = [sys.executable, "-m", "benchmarks.soak", "--steps=2000", "--most=0.5"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=300)
