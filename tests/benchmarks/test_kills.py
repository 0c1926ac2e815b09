"""A sample of kills: no saved step is lost, and the final weights equal a run without kills bit for bit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.run import ROOT


@pytest.mark.slow(30)
def test_killed_trainings_end_as_undisturbed_ones_and_a_second_one_is_refused() -> None:
    doors = ["finetune", "loop on 2 ranks"]
    command = [sys.executable, "-m", "benchmarks.kills", "--doors", *doors, "--kills=2", "--pairs=1", "--seed=1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("refused, and the first one ended as alone") == 1
    assert all(f"{door}: " in done.stdout for door in doors)
