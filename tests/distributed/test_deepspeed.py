"""A DeepSpeed script gives the same weights on two ranks as on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import offloadkit as deepspeed
from offloadkit.distributed import machine
from offloadkit.errors import ConfigError
from offloadkit.facts.config import Placement
from offloadkit.facts.hardware import Hardware
from tests.distributed.pool import RankPool
from tests.models import Residual
from tests.planner.machines import H200

CONFIG: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}},
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "initial_scale_power": 8},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "offloadkit": {"exchange": "micro_batch"},
}
WINDOWS = 4


def script(
    folder: Path,
    resume: bool = False,
    placement: Placement | None = None,
    on_gpu: bool = False,
    card: Hardware | None = None,
) -> dict[str, Any]:
    """Micro-batch k of rank r is global micro-batch k * N + r. The third update overflows, on one rank only.

    Args:
        card: the hardware to plan for, with its VRAM as budget.
    """
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)  # ranks take rank 0's weights
    model = nn.Sequential(nn.Linear(6, 300), nn.Sequential(Residual(300, 7), Residual(300, 7)), nn.Linear(300, 2))
    own = {"exchange": "micro_batch", "placement": placement, "vram": None if card is None else "2GiB"}
    config = CONFIG | {"offloadkit": {name: value for name, value in own.items() if value is not None}}
    with pytest.MonkeyPatch.context() as patch:
        if card is not None:
            patch.setattr(machine, "measure", lambda *args, **options: card)
            patch.setattr(machine, "is_measured", lambda *args: True)
        if not on_gpu:
            patch.setattr(torch.cuda, "is_available", lambda: False)
        engine, _, loader, scheduler = deepspeed.initialize(
            model=model, config=config, training_data=TensorDataset(torch.arange(12.0))
        )
    begin = 0
    if resume:
        _, state = engine.load_checkpoint(folder)
        assert state is not None
        begin = state["window"]
    size, losses = engine.world_size, []
    for number in range(begin, WINDOWS if resume else WINDOWS // 2):
        for at in range(engine.gradient_accumulation_steps()):
            micro_batch = number * 4 + at * size + engine.global_rank
            generator = torch.Generator().manual_seed(micro_batch)
            inputs, labels = torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)
            loss = nn.functional.mse_loss(engine(inputs.to(engine.device)), labels.to(engine.device))
            engine.backward(loss * (1e30 if micro_batch == 9 else 1))
            engine.step()
            losses.append(loss.item())
    if not resume:
        engine.save_checkpoint(folder, client_state={"window": WINDOWS // 2})
    engine.offload.synchronize()
    assert loader is not None
    found = {
        "weights": {name: each.cpu().clone() for name, each in engine.module.state_dict().items()},
        "counts": (engine.global_steps, engine.skipped_steps, scheduler.last_batch_iteration, engine.global_samples),
        "sizes": (engine.train_batch_size(), engine.gradient_accumulation_steps()),
        "moves": [move.why for move in engine.offload.telemetry.moves],
        "rows": [row for rows in loader.batch_sampler for row in rows],  # the pool's processes start no workers
    }
    engine.destroy()
    return found


def with_a_product_of_one_rank() -> None:
    deepspeed.initialize(model=nn.Linear(2, 2), config=CONFIG | {"gradient_accumulation_steps": 4})


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_two_ranks_train_what_one_trains_and_go_on_from_each_other(ranks: RankPool, tmp_path: Path) -> None:
    begun = [ranks.run(size, script, folder=tmp_path / f"of {size}") for size in (1, 2)]
    (alone,) = ranks.run(1, script, folder=tmp_path / "of 2", resume=True)
    first, second = ranks.run(2, script, folder=tmp_path / "of 1", resume=True, card=H200)
    assert first["moves"] == second["moves"] != [], "ranks begin with little in VRAM, and plan after the first window"
    assert (alone["sizes"], first["sizes"]) == ((16, 4), (16, 2))
    assert alone["counts"] == first["counts"] == second["counts"] == (4, 1, 2, 64)
    for one, *others in (alone, first, second), (begun[0][0], *begun[1]):
        for other in others:
            assert all(torch.equal(each, other["weights"][name]) for name, each in one["weights"].items())
    assert sorted(first["rows"] + second["rows"]) == sorted(alone["rows"]) == [*range(12)]
    assert alone["rows"][:2] == [first["rows"][0], second["rows"][0]]


def test_the_product_counts_the_ranks(ranks: RankPool) -> None:
    (error, _) = ranks.answers(2, with_a_product_of_one_rank)
    assert isinstance(error, ConfigError)
    assert "16 is not 4 x 4 x 2 = 32" in str(error)


TRAIN_PY = """
import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import offloadkit as deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

inputs = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
engine, optimizer, loader, _ = deepspeed.initialize(
    args=args,
    model=model,
    model_parameters=model.parameters(),
    training_data=TensorDataset(inputs, inputs.sum(1, keepdim=True)),
)
criterion = nn.MSELoss()
for epoch in range(3):
    for step, (rows, labels) in enumerate(loader):
        rows, labels = rows.to(engine.device), labels.to(engine.device)
        loss = criterion(engine(rows), labels)
        engine.backward(loss)
        engine.step()
numbers = torch.distributed.get_rank(), args.local_rank, engine.global_steps, engine.train_batch_size()
print("rank {} {} {} {}\\n".format(*numbers), end="")  # in one write: two ranks share the output
engine.save_checkpoint("checkpoints")
"""


def started(folder: Path, launcher: str) -> list[str]:
    """Lines printed by `train.py`, with fp16, fp32 data and the config in the same folder."""
    (folder / "train.py").write_text(TRAIN_PY)
    config = CONFIG | {"train_batch_size": 8, "steps_per_print": 8}
    (folder / "ds_config.json").write_text(json.dumps(config))
    command = f"-m {launcher} train.py --deepspeed --deepspeed_config ds_config.json"
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("step=24, ") for line in lines) == 1
    assert (folder / "checkpoints" / "latest").read_text() == "global_step24"
    return [line for line in lines if line.startswith("rank")]


@pytest.mark.slow
def test_a_train_py_under_torchrun(tmp_path: Path) -> None:
    lines = started(tmp_path, "torch.distributed.run --standalone --nproc-per-node=2")
    assert sorted(lines) == ["rank 0 0 24 8", "rank 1 1 24 8"]


@pytest.mark.slow
def test_a_train_py_under_deepspeeds_launcher(tmp_path: Path) -> None:
    """`deepspeed --num_gpus 1 train.py ...` passes `--local_rank` and makes only the first GPU visible."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    assert started(tmp_path, "deepspeed.launcher.runner --num_gpus 1") == ["rank 0 0 24 8"]
