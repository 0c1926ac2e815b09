"""Leftovers of a Trainer, and the effects of other Trainers, the hub and other threads."""

from __future__ import annotations

import gc
import io
import json
import pickle
import sys
import threading
import time
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, T5EncoderModel, Trainer, TrainerCallback
from transformers.integrations import integration_utils
from transformers.trainer import TRAINING_ARGS_NAME

from offloadkit import OffloadConfig, OffloadEngine, finetune
from offloadkit.doors import finetuning
from offloadkit.errors import EngineStateError, ModelError
from offloadkit.facts.config import Placement
from offloadkit.hf.patches import NAME, patched
from offloadkit.hf.trainer import OffloadSeq2SeqTrainer, OffloadTrainer
from offloadkit.planner import placed
from tests.hf.tiny import t5_config
from tests.hf.training import arguments, causal_rows, llama, logged, seq2seq_rows, t5, train

pytestmark = pytest.mark.usefixtures("one_thread")


def traces(model: nn.Module) -> dict[str, Any]:
    """Everything that an engine changes in a model: attributes, flags, hooks, types, and the attention functions."""
    found: dict[str, Any] = {"types": {type(parameter) for parameter in model.parameters()}}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            plain = isinstance(value, bool | int | float | str)
            found[f"{name}.{key}"] = value if plain else len(value) if "_hooks" in key else type(value)
        config: Any = getattr(module, "config", None)
        found[f"{name}: attention"] = config and config._attn_implementation
    return found


class Interrupts(TrainerCallback):  # type: ignore[misc, unused-ignore]
    def on_step_end(self, *_: Any, **__: Any) -> None:
        raise KeyboardInterrupt


# ---- leftovers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [t5, llama])
def test_a_trainer_that_is_dropped_without_close_leaves_nothing(
    make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    model = make()
    before = traces(model)
    rows = seq2seq_rows(2) if make is t5 else causal_rows(2)
    args = arguments(tmp_path, max_steps=1, gradient_checkpointing=True, neftune_noise_alpha=5.0)
    given = dict(vars(args))
    trainer = OffloadSeq2SeqTrainer(model=model, args=args, train_dataset=rows)
    trainer.train()
    gc.disable()  # the trainer must end with its last reference, like a stock Trainer
    try:
        del trainer
        assert traces(model) == before
        assert vars(args) == given
        model(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
        model.resize_token_embeddings(model.config.vocab_size + 1)
    finally:
        gc.enable()


def test_an_interrupted_trainer_leaves_no_noise(tmp_path: Path) -> None:
    model = llama()
    before = traces(model)
    args = arguments(tmp_path, neftune_noise_alpha=5.0)
    trainer = OffloadTrainer(model, args, train_dataset=causal_rows(2), callbacks=[Interrupts()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.close()
    assert traces(model) == before


def test_a_model_that_recomputed_before_does_so_afterwards_and_moves_leave_no_hook() -> None:
    model = llama()
    model.gradient_checkpointing_enable()
    before = traces(model)
    with OffloadEngine(model, OffloadConfig(), device="cpu") as engine:
        for activations in ("checkpoint", "keep", "cheap", "offload"):
            places: Any = [Placement(activations=activations)] * len(engine.plan.placements)
            engine.move(placed(engine.plan, places))
    assert traces(model) == before


def test_a_trainer_whose_loop_runs_is_not_closed_by_another_one(tmp_path: Path) -> None:
    model = llama()

    class TrainsInBetween(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            second = OffloadTrainer(model, arguments(tmp_path, max_steps=1), train_dataset=causal_rows(2))
            with pytest.raises(EngineStateError, match="another Trainer is inside train"):
                second.train()

    args = arguments(tmp_path, max_steps=2)
    first = OffloadTrainer(model, args, train_dataset=causal_rows(4), callbacks=[TrainsInBetween()])
    assert first.train().global_step == 2
    first.close()


class FakeTrackio(ModuleType):
    """The functions of trackio, a tracker without an account, that transformers' callback calls."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.context_vars = SimpleNamespace(current_space_id=SimpleNamespace(get=lambda: None))
        self.config = UserDict[str, Any]()
        self.config.update = lambda values, **_: UserDict.update(self.config, values)  # type: ignore[method-assign]
        self.logged: list[dict[str, Any]] = []
        self.log = self.logged.append
        self.calls: list[str] = []
        self.init = lambda **_: self.calls.append("init")
        self.finish = lambda: self.calls.append("finish")


def test_a_run_is_told_to_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    monkeypatch.setattr(integration_utils, "is_trackio_available", lambda: True)
    trainer = train(tmp_path, t5(), seq2seq_rows(4), max_steps=2, report_to=["trackio"])
    assert tracker.calls == ["init", "finish"]
    steps = [each for each in tracker.logged if "train/loss" in each]
    assert [each["train/global_step"] for each in steps] == [1, 2]
    assert [each["train/loss"] for each in steps] == logged(trainer, "loss")
    assert all(each["train/grad_norm"] > 0 for each in steps)
    assert tracker.config["model/num_parameters"] == trainer.model.num_parameters()


def test_models_that_share_a_config_keep_each_others_changes() -> None:
    config = t5_config(d_kv=16)
    models = [T5EncoderModel(config), T5EncoderModel(config)]
    undo = [patched(model, OffloadConfig()) for model in models]
    assert config._attn_implementation == NAME
    with OffloadEngine(nn.ModuleDict({"another": models[0]}), OffloadConfig(), device="cpu"):
        assert config._attn_implementation != "sdpa"
        assert pickle.loads(pickle.dumps(models[0])).config._attn_implementation == "sdpa"
    undo[0]()
    assert config._attn_implementation == NAME
    undo[1]()
    assert config._attn_implementation == "sdpa"


def test_a_model_that_a_trainer_has_can_be_saved_whole(tmp_path: Path) -> None:
    trainer = train(tmp_path, t5(), seq2seq_rows(2), max_steps=1, gradient_checkpointing=True)
    file = io.BytesIO()
    torch.save(trainer.model, file)
    trainer.close()
    assert b"offloadkit" not in file.getvalue()
    file.seek(0)
    copied = torch.load(file, weights_only=False)
    assert traces(copied) == traces(trainer.model)
    assert all(torch.equal(value, copied.state_dict()[name]) for name, value in trainer.model.state_dict().items())


# ---- other Trainers over the same model ------------------------------------------------------------------------------


def test_another_trainer_evaluates_the_model_as_it_is_in_training(tmp_path: Path) -> None:
    """The other Trainer's budget would stream the weights; the engine that owns them ignores it."""
    model, rows = t5(), seq2seq_rows(2)
    first = train(tmp_path, model, rows, max_steps=1)
    second = OffloadTrainer(model, arguments(tmp_path), eval_dataset=rows, offload=OffloadConfig(vram="64KiB"))
    assert second.evaluate()["eval_loss"] == first.evaluate(rows)["eval_loss"]
    assert second.engine is None
    first.train()
    first.close()


def test_a_stock_trainer_is_told_to_close_the_engine_first(tmp_path: Path) -> None:
    first = train(tmp_path, t5(), seq2seq_rows(2), max_steps=1)
    stock = Trainer(first.model, arguments(tmp_path, max_steps=1), train_dataset=seq2seq_rows(2))
    with pytest.raises(EngineStateError, match=r"close it first: engine\.close\(\) or trainer\.close\(\)"):
        stock.train()
    first.close()
    stock.train()


def test_new_tokens_in_mid_run_are_refused_by_name_and_taken_after_close(tmp_path: Path) -> None:
    trainer = train(tmp_path, t5(), seq2seq_rows(2), max_steps=1)
    with pytest.raises(EngineStateError, match=r"'shared\.weight' .* resize_token_embeddings\(\)"):
        trainer.model.resize_token_embeddings(50)
    trainer.train()
    trainer.close()
    trainer.model.resize_token_embeddings(50)
    trainer.train()
    assert trainer.model.get_input_embeddings().weight.shape[0] == 50
    trainer.close()


# ---- the hub, trackers and threads -----------------------------------------------------------------------------------


def test_a_push_in_mid_run_holds_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[set[str]] = []

    def upload_folder(*, folder_path: str, **_: Any) -> Any:
        pushed.append({path.name for path in Path(folder_path).iterdir()})
        return SimpleNamespace(done=lambda: True, result=lambda: None)

    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: SimpleNamespace(upload_folder=upload_folder))
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda *_, **__: None)
    options = {"push_to_hub": True, "hub_model_id": "me/mine", "save_strategy": "steps", "save_steps": 1}
    trainer = OffloadTrainer(t5(), arguments(tmp_path, max_steps=1, **options), train_dataset=seq2seq_rows(2))
    trainer.hub_model_id, trainer.push_in_progress = "me/mine", None
    trainer.train()
    trainer.close()
    assert pushed
    assert all(TRAINING_ARGS_NAME not in names and "training_args.json" in names for names in pushed)
    assert json.loads((tmp_path / "training_args.json").read_text())["save_steps"] == 1
    assert transformers.trainer.TRAINING_ARGS_NAME == TRAINING_ARGS_NAME == "training_args.bin"


def test_a_second_finetune_waits_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random states, library settings and the GPU's free memory belong to the process."""

    inside, most, printed = [0], [0], [""]

    def waits() -> bool:
        printed[0] += capsys.readouterr().out
        return "another finetune of this process" in printed[0]

    def run(name: str) -> None:
        with pytest.raises(ZeroDivisionError):
            finetune(t5(), [{"input_ids": [3], "labels": [4]}], output_dir=tmp_path / name, tokenizer="byte")

    other = threading.Thread(target=run, args=("second",))

    def trained(*_: Any) -> Any:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        if not other.ident:
            other.start()
            end = time.monotonic() + 60
            while not waits() and time.monotonic() < end:
                time.sleep(0.01)
        inside[0] -= 1
        raise ZeroDivisionError

    monkeypatch.setattr(finetuning.TrainingRun, "train", trained)
    run("first")
    other.join(60)
    assert not other.is_alive()
    assert most == [1]
    assert waits()


def test_trainer_and_finetune_refuse_what_torch_compile_returns(tmp_path: Path) -> None:
    model: Any = torch.compile(t5(), backend="eager")
    with pytest.raises(ModelError, match=r"Pass the model that was given to torch.compile\(\)"):
        OffloadTrainer(model=model, args=arguments(tmp_path))
    with pytest.raises(ModelError, match=r"Pass the model that was given to torch.compile\(\)"):
        finetune(model, [{"input": "a", "target": "b"}], output_dir=tmp_path / "out", tokenizer="byte")
