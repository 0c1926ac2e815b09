"""`finetune` from rows to a folder, `plan`, and the names of the package."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    SchedulerType,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    trainer_utils,
    training_args,
)

import offloadkit
from offloadkit import OffloadConfig
from offloadkit.errors import ConfigError, DataError, DoesNotFitError, ModelError, OutputError
from offloadkit.facts import hardware
from offloadkit.hf import arguments
from offloadkit.hf.arguments import arguments_of_finetune
from tests.hf.tiny import llama_config, save_config, word_tokenizer

PAIRS = [{"input": f"{number}+1", "target": str(number + 1)} for number in range(10)]
SHAPE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


pytestmark = pytest.mark.usefixtures("one_thread", "own_folder")


def t5(width: int = 16, dropout: float = 0.1, **more: Any) -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    shape = {"d_model": width, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 384} | more
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, dropout_rate=dropout, **shape))


def finetune(model: Any, rows: Any, **options: Any) -> offloadkit.FinetuneResult:
    defaults: dict[str, Any] = {"tokenizer": "byte", "max_steps": 3, "batch_size": 4, "use_cpu": True}
    defaults["overwrite"] = not options.get("resume")
    return offloadkit.finetune(model, rows, **(defaults | options))


def test_pairs_are_learned_and_the_folder_is_loaded_by_from_pretrained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"eval_dataset": PAIRS, "max_steps": 150, "learning_rate": 5e-3, "batch_size": 10}
    result = finetune(t5(48), PAIRS, output_dir=tmp_path / "out", save_strategy="no", eval_strategy="no", **options)
    shown = capsys.readouterr().out
    assert shown.index("FITS (on the CPU): ") < shown.index("step ")
    assert "'0+1' -> '1'  (right)" in shown
    assert result.metrics["exact_match"] >= 0.9
    assert result.metrics["eval_loss"] < 0.5 < result.history[0]["loss"]
    assert result.plan.num_parameters == sum(parameter.numel() for parameter in result.model.parameters())
    assert len(result.steps) == 150
    assert "exact_match" in repr(result)
    assert result.peaks.keys() == {phase.name for phase in result.plan.phases} - {"resuming"}
    assert str(result.model_dir) in repr(result)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out" / "model")
    assert all(torch.equal(weight, result.model.state_dict()[name]) for name, weight in loaded.state_dict().items())
    words = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    ids = loaded.generate(**words("4+1", return_tensors="pt"), max_new_tokens=4)
    assert words.decode(ids[0], skip_special_tokens=True) == "5"


def test_tokens_beyond_the_tokenizers_are_left_out_of_predictions() -> None:
    """T5's own vocabulary is also padded beyond its tokenizer's."""
    model = t5(vocab_size=512)
    with torch.no_grad():
        model.lm_head.weight[len(ByT5Tokenizer()) :] *= 10
    result = finetune(model, PAIRS, eval_dataset=PAIRS[:2], max_steps=1)
    assert [sample.prediction for sample in result.samples] == ["", ""]


def test_labelled_texts_give_an_accuracy() -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=384, num_labels=2, **SHAPE))
    rows = [
        {"text": word * 3, "label": label} for word, label in (("a", "vowel"), ("b", "consonant")) for _ in range(8)
    ]
    never: dict[str, Any] = {"eval_strategy": "no", "save_strategy": "no"}
    result = finetune(model, rows, eval_dataset=rows, max_steps=60, learning_rate=1e-2, batch_size=16, **never)
    assert result.metrics["accuracy"] == 1.0
    assert {sample.prediction for sample in result.samples} <= {"vowel", "consonant"}


def test_texts_train_a_causal_model_and_are_continued() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=384, **SHAPE))
    rows = [{"text": "abcabcabcabc"}] * 8
    never: dict[str, Any] = {"eval_strategy": "no", "save_strategy": "no"}
    result = finetune(model, rows, eval_dataset=rows, max_steps=60, learning_rate=1e-2, **never)
    assert result.metrics["eval_loss"] < 0.5
    assert result.samples[0].input == "abcabc"
    assert result.samples[0].prediction.startswith("abc")


def test_pairs_train_a_causal_model_to_answer_the_input() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=384, **SHAPE))
    rows = [{"frage": "xyzw", "antwort": "abab"}] * 8
    columns: dict[str, Any] = {"template": "<{frage}>", "target_column": "antwort", "eval_strategy": "no"}
    result = finetune(
        model, rows, eval_dataset=rows[:1], max_steps=30, learning_rate=3e-2, save_strategy="no", **columns
    )
    assert result.metrics["eval_loss"] < 0.5
    assert (result.samples[0].input, result.samples[0].prediction) == ("<xyzw>", "abab")


def test_the_validation_split_of_a_dataset_dict_is_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    import datasets

    rows = datasets.Dataset.from_list(PAIRS)
    result = finetune(t5(), datasets.DatasetDict(train=rows, validation=rows.select([0, 1])), max_steps=1)
    assert result.metrics["eval_loss"] > 0
    assert "'validation' split" in capsys.readouterr().out
    assert len(result.samples) == 2


def test_the_seed_decides_every_weight() -> None:
    runs = [finetune(t5(), PAIRS, seed=seed).model.state_dict() for seed in (1, 1, 2)]
    same, other = [all(torch.equal(runs[0][name], run[name]) for name in run) for run in runs[1:]]
    assert same
    assert not other


def test_label_smoothing_trains_and_equals_its_formula_at_any_accumulation() -> None:
    options = {"max_steps": 1, "label_smoothing_factor": 0.1, "train_sampling_strategy": "sequential"}
    losses = []
    for size in (4, 2):
        run = finetune(t5(dropout=0), PAIRS[:4], batch_size=size, gradient_accumulation=4 // size, **options)
        losses.append(run.history[0]["loss"])
    tokenizer, model = ByT5Tokenizer(), t5(dropout=0)
    batch = tokenizer([row["input"] for row in PAIRS[:4]], padding=True, return_tensors="pt")
    labels = tokenizer([row["target"] for row in PAIRS[:4]], padding=True, return_tensors="pt")["input_ids"]
    log_probabilities = model(**batch, labels=labels).logits.log_softmax(-1)[labels != 0]
    likelihood = log_probabilities.gather(1, labels[labels != 0][:, None]).mean()
    expected = -(0.9 * likelihood + 0.1 * log_probabilities.mean())
    assert losses == pytest.approx([expected.item()] * 2, rel=1e-5)


@pytest.mark.slow
def test_the_metrics_are_those_of_the_best_model_where_that_is_handed_back() -> None:
    often = {"eval_strategy": "steps", "eval_steps": 10, "save_strategy": "steps", "save_steps": 10}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    too_fast = {"learning_rate": 0.02, "lr_scheduler_type": "constant", "max_steps": 60}
    result = finetune(t5(48), PAIRS[:4], eval_dataset=PAIRS[6:], **often, **best, **too_fast)
    losses = [log["eval_loss"] for log in result.history if "eval_loss" in log]
    assert min(losses) < 0.9 * losses[-2]
    assert result.metrics["eval_loss"] == pytest.approx(min(losses), rel=1e-6)


def test_resume_goes_on_from_the_newest_complete_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 5}
    whole = finetune(t5(), PAIRS, output_dir=tmp_path / "run", **options).model.state_dict()
    (tmp_path / "run" / "checkpoint-6").rename(tmp_path / "aside")
    (tmp_path / "run" / "checkpoint-4" / "manifest.json").unlink()
    result = finetune(t5(), PAIRS, output_dir=tmp_path / "run", resume=True, **options)
    assert f"{tmp_path / 'run' / 'checkpoint-4'} is skipped: it has no manifest.json" in capsys.readouterr().out
    assert [step.step for step in result.steps] == [3, 4, 5, 6]
    assert result.metrics["train_loss"] == pytest.approx(sum(step.loss for step in result.steps) / 4, rel=1e-4)
    assert all(torch.equal(whole[name], weight) for name, weight in result.model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["states-00000-of-00001.safetensors", "run.json", "model.safetensors", "trainer_state.json", "config.json"]
)
def test_a_checkpoint_with_a_file_that_was_cut_falls_back_to_the_one_before_and_the_last_is_refused_by_name(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"output_dir": tmp_path, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    options["save_total_limit"] = 2
    whole = finetune(t5(), PAIRS, **options).model.state_dict()

    def cut(step: int) -> Path:
        path = tmp_path / f"checkpoint-{step}" / name
        os.truncate(path, path.stat().st_size * 2 // 3)
        return path

    newest = cut(2)
    resumed = finetune(t5(), PAIRS, resume=True, **options).model.state_dict()
    assert all(torch.equal(weight, whole[key]) for key, weight in resumed.items())
    said = f"because a newer checkpoint is broken: {name} of the checkpoint {newest.parent} cannot"
    assert said in capsys.readouterr().out
    cut(2)
    cut(1)
    said = rf"{name} of the checkpoint {newest.parent} cannot be read .*No earlier checkpoint can be read"
    with pytest.raises(ModelError, match=said):
        finetune(t5(), PAIRS, resume=True, **options)


@pytest.mark.slow
def test_a_resumed_run_learns_the_end_token_that_pads_too(tmp_path: Path) -> None:
    """The Trainer writes it into the config of checkpoints as the padding token, whose embedding has no gradient."""
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(hidden_size=32)).save_pretrained(tmp_path / "model")
    word_tokenizer(pad_token=None).save_pretrained(tmp_path / "model")
    rows = [{"input_ids": [5, 6, 2, 7, 8, 2]}, {"input_ids": [6, 2, 2, 9]}] * 4
    options = {"save_steps": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}

    def trained(output: str, **more: Any) -> dict[str, torch.Tensor]:
        run = offloadkit.finetune(
            tmp_path / "model", rows, output_dir=tmp_path / output, batch_size=2, monitor=False, **(options | more)
        )
        return dict(run.model.state_dict())

    whole = trained("whole", max_steps=4)
    trained("parts", max_steps=2)
    again = trained("parts", max_steps=4, resume=True)
    assert all(torch.equal(weight, whole[name]) for name, weight in again.items())


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "now"), [("exact", "tiny"), ("tiny", "exact"), ("exact", "compact")])
def test_resuming_with_another_precision_says_what_to_go_on_with(saved: str, now: str) -> None:
    finetune(t5(), PAIRS, precision=saved)
    with pytest.raises(ConfigError, match=rf"run\.json: .*precision='{saved}', this run has '{now}': resume with"):
        finetune(t5(), PAIRS, precision=now, resume=True, max_steps=6)


def test_a_model_whose_evaluation_fails_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no prediction")

    monkeypatch.setattr(importlib.import_module("offloadkit.doors.finetuning"), "predict", fails)
    with pytest.raises(RuntimeError, match="no prediction"):
        finetune(t5(), PAIRS, eval_dataset=PAIRS[:4], output_dir=tmp_path / "run", max_steps=2, save_strategy="no")
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_an_earlier_model_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finetune(t5(), PAIRS, output_dir=tmp_path / "out")
    before = (tmp_path / "out" / "model" / "model.safetensors").read_bytes()

    def disk_is_full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ByT5Tokenizer, "save_pretrained", disk_is_full)
    with pytest.raises(OutputError, match="No space left"):
        finetune(t5(), PAIRS, output_dir=tmp_path / "out", seed=3, save_strategy="no")
    assert (tmp_path / "out" / "model" / "model.safetensors").read_bytes() == before
    monkeypatch.undo()
    finetune(t5(), PAIRS, output_dir=tmp_path / "out", seed=3, save_strategy="no")
    assert (tmp_path / "out" / "model" / "model.safetensors").read_bytes() != before
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")] == []


# -- names and habits of HuggingFace users


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"per_device_train_batch_size": 3, "lr": 0.5}, {"per_device_train_batch_size": 3, "learning_rate": 0.5}),
        ({"gradient_accumulation_steps": 5}, {"gradient_accumulation_steps": 5, "per_device_train_batch_size": 8}),
        ({"num_train_epochs": 7, "save_steps": 9}, {"num_train_epochs": 7, "save_strategy": "steps", "save_steps": 9}),
        ({"eval_steps": 3}, {"eval_strategy": "steps", "save_strategy": "epoch"}),
        ({"eval_steps": 3, "eval_strategy": "no"}, {"eval_strategy": "no"}),
    ],
)
def test_names_and_habits_of_huggingface_are_taken(given: Any, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs up to the training arguments."""
    seen: list[Any] = []

    def ends(*asked: Any) -> None:
        seen.append(arguments_of_finetune(*asked))
        raise KeyboardInterrupt

    monkeypatch.setattr(arguments, "arguments_of_finetune", ends)
    with pytest.raises(KeyboardInterrupt):
        offloadkit.finetune(t5(), PAIRS, eval_dataset=PAIRS, use_cpu=True, **given)
    assert {name: getattr(seen[0], name) for name in told} == told


def test_callbacks_end_a_run_and_metrics_are_computed_from_the_rows_held_out() -> None:
    class Ends(TrainerCallback):  # type: ignore[misc, unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    def compute_metrics(found: Any) -> dict[str, Any]:
        return {"rows": len(found.label_ids), "classes": found.predictions.shape[1]}

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=384, num_labels=2, **SHAPE))
    rows = [{"text": letter, "label": int(letter > "f")} for letter in "abcdefghijkl"]
    hooks = {"callbacks": [Ends], "compute_metrics": compute_metrics}
    result = finetune(model, rows, eval_dataset=0.25, max_steps=9, save_strategy="no", **hooks)
    assert len(result.steps) == 2
    assert not result.stopped, "a callback's stop is not an interrupt"
    assert (result.metrics.pop("eval_rows"), result.metrics.pop("eval_classes")) == (3, 2)
    assert result.metrics.keys() == {"train_loss", "train_seconds", "eval_loss", "accuracy"}


def test_values_of_other_libraries_types_are_taken() -> None:
    given: dict[str, Any] = {"bf16": np.False_, "weight_decay": np.float32(0.1), "logging_steps": np.int64(1)}
    given |= {"save_total_limit": None, "resume_from_checkpoint": False, "ddp_timeout": 600.5, "fsdp": False}
    given |= {"hub_token": True, "data_seed": np.int64(3), "lr_scheduler_type": SchedulerType.COSINE}
    assert len(finetune(t5(), PAIRS, max_steps=1, **given).steps) == 1


@pytest.mark.slow
def test_metrics_that_are_no_dict_are_named_and_the_epoch_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(trainer_utils.logger, "warning_once", said.append, raising=False)
    options: dict[str, Any] = {"eval_dataset": 0.25, "epochs": 2, "seed": 0}
    with pytest.raises(ConfigError, match="compute_metrics must return a dict of numbers by their names, got None"):
        finetune(t5(), PAIRS, compute_metrics=lambda found: None, **options)
    whole = finetune(t5(), PAIRS, output_dir="whole", **options)
    resumed = finetune(t5(), PAIRS, resume=True, compute_metrics=lambda found: {"rows": 1}, **options)
    assert 0 < len(resumed.steps) < len(whole.steps)
    assert resumed.metrics["eval_rows"] == 1
    assert all(map(torch.equal, resumed.model.state_dict().values(), whole.model.state_dict().values()))
    assert not [each for each in said if "trainer_state.json" in each], "nothing differs from the checkpoint"


@pytest.mark.slow
def test_a_verbose_run_says_where_everything_lives(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for verbose in (False, True):
        with pytest.raises(DoesNotFitError, match="RAM, has 1 MiB"):
            finetune(t5(), PAIRS, ram="1MiB", verbose=verbose)
        shown.append(capsys.readouterr().out)
    assert shown[0] == ""
    assert "optimizer states in RAM" in shown[1]


# -- the working dtype


@pytest.mark.parametrize(
    ("gpu", "options", "dtype"),
    [
        ("none", {}, "fp32"),
        ("none", {"bf16": True}, "bf16"),
        ("T4", {}, "fp16"),
        ("T4", {"fp16": False}, "fp32"),
        ("T4", {"bf16": False}, "fp16"),
        ("T4", {"use_cpu": True}, "fp32"),
        ("T4", {"offload": OffloadConfig(working_dtype="fp32")}, "fp32"),
        ("H200", {}, "bf16"),
        ("H200", {"bf16": False}, "fp32"),
        ("H200", {"bf16": False, "fp16": True}, "fp16"),
        ("H200", {"fp16": True}, "fp16"),
        ("H200", {"offload": OffloadConfig(working_dtype="fp16")}, "fp16"),
    ],
)
def test_the_dtype_is_decided_before_the_batch_size_and_told_to_the_trainer(
    gpu: str, options: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs up to the plan, which needs no GPU."""
    module = importlib.import_module("offloadkit.doors.finetuning")
    seen: dict[str, Any] = {}

    def auto_batch_size(source: Any, offload: OffloadConfig, request: Any) -> int:
        seen["by batch size"] = offload.working_dtype
        return 4

    def told(*given: Any) -> Any:
        seen["args"] = arguments_of_finetune(*given)
        return seen["args"]

    def plan(source: Any, offload: OffloadConfig, *_: Any, **__: Any) -> None:
        args = seen.pop("args")
        seen["by plan"], seen["bf16"], seen["fp16"] = offload.working_dtype, args.bf16, args.fp16
        raise KeyboardInterrupt

    device = torch.device("cpu" if gpu == "none" else "cuda")
    monkeypatch.setattr(hardware, "default_device", lambda: device)
    monkeypatch.setattr(hardware, "supports_bf16", lambda device: gpu == "H200" or device.type == "cpu")
    monkeypatch.setattr(module, "auto_batch_size", auto_batch_size)
    monkeypatch.setattr(module, "shown_plan", plan)
    monkeypatch.setattr(arguments, "arguments_of_finetune", told)
    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: gpu != "none")
    with pytest.raises(KeyboardInterrupt):
        finetune(t5(), PAIRS, **({"batch_size": "auto", "use_cpu": gpu == "none"} | options))
    assert seen == {"by batch size": dtype, "by plan": dtype, "bf16": dtype == "bf16", "fp16": dtype == "fp16"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="trains on the GPU here")
def test_bf16_needs_no_use_cpu_where_there_is_no_gpu(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokenizer": "byte", "max_steps": 1, "batch_size": 4, "monitor": False}
    result = offloadkit.finetune(t5(), PAIRS, bf16=True, output_dir=tmp_path, **options)
    assert {weight.dtype for weight in result.model.parameters()} == {torch.bfloat16}


def test_fp16_trains_with_master_weights_in_fp32() -> None:
    result = finetune(t5(), PAIRS, fp16=True, eval_dataset=PAIRS, save_strategy="no")
    assert {weight.dtype for weight in result.model.parameters()} == {torch.float16, torch.float32}
    assert result.plan.tiers["ram"]["master weights"] > 0
    assert result.metrics["eval_loss"] < 8


# -- unsupported requests are refused before any work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number >= 1, got 0"),
        ({"batch_size": -1}, "batch_size"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"max_steps": 0}, "max_steps"),
        ({"epochs": 0}, "epochs"),
        *(({"max_input_length": length}, "max_input_length must be a whole number >= 2, got") for length in (1, 3.5)),
        ({"max_target_length": 0}, "max_target_length must be a whole number >= 2, got 0"),
        ({"gradient_accumulation": 0}, "gradient_accumulation"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"init": "zeros"}, "init"),
        ({"resume": True}, "no complete checkpoint"),
        ({"resume": "checkpoint-3"}, "resume must be True"),
        ({"seed": -1}, "seed must be"),
        ({"seed": True}, "seed must be"),
        ({"epochs": True}, "epochs must be a positive number, got True"),
        ({"epochs": 3, "num_train_epochs": 3}, "epochs and num_train_epochs are two names of one value: pass one"),
        ({"num_train_epochs": 0}, "num_train_epochs must be a positive number, got 0"),
        ({"lr": 0}, "lr must be a positive number, got 0"),
        ({"per_device_train_batch_size": 4}, "batch_size and per_device_train_batch_size are two names"),
        ({"weight_decy": 0.1}, "did you mean 'weight_decay'"),
        ({"data_collator": len}, "finetune has no data_collator: .*OffloadTrainer and OffloadSeq2SeqTrainer take it"),
        ({"callbacks": TrainerCallback()}, "callbacks must be a list of transformers.TrainerCallback, got <"),
        ({"callbacks": [TrainerCallback, 3]}, "callbacks must be a list .*, and 3 is none"),
        ({"compute_metrics": len}, "compute_metrics needs eval_dataset: pass rows, or a share"),
        ({"compute_metrics": 3, "eval_dataset": 0.5}, "compute_metrics must be a function of an EvalPrediction, got 3"),
        ({"eval_dataset": 1.0}, "eval_dataset must be rows, or the share .* less than 1; got 1.0"),
        ({"eval_dataset": 2}, "eval_dataset must be rows, .* got 2"),
        ({"verbose": 1}, "verbose must be True or False, got 1"),
        ({"lr_scheduler_type": "diagonal"}, "transformers refuses"),
        ({"warmup_steps": -3}, r"transformers refuses .*, warmup_steps=-3\): "),
        ({"warmup_steps": "abc"}, "warmup_steps must be a number, got 'abc'"),
        ({"save_steps": True}, "save_steps must be a number, got True"),
        ({"bf16": "no"}, "bf16 must be True or False, got 'no'"),
        ({"gradient_checkpointing": 1}, "gradient_checkpointing must be True or False, got 1"),
        ({"save_total_limit": "no"}, "save_total_limit must be a whole number, got 'no'"),
        ({"save_total_limit": 1.5}, "save_total_limit must be a whole number, got 1.5"),
        ({"run_name": 3}, "run_name must be a text, got 3"),
        ({"eval_accumulation_steps": 0}, "eval_accumulation_steps must be a whole number >= 1, got 0"),
        ({"bf16": np.float32(1)}, "bf16 must be True or False, got"),
        ({"fsdp": True}, "fsdp: leave it out"),
        ({"save_strategy": "best"}, "save_strategy='best' needs eval_dataset: pass rows"),
        ({"save_strategy": "best", "eval_dataset": 0.5}, "save_strategy='best' needs metric_for_best_model, such as"),
        (
            {"load_best_model_at_end": True, "eval_dataset": 0.5, "metric_for_best_model": "f1"},
            "metric_for_best_model='f1': without compute_metrics there is 'loss' alone",
        ),
        ({"group_by_length": True}, "did you mean train_sampling_strategy='group_by_length'"),
        ({"overwrite_output_dir": True}, "did you mean overwrite=True"),
        ({"max_seq_length": 9}, "did you mean max_input_length"),
        ({"offload": OffloadConfig(max_grad_norm=3.0)}, "max_grad_norm"),
        ({"offload": {"vram": "8GiB"}}, "offload must be an OffloadConfig"),
        ({"resume_from_checkpoint": True}, r"does not take resume_from_checkpoint: resume=True \(--resume\) goes on"),
        ({"eval_strategy": "epoch"}, "eval_strategy needs eval_dataset: pass rows, or a share"),
        ({"eval_dataset": 0.5, "per_device_eval_batch_size": 0}, "per_device_eval_batch_size must be a whole number"),
        ({"report_to": ["ledger"]}, "report_to='ledger' is not known: transformers has .*, wandb, and 'none'"),
        ({"fp16": True, "bf16": True}, "At most one of fp16 and bf16"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        finetune(t5(), PAIRS, **options)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (torch.nn.Linear(2, 2), "OffloadEngine"),
        (None, "^None is .*model"),
        (3, "^3 is .*model"),
        (PAIRS * 9, "^.{,400}is .{,4}a model"),
    ],
)
def test_what_is_no_model_of_huggingface_is_refused(model: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        finetune(model, PAIRS)
    with pytest.raises(ModelError, match=message):
        offloadkit.plan(model)


def test_an_unwritable_output_folder_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written") as raised:
        finetune("no/such-model", PAIRS, output_dir=tmp_path / "file" / "out")
    assert "output_dir" in str(raised.value)


def test_an_output_folder_without_a_name_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"output_dir is empty: pass the name of a folder \('\.' is the current one\)"
    ):
        finetune(t5(), PAIRS, output_dir="")


def test_nothing_is_made_or_planned_where_there_is_no_checkpoint_to_resume_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"found in output directory .*out: there is no complete checkpoint"):
        finetune(t5(), PAIRS, output_dir=tmp_path / "out", resume=True)
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("missing", ["pairs.jsonl", "./pairs", "data/pairs.csv", Path("pairs"), ""])
def test_a_missing_file_is_named_before_anything_is_planned_or_made(
    missing: str | Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = rf"there is no file '{missing}' \(looked in "
    with pytest.raises(DataError, match=f"^{reason}"):
        finetune("no/such-model", missing, vram="1MiB")
    with pytest.raises(DataError, match=f"^eval_dataset: {reason}"):
        finetune("no/such-model", PAIRS, eval_dataset=missing)
    assert capsys.readouterr().out == ""
    assert not Path("offloadkit-output").exists()


def test_rows_with_unknown_columns_are_refused() -> None:
    with pytest.raises(DataError, match="source, answer"):
        finetune(t5(), [{"source": "a", "answer": "b"}])


@pytest.mark.parametrize(("rows", "reason"), [([], "empty"), ([{"text": "a"}], "no column set fits")])
def test_a_fault_of_the_evaluation_set_says_that_it_is_its(rows: Any, reason: str) -> None:
    with pytest.raises(DataError, match=f"eval_dataset: .*{reason}"):
        finetune(t5(), PAIRS, eval_dataset=rows)


# -- plan, and the names of the package


def test_a_printed_plan_fits_on_80_columns() -> None:
    plan = offloadkit.plan("t5-11b", batch_size=1)
    assert max(map(len, f"{plan}\n{plan.details()}".splitlines())) <= 80


def test_a_plan_from_a_name_needs_no_weights_and_counts_every_parameter() -> None:
    plan = offloadkit.plan("t5-3b", batch_size=1, offload=OffloadConfig(working_dtype="bf16"))
    assert plan.num_parameters == 2_851_598_336
    assert plan.tiers["ram"]["moments"] == pytest.approx(8 * plan.num_parameters, rel=1e-3)
    assert plan.tiers["ram"]["master weights"] == pytest.approx(2 * plan.num_parameters, rel=1e-3)


def test_a_plan_for_the_longest_row_is_the_plan_it_trains_with() -> None:
    model = t5()
    lengths = {"max_input_length": 4, "max_target_length": 3}
    planned = offloadkit.plan(model, batch_size=4, gradient_accumulation=2, device=torch.device("cpu"), **lengths)
    rows = [{"input": "1", "target": "1"}, *PAIRS]  # of two lengths, so masks are planned
    assert finetune(model, rows, batch_size=4, gradient_accumulation=2).plan == planned


def run_python(code: str) -> str:
    root = Path(offloadkit.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    return done.stdout


@pytest.mark.slow
def test_public_names_are_there_and_stay_and_the_trainers_load_transformers_only_when_asked_for() -> None:
    code = (
        "import sys, offloadkit; print('transformers' in sys.modules);"
        "assert all(hasattr(offloadkit, name) for name in offloadkit.__all__);"
        "print('transformers' in sys.modules, offloadkit.OffloadTrainer.__mro__[1].__name__);"
        "import offloadkit.doors.finetuning, offloadkit.doors.planning, offloadkit.planner;"
        "print(callable(offloadkit.plan), callable(offloadkit.finetune))"
    )
    assert run_python(code).split() == ["False", "True", "OffloadTrainerMixin", "True", "True"]
    with pytest.raises(AttributeError, match="no attribute 'Monitr'"):
        _ = offloadkit.Monitr


def test_a_model_by_name_gets_a_head_for_the_labels_of_the_rows(tmp_path: Path) -> None:
    """The displayed plan assumed two classes; the rows have three."""
    folder = save_config(llama_config(architectures=["LlamaForSequenceClassification"]), tmp_path / "config")
    word_tokenizer().save_pretrained(folder)
    rows = [{"text": f"the {word} sat", "label": label} for word, label in (("cat", "a"), ("dog", "b"), ("tree", "c"))]
    result = offloadkit.finetune(
        folder, rows * 2, init="random", output_dir=tmp_path / "out", batch_size=2, max_steps=2, save_strategy="no"
    )
    assert result.model.config.num_labels == 3
    assert result.plan.num_parameters == sum(weight.numel() for weight in result.model.parameters())
