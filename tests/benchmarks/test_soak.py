"""A sample of the soak: memory grows by little while a small model trains."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.run import ROOT


@pytest.mark.slow
def test_memory_does_not_grow_with_the_steps() -> None:
    # Of few steps the allocator's noise is a larger part. Step records that were kept took 2.5 KiB a step.
    command = [sys.executable, "-m", "benchmarks.soak", "--steps=4000", "--most=1"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=300)
