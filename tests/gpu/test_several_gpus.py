"""Ranks are started together and end together over NCCL. With one GPU they share it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import offloadkit
from benchmarks.ranks import take_gpu
from offloadkit.distributed import world
from offloadkit.distributed.launch import launch, send_to_parent
from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import RankError
from offloadkit.facts.config import OffloadConfig, Placement
from tests.distributed.doors import model_named, pairs
from tests.distributed.runs import RESIDENT, model
from tests.distributed.test_launch import fail, kill
from tests.models import tokens

LIMIT = 60
"""Seconds from the end of one rank to the end of all ranks."""


def test_finetune_on_two_gpus_hands_the_model_back(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    given, tokenizer = model_named("t5")
    given.cuda()
    offload = OffloadConfig(placement=Placement(step="gpu"))
    options: dict[str, Any] = {"batch_size": 2, "max_steps": 4, "learning_rate": 1e-2, "tokenizer": tokenizer}
    result = offloadkit.finetune(
        given, pairs(16), output_dir=tmp_path, num_gpus=2, offload=offload, overwrite=True, **options
    )
    assert result.model is given
    assert len(result.steps) == 4
    saved = type(given).from_pretrained(result.model_dir)
    for name, parameter in given.named_parameters():
        assert parameter.device.type == "cuda"
        assert torch.equal(parameter.cpu().float(), saved.get_parameter(name).float()), name


def one_ends(how: Any, placement: Placement, late: bool = False) -> str:
    """Rank 1 ends in the third step, while rank 0 continues and waits on its GPU.

    Args:
        late: whether rank 1 ends after the step, while rank 0 waits in the script's own all-reduce.
    """

    def end(number: int) -> None:
        if number == 2 and dist.get_rank() == 1:
            send_to_parent(("ends", time.monotonic()))
            how()

    take_gpu(int(os.environ["RANK"]))
    world.join()
    send_to_parent((dist.get_rank(), os.getpid()))
    config = OffloadConfig(placement=placement, working_dtype="bf16")
    with OffloadEngine(model(), config) as engine:
        for number, batch in enumerate(tokens(50, "cuda")):
            if not late:
                end(number)
            engine.backward(engine(batch))
            engine.step()
            if late:
                end(number)
                dist.all_reduce(torch.zeros(1, device="cuda"))
            torch.cuda.synchronize()
    return "nothing"


@pytest.mark.parametrize("placement", [RESIDENT, Placement()])
@pytest.mark.parametrize(("how", "error"), [(kill, RankError), (fail, ValueError)])
def test_a_rank_that_ends_brings_all_down(tmp_path: Path, how: Any, error: Any, placement: Placement) -> None:
    heard: list[Any] = []
    with pytest.raises(error):
        launch(
            one_ends,
            {"how": how, "placement": placement},
            2,
            folder=tmp_path,
            on_message=lambda rank, message: heard.append(message),
        )
    ended = next(when for what, when in heard if what == "ends")
    assert time.monotonic() - ended < LIMIT
    processes = [process for what, process in heard if what != "ends"]
    assert len(processes) == 2
    assert not any(map(psutil.pid_exists, processes))


def the_other_learns_of_it(placement: Placement, late: bool) -> str:
    """Rank 1 raises an error; rank 0 must get an error although no launcher kills it."""
    try:
        return one_ends(fail, placement, late)
    except RankError:
        return "RankError"
    except ValueError:
        return "ValueError"


@pytest.mark.parametrize(("placement", "late"), [(RESIDENT, False), (Placement(), False), (RESIDENT, True)])
def test_a_rank_that_waits_on_its_gpu_gets_an_error(tmp_path: Path, placement: Placement, late: bool) -> None:
    began, options = time.monotonic(), {"placement": placement, "late": late}
    assert launch(the_other_learns_of_it, options, 2, folder=tmp_path) == ["RankError", "ValueError"]
    assert time.monotonic() - began < 2 * LIMIT
