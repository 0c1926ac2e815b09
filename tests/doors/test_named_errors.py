"""Meaningless inputs, a few of each kind that `benchmarks/fuzz.py` draws: the error names the faulty value."""

from __future__ import annotations

import json
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offloadkit
from offloadkit import OffloadConfig, OffloadEngine, Placement
from offloadkit.checkpoint.folder import origin_of, write_manifest
from offloadkit.errors import (
    ConfigError,
    DataError,
    ModelError,
    ModelNotFoundError,
    OffloadkitError,
    OutputError,
    ThreadLimitError,
    WorkerError,
)
from offloadkit.facts.config import check_counts
from offloadkit.hf.hub import check_folder
from offloadkit.hf.read import load_dataset_like
from offloadkit.hf.source import resolve
from tests.hf.tiny import llama_config, save_config, t5_config


def small_engine(**options: Any) -> OffloadEngine:
    torch.manual_seed(0)
    config = OffloadConfig(**({"placement": Placement()} | options))
    return OffloadEngine(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), config, device="cpu")


def step(engine: OffloadEngine) -> None:
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()


@pytest.fixture(scope="module")
def engine() -> Iterator[OffloadEngine]:
    """An engine that must still take steps after each error."""
    with small_engine() as opened:
        yield opened


# -- options


@pytest.mark.parametrize("size", ["9" * 400 + "GiB", "9" * 5000, 10**400, "1" * 30 + "TiB"])
def test_more_bytes_than_any_machine_has_are_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"^vram: .* is more than any machine has"):
        OffloadConfig(vram=size)


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 10**400},
        {"gradient_accumulation": 10**400},
        {"precision": [["x"] * 1000]},
        {"exchange": torch.ones(3)},
        {"disk": "a\0b"},
        {"disk": 3},
        {"seed": "x" * 10**6},
    ],
)
def test_an_option_is_named_and_its_value_cut(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=name) as caught:
        OffloadConfig(**options)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("x", "param_groups must be a list of dicts, got 'x'"),
        (3, "param_groups must be a list of dicts, got 3"),
        ([3], r"param_groups\[0\] must be a dict with 'params', got 3"),
        ([{"lr": 1}], r"param_groups\[0\] must be a dict with 'params'"),
        ([{"params": 3}], r"params of param_groups\[0\] must be parameters, got 3"),
        ([{"params": "ab"}], r"params of param_groups\[0\] must be parameters"),
    ],
)
def test_groups_that_are_none_are_refused_by_name(groups: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffloadEngine(nn.Linear(2, 2), OffloadConfig(placement=Placement()), param_groups=groups, device="cpu")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"lr": "fast"}, "lr of a parameter group must be a finite number, got 'fast'"),
        ({"lr": float("nan")}, "lr of a parameter group must be a finite number, got nan"),
        ({"betas": (0.9,)}, "betas of a parameter group must be two numbers"),
        ({"betas": ("a", "b")}, "betas of a parameter group must be a finite number, got 'a'"),
        ({"weight_decay": None}, "weight_decay of a parameter group must be a finite number, got None"),
        ({"eps": 10**400}, "eps of a parameter group"),
    ],
)
def test_a_groups_option_that_is_no_number_is_named(option: dict[str, Any], message: str) -> None:
    module = nn.Linear(2, 2)
    groups = [{"params": module.parameters(), **option}]
    with pytest.raises(ConfigError, match=message):
        OffloadEngine(module, OffloadConfig(placement=Placement()), param_groups=groups, device="cpu")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": 3}, "model must be a torch.nn.Module, got 3"),
        ({"config": {"vram": "8GiB"}}, "config must be an OffloadConfig"),
        ({"plan": "mine"}, "plan must be what offloadkit.plan"),
        ({"device": "gpu please"}, "device must be a name such as 'cuda'"),
        ({"device": 3}, "device must be a torch.device"),
        ({"evaluation_rows": -1}, "evaluation_rows must be a whole number"),
    ],
)
def test_arguments_of_an_engine_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OffloadkitError, match=message):
        OffloadEngine(**({"model": nn.Linear(2, 2), "device": "cpu"} | given))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda engine: engine.save_checkpoint("a\0b"), "folder .*NUL"),
        (lambda engine: engine.load_checkpoint("x" * 300), "folder .*300 bytes"),
        (lambda engine: engine.profile(path="a\ud800"), "path .*surrogate"),
        (lambda engine: engine.save_checkpoint("x", scheduler=3), "scheduler must be a scheduler"),
        (lambda engine: engine.move("elsewhere"), "plan must be what offloadkit.plan"),
    ],
)
def test_arguments_of_an_engines_methods_are_named(
    use: Callable[[OffloadEngine], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with small_engine() as engine, pytest.raises(ConfigError, match=message):
        use(engine)
    assert not list(tmp_path.iterdir())


def test_counts_of_a_comparison_have_an_end() -> None:
    with pytest.raises(ConfigError, match="num_samples must be a whole number"):
        check_counts({"num_samples": 10**400})


# -- checkpoints with a manifest that matches the file


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoint-1"
    with small_engine() as engine:
        step(engine)
        engine.save_checkpoint(folder, position={"text": "a\ud800", "deep": [[[{"$x": 2**70}]]]})
    return folder


def copied(saved: Path, tmp_path: Path) -> Path:
    folder = tmp_path / saved.name
    folder.mkdir()
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_position_of_any_text_and_number_comes_back(saved: Path, tmp_path: Path) -> None:
    with small_engine() as engine:
        assert engine.load_checkpoint(saved) == {"text": "a\ud800", "deep": [[[{"$x": 2**70}]]]}
        deep: list[Any] = []
        for _ in range(500):
            deep = [deep]
        with pytest.raises(ConfigError, match=r"position cannot be stored: .* nested deeper than 100"):
            engine.save_checkpoint(tmp_path / "deep", position=deep)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run["groups"][0]["options"].update(lr="fast"), "is 'fast', but a number is needed"),
        (
            lambda run: run["groups"][0]["options"].update(betas=[0.9]),
            "group 0: betas of a parameter group must be two",
        ),
        (lambda run: run["groups"][0].update(parameters=3), "is 3, but a list is needed"),
        (lambda run: run["groups"][0].update(parameters=[[1]]), r"is \[1\], but a text is needed"),
        (lambda run: run.update(groups={}), "but a list is needed"),
        (lambda run: run.update(facts=None), "is None, but an object is needed"),
        (lambda run: run["counts"].update(num_updates=-1), "num_updates is -1"),
        (lambda run: run["counts"].update(num_updates=1.5), "num_updates is 1.5"),
        (lambda run: run["adding"].update(num_ranks=10**400), "too large"),
        (lambda run: run["adding"].pop("exchange"), "has no 'exchange'"),
    ],
)
def test_a_broken_run_file_is_named_and_nothing_is_changed(
    saved: Path, engine: OffloadEngine, tmp_path: Path, change: Callable[[Any], object], message: str
) -> None:
    folder = copied(saved, tmp_path)
    content = json.loads((folder / "run.json").read_text())
    change(content)
    (folder / "run.json").write_text(json.dumps(content))
    write_manifest(folder, origin_of(folder))
    before = {name: value.clone() for name, value in engine.master_weights().items()}
    with pytest.raises(ModelError, match=rf"run\.json.*{message}"):
        engine.load_checkpoint(folder)
    assert all(torch.equal(value, before[name]) for name, value in engine.master_weights().items())
    step(engine)


@pytest.mark.parametrize("what", ["python", "numpy", "torch"])
@pytest.mark.parametrize("value", [None, 3, [], {"$tuple": [3, [1, 2], None]}, {"$tensor": ["uint8", [1], "00"]}])
def test_broken_random_states_are_named_and_nothing_is_changed(
    saved: Path, engine: OffloadEngine, tmp_path: Path, what: str, value: Any
) -> None:
    folder = copied(saved, tmp_path)
    content = json.loads((folder / "random.json").read_text())
    content[what] = value
    (folder / "random.json").write_text(json.dumps(content))
    write_manifest(folder, origin_of(folder))
    before = torch.get_rng_state()
    with pytest.raises(ModelError, match=r"random\.json has no valid random states"):
        engine.load_checkpoint(folder)
    assert torch.equal(torch.get_rng_state(), before)
    step(engine)


@pytest.mark.parametrize("name", ["run.json", "random.json", "manifest.json"])
@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 2000, b"\xff\xfe", b"[]", b""])
def test_a_file_of_json_that_has_no_bottom_is_named(
    saved: Path, engine: OffloadEngine, tmp_path: Path, name: str, text: bytes
) -> None:
    folder = copied(saved, tmp_path)
    (folder / name).write_bytes(text)
    if name != "manifest.json":
        write_manifest(folder, origin_of(folder))
    with pytest.raises(ModelError, match=name):
        engine.load_checkpoint(folder)
    step(engine)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F33"},
        {"dtype": ["F32"]},
        {"shape": "ab"},
        {"shape": [-4]},
        {"shape": [1.5]},
        {"data_offsets": [0]},
        {"data_offsets": [8, 0]},
        {"data_offsets": [True, 64]},
        {"data_offsets": [0, 10**400]},
    ],
)
def test_a_broken_header_is_named(saved: Path, engine: OffloadEngine, tmp_path: Path, change: dict[str, Any]) -> None:
    path = copied(saved, tmp_path) / "weights.safetensors"
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    header["0.weight"] |= change
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
    write_manifest(path.parent, origin_of(path.parent))
    with pytest.raises(ModelError, match=r"weights\.safetensors"):
        engine.load_checkpoint(path.parent)
    step(engine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("module"), "has no 'module'"),
        (lambda state: state.update(optimizer=3), "optimizer.* is 3, but an object is needed"),
        (lambda state: state["module"].pop("0.bias"), r"module\['0\.bias'\] differs from this model"),
        (lambda state: state["module"].update({"0.bias": torch.ones(7)}), r"module\['0\.bias'\] differs from this"),
        (lambda state: state.update(num_updates="two"), "num_updates"),
        (lambda state: state["param_groups"][0].update(lr=[1]), "lr"),
    ],
)
def test_a_state_that_is_none_is_named_and_nothing_is_changed(
    engine: OffloadEngine, change: Callable[[Any], object], message: str
) -> None:
    state = engine.state_dict()
    state["module"] = dict(state["module"])
    state["param_groups"] = [dict(group) for group in state["param_groups"]]
    change(state)
    with pytest.raises(ModelError, match=f"the state cannot be loaded.*{message}"):
        engine.load_state_dict(state)
    step(engine)


# -- models


def model_folder(tmp_path: Path, **changes: Any) -> Path:
    folder = save_config(llama_config(), tmp_path / "model")
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 0.5},
        {"hidden_size": -1},
        {"num_attention_heads": 0},
        {"num_attention_heads": 3},
        {"hidden_act": "none of them"},
        {"vocab_size": None},
        {"architectures": 3},
        {"architectures": [3]},
        {"model_type": 3},
        {"model_type": "no such type"},
        {"rope_parameters": {"rope_type": "x"}},
        {"id2label": 3},
        {"decoder_start_token_id": ""},
        {"initializer_range": 1e308},
        {"dtype": "float7"},
    ],
)
def test_a_config_that_makes_no_model_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = model_folder(tmp_path, **changes)
    for door in (
        lambda: offloadkit.plan(folder, batch_size=2),
        lambda: offloadkit.from_pretrained(folder, init="random"),
    ):
        with pytest.raises(ModelError, match=r"config\.json"):
            door()


@pytest.mark.parametrize(
    "changes",
    [{"vocab_size": 10**12}, {"num_hidden_layers": 10**6}, {"intermediate_size": 10**400}, {"num_labels": 10**9}],
)
def test_sizes_that_no_model_has_are_refused_at_once(tmp_path: Path, changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ModelError, match=rf"config\.json: {name} is .*which no model has"):
        resolve(model_folder(tmp_path, **changes)).config  # noqa: B018


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", '{"a": 1', "3", ""])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_models_file_of_json_is_named(tmp_path: Path, name: str, text: str) -> None:
    folder = model_folder(tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(ModelError, match=re.escape(name)):
        check_folder(str(folder))


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "a/../../x", "a\0b", "x" * 300, 3, None, "pipe", "device", "folder"]
)
def test_an_index_of_weights_names_files_of_its_folder(tmp_path: Path, name: Any) -> None:
    folder = model_folder(tmp_path)
    os.mkfifo(folder / "pipe")
    (folder / "device").symlink_to("/dev/zero")
    (folder / "folder").symlink_to(".")
    (folder / "linked.safetensors").symlink_to("../elsewhere")  # as in the hub's cache
    index = {"metadata": {}, "weight_map": {"a": "linked.safetensors", "b": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"'b' should be in|not a file"):
        check_folder(str(folder))
    index["weight_map"]["b"] = "linked.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_folder(str(folder))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "pytorch_model.bin"])
def test_a_pipe_in_the_place_of_a_models_file_is_named(tmp_path: Path, name: str) -> None:
    folder = model_folder(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match=f"{name} cannot be read: it is a device, a pipe"):
        offloadkit.from_pretrained(folder)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 300, "~nobody-of-that-name/x"])
def test_a_model_of_a_name_that_no_folder_has_is_named(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no model"):
        offloadkit.plan(name)


# -- rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a"}\n{"text": "\\ud800"}\n', "line 2: half of a character"),
        ('{"text": "a"}\n' + "[" * 100_000, "line 2: lists and objects are nested"),
        ('{"text": "a"}\n{"text": ' + "9" * 5000 + "}", "line 2: .*4300 digits"),
    ],
)
def test_a_row_of_a_file_is_named_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(DataError, match=rf"rows\.jsonl' cannot be read as json: {message}"):
        load_dataset_like(tmp_path / "rows.jsonl")


def test_a_row_with_half_a_character_is_named_by_its_number() -> None:
    import pandas

    rows = [{"text": "a"}, {"text": "b\ud800"}]
    with pytest.raises(DataError, match="row 1 has a value in 'text' that cannot be written: half of a character"):
        load_dataset_like(rows)
    with pytest.raises(DataError, match="row 1 has a value in 'text'"):
        load_dataset_like(pandas.DataFrame(rows, dtype=object))


def test_a_deep_value_of_a_frame_is_refused_before_it_ends_the_process() -> None:
    import pandas

    deep: list[Any] = []
    for _ in range(400):
        deep = [deep]
    with pytest.raises(DataError, match=r"row 1 has a value in 'text'.*nested deeper"):
        load_dataset_like(pandas.DataFrame({"text": ["a", deep]}))


def test_a_pipe_is_no_file_of_rows(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"rows\.jsonl' is a device, a pipe"):
        load_dataset_like(tmp_path / "rows.jsonl")


# -- refusals by the system


def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_an_engine_that_gets_no_thread_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    no_more_threads(monkeypatch)
    with pytest.raises(ThreadLimitError, match=r"\(offloadkit-step;.*ulimit -u and -v"):
        small_engine()
    monkeypatch.undo()
    with small_engine() as engine:
        step(engine)


def test_a_checkpoint_for_which_there_is_no_thread_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_engine() as engine:
        step(engine)
        no_more_threads(monkeypatch)
        with pytest.raises(ThreadLimitError, match="ulimit -u"):
            engine.save_checkpoint(tmp_path / "one")
        monkeypatch.undo()
        engine.save_checkpoint(tmp_path / "one")
        engine.load_checkpoint(tmp_path / "one")


class _Killed:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        if torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), 9)
        return {"input_ids": [5, 6, 1], "labels": [7, 1]}


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_killed_worker_is_named(tmp_path: Path, evaluates: bool) -> None:
    from transformers import Seq2SeqTrainingArguments, T5ForConditionalGeneration

    args = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no", dataloader_num_workers=1,
    )  # fmt: skip
    model = T5ForConditionalGeneration(t5_config(num_layers=1))
    trainer = offloadkit.OffloadSeq2SeqTrainer(model=model, args=args, train_dataset=_Killed(), eval_dataset=_Killed())
    try:
        with pytest.raises(WorkerError, match=r"DataLoader worker .*dataloader_num_workers"):
            trainer.evaluate() if evaluates else trainer.train()
    finally:
        trainer.close()


# -- found later


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_folder_is_left_where_it_is(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "checkpoint"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    before = os.lstat(path)
    with small_engine() as engine:
        step(engine)
        with pytest.raises(OutputError, match="exists and is not a folder"):
            engine.save_checkpoint(path)
        with pytest.raises(ModelError, match=r"cannot resume from /: it has no manifest\.json"):
            engine.load_checkpoint("/")
    assert os.lstat(path).st_ino == before.st_ino
    assert os.lstat(path).st_mode == before.st_mode
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint"]


def test_weights_of_other_shapes_than_the_config_says_are_named(tmp_path: Path) -> None:
    model = resolve(model_folder(tmp_path), init="random").load(progress=False)
    model.save_pretrained(tmp_path / "whole")
    content = json.loads((tmp_path / "whole" / "config.json").read_text())
    (tmp_path / "whole" / "config.json").write_text(json.dumps(content | {"intermediate_size": 32}))
    with pytest.raises(ModelError, match=r"has shape \(16, 24\).*config\.json.* \(16, 32\)"):
        offloadkit.from_pretrained(tmp_path / "whole")


def test_a_file_of_more_tensors_than_the_model_has_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    entries = ",".join(f'"t{n}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for n in range(50_000))
    header = f"{{{entries}}}".encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelError, match=r"contain 50,000 tensors, but the model of its config\.json has 21"):
        offloadkit.from_pretrained(folder)


def test_tied_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    folder = save_config(llama_config(tie_word_embeddings=True), tmp_path / "model")
    resolve(folder, init="random").load(progress=False).save_pretrained(tmp_path / "whole")
    content = json.loads((tmp_path / "whole" / "config.json").read_text())
    (tmp_path / "whole" / "config.json").write_text(json.dumps(content | {"vocab_size": 2}))
    with pytest.raises(ModelError, match=r"has shape \(64, 16\).*config\.json.* \(2, 16\)"):
        offloadkit.from_pretrained(tmp_path / "whole")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokenizer": 3}, "tokenizer must be a tokenizer, its name"),
        ({"tokenizer": "a\0b"}, "tokenizer: no model"),
        ({"label_names": 3}, "label_names must be of type list"),
        ({"label_names": [3]}, "label_names must be of type list"),
        ({"dataloader_multiprocessing_context": "fork"}, "dataloader_multiprocessing_context='fork': pass one of fork"),
        ({"ddp_timeout": 2**64}, "ddp_timeout must be a number of seconds"),
        ({"eval_delay": 10**400}, "eval_delay must be a number"),
        ({"debug": 3}, "debug must be of type str or list"),
        ({"lr_scheduler_kwargs": -1}, "lr_scheduler_kwargs must be of type dict or str"),
        ({"log_level": "loud"}, "log_level must be one of 'detail'"),
        ({"log_level_replica": None}, "log_level_replica must be one of 'detail'"),
        ({"generation_config": 3}, "generation_config must be of type"),
        ({"logging_strategy": ["no"]}, "logging_strategy must be of type"),
        ({"activation_checkpointing_kwargs": 1}, "checkpointing_kwargs must be"),
        ({"adam_beta2": 2.0}, r"adam_beta2 must be a number in \[0, 1\)"),
        ({"baseline": torch.ones(2)}, "baseline must be 'predict' or 'measure'"),
    ],
)
def test_arguments_of_finetune_are_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    folder = save_config(t5_config(num_layers=1), tmp_path / "model")
    rows = [{"input": "a", "target": "b"}]
    usual: dict[str, Any] = {"tokenizer": "byte", "init": "random", "output_dir": tmp_path / "out", "use_cpu": True}
    with pytest.raises((ConfigError, ModelNotFoundError), match=message):
        offloadkit.finetune(folder, rows, batch_size=2, monitor=False, **(usual | arguments))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduler": {"type": False}}, "scheduler.type must be a name, got False"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "fast"}}}, "warmup_max_lr must be a number"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10**400}}}, "total_num_steps must be a"),
        ({"fp16": {"enabled": True, "initial_scale_power": 10**4}}, "initial_scale_power must be at most 127"),
        ({"offloadkit": {"precision": 3}}, 'the section "offloadkit": precision must be one of'),
        ({"train_micro_batch_size_per_gpu": 10**400}, "train_micro_batch_size_per_gpu must be a whole number"),
    ],
)
def test_keys_of_a_deepspeed_config_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer} | changes))
    with pytest.raises(ConfigError, match=rf"ds_config\.json.*{message}"):
        offloadkit.initialize(model=nn.Linear(2, 2), config=str(path), dist_init_required=False)
