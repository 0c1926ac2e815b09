"""The recipe's data: pairs from source code, and a held-out set without overlap with the training set."""

from __future__ import annotations

import email
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recipes import deepspeed_parallel
from recipes.docstrings import Pair, docstring_pairs, split, unigram_loss

SOURCE = '''
class Tree:
    def grow(self, height):
        """Make the tree taller by a step.

        More words.
        """
        self.height += height
        return self.height

def short():
    """Too short"""
    return 1

def bare(x):
    return x + 1
'''


def test_a_pair_is_the_source_without_its_docstring_and_the_docstrings_first_line(tmp_path: Path) -> None:
    (tmp_path / "trees.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def f(:")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text(SOURCE)
    (pair,) = docstring_pairs(tmp_path)
    assert pair.target == "Make the tree taller by a step."
    assert pair.input == "def grow(self, height):\n    self.height += height\n    return self.height"
    assert pair.file == "trees.py"


def test_no_pair_of_a_package_is_on_both_sides() -> None:
    train, held_out = split(list(docstring_pairs(Path(email.__file__).parent)))
    assert len(train) > 100
    assert len(held_out) > 10
    assert {pair.file for pair in train}.isdisjoint(pair.file for pair in held_out)
    assert {pair.input for pair in train}.isdisjoint(pair.input for pair in held_out)
    assert {pair.target for pair in train}.isdisjoint(pair.target for pair in held_out)
    assert all(pair.target not in pair.input for pair in train[:200])


def test_the_same_source_twice_is_learned_once() -> None:
    pairs = [Pair("def f(): ...", f"Target {number}", f"{number}.py") for number in range(50)]
    train, held_out = split(pairs)
    assert len(train) == 1
    assert held_out == []


def test_the_unigram_loss_of_two_equally_frequent_tokens_is_the_logarithm_of_two() -> None:
    data = {"labels": [[0, 1] * 5000]}
    assert unigram_loss(data, {"labels": [[0, 1]]}, 2) == pytest.approx(0.6931, abs=1e-4)


def losses_of_two_ranks(*arguments: str) -> dict[str, list[float]]:
    """Losses of recipes/deepspeed_parallel.py on two ranks, by mode; on GPUs if there are two."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    root = Path(__file__).parents[1]
    hidden = {} if torch.cuda.device_count() > 1 else {"CUDA_VISIBLE_DEVICES": ""}
    command = "-m torch.distributed.run --standalone --nproc-per-node=2 recipes/deepspeed_parallel.py"
    done = subprocess.run(
        [sys.executable, *command.split(), *arguments],
        cwd=root,
        env=os.environ | {"OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0", **hidden},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"how"')]
    return {row["how"]: row["losses"] for row in rows}


@pytest.mark.slow
def test_a_pipeline_and_cut_matrices_train_on_two_ranks_as_one_rank_does() -> None:
    """With clipping: the norm covers all pipeline stages and all parts."""
    found = losses_of_two_ranks("one", "pipeline", "tensor", "--updates", "6")
    assert found.keys() == deepspeed_parallel.TRAINS.keys()
    assert found["one"][-1] < 0.9 * found["one"][0]
    for how in ("pipeline", "tensor"):
        assert found[how] == pytest.approx(found["one"], rel=1e-5), how
