"""Scripts that a launcher starts, without a line that knows of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed import launched
from tests.distributed.doors import finetuned

TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]


def run(launcher: list[str], what: str, folder: Path) -> list[dict[str, torch.Tensor]]:
    """The weights that each rank has in the end, and what was printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_CONFIG_FILE": ""}
    command = [sys.executable, "-m", *launcher, launched.__file__, what, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (folder / "printed").write_text(done.stdout + done.stderr)
    return [torch.load(folder / f"weights-{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_torchrun_starts_finetune(tmp_path: Path) -> None:
    found = run(TORCHRUN, "finetune", tmp_path)
    expected = finetuned("llama", tmp_path / "one", accumulation=2, rows=8, epochs=1)["weights"]
    for weights in found:
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
    printed = (tmp_path / "printed").read_text()
    assert printed.count("the model is in") == printed.count("loading transformers and datasets") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_accelerate_launch_starts_a_loop_with_its_loader(tmp_path: Path) -> None:
    found = run(ACCELERATE, "loop", tmp_path)
    expected = launched.loop()
    for rank, weights in enumerate(found):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
        assert "wrapped in DistributedDataParallel, which is not needed" in (tmp_path / f"error-{rank}").read_text()
