"""Values that a checkpoint stores as JSON, and the RAM that saving and loading add to a run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offloadkit.checkpoint.values import read_json, write_json
from offloadkit.errors import ConfigError, ModelError

ROOT = Path(__file__).parents[2]
MIB = 2**20


@pytest.mark.parametrize(
    "value",
    [
        {"epoch": 1, "batch": [3, (4.5, None, True)], "name": "é", "$dollar": {"$tuple": 1}},
        {3: "three", (1, 2): [b"\0\xff", {1, 2}]},
        Counter({2: 1, 5: 2}),
        [math.inf, -math.inf, 0.1 + 0.2, 2**70],
    ],
)
def test_a_value_comes_back_as_it_was(tmp_path: Path, value: Any) -> None:
    write_json(tmp_path / "run.json", {"value": value})
    json.loads((tmp_path / "run.json").read_text(), parse_constant=pytest.fail)
    found = read_json(tmp_path / "run.json")["value"]
    assert found == value
    assert type(found) is type(value)


def test_tensors_and_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    tensors = [torch.tensor([[1.5, math.nan]]).bfloat16(), torch.empty(0, 3), torch.tensor(7), torch.tensor([True])]
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    write_json(tmp_path / "run.json", {"tensors": tensors, "array": array, "number": np.float32(0.5)})
    found = read_json(tmp_path / "run.json")
    for tensor, again in zip(tensors, found["tensors"], strict=True):
        torch.testing.assert_close(again, tensor, rtol=0, atol=0, equal_nan=True)
    assert (found["array"] == array).all()
    assert found["array"].dtype == array.dtype
    assert found["number"] == 0.5


def test_what_is_no_data_is_named_and_what_is_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scheduler\['lambdas'\]\[1\] is a function, which a checkpoint cannot"):
        write_json(tmp_path / "run.json", {"scheduler": {"lambdas": [None, lambda step: step]}})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run.json").write_text('{"code": {"$pickle": "gASV"}}')
    with pytest.raises(ModelError, match=r"run\.json cannot be read \('\$pickle' is not a known kind"):
        read_json(tmp_path / "run.json")


@pytest.mark.slow
@pytest.mark.parametrize(("contents", "states"), [("all", "ram"), ("all", "disk"), ("compact", "disk")])
def test_saving_and_loading_hold_a_few_pieces_of_a_checkpoint_and_not_all_of_it(
    tmp_path: Path, contents: str, states: str
) -> None:
    """The checkpoint holds 229 or 153 MiB, pieces are 1 MiB. Without dropping mapped pages, 144 MiB stay with states on
    disk."""
    command = [sys.executable, "-m", "tests.peak_ram", "checkpoint", str(tmp_path), contents, "small", states]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    saving, resuming, size, _ = json.loads(done.stdout.splitlines()[-1])
    assert size > 140 * MIB
    assert max(saving, resuming) < 30 * MIB
