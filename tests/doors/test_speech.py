"""`finetune` on rows of sound and text: a tiny Whisper learns the names of tones."""

from __future__ import annotations

import io
import json
import logging
import sys
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import datasets
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSpeechSeq2Seq,
    AutoProcessor,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)
from typer.testing import CliRunner

import offloadkit
from offloadkit import OffloadConfig, Placement
from offloadkit.doors.cli import app
from offloadkit.errors import ConfigError, DataError, ModelError
from offloadkit.hf.columns import BY_NAME
from offloadkit.hf.speech import prepare_speech
from tests.runs import check_resumed, losses
from tests.speech import RATE, START, model, processor, rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speech") / "whisper"
    model().save_pretrained(path)
    processor().save_pretrained(path)
    return path


OPTIONS: dict[str, Any] = {"batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1, "monitor": False}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForSpeechSeq2Seq.from_pretrained(folder).state_dict()


def by_transformers(path: Path, folder: Path, steps: int) -> list[float]:
    """Losses of the same rows by transformers' Trainer, with the collator of its own examples."""
    own: Any = AutoProcessor.from_pretrained(folder)
    own.tokenizer.pad_token = own.tokenizer.eos_token

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        arrays = [row["audio"]["array"] for row in batch]
        features = own.feature_extractor(arrays, sampling_rate=RATE, return_tensors="pt")["input_features"]
        padded = own.tokenizer.pad(own.tokenizer([row["text"] for row in batch]), return_tensors="pt")
        labels = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
        assert (labels[:, 0] == START).all()
        return {"input_features": features, "labels": labels[:, 1:]}

    args = Seq2SeqTrainingArguments(
        output_dir=str(path), per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1, max_steps=steps,
        use_cpu=True, report_to="none", remove_unused_columns=False, save_strategy="no",
        train_sampling_strategy="sequential", lr_scheduler_type="constant",
    )  # fmt: skip
    plain: Any = AutoModelForSpeechSeq2Seq.from_pretrained(folder)
    trainer = Seq2SeqTrainer(plain, args, train_dataset=rows(), data_collator=collate)  # type: ignore[arg-type]
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_whisper_learns_as_by_transformers_trainer(folder: Path, tmp_path: Path) -> None:
    how = OPTIONS | {"train_sampling_strategy": "sequential", "lr_scheduler_type": "constant"}
    result = offloadkit.finetune(
        folder, rows(), eval_dataset=rows(2), output_dir=tmp_path / "ours", max_steps=16, **how
    )
    ours = losses(result)
    assert ours == pytest.approx(by_transformers(tmp_path / "plain", folder, 16), rel=1e-4)
    assert ours[-1] < 0.5 * ours[0]
    assert result.metrics["eval_loss"] < 0.5 * ours[0]
    assert [sample.target for sample in result.samples] == ["high pitch", "low"]
    assert result.plan.rows is not None
    assert result.plan.rows.input_length == 100
    assert result.plan.rows.target_length == len("high pitch") + 2
    saved: Any = AutoProcessor.from_pretrained(result.model_dir)
    assert saved.feature_extractor.n_samples == RATE
    card = (result.model_dir / "README.md").read_text()
    assert "import AutoModelForSpeechSeq2Seq, AutoProcessor" in card
    assert "100 frames + 12 tokens" in card
    assert weights(result.model_dir).keys() == model().state_dict().keys()


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(folder: Path, tmp_path: Path) -> None:
    check_resumed(folder, rows(), tmp_path, weights, OPTIONS)


@pytest.mark.slow
def test_a_frozen_encoder_stays_frozen_in_a_resumed_run(folder: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = OPTIONS | {"freeze": "encoder", "save_steps": 2}
    offloadkit.finetune(folder, rows(), output_dir=tmp_path, max_steps=2, **how)
    result = offloadkit.finetune(folder, rows(), output_dir=tmp_path, max_steps=4, resume=True, **how)
    before, after = weights(folder), weights(result.model_dir)
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {name for name in before if not name.startswith("model.encoder.")}


@pytest.mark.slow
def test_two_placements_and_half_precision_give_equal_bits(folder: Path, tmp_path: Path) -> None:
    found = []
    for name, placement in (("kept", Placement()), ("away", Placement(weights="ram", activations="checkpoint"))):
        offload = OffloadConfig(working_dtype="bf16", placement=placement)
        run = offloadkit.finetune(folder, rows(), output_dir=tmp_path / name, max_steps=2, offload=offload, **OPTIONS)
        found.append(weights(run.model_dir))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_the_command_line_trains_on_named_columns(folder: Path, tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(rows(4)).rename_columns({"audio": "clip", "text": "sentence"})
    table.to_parquet(str(tmp_path / "rows.parquet"))
    named = ("--input-column", "clip", "--target-column", "sentence", "--output", str(tmp_path / "out"))
    command = ("train", str(folder), str(tmp_path / "rows.parquet"), "max_steps=1", "--batch-size", "2", *named)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "model" / "tokenizer.json").is_file()


def prepared(data: Any, **options: Any) -> Any:
    how: dict[str, Any] = {"max_target_length": None, "column_options": BY_NAME} | options
    return prepare_speech(data, None, processor(), model().config, torch.float32, **how)[0]


def test_what_is_cut_off_is_told_with_numbers(caplog: pytest.LogCaptureFixture) -> None:
    data = rows(3, seconds=0.5) + rows(1, seconds=2.5)
    with caplog.at_level(logging.WARNING):
        found = prepared(data, max_target_length=6)
    assert "1 of 4 rows have sound longer than the model's window of 1 s and lose 1.5 of all 4.0 s" in caplog.text
    assert "the longest has 2.5 s" in caplog.text
    assert "3 of 4 targets are longer than max_target_length=6" in caplog.text
    assert found.longest_target == 6
    prepared([row | {"text": "a" * 40} for row in data], max_target_length=99)
    assert "4 of 4 targets are longer than the model's 32 positions and lose 40 of all 168" in caplog.text
    assert all(row["labels"][0] == 258 and row["labels"][-1] == 256 for row in found.dataset)


def test_labels_have_no_start_token_and_are_padded_with_100() -> None:
    found = prepared(rows(2))
    batch = found.collator([found.dataset[0], found.dataset[1]])
    assert batch["input_features"].shape == (2, 8, 100)
    tokens = processor().tokenizer("low")["input_ids"]
    assert tokens[0] == START
    assert batch["labels"][1].tolist() == tokens[1:] + [-100] * (len("high pitch") - len("low"))


def test_rows_without_text_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    data = rows(3)
    data[1]["text"] = " "
    with caplog.at_level(logging.WARNING):
        assert len(prepared(data).dataset) == 2
    assert "1 of 3 rows left out" in caplog.text


EMPTY = {"audio": {"array": np.zeros(0, np.float32), "sampling_rate": RATE}, "text": "a"}
STEREO = {"audio": {"array": np.zeros((2, 100), np.float32), "sampling_rate": RATE}, "text": "a"}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([{"text": "a"}], "no column 'audio'. Columns found: text. Name yours by input_column="),
        ([{"audio": 3, "text": "a"}], "holds Value('int64'), not sound"),
        ([rows(1)[0] | {"text": None}], "row 0 has no value in 'text'"),
        ([*rows(1), EMPTY], "row 1 has no sound in 'audio'"),
        ([STEREO], "row 0 has sound of the shape (2, 100)"),
        ([rows(1)[0] | {"text": ""}], "none of the 1 rows teaches anything"),
        (lambda: iter(rows(1)), "streams of sound are not supported"),
    ],
)
def test_rows_that_cannot_be_learned_are_refused(data: Any, told: str) -> None:
    with pytest.raises(DataError) as error:
        prepared(data)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (rows(1, rate=8000), "has 8,000 samples a second, and the model hears 16,000"),
        ([{"audio": "a.wav", "text": "a"}], "holds encoded sound, and the model hears 16,000"),
        ([{"audio": b"RIFF", "text": "a"}], "holds encoded sound"),
    ],
)
def test_sound_that_must_be_decoded_or_resampled_names_the_package(
    monkeypatch: pytest.MonkeyPatch, data: Any, told: str
) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    with pytest.raises(DataError) as error:
        prepared(data)
    assert told in str(error.value)
    assert "pip install torchcodec" in str(error.value)


class WavDecoder:
    """What `datasets` uses of torchcodec's `AudioDecoder`, for WAV files, with linear resampling."""

    decoded: ClassVar[list[int]] = []
    """Samples of each sound that was decoded."""

    def __init__(self, source: Any, *, sample_rate: int | None, **options: Any) -> None:
        with wave.open(io.BytesIO(source) if isinstance(source, bytes) else source) as file:
            own, count = file.getframerate(), file.getnframes()
            samples = np.frombuffer(file.readframes(count), np.int16) / np.float32(32768)
        self.rate, self.metadata = sample_rate or own, SimpleNamespace(duration_seconds=count / own)
        self.data = torch.from_numpy(
            np.interp(np.arange(count * self.rate // own) * own / self.rate, range(count), samples)
        )

    def get_all_samples(self) -> Any:
        self.decoded.append(len(self.data))
        return SimpleNamespace(data=self.data[None])


class WavEncoder:
    def __init__(self, samples: torch.Tensor, *, sample_rate: int) -> None:
        self.samples, self.rate = samples, sample_rate

    def to_file_like(self, file: Any, **options: Any) -> None:
        with wave.open(file, "wb") as written:
            written.setnchannels(1)
            written.setsampwidth(2)
            written.setframerate(self.rate)
            written.writeframes((self.samples * 32767).to(torch.int16).numpy().tobytes())


@pytest.mark.parametrize("kind", ["path", "bytes", "Audio", "array"])
def test_sound_is_decoded_and_resampled_by_datasets(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchcodec needs FFmpeg, so `datasets` has a decoder and an encoder of WAV files instead."""
    decoders: Any = SimpleNamespace(AudioDecoder=WavDecoder, VideoDecoder=type("VideoDecoder", (), {}))
    encoders: Any = SimpleNamespace(AudioEncoder=WavEncoder)
    modules = {"torchcodec": SimpleNamespace(), "torchcodec.decoders": decoders, "torchcodec.encoders": encoders}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "datasets.features._torchcodec", raising=False)
    monkeypatch.setattr(datasets.config, "TORCHCODEC_AVAILABLE", True)
    data, slow, values = rows(2), rows(2, rate=RATE // 2), []
    for index, row in enumerate(slow):
        path = tmp_path / f"{index}.wav"
        with path.open("wb") as file:
            WavEncoder(torch.from_numpy(row["audio"]["array"]), sample_rate=RATE // 2).to_file_like(file)
        values.append({"path": str(path), "Audio": str(path), "bytes": path.read_bytes(), "array": row["audio"]}[kind])
    made = datasets.Dataset.from_dict({"audio": values, "text": [row["text"] for row in data]})
    WavDecoder.decoded.clear()
    found = prepared(made.cast_column("audio", datasets.Audio()) if kind == "Audio" else made).dataset
    assert WavDecoder.decoded == [], "headers say how long sounds are"
    for row in (0, 1):
        samples = found.sounds[row]
        assert len(samples) == len(data[row]["audio"]["array"])
        assert np.abs(samples - data[row]["audio"]["array"])[:-1].max() < (0.02 if row else 0.3)
        assert found[row]["input_features"].shape == (8, 100)


def test_other_processors_and_options_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="16 mel bins x 100 frames, and the model takes 8 x 100"):
        prepare_speech(
            rows(1), None, processor(16), model().config, torch.float32, max_target_length=None, column_options=BY_NAME
        )
    options: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"tokenizer": "byte"}, ConfigError, "must be the processor of a speech model"),
        ({"max_input_length": 50}, ConfigError, "max_input_length=50 is for text"),
        ({"template": "{audio}"}, ConfigError, "pass input_column="),
        ({"baseline": "measure"}, ConfigError, "baseline='measure' is for text"),
        ({"engine": "deepspeed"}, ConfigError, "engine='deepspeed' is for text|deepspeed is not installed|pip install"),
        ({"label_smoothing_factor": 0.1}, ConfigError, "label_smoothing_factor=0.1 is for text"),
        ({"packing": True}, ConfigError, "packing=True"),
    ]
    for given, kind, told in options:
        with pytest.raises(kind, match=told):
            offloadkit.finetune(folder, rows(1), output_dir=tmp_path / "out", batch_size=1, **given)
    with pytest.raises(ModelError, match="pass tokenizer= its processor"):
        offloadkit.finetune(model(), rows(1), output_dir=tmp_path / "out", batch_size=1)


def test_a_plan_is_for_the_window_and_the_longest_target(folder: Path) -> None:
    made = offloadkit.plan(folder, batch_size=3, max_target_length=500)
    assert made.rows is not None
    assert (made.rows.input_length, made.rows.target_length) == (100, 32)
    assert json.loads((folder / "config.json").read_text())["max_target_positions"] == 32
