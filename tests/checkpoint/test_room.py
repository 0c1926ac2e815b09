"""A full disk is detected before training and before each save, and no data is lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offloadkit import OffloadConfig, OffloadEngine, OffloadSeq2SeqTrainer
from offloadkit.checkpoint import folder as folders
from offloadkit.errors import OutputError
from tests.hf.training import arguments, seq2seq_rows, t5


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sets the number of free bytes that the disk reports."""
    found = [2**40]
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda path: SimpleNamespace(free=found[0], total=2**41))
    return found


def trainer(folder: Path, offload: OffloadConfig | None = None, **options: Any) -> OffloadSeq2SeqTrainer:
    args = arguments(folder, **({"save_strategy": "steps", "save_steps": 1, "max_steps": 3} | options))
    return OffloadSeq2SeqTrainer(model=t5(), args=args, train_dataset=seq2seq_rows(), offload=offload)


def test_room_for_two_checkpoints_is_checked_before_the_first_step(
    tmp_path: Path, free: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trainer(tmp_path / "whole", max_steps=1)
    whole.train()
    assert whole.engine is not None
    one = whole.engine.snapshot().num_bytes()
    free[0] = int(1.5 * one)
    run = trainer(tmp_path / "run")
    with pytest.raises(OutputError, match=r"two checkpoints in .*run would take .* are free there: make room"):
        run.train()
    assert run.state.global_step == 0
    free[0] = int(2.5 * one)
    capsys.readouterr()
    trainer(tmp_path / "run").train()
    assert "room for 2 checkpoints" in capsys.readouterr().out
    trainer(tmp_path / "run", save_total_limit=1).train()
    assert "room for" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"save_strategy": "steps", "save_steps": 500, "max_steps": 3}, "a checkpoint"),
        ({"save_strategy": "steps", "save_steps": 2, "max_steps": 3}, "two checkpoints"),
        ({"save_strategy": "epoch", "max_steps": 9, "num_train_epochs": 1}, "two checkpoints"),
        ({"save_strategy": "epoch", "max_steps": 2, "num_train_epochs": 5}, "a checkpoint"),
        ({"save_strategy": "epoch", "num_train_epochs": 1.5}, "two checkpoints"),
        ({"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 2, "max_steps": 5}, "two checkpoints"),
        ({"save_strategy": "best", "eval_strategy": "epoch", "num_train_epochs": 1}, "a checkpoint"),
    ],
)
def test_room_is_needed_for_the_checkpoints_that_the_steps_make(
    tmp_path: Path, free: list[int], options: dict[str, Any], needed: str
) -> None:
    """Four steps are an epoch."""
    args = arguments(tmp_path, **({"max_steps": -1, "metric_for_best_model": "loss"} | options))
    run = OffloadSeq2SeqTrainer(model=t5(), args=args, train_dataset=seq2seq_rows(), eval_dataset=seq2seq_rows(2))
    free[0] = 0
    with pytest.raises(OutputError, match=rf"^{needed} in .* would take"):
        run.train()


@pytest.mark.slow
@pytest.mark.parametrize("contents", ["compact", "weights", "none"])
def test_a_disk_that_is_too_small_names_the_smaller_checkpoints_that_fit(
    tmp_path: Path, free: list[int], contents: str
) -> None:
    """Before and after the engine is built, in a Trainer and in a bare loop; and the options that are named work."""
    whole = trainer(tmp_path / "whole", max_steps=1)
    whole.train()
    assert whole.engine is not None
    numbers, plan = whole.engine.snapshot(), whole.engine.plan
    all_contents: tuple[Any, ...] = ("all", "compact", "weights")
    sizes = {name: 2 * numbers.num_bytes(contents=name) for name in all_contents}
    planned_sizes = {name: 2 * plan.checkpoint_bytes_of(name) for name in all_contents}  # with padding
    assert sizes["all"] > planned_sizes["compact"] > sizes["compact"] > planned_sizes["weights"] > sizes["weights"]
    free[0] = planned_sizes[contents] if contents in sizes else sizes["weights"] // 2
    names = {"OffloadConfig(checkpoint_precision='compact')": "compact", "save_only_model=True": "weights"}
    for planned in (None, OffloadConfig(ram="8GiB")):
        run = trainer(tmp_path / "run", offload=planned)
        with pytest.raises(OutputError, match=r"two checkpoints in .* are free there: make room") as error:
            run.train()
        assert (run.engine is None) is (planned is not None)
        for option, name in names.items():
            assert (f"or pass {option}, which takes" in str(error.value)) is (sizes[name] <= free[0])
    if contents == "none":
        return
    option: dict[str, Any] = {"save_only_model": True} if contents == "weights" else {}
    offload = OffloadConfig(checkpoint_precision="compact") if contents == "compact" else None
    trainer(tmp_path / "run", offload, save_total_limit=1, **option).train()
    free[0] //= 2
    with pytest.raises(OutputError, match=r"a checkpoint in .* make room.*, or pass save_only_model=True, which takes"):
        whole.engine.save_checkpoint(tmp_path / "saved")


def test_a_planned_checkpoint_without_room_is_refused_before_the_engine_is_built(
    tmp_path: Path, free: list[int]
) -> None:
    free[0] = 200_000  # enough for the weights, without states
    budget = OffloadConfig(ram="8GiB")  # a budget is planned for
    for options, refused in (
        ({}, r"two checkpoints in .* would take .* free there: make room.* or pass save_strategy='no'"),
        ({"save_only_model": True}, None),
        ({"save_steps": 4}, None),
        ({"save_strategy": "no"}, None),
    ):
        run = trainer(tmp_path / "run", offload=budget, num_train_epochs=1, **options)
        if refused:
            with pytest.raises(OutputError, match=refused):
                run.train()
            assert run.engine is None
        else:
            run.train()
            assert run.state.global_step == 3


@pytest.mark.parametrize(
    ("options", "is_said"), [({"save_total_limit": 1}, True), ({"save_total_limit": 2}, False), ({}, False)]
)
def test_a_line_says_that_one_checkpoint_alone_is_kept(
    options: dict[str, Any], is_said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path, **options).train()
    assert ("there is none before it to go back to. save_total_limit=2" in capsys.readouterr().out) is is_said


def test_a_disk_that_fills_up_is_found_before_a_save_and_the_last_checkpoint_stays(
    tmp_path: Path, free: list[int]
) -> None:
    from transformers import TrainerCallback

    class Fills(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                free[0] = 1000

    run = trainer(tmp_path)
    run.add_callback(Fills())
    with pytest.raises(OutputError, match="checkpoint-2 in"):
        run.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_a_save_of_the_bare_loop_without_room_leaves_the_one_before(tmp_path: Path, free: list[int]) -> None:
    with OffloadEngine(nn.Linear(8, 8), OffloadConfig(), device="cpu") as engine:
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        engine.save_checkpoint(tmp_path / "saved")
        before = shutil.copytree(tmp_path / "saved", tmp_path / "copy")
        free[0] = 100
        with pytest.raises(OutputError, match=r"a checkpoint in .*saved would take .* are free"):
            engine.save_checkpoint(tmp_path / "saved")
        assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == {
            path.name: path.read_bytes() for path in before.iterdir()
        }


RUNTIMES = "drive.mount('/content/drive')"


@pytest.mark.parametrize(
    ("folder", "is_lost"),
    [
        ("/content/run", True),
        ("/root/run", True),
        ("/content/drive/MyDrive/run", False),
        ("/content/gdrive/MyDrive/run", True),  # not mounted
        ("/mnt/bucket/run", False),
    ],
)
def test_what_colab_loses_with_its_runtime(folder: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = ("/", "/content/drive", "/mnt/bucket")
    monkeypatch.setattr(folders.os.path, "ismount", lambda path: str(path) in mounts)
    monkeypatch.delenv("COLAB_RELEASE_TAG", raising=False)
    assert folders.colab_disk_warning(Path(folder)) is None
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab_20261101")
    line = folders.colab_disk_warning(Path(folder))
    assert (line is not None) is is_lost
    assert line is None or "such as /content/drive/MyDrive/run" in line


@pytest.mark.parametrize(("saves", "is_said"), [("steps", True), ("no", False)])
def test_a_line_names_drive_once_where_a_runtime_takes_checkpoints_with_it(
    saves: str, is_said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folders.os.path, "ismount", lambda path: str(path) == "/")
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab_20261101")
    trainer(tmp_path, save_strategy=saves).train()
    assert capsys.readouterr().out.count(RUNTIMES) == is_said


def test_a_loop_names_drive_once_where_a_runtime_takes_its_checkpoints_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folders.os.path, "ismount", lambda path: str(path) == "/")
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab_20261101")
    with OffloadEngine(nn.Linear(8, 8), OffloadConfig(), device="cpu") as engine:
        engine.save_checkpoint(tmp_path / "first")
        engine.save_checkpoint(tmp_path / "second")
    assert capsys.readouterr().out.count(RUNTIMES) == 1
