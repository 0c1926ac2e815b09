"""An output folder with an earlier run: never replaced unasked; resumed or replaced as the user says."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    TrainingArguments,
)

import offloadkit
from offloadkit import OffloadTrainer
from offloadkit.errors import ConfigError, DataError, OutputError
from tests.hf.tiny import llama_config, t5_config

PAIRS = [{"input": f"{number}+1", "target": str(number + 1)} for number in range(4)]
SMALL: dict[str, Any] = {"d_model": 16, "d_ff": 24, "num_layers": 1}


pytestmark = pytest.mark.usefixtures("one_thread", "own_folder")


def t5(**changes: Any) -> Any:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**t5_config(**(SMALL | changes)).to_dict()))


def finetune(model: Any, rows: Any = PAIRS, **options: Any) -> offloadkit.FinetuneResult:
    defaults: dict[str, Any] = {"tokenizer": "byte", "batch_size": 4, "use_cpu": True, "output_dir": "out"}
    return offloadkit.finetune(model, rows, **(defaults | {"max_steps": 1} | options))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def used() -> Path:
    """A folder as an earlier run leaves it, with a file from the user."""
    for name in ("model/config.json", "checkpoint-1/config.json", "checkpoint-7/trainer_state.json", "mine.txt"):
        path = Path("out") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    return Path("out")


def test_a_used_folder_is_refused_before_anything_is_done(used: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out-2").mkdir()
    before = contents(used)
    says = r"out contains a trained model .*resume=True \(--resume\).*overwrite=True \(--overwrite\).* such as out-3$"
    with pytest.raises(ConfigError, match=says):
        finetune("no/such-model", "no/such-rows")
    assert contents(used) == before
    assert capsys.readouterr().out == ""


def test_checkpoints_alone_make_a_folder_used_and_files_of_others_do_not(used: Path) -> None:
    (used / "model" / "config.json").rename(used / "config.json")
    (used / "model").rmdir()
    with pytest.raises(ConfigError, match=r"contains checkpoints \(checkpoint-7\) of an earlier run"):
        finetune(t5())
    for name in ("checkpoint-1", "checkpoint-7"):
        (used / name).rename(used / f"{name}-of-mine")
    assert finetune(t5(), save_strategy="no").model_dir.is_dir()


def test_overwriting_replaces_what_finetune_writes_and_nothing_else(used: Path) -> None:
    """A new checkpoint replaces an old one with its name as a whole, and is kept during training."""
    (used / "checkpoint-1" / "old.bin").touch()
    (used / "checkpoint-x").mkdir()
    (used / ".checkpoint-4-old").mkdir()
    result = finetune(t5(), overwrite=True, max_steps=2, save_strategy="steps", save_steps=1, save_total_limit=3)
    assert sorted(path.name for path in used.iterdir()) == [
        *("checkpoint-1", "checkpoint-2", "checkpoint-x", "mine.txt", "model", "recipe.yaml", "steps.jsonl")
    ]
    assert not (used / "checkpoint-1" / "old.bin").exists()
    assert json.loads((result.model_dir / "config.json").read_text())["model_type"] == "t5"


def test_overwriting_removes_nothing_before_a_step_is_done(used: Path) -> None:
    before = contents(used)
    with pytest.raises(DataError):
        finetune(t5(), [{"a": "b"}], overwrite=True)
    with pytest.raises(ZeroDivisionError):
        finetune(failing(), overwrite=True)
    assert contents(used) == before


def failing() -> Any:
    model = t5()

    def fail(*_: Any) -> None:
        _ = 1 / 0

    model.lm_head.register_forward_hook(fail)
    return model


def test_the_folder_is_tried_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    probes, make = [], tempfile.mkdtemp

    def counting(**named: Any) -> str:
        probes.extend(name for name in [named.get("prefix")] if str(name).startswith(".offloadkit-probe-"))
        return make(**named)

    monkeypatch.setattr(tempfile, "mkdtemp", counting)
    finetune(t5())
    assert len(probes) == 1
    args = TrainingArguments(output_dir="other", max_steps=1, use_cpu=True, report_to=[], save_strategy="epoch")
    with closing(OffloadTrainer(t5(), args, train_dataset=[{"input_ids": [1], "labels": [1]}])) as trainer:
        trainer.train()
    assert len(probes) == 2


def test_a_folder_named_model_that_holds_no_model_is_never_replaced(used: Path) -> None:
    (used / "model" / "config.json").rename(used / "model" / "train.py")
    with pytest.raises(OutputError, match=r"model is not a saved model, .*pass another output_dir, such as out-2"):
        finetune(t5(), overwrite=True)


def test_a_model_that_a_killed_save_had_set_aside_counts(used: Path) -> None:
    (used / "model").rename(used / ".model-old")
    with pytest.raises(ConfigError, match="contains a trained model"):
        finetune(t5())


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_checkpoint_that_is_trained_from_is_not_removed(used: Path, in_memory: bool) -> None:
    t5().save_pretrained("out/checkpoint-7")
    model = T5ForConditionalGeneration.from_pretrained("out/checkpoint-7") if in_memory else "out/checkpoint-7"
    with pytest.raises(ConfigError, match=r"reads \S*out/checkpoint-7, which overwrite=True would remove"):
        finetune(model, overwrite=True)


@pytest.mark.parametrize("permission", [{"overwrite": True}, {"resume": True}])
@pytest.mark.parametrize("name", ["pairs[1].jsonl", "*.jsonl", "list"])
def test_data_inside_the_model_that_is_replaced_is_not_lost(used: Path, name: str, permission: dict[str, bool]) -> None:
    file = used / "model" / "pairs[1].jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    rows = [str(file)] if name == "list" else str(file.with_name(name))
    with pytest.raises(
        ConfigError, match=r"reads \S*out/model/pairs\[1\].jsonl, and its model would replace out/model"
    ):
        finetune(t5(), rows, **permission)
    assert file.exists()


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_model_that_is_replaced_by_what_is_trained_from_it_is_whole(in_memory: bool) -> None:
    """transformers maps the file it reads."""
    weights = finetune(t5(), max_steps=2, save_strategy="no").model.state_dict()
    model = T5ForConditionalGeneration.from_pretrained("out/model") if in_memory else "out/model"
    trained = finetune(model, max_steps=2, save_strategy="no", overwrite=True).model.state_dict()
    saved = T5ForConditionalGeneration.from_pretrained("out/model").state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in trained.items())
    assert not all(torch.equal(weights[name], weight) for name, weight in trained.items())


def test_resuming_another_models_run_is_refused_before_anything_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    finetune(t5())
    before = contents(Path("out"))
    capsys.readouterr()
    others = [LlamaForCausalLM(LlamaConfig(**llama_config().to_dict())), t5(d_ff=32), t5(num_heads=4, d_kv=4)]
    for other in others:
        with pytest.raises(ConfigError, match=r"out/checkpoint-1 is from another model, with .* another output_dir"):
            finetune(other, resume=True, max_steps=2)
    assert capsys.readouterr().out == ""
    assert contents(Path("out")) == before


def test_going_on_and_replacing_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="pass one"):
        finetune(t5(), resume=True, overwrite=True)


@pytest.mark.parametrize("kind", ["link", "dangling link", "mount"])
def test_a_model_folder_that_cannot_be_replaced_is_found_before_training(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("out").mkdir()
    if kind == "mount":
        (Path("out") / "model").mkdir()
        monkeypatch.setattr("os.path.ismount", lambda path: Path(path).name == "model")
    else:
        elsewhere = Path("elsewhere")
        if kind == "link":
            elsewhere.mkdir()
        (Path("out") / "model").symlink_to(elsewhere.absolute())
    says = rf"model is a {'mount point' if kind == 'mount' else 'link'}.*remove it, or pass another output_dir"
    with pytest.raises(OutputError, match=says):
        finetune("no/such-model", PAIRS, overwrite=True)


def test_two_trainings_in_one_folder_at_once_are_refused_and_the_first_is_unharmed() -> None:
    raised: list[str] = []
    trainer = OffloadTrainer(model=t5(), args=TrainingArguments("out", report_to="none", use_cpu=True))

    class Second(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            def train() -> None:
                try:
                    trainer.train()
                except OutputError as error:
                    raised.append(str(error))

            thread = threading.Thread(target=train)
            thread.start()
            thread.join()

    result = finetune(t5(), callbacks=[Second()], max_steps=2)
    assert len(raised) == 2
    assert "out is in use by another thread of process" in raised[0]
    alone = finetune(t5(), output_dir="alone", max_steps=2)
    assert all(torch.equal(result.model.state_dict()[name], value) for name, value in alone.model.state_dict().items())


def test_a_folder_whose_first_save_was_killed_is_begun_anew_with_overwrite(tmp_path: Path) -> None:
    (tmp_path / "out" / "checkpoint-3").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no checkpoint is complete.*overwrite=True \(--overwrite\) to start over"):
        finetune(t5())
    with pytest.raises(ConfigError, match=r"Pass overwrite=True \(--overwrite\) instead of resume"):
        finetune(t5(), resume=True)
    finetune(t5(), overwrite=True)
    assert not Path("out/checkpoint-3").exists()


@pytest.mark.slow
def test_a_run_that_is_killed_before_it_replaces_another_does_not_resume_that() -> None:
    finetune(t5())

    def killed(*_: Any, **__: Any) -> None:
        os._exit(9)

    pid = os.fork()
    if pid == 0:
        from offloadkit.hf.trainer import OffloadSeq2SeqTrainer

        OffloadSeq2SeqTrainer.train = killed  # type: ignore[method-assign]
        finetune(t5(), overwrite=True)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    with pytest.raises(ConfigError, match=r"was to be replaced .* killed before its first step"):
        finetune(t5(), resume=True, max_steps=2)
    finetune(t5(), overwrite=True)
    finetune(t5(), resume=True, max_steps=2)


def test_a_run_that_fails_before_it_replaces_another_leaves_it_to_be_resumed() -> None:
    finetune(t5())
    with pytest.raises(DataError):
        finetune(t5(), [{"input": "a"}], overwrite=True)
    finetune(t5(), resume=True, max_steps=2)
