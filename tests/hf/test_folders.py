"""Output folders: which checkpoint is the newest, and what a disk that fills up leaves and says."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import T5ForConditionalGeneration, TrainingArguments

from offloadkit import OffloadTrainer
from offloadkit.checkpoint.folder import (
    check_same_model,
    newest_checkpoint,
    put_in_place,
    rotate_checkpoints,
    writable,
    write_manifest,
    written_to,
)
from offloadkit.errors import ConfigError, EngineStateError, OutputError
from tests.hf.tiny import llama_config, t5_config

TORCH_ERROR = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 345344 vs 345232")
RUST_ERROR = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
FULL = [OSError(28, "No space left on device"), RUST_ERROR, TORCH_ERROR]


def checkpoint(folder: Path, step: int, written: int) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    for name in ("optimizer.pt", "trainer_state.json"):
        (path / name).touch()
        os.utime(path / name, (written, written))
    return path


def of_ours(folder: Path, step: int) -> Path:
    path = checkpoint(folder, step, written=1_000)
    (path / "optimizer.pt").unlink()
    (path / "trainer_state.json").write_text("{}")
    (path / "states-00000-of-00001.json").write_text("{}")
    write_manifest(path)
    return path


def test_the_newest_checkpoint_is_the_last_one_written_whatever_dates_and_a_longer_run_before_say(
    tmp_path: Path,
) -> None:
    older = of_ours(tmp_path, 120)
    ours = of_ours(tmp_path, 20)
    os.utime(older / "manifest.json")
    assert newest_checkpoint(tmp_path) == ours
    copied = tmp_path / "copy"
    copied.mkdir()
    for path in (ours, older):  # `cp -r` gives new dates
        shutil.copytree(path, copied / path.name)
        os.utime(copied / path.name / "manifest.json")
    assert newest_checkpoint(copied) == copied / ours.name
    (copied / ours.name / "trainer_state.json").write_text("[]")
    assert newest_checkpoint(copied) == copied / older.name, "a broken one falls back to the one before"


def test_the_oldest_checkpoints_go_but_neither_the_newest_nor_the_best(tmp_path: Path) -> None:
    for step in (50, 10, 20, 30):
        of_ours(tmp_path, step)
    rotate_checkpoints(tmp_path, 2, str(tmp_path / "checkpoint-50"))
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-50", "checkpoint-30"}
    of_ours(tmp_path, 5)
    rotate_checkpoints(tmp_path, 1, str(tmp_path / "checkpoint-50"))
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-50", "checkpoint-5"}
    rotate_checkpoints(tmp_path, 1, None)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-5"}


def test_an_output_folder_that_is_a_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(OutputError, match="is a file"):
        writable(tmp_path / "out")


@pytest.mark.parametrize("error", FULL, ids=["open", "safetensors", "torch"])
@pytest.mark.parametrize("had_one", [False, True])
def test_a_full_disk_leaves_the_earlier_model_or_nothing(tmp_path: Path, error: Exception, had_one: bool) -> None:
    folder = tmp_path / "model"
    if had_one:
        put_in_place(folder, lambda new: (new / "weights").write_text("old") and None)

    def save(new: Path) -> None:
        (new / "weights").write_text("half")
        raise error

    with pytest.raises(OutputError, match="make room"):
        put_in_place(folder, save)
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if had_one else [])
    assert not had_one or (folder / "weights").read_text() == "old"


def test_a_save_that_fails_in_its_last_moment_leaves_the_earlier_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, rename = tmp_path / "model", Path.rename
    put_in_place(folder, lambda new: (new / "weights").write_text("old") and None)

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith("-new"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        with pytest.raises(OutputError):
            put_in_place(folder, lambda new: (new / "weights").write_text("new") and None)
    assert (folder / "weights").read_text() == "old"


def test_a_model_that_a_killed_save_had_set_aside_is_not_lost(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    put_in_place(folder, lambda new: (new / "weights").write_text("old") and None)
    folder.rename(tmp_path / ".model-old")
    with pytest.raises(OutputError):
        put_in_place(folder, lambda new: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert (folder / "weights").read_text() == "old"


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory"), EngineStateError("closed")])
def test_other_faults_while_saving_stay_what_they_are(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), written_to(tmp_path):
        raise error


@pytest.mark.parametrize("error", FULL, ids=["open", "safetensors", "torch"])
def test_a_checkpoint_that_does_not_fit_on_the_disk_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise copy.copy(error)  # the parameter would keep the trainer by its traceback

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
        (llama_config(), "model_type t5, and this one has llama"),
        (t5_config(num_layers=3), "num_hidden_layers 2, and this one has 3"),
        (t5_config(d_model=32), "hidden_size 24, and this one has 32"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, config: Any, difference: str) -> None:
    t5_config().save_pretrained(tmp_path)
    check_same_model(tmp_path, t5_config())
    with pytest.raises(ConfigError, match=difference):
        check_same_model(tmp_path, config)
