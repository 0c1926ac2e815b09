"""Output folders: the newest checkpoint, and the leftovers and messages of a full disk."""

from __future__ import annotations

import copy
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import T5ForConditionalGeneration, TrainingArguments

from offloadkit import OffloadTrainer
from offloadkit.checkpoint.folder import (
    explained_write_errors,
    newest_checkpoint,
    replace_folder,
    rotate_checkpoints,
    set_aside,
    skipped_checkpoints,
    writable,
    write_manifest,
)
from offloadkit.checkpoint.origin import Origin
from offloadkit.errors import ConfigError, EngineStateError, ModelError, OutputError
from offloadkit.hf.resumed import check_same_model
from tests.hf.tiny import llama_config, t5_config

TORCH_ERROR = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 345344 vs 345232")
RUST_ERROR = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
FULL = [OSError(28, "No space left on device"), RUST_ERROR, TORCH_ERROR]


def checkpoint(folder: Path, step: int) -> Path:
    """A run's checkpoint with dummy files."""
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    for name in ("run.json", "trainer_state.json"):
        (path / name).write_text("{}")
    save_file({}, path / "states-00000-of-00001.safetensors")
    write_manifest(path, Origin("a run", 1, step))
    return path


def of_transformers(folder: Path, step: int) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    for name in ("optimizer.pt", "trainer_state.json"):
        (path / name).touch()
    return path


def test_the_newest_checkpoint_is_the_last_one_written_whatever_a_longer_run_before_left(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    of_transformers(folder, 900)
    newest = of_transformers(folder, 1000)
    assert newest_checkpoint(folder, verify=False) == newest, "transformers' checkpoints are ordered by step"
    for step in (120, 20, 30):
        newest = checkpoint(folder, step)
        assert newest_checkpoint(folder) == newest
    for step in (30, 20, 120):
        os.utime(folder / f"checkpoint-{step}" / "manifest.json")
    shutil.copytree(folder, tmp_path / "copy")
    assert newest_checkpoint(folder) == newest
    assert newest_checkpoint(tmp_path / "copy").name == newest.name


def test_a_run_that_fell_back_is_newer_than_the_broken_one_and_what_is_broken_is_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20, 30):
        newest = checkpoint(tmp_path, step)
    (newest / "run.json").write_text("[]")
    assert newest_checkpoint(tmp_path).name == "checkpoint-20"
    says = r"resuming from checkpoint-20, because a newer checkpoint is broken: run\.json of .*checkpoint-30 cannot"
    assert re.match(says, capsys.readouterr().out)
    newest = checkpoint(tmp_path, 25)
    assert newest_checkpoint(tmp_path) == newest
    (tmp_path / "checkpoint-10" / "states-00000-of-00001.safetensors").unlink()  # as if half removed
    assert [(path.name, why) for path, why in skipped_checkpoints(tmp_path)] == [
        ("checkpoint-10", "lacks states-00000-of-00001.safetensors, so a part of it was removed")
    ]
    rotate_checkpoints(tmp_path, 2, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-20", "checkpoint-25"]


def test_when_no_checkpoint_can_be_read_the_line_says_that_there_is_none_before(tmp_path: Path) -> None:
    (checkpoint(tmp_path, 10) / "trainer_state.json").write_text("[]")
    with pytest.raises(
        ModelError, match=r"^trainer_state\.json of .*No earlier checkpoint can be read: .*save_total_limit=2"
    ):
        newest_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        *((None, None, [1, 2, 3, 4]), (0, None, [1, 2, 3, 4]), (1, None, [4]), (2, None, [3, 4]), (1, 2, [2, 4])),
        *((2, 2, [2, 4]), (3, 2, [2, 3, 4]), (3, 4, [2, 3, 4]), (9, 1, [1, 2, 3, 4])),
    ],
)
def test_the_limit_keeps_the_newest_and_the_best(
    limit: int | None, best: int | None, left: list[int], tmp_path: Path
) -> None:
    """As in transformers."""
    for step in (1, 2, 3, 4):
        checkpoint(tmp_path, step)
    rotate_checkpoints(tmp_path, limit, None if best is None else str(tmp_path / f"checkpoint-{best}"))
    assert sorted(int(path.name.removeprefix("checkpoint-")) for path in tmp_path.iterdir()) == left


def test_a_new_save_under_the_name_of_an_older_one_puts_back_what_a_kill_had_left_beside(tmp_path: Path) -> None:
    """A kill came after the old checkpoint was set aside and the new one begun."""
    path = checkpoint(tmp_path, 5)
    path.rename(tmp_path / ".checkpoint-5-old")
    path.mkdir()

    def killed() -> None:
        with set_aside(path):
            path.mkdir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed()
    assert newest_checkpoint(tmp_path) == path


def test_an_output_folder_that_is_a_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(OutputError, match="is a file"):
        writable(tmp_path / "out")


@pytest.mark.parametrize("error", FULL, ids=["open", "safetensors", "torch"])
@pytest.mark.parametrize("had_one", [False, True])
def test_a_full_disk_leaves_the_earlier_model_or_nothing(tmp_path: Path, error: Exception, had_one: bool) -> None:
    folder = tmp_path / "model"
    if had_one:
        replace_folder(folder, lambda new: (new / "weights").write_text("old") and None)

    def save(new: Path) -> None:
        (new / "weights").write_text("half")
        raise error

    with pytest.raises(OutputError, match="make room"):
        replace_folder(folder, save)
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if had_one else [])
    assert not had_one or (folder / "weights").read_text() == "old"


def test_a_save_that_fails_in_its_last_moment_leaves_the_earlier_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rename = tmp_path / "model", Path.rename
    replace_folder(folder, lambda new: (new / "weights").write_text("old") and None)

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith("-new"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises(OutputError):
            replace_folder(folder, lambda new: (new / "weights").write_text("new") and None)
    assert (folder / "weights").read_text() == "old"


def test_a_pipe_is_not_replaced_by_a_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model")  # like /dev/null, which root could rename
    with pytest.raises(OutputError, match="model exists and is not a folder"):
        replace_folder(tmp_path / "model", lambda new: (new / "weights").write_text("new") and None)
    assert (tmp_path / "model").is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_that_a_killed_save_had_set_aside_is_not_lost(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    replace_folder(folder, lambda new: (new / "weights").write_text("old") and None)
    folder.rename(tmp_path / ".model-old")
    with pytest.raises(OutputError):
        replace_folder(folder, lambda new: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert (folder / "weights").read_text() == "old"


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory"), EngineStateError("closed")])
def test_other_faults_while_saving_stay_what_they_are(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), explained_write_errors(tmp_path):
        raise error


@pytest.mark.parametrize("error", FULL, ids=["open", "safetensors", "torch"])
def test_a_checkpoint_that_does_not_fit_on_the_disk_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise copy.copy(error)  # the argument's traceback would keep the trainer alive

    trainer = one_step_trainer(tmp_path)
    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", full)
    with pytest.raises(OutputError, match="make room"):
        trainer.train()


def test_resuming_does_not_call_tied_weights_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one_step_trainer(tmp_path).train()
    one_step_trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "missing keys" not in caplog.text


def one_step_trainer(folder: Path, max_steps: int = 1) -> OffloadTrainer:
    torch.manual_seed(0)
    rows = [{"input_ids": torch.arange(3, 9), "labels": torch.arange(3, 9)}] * 4
    args = TrainingArguments(
        str(folder), max_steps=max_steps, save_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
    )
    return OffloadTrainer(model=T5ForConditionalGeneration(t5_config()), args=args, train_dataset=rows)


@pytest.mark.parametrize(
    ("config", "difference"),
    [
        (llama_config(), "model_type t5, but this model has llama"),
        (t5_config(num_layers=3), "num_hidden_layers 2, but this model has 3"),
        (t5_config(d_model=32), "hidden_size 24, but this model has 32"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, config: Any, difference: str) -> None:
    t5_config().save_pretrained(tmp_path)
    check_same_model(tmp_path, t5_config())
    with pytest.raises(ConfigError, match=difference):
        check_same_model(tmp_path, config)
