"""`on_nonfinite="rollback"` on two ranks: NaN in one rank's gradients makes all ranks go back to the same step."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from offloadkit.engine.engine import OffloadEngine
from offloadkit.errors import NonFiniteGradientError, RolledBackError
from offloadkit.facts.config import OffloadConfig, Placement
from tests.distributed.doors import as_launched
from tests.distributed.pool import RankPool
from tests.distributed.runs import CPU_STEP, LEAST, RESIDENT, STREAMED_TO_GPU, model
from tests.models import tokens


def looped(folder: Path, placement: Placement, accumulation: int, times: int = 0) -> dict[str, Any]:
    """Four steps with a save after two. On the last rank the fourth step has NaN, `times` times."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = OffloadConfig(
        on_nonfinite="rollback", learning_rate=1e-2, gradient_accumulation=accumulation, placement=placement
    )
    batches, position, backs = tokens(4 * accumulation * size), 0, []
    with OffloadEngine(model(rank, dropout=0.3), config, device="cpu") as engine:
        scheduler = LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
        while position < 4:
            has_nan = rank == size - 1 and position == 3 and len(backs) < times
            try:
                for at in range(accumulation):
                    loss = engine(batches[(position * accumulation + at) * size + rank])
                    engine.backward(loss * (float("nan") if has_nan and at == 0 else 1.0))
                    engine.step()
            except RolledBackError as back:
                backs.append((back.step, back.num_updates, back.position))
                position = back.position
                continue
            except NonFiniteGradientError as error:
                return {"error": str(error), "backs": backs}
            scheduler.step()
            position += 1
            if position == 2:
                engine.save_checkpoint(folder, scheduler=scheduler, position=position)
        engine.synchronize()
        weights = {name: weight.clone() for name, weight in engine.module.state_dict().items()}
        return {"backs": backs, "weights": weights, "masters": engine.master_weights()}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("placement", "accumulation"),
    [
        (CPU_STEP, 1),
        pytest.param(CPU_STEP, 2, marks=pytest.mark.slow),
        pytest.param(RESIDENT, 1, marks=pytest.mark.slow),
        pytest.param(STREAMED_TO_GPU, 2, marks=pytest.mark.slow),
        pytest.param(LEAST, 1, marks=pytest.mark.slow),
    ],
)
def test_a_nan_on_one_rank_has_all_go_back(
    ranks: RankPool, tmp_path: Path, placement: Placement, accumulation: int
) -> None:
    options: dict[str, Any] = {"placement": placement, "accumulation": accumulation}
    found = ranks.run(2, looped, folder=tmp_path / "run", times=2, **options)
    expected = ranks.run(2, looped, folder=tmp_path / "whole", **options)
    for each, other in zip(found, expected, strict=True):
        assert each["backs"] == [(4, 2, 2)] * 2
        for numbers in ("weights", "masters"):
            assert all(torch.equal(value, other[numbers][name]) for name, value in each[numbers].items())


@pytest.mark.slow
def test_all_ranks_end_after_three_times(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, looped, folder=tmp_path, times=100, placement=CPU_STEP, accumulation=1)
    assert [each["backs"] for each in found] == [[(4, 2, 2)] * 3] * 2
    assert all("without passing step 4" in each["error"] for each in found)


def trained(folder: Path, times: int = 0) -> dict[str, torch.Tensor]:
    """Like `looped`, under a Trainer."""
    from offloadkit.hf.trainer import OffloadSeq2SeqTrainer
    from tests.hf.test_trainer_rollback import Spoils
    from tests.hf.training import arguments, seq2seq_rows, t5

    with as_launched() as (rank, size):
        args = arguments(folder, max_steps=4, save_strategy="steps", save_steps=2, per_device_train_batch_size=1)
        trainer = OffloadSeq2SeqTrainer(
            model=t5(dropout=0.1),
            args=args,
            train_dataset=seq2seq_rows(8),
            offload=OffloadConfig(on_nonfinite="rollback"),
            callbacks=[Spoils({4: times if rank == size - 1 else 0})],
        )
        with closing(trainer):
            trainer.train()
            return {name: weight.clone() for name, weight in trainer.model.state_dict().items()}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_a_trainer_on_two_ranks_goes_on_from_the_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, trained, folder=tmp_path / "run", times=2)
    expected = ranks.run(2, trained, folder=tmp_path / "whole")
    for each, other in zip(found, expected, strict=True):
        assert all(torch.equal(weight, other[name]) for name, weight in each.items())
