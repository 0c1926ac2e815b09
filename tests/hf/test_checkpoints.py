"""The Trainer's checkpoints: data instead of pickles, complete or refused, and checkpoints of earlier versions."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback

from offloadkit import OffloadConfig, OffloadSeq2SeqTrainer
from offloadkit.checkpoint import folder as folders
from offloadkit.checkpoint.folder import check_readable, newest_checkpoint, skipped_checkpoints
from offloadkit.checkpoint.origin import recorded_origin
from offloadkit.errors import ConfigError, ModelError
from offloadkit.hf.saving import load_in_pieces
from tests.hf.training import arguments, seq2seq_rows, t5

OPTIONS: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "save_total_limit": 2}


class TrainerOfBefore(OffloadSeq2SeqTrainer):
    """Writes checkpoints as offloadkit did when they were the Trainer's own."""

    _save_checkpoint = Trainer._save_checkpoint
    _save = Trainer._save
    _save_optimizer_and_scheduler = Trainer._save_optimizer_and_scheduler
    _save_rng_state = Trainer._save_rng_state


def trainer(
    folder: Path,
    cls: type[OffloadSeq2SeqTrainer] = OffloadSeq2SeqTrainer,
    *,
    offload: OffloadConfig | None = None,
    **options: Any,
) -> Any:
    args, rows = arguments(folder, **(OPTIONS | options)), seq2seq_rows()
    return cls(model=t5(dropout=0.1), args=args, train_dataset=rows, eval_dataset=rows, offload=offload)


def weights(trained: Any) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trained.model.state_dict().items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run's folder with checkpoint-2 and checkpoint-3, and the final weights."""
    folder = tmp_path_factory.mktemp("whole")
    trained = trainer(folder)
    trained.train()
    return folder, weights(trained)


def test_a_checkpoint_holds_no_pickle_and_its_manifest_names_every_file(whole: Any) -> None:
    checkpoint = whole[0] / "checkpoint-3"
    names = {path.name for path in checkpoint.iterdir()}
    assert {"config.json", "model.safetensors", "run.json", "random.json", "training_args.json"} <= names
    assert {Path(name).suffix for name in names} == {".json", ".safetensors"}
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    assert files.keys() == names - {"manifest.json"}
    assert all((checkpoint / name).stat().st_size == saved["size"] for name, saved in files.items())
    assert sorted(path.name for path in whole[0].glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]


def test_each_file_of_ours_says_whose_it_is_and_one_of_another_step_or_run_is_named(tmp_path: Path) -> None:
    """Rows in an order by length have a separate file."""
    for name in ("run", "other"):
        trainer(tmp_path / name, max_steps=2, train_sampling_strategy="group_by_length").train()
    newest = tmp_path / "run" / "checkpoint-2"
    own = folders.origin_of(newest)
    names = ["order.json", "random.json", "run.json", "states-00000-of-00001.safetensors"]
    assert [recorded_origin(newest / name) for name in names] == [(own, name) for name in names]
    for other in (tmp_path / "run" / "checkpoint-1", tmp_path / "other" / "checkpoint-2"):
        for name in names:
            copy = shutil.copytree(newest, tmp_path / "copy" / "checkpoint-2")
            shutil.copy(other / name, copy / name)
            with pytest.raises(ModelError, match="files of two checkpoints were mixed") as raised:
                check_readable(copy)
            said = (
                f"{name} of the checkpoint {copy} was written by {folders.origin_of(other)}, but manifest.json by {own}"
            )
            assert str(raised.value).startswith(said)
            shutil.rmtree(copy)


def test_a_run_that_goes_on_keeps_its_name_and_counts_its_attempts(whole: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "run")
    first = folders.origin_of(folder / "checkpoint-3")
    assert first[1:] == (1, 3)
    for attempt in (2, 3):
        trainer(folder, max_steps=3 + attempt).train(resume_from_checkpoint=True)
        assert folders.origin_of(newest_checkpoint(folder)) == (first.run, attempt, 3 + attempt)


@pytest.mark.parametrize("size", ["1GB", "10KB"], ids=["one file", "several"])
def test_a_resumed_model_in_memory_gets_its_weights_in_pieces(
    size: str, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would read a whole file at once. A tied weight is saved under one of its names."""
    expected, model = t5(), t5()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.add_(1)
    expected.save_pretrained(tmp_path, max_shard_size=size)
    assert len(list(tmp_path.glob("*.safetensors"))) > (size == "10KB")
    given = [id(weight) for weight in model.parameters()]
    resumed = trainer(tmp_path)
    resumed.model = model
    monkeypatch.setattr("safetensors.torch.load_file", lambda *args, **kwargs: 1 / 0)
    monkeypatch.setattr("safetensors.safe_open", lambda *args, **kwargs: 1 / 0)
    resumed._load_from_checkpoint(str(tmp_path))
    assert all(weight.equal(expected.state_dict()[name]) for name, weight in model.state_dict().items())
    assert given == [id(weight) for weight in model.parameters()]


@pytest.mark.parametrize("change", ["another name", "a name is missing", "another shape", "two values"])
def test_weights_that_are_not_just_the_models_are_left_to_transformers(change: str, tmp_path: Path) -> None:
    t5().save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    name = "decoder.final_layer_norm.weight"
    if change == "another name":
        saved["other"] = torch.zeros(1)
    elif change == "two values":
        saved["lm_head.weight"] = saved["shared.weight"] + 1
    elif change == "another shape":
        saved[name] = torch.zeros(3)
    else:
        del saved[name]
    save_file(saved, tmp_path / "model.safetensors")
    model = t5()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert not load_in_pieces(model, tmp_path)
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())


def test_a_checkpoint_of_an_earlier_version_is_gone_on_from(whole: Any, tmp_path: Path) -> None:
    trainer(tmp_path, TrainerOfBefore).train()
    old = tmp_path / "checkpoint-2"
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth"} <= {path.name for path in old.iterdir()}
    assert not (old / "manifest.json").exists()
    shutil.rmtree(tmp_path / "checkpoint-3")
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
    assert all(torch.equal(weight, whole[1][name]) for name, weight in weights(resumed).items())
    os.truncate(old / "optimizer.pt", 100)
    with pytest.raises(ModelError, match=r"^optimizer\.pt of the checkpoint .* cannot be read"):
        trainer(tmp_path).train(resume_from_checkpoint=str(old))


def test_a_checkpoint_that_was_not_finished_is_skipped_and_refused_by_name(whole: Any, tmp_path: Path) -> None:
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint-3" / "manifest.json").unlink()
    with pytest.raises(ModelError, match=r"checkpoint-3: it has no manifest.*continues from checkpoint-2"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [path.name for path, _ in skipped_checkpoints(tmp_path)] == ["checkpoint-3"]
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert all(torch.equal(weight, whole[1][name]) for name, weight in weights(resumed).items())
    for checkpoint in tmp_path.glob("checkpoint-*"):
        (checkpoint / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"no complete checkpoint .*; checkpoint-3 has no manifest"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_weights_cut_into_other_files_later_are_refused_unless_asked_and_a_missing_file_is_named(
    whole: Any, tmp_path: Path
) -> None:
    shutil.copytree(whole[0] / "checkpoint-2", tmp_path / "checkpoint-2")
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors of .* cannot be read \(it is missing\)"):
        check_readable(file.parent)
    shards = {name: f"model-{at:05d}-of-{len(tensors):05d}.safetensors" for at, name in enumerate(tensors, 1)}
    for name, shard in shards.items():
        save_file({name: tensors[name]}, file.with_name(shard), metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": shards}
    file.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"were split into other files.*resume_incomplete=True"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    args = arguments(tmp_path, **OPTIONS)
    offload = OffloadConfig(resume_incomplete=True)
    resumed = OffloadSeq2SeqTrainer(model=t5(dropout=0.1), args=args, train_dataset=seq2seq_rows(), offload=offload)
    resumed.train(resume_from_checkpoint=True)
    assert all(torch.equal(weight, whole[1][name]) for name, weight in weights(resumed).items())
    file.with_name(shard).unlink()
    with pytest.raises(ModelError, match="it is missing"):
        check_readable(file.parent, recut=True)


def test_older_checkpoints_stay_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(tmp_path, max_steps=1, save_total_limit=1).train()
    again = trainer(tmp_path, max_steps=2, save_total_limit=1)

    def killed(checkpoint: Path, origin: object, contents: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("offloadkit.hf.checkpoints.write_manifest", killed)
        with pytest.raises(KeyboardInterrupt):
            again.train(resume_from_checkpoint=True)
    assert again.args.save_total_limit == 1
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    (tmp_path / "checkpoint-1").rename(tmp_path / ".checkpoint-1-old")  # as after a kill in a second save
    (tmp_path / "checkpoint-1").mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    again.train(resume_from_checkpoint=True)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize("broken", ["flipped", "of another step", "missing", "manifest", "added later"])
def test_a_broken_checkpoint_falls_back_to_the_one_before_with_a_line(
    broken: str, whole: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    before, newest = tmp_path / "checkpoint-2", tmp_path / "checkpoint-3"
    name = {"manifest": "manifest.json", "added later": "random-00001.json"}.get(broken, "model.safetensors")
    if broken in ("flipped", "manifest"):
        content = bytearray((newest / name).read_bytes())
        content[-9] ^= 1
        (newest / name).write_bytes(content)
    elif broken == "of another step":
        shutil.copy(before / name, newest / name)
    elif broken == "added later":
        shutil.copy(before / "random.json", newest / name)
    else:
        (newest / name).unlink()
    resumed = trainer(tmp_path, save_total_limit=1)
    resumed.train(resume_from_checkpoint=True)
    assert all(torch.equal(weight, whole[1][name]) for name, weight in weights(resumed).items())
    if broken in ("missing", "manifest"):  # skipped without reading any file
        assert newest_checkpoint(tmp_path) == newest, "the checkpoint must be written again"
    else:
        why = "was written as random.json" if broken == "added later" else "cannot be read"
        assert f"{name} of the checkpoint {newest} {why}" in (said := capsys.readouterr().out)
        assert "resuming from checkpoint-2, because a newer checkpoint is broken: " in said
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    check_readable(newest)


def test_a_best_model_that_is_broken_is_refused_by_name(tmp_path: Path) -> None:
    options = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "loss",
    }
    mine = trainer(tmp_path, **options)

    class Flips(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                path = Path(state.best_model_checkpoint) / "model.safetensors"
                content = bytearray(path.read_bytes())
                content[-1] ^= 64
                path.write_bytes(content)

    mine.add_callback(Flips())
    with pytest.raises(ModelError, match=r"^model\.safetensors of .*its bytes from 0 on.*load_best_model_at_end=False"):
        mine.train()


@pytest.mark.slow
@pytest.mark.parametrize("door", ["argument", "config"])
def test_a_run_goes_on_from_weights_alone_with_step_schedule_rows_and_new_moments(tmp_path: Path, door: str) -> None:
    options: dict[str, Any] = {"save_only_model": True} if door == "argument" else {}
    offload = OffloadConfig(save_only_model=door == "config")
    logged: dict[str, Any] = {"logging_steps": 1, "max_steps": 4, "train_sampling_strategy": "group_by_length"}
    uninterrupted = trainer(tmp_path / "whole", **logged)
    uninterrupted.train()
    mine = trainer(tmp_path, **logged, **options, offload=offload)
    mine.train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    checkpoint = tmp_path / "checkpoint-3"
    assert not list(checkpoint.glob("states-*"))
    assert folders.contents_of(checkpoint) == "weights"
    saved = load_file(checkpoint / "model.safetensors")
    resumed = trainer(tmp_path, **logged, **options, offload=offload)
    with pytest.warns(RuntimeWarning, match="the checkpoint has the weights alone"):
        resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert resumed.engine.num_updates == 4
    states = resumed.engine.state_dict()["optimizer"].values()
    assert {int(each["step"]) for each in states} == {1}
    (now,), (before,) = (
        [log for log in each.state.log_history if log.get("step") == 4 and "loss" in log]
        for each in (resumed, uninterrupted)
    )
    assert (now["loss"], now["learning_rate"]) == (before["loss"], before["learning_rate"])
    first = saved["shared.weight"]
    moved = (resumed.model.state_dict()["shared.weight"] - first).abs().max()
    assert 0 < moved <= 1.1 * before["learning_rate"]  # the first step of AdamW


@pytest.mark.slow
def test_an_interrupted_run_of_weights_alone_writes_and_resumes_weights_alone(tmp_path: Path) -> None:
    class Interrupts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGINT)

    options: dict[str, Any] = {"save_only_model": True, "save_strategy": "epoch"}
    mine = trainer(tmp_path, **options)
    mine.add_callback(Interrupts())
    with pytest.raises(KeyboardInterrupt):
        mine.train()
    assert folders.contents_of(tmp_path / "checkpoint-2") == "weights"
    resumed = trainer(tmp_path, **options)
    with pytest.warns(RuntimeWarning, match="the checkpoint has the weights alone"):
        resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


def test_weights_alone_of_before_are_not_gone_on_from(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=1, save_only_model=True).train()
    folders.write_manifest(checkpoint := tmp_path / "checkpoint-1", folders.origin_of(checkpoint))
    with pytest.raises(ModelError, match="checkpoint-1: it has only weights, no optimizer states"):
        trainer(tmp_path).train(resume_from_checkpoint=str(checkpoint))


def test_a_scheduler_that_cannot_be_saved_is_refused_before_training(tmp_path: Path) -> None:
    model, args = t5(dropout=0.1), arguments(tmp_path, **OPTIONS)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.AdamW(model.parameters()), 1)
    scheduler.callback = print  # type: ignore[attr-defined]
    mine: Any = OffloadSeq2SeqTrainer(
        model=model, args=args, train_dataset=seq2seq_rows(), optimizers=(None, scheduler)
    )
    with pytest.raises(ConfigError, match=r"the scheduler's state\['callback'\] is a builtin_function"):
        mine.train()
    assert mine.state.global_step == 0


def test_a_file_is_replaced_and_never_cut(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with path.open("rb") as mapped:
        with folders.atomic_write(path) as file:
            file.write(b"new")
        assert mapped.read() == b"old"
    assert path.read_bytes() == b"new"


class _KilledError(BaseException):
    """Simulates a kill."""


@pytest.mark.parametrize(
    "again", [pytest.param(False, id="a new step"), pytest.param(True, id="the same step anew", marks=pytest.mark.slow)]
)
def test_a_save_stopped_at_each_of_its_renames_syncs_and_removals_leaves_the_newest_or_the_one_before(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All file operations from the n-th on are left out. The limit is one checkpoint, so older ones are removed too."""
    folder, left = tmp_path / "run", [10**9]

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise _KilledError
            return real(*args, **kwargs)

        return call

    mine = trainer(folder, save_total_limit=1, max_steps=2)
    mine.train()
    whole = {"checkpoint-2": digests(folder / "checkpoint-2")}
    shutil.copytree(folder, tmp_path / "before")
    mine.state.global_step += not again
    if again:
        torch.rand(1)  # changes the saved random states
    mine._save_checkpoint(mine.model, None)
    newest = f"checkpoint-{mine.state.global_step}"
    assert [path.name for path in folder.glob("checkpoint-*")] == [newest]
    whole["new"] = digests(folder / newest)
    for name in ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    seen, kill, done = set(), 0, False
    while not done:
        left[0] = 10**9
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "before", folder)
        left[0] = kill
        try:
            mine._save_checkpoint(mine.model, None)
            done = True
        except _KilledError:
            kill += 1
        left[0] = 10**9
        found = digests(newest_checkpoint(folder))
        assert found in whole.values(), f"no checkpoint is whole after {kill} operations"
        seen.add(found == whole["new"])
    assert seen == {True, False}
    assert kill > 30
    left[0] = 10**9
    monkeypatch.undo()


def digests(checkpoint: Path) -> dict[str, Any]:
    check_readable(checkpoint)
    files: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return files


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_finished_run_that_is_extended_follows_the_longer_schedule_at_once(tmp_path: Path, schedule: str) -> None:
    options: dict[str, Any] = {"lr_scheduler_type": schedule, "warmup_steps": 1, "logging_steps": 1}

    def rates(trained: Any) -> list[float]:
        return [log["learning_rate"] for log in trained.state.log_history if "loss" in log][3:]

    whole = trainer(tmp_path / "whole", max_steps=6, **options)
    whole.train()
    trainer(tmp_path / "parts", **options).train()
    longer = trainer(tmp_path / "parts", max_steps=6, **options)
    longer.train(resume_from_checkpoint=True)
    assert rates(longer) == rates(whole)
    assert min(rates(longer)) > 0
